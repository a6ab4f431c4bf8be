"""SchedulingProblem: what a search solves, as plain numbers per stage and rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import index
from typing import Final, Literal, get_args

import numpy as np

from schedir.errors import (
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

Objective = Literal["span", "own"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
_REDUCE_OP: Final = find_producers(Value.GRAD)[
    0
]  # whole; what is kept in parts is no matter of orders
MAX_TIME: Final = 1e299  # what has no limit, as a number, which all times are less than


@dataclass(frozen=True)
class SchedulingProblem:
    """A pipeline whose microbatches are alike, in plain numbers; tuples are by stage or by rank.

    `F`, `I` and `W` are times of a microbatch on each stage.  Where backwards are not
    `split_backward`, `I` is the time of a whole one, and `W` is 0 and never run.  What a stage's F
    puts out is there for the next stage `act_delay` later, and the gradient of an I for the stage
    before `grad_delay`
    later: 0 where both are on one rank.  `tail_time` is the least time from a rank's last compute
    to its end: to reduce the gradients of a stage, and to step.

    A rank may hold `capacity`, of whatever unit: of each microbatch `saved` from the start of F,
    `saved_and_deferred` from the start of I, `deferred_wgrad` from its end until the end of W.
    Where backwards are whole,
    `saved` is held until the end of I.

    `objective` says what is to be short: the "span" of the whole run, or "own", the longest time
    that a rank takes from its first compute to its last.
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
        """How many microbatches there are."""
        return self.shape.microbatches

    @property
    def num_task_kinds(self) -> int:
        """How many kinds of work there are: F, I, and where backwards are split W."""
        return 2 + self.split_backward

    @property
    def num_tasks(self) -> int:
        """How many pieces of work there are: of each kind, stage and microbatch one."""
        return self.num_task_kinds * self.shape.stages * self.microbatches

    @property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        return self.shape.stages_on_rank

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        return tuple(self.shape.first_rank_per_stage.tolist())

    @cached_property
    def rounded_capacity(self) -> tuple[float, ...]:
        """The room of each rank, and what sums of sizes may be above it by rounding."""
        return tuple(map(add_tolerance, self.capacity))

    def get_compute_time(self, rank: int) -> float:
        """The time that a rank computes."""
        each = (self.F[s] + self.I[s] + self.W[s] for s in self.stages_of_rank[rank])
        return self.microbatches * sum(each)

    def get_min_capacity(self, rank: int) -> float:
        """The least that a rank must be able to hold: one microbatch, there and back.

        Its stages go forward one after the other, and back again; each W comes at once.
        """
        held = sum(self.saved[s] for s in self.stages_of_rank[rank])
        most = held
        for s in reversed(self.stages_of_rank[rank]):
            most = max(most, held - self.saved[s] + self.saved_and_deferred[s])
            held -= self.saved[s]
        return most

    def fits_on_rank(self, memory: float, rank: int) -> bool:
        """Whether a rank may hold that much."""
        return memory <= self.rounded_capacity[rank]


