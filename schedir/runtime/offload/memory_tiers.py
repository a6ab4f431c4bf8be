"""The host memory and the disk file of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from schedir.errors import ModelError, describe
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import DISK_TRIP
from schedir.runtime.offload.arena import Arena
from schedir.runtime.offload.spill_file import SpillFile
from schedir.runtime.rank_resources import RankResources, RankService

_DISK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.lane is Lane.DISK)


class MemoryTiers(RankService):
    """The arenas of a rank's host memory and disk file.

    All programs that a rank runs share them, because one program runs at a time. On a GPU the host
    memory is pinned. On a CPU, where copies are only for tests, `poisons_sources` is true: the
    source of a copy is overwritten with NaN, so that a late read is found.

    Args:
        resources: The resources of the rank.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        device = resources.device
        self.poisons_sources = device.type == "cpu"
        self.host_arena: Arena[Tensor] = Arena(
            partial(allocate_host_memory, pinned=device.type == "cuda")
        )
        # Host buffers for optimizer states on their way between the disk and the device.
        self.state_arena: Arena[Tensor] = Arena(self.host_arena.allocate)
        self.spill_file: SpillFile | None = None

    def open_spill_file(self, program: str) -> SpillFile:
        """Return the rank's file on the disk, which the first call creates.

        Args:
            program: The name of the program, for errors.

        Raises:
            ModelError: The directory is unusable.
        """
        if self.spill_file is None:
            assert self.resources.options.spill_dir is not None, "`require_spill_dir` refuses this"
            self.spill_file = SpillFile(self.resources.options.spill_dir, program)
        return self.spill_file

    def count_bytes(self, tier: str) -> int:
        """Return the bytes of the values in a tier.

        Args:
            tier: "host" or "disk".
        """
        if tier == "host":
            return self.host_arena.used_bytes + self.state_arena.used_bytes
        return self.spill_file.arena.used_bytes if self.spill_file is not None else 0


def require_spill_dir(value: object, programs: Sequence[Program]) -> Path | None:
    """Return the folder of the spill file, or None.

    Args:
        value: The path of the folder, or None.
        programs: The programs that a rank runs.

    Raises:
        ModelError: `value` is not a path, or an empty string. Or it is None, and a program uses the
            disk.
    """
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    if value is not None:
        raise ModelError(
            f"spill_dir must be a path, not {describe(value)}", hint="spill_dir='/nvme'"
        )
    for program in programs:
        if not program.used_opcodes.isdisjoint(_DISK_OPS):
            moves_activations = not program.used_opcodes.isdisjoint(DISK_TRIP)
            what = "activations" if moves_activations else "the optimizer state"
            raise ModelError(
                f"the program moves {what} to the disk, but spill_dir is not set",
                program=program.name,
                hint="Executor(..., spill_dir='/nvme'), or [memory] spill_dir = \"/nvme\"",
            )
    return None


def allocate_host_memory(size: int, pinned: bool) -> Tensor:
    """Return a new uint8 tensor in host memory.

    Args:
        size: The number of bytes.
        pinned: True if the memory is pinned.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
