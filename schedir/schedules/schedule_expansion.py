"""Expand a schedule into a draft: the compute instructions of each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from schedir.errors import (
    CommandHint,
    SchedirError,
    ScheduleError,
    ShapeError,
    describe,
    describe_exception,
    require_type,
)
from schedir.ir.input_trust import RAISE_LIMIT_HINT, get_input_trust
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import find_named_placement
from schedir.ir.program import Program, StreamSlices, Words
from schedir.retired_names import suggest_name
from schedir.schedules import schedule_algebra
from schedir.schedules.microbatch_numbering import number_letters
from schedir.schedules.schedule_algebra import (
    EMPTY,
    RankSchedule,
    Schedule,
    apply_schedule_defaults,
    get_placement_mark,
    get_schedule_name,
    get_weight_delay_mark,
    has_free_parameter,
)

# Largest number of letters in one call of `number_letters`.  Most shapes need one call only.
_BATCH_LETTERS = 2**17
_PARAMETERS = ["rank", "ranks", "microbatches"]
_ALGEBRA_HINT = "a rank schedule is made of F + B, n * F, F[local stage] and F.at(microbatch)"


def expand_schedule(schedule: Schedule, shape: PipelineShape) -> Program:
    """Expand a schedule into a draft: the F, B, I, W and R of each rank.

    Args:
        schedule: A function of (rank, ranks, microbatches). It returns a RankSchedule or a list of
            RankSchedules, or yields RankSchedules. A parameter `v` receives the number of stages of
            the rank. A parameter `sequence_chunks` receives this field of the shape.
        shape: Shape of the pipeline. Fields that are not given have the values that the schedule
            needs.

    Returns:
        The program, without messages, reductions and steps.

    Raises:
        ScheduleError: `schedule` is not a function of (rank, ranks, microbatches), raises an error,
            or does not end. Or the schedule needs a placement or weight delay that `shape` does not
            have, or uses a stage that is not on the rank.
        ShapeError: The program has more instructions than allowed (`input_limits`).

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule, to_text
        >>> def mine(rank, ranks, microbatches):
        ...     warmup = min(ranks - 1 - rank, microbatches)
        ...     return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
        >>> print(to_text(expand_schedule(mine, PipelineShape(ranks=2, microbatches=4))), end="")
        schedir 1
        program mine
        ranks 2  microbatches 4  stages_per_rank 1  placement loop
        tp 1  dp 1  tied_weights no  clip_grad_norm no
        <BLANKLINE>
        rank 0
          2 x  F 0.0+
          2 x  B 0.0+; F 0.2+
          2 x  B 0.2+
        <BLANKLINE>
        rank 1
          4 x  F 1.0+; B 1.0+
    """
    require_type(shape, "shape", PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
    name = get_schedule_name(schedule)
    signature = _get_signature(schedule, name)
    if inspect.iscoroutinefunction(schedule) or inspect.isasyncgenfunction(schedule):
        raise ScheduleError("a schedule must be a plain function, not an async one", program=name)
    shape = apply_schedule_defaults(schedule, shape).resolve_defaults()
    arguments = {"v": shape.stages_per_rank, "sequence_chunks": shape.sequence_chunks}
    arguments = {
        name: number
        for name, number in arguments.items()
        if has_free_parameter(name, schedule, signature)
    }
    try:
        signature.bind(0, shape.ranks, shape.microbatches, **arguments)
    except TypeError:
        has_options = len(signature.parameters) > 3
        options = ", ".join(f"{option}=..." for option in [*signature.parameters][3:])
        hint = ""
        if has_options:
            hint = CommandHint(
                f"bind other options: functools.partial({name}, {options})",
                f"give other options in brackets: 'FILE.py:{name}({options})'",
            )
        if next(iter(signature.parameters), "") in ("self", "cls"):
            hint = f"take the method from an object: MyClass().{name}"
        raise ScheduleError(
            f"a schedule must take (rank, ranks, microbatches), but this one takes {signature}",
            program=name,
            hint=hint,
        ) from None
    first_names = [*signature.parameters][:3]
    if sorted(first_names) == sorted(_PARAMETERS) and first_names != _PARAMETERS:
        raise ScheduleError(
            f"a schedule must take (rank, ranks, microbatches) in this order, but this one takes "
            f"{signature}",
            program=name,
            hint=f"def {name}(rank, ranks, microbatches)",
        )
    _require_placement(schedule, shape, name)
    numbered_words: list[Words] = []  # Numbered instructions.  Each entry has several ranks.
    letters: list[Words] = []  # Letters of the following ranks, which are not numbered yet.
    offsets, first_rank = np.zeros(shape.ranks + 1, np.int64), 0
    for rank, local_stages in enumerate(shape.stages_on_rank):
        arguments |= {"v": len(local_stages)} if "v" in arguments else {}
        call = partial(schedule, **arguments) if arguments else schedule
        letters.append(_call_schedule(call, name, rank, shape))
        offsets[rank + 1] = offsets[rank] + len(letters[-1])
        max_instructions = get_input_trust().max_instructions
        if max_instructions is not None and offsets[rank + 1] > max_instructions:
            raise ShapeError(
                f"the schedule of {shape.stages} stages x {shape.microbatches} microbatches has "
                f"more instructions than the limit of {max_instructions}",
                program=name,
                hint=RAISE_LIMIT_HINT,
                fields=["microbatches", "ranks", "stages_per_rank"],
            )
        if offsets[rank + 1] - offsets[first_rank] >= _BATCH_LETTERS or rank + 1 == shape.ranks:
            try:
                numbered_words.append(number_letters(letters, first_rank, shape))
            except SchedirError as error:
                error.program = name
                raise
            letters, first_rank = [], rank + 1
    words_of_all_ranks = (
        numbered_words[0] if len(numbered_words) == 1 else np.concatenate(numbered_words)
    )
    return Program(name, shape, StreamSlices.from_words(words_of_all_ranks, offsets))


def _get_signature(schedule: Schedule, name: str) -> inspect.Signature:
    """Return the signature of a schedule function. Raises ScheduleError for other objects."""
    if isinstance(schedule, type):
        from schedir.schedules import get_built_in_schedules, suggest_schedules

        hint = suggest_schedules(schedule.__name__, [*get_built_in_schedules()])
        raise ScheduleError(f"a schedule must be a function, not {describe(schedule)}", hint=hint)
    if isinstance(schedule, partial) and callable(schedule.func):
        parameters = inspect.signature(schedule.func).parameters
        takes_any_name = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        options = [*parameters][3:]  # rank, ranks and microbatches come first
        for option in schedule.keywords if not takes_any_name else ():
            if option not in parameters:
                hint = (
                    suggest_name(option, options) or f"it has {', '.join(options) or 'no options'}"
                )
                raise ScheduleError(f"{name} has no option {option!r}", hint=hint, fields=[option])
    try:
        return inspect.signature(schedule)
    except (TypeError, ValueError):
        hints = {
            str: "the built-in schedules are in schedir.schedules",
            RankSchedule: "give the function, not its result",
        }
        raise ScheduleError(
            f"a schedule must be a function, not {schedule!r:.60}",
            hint=hints.get(type(schedule), ""),
        ) from None


def _require_placement(schedule: Schedule, shape: PipelineShape, name: str) -> None:
    placement, fixed = get_placement_mark(schedule)
    delay = get_weight_delay_mark(schedule)
    if (
        shape.optimizer_steps > 1
        and delay is not None
        and replace(shape, weight_delay=delay) != shape
    ):
        raise ScheduleError(
            f"{name} needs weight_delay {delay}, not {shape.weight_delay}",
            program=name,
        )
    v = fixed or shape.stages_per_rank
    if placement is None or (placement, v) == (shape.placement, shape.stages_per_rank):
        return
    if isinstance(placement, str):
        v = max(v, find_named_placement(placement).stages_per_rank)
        expected_shape = PipelineShape(shape.ranks, shape.microbatches, v, placement)
    else:
        expected_shape = PipelineShape(shape.ranks, shape.microbatches, placement=placement)
    if not np.array_equal(shape.replica_ranks, expected_shape.replica_ranks):
        raise ScheduleError(
            f"{name} needs placement {placement!r}{f' with {v} stages per rank' * bool(fixed)}, "
            f"not {shape.placement!r} with {shape.stages_per_rank_text}",
            program=name,
            hint=f"in placement {placement!r}, rank 0 has the stages "
            f"{[*expected_shape.stages_on_rank[0]]}"
            if isinstance(placement, str)
            else "",
        )


def _call_schedule(call: Schedule, name: str, rank: int, shape: PipelineShape) -> Words:
    """Return the letters of one rank. Raises ScheduleError if the schedule fails or never ends."""
    subject = f"the schedule of rank {rank} of {shape.ranks}"
    # A pair (stage, microbatch) needs at most F, R, I and W.
    max_needed = 4 * len(shape.stages_on_rank[rank]) * shape.microbatches
    # The limit leaves a margin, because the check of the complete draft gives better errors.
    limit = 3 * max_needed + 1000
    letters, count = [EMPTY.letters], 0
    try:
        result = call(rank, shape.ranks, shape.microbatches)
        is_generator = not isinstance(result, RankSchedule | str) and isinstance(result, Iterable)
        for rank_schedule in _iterate_yielded(result, subject) if is_generator else [result]:
            if not isinstance(rank_schedule, RankSchedule):
                raise ScheduleError(
                    f"{subject} must {'yield' if is_generator else 'return'} rank schedules, not "
                    f"{rank_schedule!r:.60}",
                    hint="return a sum like 2 * F + 2 * B, or yield its terms one by one",
                )
            letters.append(rank_schedule.letters)
            count += max(len(rank_schedule), 1)
            if count > limit:
                raise ScheduleError(
                    f"{subject} has more than {limit} instructions, but a schedule of this shape "
                    f"needs at most {max_needed}",
                    hint="does its loop end?" if is_generator else "",
                )
    except SchedirError as error:
        error.program = error.program or name
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A schedule must not end the process, even by SystemExit.
        raise ScheduleError(
            f"{subject} raised {describe_exception(error)}",
            program=name,
            hint=_find_hint(error),
        ) from error
    return np.concatenate(letters)


def _find_hint(error: BaseException) -> str:
    """Return the hint for an error that a schedule raised, or an empty string."""
    if isinstance(error, TypeError) and "RankSchedule" in str(error):
        return _ALGEBRA_HINT
    if isinstance(error, NameError) and error.name in schedule_algebra.__all__:
        return f"from schedir import {error.name}"
    return ""


def _iterate_yielded(generator: Any, subject: str) -> Iterator[RankSchedule]:
    """Yield the rank schedules of a generator. Raises ScheduleError if it also returns a value."""
    if (returned := (yield from generator)) is not None:
        raise ScheduleError(
            f"{subject} yields rank schedules, but also returns {returned!r:.60}",
            hint="yield this value too, and return nothing",
        )
