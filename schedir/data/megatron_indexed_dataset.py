r"""Read Megatron-LM's indexed datasets: tokens from `.bin`, ends of documents from `.idx`.

The format is that of Megatron-LM's IndexedDataset (megatron/core/datasets/indexed_dataset.py).  An
`.idx` contains, in this order:

- "MMIDIDX\0\0", the version 1 (uint64) and a code for the type of the tokens (uint8);
- the number of sequences and the number of document indices (uint64 each);
- the length in tokens of each sequence (int32);
- the first byte of each sequence in the `.bin` (int64);
- the document indices: the first sequence of each document, and then the number of sequences
  (int64).

A mode for each sequence may follow. The reader ignores these modes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.data.token_windows import Tokens
from schedir.errors import UsageError

_MAGIC: Final = b"MMIDIDX\0\0"
_HEADER: Final = np.dtype(
    [("magic", "V9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
_TOKEN_DTYPES: Final = {
    1: "u1",
    2: "i1",
    3: "<i2",
    4: "<i4",
    5: "<i8",
    8: "<u2",
}  # codes 6 and 7 are floats


class Documents(NamedTuple):
    """A stream of tokens with the ends of its documents.

    Attributes:
        tokens: The tokens. Shape (n,).
        ends: The ascending positions after the last token of each document. None if these positions
            are not given.
    """

    tokens: Tokens
    ends: NDArray[np.int64] | None = None


def read_indexed_dataset(path: Path) -> Documents:
    """Return the documents of a `.bin` with an `.idx` next to it, memory-mapped.

    Args:
        path: The path of the `.bin`.

    Raises:
        UsageError: A file cannot be read. Or the `.idx` is damaged, has another format, or does not
            match its `.bin`.
    """
    index = path.with_suffix(".idx")

    def refuse(problem: str) -> UsageError:
        return UsageError(f"{index} {problem}", fields=["source"])

    try:
        size = path.stat().st_size
        index_bytes = np.memmap(index, "u1", "r") if index.stat().st_size else np.zeros(0, "u1")
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    if len(index_bytes) < _HEADER.itemsize or index_bytes[: len(_MAGIC)].tobytes() != _MAGIC:
        raise refuse("is not an index of an IndexedDataset: it does not begin with MMIDIDX")
    header = index_bytes[: _HEADER.itemsize].view(_HEADER)[0]
    sequences = int(header["sequences"])
    bounds = int(header["bounds"])
    type_code = int(header["type"])
    if header["version"] != 1:
        raise refuse(f"has version {header['version']}; it must have version 1")
    if type_code not in _TOKEN_DTYPES:
        raise refuse(
            f"gives the type code {type_code} for its tokens, which is not the code of an integer "
            "type"
        )
    needed_bytes = _HEADER.itemsize + 12 * sequences + 8 * bounds
    if len(index_bytes) < needed_bytes:
        raise refuse(
            f"is cut off: {sequences} sequences and {bounds} document indices take "
            f"{needed_bytes} bytes, but the file has {len(index_bytes)} bytes"
        )
    dtype, offset = np.dtype(_TOKEN_DTYPES[type_code]), _HEADER.itemsize
    lengths = index_bytes[offset : offset + 4 * sequences].view("<i4").astype(np.int64)
    byte_offsets = index_bytes[offset + 4 * sequences : offset + 12 * sequences].view("<i8")
    first_sequences = (
        index_bytes[offset + 12 * sequences : needed_bytes].view("<i8").astype(np.int64)
    )
    token_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    is_contiguous = np.array_equal(byte_offsets, token_offsets[:-1] * dtype.itemsize)
    if lengths.min(initial=0) < 0 or not is_contiguous:
        raise refuse("has gaps or overlaps between its sequences")
    if token_offsets[-1] * dtype.itemsize != size:
        raise refuse(
            f"needs {token_offsets[-1]} tokens of {dtype.itemsize} bytes in {path.name}, but "
            f"{path.name} has {size} bytes"
        )
    if (
        not bounds
        or first_sequences[0] != 0
        or first_sequences[-1] != sequences
        or np.diff(first_sequences).min(initial=0) < 0
    ):
        raise refuse(
            f"has document indices that do not increase from 0 to {sequences}, the number of "
            "sequences"
        )
    ends = token_offsets[first_sequences]
    tokens = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    return Documents(tokens, np.unique(ends[ends > 0]))
