"""Sizes: how many bytes each kind of value takes on one device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError

Size = float | tuple[float, ...]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("kMGTP")}
_UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGTP")}


@dataclass(frozen=True)
class Sizes:
    """Bytes on one device, for one microbatch: a number, or one number per stage.

    `activation` is what a stage puts out, whole even where tensor-parallel ranks send slices;
    `gradient` is its gradient, as large unless told.  `saved` is what a Forward keeps for the
    backward, and `tape` what a BackwardInput keeps of it for the BackwardWeight, by default
    all.  `weights` is what a stage holds all the time: parameters, their gradients, and the
    optimizer's state.  `version` is a copy of a stage's parameters, of which a run of several
    updates without a flush keeps one for each version that is of use.

    Raises UsageError for a size that is negative or not finite.
    """

    activation: Size = 0.0
    gradient: Size | None = None
    saved: Size = 0.0
    tape: Size | None = None
    weights: Size = 0.0
    version: Size = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            try:
                size = tuple(map(float, value)) if isinstance(value, Iterable) else float(value)
            except (TypeError, ValueError):
                raise UsageError(
                    f"size {f.name} must be a number or one per stage, not {value!r}"
                ) from None
            bad = [s for s in np.atleast_1d(size) if not 0 <= s < np.inf]
            if bad or size == ():
                raise UsageError(
                    f"size {f.name} must be finite and not negative, not "
                    f"{bad[0] if bad else 'empty'}"
                )
            object.__setattr__(self, f.name, size)

    def of(self, name: str, stages: int) -> NDArray[np.float64]:
        """The size of that name for each stage, shape (stages,)."""
        value = getattr(self, name)
        if value is None:
            value = self.activation if name == "gradient" else self.saved
        row = np.asarray(value, float)
        if row.ndim and len(row) != stages:
            raise UsageError(f"size {name} has {len(row)} numbers for {stages} stages")
        return np.broadcast_to(row, (stages,))


def bytes_of(text: str) -> float:
    """The number of bytes that a text says: `512`, `1.5GB` (10^9), `1.5 GiB` (2^30).

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2] not in _UNITS:
        raise ValueError(text)
    return float(found[1]) * _UNITS[found[2]]
