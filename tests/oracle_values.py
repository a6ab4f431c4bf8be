"""What the oracle's hosts and queues carry: tensors that know what they are, slots, and messages.

A part of the oracle in `threads.py`, which says what the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from schedir.ir.isa.instructions import Instr

Slot = tuple[object, ...]


class Wrong(Exception):
    """The program did what cannot be right."""


class Tensor(NamedTuple):
    """Data that knows what it is: the output of a stage, or the gradient of its input."""

    kind: str  # "act" or "grad", or "skip" or "skip_grad"
    stage: int
    mb: int
    whole: object = True  # or False: the 1/t that scatter keeps; or what `pieces.py` says


class Event:
    """Something that happens once; `when` counts all that happened before, and is 0 until then."""

    __slots__ = ("sleepers", "when")

    def __init__(self) -> None:
        self.when = 0
        self.sleepers: list[Iterator[Event]] = []


@dataclass(eq=False, slots=True)
class SlotValue:
    """What a slot holds: a tensor that is there when `ready` has happened."""

    ready: Event
    tensor: Tensor | None = None
    state: dict[bool, str] = field(default_factory=dict)  # where it is not as it was made


@dataclass(eq=False, slots=True)
class Message:
    """One side of a transfer."""

    channel: tuple[object, ...]
    sends: bool
    value: SlotValue  # what is sent, or where what is received goes
    met: Event
    alone: bool = False  # a send that waits for nobody


@dataclass(eq=False, slots=True)
class Entry:
    """What a queue runs as one: an instruction, or a group."""

    rank: int
    group: list[Instr]
    queues: set[object] = field(default_factory=set)
    waits: list[Event] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    meets: list[Event] = field(default_factory=list)  # what actions began, and the entry ends with
    kind: object = ""  # what its queue is of
    issued: Event = field(default_factory=Event)
    done: Event = field(default_factory=Event)
    arrived: int = 0  # queues that stand at this entry

    @property
    def ended(self) -> int:
        """When all had met; for compute, when it was done."""
        return max((event.when for event in self.meets), default=self.done.when)

    def __str__(self) -> str:
        return " & ".join(map(str, self.group))


def met(ties: list[set[int]], stages: list[list[int]], rank: int) -> set[int]:
    """Whom a rank meets to sum what is tied: who needs its copies, who needs theirs, and so on."""
    party = {rank}
    for _ in stages:
        for tie in ties:
            has = {r for r, own in enumerate(stages) if tie & {*own}}
            if has & party and any(not tie <= {*stages[r]} for r in has):
                party |= has
    return party
