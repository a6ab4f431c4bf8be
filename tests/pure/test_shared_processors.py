"""Tests of ranks that divide processors fairly, and never wait without need."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, Timeline, compile, schedules, simulate
from schedir.analysis.dependency_graph import Graph
from schedir.compiler.compile import lower
from schedir.errors import CostsError, UsageError
from schedir.ir.isa.instructions import FORWARD
from schedir.ir.program import Program
from schedir.predict.cpu_contention import CPU_LANES, simulate_on_cpus
from tests import strategies

PROCESSORS = st.sampled_from([0.5, 1, 1.5, 2, 3, 7])


@st.composite
def programs_with_costs(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Draw a lowered program, and costs that are integers."""
    draft = draw(strategies.compute_programs())
    costs = draw(strategies.costs(draft.shape))
    return lower(draft, costs, "per_edge"), costs


def compute_processor_time(timeline: Timeline, processors: float) -> Any:
    """Return the processor time of each compute until its end, and the total, from all speeds."""
    spans = timeline.spans
    computes = np.isin(spans["lane"], CPU_LANES)
    times = np.unique([spans["start"], spans["end"]])
    total, processor_times = 0.0, np.zeros(len(spans))
    for a, b in pairwise(times.tolist()):
        running = computes & (spans["start"] <= a) & (spans["end"] >= b)
        if running.any():
            processor_times[running] += (b - a) * min(1.0, processors / running.sum())
            total += (b - a) * min(processors, running.sum())
    return processor_times, total, computes


@given(st.data())
def test_processors_are_shared_fairly(data: st.DataObject) -> None:
    program, costs = data.draw(programs_with_costs())
    processors = data.draw(PROCESSORS)
    alone = simulate(program, costs, progress_model="per_edge", blocking_hosts=True)
    shared = simulate_on_cpus(program, costs, processors)
    processor_times, total, computes = compute_processor_time(shared, processors)
    cost = alone.spans["end"] - alone.spans["start"]
    np.testing.assert_allclose(processor_times[computes], cost[computes], atol=1e-9)
    took = shared.spans["end"] - shared.spans["start"]
    np.testing.assert_allclose(took[~computes], cost[~computes], atol=1e-9)
    work = cost[computes].sum()
    assert total == pytest.approx(work)
    assert max(alone.span, work / processors) <= shared.span + 1e-9
    # A processor is idle only while the longest path continues (Graham, "Bounds on multiprocessing
    # timing anomalies", 1969).
    assert shared.span <= work / processors + alone.span / min(1, processors) + 1e-9
    latest = Graph.from_program(program, "per_edge", blocking_hosts=True).find_last_predecessors(
        shared.spans["end"]
    )
    ended = np.where(latest < 0, 0.0, shared.spans["end"][latest])
    np.testing.assert_allclose(shared.spans["start"], ended, atol=1e-9)


@given(st.data())
def test_enough_processors_change_nothing(data: st.DataObject) -> None:
    program, costs = data.draw(programs_with_costs())
    alone = simulate(program, costs, progress_model="per_edge", blocking_hosts=True)
    shared = simulate_on_cpus(program, costs, program.shape.ranks)
    assert shared.spans.tolist() == alone.spans.tolist()


def test_ranks_speed_up_while_other_waits() -> None:
    """Two ranks use one processor, and each has half of it while both compute."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, 2))
    timeline = simulate_on_cpus(program, Costs(F=1, B=2), 1)
    assert timeline.span == 2 * 2 * 3  # the processor is never idle
    forwards = [i for i in timeline.spans[timeline.spans["rank"] == 0] if i["op"] == FORWARD]
    # The first forward runs alone, and the second together with the other rank's first.
    assert [(i["start"], i["end"]) for i in forwards] == [(0, 1), (1, 3)]


@pytest.mark.parametrize("processors", [0, -1, float("inf"), float("nan"), True, "2"])
def test_invalid_processor_count_is_refused(processors: Any) -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 2))
    with pytest.raises(UsageError, match="must be a number > 0"):
        simulate_on_cpus(program, Costs(F=1, B=2), processors)


def test_too_large_costs_are_refused() -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 8))
    with pytest.raises(CostsError, match="add up to more than"):
        simulate_on_cpus(program, Costs(F=1e308, B=1e308), 1)
