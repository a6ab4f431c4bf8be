"""Keep the optimizer state of each stage in a file.

Between steps the memory of the tensors is the file's own, mapped: whoever looks at them, as a
checkpoint does, reads the file, and whoever writes to them writes there.  A step reads and writes
it through a few buffers of the host (ZeRO-Infinity, arXiv 2104.07857, section 6.3), so that of the
host's memory no more is taken than these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.ir.isa.instructions import Lane
from schedir.runtime.offload.activation_offloader import LINE, POISON
from schedir.runtime.offload.arena import ArenaBlock
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState, StateCopy, alike, like
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.snapshot_copies import copy
from schedir.runtime.parameters.mixed_precision import OptimizerLike

Told = Callable[[Exception], Exception]  # an error as that of an instruction


class _HostBuffer(NamedTuple):
    """A stage's state in a buffer of the host: what brings it there, and each tensor's part."""

    room: ArenaBlock[Tensor]
    job: LaneJob
    parts: Mapping[Tensor, Tensor]
    nbytes: int


class DiskOptimizerState(HostOptimizerState):
    """The state of an optimizer in the file of `tiers`, by stage; `rooms` is how many buffers the
    host has for it, which whoever runs a program makes as many as that says."""

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
        tiers: MemoryTiers,
    ) -> None:
        super().__init__(parameters, optimizer, lanes, device, names)
        assert tiers.spills is not None, "an executor of what lies on the disk has a folder"
        self.tiers, self.spills = tiers, tiers.spills
        self.rooms, self.largest = 1, LINE  # buffers, and the bytes of each
        self.at: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # where in the file
        self.on_host: dict[int, _HostBuffer] = {}  # by stage, on its way
        self.spilling: dict[int, _HostBuffer] = {}

    # ------------------------------------------------------------ in a step

    def fetch(
        self, stage: int, marks: LaneObserver | None = None, told: Told | None = None
    ) -> None:
        """Begin to read what is kept of a stage into a buffer of the host."""
        room, parts, nbytes = self._take([t for t in self.tensors(stage) if self.is_away(t)])
        runs = self._runs(parts, room.place)

        def read() -> None:
            for at, memory in runs:
                self.spills.read(at, memory)

        job = self.lanes.start(Lane.DISK, _telling(read, told), nbytes, room.after, marks)
        self.on_host[stage] = _HostBuffer(room, job, parts, nbytes)

    def load(self, stage: int, marks: LaneObserver | None = None) -> None:
        """Begin to copy it from there to the device."""
        here = self.on_host.pop(stage)
        if self.lanes.on_streams:  # none of which can wait for a disk
            here.job.finish()
        moving = [(t, self.places[t], like(t, self.device)) for t in here.parts]
        self.loaded.update(memory.data_ptr() for _, _, memory in moving)
        pairs = [(memory, here.parts[t]) for t, _, memory in moving]

        def bring() -> None:
            copy(pairs)
            if self.tiers.poisons:
                here.room.place.fill_(POISON)

        job = self.lanes.start(Lane.H2D, bring, here.nbytes, [here.job], marks)
        self.loading[stage] = StateCopy(job, moving)
        self.tiers.states.give_back(here.room, here.nbytes, job)

    def store(self, stage: int, marks: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage to a buffer of the host.  Raises OSError where the
        disk has no room for what was not there before: all is then as it was."""
        self.expect_own_memory(stage)
        found = [t for t in self.tensors(stage) if not self.is_away(t)]
        self._lay([t for t in found if t not in self.at or not alike(self.places[t], t)])
        room, parts, nbytes = self._take(found)
        moving = [(t, self.places[t], t.data) for t in found]
        pairs = [(parts[t], memory) for t, _, memory in moving]
        job = self.lanes.start(Lane.D2H, partial(copy, pairs), nbytes, room.after, marks)
        for t, place, _ in moving:
            t.data = place
        self.storing[stage] = StateCopy(job, moving)
        self.on_host[stage] = _HostBuffer(room, job, parts, nbytes)

    def spill(
        self, stage: int, marks: LaneObserver | None = None, told: Told | None = None
    ) -> None:
        """Begin to write it to the file."""
        here = self.on_host.pop(stage)
        runs = self._runs(here.parts, here.room.place)

        def write() -> None:
            for at, memory in runs:
                self.spills.write(at, memory)
            if self.tiers.poisons:
                here.room.place.fill_(POISON)

        job = self.lanes.start(Lane.DISK, _telling(write, told), here.nbytes, [here.job], marks)
        self.spilling[stage] = here._replace(job=job)
        self.tiers.states.give_back(here.room, here.nbytes, job)

    def put(self, stage: int) -> None:
        self.store(stage)
        self.spill(stage)

    def finish(self, *, last: bool = True) -> None:
        super().finish()
        for stage in [*self.spilling]:
            self.spilling[stage].job.finish()
            del self.spilling[stage]

    def fail(self) -> None:
        """After an error: nothing is being moved any more, and what has not come to the file is
        where it was before that."""
        for here in self.on_host.values():
            _ended_well(here.job)
        for here in self.spilling.values():
            if not _ended_well(here.job):
                for t, memory in here.parts.items():
                    t.data = memory.clone()
        for stage, moving in self.storing.items():
            if not _ended_well(moving.job) or stage in self.on_host:  # which nobody will spill
                for t, _, memory in moving.tensors:
                    t.data = memory
        super().fail()
        self.on_host.clear()
        self.spilling.clear()

    # ------------------------------------------------------------ memory

    def _take(self, of: Sequence[Tensor]) -> tuple[ArenaBlock[Tensor], dict[Tensor, Tensor], int]:
        """A buffer of the host for some tensors, with the part of each, and their bytes."""
        *starts, size = accumulate(map(_rounded, of), initial=0)
        self.largest = max(self.largest, size)
        nbytes = sum(t.nbytes for t in of)
        room = self.tiers.states.take(self.largest, nbytes, self.rooms)
        parts = {t: _part(room.place, at, t) for t, at in zip(of, starts, strict=True)}
        return room, parts, nbytes

    def _runs(self, of: Iterable[Tensor], memory: Tensor) -> list[tuple[int, Tensor]]:
        """Where in the file some tensors are, and the part of a buffer that is there: in as few
        pieces as can be."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for t in of:
            at, size = self.at[t], _rounded(t)
            if runs and sum(runs[-1][::2]) == at:
                before, first, length = runs.pop()
                runs.append((before, first, length + size))
            else:
                runs.append((at, start, size))
            start += size
        return [(at, memory[start : start + size]) for at, start, size in runs]

    def _lay(self, of: Sequence[Tensor]) -> None:
        """Make room in the file for some tensors, one behind the other.  It is free again when
        nobody has any of that memory.  Raises OSError where there is no more."""
        if not of:
            return
        *starts, size = accumulate(map(_rounded, of), initial=0)
        nbytes = sum(t.nbytes for t in of)
        room = self.spills.arena.take(size, nbytes)
        memory = self.spills.mapped(room, size, nbytes)
        for t, start in zip(of, starts, strict=True):
            self.at[t], self.places[t] = room.place + start, _part(memory, start, t)


def _rounded(t: Tensor) -> int:
    """The bytes of a tensor, and behind it to a LINE."""
    return t.nbytes + -t.nbytes % LINE


def _part(memory: Tensor, start: int, t: Tensor) -> Tensor:
    """Memory for a tensor in some bytes, in the same order."""
    stride = torch.empty_like(t, device="meta", requires_grad=False).stride()
    return memory[start : start + t.nbytes].view(t.dtype).as_strided(t.shape, stride)


def _telling(run: Callable[[], None], told: Told | None) -> Callable[[], None]:
    """What says of an error which instruction it is of."""

    def tell() -> None:
        try:
            run()
        except Exception as error:
            raise (error if told is None else told(error)) from error

    return tell


def _ended_well(job: LaneJob) -> bool:
    """Wait until it has ended; whether nothing was raised."""
    try:
        job.finish()
    except Exception:
        return False
    return True
