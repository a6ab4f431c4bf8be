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
from schedir.checkpoints.load_plan import plan_reads
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
        stored_name: The name of the tensor in the checkpoint from which the exported tensor is
            made.
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
        CheckpointError: The format does not support a dtype, a weight and a buffer have the same
            name, or there are no weights.
    """
    exported: dict[str, ExportedTensor] = {}
    for stored_name, meta in manifest.tensors.items():
        group, _, name = stored_name.partition("/")
        if group not in ("weights", "buffers"):
            continue
        if name in exported:
            raise CheckpointError(f"a weight and a buffer both have the name {name}")
        if group == "weights" and dtype not in (None, meta.dtype) and meta.dtype in _FLOAT_DTYPES:
            copy_name = f"main/{name}"
            stored_name = copy_name if copy_name in manifest.tensors else stored_name
            meta = TensorMeta(meta.shape, str(dtype))
        if meta.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{stored_name} has dtype {meta.dtype}, which safetensors lacks")
        exported[name] = ExportedTensor(name, meta, stored_name)
    if not exported:
        raise CheckpointError(f"the checkpoint of step {manifest.step} has no weights")
    return [*exported.values()]


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
    slices: dict[str, list[StoredSlice]] = {tensor.stored_name: [] for tensor in tensors}
    for stored in manifest.slices:
        if stored.tensor in slices:
            slices[stored.tensor].append(stored)
    # The widest dtypes come first, so that each tensor begins at a multiple of its element size.
    sorted_tensors = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.meta.dtype])
    with path.open("wb") as file:
        file.write(_encode_header(sorted_tensors, metadata))
        for tensor in sorted_tensors:
            tensor_manifest = replace(manifest, slices=tuple(slices[tensor.stored_name]))
            file.write(
                _encode_tensor(tensor, _read_tensor(directory, tensor_manifest, tensor.stored_name))
            )
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _encode_header(tensors: Sequence[ExportedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header, which has the position of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.meta.nbytes
        header[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.meta.dtype],
            "shape": tensor.meta.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_tensor(directory: Path, manifest: Manifest, name: str) -> Tensor:
    meta = manifest.tensors[name]
    memory = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
    piece = TensorPiece((0,) * len(meta.shape), meta.shape, memory)
    try:
        dcp_storage.read(directory, plan_reads(manifest, [(name, [piece])]))
    except (OSError, RuntimeError, ValueError, AssertionError, UnpicklingError) as error:
        raise CheckpointError(
            f"cannot read {name} of step {manifest.step}: {describe_exception(error)}",
            step=manifest.step,
        ) from None
    return memory


def _encode_tensor(tensor: ExportedTensor, value: Tensor) -> memoryview:
    converted = value.to(getattr(torch, tensor.meta.dtype))
    if converted.dtype != value.dtype:
        overflow_count = sum(
            int((block.isinf() & original.isfinite()).sum())
            for block, original in zip(_split_blocks(converted), _split_blocks(value), strict=True)
        )
        if overflow_count:
            raise CheckpointError(
                f"{overflow_count:,} elements of {tensor.stored_name} are too large for "
                f"{tensor.meta.dtype}",
                hint="--dtype float32 or --dtype bfloat16",
            )
    converted = tensor.convert(converted)
    assert tuple(converted.shape) == tensor.meta.shape, (tensor, converted.shape)
    data: Any = converted.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _split_blocks(value: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into blocks of 2**20 elements, so that comparisons need little memory."""
    blocks: tuple[Tensor, ...] = value.view(-1).split(2**20)
    return blocks
