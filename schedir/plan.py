"""Plan: the shape of a pipeline.  Who holds which stage, and how many microbatches flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np
from numpy.typing import NDArray

from schedir.errors import PlanError

MAX_MICROBATCHES = 2**20
MAX_STAGES = 2**15
MAX_CELLS = 2**27  # stages x microbatches; a program has at least two instructions in each


def _loop(rank: int, local: int, ranks: int) -> int:
    return local * ranks + rank


def _vee(rank: int, local: int, ranks: int) -> int:
    """Down the ranks and back, again and again: rank r holds r, 2P-1-r, 2P+r, ..."""
    return local * ranks + (ranks - 1 - rank if local % 2 else rank)


PLACEMENTS = {"loop": _loop, "vee": _vee}


@dataclass(frozen=True)
class Plan:
    """The shape of the pipeline.

    `placement` is "loop" (rank r holds j*ranks + r), "vee" (r and 2*ranks-1-r; it has two
    stages per rank unless told otherwise), or the rank of each stage in turn; from such a map
    `stages_per_rank` is read off as the most stages that a rank holds.

    Raises PlanError for anything that no pipeline can have, before anything is built.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    placement: str | tuple[int, ...] = "loop"

    def __post_init__(self) -> None:
        self._whole("ranks", MAX_STAGES)
        self._whole("microbatches", MAX_MICROBATCHES)
        self._whole("stages_per_rank", MAX_STAGES)
        if isinstance(self.placement, str):
            if self.placement not in PLACEMENTS:
                raise PlanError(
                    f"placement must be 'loop', 'vee' or the rank of each stage, "
                    f"not {self.placement!r}"
                )
            if self.placement == "vee" and self.stages_per_rank == 1:
                object.__setattr__(self, "stages_per_rank", 2)
        else:
            self._read_map(self.placement)
        if self.stages > MAX_STAGES:
            raise PlanError(f"{self.stages} stages are more than the {MAX_STAGES} allowed")
        if self.stages * self.microbatches > MAX_CELLS:
            raise PlanError(
                f"{self.stages} stages x {self.microbatches} microbatches are more than the "
                f"{MAX_CELLS} cells allowed"
            )

    def _whole(self, name: str, most: int) -> None:
        value = getattr(self, name)
        try:
            if isinstance(value, bool):
                raise TypeError
            value = index(value)
        except TypeError:
            raise PlanError(f"{name} must be a whole number, not {value!r}") from None
        if not 1 <= value <= most:
            raise PlanError(f"{name} must be from 1 to {most}, not {value}")
        object.__setattr__(self, name, value)

    def _read_map(self, given: Iterable[int]) -> None:
        try:
            placement = tuple(index(r) for r in given)
        except TypeError:
            raise PlanError(
                f"placement must be 'loop', 'vee' or the rank of each stage, not {given!r}"
            ) from None
        held = Counter(placement)
        for stage, rank in enumerate(placement):
            if not 0 <= rank < self.ranks:
                raise PlanError(
                    f"placement puts stage {stage} on rank {rank}, but the ranks are "
                    f"0 to {self.ranks - 1}"
                )
        for rank in range(self.ranks):
            if rank not in held:
                raise PlanError(f"placement gives rank {rank} no stage")
        most = max(held.values())
        if self.stages_per_rank not in (1, most):
            raise PlanError(
                f"placement puts up to {most} stages on a rank, but stages_per_rank is "
                f"{self.stages_per_rank}"
            )
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "stages_per_rank", most)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        if isinstance(self.placement, str):
            return self.ranks * self.stages_per_rank
        return len(self.placement)

    @cached_property
    def rank_of(self) -> NDArray[np.int64]:
        """The rank that holds each stage, shape (stages,)."""
        if isinstance(self.placement, str):
            place = PLACEMENTS[self.placement]
            held = [
                (place(r, j, self.ranks), r)
                for j in range(self.stages_per_rank)
                for r in range(self.ranks)
            ]
            ranks = np.array([r for _, r in sorted(held)], np.int64)
        else:
            ranks = np.array(self.placement, np.int64)
        ranks.flags.writeable = False
        return ranks

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending: `F[j]` of rank r is stage `stages_of[r][j]`."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of.tolist()):
            held[rank].append(stage)
        return tuple(map(tuple, held))
