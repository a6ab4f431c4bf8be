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
    """The arenas of a rank's host and disk, for all programs that it runs, one at a time.

    On a GPU the host's memory is pinned.  `poisons_sources` says that what is left behind by a copy
    is made NaN, so that whoever reads it too late is seen: on CPUs, where a copy is for tests.
    Raises ModelError for a program that spills without a folder, and as Spills.
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
        self.state_arena: Arena[Tensor] = Arena(
            self.host_arena.allocate
        )  # of the optimizer, that pass through
        self.spill_file: SpillFile | None = None
        spilling = [
            program for program in programs if not program.used_opcodes.isdisjoint(_DISK_OPS)
        ]
        if spilling and spill_dir is None:
            what = (
                "spills"
                if not spilling[0].used_opcodes.isdisjoint(DISK_TRIP)
                else "moves the states"
            )
            raise ModelError(
                f"it {what} to the disk, and no folder is given",
                program=spilling[0].name,
                hint="Executor(..., spill_dir='/nvme'), [memory] spill_dir = \"/nvme\"",
            )
        own = [one.name for one in spilling if any(i.op in _DISK_OPS for i in one.streams[rank])]
        if own and spill_dir is not None:
            self.spill_file = SpillFile(spill_dir, own[0])

    def count_used_bytes(self, tier: str) -> int:
        """The bytes of values that are on the "host", or on the "disk"."""
        if tier == "host":
            return self.host_arena.used_bytes + self.state_arena.used_bytes
        return self.spill_file.arena.used_bytes if self.spill_file is not None else 0


def allocate_host_memory(size: int, pinned: bool) -> Tensor:
    """So many bytes of the host's memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
