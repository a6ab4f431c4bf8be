"""Lent: what is moved between tiers is on each by leave of a slot, whatever takes how long."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.kept import moved_sizes
from schedir.analysis.slots import KINDS, counts
from schedir.ir.ops import SLOTTED, TIERS, TOKENS, Per, Token
from schedir.ir.program import ON_HOST, OWN, Program
from schedir.ir.sizes import Sizes

Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # numbers and bytes
HOST: Final = {kind: name for name, kind in ON_HOST.items()}  # the host's slots, by kind


class Lent(NamedTuple):
    """How many slots each rank has for what is moved of a kind, and the bytes of the largest and of
    the smallest."""

    slots: NDArray[np.int64]
    most: NDArray[np.float64]
    least: NDArray[np.float64]

    @classmethod
    def of(cls, program: Program, kind: Token, sizes: Sizes, tier: str) -> Lent | None:
        """What a program says of a kind on a tier; None where it says no number."""
        if not program.slots:
            return None
        if tier == TIERS[0] and kind in SLOTTED and TOKENS[kind].per is Per.MICROBATCH:
            said = np.array([slots[SLOTTED.index(kind)] for slots in program.slots])
            slots = counts(program)[:, KINDS.index(kind)]
        elif tier == "host" and kind in HOST:
            said = slots = np.array([getattr(slots, HOST[kind]) for slots in program.slots])
        else:
            return None
        if (said == OWN).any():
            return None
        return cls(slots, *moved_sizes(program, kind, sizes, TIERS.index(tier)))

    def bound(self, rank: int, stays: Curve, moved: Curve) -> Curve:
        """Both together, of a rank: what stays has slots, and of what is moved there is no more
        than finds one, wherever the rest is."""
        there = np.minimum(moved[0], np.maximum(self.slots[rank] - stays[0], 0))
        size = np.minimum(moved[1] - (moved[0] - there) * self.least[rank], there * self.most[rank])
        return stays[0] + there, stays[1] + size
