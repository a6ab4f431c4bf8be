"""The schedule algebra: letters such as `F` and `B`, and the operators that combine them.

A rank schedule describes the work of one rank as an expression: `3 * F + 5 * (F + B) + 3 * B`. `+`
runs one expression after the other, and `n *` repeats an expression n times. `F[j]` is F on the
rank's local stage j. Microbatches are numbered in order of occurrence. `F.at(mb)` sets the
microbatch where another order is needed.

`R` runs a forward again from its saved inputs. It comes before the backward of the same microbatch:
`F + R + B`.

Example:
    >>> from schedir import EMPTY, B, F, I, W
    >>> 2 * F + (F + B) + 2 * B
    <RankSchedule F F F B B B>
    >>> I + W + 0 * F, EMPTY
    (<RankSchedule I W>, <RankSchedule>)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from schedir.errors import describe
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES
from schedir.ir.input_trust import get_input_trust
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    INSTRUCTIONS,
    RECOMPUTE,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.ir.program import JOINED_BIT, OP_SHIFT, STAGE_SHIFT, Words, pack

__all__ = [
    "EMPTY",
    "B",
    "F",
    "I",
    "R",
    "RankSchedule",
    "W",
    "concat",
    "overlapped_pair",
    "weave",
    "with_placement",
    "with_weight_delay",
]

# Placeholders in a letter: AUTO_MICROBATCH for a microbatch that is numbered later, and
# OLDEST_STAGE for the local stage of a W without `[j]`.
AUTO_MICROBATCH, OLDEST_STAGE = 0xFFFFFFFF, 0xFFFF


@dataclass(frozen=True, eq=False)
class RankSchedule:
    """The work of one rank: a sequence of letters.

    Each letter is an opcode, a local stage and a microbatch. Combine rank schedules with `+`, `n
    *`, `[local stage]` and `at`.

    Args:
        letters: The letters as int64 words.

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule
        >>> def back_to_front(rank, ranks, microbatches):
        ...     return 2 * F + B.at(1) + B.at(0)
        >>> [str(instr) for instr in expand_schedule(back_to_front,
        ...     PipelineShape(ranks=1, microbatches=2)).streams[0]]
        ['F 0.0', 'F 0.1', 'B 0.1', 'B 0.0']
    """

    letters: Words
    __array_ufunc__ = None  # With numpy numbers n, n * F then calls __rmul__ of this class.
    # Without this line, reversed(n * B) would call __getitem__ with local stages.
    __reversed__ = None

    def __add__(self, other: RankSchedule | int) -> RankSchedule:
        if isinstance(other, RankSchedule):
            return RankSchedule(np.concatenate([self.letters, other.letters]))
        # sum() starts with 0.
        return self if type(other) is int and other == 0 else NotImplemented

    __radd__ = __add__  # `sum` calls this method for its first addition, 0 + F.

    def __mul__(self, times: SupportsIndex | np.bool_) -> RankSchedule:
        # Conditions are allowed: (rank == 0) * F.
        count = (
            int(times) if isinstance(times, (bool, np.bool_)) else _require_integer("n * F", times)
        )
        if count < 0:
            raise ValueError(
                f"n * F needs an n of at least 0, not {count}: use min(warmup, microbatches) for a "
                "warmup, or max(n, 0)"
            )
        max_instructions = get_input_trust().max_instructions
        if max_instructions is not None and count * max(len(self), 1) > max_instructions:
            raise ValueError(
                f"n * {self!r} has more instructions than the limit of {max_instructions}"
            )
        try:
            letters = np.empty((count, len(self)), np.int64)
        except (MemoryError, ValueError):  # ValueError means that the size exceeds numpy's limit.
            raise ValueError(f"n * {self!r} does not fit in memory with n = {count}") from None
        letters[:] = self.letters
        return RankSchedule(letters.reshape(-1))

    __rmul__ = __mul__

    def __getitem__(self, local: SupportsIndex) -> RankSchedule:
        """Return the same letters on another local stage of the rank, counted from 0."""
        local = _require_integer("F[local stage]", local)
        if not 0 <= local < OLDEST_STAGE:
            raise IndexError(f"a local stage must be from 0 to {OLDEST_STAGE - 1}, not {local}")
        return RankSchedule(self.letters & ~(0xFFFF << STAGE_SHIFT) | local << STAGE_SHIFT)

    def at(self, mb: SupportsIndex) -> RankSchedule:
        """Return the same letters for a given microbatch.

        Args:
            mb: Number of the microbatch, from 0.

        Returns:
            The new rank schedule.

        Raises:
            TypeError: `mb` is not an integer.
            IndexError: `mb` is negative or too large.
        """
        mb = _require_integer("F.at(microbatch)", mb)
        if not 0 <= mb < AUTO_MICROBATCH:
            raise IndexError(f"microbatches are numbered from 0, not {mb}")
        return RankSchedule(self.letters & ~AUTO_MICROBATCH | mb)

    __iter__ = None  # Otherwise Python would iterate with __getitem__, and never stop.

    def __len__(self) -> int:
        return len(self.letters)

    def __repr__(self) -> str:
        names = [INSTRUCTIONS[w >> OP_SHIFT & 0xFF].text for w in self.letters[:20].tolist()]
        return f"<{' '.join(['RankSchedule', *names])}{' ...' if len(self) > 20 else ''}>"


def _require_integer(subject: str, value: SupportsIndex) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        hint = ": divide with //" if isinstance(value, float) else ""
        raise TypeError(f"{subject} takes an integer, not {value!r:.60}{hint}") from None


#: The forward of the next microbatch.
F = RankSchedule(pack(FORWARD, 0, AUTO_MICROBATCH))
#: The full backward of the next microbatch.
B = RankSchedule(pack(BACKWARD, 0, AUTO_MICROBATCH))
#: The part of a backward that computes the gradient of the stage's input.
I = RankSchedule(pack(BACKWARD_INPUT, 0, AUTO_MICROBATCH))
#: The part of a backward that computes the weight gradients, for the oldest I that has no W yet.
W = RankSchedule(pack(BACKWARD_WEIGHT, OLDEST_STAGE, AUTO_MICROBATCH))
#: A forward that runs again, for the next backward of its stage that has no R yet.
R = RankSchedule(pack(RECOMPUTE, 0, AUTO_MICROBATCH))
#: The rank schedule without letters.
EMPTY = RankSchedule(np.empty(0, np.int64))


def concat(schedules: Iterable[RankSchedule]) -> RankSchedule:
    """Concatenate rank schedules.

    `sum` has the same result, but copies all previous letters at each step.

    Args:
        schedules: The rank schedules.

    Returns:
        Their concatenation.

    Raises:
        TypeError: An element is not a RankSchedule.

    Example:
        >>> from schedir.schedule_algebra import F, concat
        >>> concat(F[j] for j in range(3))
        <RankSchedule F F F>
    """
    return RankSchedule(
        np.concatenate(
            [
                EMPTY.letters,
                *(
                    _require_letters(f"element {index} of concat", schedule)
                    for index, schedule in enumerate(schedules)
                ),
            ]
        )
    )


def _require_letters(subject: str, schedule: object) -> Words:
    if not isinstance(schedule, RankSchedule):
        raise TypeError(
            f"{subject} must be a rank schedule such as 3 * F or F + B, not {describe(schedule)}"
        )
    return schedule.letters


def weave(
    forwards: RankSchedule,
    backwards: RankSchedule,
    warmup: int,
    weights: RankSchedule = EMPTY,
    defer_weights: int = 0,
) -> RankSchedule:
    """Return a warmup of forwards, then forwards and backwards in turn, then the remaining letters.

    With split backwards, each round of a forward and a backward ends with one letter of `weights`.
    The first `defer_weights` rounds have no such letter. The remaining letters of `weights` come
    last.

    Args:
        forwards: The forwards, in order.
        backwards: The backwards, in order.
        warmup: Number of forwards before the first round. A negative number means 0.
        weights: The weight gradients, in order. Leave them out if `backwards` are full backwards.
        defer_weights: Number of rounds without a weight gradient. A negative number means 0.

    Returns:
        The rank schedule.

    Raises:
        TypeError: An argument is not a RankSchedule or not an integer.

    Example:
        >>> from schedir import B, F, weave
        >>> weave(4 * F, 4 * B, warmup=2)
        <RankSchedule F F F B F B B B>
    """
    orders = {"forwards": forwards, "backwards": backwards, "weights": weights}
    letters = [_require_letters(f"{name} of weave", order) for name, order in orders.items()]
    warmup = _require_integer("warmup of weave", warmup)
    defer_weights = _require_integer("defer_weights of weave", defer_weights)
    starts = [-max(warmup, 0), 0, max(defer_weights, 0)]
    sort_key = np.concatenate([np.arange(len(w)) + s for w, s in zip(letters, starts, strict=True)])
    return RankSchedule(np.concatenate(letters)[np.argsort(sort_key, kind="stable")])


def overlapped_pair(first: RankSchedule, second: RankSchedule) -> RankSchedule:
    """Return pairs of letters that run together, as in DualPipe.

    Args:
        first: The first letter of each pair.
        second: The second letter of each pair. `second` must have as many letters as `first`.

    Returns:
        The pairs. Each second letter is joined to the first.

    Raises:
        TypeError: An argument is not a RankSchedule.
        ValueError: The lengths differ.

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule, overlapped_pair, to_text
        >>> def cells(rank, ranks, microbatches):
        ...     return F + (microbatches - 1) * overlapped_pair(F, B) + B
        >>> for line in to_text(expand_schedule(cells, PipelineShape(ranks=1,
        ...     microbatches=4))).splitlines()[-3:]:
        ...     print(line)
          F 0.0
          3 x  F 0.1+ & B 0.0+
          B 0.3
    """
    first_letters = _require_letters("first of overlapped_pair", first)
    second_letters = _require_letters("second of overlapped_pair", second)
    if len(first_letters) != len(second_letters):
        raise ValueError(
            f"overlapped_pair needs two schedules of equal length, not of {len(first_letters)} and "
            f"{len(second_letters)} letters"
        )
    return RankSchedule(np.stack([first_letters, second_letters | JOINED_BIT], 1).reshape(-1))


Schedule = Callable[..., RankSchedule | Iterable[RankSchedule]]
_S = TypeVar("_S", bound=Schedule)


def with_placement(placement: Placement, v: int | None = None) -> Callable[[_S], _S]:
    """Return a decorator that restricts a schedule to a placement.

    A schedule function receives numbers only, and cannot test the placement. The decorator sets the
    attribute `placed` of the function. `expand_schedule` reads it, and raises ScheduleError for
    shapes with another placement.

    Args:
        placement: The placement.
        v: The number of stages per rank, if the schedule fixes it.

    Returns:
        The decorator.

    Raises:
        TypeError: `placement` is not a placement.

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule
        >>> from schedir.schedule_algebra import with_placement
        >>> @with_placement("vee")
        ... def valley(rank, ranks, microbatches):
        ...     return microbatches * (F[0] + F[1] + B[1] + B[0])
        >>> expand_schedule(valley, PipelineShape(ranks=2, microbatches=3, placement="vee"))
        <draft valley: 2 ranks, 24 instructions>
        >>> expand_schedule(valley, PipelineShape(2, 3, stages_per_rank=2, placement="loop"))
        Traceback (most recent call last):
            ...
        schedir.errors.ScheduleError: valley: valley needs placement 'vee', not 'loop' with 2 stages per rank
          hint: in placement 'vee', rank 0 has the stages [0, 3]
    """  # noqa: E501
    if not isinstance(placement, str | tuple):
        raise TypeError(
            "@with_placement takes a placement, as in @with_placement('loop'), not "
            f"{placement!r:.60}"
        )

    def mark(schedule: _S) -> _S:
        vars(schedule)["placed"] = (placement, v)
        return schedule

    return mark


def with_weight_delay(delay: int | Iterable[int]) -> Callable[[_S], _S]:
    """Return a decorator for a schedule that needs a given weight delay.

    The decorator sets the attribute `weight_delay` of the function. `expand_schedule` reads it
    for shapes with several optimizer steps. If a shape has another weight delay,
    `expand_schedule` raises ScheduleError.

    Args:
        delay: One number, or one per stage, as in `PipelineShape`.

    Returns:
        The decorator.

    Raises:
        TypeError: `delay` is neither an integer nor several integers.

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule
        >>> from schedir.schedule_algebra import with_weight_delay
        >>> @with_weight_delay(1)
        ... def late(rank, ranks, microbatches):
        ...     return microbatches * (F + B)
        >>> expand_schedule(late, PipelineShape(1, 4, optimizer_steps=2, weight_delay=0))
        Traceback (most recent call last):
            ...
        schedir.errors.ScheduleError: late: late needs weight_delay 1, not 0
    """
    if isinstance(delay, NON_NUMBER_TYPES):
        raise TypeError(
            "@with_weight_delay takes an integer, or a list with one integer per stage, not "
            f"{delay!r:.60}"
        )
    if isinstance(delay, Iterable):
        delay = tuple(_require_integer("@with_weight_delay", number) for number in delay)
    else:
        delay = _require_integer("@with_weight_delay", delay)

    def mark(schedule: _S) -> _S:
        vars(schedule)["weight_delay"] = delay
        return schedule

    return mark


def _unwrap_partial(schedule: Schedule) -> Schedule:
    while isinstance(schedule, partial):
        schedule = schedule.func
    return schedule


def get_schedule_name(schedule: Schedule) -> str:
    """Return the name of a schedule.

    Args:
        schedule: A schedule function. `functools.partial` objects are unwrapped.

    Returns:
        The name of the function, or of the type of a callable object.
    """
    schedule = _unwrap_partial(schedule)
    return str(getattr(schedule, "__name__", type(schedule).__name__))


def has_free_parameter(
    name: str, schedule: Schedule, signature: inspect.Signature | None = None
) -> bool:
    """Return whether a schedule has a parameter with this name that no `partial` binds.

    `expand_schedule` must pass a value for such a parameter.

    Args:
        name: Name of the parameter.
        schedule: A schedule function or a `functools.partial`.
        signature: Signature of the schedule. If None, the function inspects `schedule`.

    Returns:
        True if the schedule has such a parameter. The result is False if `schedule` is not a
        function.
    """
    bound_arguments = schedule.keywords if isinstance(schedule, partial) else {}
    try:
        signature = signature or inspect.signature(schedule)
        return name in signature.parameters and name not in bound_arguments
    except (TypeError, ValueError):  # Not a function: `expand_schedule` raises the error.
        return False


def has_free_v(schedule: Schedule) -> bool:
    """Return whether a schedule has a parameter `v` that no `functools.partial` binds.

    Args:
        schedule: A schedule function or a `functools.partial`.

    Returns:
        See `has_free_parameter`.
    """
    return has_free_parameter("v", schedule)


def get_stages_per_rank(schedule: Schedule) -> int:
    """Return the number of stages per rank that a schedule has by default.

    Args:
        schedule: A schedule function or a `functools.partial`.

    Returns:
        The number that the decorator `with_placement` fixes, if it fixes one. Otherwise it is the
        bound value or the default of the parameter `v`. The number is 2 if `v` has no default,
        because such a schedule is for several stages. The number is 1 if there is no `v`.
    """
    if fixed := get_placement_mark(schedule)[1]:
        return fixed
    try:
        v = inspect.signature(schedule).parameters.get("v")
    except (TypeError, ValueError):  # Not a function: `expand_schedule` raises the error.
        return 1
    if v is None:
        return 1
    return v.default if isinstance(v.default, int) and v.default > 0 else 2


def get_placement_mark(schedule: Schedule) -> tuple[Placement | None, int | None]:
    """Return the placement and the stages per rank to which a schedule is restricted.

    Args:
        schedule: A schedule function or a `functools.partial`.

    Returns:
        The two arguments of `with_placement`. Both are None for a schedule without a restriction.
    """
    mark: tuple[Placement | None, int | None] = getattr(
        _unwrap_partial(schedule), "placed", (None, None)
    )
    return mark


def apply_schedule_defaults(schedule: Schedule, shape: PipelineShape) -> PipelineShape:
    """Set the fields in `shape.default_fields` to the values that a schedule needs.

    Args:
        schedule: A schedule function.
        shape: The shape that a user gave.

    Returns:
        The shape with the placement, stages per rank and weight delay of the schedule, for fields
        in `shape.default_fields`. It is `shape` itself if nothing changes.

    Example:
        >>> from schedir import PipelineShape, schedules
        >>> apply_schedule_defaults(schedules.zb_v, PipelineShape(ranks=4, microbatches=8))
        PipelineShape(ranks=4, microbatches=8, stages_per_rank=2, placement='vee')
        >>> apply_schedule_defaults(schedules.interleaved, PipelineShape(4, 8, stages_per_rank=1))
        PipelineShape(ranks=4, microbatches=8)
        >>> vee = PipelineShape(4, 8, placement="vee")
        >>> apply_schedule_defaults(schedules.gpipe, vee).stages_per_rank
        2
    """
    changes: dict[str, Any] = {}
    placement = get_placement_mark(schedule)[0]
    if "placement" in shape.default_fields and placement is not None:
        changes["placement"] = placement
    has_named_placement = isinstance(changes.get("placement", shape.placement), str)
    # For a schedule with one stage per rank, `stages_per_rank` keeps the default of the placement,
    # such as 2 for "vee".
    if (
        "stages_per_rank" in shape.default_fields
        and has_named_placement
        and get_stages_per_rank(schedule) > 1
    ):
        changes["stages_per_rank"] = get_stages_per_rank(schedule)
    delay = get_weight_delay_mark(schedule)
    if "weight_delay" in shape.default_fields and shape.optimizer_steps > 1 and delay is not None:
        changes["weight_delay"] = delay
    changes = {name: value for name, value in changes.items() if getattr(shape, name) != value}
    return replace(shape, **changes) if changes else shape


def get_weight_delay_mark(schedule: Schedule) -> int | tuple[int, ...] | None:
    """Return the weight delay to which a schedule is restricted.

    Args:
        schedule: A schedule function or a `functools.partial`.

    Returns:
        One number or one per stage, as in `with_weight_delay`. None for a schedule without a
        restriction.
    """
    mark: int | tuple[int, ...] | None = getattr(_unwrap_partial(schedule), "weight_delay", None)
    return mark
