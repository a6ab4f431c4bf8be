"""schedir.instrument and Megatron-LM: its real schedules over Gloo, on a CPU.

What they ask of a GPU, a CPU gives here, not in schedir: `torch.zeros(..., device="cuda")`,
`torch.cuda.current_device()` and `torch.cuda.synchronize()`.
"""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import schedir
from schedir import Plan, schedules
from schedir.analysis.models import MODELS
from schedir.errors import DeadlockError
from tests.cpu.ranges import computes, imported, profiled
from tests.cpu.spawn import run

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

RANKS, WIDTH, LENGTH = 4, 4, 3
# By name: chunks, microbatches, and settings of Megatron's.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1F1B": (1, 6, {}),
    "1F1B, few": (1, 2, {}),
    "interleaved": (2, 8, {}),
    "interleaved, larger groups": (2, 10, {"microbatch_group_size_per_vp_stage": 6}),
    "overlapped": (2, 8, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "overlapped, all": (
        3,
        4,
        {
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "overlap_p2p_comm_warmup_flush": True,
        },
    ),
    "one by one": (1, 5, {"batch_p2p_comm": False}),
}
# Receives are posted ahead there, and sends of the other direction wait behind them: that finishes
# where each pair of ranks has its own queue, as NCCL's unbatched messages have unless they are told
# the device beforehand.
HANGS = {("overlapped, all", "device"), ("overlapped, all", "serial")}


class _OnCPU(TorchFunctionMode):
    """What is to be made on a GPU is made here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Chunk(torch.nn.Module):
    """A stage as Megatron holds it: its input is set before it is called."""

    def __init__(self, config: Any, vp_stage: int | None) -> None:
        super().__init__()
        self.config, self.vp_stage = config, vp_stage
        self.model_type = "encoder_or_decoder"
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.given: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0]

    def forward(self, data: Any) -> Any:
        return self.linear(data if self.given is None else self.given)


def _forward_step(batches: Any, model: Any) -> Any:
    return model(next(batches)), lambda output: (output.sum(), {})


def _model(chunks: int, settings: dict[str, Any]) -> tuple[Any, list[_Chunk]]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=RANKS * chunks,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=lambda *_, **__: None,
        **settings,
    )
    return config, [_Chunk(config, k if chunks > 1 else None) for k in range(chunks)]


def _step(chunks: int, microbatches: int, settings: dict[str, Any], forward: bool = False) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    _, model = _model(chunks, settings)
    data = [iter([torch.ones(LENGTH, 1, WIDTH)] * microbatches) for _ in range(chunks)]
    get_forward_backward_func(RANKS, chunks if chunks > 1 else None)(
        forward_step_func=_forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=microbatches,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward,
    )


def in_megatron(rank: int, folder: str) -> dict[str, list[str]]:
    """The ranges of each of RUNS, of forwards alone, and of a run that is not marked."""
    warnings.simplefilter("ignore")  # of what is not installed beside Megatron
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    found: dict[str, list[str]] = {}
    with _OnCPU():
        with schedir.instrument("megatron"):
            for name, each in RUNS.items():
                found[name] = profiled(partial(_step, *each), f"{folder}/{name}-{rank}.json")
            forward = partial(_step, 2, 4, {}, forward=True)
            found["forward"] = profiled(forward, f"{folder}/forward-{rank}.json")
        found["plain"] = profiled(partial(_step, 1, 4, {}), f"{folder}/plain-{rank}.json")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[str]]]]:
    """The folder of the traces, and the ranges of each rank."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, run(in_megatron, RANKS, str(folder))


@pytest.mark.parametrize("name", RUNS)
def test_megatron_runs_what_schedir_says(
    name: str, runs: tuple[Path, list[dict[str, list[str]]]]
) -> None:
    """The compute of its schedules is that of ours, and their messages complete."""
    chunks, microbatches, settings = RUNS[name]
    program = imported(runs[0], name)
    plan = Plan(RANKS, microbatches, chunks)
    assert program.plan == plan
    if not settings.get("microbatch_group_size_per_vp_stage"):  # ours has rounds of one size
        ours = schedules.interleaved if chunks > 1 else schedules.one_f_one_b
        assert computes(program) == computes(schedir.compile(ours, plan))
    for model in (m for m in MODELS if (name, m) not in HANGS):
        schedir.check(program, model=model)
    for model in (m for m in MODELS if (name, m) in HANGS):
        with pytest.raises(DeadlockError):
            schedir.check(program, model=model)


def test_every_message_is_posted_once_and_every_receive_awaited(
    runs: tuple[Path, list[dict[str, list[str]]]],
) -> None:
    """Of what is posted ahead, Megatron itself leaves the last send without a wait."""
    for rank in runs[1]:
        for name in (*RUNS, "forward"):
            each = [one for mark in rank[name] for one in re.findall(r"\w+", mark)]
            posted = [one for one in each if re.match(r"\d+(SEND|RECV)", one)]
            waits = [one.replace("WAIT_", "") for one in each if "WAIT" in one]
            assert len({*posted}) == len(posted) and len({*waits}) == len(waits)
            lost = {*posted} - {*waits}
            assert {*waits} <= {*posted} and not any("RECV" in one for one in lost)
            assert len(lost) <= name.startswith("overlapped")
        assert rank["plain"] == []


def test_what_is_issued_as_one_is_said_so(
    runs: tuple[Path, list[dict[str, list[str]]]],
) -> None:
    """`batch_p2p_comm` issues four messages as one; without it, they follow each other."""
    _, ranks = runs
    assert "(5SEND_B3;5RECV_F4;1SEND_F7;1RECV_B0)BATCH_P2P" in ranks[1]["interleaved"]
    for name in ("one by one", "overlapped", "overlapped, all"):
        assert not any("BATCH_P2P" in mark for rank in ranks for mark in rank[name])
    batched = [mark for mark in ranks[3]["1F1B, few"] if "BATCH_P2P" in mark]
    assert batched == ["(3SEND_B0;3RECV_F1)BATCH_P2P"]
    assert ranks[3]["interleaved"][-2:] == ["3REDUCE_GRAD", "3REDUCE_GRAD>7REDUCE_GRAD"]
