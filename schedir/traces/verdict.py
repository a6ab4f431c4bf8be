"""Verdict: whether a program that stands still has a deadlock, or waits for a rank that is late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from schedir.analysis.graph import Graph
from schedir.analysis.models import MODELS, Model
from schedir.errors import ProgramError, UsageError
from schedir.ir.program import Program
from schedir.traces.matched import Matched
from schedir.traces.placed import Cause, Link, Place, Placed
from schedir.verify.check import check, complete

# Unless one is said: the usual one, and where the recordings contradict it, laxer ones.
_USUAL: Final = ("device", *reversed(MODELS[: MODELS.index("device")]))


@dataclass(frozen=True)
class Verdict:
    """What is said of a copy of a program, under a progress model and on hosts that block or not.

    `refusal` is what `check` says of the program.  `circle` are transfers that wait for each other,
    each for the next; `causes` what others wait for and nothing keeps.  `if_blocked` says that this
    is a deadlock where hosts block, and none where they do not.
    """

    placed: Placed
    refusal: ProgramError | None
    places: tuple[Place, ...]
    causes: tuple[Cause, ...]
    circle: tuple[Link, ...]
    if_blocked: bool = False

    @property
    def matched(self) -> Matched:
        """What was recorded."""
        return self.placed.matched

    @property
    def model(self) -> Model:
        """The progress model."""
        return self.placed.graph.model

    @property
    def is_deadlock(self) -> bool:
        """Whether nothing that anybody does can set it going again."""
        return bool(self.circle)


def judge(program: Program, copies: Sequence[Matched], model: Model | None = None) -> list[Verdict]:
    """A verdict on each copy of a program, of which all messages go as the program says.

    Without a model it is `device`, or the strictest laxer one that is not contradicted.
    Hosts are taken to block where nobody has issued what one that blocks could not have.  Raises
    UsageError for recordings that contradict the model, and another ProgramError for a program that
    is not complete.
    """
    return [_judge(program, matched, model) for matched in copies]


def _judge(program: Program, matched: Matched, model: Model | None) -> Verdict:
    for one in (model,) if model else _USUAL:
        placed = Placed(complete(program, one), matched)
        if placed.contradicts is None:
            break
    if placed.contradicts is not None:
        named = [placed.graph.index.locate(at) for at in placed.contradicts]
        first, later = (f"{instr} of rank {matched.ranks[rank]}" for rank, _, instr in named)
        raise UsageError(
            f"this did not run under {one}: {later} has not waited for {first}", fields=["model"]
        )
    blocked = Placed(Graph.of(program, one, blocks=True), matched)
    free = _verdict(placed)
    if free.is_deadlock or blocked.runs_ahead:
        return free
    found = _verdict(blocked)
    return replace(free, if_blocked=True) if found.is_deadlock else found


def _verdict(placed: Placed) -> Verdict:
    graph = placed.graph
    places = tuple(placed.places())
    causes: dict[Cause, None] = {}
    circle: tuple[Link, ...] = ()
    for place in places:
        if (
            place.at is None or place.late
        ):  # a rank that is late is a cause where others wait for it
            continue
        links, cause = placed.chain(place.at)
        if cause is not None:
            causes[cause] = None
        elif not circle:
            back = [link.at for link in links].index(links[-1].needs)
            circle = tuple(links[back:])
    refusal = None
    try:
        check(graph.program, graph.model, blocks=graph.blocks)
    except ProgramError as error:
        refusal = error
    return Verdict(placed, refusal, places, tuple(causes), circle)
