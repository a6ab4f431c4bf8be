"""Tests of bubbles, memory and the critical path of Timelines."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile, lower
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import gpipe, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, overlapped_pair
from schedir.testing import compute_programs
from tests.strategies import costs


def assert_no_gap(timeline: Timeline, path: np.ndarray) -> None:
    """Assert that the path starts at 0, and that each node starts when the previous one ends."""
    spans = timeline.spans[path]
    assert spans["start"][0] == 0
    assert (spans["start"][1:] == spans["end"][:-1]).all()


@given(compute_programs(), st.data(), st.sampled_from(MODELS))
def test_critical_path_has_no_gap(
    draft: Program, data: st.DataObject, progress_model: ProgressModel
) -> None:
    program = lower(draft)
    timeline = simulate(program, data.draw(costs(draft.shape)), progress_model=progress_model)
    assert_no_gap(timeline, timeline.critical_path)
    assert timeline.spans["end"][timeline.critical_path[-1]] == timeline.span
    position = data.draw(st.integers(0, len(timeline) - 1))
    path = timeline.critical_path_to(position)
    assert_no_gap(timeline, path)
    assert path[-1] == position


@given(compute_programs(ranks=3, microbatches=3), st.data())
def test_critical_path_through_groups_is_monotonic(draft: Program, data: st.DataObject) -> None:
    timeline = simulate(group_opposite_transfers(lower(draft)), data.draw(costs(draft.shape)))
    path = timeline.critical_path
    assert timeline.spans["start"][path[0]] == 0
    assert (timeline.spans["start"][path[1:]] >= timeline.spans["end"][path[:-1]]).all()


def list_awaited(graph: Graph, position: int) -> list[int]:
    """Return all instructions that must end before one starts, also for its partners."""
    enter = graph.entry_exit_nodes[0]
    meets = np.flatnonzero(graph.node == graph.node[position])
    members = np.flatnonzero(np.isin(enter, enter[meets]))
    before = np.concatenate([graph.needs[:, members].reshape(-1), graph.queue_predecessor[members]])
    return sorted({*before[before >= 0].tolist()} - {*members.tolist()})


@given(compute_programs(), st.data(), st.sampled_from(MODELS), st.booleans())
def test_critical_predecessor_ends_last(
    draft: Program, data: st.DataObject, progress_model: ProgressModel, grouped: bool
) -> None:
    program = group_opposite_transfers(lower(draft)) if grouped else lower(draft)
    timeline = simulate(
        program,
        data.draw(costs(draft.shape)),
        progress_model="per_edge" if grouped else progress_model,
    )
    end = timeline.spans["end"]
    for position, latest in enumerate(timeline.critical_predecessor.tolist()):
        before = list_awaited(timeline.graph, position)
        assert latest == max(before, key=lambda k: (end[k], -k), default=-1)


def test_spans_have_program_order() -> None:
    program = compile(gpipe, PipelineShape(2, 3), tp=2)
    timeline = simulate(program, Costs(send=0.5))
    assert len(timeline.spans) == len(program)
    for rank, stream in enumerate(program.streams):
        for index, instr in enumerate(stream):
            assert timeline.instruction_at(rank, index)[0] == instr
    assert timeline.spans.dtype.itemsize <= 32


def test_in_flight_curve_of_1f1b() -> None:
    timeline = simulate(compile(one_f_one_b, PipelineShape(2, 3)), Costs(F=1, B=2))
    times, counts = timeline.count_in_flight(0)
    assert counts.tolist() == [1, 2, 1, 2, 1, 0]
    assert times.tolist() == sorted(times.tolist())
    assert counts.max() == timeline.peak_in_flight[0] == timeline.peak_memory[0]


def test_overlapped_pair_counts_as_busy_once() -> None:
    program = compile(lambda r, P, m: F + (m - 1) * overlapped_pair(F, B) + B, PipelineShape(1, 3))
    timeline = simulate(program, Costs(F=1, B=2, FB=2))
    assert timeline.span == timeline.busy[0] == 1 + 2 * 2 + 2
    assert timeline.bubble == 0
