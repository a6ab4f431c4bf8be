"""Keep the optimizer state of each stage in a file.

Between steps the memory of the state tensors is a memory map of the file. So a checkpoint that
reads a state tensor reads the file, and a write to a state tensor changes the file. A step reads
and writes the file through a few host buffers. The state uses no other host memory.

References:
    Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 6.3.
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
from schedir.runtime.offload.spill_file import SpillFile
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike

ErrorWrapper = Callable[[Exception], Exception]  # adds the instruction to an error


class _HostBuffer(NamedTuple):
    """The optimizer state of a stage in a host buffer.

    Attributes:
        block: The buffer.
        job: The last copy to or from the buffer.
        views: State tensor -> its part of the buffer.
        nbytes: The bytes of the tensors.
    """

    block: ArenaBlock[Tensor]
    job: LaneJob
    views: Mapping[Tensor, Tensor]
    nbytes: int


class DiskOptimizerState(HostOptimizerState):
    """The optimizer state of a rank in a file, separately for each stage.

    The attribute `buffer_count` is the number of host buffers. The handlers set it from the
    program.

    Args:
        parameters: The parameters of each trained stage.
        optimizer: The optimizer.
        lanes: The lanes of the rank.
        device: The device of the rank.
        names: The names of the parameters, for errors.
        tiers: The host memory of the rank.
        file: The file of the rank.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
        tiers: MemoryTiers,
        file: SpillFile,
    ) -> None:
        super().__init__(parameters, optimizer, lanes, device, names)
        self.tiers = tiers
        self.spill_file = file
        # The number of host buffers, and the size of each buffer in bytes.
        self.buffer_count = 1
        self.buffer_size = BLOCK_ALIGNMENT
        self.file_offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # in bytes
        self.host_buffers: dict[int, _HostBuffer] = {}  # stage -> buffer with its state
        self.spilling_buffers: dict[int, _HostBuffer] = {}

    # ------------------------------------------------------------ in a step

    def fetch(
        self,
        stage: int,
        observer: LaneObserver | None = None,
        wrap_error: ErrorWrapper | None = None,
    ) -> None:
        """Start to read the state of a stage from the file into a host buffer.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.
            wrap_error: A function that adds the instruction to an error.
        """
        block, views, nbytes = self._acquire_buffer(
            [t for t in self.list_state_tensors(stage) if self.is_on_host(t)]
        )
        runs = self._list_file_runs(views, block.location)

        def read() -> None:
            for offset, memory in runs:
                self.spill_file.read(offset, memory)

        job = self.lanes.start(
            Lane.DISK, _wrap_errors(read, wrap_error), nbytes, block.pending_jobs, observer
        )
        self.host_buffers[stage] = _HostBuffer(block, job, views, nbytes)

    def load(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage from its host buffer to the device.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.
        """
        buffer = self.host_buffers.pop(stage)
        if self.lanes.uses_streams:  # A stream cannot wait for the disk lane, which is a thread.
            buffer.job.finish()
        copied_tensors = [
            (t, self.host_memory[t], allocate_like(t, self.device)) for t in buffer.views
        ]
        self.loaded_addresses.update(memory.data_ptr() for _, _, memory in copied_tensors)
        pairs = [(memory, buffer.views[t]) for t, _, memory in copied_tensors]

        def copy_to_device() -> None:
            copy_pairs(pairs)
            if self.tiers.poisons_sources:
                buffer.block.location.fill_(POISON_BYTE)

        job = self.lanes.start(Lane.H2D, copy_to_device, buffer.nbytes, [buffer.job], observer)
        self.pending_loads[stage] = StateCopy(job, copied_tensors)
        self.tiers.state_arena.release(buffer.block, buffer.nbytes, job)

    def store(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage from the device to a host buffer.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.

        Raises:
            OSError: The disk has no space for new state tensors. The state is then unchanged.
            ModelError: State tensors share memory with each other or with parameters.
        """
        self.require_separate_memory(stage)
        tensors = [t for t in self.list_state_tensors(stage) if not self.is_on_host(t)]
        self._allocate_in_file(
            [
                t
                for t in tensors
                if t not in self.file_offsets
                or not has_same_shape_and_dtype(self.host_memory[t], t)
            ]
        )
        block, views, nbytes = self._acquire_buffer(tensors)
        copied_tensors = [(t, self.host_memory[t], t.data) for t in tensors]
        pairs = [(views[t], memory) for t, _, memory in copied_tensors]
        job = self.lanes.start(
            Lane.D2H, partial(copy_pairs, pairs), nbytes, block.pending_jobs, observer
        )
        for t, host_memory, _ in copied_tensors:
            t.data = host_memory
        self.pending_stores[stage] = StateCopy(job, copied_tensors)
        self.host_buffers[stage] = _HostBuffer(block, job, views, nbytes)

    def spill(
        self,
        stage: int,
        observer: LaneObserver | None = None,
        wrap_error: ErrorWrapper | None = None,
    ) -> None:
        """Start to write the state of a stage from its host buffer to the file.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.
            wrap_error: A function that adds the instruction to an error.
        """
        buffer = self.host_buffers.pop(stage)
        runs = self._list_file_runs(buffer.views, buffer.block.location)

        def write() -> None:
            for offset, memory in runs:
                self.spill_file.write(offset, memory)
            if self.tiers.poisons_sources:
                buffer.block.location.fill_(POISON_BYTE)

        job = self.lanes.start(
            Lane.DISK, _wrap_errors(write, wrap_error), buffer.nbytes, [buffer.job], observer
        )
        self.spilling_buffers[stage] = buffer._replace(job=job)
        self.tiers.state_arena.release(buffer.block, buffer.nbytes, job)

    def move_to_resting_tier(self, stage: int) -> None:
        """See `HostOptimizerState.move_to_resting_tier`."""
        self.store(stage)
        self.spill(stage)

    def finish(self, *, is_last_update: bool = True) -> None:
        """See `HostOptimizerState.finish`. This method also waits for all writes to the file."""
        super().finish()
        for stage in [*self.spilling_buffers]:
            self.spilling_buffers[stage].job.finish()
            del self.spilling_buffers[stage]

    def fail(self) -> None:
        """Wait for all copies after an error, and keep the state that did not reach the file.

        The `data` of such a state tensor is set to its memory on the device, or to a copy of its
        host buffer.
        """
        for buffer in self.host_buffers.values():
            _finish_without_error(buffer.job)
        for buffer in self.spilling_buffers.values():
            if not _finish_without_error(buffer.job):
                for t, memory in buffer.views.items():
                    t.data = memory.clone()
        for stage, state_copy in self.pending_stores.items():
            # After an error, buffers in `host_buffers` are not written to the file.
            if not _finish_without_error(state_copy.job) or stage in self.host_buffers:
                for t, _, memory in state_copy.tensors:
                    t.data = memory
        super().fail()
        self.host_buffers.clear()
        self.spilling_buffers.clear()

    # ------------------------------------------------------------ memory

    def _acquire_buffer(
        self, tensors: Sequence[Tensor]
    ) -> tuple[ArenaBlock[Tensor], dict[Tensor, Tensor], int]:
        """Return a host buffer for tensors, a view for each tensor, and the sum of their bytes."""
        *starts, size = accumulate(map(_round_up_bytes, tensors), initial=0)
        self.buffer_size = max(self.buffer_size, size)
        nbytes = sum(t.nbytes for t in tensors)
        block = self.tiers.state_arena.acquire(self.buffer_size, nbytes, self.buffer_count)
        views = {
            t: _view_like(block.location, start, t)
            for t, start in zip(tensors, starts, strict=True)
        }
        return block, views, nbytes

    def _list_file_runs(
        self, tensors: Iterable[Tensor], memory: Tensor
    ) -> list[tuple[int, Tensor]]:
        """Return the (file offset, part of the buffer) pair of each tensor.

        Tensors that are adjacent in the file share a pair.
        """
        runs: list[tuple[int, int, int]] = []
        start = 0
        for t in tensors:
            offset, size = self.file_offsets[t], _round_up_bytes(t)
            if runs and sum(runs[-1][::2]) == offset:
                run_offset, run_start, run_length = runs.pop()
                runs.append((run_offset, run_start, run_length + size))
            else:
                runs.append((offset, start, size))
            start += size
        return [(offset, memory[start : start + size]) for offset, start, size in runs]

    def _allocate_in_file(self, tensors: Sequence[Tensor]) -> None:
        """Allocate adjacent regions of the file for tensors, and map them into memory.

        The regions are released when no tensor refers to any of them. A full disk raises OSError.
        """
        if not tensors:
            return
        *starts, size = accumulate(map(_round_up_bytes, tensors), initial=0)
        nbytes = sum(t.nbytes for t in tensors)
        block = self.spill_file.arena.acquire(size, nbytes)
        memory = self.spill_file.map_block(block, size, nbytes)
        for t, start in zip(tensors, starts, strict=True):
            self.file_offsets[t] = block.location + start
            self.host_memory[t] = _view_like(memory, start, t)


def _round_up_bytes(t: Tensor) -> int:
    """Return the bytes of a tensor, rounded up to BLOCK_ALIGNMENT."""
    return t.nbytes + -t.nbytes % BLOCK_ALIGNMENT


def _view_like(memory: Tensor, start: int, t: Tensor) -> Tensor:
    """Return a view of bytes with the dtype, shape and dimension order of a tensor."""
    stride = torch.empty_like(t, device="meta", requires_grad=False).stride()
    return memory[start : start + t.nbytes].view(t.dtype).as_strided(t.shape, stride)


def _wrap_errors(run: Callable[[], None], wrap_error: ErrorWrapper | None) -> Callable[[], None]:
    """Wrap `run` so that `wrap_error` converts its errors."""

    def run_wrapped() -> None:
        try:
            run()
        except Exception as error:
            raise (error if wrap_error is None else wrap_error(error)) from error

    return run_wrapped


def _finish_without_error(job: LaneJob) -> bool:
    """Wait until a job has ended, and return whether it raised no error."""
    try:
        job.finish()
    except Exception:
        return False
    return True
