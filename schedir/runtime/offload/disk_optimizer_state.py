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
from schedir.runtime.offload.activation_offloader import BLOCK_ALIGNMENT, POISON_BYTE
from schedir.runtime.offload.arena import ArenaBlock
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.host_optimizer_state import (
    HostOptimizerState,
    StateCopy,
    allocate_like,
    has_same_shape_and_dtype,
)
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.snapshot_copies import copy_pairs
from schedir.runtime.parameters.mixed_precision import OptimizerLike

ErrorWrapper = Callable[[Exception], Exception]  # an error as that of an instruction


class _HostBuffer(NamedTuple):
    """A stage's state in a buffer of the host: what brings it there, and each tensor's part."""

    block: ArenaBlock[Tensor]
    job: LaneJob
    views: Mapping[Tensor, Tensor]
    nbytes: int


class DiskOptimizerState(HostOptimizerState):
    """The state of an optimizer in the file of `tiers`, by stage; `buffer_count` is how many
    buffers the host has for it, which whoever runs a program makes as many as that says."""

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
        assert tiers.spill_file is not None, "an executor of what lies on the disk has a folder"
        self.tiers, self.spill_file = tiers, tiers.spill_file
        self.buffer_count, self.buffer_size = 1, BLOCK_ALIGNMENT  # buffers, and the bytes of each
        self.file_offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # where in the file
        self.host_buffers: dict[int, _HostBuffer] = {}  # by stage, on its way
        self.spilling_buffers: dict[int, _HostBuffer] = {}

    # ------------------------------------------------------------ in a step

    def fetch(
        self,
        stage: int,
        observer: LaneObserver | None = None,
        wrap_error: ErrorWrapper | None = None,
    ) -> None:
        """Begin to read what is kept of a stage into a buffer of the host."""
        room, parts, nbytes = self._acquire_buffer(
            [t for t in self.list_state_tensors(stage) if self.is_on_host(t)]
        )
        runs = self._list_file_runs(parts, room.location)

        def read() -> None:
            for at, memory in runs:
                self.spill_file.read(at, memory)

        job = self.lanes.start(
            Lane.DISK, _wrap_errors(read, wrap_error), nbytes, room.pending_jobs, observer
        )
        self.host_buffers[stage] = _HostBuffer(room, job, parts, nbytes)

    def load(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Begin to copy it from there to the device."""
        here = self.host_buffers.pop(stage)
        if self.lanes.uses_streams:  # none of which can wait for a disk
            here.job.finish()
        moving = [(t, self.host_memory[t], allocate_like(t, self.device)) for t in here.views]
        self.loaded_addresses.update(memory.data_ptr() for _, _, memory in moving)
        pairs = [(memory, here.views[t]) for t, _, memory in moving]

        def bring() -> None:
            copy_pairs(pairs)
            if self.tiers.poisons_sources:
                here.block.location.fill_(POISON_BYTE)

        job = self.lanes.start(Lane.H2D, bring, here.nbytes, [here.job], observer)
        self.pending_loads[stage] = StateCopy(job, moving)
        self.tiers.state_arena.release(here.block, here.nbytes, job)

    def store(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage to a buffer of the host.  Raises OSError where the
        disk has no room for what was not there before: all is then as it was."""
        self.require_separate_memory(stage)
        found = [t for t in self.list_state_tensors(stage) if not self.is_on_host(t)]
        self._allocate_in_file(
            [
                t
                for t in found
                if t not in self.file_offsets
                or not has_same_shape_and_dtype(self.host_memory[t], t)
            ]
        )
        room, parts, nbytes = self._acquire_buffer(found)
        moving = [(t, self.host_memory[t], t.data) for t in found]
        pairs = [(parts[t], memory) for t, _, memory in moving]
        job = self.lanes.start(
            Lane.D2H, partial(copy_pairs, pairs), nbytes, room.pending_jobs, observer
        )
        for t, place, _ in moving:
            t.data = place
        self.pending_stores[stage] = StateCopy(job, moving)
        self.host_buffers[stage] = _HostBuffer(room, job, parts, nbytes)

    def spill(
        self,
        stage: int,
        observer: LaneObserver | None = None,
        wrap_error: ErrorWrapper | None = None,
    ) -> None:
        """Begin to write it to the file."""
        here = self.host_buffers.pop(stage)
        runs = self._list_file_runs(here.views, here.block.location)

        def write() -> None:
            for at, memory in runs:
                self.spill_file.write(at, memory)
            if self.tiers.poisons_sources:
                here.block.location.fill_(POISON_BYTE)

        job = self.lanes.start(
            Lane.DISK, _wrap_errors(write, wrap_error), here.nbytes, [here.job], observer
        )
        self.spilling_buffers[stage] = here._replace(job=job)
        self.tiers.state_arena.release(here.block, here.nbytes, job)

    def move_to_resting_tier(self, stage: int) -> None:
        self.store(stage)
        self.spill(stage)

    def finish(self, *, is_last_update: bool = True) -> None:
        super().finish()
        for stage in [*self.spilling_buffers]:
            self.spilling_buffers[stage].job.finish()
            del self.spilling_buffers[stage]

    def fail(self) -> None:
        """After an error: nothing is being moved any more, and what has not come to the file is
        where it was before that."""
        for here in self.host_buffers.values():
            _finish_without_error(here.job)
        for here in self.spilling_buffers.values():
            if not _finish_without_error(here.job):
                for t, memory in here.views.items():
                    t.data = memory.clone()
        for stage, moving in self.pending_stores.items():
            if (
                not _finish_without_error(moving.job) or stage in self.host_buffers
            ):  # which nobody will spill
                for t, _, memory in moving.tensors:
                    t.data = memory
        super().fail()
        self.host_buffers.clear()
        self.spilling_buffers.clear()

    # ------------------------------------------------------------ memory

    def _acquire_buffer(
        self, tensors: Sequence[Tensor]
    ) -> tuple[ArenaBlock[Tensor], dict[Tensor, Tensor], int]:
        """A buffer of the host for some tensors, with the part of each, and their bytes."""
        *starts, size = accumulate(map(_round_up_bytes, tensors), initial=0)
        self.buffer_size = max(self.buffer_size, size)
        nbytes = sum(t.nbytes for t in tensors)
        room = self.tiers.state_arena.acquire(self.buffer_size, nbytes, self.buffer_count)
        parts = {t: _view_like(room.location, at, t) for t, at in zip(tensors, starts, strict=True)}
        return room, parts, nbytes

    def _list_file_runs(
        self, tensors: Iterable[Tensor], memory: Tensor
    ) -> list[tuple[int, Tensor]]:
        """Where in the file some tensors are, and the part of a buffer that is there: in as few
        pieces as can be."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for t in tensors:
            at, size = self.file_offsets[t], _round_up_bytes(t)
            if runs and sum(runs[-1][::2]) == at:
                before, first, length = runs.pop()
                runs.append((before, first, length + size))
            else:
                runs.append((at, start, size))
            start += size
        return [(at, memory[start : start + size]) for at, start, size in runs]

    def _allocate_in_file(self, tensors: Sequence[Tensor]) -> None:
        """Make room in the file for some tensors, one behind the other.  It is free again when
        nobody has any of that memory.  Raises OSError where there is no more."""
        if not tensors:
            return
        *starts, size = accumulate(map(_round_up_bytes, tensors), initial=0)
        nbytes = sum(t.nbytes for t in tensors)
        room = self.spill_file.arena.acquire(size, nbytes)
        memory = self.spill_file.map_block(room, size, nbytes)
        for t, start in zip(tensors, starts, strict=True):
            self.file_offsets[t], self.host_memory[t] = (
                room.location + start,
                _view_like(memory, start, t),
            )


def _round_up_bytes(t: Tensor) -> int:
    """The bytes of a tensor, and behind it to a LINE."""
    return t.nbytes + -t.nbytes % BLOCK_ALIGNMENT


def _view_like(memory: Tensor, start: int, t: Tensor) -> Tensor:
    """Memory for a tensor in some bytes, in the same order."""
    stride = torch.empty_like(t, device="meta", requires_grad=False).stride()
    return memory[start : start + t.nbytes].view(t.dtype).as_strided(t.shape, stride)


def _wrap_errors(run: Callable[[], None], wrap_error: ErrorWrapper | None) -> Callable[[], None]:
    """What says of an error which instruction it is of."""

    def tell() -> None:
        try:
            run()
        except Exception as error:
            raise (error if wrap_error is None else wrap_error(error)) from error

    return tell


def _finish_without_error(job: LaneJob) -> bool:
    """Wait until it has ended; whether nothing was raised."""
    try:
        job.finish()
    except Exception:
        return False
    return True
