"""The host memory and the disk file of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import ROWS, Lane
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import DISK
from schedir.runtime.offload.arena import Arena
from schedir.runtime.offload.spill_file import SpillFile

_ON_DISK: Final = tuple(row.op for row in ROWS if row.lane is Lane.DISK)


class MemoryTiers:
    """The arenas of a rank's host and disk, for all programs that it runs, one at a time.

    On a GPU the host's memory is pinned.  `poisons` says that what is left behind by a copy is
    made NaN, so that whoever reads it too late is seen: on CPUs, where a copy is for tests.
    Raises ModelError for a program that spills without a folder, and as Spills.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        programs: Sequence[Program],
        folder: str | Path | None,
    ) -> None:
        self.poisons = device.type == "cpu"
        self.host: Arena[Tensor] = Arena(partial(memory_of_host, pinned=device.type == "cuda"))
        self.states: Arena[Tensor] = Arena(self.host.make)  # of the optimizer, that pass through
        self.spills: SpillFile | None = None
        spilling = [program for program in programs if not program.ops.isdisjoint(_ON_DISK)]
        if spilling and folder is None:
            what = "spills" if not spilling[0].ops.isdisjoint(DISK) else "moves the states"
            raise ModelError(
                f"it {what} to the disk, and no folder is given",
                program=spilling[0].name,
                hint="Executor(..., folder='/nvme'), [memory] spill_dir = \"/nvme\"",
            )
        own = [one.name for one in spilling if any(i.op in _ON_DISK for i in one.streams[rank])]
        if own and folder is not None:
            self.spills = SpillFile(folder, own[0])

    def used_on(self, tier: str) -> int:
        """The bytes of values that are on the "host", or on the "disk"."""
        if tier == "host":
            return self.host.used + self.states.used
        return self.spills.arena.used if self.spills is not None else 0


def memory_of_host(size: int, pinned: bool) -> Tensor:
    """So many bytes of the host's memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
