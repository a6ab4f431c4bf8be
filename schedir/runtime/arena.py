"""Arenas: memory of a tier that is made once, in rooms that values take and give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from schedir.runtime.lanes import Job

Place = TypeVar("Place")  # where a room is: memory, or the place in a file


@dataclass(eq=False)
class Room(Generic[Place]):
    """A room of `size` bytes; whoever takes it writes when what is `after` has ended."""

    place: Place
    size: int
    after: list[Job]


class Arena(Generic[Place]):
    """The rooms of a tier; `used` are the bytes of what is in them, and `most` the most ever.

    A value takes the smallest room that is free and holds it.  Where none does, one is made: in the
    first step, for a step takes rooms in the order of its Stream, as the one before it did.
    """

    def __init__(self, make: Callable[[int], Place]) -> None:
        self.make = make
        self.free: list[Room[Place]] = []
        self.used = self.most = self.made = 0

    def take(self, size: int, used: int) -> Room[Place]:
        """A room of at least `size` bytes, for so many that count."""
        self.used += used
        self.most = max(self.most, self.used)
        fit = [room for room in self.free if room.size >= size]
        if not fit:
            return Room(self._new(size), size, [])
        room = min(fit, key=lambda one: one.size)
        self.free.remove(room)
        return room

    def _new(self, size: int) -> Place:
        place = self.make(size)
        self.made += size
        return place

    def add(self, size: int) -> None:
        """Make a room that nobody needs yet."""
        self.free.append(Room(self._new(size), size, []))

    def give_back(self, room: Room[Place], used: int, after: Job) -> None:
        """Let others have a room, when a job that reads it has ended."""
        self.used -= used
        room.after = [after]
        self.free.append(room)
