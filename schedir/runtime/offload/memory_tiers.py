"""The host memory and the disk file of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import DISK_TRIP
from schedir.runtime.offload.arena import Arena
from schedir.runtime.offload.spill_file import SpillFile

_DISK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.lane is Lane.DISK)


class MemoryTiers:
    """The arenas of a rank's host memory and disk file.

    All programs that a rank runs share them, because one program runs at a time. On a GPU the host
    memory is pinned. On a CPU, where copies are only for tests, `poisons_sources` is true: the
    source of a copy is overwritten with NaN, so that a late read is found.

    Args:
        device: The device of the rank.
        rank: The number of the rank.
        programs: The programs that the rank runs.
        spill_dir: The directory of the file. None if no program uses the disk.

    Raises:
        ModelError: A program uses the disk and there is no directory, or the directory is unusable.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        programs: Sequence[Program],
        spill_dir: str | Path | None,
    ) -> None:
        self.poisons_sources = device.type == "cpu"
        self.host_arena: Arena[Tensor] = Arena(
            partial(allocate_host_memory, pinned=device.type == "cuda")
        )
        # Host buffers for optimizer states on their way between the disk and the device.
        self.state_arena: Arena[Tensor] = Arena(self.host_arena.allocate)
        self.spill_file: SpillFile | None = None
        spilling = [
            program for program in programs if not program.used_opcodes.isdisjoint(_DISK_OPS)
        ]
        if spilling and spill_dir is None:
            what = (
                "activations"
                if not spilling[0].used_opcodes.isdisjoint(DISK_TRIP)
                else "the optimizer state"
            )
            raise ModelError(
                f"the program moves {what} to the disk, but spill_dir is not set",
                program=spilling[0].name,
                hint="Executor(..., spill_dir='/nvme'), or [memory] spill_dir = \"/nvme\"",
            )
        own = [one.name for one in spilling if any(i.op in _DISK_OPS for i in one.streams[rank])]
        if own and spill_dir is not None:
            self.spill_file = SpillFile(spill_dir, own[0])

    def count_used_bytes(self, tier: str) -> int:
        """Return the bytes of the values in a tier.

        Args:
            tier: "host" or "disk".
        """
        if tier == "host":
            return self.host_arena.used_bytes + self.state_arena.used_bytes
        return self.spill_file.arena.used_bytes if self.spill_file is not None else 0


def allocate_host_memory(size: int, pinned: bool) -> Tensor:
    """Return a new uint8 tensor in host memory.

    Args:
        size: The number of bytes.
        pinned: True if the memory is pinned.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
