"""Columns: what the tables in `ir/ops.py` say of their rows by name."""

from __future__ import annotations

from enum import Enum
from typing import Final

TIERS: Final = ("device", "host", "disk")


class Per(Enum):
    """What an instruction exists once for, which is also how its text is addressed.

    STAGE and RANK once in each update, whose number follows in the text if it is not 0; TURN as
    often as a program likes, and the k-th time for its stage has the number k there.
    """

    MICROBATCH = "stage.mb"
    STAGE = "stage"
    RANK = ""
    TURN = "stage.turn"


class Found(Enum):
    """How the giver of a value is found (`schedir/ir/flow.py`)."""

    ONCE = "made once for its address, and changed in the order of the table"
    ALL = "collected from all that give it: the last of them"
    VERSION = "of the update whose weights the microbatch uses"
    AGAIN = "made again and again: by the nearest giver that stands earlier in the Stream"
    SINCE = "there from the start, and since the nearest giver that stands earlier in the Stream"


class Hop(Enum):
    """Where the other side of a message is, from a stage: a neighbour, or the end of a skip.

    `Program.beside` has the stages, by number.
    """

    NEXT = "the next stage"
    PREVIOUS = "the previous stage"
    SKIP_TO = "the stage that takes the skip"
    SKIP_FROM = "the stage that gives the skip"

    @property
    def back(self) -> Hop:
        """The way back."""
        return _BACK[self]

    @property
    def ahead(self) -> bool:
        """Whether it leads to a later stage."""
        return self in (Hop.NEXT, Hop.SKIP_TO)


_BACK: Final = {
    Hop.NEXT: Hop.PREVIOUS, Hop.PREVIOUS: Hop.NEXT,
    Hop.SKIP_TO: Hop.SKIP_FROM, Hop.SKIP_FROM: Hop.SKIP_TO,
}  # fmt: skip
