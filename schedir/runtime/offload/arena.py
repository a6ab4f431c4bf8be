"""Arena: preallocated memory of a tier, in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from schedir.runtime.offload.copy_lanes import LaneJob

Place = TypeVar("Place")  # where a room is: memory, or the place in a file


@dataclass(eq=False)
class ArenaBlock(Generic[Place]):
    """A room of `size` bytes; whoever takes it writes when what is `after` has ended.

    `parts` are the tensors in it, and `laid` how, as whoever was there last has made them.
    """

    place: Place
    size: int
    after: list[LaneJob]
    laid: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)


class Arena(Generic[Place]):
    """The rooms of a tier; `used` are the bytes of what is in them, and `most` the most ever.

    A value takes the smallest room that is free and holds it.  Where none does, one is made: in the
    first step, for a step takes rooms in the order of its Stream, as the one before it did.

    Where it is said how many rooms there are, as many are made, and then whoever needs one waits
    for that which is free longest, of those that hold it.  Where none does, that one is made
    larger, when whoever reads it has ended: of memory there is never more than of these rooms.
    """

    def __init__(self, make: Callable[[int], Place]) -> None:
        self.make = make
        self.free: list[ArenaBlock[Place]] = []
        self.used = self.most = self.made = self.rooms = 0

    def take(self, size: int, used: int, rooms: int | None = None) -> ArenaBlock[Place]:
        """A room of at least `size` bytes, for so many that count; of `rooms`, if that is said.

        Raises what those have raised who were waited for.
        """
        self.used += used
        self.most = max(self.most, self.used)
        fit = [room for room in self.free if room.size >= size]
        if rooms is None and fit:
            room = min(fit, key=lambda one: one.size)
        elif rooms is None or self.rooms < rooms or not self.free:
            return self._new(size)
        elif fit:
            room = fit[0]
        else:
            room = self.free[0]
            self._enlarge(room, size)
        self.free.remove(room)
        return room

    def _new(self, size: int) -> ArenaBlock[Place]:
        room = ArenaBlock(self.make(size), size, [])
        self.made += size
        self.rooms += 1
        return room

    def _enlarge(self, room: ArenaBlock[Place], size: int) -> None:
        """Let a room that is free be of another size, and what it had be gone before."""
        for job in room.after:
            job.finish()
        room.laid, room.parts = [], []
        del room.place
        room.place, room.after = self.make(size), []
        self.made += size - room.size
        room.size = size

    def add(self, size: int) -> None:
        """Make a room that nobody needs yet."""
        self.free.append(self._new(size))

    def give_back(self, room: ArenaBlock[Place], used: int, after: LaneJob | None = None) -> None:
        """Let others have a room, when a job that reads it has ended."""
        self.used -= used
        room.after = [] if after is None else [after]
        self.free.append(room)
