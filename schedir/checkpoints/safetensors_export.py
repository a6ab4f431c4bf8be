"""Export the model of a checkpoint as one `.safetensors` file.

The file has the length of a header in 8 bytes, the header in JSON, and the numbers of one tensor
behind the other (https://github.com/huggingface/safetensors, "Format").  It is written tensor by
tensor, so that memory has room for one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from schedir.checkpoints import dcp_storage
from schedir.checkpoints.checkpoint_directory import Manifest, StoredSlice, TensorMeta
from schedir.checkpoints.local_state import TensorPiece
from schedir.checkpoints.manifest import DTYPE_BYTES
from schedir.errors import CheckpointError, describe_exception

SAFETENSORS_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_FLOAT_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")


class ExportedTensor(NamedTuple):
    """A tensor of the file: its name and what it is there, and the tensor of the checkpoint from
    which it is made, and how."""

    name: str
    meta: TensorMeta
    stored_name: str
    convert: Callable[[Tensor], Tensor] = Tensor.contiguous


def list_exported_tensors(manifest: Manifest, dtype: str | None = None) -> list[ExportedTensor]:
    """The weights and buffers of a checkpoint by their names in the whole model.

    With a `dtype`, as "float32", weights of other floating types become it: from their float32
    copies where there are any, so that each number is rounded once.  Else all are as they are.
    Raises CheckpointError for types that the format does not have.
    """
    found: dict[str, ExportedTensor] = {}
    for stored, kind in manifest.tensors.items():
        group, _, name = stored.partition("/")
        if group not in ("weights", "buffers"):
            continue
        if name in found:
            raise CheckpointError(f"a weight and a buffer are both called {name}")
        if group == "weights" and dtype not in (None, kind.dtype) and kind.dtype in _FLOAT_DTYPES:
            copy = f"main/{name}"
            stored = copy if copy in manifest.tensors else stored
            kind = TensorMeta(kind.shape, str(dtype))
        if kind.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{stored} is of {kind.dtype}, which safetensors does not have")
        found[name] = ExportedTensor(name, kind, stored)
    if not found:
        raise CheckpointError(f"the checkpoint of step {manifest.step} has no weights")
    return [*found.values()]


def write_safetensors(
    path: Path,
    directory: Path,
    manifest: Manifest,
    tensors: Sequence[ExportedTensor],
    metadata: Mapping[str, str],
) -> int:
    """Write a file of tensors, made of the files of a checkpoint, which have been verified; returns
    its bytes.  Raises CheckpointError for what cannot be read, and for what cannot be said in the
    type that is wanted."""
    boxes: dict[str, list[StoredSlice]] = {one.stored_name: [] for one in tensors}
    for box in manifest.slices:
        if box.tensor in boxes:
            boxes[box.tensor].append(box)
    # The widest types first: so each tensor begins at a multiple of its type's bytes.
    placed = sorted(tensors, key=lambda one: -DTYPE_BYTES[one.meta.dtype])
    with path.open("wb") as file:
        file.write(_encode_header(placed, metadata))
        for one in placed:
            own = replace(manifest, slices=tuple(boxes[one.stored_name]))
            file.write(_encode_tensor(one, _read_tensor(directory, own, one.stored_name)))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _encode_header(tensors: Sequence[ExportedTensor], metadata: Mapping[str, str]) -> bytes:
    """What is before the numbers: which tensor is where."""
    said: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for one in tensors:
        end = at + one.meta.nbytes
        said[one.name] = {
            "dtype": SAFETENSORS_DTYPES[one.meta.dtype],
            "shape": one.meta.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_tensor(directory: Path, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor of a checkpoint."""
    kind = manifest.tensors[name]
    memory = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
    piece = TensorPiece((0,) * len(kind.shape), kind.shape, memory)
    try:
        dcp_storage.read(directory, manifest, [(name, [piece])])
    except (OSError, RuntimeError, ValueError, AssertionError, UnpicklingError) as error:
        raise CheckpointError(
            f"cannot read {name} of step {manifest.step}: {describe_exception(error)}",
            step=manifest.step,
        ) from None
    return memory


def _encode_tensor(tensor: ExportedTensor, value: Tensor) -> memoryview:
    """The numbers of a tensor as they are in the file."""
    made = value.to(getattr(torch, tensor.meta.dtype))
    if made.dtype != value.dtype:
        over = sum(
            int((new.isinf() & old.isfinite()).sum())
            for new, old in zip(_split_blocks(made), _split_blocks(value), strict=True)
        )
        if over:
            raise CheckpointError(
                f"{over:,} of the numbers of {tensor.stored_name} are too large for "
                f"{tensor.meta.dtype}",
                hint="--dtype float32 or bfloat16",
            )
    made = tensor.convert(made)
    assert tuple(made.shape) == tensor.meta.shape, (tensor, made.shape)
    numbers: Any = made.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _split_blocks(value: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor, so many at a time that what is asked of them takes little memory."""
    parts: tuple[Tensor, ...] = value.view(-1).split(2**20)
    return parts
