"""Compare tensors by their bits, by version counters and by checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_WORD_TYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COLUMNS: Final = 256  # words per row of the matrix in `checksum_on_device`


def get_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors, which count writes.

    An inference tensor has no version counter, so its entry is 0.

    Args:
        tensors: The tensors.
    """
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def get_write_traces(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the version counter and the address of each tensor.

    The address changes if the `data` of a tensor is replaced. It is 0 for a tensor that is not
    strided.

    Args:
        tensors: The tensors.
    """
    addresses = (t.data_ptr() if t.layout is torch.strided else 0 for t in tensors)
    return [*zip(get_versions(tensors), addresses, strict=True)]


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same bits.

    NaNs with different bits are different. Tensors with different dtypes, devices or layouts are
    different, too.

    Args:
        one: A tensor.
        other: Another tensor of the same shape.
    """
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return False
    return all(map(torch.equal, _flatten_to_bytes(one), _flatten_to_bytes(other)))


def compute_checksum(t: Tensor) -> int:
    """Return a 64-bit checksum of the elements of a tensor, which depends on their order.

    The elements are read as words, which are integers of at most 32 bits. Each word is multiplied
    by an odd number that depends on its position, and the products are added. The words of a large
    tensor are first arranged as a matrix, and replaced by the sums of its rows and columns. Two
    different tensors may have the same checksum, but this is unlikely.

    Args:
        t: The tensor.
    """
    return int(checksum_on_device(t))


def checksum_on_device(t: Tensor) -> Tensor:
    """Return the checksum of `compute_checksum` as a tensor, so that the host does not wait.

    Args:
        t: The tensor.

    Returns:
        A 0-dim int64 tensor on the device of `t`.
    """
    t = t.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(t) if t.is_complex() else t).reshape(-1).contiguous()
    if flat.stride() != (1,):  # a single element counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    words = flat.view(_WORD_TYPES[flat.element_size()])
    if len(words) > 16 * _COLUMNS:  # for fewer words, the two sums cost more time than they save
        num_in_rows = len(words) - len(words) % _COLUMNS
        matrix, tail_words = words[:num_in_rows].view(-1, _COLUMNS), words[num_in_rows:]
        words = torch.cat((matrix.sum(0), matrix.sum(1), tail_words))
    # The factors are cubes. With consecutive odd numbers, the checksum would not change if a value
    # moved from row r and column c to row r + 1 and column c - 1.
    factors = (2 * torch.arange(len(words), device=words.device) + 1) ** 3
    return (words * factors).sum()


def compute_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each tensor, or 0 for a tensor that is not strided.

    Args:
        tensors: The tensors.
    """
    dense = torch.strided
    return [compute_checksum(t.detach()) if t.layout is dense else 0 for t in tensors]


def get_local_shard(t: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, and any other tensor unchanged.

    Args:
        t: The tensor.
    """
    return t.to_local() if hasattr(t, "to_local") else t


def _flatten_to_bytes(tensor: Tensor) -> list[Tensor]:
    """Return the bytes of a tensor of any layout, as flat uint8 tensors."""
    flat = (t.reshape(-1) for t in _list_dense_tensors(tensor.detach()))
    return [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in flat]


def _list_dense_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a dense tensor as a tuple of one, or the indices and values of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
