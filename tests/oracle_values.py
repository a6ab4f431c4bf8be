"""The data of the oracle in `oracle_threads.py`: tensors, slots, messages and queue entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from schedir.ir.isa.instructions import Instr

Slot = tuple[object, ...]


class OracleError(Exception):
    """Raised if the program breaks a rule of the oracle."""


class Tensor(NamedTuple):
    """A named value: the output of a stage, or the gradient of its input."""

    kind: str  # "act" or "grad", or "skip" or "skip_grad"
    stage: int
    mb: int
    # True: the complete value. False: the 1/t of it that a scatter keeps. Other forms are those of
    # `oracle_segments.py`.
    whole: object = True


class Event:
    """An event that happens once. `when` is its number, from 1, or 0 before it happens."""

    __slots__ = ("sleepers", "when")

    def __init__(self) -> None:
        self.when = 0
        self.sleepers: list[Iterator[Event]] = []


@dataclass(eq=False, slots=True)
class SlotValue:
    """The value of a slot. Its tensor exists after the event `ready`."""

    ready: Event
    tensor: Tensor | None = None
    state: dict[bool, str] = field(default_factory=dict)  # True -> its tier, False -> its form


@dataclass(eq=False, slots=True)
class Message:
    """One side of a transfer."""

    channel: tuple[object, ...]
    sends: bool
    value: SlotValue  # the value that is sent, or the slot value that receives it
    met: Event
    alone: bool = False  # True for a send that does not wait for its receive


@dataclass(eq=False, slots=True)
class Entry:
    """An entry of a queue: an instruction or a group."""

    rank: int
    group: list[Instr]
    queues: set[object] = field(default_factory=set)
    waits: list[Event] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    meets: list[Event] = field(default_factory=list)  # ends of its messages and collectives
    kind: object = ""  # the name of its queue, without the rank
    issued: Event = field(default_factory=Event)
    done: Event = field(default_factory=Event)
    arrived: int = 0  # number of its queues that have reached the entry

    @property
    def ended(self) -> int:
        """The number of the event that ended the entry."""
        return max((event.when for event in self.meets), default=self.done.when)

    def __str__(self) -> str:
        return " & ".join(map(str, self.group))


def met(ties: list[set[int]], stages: list[list[int]], rank: int) -> set[int]:
    """Return the ranks that sum tied weights together with a rank.

    These are the ranks that are connected to it, directly or over other ranks, by a tied weight
    with copies on several ranks.
    """
    party = {rank}
    for _ in stages:
        for tie in ties:
            has = {r for r, own in enumerate(stages) if tie & {*own}}
            if has & party and any(not tie <= {*stages[r]} for r in has):
                party |= has
    return party
