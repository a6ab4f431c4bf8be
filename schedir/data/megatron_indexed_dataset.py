r"""Read Megatron-LM's indexed datasets: tokens from `.bin`, ends of documents from `.idx`.

The format is that of Megatron-LM's IndexedDataset (megatron/core/datasets/indexed_dataset.py).  An
`.idx` contains, in this order:

- "MMIDIDX\0\0", the version 1 (uint64) and a code for the type of the tokens (uint8);
- the number of sequences and the number of bounds of documents (uint64 each);
- the length in tokens of each sequence (int32);
- the first byte of each sequence in the `.bin` (int64);
- the first sequence of each document, and last the number of sequences (int64).

A mode for each sequence may follow. It is ignored.
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
        ends: The ascending positions after the last token of each document. None if they are not
            given.
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

    def make_error(reason: str) -> UsageError:
        return UsageError(f"{index} {reason}", fields=["source"])

    try:
        size = path.stat().st_size
        raw = np.memmap(index, "u1", "r") if index.stat().st_size else np.zeros(0, "u1")
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    if len(raw) < _HEADER.itemsize or raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise make_error("is not an index of an IndexedDataset: it does not begin with MMIDIDX")
    header = raw[: _HEADER.itemsize].view(_HEADER)[0]
    sequences = int(header["sequences"])
    bounds = int(header["bounds"])
    code = int(header["type"])
    if header["version"] != 1:
        raise make_error(f"has version {header['version']}; it must have version 1")
    if code not in _TOKEN_DTYPES:
        raise make_error(
            f"gives the type code {code} for its tokens, which is not the code of an integer type"
        )
    needed_bytes = _HEADER.itemsize + 12 * sequences + 8 * bounds
    if len(raw) < needed_bytes:
        raise make_error(
            f"is cut off: {sequences} sequences and {bounds} bounds of documents take "
            f"{needed_bytes} bytes, but the file has {len(raw)} bytes"
        )
    dtype, offset = np.dtype(_TOKEN_DTYPES[code]), _HEADER.itemsize
    lengths = raw[offset : offset + 4 * sequences].view("<i4").astype(np.int64)
    begin_bytes = raw[offset + 4 * sequences : offset + 12 * sequences].view("<i8")
    first_sequences = raw[offset + 12 * sequences : needed_bytes].view("<i8").astype(np.int64)
    token_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    byte_bounds = token_bounds * dtype.itemsize
    if lengths.min(initial=0) < 0 or not np.array_equal(begin_bytes, byte_bounds[:-1]):
        raise make_error("has gaps or overlaps between its sequences")
    if byte_bounds[-1] != size:
        raise make_error(
            f"needs {token_bounds[-1]} tokens of {dtype.itemsize} bytes in {path.name}, but "
            f"{path.name} has {size} bytes"
        )
    if (
        not bounds
        or first_sequences[0] != 0
        or first_sequences[-1] != sequences
        or np.diff(first_sequences).min(initial=0) < 0
    ):
        raise make_error(
            f"has bounds of documents that do not increase from 0 to {sequences}, the "
            "number of sequences"
        )
    ends = token_bounds[first_sequences]
    tokens = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    return Documents(tokens, np.unique(ends[ends > 0]))
