"""The manifest of a checkpoint: its files, tensors and slices.  Needs no torch.

Its files with their digests, its tensors, and in which file each box of them lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from schedir.errors import CheckpointError

DTYPE_BYTES: Final = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}  # of a number, by the names that torch has for types


def join_facts(facts: Sequence[str], max_facts: int = 3) -> str:
    """Facts as one sentence: the first few, and how many more there are.

    >>> join_facts(["one", "two", "three", "four", "five"])
    'one; two; three; and 2 more'
    """
    return "; ".join(
        [*facts[:max_facts], *[f"and {len(facts) - max_facts} more"] * (len(facts) > max_facts)]
    )


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint of which something is missing, or is not as it was written."""


class ManifestFile(NamedTuple):
    """A file of a checkpoint: its bytes, and their sha256 in hexadecimal digits."""

    size: int
    sha256: str


class StoredSlice(NamedTuple):
    """A box of a tensor as it is stored: which, where in it, in which file, and its bytes there."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int


class TensorMeta(NamedTuple):
    """What a tensor is: its whole shape, and its type as in "float32"."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """How many it takes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has.

    `step` is how many steps have been made; `facts` are what was run, for people to read, and
    `state` what goes on from: the number of the next step, the scale of a loss, and what the caller
    gave.  Both are JSON: a tuple becomes a list.  `finished_at` it was finished is in seconds since
    1970, and `digest` is that of its lines; what has not been written has neither.
    """

    step: int
    files: Mapping[str, ManifestFile]
    tensors: Mapping[str, TensorMeta]
    slices: tuple[StoredSlice, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    finished_at: int = field(default=0, compare=False)
    digest: str = field(default="", compare=False)

    @property
    def total_bytes(self) -> int:
        """Those of all files."""
        return sum(file.size for file in self.files.values())

    def assign_files(self, process: int, processes: int) -> list[str]:
        """The files that one of several processes verifies, so that each has about as many
        bytes."""
        largest = sorted(self.files, key=lambda name: (-self.files[name].size, name))
        return largest[process::processes]
