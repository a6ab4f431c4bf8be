"""Expand a schedule into a draft: the compute instructions of each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from schedir.errors import SchedirError, ScheduleError, ShapeError, describe_exception, require_type
from schedir.ir.input_trust import RAISE_LIMIT_HINT, get_input_trust
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import find_named_placement
from schedir.ir.program import Program, StreamSlices, Words
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

_BATCH_LETTERS = 2**17  # letters that are spelled together: of all ranks of most shapes
_ALGEBRA_HINT = "words are F + B, n * F, F[own stage] and F.at(microbatch)"


def expand_schedule(schedule: Schedule, shape: PipelineShape) -> Program:
    """Return the compute-only program of a schedule: F, B, I, W and R of every rank.

    Args:
        schedule: A function of (rank, ranks, microbatches), and of `v`, the number of stages on the
            rank, and `sequence_chunks`, if it has parameters of these names.  It returns a
            RankSchedule or yields several.
        shape: The shape of the pipeline.  What is not given is what the schedule is made for.

    Returns:
        The program, without messages, reductions and steps.

    Raises:
        ScheduleError: `schedule` is not such a function, raises an error, names a stage that is not
            on the rank, or is made for another placement.

    Example:
        >>> from schedir import B, F, PipelineShape, expand_schedule, to_text
        >>> def mine(rank, ranks, microbatches):
        ...     lead = min(ranks - 1 - rank, microbatches)
        ...     return lead * F + (microbatches - lead) * (F + B) + lead * B
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
    require_type(shape, PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
    name = get_schedule_name(schedule)
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):
        hints = {
            str: "the built-in ones are in schedir.schedules",
            RankSchedule: "do not call it yourself",
        }
        raise ScheduleError(
            f"a schedule is a function, not {schedule!r:.60}", hint=hints.get(type(schedule), "")
        ) from None
    if inspect.iscoroutinefunction(schedule) or inspect.isasyncgenfunction(schedule):
        raise ScheduleError("a schedule is a plain function, not an async one", program=name)
    shape = apply_schedule_defaults(schedule, shape).resolve_defaults()
    told = {"v": shape.stages_per_rank, "sequence_chunks": shape.sequence_chunks}
    told = {
        name: number
        for name, number in told.items()
        if has_free_parameter(name, schedule, signature)
    }
    try:
        signature.bind(0, shape.ranks, shape.microbatches, **told)
    except TypeError:
        several = len(signature.parameters) > 3
        raise ScheduleError(
            f"a schedule takes (rank, ranks, microbatches), but this one takes {signature}",
            program=name,
            hint="bind other options with functools.partial" if several else "",
        ) from None
    _require_placement(schedule, shape, name)
    spelled: list[Words] = []  # of some ranks each
    words: list[Words] = []  # of the ranks since
    offsets, first = np.zeros(shape.ranks + 1, np.int64), 0
    for rank, own in enumerate(shape.stages_on_rank):
        told |= {"v": len(own)} if "v" in told else {}
        call = partial(schedule, **told) if told else schedule
        words.append(_call_schedule(call, name, rank, shape))
        offsets[rank + 1] = offsets[rank] + len(words[-1])
        most = get_input_trust().max_instructions
        if most is not None and offsets[rank + 1] > most:
            raise ShapeError(
                f"the schedule of {shape.stages} stages x {shape.microbatches} microbatches says "
                f"more than the {most} instructions that a program may have",
                program=name,
                hint=RAISE_LIMIT_HINT,
                fields=["microbatches", "ranks", "stages_per_rank"],
            )
        if offsets[rank + 1] - offsets[first] >= _BATCH_LETTERS or rank + 1 == shape.ranks:
            try:
                spelled.append(number_letters(words, first, shape))
            except SchedirError as error:
                error.program = name
                raise
            words, first = [], rank + 1
    whole = spelled[0] if len(spelled) == 1 else np.concatenate(spelled)
    return Program(name, shape, StreamSlices.from_words(whole, offsets))


def _require_placement(schedule: Schedule, shape: PipelineShape, name: str) -> None:
    placement, fixed = get_placement_mark(schedule)
    delay = get_weight_delay_mark(schedule)
    if (
        shape.optimizer_steps > 1
        and delay is not None
        and replace(shape, weight_delay=delay) != shape
    ):
        raise ScheduleError(
            f"{name} is for updates with a delay of {delay}, not of {shape.weight_delay}",
            program=name,
        )
    v = fixed or shape.stages_per_rank
    if placement is None or (placement, v) == (shape.placement, shape.stages_per_rank):
        return
    if isinstance(placement, str):
        v = max(v, find_named_placement(placement).stages_per_rank)
    right = PipelineShape(shape.ranks, shape.microbatches, v, placement)
    if not np.array_equal(shape.replica_ranks, right.replica_ranks):
        raise ScheduleError(
            f"{name} is for placement {placement!r}{f' with {v} stages per rank' * bool(fixed)}, "
            f"not for {shape.placement!r} with {shape.stages_per_rank}",
            program=name,
        )


def _call_schedule(call: Schedule, name: str, rank: int, shape: PipelineShape) -> Words:
    """The letters of all words of one rank, unless they do not end."""
    what = f"the schedule of rank {rank} of {shape.ranks}"
    enough = (
        4 * len(shape.stages_on_rank[rank]) * shape.microbatches
    )  # F, R, I, W of each (stage, mb)
    most = 3 * enough + 1000  # what is a little wrong is best said of the whole
    words, count = [EMPTY.letters], 0
    try:
        told = call(rank, shape.ranks, shape.microbatches)
        many = not isinstance(told, RankSchedule | str) and isinstance(told, Iterable)
        for word in _iterate_yielded(told, what) if many else [told]:
            if not isinstance(word, RankSchedule):
                raise ScheduleError(
                    f"{what} must {'yield' if many else 'return'} words, not {word!r:.60}",
                    hint="return a sum like 2 * F + 2 * B, or yield its parts one by one",
                )
            words.append(word.letters)
            count += max(len(word), 1)
            if count > most:
                raise ScheduleError(
                    f"{what} says more than {most} times F, B, I, W or R, where {enough} are "
                    "enough",
                    hint="does its loop end?" if many else "",
                )
    except SchedirError as error:
        error.program = error.program or name
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and GeneratorExit, too: it has nothing to exit
        raise ScheduleError(
            f"{what} raised {describe_exception(error)}",
            program=name,
            hint=_ALGEBRA_HINT
            if isinstance(error, TypeError) and "'RankSchedule'" in str(error)
            else "",
        ) from error
    return np.concatenate(words)


def _iterate_yielded(generator: Any, subject: str) -> Iterator[RankSchedule]:
    """What a schedule yields; what it returns besides is lost, and so refused."""
    if (returned := (yield from generator)) is not None:
        raise ScheduleError(
            f"{subject} yields words and also returns {returned!r:.60}, which is lost",
            hint="yield that too, and then return",
        )
