"""Find the division of layers with the shortest step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.planner.config_export import plan_program
from schedir.planner.estimate.instruction_costs import costs_of, times_of
from schedir.planner.estimate.offload_plans import refuse_offload
from schedir.planner.estimate.simulated_estimate import run_of
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_estimate import plain
from schedir.planner.trainer_profile import Trainer, trainer_for
from schedir.planner.transformer.layer_division import even
from schedir.planner.transformer.layer_time import stage_time
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.simulate import simulate

Floats = NDArray[np.float64]
Division = tuple[int, ...]

_TRIES: Final = 48  # simulations of one cut
_SAME: Final = 1e-9  # of a step: what is less shorter is not


def balanced(seconds: Floats) -> Division:
    """How many layers each rank has, so that the slowest rank takes least.

    `seconds[r, n]` is what rank r takes with n layers, infinite where it cannot have so many; shape
    (ranks, layers + 1).  Of divisions that are as good, the one whose first ranks have least.  By
    dynamic programming over ranks, in ranks x layers^2 steps.

    Raises UsageError where no division is possible.

    >>> import numpy as np
    >>> balanced(np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]]))
    (1, 2)
    """
    ranks, width = seconds.shape
    # best[r][k]: the least that the slowest of the ranks from r on takes, which share k layers.
    best = np.full((ranks + 1, width), np.inf)
    best[ranks, 0] = 0.0
    for rank in range(ranks - 1, -1, -1):
        for k in range(width):
            best[rank, k] = np.maximum(seconds[rank, : k + 1], best[rank + 1, k::-1]).min()
    if not np.isfinite(best[0, -1]):
        raise UsageError(
            f"{width - 1} layers cannot be divided among {ranks} ranks within their memory",
            fields=["layers_per_stage"],
        )
    found, left = [], width - 1
    for rank in range(ranks):
        each = np.maximum(seconds[rank, : left + 1], best[rank + 1, left::-1])
        found.append(int((each <= max(best[0, -1], each.min())).argmax()))
        left -= found[-1]
    return tuple(found)


def optimize_layer_division(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    states: StateBytes | None = None,
) -> Division:
    """The layers of each stage with which a step of a choice is shortest, as far as is looked.

    First the slowest rank is made as fast as it can be, with the embedding and the head as what
    they cost, and no rank above the memory of its GPU (`balanced`).  That leaves many divisions,
    and near ones that are as good: of these, and of those that differ from the best so far by one
    layer, the one is taken whose program is shortest.  It is never slower than the even one.

    Raises UsageError where no division fits the memory.

    >>> from schedir import planner
    >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> node = planner.cluster_preset("a100", nodes=1)
    >>> planner.optimize_layer_division(gpt, node, planner.ParallelPlan(pp=4, tp=2,
    ...     microbatch_size=2, microbatches=16))
    (6, 7, 6, 5)
    """
    return _DivisionSearch(
        model, cluster, choice, trainer_for(cluster, constants, states)
    ).shortest()


class _DivisionSearch:
    """One search; what is asked twice is known."""

    def __init__(
        self,
        model: TransformerSpec,
        cluster: Cluster,
        choice: ParallelPlan,
        of: Trainer,
    ) -> None:
        refuse_offload(choice, "a cut of layers")
        self.model, self.cluster, self.of = model, cluster, of
        self.constants, self.states = of.constants, of.states
        self.choice = replace(plain(choice), layers_per_stage=())
        self.program: Program = plan_program(self.choice, tied=model.tied, **of.options)
        self.shape: PipelineShape = self.program.shape
        if self.shape.stages > model.layers + 2:
            raise UsageError(
                f"{model.layers} layers do not fill {self.shape.stages} stages",
                fields=["layers", "pp", "stages_per_rank"],
            )
        self.start = even(model.layers, self.shape.stages)
        self.known: dict[Division, float] = {}
        self.least = np.array(
            [sum(0 < s < self.shape.stages - 1 for s in own) for own in self.shape.stages_of]
        )
        self.base, self.each = self._bytes()

    def shortest(self) -> Division:
        """The shortest that is found."""
        seconds = self._seconds()
        first = {
            self.start: self._fits(self._per_rank(self.start)),
            **{self._spread(own): True for own in self._near(seconds)},
        }
        allowed = [division for division, fits in first.items() if fits]
        best = min(allowed, key=self._step)
        while len(self.known) < _TRIES:
            better = next(
                (
                    other
                    for other in islice(self._neighbours(best, seconds), _TRIES - len(self.known))
                    if self._step(other) < self._step(best) * (1 - _SAME)
                ),
                None,
            )
            if better is None:
                break
            best = better
        return best

    # ------------------------------------------------------------ what ranks take and hold

    def _seconds(self) -> Floats:
        """What each rank takes of a microbatch with so many layers; infinite where they do not fit,
        or leave a stage with nothing to do."""
        layers, last = self.model.layers, self.shape.stages - 1
        part = {
            ends: np.array([sum(self._time(n, *ends)) for n in range(layers + 1)])
            for ends in {(0 in own, last in own) for own in self.shape.stages_of}
        }
        seconds = np.array([part[0 in own, last in own] for own in self.shape.stages_of])
        number = np.arange(layers + 1)
        held = self.base[:, None] + self.each[:, None] * number
        seconds[(held > self.cluster.memory) | (number < self.least[:, None])] = np.inf
        return seconds

    def _time(self, layers: int, first: bool, last: bool) -> tuple[float, ...]:
        return stage_time(
            self.model, self.cluster, self.choice, layers, first, last, self.constants
        ).total

    def _bytes(self) -> tuple[Floats, Floats]:
        """What each rank holds without layers, and for each: of two divisions, of which one has
        twice as many in each stage, for bytes are so much for each layer."""
        held = []
        for times in (1, 2):
            division = tuple(times * n for n in self.start)
            model = replace(self.model, layers=times * self.model.layers)
            choice = replace(self.choice, layers_per_stage=division)
            size = self.of.sizes(model, choice, self.shape, self.constants, self.states)
            peak = simulate(self.program, sizes=size, progress_model="per_edge").peak_memory
            held.append(peak * (1 + self.constants.allocator_share) + self.constants.reserved)
        number = np.maximum(self._per_rank(self.start), 1)
        each = (held[1] - held[0]) / number
        return held[0] - each * number, each

    def _per_rank(self, division: Division) -> NDArray[np.int64]:
        return np.array([sum(division[s] for s in own) for own in self.shape.stages_of])

    def _fits(self, own: NDArray[np.int64]) -> bool:
        return bool((self.base + self.each * own <= self.cluster.memory).all())

    # ------------------------------------------------------------ divisions

    def _near(self, seconds: Floats) -> Iterator[tuple[int, ...]]:
        """Layers of each rank in which the slowest is as fast as can be: the first ranks with
        least, and with most."""
        yield balanced(seconds)
        yield balanced(seconds[::-1])[::-1]

    def _spread(self, each: tuple[int, ...]) -> Division:
        """The layers of each stage where ranks have so many: its stages take turns, and ends, which
        also have the embedding or the head, come last."""
        found, last = [0] * self.shape.stages, self.shape.stages - 1
        for own, layers in zip(self.shape.stages_of, each, strict=True):
            for one in own:
                found[one] = int(0 < one < last)
            for _ in range(layers - sum(found[one] for one in own)):
                least = min(own, key=lambda one: (found[one] + (one in (0, last)), one))
                found[least] += 1
        return tuple(found)

    def _neighbours(self, division: Division, seconds: Floats) -> Iterator[Division]:
        """Those with one layer on another rank, from the slowest to the fastest first."""
        own = self._per_rank(division)
        load = seconds[np.arange(len(own)), own]
        order = np.argsort(-load, kind="stable").tolist()
        for giver in order:
            for taker in reversed(order):
                moved = own.copy()
                moved[giver] -= 1
                moved[taker] += 1
                if giver != taker and moved[giver] >= self.least[giver] and self._fits(moved):
                    other = self._spread(tuple(moved.tolist()))
                    if other not in self.known:
                        yield other

    def _step(self, division: Division) -> float:
        """The exact step of a division."""
        if division not in self.known:
            choice = replace(self.choice, layers_per_stage=division)
            times = times_of(self.model, self.cluster, choice, self.constants)
            costs = costs_of(
                self.model, self.cluster, choice, self.shape, times, self.constants, self.states
            )
            run = run_of(self.cluster, choice, self.program, costs)
            self.known[division] = run.span
        return self.known[division]
