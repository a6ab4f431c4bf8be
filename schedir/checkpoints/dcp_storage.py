"""Store tensor slices in files that torch.distributed.checkpoint (DCP) can read.

A file is a sequence of archives of `torch.save`, one per tensor slice. The manifest has the
position of each slice. Torch's own index, `.metadata`, is a pickle. schedir writes it for other
tools, and never reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from schedir.checkpoints.checkpoint_directory import ManifestFile, StoredSlice, TensorMeta
from schedir.checkpoints.load_plan import FileReads, intersect
from schedir.checkpoints.local_state import TensorPiece


class _DigestedFile(RawIOBase):
    """A file that is written sequentially, with its size and digest so far."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.digest = sha256()
        self.size = 0
        self.error: OSError | None = None  # the first error of a write

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        return memoryview(data).nbytes


# Name of a tensor -> its shape and dtype, and the slices to write.
TensorsToWrite = Mapping[str, tuple[TensorMeta, Sequence[TensorPiece]]]


def write(
    directory: Path, process: int, tensors: TensorsToWrite
) -> tuple[list[StoredSlice], dict[str, ManifestFile]]:
    """Write the tensor slices of a process to its file, and flush the file to the disk.

    Args:
        directory: The directory of the checkpoint.
        process: The index of the process, which is part of the file name.
        tensors: The slices to write.

    Returns:
        The position of each slice, and a mapping from the file name to the size and digest of the
        file. Both are empty if there are no slices.

    Raises:
        OSError: The file could not be written.
    """
    pieces = [
        (name, piece) for name, (_, tensor_pieces) in tensors.items() for piece in tensor_pieces
    ]
    if not pieces:
        return [], {}
    name, slices = f"__{process}_0.distcp", []
    with Path(directory / name).open("wb") as file:
        stream: Any = _DigestedFile(file)
        try:
            for tensor, piece in pieces:
                begin = stream.size
                torch.save(_copy_to_compact_storage(piece.memory), stream)
                length = stream.size - begin
                slices.append(StoredSlice(tensor, piece.offset, piece.size, name, begin, length))
        except RuntimeError:
            if stream.error is None:
                raise
            # Torch's archive writer raises a RuntimeError in place of the OSError of the write.
            raise stream.error from None
        file.flush()
        os.fsync(file.fileno())
    return slices, {name: ManifestFile(stream.size, stream.digest.hexdigest())}


def _copy_to_compact_storage(memory: Tensor) -> Tensor:
    """Return a CPU tensor whose storage has no other elements.

    This saves space, because `torch.save` writes the full storage.
    """
    tensor = memory.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_metadata(
    directory: Path, tensors: Mapping[str, TensorMeta], slices: Iterable[StoredSlice]
) -> dict[str, ManifestFile]:
    """Write the index `.metadata`, with which torch's own tools read the checkpoint.

    The index is a pickle, and schedir never reads it.

    Args:
        directory: The directory of the checkpoint.
        tensors: Shape and dtype of each tensor.
        slices: The stored slices of all processes.

    Returns:
        Name of the file -> its size and digest.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    results = []
    for stored in slices:
        chunks[stored.tensor].append(
            ChunkStorageMetadata(torch.Size(stored.offset), torch.Size(stored.size))
        )
        # torch has no public name for `_StorageInfo`.
        storage_info = _StorageInfo(stored.file, stored.begin, stored.length)
        results.append(
            WriteResult(MetadataIndex(stored.tensor, stored.offset), stored.length, storage_info)
        )
    tensor_metadata: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, meta.dtype)), torch.Size(meta.shape), chunks[name]
        )
        for name, meta in tensors.items()
    }
    FileSystemWriter(directory).finish(Metadata(tensor_metadata), [results])
    data = (directory / ".metadata").read_bytes()
    return {".metadata": ManifestFile(len(data), sha256(data).hexdigest())}


def read(directory: Path, reads: FileReads) -> None:
    """Read stored slices into memory.

    A value of another dtype is converted. Files are not verified.

    Args:
        directory: The directory of the checkpoint.
        reads: The stored slices to read, and the slices in memory to fill.
    """
    for name, slices in reads.items():
        with Path(directory / name).open("rb") as file:
            for stored, pieces in slices:
                file.seek(stored.begin)
                data = BytesIO(file.read(stored.length))
                tensor = torch.load(data, map_location="cpu", weights_only=True)
                for piece in pieces:
                    begin, size = intersect(piece, stored)
                    source = _narrow(tensor, stored.offset, begin, size)
                    _narrow(piece.memory, piece.offset, begin, size).copy_(source)


def _narrow(tensor: Tensor, offset: Sequence[int], begin: Sequence[int], size: list[int]) -> Tensor:
    """Return the view of a slice within `tensor`.

    `tensor` itself is a slice of a larger tensor. `offset` and `begin` are the offsets of `tensor`
    and of the returned slice in the larger tensor. `size` is the size of the returned slice.
    """
    for dim, (low, first, length) in enumerate(zip(offset, begin, size, strict=True)):
        tensor = tensor.narrow(dim, first - low, length)
    return tensor
