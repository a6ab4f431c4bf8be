"""Tests that events order all work of a process over NCCL, so that no accesses race.

The processes are tensor-parallel and data-parallel, which virtual ranks of one process cannot be.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models.moe_config import MoEConfig
from schedir.runtime import step_rollback
from schedir.runtime.parameters import buckets
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.schedules import chimera, gpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.tensor_parallel import mappings
from schedir.transports.gloo import GlooTransport
from schedir.transports.nccl import count_streams
from schedir.transports.process_transport import ProcessTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.nccl_stand_in import Kind, NcclStandIn
from tests.cpu.race_detector import RaceDetector
from tests.cpu.tiny_stages import (
    CONTEXT,
    HIDDEN,
    Case,
    gpt_executor,
    gradients_by_stage,
    have_same_bits,
    make_replica_batch,
    moe_executor,
    split_1f1b,
)
from tests.cpu.virtual_gpu import install_virtual_gpu

KINDS: list[Kind] = cases(["recv", "dX", "all_to_all"], ["send", "all_reduce", "all_gather"])
EXPERTS = MoEConfig(
    vocab=32, layers=2, hidden=HIDDEN, heads=2, context=CONTEXT, tied=False, experts=4
)
CaseResult = tuple[list[str], Counter[Kind], bool, int]
BUCKET = 2048  # bytes, so that each stage has several buckets of one or more gradients


SHARED = Case(one_f_one_b, PipelineShape(2, 3), tp=2, buffer_sharing="minimal")
SPLIT = SHARED._replace(schedule=split_1f1b, record=True)
PLAIN = Case(one_f_one_b, PipelineShape(2, 4), tp=2)
UPDATES = PipelineShape(2, 8, optimizer_steps=2, weight_delay=1)
CHUNKS, MIRROR = PipelineShape(2, 4, 2), PipelineShape(2, 4, placement="mirror")
CASES = dict(
    cases(
        [
            ("split, slots shared", SPLIT),
            ("replicas, split", SPLIT._replace(tp=1, dp=2)),
            ("experts", SHARED._replace(tp=1, dp=2, ep=2)),
        ],
        [
            ("1f1b, slots shared", SHARED),
            ("interleaved, slots shared", SHARED._replace(schedule=interleaved, shape=CHUNKS)),
            ("two holders", SHARED._replace(schedule=chimera, shape=MIRROR)),
            ("updates", Case(pipedream_2bw, UPDATES, dp=2, clip=False)),
            ("1f1b", PLAIN),
            ("gpipe, slots enough",
             PLAIN._replace(schedule=gpipe, buffer_sharing="latency_preserving")),
            ("1f1b, slots shared, recorded", SHARED._replace(record=True)),
            ("split", PLAIN._replace(schedule=split_1f1b)),
            ("interleaved", Case(interleaved, CHUNKS, tp=2, record=True)),
            ("replicas", PLAIN._replace(tp=1, dp=2)),
        ],
    )
)  # fmt: skip


REPLICAS = [name for name, case in CASES.items() if case.dp > 1 and case.ep == 1]


def _run_step(
    transport: ProcessTransport, case: Case, program: Program, *, only_one: bool = False
) -> Any:
    """Return the gradients of a second step. Over NCCL, a warm-up step precedes the first step.

    With `only_one`, return the gradients of a first step without a warm-up step.
    """
    make = partial(moe_executor, cfg=EXPERTS) if case.ep > 1 else gpt_executor
    executor = make(program, transport, lr=1e-2, **case.get_options())
    if isinstance(transport, NcclStandIn):
        transport.follow(executor)
    executor.runner.is_warm |= only_one
    for seed in range(1 if only_one else 2):
        executor.step(*make_replica_batch(program, transport, seed))
    return gradients_by_stage(executor)


def _run_case(case: Case, unwaited: Kind | None, is_early: bool = False) -> CaseResult:
    """Return the races of two steps, the issued work, equality with Gloo, and uncounted streams.

    Uncounted streams have work, but `count_streams` does not count them. Streams of NCCL are left
    out. If `is_early`, a bucket starts before its last gradient is complete. Gradients of mutants
    are not compared.
    """
    program = case.compile()
    with pytest.MonkeyPatch.context() as patch:
        gpu = install_virtual_gpu(patch)
        patch.setattr(buckets, "BUCKET_BYTES", BUCKET)
        patch.setattr(step_rollback, "WARM_UP_STEPS", 1)  # the others would use the same streams
        if is_early:
            missing = GradientReduction._get_pending_grads
            patch.setattr(
                GradientReduction, "_get_pending_grads", lambda self: {*[*missing(self)][1:]}
            )
            patch.setattr(GradientReduction, "_require_unwritten", lambda self: None)
        with RaceDetector(gpu) as races:
            transport = NcclStandIn(program, gpu, races, unwaited)
            patch.setattr(mappings, "_start_all_reduce", transport.start_sum)
            is_mutant = is_early or unwaited is not None
            actual = _run_step(transport, case, program, only_one=is_mutant)
        races_found = [*races.found]
    expected = actual if is_mutant else _run_step(GlooTransport(program), case, program)
    are_equal = have_same_bits(actual, expected)
    counted = count_streams(program, transport.rank, "per_edge")
    nccl_streams = (
        counted["reductions"] - 1 + counted["messages"] // 2 + 2 * ((case.tp > 1) + (case.ep > 1))
    )
    used_streams = sum(stream.seen[stream] > 0 for stream in gpu.streams) + nccl_streams
    unused_streams = 0 if case.record else counted["records"]
    return (
        sorted(set(races_found)),
        transport.uses,
        are_equal,
        used_streams + unused_streams - sum(counted.values()),
    )


def _run_all_cases(rank: int) -> tuple[dict[str, CaseResult], dict[str, CaseResult]]:
    """Run every case, mutants without one kind of wait, and mutants with early buckets.

    All run in one process group, because a start takes long.
    """
    mutants = {kind: CASES["experts"] if kind == "all_to_all" else SHARED for kind in KINDS}
    return (
        {name: _run_case(case, None) for name, case in CASES.items()},
        {
            **{kind: _run_case(mutant, kind) for kind, mutant in mutants.items()},
            **{name: _run_case(CASES[name], None, is_early=True) for name in REPLICAS},
        },
    )


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, CaseResult], dict[str, CaseResult]]]:
    return run(_run_all_cases, 4, limit=400)


@pytest.mark.parametrize("name", CASES)
def test_cases_have_no_races(name: str, ranks: list[Any]) -> None:
    for races, uses, are_equal, uncounted in (results[name] for results, _ in ranks):
        assert not races
        assert are_equal
        assert uncounted == 0
        assert uses["send"] and uses["recv"] and uses["all_reduce"]
        case = CASES[name]
        assert bool(uses["dX"]) == (case.tp > 1) and bool(uses["all_to_all"]) == (case.ep > 1)
        assert bool(uses["all_gather"]) == (case.tp > 1 or case.ep > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_wait_is_found_as_race(kind: Kind, ranks: list[Any]) -> None:
    assert any(kind in race for _, mutants in ranks for race in mutants[kind][0])


@pytest.mark.parametrize("name", REPLICAS)
def test_early_bucket_is_found_as_race(name: str, ranks: list[Any]) -> None:
    for _, mutants in ranks:
        assert any("beside all_reduce" in race for race in mutants[name][0])
