"""The host memory and the disk file of a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from schedir.runtime.offload.arena import Arena
from schedir.runtime.offload.spill_file import SpillFile
from schedir.runtime.rank_resources import RankResources, RankService


class MemoryTiers(RankService):
    """The arenas of a rank's host memory and disk file.

    All programs of a rank share the arenas, because a rank runs one program at a time. On a GPU the
    host memory is pinned. On a CPU, where copies are only for tests, `poisons_sources` is True: the
    source of a copy is overwritten with NaN, to find reads of the source after the copy.

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
        # Host buffers through which optimizer states pass between the disk and the device.
        self.state_arena: Arena[Tensor] = Arena(self.host_arena.allocate)
        self.spill_file: SpillFile | None = None

    def open_spill_file(self, program: str) -> SpillFile:
        """Return the rank's file on the disk. The first call creates it.

        Args:
            program: The name of the program, for errors.

        Raises:
            ModelError: The directory is unusable.
        """
        if self.spill_file is None:
            spill_dir = self.resources.options.execution.spill_dir
            assert spill_dir is not None, "`require_spill_dir` refuses this"
            self.spill_file = SpillFile(Path(spill_dir), program)
        return self.spill_file

    def count_bytes(self, tier: str) -> int:
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
        pinned: True to pin the memory.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
