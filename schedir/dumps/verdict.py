"""Verdict: whether a program that stands still has a deadlock, or waits for a rank that is late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from schedir.analysis.graph import Graph
from schedir.analysis.models import MODELS, Model
from schedir.dumps.matched import Matched
from schedir.dumps.placed import Cause, Link, Place, Placed
from schedir.errors import ProgramError, UsageError
from schedir.ir.program import Program
from schedir.verify.check import check, complete

# Unless one is said: the usual one, and where the recordings contradict it, laxer ones.
_USUAL: Final = ("device", *reversed(MODELS[: MODELS.index("device")]))


@dataclass(frozen=True)
class Verdict:
    """What is said of a copy of a program under a progress model.

    `circle` are transfers that wait for each other, each for the next; `causes` what others wait
    for and nothing keeps.  `refusal` is what `check` says of the program; of one that stands in a
    circle also what it says of it on hosts that block, if it says nothing else.
    """

    placed: Placed
    refusal: ProgramError | None
    places: tuple[Place, ...]
    causes: tuple[Cause, ...]
    circle: tuple[Link, ...]

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
    Raises UsageError for recordings that contradict the model, and another ProgramError for a
    program that is not complete.
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
    return _verdict(placed)


def _verdict(placed: Placed) -> Verdict:
    graph = placed.graph
    places = tuple(placed.places())
    causes: dict[Cause, None] = {}
    circle: tuple[Link, ...] = ()
    for place in places:
        # A rank that is late is a cause where others wait for it.
        if place.at is None or place.late:
            continue
        links, cause = placed.chain(place.at)
        if cause is not None:
            causes[cause] = None
        elif not circle:
            back = [link.at for link in links].index(links[-1].needs)
            circle = tuple(links[back:])
    hosts = (False, True) if circle else (False,)
    refusals = (_refusal(graph, blocks) for blocks in hosts)
    refusal = next((one for one in refusals if one is not None), None)
    return Verdict(placed, refusal, places, tuple(causes), circle)


def _refusal(graph: Graph, blocks: bool) -> ProgramError | None:
    """What `check` says of a program, on hosts that block or not."""
    try:
        check(graph.program, graph.model, blocks=blocks)
    except ProgramError as error:
        return error
    return None
