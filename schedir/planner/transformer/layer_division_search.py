"""Find the division of layers among stages with the shortest step."""

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
from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
from schedir.planner.estimate.offload_plans import require_no_offload
from schedir.planner.estimate.simulated_estimate import simulate_on_cluster
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_compilation import plan_program
from schedir.planner.plan_estimate import strip_estimates
from schedir.planner.trainer_profile import Trainer, get_trainer
from schedir.planner.transformer.layer_division import divide_evenly
from schedir.planner.transformer.layer_time import stage_time
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.simulate import simulate

Floats = NDArray[np.float64]
Division = tuple[int, ...]

# The largest number of simulations in a search. They take most of its time.
_MAX_SIMULATIONS: Final = 48
_TOLERANCE: Final = 1e-9  # A share of the step time. A smaller gain is a rounding error.


def balance_layers(rank_times: Floats) -> Division:
    """Return the number of layers of each rank that minimizes the time of the slowest rank.

    If several divisions are optimal, the result is the division with the fewest layers on the first
    ranks. The algorithm is dynamic programming over ranks, with ranks * layers^2 operations.

    Args:
        rank_times: Seconds of each rank for each number of layers, of shape (ranks, layers + 1).
            Infinite for a number of layers that the rank cannot have.

    Raises:
        UsageError: No division is possible.

    Example:
        >>> import numpy as np
        >>> balance_layers(np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]]))
        (1, 2)
    """
    ranks, width = rank_times.shape
    # best[r][k] is the time of the slowest rank if the ranks from r on share k layers optimally.
    best = np.full((ranks + 1, width), np.inf)
    best[ranks, 0] = 0.0
    for rank in range(ranks - 1, -1, -1):
        for k in range(width):
            best[rank, k] = np.maximum(rank_times[rank, : k + 1], best[rank + 1, k::-1]).min()
    if not np.isfinite(best[0, -1]):
        raise UsageError(
            f"no division of {width - 1} layers among {ranks} ranks fits into their memory",
            fields=["layers_per_stage"],
        )
    result, remaining = [], width - 1
    for rank in range(ranks):
        longest = np.maximum(rank_times[rank, : remaining + 1], best[rank + 1, remaining::-1])
        result.append(int((longest <= max(best[0, -1], longest.min())).argmax()))
        remaining -= result[-1]
    return tuple(result)


