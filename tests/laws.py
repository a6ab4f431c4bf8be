"""Runs of the schedules at many costs, for tests of their formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from schedir import schedules
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import (
    bitpipe,
    chimera,
    dualpipe,
    dualpipe_v,
    interleaved,
    interleaved_zb,
    looped_bfs,
    looped_dfs,
    zb_v,
)
from schedir.schedules.schedule_algebra import Schedule
from tests.cases import ALL, cases

ZOO: dict[str, Schedule] = {name: getattr(schedules, name) for name in schedules.__all__}
TWO_WAY = (bitpipe, chimera, dualpipe)
LOOPED = (interleaved, interleaved_zb, looped_bfs, looped_dfs)
# F, I, W: equal; W short; I longest; F longest; W longest; W longer than F and I together.
TRIPLES = cases(
    [(1, 1, 1), (3, 3, 2), (2, 3, 1), (4, 1, 2), (2, 2, 3), (1, 1, 4)], [(2, 2, 2), (3, 2, 2)]
)


def make_shape(schedule: Schedule, ranks: int, microbatches: int, v: int = 2) -> PipelineShape:
    """Return a shape with the placement of a schedule."""
    placement, fixed = getattr(schedule, "placed", ("loop", None if schedule in LOOPED else 1))
    return PipelineShape(ranks, microbatches, fixed or v, placement)


def find_min_microbatches(schedule: Schedule, ranks: int) -> int:
    """Return the fewest microbatches that a schedule supports."""
    fill: dict[Schedule, int] = {
        zb_v: 2 * ranks - 1, dualpipe_v: 2 * ranks, dualpipe: 2 * ranks, chimera: 2,
        bitpipe: 2,
    }  # fmt: skip
    return fill.get(schedule, 1)


def simulate_schedule(
    schedule: Schedule,
    shape: PipelineShape,
    costs: Costs,
    progress_model: ProgressModel = "per_edge",
) -> Timeline:
    return simulate(
        compile(schedule, shape, progress_model=progress_model, costs=costs),
        costs,
        progress_model=progress_model,
    )


class Case(NamedTuple):
    """A run and its numbers."""

    P: int
    m: int
    v: int
    F: int
    I: int
    W: int
    timeline: Timeline

    @property
    def idle(self) -> float:
        """The idle time of each rank, which is equal because all have equal work."""
        idle: list[float] = self.timeline.idle.tolist()
        assert idle == [idle[0]] * self.P
        assert self.timeline.span == self.m * self.v * (self.F + self.I + self.W) + idle[0]
        return idle[0]

    @property
    def own(self) -> list[float]:
        own: list[float] = self.timeline.idle_in_active_span.tolist()
        return own

    @property
    def peak(self) -> list[int]:
        peak: list[int] = self.timeline.peak_in_flight.tolist()
        return peak


def list_cases(
    schedule: Schedule,
    microbatches: Callable[[int], list[int]],
    v: int = 2,
    when: Callable[[int, int, int], bool] = lambda F, I, W: True,
    ranks: Sequence[int] = cases([1, 2, 3], [5]),
) -> Iterator[Case]:
    """Yield runs with the costs of TRIPLES that `when` accepts.

    Without ALL_CASES=1, only the largest number of ranks has all these costs. Each shape of fewer
    ranks has a third of them.
    """
    number = 0
    for P in ranks:
        for m in microbatches(P):
            number += 1
            for k, (F, I, W) in enumerate(t for t in TRIPLES if when(*t)):
                if not ALL and max(ranks) != P and (k + number) % 3:
                    continue
                model: ProgressModel = ("per_edge", "per_pair", "per_device")[k % 3]
                costs = Costs(F=F, I=I, W=W)
                shape = make_shape(schedule, P, m, v)
                timeline = simulate_schedule(schedule, shape, costs, model)
                yield Case(P, m, shape.stages // P, F, I, W, timeline)
