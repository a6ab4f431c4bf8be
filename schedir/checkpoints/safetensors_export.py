"""Export the model of a checkpoint as one `.safetensors` file.

The file begins with the length of the header in 8 bytes, and the header in JSON. The data of the
tensors follow. The file is written tensor by tensor, so only one tensor must fit into memory.

References:
    https://github.com/huggingface/safetensors, section "Format".
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
    """A tensor of the exported file.

    Attributes:
        name: The name in the exported file.
        meta: Shape and dtype in the exported file.
        stored_name: The name of the tensor in the checkpoint from which it is made.
        convert: Converts the tensor after its dtype was changed. By default the tensor is only made
            contiguous.
    """

    name: str
    meta: TensorMeta
    stored_name: str
    convert: Callable[[Tensor], Tensor] = Tensor.contiguous


def list_exported_tensors(manifest: Manifest, dtype: str | None = None) -> list[ExportedTensor]:
    """List the weights and buffers of a checkpoint by their names in the full model.

    Args:
        manifest: The manifest of the checkpoint.
        dtype: The dtype of exported floating-point weights, such as "float32". Weights with float32
            copies are converted from these copies, so that each value is rounded only once. By
            default all tensors keep their dtypes.

    Raises:
        CheckpointError: The format does not have a dtype, a weight and a buffer have the same name,
            or there are no weights.
    """
    found: dict[str, ExportedTensor] = {}
    for stored, kind in manifest.tensors.items():
        group, _, name = stored.partition("/")
        if group not in ("weights", "buffers"):
            continue
        if name in found:
            raise CheckpointError(f"a weight and a buffer both have the name {name}")
        if group == "weights" and dtype not in (None, kind.dtype) and kind.dtype in _FLOAT_DTYPES:
            copy = f"main/{name}"
            stored = copy if copy in manifest.tensors else stored
            kind = TensorMeta(kind.shape, str(dtype))
        if kind.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{stored} has dtype {kind.dtype}, which safetensors lacks")
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
    """Write tensors of a checkpoint to a file. The checkpoint must have been verified.

    Args:
        path: The file to write.
        directory: The directory of the checkpoint.
        manifest: The manifest of the checkpoint.
        tensors: The tensors to write.
        metadata: Texts for the `__metadata__` of the header.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: A tensor cannot be read, or has values that are too large for the new
            dtype.
    """
    boxes: dict[str, list[StoredSlice]] = {one.stored_name: [] for one in tensors}
    for box in manifest.slices:
        if box.tensor in boxes:
            boxes[box.tensor].append(box)
    # The widest dtypes come first, so that each tensor begins at a multiple of its element size.
    placed = sorted(tensors, key=lambda one: -DTYPE_BYTES[one.meta.dtype])
    with path.open("wb") as file:
        file.write(_encode_header(placed, metadata))
        for one in placed:
            tensor_manifest = replace(manifest, slices=tuple(boxes[one.stored_name]))
            file.write(
                _encode_tensor(one, _read_tensor(directory, tensor_manifest, one.stored_name))
            )
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _encode_header(tensors: Sequence[ExportedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header, which has the position of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for one in tensors:
        end = at + one.meta.nbytes
        header[one.name] = {
            "dtype": SAFETENSORS_DTYPES[one.meta.dtype],
            "shape": one.meta.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_tensor(directory: Path, manifest: Manifest, name: str) -> Tensor:
    """Return a full tensor of a checkpoint."""
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
    """Return the bytes of a tensor in the exported file."""
    made = value.to(getattr(torch, tensor.meta.dtype))
    if made.dtype != value.dtype:
        over = sum(
            int((new.isinf() & old.isfinite()).sum())
            for new, old in zip(_split_blocks(made), _split_blocks(value), strict=True)
        )
        if over:
            raise CheckpointError(
                f"{over:,} elements of {tensor.stored_name} are too large for {tensor.meta.dtype}",
                hint="--dtype float32 or --dtype bfloat16",
            )
    made = tensor.convert(made)
    assert tuple(made.shape) == tensor.meta.shape, (tensor, made.shape)
    numbers: Any = made.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _split_blocks(value: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into blocks of 2**20 elements, so that comparisons need little memory."""
    parts: tuple[Tensor, ...] = value.view(-1).split(2**20)
    return parts
