"""Memory: what a program holds, read off its Streams.

Until slots are assigned, what counts is (stage, mb) pairs in flight: alive from their Forward
until nothing that it saved is held any more: until Backward, or until BackwardWeight when the
backward is split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.ops import ROWS, Token
from schedir.program import Program, Stream

_HELD = {Token.SAVED, Token.TAPE}  # BackwardInput turns one into the other
_CHANGE = np.array([len(_HELD & {*r.gives}) - len(_HELD & {*r.frees}) for r in ROWS])


def in_flight(stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the number of (stage, mb) alive changes in a Stream, and to what."""
    change = _CHANGE[stream.op]
    at = np.flatnonzero(change)
    return at, np.cumsum(change[at])


def peak_in_flight(program: Program) -> NDArray[np.int64]:
    """Per rank, the most (stage, mb) alive at once; exact, since a rank's compute is in order.

    A program that does not train keeps nothing for a backward.
    """
    if not program.trains:
        return np.zeros(program.plan.ranks, np.int64)
    return np.array([in_flight(s)[1].max(initial=0) for s in program.streams], np.int64)
