"""The file of a rank's optimizer states, and the host buffers through which they pass.

Between steps the memory of the state tensors is a memory map of the file. So a checkpoint that
reads a state tensor reads the file, and a write to a state tensor changes the file. A step reads
and writes the file through a few host buffers. The state uses no other host memory.

References:
    Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.runtime.offload.activation_offloader import BLOCK_ALIGNMENT
from schedir.runtime.offload.arena import ArenaBlock
from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.spill_file import SpillFile
from schedir.runtime.rank_resources import RankResources, RankService

FileRuns = Sequence[tuple[int, Tensor]]  # (offset in the file, part of a host buffer)


class HostBuffer(NamedTuple):
    """The optimizer state of a stage in a host buffer.

    Attributes:
        block: The memory of the buffer.
        views: State tensor -> its part of the buffer.
        nbytes: The bytes of the tensors.
        jobs: The jobs after which the buffer may be used: copies that still read its old contents,
            or the last copy to or from it.
    """

    block: ArenaBlock[Tensor]
    views: Mapping[Tensor, Tensor]
    nbytes: int
    jobs: Sequence[LaneJob]


class StateFile(RankService):
    """The file in which the optimizer states of a rank are between steps.

    Args:
        resources: The resources of the rank.

    Attributes:
        offsets: State tensor -> its offset in the file, in bytes.
        buffer_count: The number of host buffers. The handlers set it from the program.
        buffer_size: The size of each buffer in bytes.

    Raises:
        ModelError: The directory of the file is unusable.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        self.tiers: MemoryTiers = resources.service(MemoryTiers)
        self.spill_file: SpillFile = self.tiers.open_spill_file(resources.program.name)
        self.offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.buffer_count = 1
        self.buffer_size = BLOCK_ALIGNMENT

    def acquire_buffer(self, memory: Mapping[Tensor, Tensor]) -> HostBuffer:
        """Return a host buffer for state tensors.

        A part of the buffer has the strides of the tensor's memory in the file, because reads and
        writes copy bytes.

        Args:
            memory: State tensor -> its memory in the file.
        """
        *starts, size = accumulate(map(_round_up_bytes, memory.values()), initial=0)
        self.buffer_size = max(self.buffer_size, size)
        nbytes = sum(m.nbytes for m in memory.values())
        block = self.tiers.state_arena.acquire(self.buffer_size, nbytes, self.buffer_count)
        views = {
            t: _view_like(block.location, start, m)
            for (t, m), start in zip(memory.items(), starts, strict=True)
        }
        return HostBuffer(block, views, nbytes, block.pending_jobs)

    def release_buffer(self, buffer: HostBuffer, job: LaneJob | None = None) -> None:
        """Release a host buffer. Another state may use it after a job.

        Args:
            buffer: The buffer.
            job: The job that copies the state from the buffer. None if no job uses the buffer.
        """
        self.tiers.state_arena.release(buffer.block, buffer.nbytes, job)

    def take_pending_jobs(self) -> list[LaneJob]:
        """Return the jobs for which the next users of the host buffers would wait.

        The next users do not wait for these jobs any more, so the caller must wait for them.
        """
        jobs: list[LaneJob] = []
        for block in self.tiers.state_arena.free_blocks:
            jobs += block.pending_jobs
            block.pending_jobs = []
        return jobs

    def read(self, runs: FileRuns) -> None:
        """Read the state of a stage from the file.

        Args:
            runs: The result of `list_runs`.
        """
        for offset, memory in runs:
            self.spill_file.read(offset, memory)

    def write(self, runs: FileRuns) -> None:
        """Write the state of a stage to the file.

        Args:
            runs: The result of `list_runs`.
        """
        for offset, memory in runs:
            self.spill_file.write(offset, memory)

    def list_runs(self, buffer: HostBuffer) -> FileRuns:
        """Return the (file offset, part of the buffer) pair of each tensor in a buffer.

        Tensors that are adjacent in the file share a pair.

        Args:
            buffer: The buffer.
        """
        memory = buffer.block.location
        runs: list[tuple[int, int, int]] = []
        start = 0
        for t in buffer.views:
            offset, size = self.offsets[t], _round_up_bytes(t)
            if runs and sum(runs[-1][::2]) == offset:
                run_offset, run_start, run_length = runs.pop()
                runs.append((run_offset, run_start, run_length + size))
            else:
                runs.append((offset, start, size))
            start += size
        return [(offset, memory[start : start + size]) for offset, start, size in runs]

    def allocate(self, tensors: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Allocate adjacent regions of the file for state tensors, and map them into memory.

        The regions are released when no tensor refers to any of them.

        Args:
            tensors: The state tensors.

        Returns:
            State tensor -> its memory, a map of its region.

        Raises:
            OSError: The disk is full.
        """
        if not tensors:
            return {}
        *starts, end = accumulate(map(_round_up_bytes, tensors), initial=0)
        size = max(end, BLOCK_ALIGNMENT)  # the file cannot grow by 0 bytes for empty tensors
        nbytes = sum(t.nbytes for t in tensors)
        block = self.spill_file.arena.acquire(size, nbytes)
        memory = self.spill_file.map_block(block, size, nbytes)
        for t, start in zip(tensors, starts, strict=True):
            self.offsets[t] = block.location + start
        return {t: _view_like(memory, start, t) for t, start in zip(tensors, starts, strict=True)}


def _round_up_bytes(t: Tensor) -> int:
    """Return the bytes of a tensor, rounded up to BLOCK_ALIGNMENT."""
    return t.nbytes + -t.nbytes % BLOCK_ALIGNMENT


def _view_like(memory: Tensor, start: int, t: Tensor) -> Tensor:
    """Return a view of bytes with the dtype, shape and dimension order of a tensor."""
    stride = torch.empty_like(t, device="meta", requires_grad=False).stride()
    return memory[start : start + t.nbytes].view(t.dtype).as_strided(t.shape, stride)
