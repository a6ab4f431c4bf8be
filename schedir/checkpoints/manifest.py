"""The manifest of a checkpoint: its files, its tensors, and their slices.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from schedir.errors import CheckpointError

# Bytes of an element, by torch's name of the dtype.
DTYPE_BYTES: Final = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}


def join_facts(facts: Sequence[str], max_facts: int = 3) -> str:
    """Return the first facts as one sentence, with the number of the other facts.

    Args:
        facts: The facts.
        max_facts: The number of facts to name.

    Example:
        >>> join_facts(["one", "two", "three", "four", "five"])
        'one; two; three; and 2 more'
    """
    return "; ".join(
        [*facts[:max_facts], *[f"and {len(facts) - max_facts} more"] * (len(facts) > max_facts)]
    )


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint has missing or damaged files."""


class ManifestFile(NamedTuple):
    """A file of a checkpoint.

    Attributes:
        size: The size of the file in bytes.
        sha256: The digest of the file in hexadecimal digits.
    """

    size: int
    sha256: str


class StoredSlice(NamedTuple):
    """A tensor slice in a file of a checkpoint.

    Attributes:
        tensor: The name of the tensor.
        offset: The offset of the slice in each dimension of the tensor.
        size: The size of the slice in each dimension.
        file: The name of the file.
        begin: The first byte of the slice in the file.
        length: The number of bytes of the slice in the file.
    """

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor.

    Attributes:
        shape: The shape of the full tensor.
        dtype: Torch's name of the dtype, as in "float32".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        step: The number of steps that were made.
        files: The files, by name.
        tensors: Shape and dtype of each tensor, by name.
        slices: The stored slices.
        facts: A description of the run, for people. The description has JSON values, so a tuple is
            loaded as a list.
        state: The state to resume from, in addition to tensors: for example the number of the next
            step, the loss scale, and the extra state of the caller. The state has JSON values.
        finished_at: The time when the checkpoint was completed, in seconds since 1970. The time is
            0 until then.
        digest: The sha256 of the manifest's lines. The digest is empty if the manifest was not read
            from a file.
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
        """The total size of all files, in bytes."""
        return sum(file.size for file in self.files.values())

    def assign_files(self, process: int, processes: int) -> list[str]:
        """Return the files that one of several processes verifies.

        Each process gets about the same number of bytes.

        Args:
            process: The index of the process, from 0.
            processes: The number of processes.
        """
        largest = sorted(self.files, key=lambda name: (-self.files[name].size, name))
        return largest[process::processes]