def make_problem(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
) -> SchedulingProblem:
    """The Problem of a shape, its costs, and what a rank may hold.

    `memory_limit` is in bytes of `sizes`, what there is of weights included; `in_flight` is the
    count that `greedy_schedule` takes, of (stage, mb) from their F to their W, or B.  Without
    either there is no limit.  Messages take no room here: a program that is found must fit with
    them.

    Raises ShapeError for a shape with several holders of a stage, updates or segments; CostsError
    for costs per microbatch, those that are all 0 or too large to add up, those of other stages,
    and `FB` that saves time; UsageError for a limit that is none, and for one within which no
    schedule works.
    """
    require_type(shape, PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
    shape = shape.resolve_defaults()  # a schedule that a search starts from keeps to this shape
    costs = Costs() if costs is None else costs
    require_type(costs, Costs, "Costs(F=1, B=2)")
    if objective not in OBJECTIVES:
        raise UsageError(f"objective is 'span' or 'own', not {describe(objective)}")
    split_backward = require_bool(split_backward, "split_backward")
    _require_searchable_shape(shape)
    if split_backward and "B" in costs.specified and not {"I", "W"} & costs.specified.keys():
        raise CostsError(
            "the costs say how long a whole backward takes, B, and not its parts, I and W",
            hint="say I=...,W=..., or search for whole backwards: --no-split-backward, "
            "split_backward=False",
        )
    if costs.has_pairing_gain(shape):
        raise CostsError(
            "the costs say that a forward and a backward that run together, FB, take less than one "
            "after the other, and a search knows no pairs",
            hint="leave out FB, for schedules without pairs",
        )
    F, I, W = (
        _stage_costs(FORWARD, costs, shape),
        _stage_costs(BACKWARD_INPUT, costs, shape),
        _zeros(shape),
    )
    if split_backward:
        W = _stage_costs(BACKWARD_WEIGHT, costs, shape)
    else:
        I = _stage_costs(BACKWARD, costs, shape)
    if not sum(F + I + W) > 0:
        raise CostsError("all costs are 0: every schedule is as short")
    send = _stage_costs(SEND_OPS[0], costs, shape)
    rank_of = shape.first_rank_per_stage.tolist()
    act = [c * (a != b) for c, a, b in zip(send, rank_of, [*rank_of[1:], rank_of[-1]], strict=True)]
    grad = [c * (a != b) for c, a, b in zip(send, rank_of, [rank_of[0], *rank_of], strict=False)]
    steps = np.array(_stage_costs(OPTIMIZER_STEP_OPS[0], costs, shape))
    reduces = costs.for_opcode(_REDUCE_OP, shape)[:, 0]
    tail = [
        float(steps[min(rank, shape.stages - 1)]) + float(reduces[list(own)].min())
        for rank, own in enumerate(shape.stages_on_rank)
    ]
    if not shape.microbatches * (sum(F + I + W) + 2 * sum(send)) + sum(tail) < MAX_TIME:
        raise CostsError(f"the costs add up to more than a search can count, {MAX_TIME:g}")
    saved, tape, both, room = _stage_memory(
        shape, sizes, memory_limit, in_flight, split_backward=split_backward
    )
    problem = SchedulingProblem(
        shape, split_backward, objective, F, I, W, tuple(act), tuple(grad), tuple(tail),
        saved, tape, both, room,
    )  # fmt: skip
    _require_capacity(problem, memory_limit)
    return problem


def is_full_backward_cheaper(costs: Costs, shape: PipelineShape) -> bool:
    """Whether a whole backward takes less than both of its halves, on any stage.

    What is proven of schedules with split backwards then says nothing of those with whole ones.
    """
    whole, I, W = (
        _stage_costs(op, costs, shape) for op in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    return any(b < (i + w) * (1 - RELATIVE_TOLERANCE) for b, i, w in zip(whole, I, W, strict=True))


def _require_searchable_shape(shape: PipelineShape) -> None:
    for what, many, field in (
        ("holder of each stage", shape.placement_rows, "placement"),
        ("update", shape.optimizer_steps, "optimizer_steps"),
        ("segment of each sequence", shape.sequence_chunks, "sequence_chunks"),
    ):
        if many > 1:
            raise ShapeError(
                f"a search is for shapes with one {what}: this has {many}", fields=[field]
            )


def _stage_costs(op: int, costs: Costs, shape: PipelineShape) -> tuple[float, ...]:
    each = costs.for_opcode(op, shape)  # type: ignore[arg-type]
    if each.shape[1] > 1:
        raise CostsError("a search takes costs that are the same for all microbatches")
    return tuple(each[:, 0].tolist())


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
    """What is saved, the tape, both, and the room for them."""
    one, zero = (1.0,) * shape.stages, _zeros(shape)
    if limit is not None and in_flight is not None:
        raise UsageError("limit is in bytes, and in_flight counts: say one of the two")
    if limit is None:
        room = (inf,) * shape.ranks
        if in_flight is not None:
            ask = in_flight if callable(in_flight) else lambda _: in_flight
            room = tuple(_require_in_flight(ask(rank)) for rank in range(shape.ranks))
        return one, one if split_backward else zero, one, room
    if sizes is None:
        raise UsageError(
            "a limit in bytes needs the sizes of what is held",
            hint="--sizes saved=1.2GB,deferred_wgrad=0.5GB, or sizes=Sizes(...)",
        )
    require_type(sizes, Sizes, "Sizes(saved=1.2e9, deferred_wgrad=0.5e9)")
    sizes.validate(shape)
    if (most := to_float(limit)) is None or most == -inf:
        raise UsageError(f"memory_limit is a number of bytes, not {describe(limit)}", hint="40e9")
    each = {
        name: sizes.per_microbatch(name, shape)
        for name in ("saved", "deferred_wgrad", "saved_and_deferred")
    }
    if any(of_stage.shape[1] > 1 for of_stage in each.values()):
        raise UsageError("a search takes sizes that are the same for all microbatches")
    saved, tape, both = (tuple(of_stage[:, 0].tolist()) for of_stage in each.values())
    weights = sizes.for_stages("model_states", shape.stages)
    room = tuple(float(most - weights[list(own)].sum()) for own in shape.stages_on_rank)
    return (saved, tape, both, room) if split_backward else (saved, zero, saved, room)


def _require_in_flight(value: object) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(min(index(value), MAX_STAGES * MAX_MICROBATCHES))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"in_flight is a whole number, or a function of the rank that gives one, not "
            f"{describe(value)}"
        ) from None


def _describe_in_flight(count: float) -> str:
    return f"{count:g} in flight"


def _require_capacity(problem: SchedulingProblem, limit: float | None) -> None:
    """Raise UsageError where a rank cannot take one microbatch there and back."""
    for rank in range(problem.shape.ranks):
        least = problem.get_min_capacity(rank)
        if problem.fits_on_rank(least, rank):
            continue
        weights = 0.0 if limit is None else limit - problem.capacity[rank]
        say = format_bytes if limit is not None else _describe_in_flight
        of = f" and {format_bytes(weights)} of weights" * (weights > 0)
        raise UsageError(
            f"no schedule fits: rank {rank} has {say(least)} of one microbatch{of}, and may have "
            f"{say(problem.capacity[rank] if limit is None else limit)}",
            hint=f"the least that works there is {say(least + weights)}",
            fields=["memory_limit" if limit is not None else "in_flight"],
        )
