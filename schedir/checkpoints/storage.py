"""Storage: boxes in files, by the storage layer of torch.distributed.checkpoint.

Files are those that torch's own planners write and read.  What is in them is planned here, and
told in the manifest: torch's `.metadata` is a pickle, and is written for others only.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from schedir.checkpoints.folder import File, Kind, Manifest, Stored
from schedir.checkpoints.own import Piece


class _Digested(io.RawIOBase):
    """A file that is written from its begin to its end, and the digest of what was."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.size = file, sha256(), 0
        self.error: OSError | None = None  # the error of the first write that failed

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        self.file.flush()
        return int(self.file.fileno())


class _Files(FileSystem):
    """Files of which the digests are known when they have been written."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = _Digested(file)
            try:
                yield stream
            except RuntimeError:
                if stream.error is None:
                    raise
                # torch's archive writer raises this error in place of the OSError of the write.
                raise stream.error from None
            self.files[Path(path).name] = File(stream.size, stream.digest.hexdigest())


class _Saves:
    """Of a planner what a StorageWriter asks for: the data of an item."""

    def __init__(self, pieces: Mapping[MetadataIndex, Tensor]) -> None:
        self.pieces = pieces

    def resolve_data(self, item: WriteItem) -> Tensor:
        return self.pieces[item.index]


class _Loads:
    """Of a planner what a StorageReader asks for: where an item goes."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}  # by the item

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        memory = self.memory[id(item)]
        for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            memory = memory.narrow(dim, begin, length)
        return memory

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """It has been copied into its place."""


Writes = Mapping[str, tuple[Kind, Sequence[Piece]]]  # by tensor


def write(folder: Path, process: int, tensors: Writes) -> tuple[list[Stored], dict[str, File]]:
    """Write boxes to a file of a process; returns where each lies, and the file with its digest."""
    writer = FileSystemWriter(folder)
    writer.fs = files = _Files()
    items, pieces = [], {}
    for name, (kind, some) in tensors.items():
        for piece in some:
            index = MetadataIndex(name, piece.offset)
            data = TensorWriteData(_chunk(piece), _properties(kind), torch.Size(kind.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            pieces[index] = piece
    if not items:
        return [], {}
    plan: Any = SavePlan(items, storage_data=_StoragePrefix(f"__{process}_"))
    planner: Any = _Saves({index: piece.memory for index, piece in pieces.items()})
    results: list[WriteResult] = writer.write_data(plan, planner).wait()
    boxes = []
    for result in results:
        piece, at = pieces[result.index], result.storage_data
        name = result.index.fqn
        boxes.append(Stored(name, piece.offset, piece.size, at.relative_path, at.offset, at.length))
    return boxes, files.files


def write_metadata(
    folder: Path, tensors: Mapping[str, Kind], boxes: Iterable[Stored]
) -> dict[str, File]:
    """Write what torch's own tools read: a pickle, which we never open; returns the file."""
    writer = FileSystemWriter(folder)
    writer.fs = files = _Files()
    metadata = Metadata({name: _metadata(kind, []) for name, kind in tensors.items()})
    results = []
    for box in boxes:
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
        told: Any = metadata.state_dict_metadata[box.tensor]
        told.chunks.append(chunk)
        where = _StorageInfo(box.file, box.begin, box.length)
        results.append(WriteResult(MetadataIndex(box.tensor, box.offset), box.length, where))
    writer.finish(metadata, [results])
    return {name.removesuffix(".tmp"): file for name, file in files.files.items()}


def lacking(boxes: Sequence[Stored], pieces: Sequence[Piece]) -> int:
    """How many numbers of some pieces of a tensor no stored box of it has."""
    wanted = sum(prod(piece.size) for piece in pieces)
    there = 0
    for piece in pieces:
        for box in boxes:
            common = 1
            for o, n, begin, length in zip(
                piece.offset, piece.size, box.offset, box.size, strict=True
            ):
                common *= max(0, min(o + n, begin + length) - max(o, begin))
            there += common
    return wanted - there


def read(folder: Path, manifest: Manifest, wanted: Iterable[tuple[str, Sequence[Piece]]]) -> None:
    """Read the numbers of pieces into their memory, of tensors by name, from the boxes that have
    them; numbers of another type are rounded."""
    wanted = [*wanted]
    reader = FileSystemReader(folder)
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name, _ in wanted}
    for box in manifest.boxes:
        if box.tensor in chunks:
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
            chunks[box.tensor].append(chunk)
            index = MetadataIndex(box.tensor, box.offset)
            reader.storage_data[index] = _StorageInfo(box.file, box.begin, box.length)
    planner, items = _Loads(), []
    for name, pieces in wanted:
        there = _metadata(manifest.tensors[name], chunks[name])
        some = create_read_items_for_chunk_list(name, there, [*map(_chunk, pieces)])
        planner.memory |= {id(one): pieces[one.dest_index.index or 0].memory for one in some}
        items += some
    of_torch: Any = planner
    reader.read_data(LoadPlan(items), of_torch).wait()


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size))


def _properties(kind: Kind) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, kind.dtype))


def _metadata(kind: Kind, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(_properties(kind), torch.Size(kind.shape), chunks)
