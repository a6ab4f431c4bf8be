"""Tests that sums of two stage replicas start as soon as both are ready, and cannot hang."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile, lower
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import normalize_tied_stages
from schedir.ir.program import Program, Stream
from schedir.schedules import chimera, dualpipe
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_algebra import Schedule
from schedir.verify.check import check
from tests.laws import make_shape

# Models in which reductions have their own queue.
MODELS_WITH_REDUCTION_QUEUE: tuple[ProgressModel, ...] = (
    "per_edge",
    "per_pair",
    "per_device",
)


def move_sums_to_end(program: Program) -> Program:
    """Move the sums of stage replicas, in the order of stages, just before their first use."""
    streams = []
    for stream in program.streams:
        sums = stream.op == Opcode.ReduceReplicatedStages
        words = stream.words[~sums]
        after = int(np.isin(stream.op[~sums], (Opcode.ReduceTied, Opcode.OptimizerStep)).argmax())
        streams.append(Stream(np.insert(words, after, np.sort(stream.words[sums]))))
    return replace(program, streams=tuple(streams))


def compute_span(
    program: Program, costs: Costs, progress_model: ProgressModel, *, blocking_hosts: bool
) -> float:
    check(program, progress_model, blocking_hosts=blocking_hosts)
    return float(
        compute_earliest_times(
            Graph(program, progress_model, blocking_hosts=blocking_hosts), costs
        ).end.max()
    )


@pytest.mark.parametrize("schedule", [chimera, dualpipe])
@pytest.mark.parametrize("P", [2, 4, 6])
def test_earlier_replica_sum_overlaps_compute(P: int, schedule: Schedule) -> None:
    """The earlier sum overlaps with the remaining compute."""
    costs = Costs(reduce_replicated_stages=0.5)
    program = compile(schedule, make_shape(schedule, P, 2 * P), costs=costs)
    for model in MODELS_WITH_REDUCTION_QUEUE:
        free_span = compute_span(program, Costs(), model, blocking_hosts=False)
        for blocks in (False, True):
            assert compute_span(program, costs, model, blocking_hosts=blocks) == free_span + 0.5
        assert (
            compute_span(move_sums_to_end(program), costs, model, blocking_hosts=False)
            == free_span + 1
        )


def compile_mirrored(
    ranks: int, units: int, schedule: Schedule | str, costs: Costs, tied: bool
) -> Program:
    """Return a program with two directions."""
    shape = PipelineShape(ranks, 2 * units * ranks, placement="mirror")
    if not isinstance(schedule, str):
        return compile(schedule, shape, costs=costs, tied_weights=tied)
    draft = greedy_schedule(shape, schedule, lambda rank: 2 + (ranks + rank) // 2, costs)
    return lower(replace(draft, tied_weights=normalize_tied_stages(tied, shape)), costs)


amounts = st.sampled_from([0.0, 0.25, 1.0, 3.0, 10.0])


@settings(max_examples=60)
@given(
    st.sampled_from([2, 4, 6]), st.integers(1, 2),
    st.sampled_from([chimera, dualpipe, "FIW", "BF"]),
    st.booleans(), st.tuples(amounts, amounts, amounts, amounts),
    st.lists(st.floats(0.1, 4), min_size=24, max_size=24),
)  # fmt: skip
def test_early_replica_sums_never_lengthen_step(
    ranks: int,
    units: int,
    schedule: Schedule | str,
    tied: bool,
    reductions: tuple[float, float, float, float],
    times: list[float],
) -> None:
    holders, grads, tied_, send = reductions
    F, I, W = (tuple(times[k::3][:ranks]) for k in range(3))
    costs = Costs(
        F=F,
        I=I,
        W=W,
        send=send,
        reduce_replicated_stages=holders,
        reduce_grads=grads,
        reduce_tied=tied_,
    )
    # Different times of two stage replicas may delay a reduction of only one of them.
    slack = grads * isinstance(schedule, str) + 1e-9
    program = compile_mirrored(ranks, units, schedule, costs, tied)
    sums_at_end = move_sums_to_end(program)
    for model in MODELS:
        for blocks in (False, True):
            early_span = compute_span(program, costs, model, blocking_hosts=blocks)
            if model in MODELS_WITH_REDUCTION_QUEUE:
                assert (
                    early_span
                    <= compute_span(sums_at_end, costs, model, blocking_hosts=blocks) + slack
                )


def test_data_parallel_sum_order_is_unchanged() -> None:
    """With dp=2, the sums over stage replicas stay at the end."""
    program = compile(chimera, make_shape(chimera, 4, 8), dp=2)
    assert program == move_sums_to_end(program)
    assert compile(chimera, make_shape(chimera, 4, 8)) != move_sums_to_end(program)
