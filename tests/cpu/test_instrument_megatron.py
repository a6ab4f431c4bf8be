"""Tests of schedir.instrument with Megatron-LM's real schedules over Gloo, on a CPU."""

from __future__ import annotations

import re
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import schedir
from schedir import PipelineShape, schedules
from schedir.errors import DeadlockError
from schedir.transports.local_processes import run_processes
from tests.cpu.megatron_on_cpu import WIDTH, chunks_of, on_cpu
from tests.cpu.trainer_traces import ELSEWHERE, computes, imported, profiled
from tests.museum.cases import cases

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

RANKS, LENGTH = 4, 3
# Chunks, microbatches, and settings of Megatron, by name.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1F1B": (1, 6, {}),
    "1F1B, few": (1, 2, {}),
    "interleaved": (2, 8, {}),
    "interleaved, larger groups": (2, 10, {"microbatch_group_size_per_vp_stage": 6}),
    "overlapped": (2, 8, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "overlapped, all": (
        2,
        4,
        {
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "overlap_p2p_comm_warmup_flush": True,
        },
    ),
    "one by one": (1, 5, {"batch_p2p_comm": False}),
}
# This run posts receives early, and sends of the other direction wait for them. It finishes if each
# pair of ranks has its own queue, as for NCCL's unbatched messages without a bound device.
HANGS = {("overlapped, all", model) for model in ("per_direction", "per_device", "blocking_serial")}


def _forward_step(batches: Any, model: Any) -> Any:
    return model(next(batches)), lambda output: (output.sum(), {})


def _step(
    chunks: int,
    microbatches: int,
    settings: dict[str, Any],
    forward: bool = False,
    ranks: int = RANKS,
) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    parts: list[torch.nn.Module] = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(chunks)]
    model = chunks_of(RANKS, parts, **settings)
    data = [iter([torch.ones(LENGTH, 1, WIDTH)] * microbatches) for _ in range(chunks)]
    get_forward_backward_func(ranks, chunks if chunks > 1 else None)(
        forward_step_func=_forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=microbatches,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward,
    )


def in_megatron(rank: int, folder: str) -> dict[str, list[str]]:
    """Return the ranges of each of RUNS, of forwards alone, and of a run without marks."""
    found: dict[str, list[str]] = {}
    with on_cpu(RANKS):
        with schedir.instrument("megatron"):
            for name, each in RUNS.items():
                found[name] = profiled(partial(_step, *each), f"{folder}/{name}-{rank}.json")
            forward = partial(_step, 2, 4, {}, forward=True)
            found["forward"] = profiled(forward, f"{folder}/forward-{rank}.json")
            alone = partial(_step, 1, 2, {}, ranks=1)
            found["alone"] = profiled(alone, f"{folder}/alone-{rank}.json")
        found["plain"] = profiled(partial(_step, 1, 4, {}), f"{folder}/plain-{rank}.json")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[str]]]]:
    """Return the folder of the traces, and the ranges of each rank."""
    folder = tmp_path_factory.mktemp("traces")
    # Forks of this process have Megatron loaded. It keeps its process groups in its modules.
    forks = get_context("fork")
    return folder, run_processes(in_megatron, RANKS, str(folder), context=forks, timeout=240)


@pytest.mark.parametrize("name", RUNS)
def test_megatron_runs_what_schedir_says(
    name: str, runs: tuple[Path, list[dict[str, list[str]]]]
) -> None:
    """Megatron's schedules have the compute of ours, and their messages are complete."""
    chunks, microbatches, settings = RUNS[name]
    program = imported(runs[0], name)
    shape = PipelineShape(RANKS, microbatches, chunks)
    assert program.shape == shape
    if not settings.get(
        "microbatch_group_size_per_vp_stage"
    ):  # our schedule has rounds of one size
        ours = schedules.interleaved if chunks > 1 else schedules.one_f_one_b
        assert computes(program) == computes(schedir.compile(ours, shape))
    for model in (m for m in ELSEWHERE if (name, m) not in HANGS):
        schedir.check(program, progress_model=model)
    for model in (m for m in ELSEWHERE if (name, m) in HANGS):
        with pytest.raises(DeadlockError):
            schedir.check(program, progress_model=model)


def test_the_museum_has_what_megatron_issues(
    runs: tuple[Path, list[dict[str, list[str]]]],
) -> None:
    (case,) = (case for case in cases() if case.name == "megatron_warmup_flush")
    assert imported(runs[0], "overlapped, all").streams == schedir.from_text(case.program).streams


def test_every_message_is_posted_once_and_every_receive_awaited(
    runs: tuple[Path, list[dict[str, list[str]]]],
) -> None:
    """Of messages posted early, Megatron itself does not wait for the last send."""
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
    """`batch_p2p_comm` issues four messages as one group. Without it, they are single."""
    _, ranks = runs
    assert "(5SEND_B3;5RECV_F4;1SEND_F7;1RECV_B0)BATCH_P2P" in ranks[1]["interleaved"]
    for name in ("one by one", "overlapped", "overlapped, all"):
        assert not any("BATCH_P2P" in mark for rank in ranks for mark in rank[name])
    batched = [mark for mark in ranks[3]["1F1B, few"] if "BATCH_P2P" in mark]
    assert batched == ["(3SEND_B0;3RECV_F1)BATCH_P2P"]
    assert all(rank["alone"] == ["0F0", "0B0", "0F1", "0B1", "0REDUCE_GRAD"] for rank in ranks)
    assert ranks[3]["interleaved"][-2:] == ["3REDUCE_GRAD", "3REDUCE_GRAD>7REDUCE_GRAD"]
