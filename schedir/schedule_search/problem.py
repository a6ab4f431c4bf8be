"""Define the input of a schedule search: times and sizes as plain numbers per stage and rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import index
from typing import Final, Literal, cast, get_args

import numpy as np

from schedir.errors import (
    CommandHint,
    CostsError,
    ShapeError,
    UsageError,
    describe,
    format_bytes,
    require_bool,
    require_type,
    to_float,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, add_tolerance
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER_STEP_OPS,
    SEND_OPS,
    Value,
    find_producers,
)
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES, PipelineShape
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.retired_names import get_current_value

Objective = Literal["span", "active_span"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
# The opcode that reduces unsharded gradients. A search assumes unsharded gradients, because their
# sharding does not change the order of compute.
_REDUCE_OP: Final = find_producers(Value.GRAD)[0]
MAX_TIME: Final = 1e299  # A finite number for "no limit". All times are less.


@dataclass(frozen=True)
class SchedulingProblem:
    """A pipeline of microbatches with equal costs and sizes, in plain numbers per stage and rank.

    Args:
        shape: The pipeline shape.
        split_backward: True if backwards are split into I and W.
        objective: The length to minimize. "span": the time of the run from start to end.
            "active_span": the longest time of a rank from the start of its first compute to the end
            of its last compute.
        F: The time of the forward of a microbatch, by stage.
        I: The time of the BackwardInput of a microbatch, by stage. If backwards are not split, the
            time of a full backward.
        W: The time of the BackwardWeight of a microbatch, by stage. If backwards are not split, 0.
        act_delay: The time from the end of a stage's F until the next stage has the output of the
            F, by stage. 0 if both stages are on one rank.
        grad_delay: The time from the end of a stage's I until the previous stage has the gradient,
            by stage. 0 if both stages are on one rank.
        tail_time: The least time from the last compute of a rank to the end of its optimizer step,
            by rank. In this time the rank reduces the gradients of one stage, and runs the
            optimizer step.
        saved: The memory of a microbatch from the start of its F to the start of its I, by stage.
            If backwards are not split, the memory is in use until the end of the I.
        deferred_wgrad: The memory of a microbatch from the end of its I to the end of its W, by
            stage.
        saved_and_deferred: The memory of a microbatch during its I, by stage.
        capacity: The memory for saved activations and deferred weight gradients, by rank, in the
            unit of `saved`. Infinite means no limit.
    """

    shape: PipelineShape
    split_backward: bool
    objective: Objective
    F: tuple[float, ...]
    I: tuple[float, ...]
    W: tuple[float, ...]
    act_delay: tuple[float, ...]
    grad_delay: tuple[float, ...]
    tail_time: tuple[float, ...]
    saved: tuple[float, ...]
    deferred_wgrad: tuple[float, ...]
    saved_and_deferred: tuple[float, ...]
    capacity: tuple[float, ...]

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.shape.microbatches

    @property
    def num_task_kinds(self) -> int:
        """The number of kinds of tasks: 3 (F, I, W) if backwards are split, else 2."""
        return 2 + self.split_backward

    @property
    def num_tasks(self) -> int:
        """The number of tasks: one for each kind, stage and microbatch."""
        return self.num_task_kinds * self.shape.stages * self.microbatches

    @property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        return self.shape.stages_on_rank

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self.shape.first_rank_per_stage.tolist())

    @cached_property
    def rounded_capacity(self) -> tuple[float, ...]:
        """The capacity of each rank plus a tolerance for rounding in sums of sizes."""
        return tuple(map(add_tolerance, self.capacity))

    def get_compute_time(self, rank: int) -> float:
        """Return the total compute time of a rank, in the unit of the costs.

        Args:
            rank: The rank.
        """
        stage_times = (self.F[s] + self.I[s] + self.W[s] for s in self.stages_of_rank[rank])
        return self.microbatches * sum(stage_times)

    def get_min_capacity(self, rank: int) -> float:
        """Return the least capacity with which a rank can run one microbatch at a time.

        No schedule fits into less capacity. The microbatch passes all stages of the rank forward
        and then backward, and each W follows its I.

        Args:
            rank: The rank.
        """
        memory = sum(self.saved[s] for s in self.stages_of_rank[rank])
        peak = memory
        for s in reversed(self.stages_of_rank[rank]):
            peak = max(peak, memory - self.saved[s] + self.saved_and_deferred[s])
            memory -= self.saved[s]
        return peak

    def fits_on_rank(self, memory: float, rank: int) -> bool:
        """Return whether an amount of memory fits into the capacity of a rank.

        Args:
            memory: The memory, in the unit of `capacity`.
            rank: The rank.
        """
        return memory <= self.rounded_capacity[rank]


def make_problem(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    max_in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
) -> SchedulingProblem:
    """Return the scheduling problem of a shape, its costs and a memory limit.

    The problem does not include the memory of messages. The caller must check that a program fits
    with its messages.

    Args:
        shape: The pipeline shape.
        costs: The costs of stages. By default `Costs()`.
        sizes: The sizes in bytes, required with `memory_limit`.
        memory_limit: The memory of each rank, in bytes, including model states. By default there is
            no limit.
        max_in_flight: The largest number of (stage, microbatch) pairs between F and W, or F and B,
            on a rank. An integer, or a function of the rank, as in `greedy_schedule`. By default
            there is no limit. Do not give both this argument and `memory_limit`.
        objective: The length to minimize, see `SchedulingProblem`.
        split_backward: True to split backwards into I and W.

    Raises:
        ShapeError: The shape has stage replicas, several updates or sequence chunks.
        CostsError: The costs differ between microbatches, are all 0, or add up to more than 1e299.
            Or the costs have a different number of stages than the shape. Or `split_backward` is
            True, and the costs contain B but not I and W. Or `FB` is less than a forward and a
            backward.
        UsageError: The limit is invalid, or too small for any schedule.
    """
    require_type(shape, "shape", PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
    shape = shape.resolve_defaults()  # Shapes of initial schedules are compared with this shape.
    costs = Costs() if costs is None else costs
    require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
    if isinstance(objective, str):
        objective = cast("Objective", get_current_value("objective", objective))
    if objective not in OBJECTIVES:
        raise UsageError(f"objective must be 'span' or 'active_span', not {describe(objective)}")
    split_backward = require_bool(split_backward, "split_backward")
    _require_searchable_shape(shape)
    if split_backward and "B" in costs.specified and not {"I", "W"} & costs.specified.keys():
        raise CostsError(
            "costs have B, but a search with split backwards needs I and W",
            hint=CommandHint(
                "add I=..., W=..., or search with full backwards: split_backward=False",
                "add I=...,W=..., or search with full backwards: --no-split-backward",
            ),
        )
    if costs.has_pairing_gain(shape):
        raise CostsError(
            "the cost FB is less than F + B, so that pairs of a forward and a backward save time, "
            "but a search does not support pairs",
            hint="leave out FB to search schedules without pairs",
        )
    F = _stage_costs(FORWARD, costs, shape)
    I = _stage_costs(BACKWARD_INPUT, costs, shape)
    W = _zeros(shape)
    if split_backward:
        W = _stage_costs(BACKWARD_WEIGHT, costs, shape)
    else:
        I = _stage_costs(BACKWARD, costs, shape)
    if not sum(F + I + W) > 0:
        raise CostsError(
            "all compute costs are 0, so a search has nothing to minimize: set a compute cost "
            "above 0"
        )
    send = _stage_costs(SEND_OPS[0], costs, shape)
    rank_of = shape.first_rank_per_stage.tolist()
    act_delay = [
        c * (a != b) for c, a, b in zip(send, rank_of, [*rank_of[1:], rank_of[-1]], strict=True)
    ]
    grad_delay = [
        c * (a != b) for c, a, b in zip(send, rank_of, [rank_of[0], *rank_of], strict=False)
    ]
    step_costs = np.array(_stage_costs(OPTIMIZER_STEP_OPS[0], costs, shape))
    reduce_costs = costs.for_opcode(_REDUCE_OP, shape)[:, 0]
    tail_time = [
        float(step_costs[min(rank, shape.stages - 1)])
        + float(reduce_costs[list(local_stages)].min())
        for rank, local_stages in enumerate(shape.stages_on_rank)
    ]
    if not shape.microbatches * (sum(F + I + W) + 2 * sum(send)) + sum(tail_time) < MAX_TIME:
        raise CostsError(
            f"the costs of all instructions add up to {MAX_TIME:g} or more, the limit of a search"
        )
    saved, deferred, saved_and_deferred, capacity = _stage_memory(
        shape, sizes, memory_limit, max_in_flight, split_backward=split_backward
    )
    problem = SchedulingProblem(
        shape, split_backward, objective, F, I, W,
        tuple(act_delay), tuple(grad_delay), tuple(tail_time),
        saved, deferred, saved_and_deferred, capacity,
    )  # fmt: skip
    _require_capacity(problem, memory_limit)
    return problem


def is_full_backward_cheaper(costs: Costs, shape: PipelineShape) -> bool:
    """Return whether a full backward takes less than I and W together on any stage.

    In this case a bound for split backwards does not apply to schedules with full backwards.

    Args:
        costs: The costs of stages.
        shape: The pipeline shape.
    """
    full, I, W = (
        _stage_costs(op, costs, shape) for op in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    return any(b < (i + w) * (1 - RELATIVE_TOLERANCE) for b, i, w in zip(full, I, W, strict=True))


def _require_searchable_shape(shape: PipelineShape) -> None:
    for noun, count, field in (
        ("rank per stage", shape.placement_rows, "placement"),
        ("update", shape.optimizer_steps, "optimizer_steps"),
        ("sequence chunk", shape.sequence_chunks, "sequence_chunks"),
    ):
        if count > 1:
            raise ShapeError(
                f"a search supports only shapes with one {noun}, but this shape has {count}",
                fields=[field],
            )


def _stage_costs(op: int, costs: Costs, shape: PipelineShape) -> tuple[float, ...]:
    cost_grid = costs.for_opcode(op, shape)  # type: ignore[arg-type]
    if cost_grid.shape[1] > 1:
        raise CostsError(
            "costs differ between microbatches, but a search supports only one cost per stage"
        )
    return tuple(cost_grid[:, 0].tolist())


def _zeros(shape: PipelineShape) -> tuple[float, ...]:
    return (0.0,) * shape.stages


def _stage_memory(
    shape: PipelineShape,
    sizes: Sizes | None,
    limit: float | None,
    in_flight: int | Callable[[int], int] | None,
    *,
    split_backward: bool,
) -> tuple[tuple[float, ...], ...]:
    """Return `saved`, `deferred_wgrad`, `saved_and_deferred` and `capacity` of a problem."""
    ones, zeros = (1.0,) * shape.stages, _zeros(shape)
    if limit is not None and in_flight is not None:
        raise UsageError(
            "memory_limit and max_in_flight cannot be combined", hint="give one of them"
        )
    if limit is None:
        capacity = (inf,) * shape.ranks
        if in_flight is not None:
            get_in_flight = in_flight if callable(in_flight) else lambda _: in_flight
            capacity = tuple(_require_in_flight(get_in_flight(rank)) for rank in range(shape.ranks))
        return ones, ones if split_backward else zeros, ones, capacity
    if sizes is None:
        raise UsageError(
            "memory_limit needs sizes, the bytes of each kind of value",
            hint=CommandHint(
                "sizes=Sizes(saved=1.2e9, deferred_wgrad=0.5e9)",
                "--sizes saved=1.2GB,deferred_wgrad=0.5GB",
            ),
            fields=["memory_limit", "sizes"],
        )
    require_type(sizes, "sizes", Sizes, "Sizes(saved=1.2e9, deferred_wgrad=0.5e9)")
    sizes.validate(shape)
    if (max_bytes := to_float(limit)) is None or max_bytes == -inf:
        raise UsageError(f"memory_limit must be a number of bytes, not {describe(limit)}")
    grid_by_size = {
        name: sizes.per_microbatch(name, shape)
        for name in ("saved", "deferred_wgrad", "saved_and_deferred")
    }
    if any(size_grid.shape[1] > 1 for size_grid in grid_by_size.values()):
        raise UsageError(
            "sizes differ between microbatches, but a search supports only one size per stage"
        )
    saved, deferred, saved_and_deferred = (
        tuple(size_grid[:, 0].tolist()) for size_grid in grid_by_size.values()
    )
    weights = sizes.for_stages("model_states", shape.stages)
    capacity = tuple(
        float(max_bytes - weights[list(local_stages)].sum())
        for local_stages in shape.stages_on_rank
    )
    return (
        (saved, deferred, saved_and_deferred, capacity)
        if split_backward
        else (saved, zeros, saved, capacity)
    )


def _require_in_flight(value: object) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(min(index(value), MAX_STAGES * MAX_MICROBATCHES))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            "max_in_flight must be an integer, or a function of the rank that returns one, not "
            f"{describe(value)}"
        ) from None


def _require_capacity(problem: SchedulingProblem, limit: float | None) -> None:
    """Raise UsageError if a rank cannot run one microbatch at a time within its capacity."""
    for rank in range(problem.shape.ranks):
        min_memory = problem.get_min_capacity(rank)
        if problem.fits_on_rank(min_memory, rank):
            continue
        weights = 0.0 if limit is None else limit - problem.capacity[rank]
        format_memory = format_bytes if limit is not None else "{:g} in flight".format
        weights_text = f" and {format_bytes(weights)} for model states" * (weights > 0)
        raise UsageError(
            f"no schedule fits: rank {rank} needs {format_memory(min_memory)} for one "
            f"microbatch{weights_text}, and its limit is "
            f"{format_memory(problem.capacity[rank] if limit is None else limit)}",
            hint=f"rank {rank} needs a limit of at least {format_memory(min_memory + weights)}",
            fields=["memory_limit" if limit is not None else "max_in_flight"],
        )