def optimize_layer_division(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> Division:
    """Find the number of layers of each stage that makes the step of a plan shortest.

    First `balance_layers` minimizes the time of the slowest rank, including the embedding and the
    head, within the memory of each GPU. The search simulates these balanced divisions and the even
    division. Starting from the best of these divisions, the search moves one layer at a time to
    another rank if this shortens the step. If the even division fits, the result is never slower
    than the even division. The search may not find the optimum.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan. It must not offload. Its `layers_per_stage` is ignored.
        constants: Constants of the software. None means the constants of the cluster's trainer
            (`get_trainer`).
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Raises:
        UsageError: No division fits in the memory, or the plan offloads.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200,
        ...     sequence=2048)
        >>> node = planner.cluster_preset("a100", nodes=1)
        >>> planner.optimize_layer_division(gpt, node, planner.ParallelPlan(pp=4, tp=2,
        ...     microbatch_size=2, microbatches=16))
        (6, 7, 6, 5)
    """
    return _DivisionSearch(
        model, cluster, plan, get_trainer(cluster, constants, state_bytes)
    ).find_shortest()


class _DivisionSearch:
    """The state of one search for a division. The search simulates each division only once."""

    def __init__(
        self,
        model: TransformerSpec,
        cluster: Cluster,
        plan: ParallelPlan,
        trainer: Trainer,
    ) -> None:
        require_no_offload(plan, "optimize_layer_division")
        self.model = model
        self.cluster = cluster
        self.trainer = trainer
        self.constants = trainer.constants
        self.state_bytes = trainer.state_bytes
        self.plan = replace(strip_estimates(plan), layers_per_stage=())
        self.program: Program = plan_program(
            self.plan, tied_weights=model.tied, **trainer.compile_options
        )
        self.shape: PipelineShape = self.program.shape
        if self.shape.stages > model.layers + 2:
            raise UsageError(
                f"{model.layers} layers, the embedding and the head are too few for "
                f"{self.shape.stages} stages",
                fields=["layers", "pp", "stages_per_rank"],
            )
        self.even_division = divide_evenly(model.layers, self.shape.stages)
        self.step_times: dict[Division, float] = {}
        self.min_layers = np.array(
            [
                sum(0 < s < self.shape.stages - 1 for s in rank_stages)
                for rank_stages in self.shape.stages_on_rank
            ]
        )
        self.base_bytes, self.layer_bytes = self._measure_bytes()

    def find_shortest(self) -> Division:
        """Return the best division that the search finds."""
        seconds = self._compute_rank_times()
        candidates = {
            self.even_division: self._fits_memory(self._sum_per_rank(self.even_division)),
            **{
                self._spread_over_stages(balanced): True
                for balanced in self._iter_balanced(seconds)
            },
        }
        allowed = [division for division, fits in candidates.items() if fits]
        best = min(allowed, key=self._simulate_step)
        while len(self.step_times) < _MAX_SIMULATIONS:
            better = next(
                (
                    neighbor
                    for neighbor in islice(
                        self._iter_neighbors(best, seconds), _MAX_SIMULATIONS - len(self.step_times)
                    )
                    if self._simulate_step(neighbor) < self._simulate_step(best) * (1 - _TOLERANCE)
                ),
                None,
            )
            if better is None:
                break
            best = better
        return best

    # ------------------------------------------------------------ time and memory of ranks

    def _compute_rank_times(self) -> Floats:
        """Return the seconds of a microbatch by rank and number of layers.

        The shape is (ranks, layers + 1). The time is infinite if the layers do not fit in the
        memory of the rank, or are too few to give each inner stage a layer.
        """
        layers, last = self.model.layers, self.shape.stages - 1
        part = {
            ends: np.array([sum(self._compute_stage_time(n, *ends)) for n in range(layers + 1)])
            for ends in {
                (0 in rank_stages, last in rank_stages) for rank_stages in self.shape.stages_on_rank
            }
        }
        seconds = np.array(
            [
                part[0 in rank_stages, last in rank_stages]
                for rank_stages in self.shape.stages_on_rank
            ]
        )
        number = np.arange(layers + 1)
        memory = self.base_bytes[:, None] + self.layer_bytes[:, None] * number
        seconds[(memory > self.cluster.memory) | (number < self.min_layers[:, None])] = np.inf
        return seconds

    def _compute_stage_time(self, layers: int, is_first: bool, is_last: bool) -> tuple[float, ...]:
        return stage_time(
            self.model, self.cluster, self.plan, layers, is_first, is_last, self.constants
        ).total

    def _measure_bytes(self) -> tuple[Floats, Floats]:
        """Return the bytes of each rank without layers, and the bytes that each layer adds.

        Both arrays have the shape (ranks,). Memory is linear in the layers, so two simulations
        are enough. The second simulation has twice as many layers in each stage.
        """
        peaks = []
        for times in (1, 2):
            division = tuple(times * n for n in self.even_division)
            model = replace(self.model, layers=times * self.model.layers)
            candidate = replace(self.plan, layers_per_stage=division)
            size = self.trainer.compute_sizes(
                model, candidate, self.shape, self.constants, self.state_bytes
            )
            peak = simulate(self.program, sizes=size, progress_model="per_edge").peak_memory
            peaks.append(
                peak * (1 + self.constants.allocator_share) + self.constants.reserved_bytes
            )
        number = np.maximum(self._sum_per_rank(self.even_division), 1)
        bytes_per_layer = (peaks[1] - peaks[0]) / number
        return peaks[0] - bytes_per_layer * number, bytes_per_layer

    def _sum_per_rank(self, division: Division) -> NDArray[np.int64]:
        return np.array(
            [sum(division[s] for s in rank_stages) for rank_stages in self.shape.stages_on_rank]
        )

    def _fits_memory(self, layers_per_rank: NDArray[np.int64]) -> bool:
        return bool(
            (self.base_bytes + self.layer_bytes * layers_per_rank <= self.cluster.memory).all()
        )

    # ------------------------------------------------------------ divisions

    def _iter_balanced(self, rank_times: Floats) -> Iterator[tuple[int, ...]]:
        """Yield the balanced divisions with the fewest and the most layers on the first ranks.

        A division has the number of layers of each rank.
        """
        yield balance_layers(rank_times)
        yield balance_layers(rank_times[::-1])[::-1]

    def _spread_over_stages(self, layers_per_rank: tuple[int, ...]) -> Division:
        """Divide the layers of each rank evenly among its stages.

        The first and the last stage of the pipeline get fewer layers, because they also have the
        embedding or the head.
        """
        result = [0] * self.shape.stages
        last = self.shape.stages - 1
        for rank_stages, layers in zip(self.shape.stages_on_rank, layers_per_rank, strict=True):
            for stage in rank_stages:
                result[stage] = int(0 < stage < last)
            for _ in range(layers - sum(result[stage] for stage in rank_stages)):
                emptiest = min(
                    rank_stages, key=lambda stage: (result[stage] + (stage in (0, last)), stage)
                )
                result[emptiest] += 1
        return tuple(result)

    def _iter_neighbors(self, division: Division, rank_times: Floats) -> Iterator[Division]:
        """Yield the divisions that move one layer of `division` to another rank.

        Divisions that move a layer from the slowest rank to the fastest ranks come first.
        Divisions that are already simulated or do not fit in memory are left out.
        """
        layers_per_rank = self._sum_per_rank(division)
        load = rank_times[np.arange(len(layers_per_rank)), layers_per_rank]
        order = np.argsort(-load, kind="stable").tolist()
        for giver in order:
            for taker in reversed(order):
                moved = layers_per_rank.copy()
                moved[giver] -= 1
                moved[taker] += 1
                if (
                    giver != taker
                    and moved[giver] >= self.min_layers[giver]
                    and self._fits_memory(moved)
                ):
                    neighbor = self._spread_over_stages(tuple(moved.tolist()))
                    if neighbor not in self.step_times:
                        yield neighbor

    def _simulate_step(self, division: Division) -> float:
        """Return the seconds of a step with this division, from a simulation or from the cache."""
        if division not in self.step_times:
            candidate = replace(self.plan, layers_per_stage=division)
            times = compute_stage_times(self.model, self.cluster, candidate, self.constants)
            costs = compute_costs(
                self.model,
                self.cluster,
                candidate,
                self.shape,
                times,
                self.constants,
                self.state_bytes,
            )
            run = simulate_on_cluster(self.cluster, candidate, self.program, costs)
            self.step_times[division] = run.span
        return self.step_times[division]
