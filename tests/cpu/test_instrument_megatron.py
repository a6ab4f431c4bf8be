"""Tests of schedir.instrument with Megatron-LM's real schedules over Gloo, on a CPU."""

from __future__ import annotations

import re
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import schedir
from schedir import PipelineShape, schedules
from schedir.errors import DeadlockError
from schedir.transports.local_processes import run_processes
from tests.cpu.megatron_on_cpu import (
    WIDTH,
    import_megatron,
    initialize_megatron,
    make_chunks,
    skip_without_megatron,
)
from tests.cpu.trainer_traces import OTHER_MODELS, Runs, import_traces, list_computes, profile_step
from tests.museum.cases import cases

skip_without_megatron()


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    import_megatron()


RANKS, LENGTH = 4, 3
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
# Chunks, microbatches, and settings of Megatron, by name.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1F1B": (1, 6, {}),
    "1F1B, few": (1, 2, {}),
    "interleaved": (2, 8, {}),
    "interleaved, larger groups": (2, 10, {"microbatch_group_size_per_vp_stage": 6}),
    "overlapped": (2, 8, OVERLAPPED),
    "overlapped, all": (2, 4, OVERLAPPED | {"overlap_p2p_comm_warmup_flush": True}),
    "one by one": (1, 5, {"batch_p2p_comm": False}),
}
# This run posts receives early, and sends of the other direction wait for them. It finishes if each
# pair of ranks has its own queue, as for NCCL's unbatched messages without a bound device.
DEADLOCKS = {
    ("overlapped, all", model) for model in ("per_direction", "per_device", "blocking_serial")
}


def _forward_step(batches: Any, model: Any) -> Any:
    return model(next(batches)), lambda output: (output.sum(), {})


def _run_step(
    chunks: int,
    microbatches: int,
    settings: dict[str, Any],
    forward: bool = False,
    ranks: int = RANKS,
) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    parts: list[torch.nn.Module] = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(chunks)]
    model = make_chunks(RANKS, parts, **settings)
    data = [iter([torch.ones(LENGTH, 1, WIDTH)] * microbatches) for _ in range(chunks)]
    get_forward_backward_func(ranks, chunks if chunks > 1 else None)(
        forward_step_func=_forward_step, data_iterator=data, model=model,
        num_microbatches=microbatches, seq_length=LENGTH, micro_batch_size=1, forward_only=forward,
    )  # fmt: skip


def profile_runs(rank: int, folder: str) -> dict[str, list[str]]:
    """Return the ranges of each of RUNS, of forward-only runs, and of an uninstrumented run."""
    ranges: dict[str, list[str]] = {}
    with initialize_megatron(RANKS):
        with schedir.instrument("megatron"):
            for name, run_arguments in RUNS.items():
                ranges[name] = profile_step(
                    partial(_run_step, *run_arguments), f"{folder}/{name}-{rank}.json"
                )
            forward = partial(_run_step, 2, 4, {}, forward=True)
            ranges["forward"] = profile_step(forward, f"{folder}/forward-{rank}.json")
            alone = partial(_run_step, 1, 2, {}, ranks=1)
            ranges["alone"] = profile_step(alone, f"{folder}/alone-{rank}.json")
        ranges["plain"] = profile_step(partial(_run_step, 1, 4, {}), f"{folder}/plain-{rank}.json")
    return ranges


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder of the traces, and the ranges of each rank."""
    folder = tmp_path_factory.mktemp("traces")
    # Forks of this process have Megatron loaded. It keeps its process groups in its modules.
    forks = get_context("fork")
    return folder, run_processes(profile_runs, RANKS, str(folder), context=forks, timeout=240)


@pytest.mark.parametrize("name", RUNS)
def test_traces_of_megatron_equal_built_in_schedules(name: str, runs: Runs) -> None:
    """Megatron's schedules have the same computes as ours, and their messages are complete."""
    chunks, microbatches, settings = RUNS[name]
    program = import_traces(runs[0], name)
    shape = PipelineShape(RANKS, microbatches, chunks)
    assert program.shape == shape
    if not settings.get(
        "microbatch_group_size_per_vp_stage"
    ):  # our schedule has rounds of one size
        built_in = schedules.interleaved if chunks > 1 else schedules.one_f_one_b
        assert list_computes(program) == list_computes(schedir.compile(built_in, shape))
    for model in (m for m in OTHER_MODELS if (name, m) not in DEADLOCKS):
        schedir.check(program, progress_model=model)
    for model in (m for m in OTHER_MODELS if (name, m) in DEADLOCKS):
        with pytest.raises(DeadlockError):
            schedir.check(program, progress_model=model)


def test_museum_program_equals_trace_of_megatron(runs: Runs) -> None:
    (case,) = (case for case in cases() if case.name == "megatron_warmup_flush")
    assert (
        import_traces(runs[0], "overlapped, all").streams == schedir.from_text(case.program).streams
    )


def test_every_message_is_posted_once_and_every_receive_has_wait(runs: Runs) -> None:
    """With `overlap_p2p_comm` Megatron does not wait for the last send."""
    for rank in runs[1]:
        for name in (*RUNS, "forward"):
            names = [word for mark in rank[name] for word in re.findall(r"\w+", mark)]
            posted = [word for word in names if re.match(r"\d+(SEND|RECV)", word)]
            waits = [word.replace("WAIT_", "") for word in names if "WAIT" in word]
            assert len({*posted}) == len(posted) and len({*waits}) == len(waits)
            without_wait = {*posted} - {*waits}
            assert {*waits} <= {*posted} and not any("RECV" in word for word in without_wait)
            assert len(without_wait) <= name.startswith("overlapped")
        assert rank["plain"] == []


def test_batched_messages_have_one_range(runs: Runs) -> None:
    """`batch_p2p_comm` issues four messages as one group. Without it, messages are single."""
    _, ranks = runs
    assert "(5SEND_B3;5RECV_F4;1SEND_F7;1RECV_B0)BATCH_P2P" in ranks[1]["interleaved"]
    for name in ("one by one", "overlapped", "overlapped, all"):
        assert not any("BATCH_P2P" in mark for rank in ranks for mark in rank[name])
    batched = [mark for mark in ranks[3]["1F1B, few"] if "BATCH_P2P" in mark]
    assert batched == ["(3SEND_B0;3RECV_F1)BATCH_P2P"]
    assert all(rank["alone"] == ["0F0", "0B0", "0F1", "0B1", "0REDUCE_GRAD"] for rank in ranks)
    assert ranks[3]["interleaved"][-2:] == ["3REDUCE_GRAD", "3REDUCE_GRAD>7REDUCE_GRAD"]
