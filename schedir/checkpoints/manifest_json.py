"""Read, write and validate a manifest as lines of JSON.

    {"schedir_checkpoint": 1, "step": 120, "when": 1763847000, "facts": {...}, "state": {...}}
    {"file": "__0_0.distcp", "size": 4096, "sha256": "..."}
    {"tensor": "weights/norm.bias", "dtype": "float32", "shape": [8], "boxes": [...]}
    {"sha256": "..."}

The first line describes the run. Then there is one line per file, and one line per tensor with its
slices, which are called boxes in the file. A box is [number of the file, first byte, number of
bytes, offset, size].

The last line is the digest of all lines before it. The digest detects truncation and accidental
changes. It is not a signature: a person with write access can write another digest. This module
does not need torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from math import isfinite, prod
from typing import Any, BinaryIO, Final

from schedir.checkpoints.manifest import (
    DTYPE_BYTES,
    IncompleteCheckpointError,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
)
from schedir.errors import CheckpointError, describe, format_bytes
from schedir.io.files import read_prefix

FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.jsonl"
MAX_BYTES: Final = 2**28  # the largest size of a manifest, without its last line
MAX_LINE_BYTES: Final = 2**22
# The largest total number of corners of a tensor's boxes. A box in n dimensions has 2^n corners.
MAX_CORNERS: Final = 2**20
MAX_DIMENSIONS: Final = 8
_MAX_DEPTH = 50  # the largest number of levels of nested lists and objects
_MAX_INTEGER = 2**53  # the largest integer, and the largest number of elements of a tensor
_MAX_NAME_LENGTH = 1000  # the largest number of characters of a tensor's name
_DIGEST_LINE = b'{"sha256": "%s"}\n'
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


def encode_manifest(manifest: Manifest) -> Iterator[bytes]:
    """Yield the lines of a manifest.

    Args:
        manifest: The manifest.

    Raises:
        CheckpointError: `read_manifest` would refuse the manifest. For example, a process did not
            report its slices of a tensor.
    """
    reader, digest = _ManifestReader("it"), sha256()
    try:
        for value in _iterate_records(manifest):
            _require_json(value)
            line = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            reader.read_line(line)
            digest.update(line)
            yield line
    except _InvalidManifest as reason:
        raise CheckpointError(
            f"cannot save step {manifest.step}: its manifest is not valid: {reason}",
            step=manifest.step,
        ) from None
    yield _DIGEST_LINE % digest.hexdigest().encode()


def _iterate_records(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line, except the last one."""
    file_numbers = {name: k for k, name in enumerate(manifest.files)}
    boxes: dict[str, list[list[Any]]] = {name: [] for name in manifest.tensors}
    for stored in manifest.slices:
        boxes[stored.tensor].append(
            [file_numbers[stored.file], stored.begin, stored.length, stored.offset, stored.size]
        )
    yield {
        "schedir_checkpoint": FORMAT_VERSION, "step": manifest.step, "when": manifest.finished_at,
        "facts": manifest.facts, "state": manifest.state,
    }  # fmt: skip
    for name, file in manifest.files.items():
        yield {"file": name, "size": file.size, "sha256": file.sha256}
    for name, meta in manifest.tensors.items():
        yield {
            "tensor": name,
            "dtype": meta.dtype,
            "shape": meta.shape,
            "boxes": boxes[name],
        }


def read_manifest(
    file: BinaryIO, checkpoint_name: str, *, include_tensors: bool = True
) -> Manifest:
    """Read and validate a manifest.

    Args:
        file: The open file.
        checkpoint_name: The name of the checkpoint, for errors.
        include_tensors: True to read tensors and slices, too. False makes reading fast.

    Raises:
        IncompleteCheckpointError: The manifest is truncated, damaged or not valid.
        CheckpointError: The manifest has another format version.
    """
    length = len(_DIGEST_LINE % b"") + 64
    data = read_prefix(file, MAX_BYTES + length + 1)
    try:
        if len(data) < length:
            raise _InvalidManifest("it is cut off")
        if len(data) > MAX_BYTES + length:
            raise _InvalidManifest(f"it has more than {format_bytes(MAX_BYTES)}")
        lines, last_line = data[:-length], data[-length:]
        digest = sha256(lines).hexdigest()
        if last_line != _DIGEST_LINE % digest.encode():
            raise _InvalidManifest("its last line is not the digest of the other lines")
        reader = _ManifestReader(checkpoint_name)
        for line in BytesIO(lines):
            if line.startswith(b'{"tensor"') and not include_tensors:
                break
            reader.read_line(line)
        return reader.build_manifest(digest)
    except _InvalidManifest as reason:
        raise IncompleteCheckpointError(
            f"{checkpoint_name} is not complete: its manifest is not valid: {reason}"
        ) from None


class _InvalidManifest(Exception):
    """A manifest is not valid. The message has the reason."""


class _ManifestReader:
    """Reads the lines of a manifest one by one. Errors contain `checkpoint_name`."""

    def __init__(self, checkpoint_name: str) -> None:
        self.checkpoint_name = checkpoint_name
        self.line_number = 0
        self.header: dict[str, Any] = {}
        self.files: dict[str, ManifestFile] = {}
        self.file_sizes: list[tuple[str, int]] = []
        self.tensors: dict[str, TensorMeta] = {}
        self.slices: list[StoredSlice] = []

    def build_manifest(self, digest: str) -> Manifest:
        if not self.header:
            raise _InvalidManifest("it is empty")
        header = self.header
        return Manifest(
            header["step"], self.files, self.tensors, tuple(self.slices), header["facts"],
            header["state"],
            header["when"], digest,
        )  # fmt: skip

    def read_line(self, line: bytes) -> None:
        """Validate a line, and add its record.

        Raises:
            _InvalidManifest: The line is not valid.
            CheckpointError: The line is the header of another format version.
        """
        self.line_number += 1
        try:
            value = _parse_object(line)
            if not self.header:
                self._read_header(value)
            elif "file" in value:
                self._read_file_record(value)
            else:
                self._read_tensor_record(value)
        except _InvalidManifest as reason:
            raise _InvalidManifest(f"line {self.line_number}: {reason}") from None

    def _read_header(self, value: dict[str, Any]) -> None:
        version = value.get("schedir_checkpoint")
        if type(version) is not int or version < 1:
            raise _InvalidManifest("its first line is not that of a manifest")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.checkpoint_name} has format {describe(version)}, but this version of "
                f"schedir reads format {FORMAT_VERSION}",
                hint="use the version of schedir that wrote the checkpoint, or a later one",
            )
        _require_fields(value, "schedir_checkpoint", "step", "when", "facts", "state")
        for key in ("step", "when"):
            _require_integer(value[key], key)
        for key in ("facts", "state"):
            if type(value[key]) is not dict:
                raise _InvalidManifest(f"{key} must be an object, not {describe(value[key])}")
            _require_json(value[key])
        self.header = value

    def _read_file_record(self, value: dict[str, Any]) -> None:
        name, size, sha256 = _require_fields(value, "file", "size", "sha256")
        if not is_file_name(name):
            raise _InvalidManifest(f"{describe(name)} is not a file name of a checkpoint")
        if name in self.files:
            raise _InvalidManifest(f"the file {describe(name)} is listed twice")
        if self.tensors:
            raise _InvalidManifest("a file is listed after a tensor")
        _require_integer(size, "size")
        if type(sha256) is not str or not _SHA256_PATTERN.fullmatch(sha256):
            raise _InvalidManifest(f"{describe(sha256)} is not a sha256")
        self.files[name] = ManifestFile(size, sha256)
        self.file_sizes.append((name, size))

    def _read_tensor_record(self, value: dict[str, Any]) -> None:
        name, dtype, shape, boxes = _require_fields(value, "tensor", "dtype", "shape", "boxes")
        if type(name) is not str or not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
            raise _InvalidManifest(f"{describe(name)} is not a name of a tensor")
        if name in self.tensors:
            raise _InvalidManifest(f"the tensor {describe(name)} is listed twice")
        if type(dtype) is not str or dtype not in DTYPE_BYTES:
            raise _InvalidManifest(f"{describe(dtype)} is not a dtype of a tensor")
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
            raise _InvalidManifest(f"a shape must be a list of at most {MAX_DIMENSIONS} numbers")
        for length in shape:
            _require_integer(length, "a length")
        if prod(shape) > _MAX_INTEGER:
            raise _InvalidManifest(f"{describe(name)} has more than {_MAX_INTEGER} elements")
        if type(boxes) is not list or len(boxes) << len(shape) > MAX_CORNERS:
            raise _InvalidManifest(f"boxes must be a list of at most {MAX_CORNERS >> len(shape)}")
        meta = TensorMeta(tuple(shape), dtype)
        slices = [self._read_slice(name, meta, box) for box in boxes]
        if not _is_exact_cover(meta.shape, slices):
            stored_numel = sum(prod(part.size) for part in slices)
            numel = prod(shape)
            problem = "overlap"
            if stored_numel != numel:
                problem = f"have {stored_numel} of its {numel} elements"
            raise _InvalidManifest(f"the boxes of {describe(name)} {problem}")
        self.tensors[name] = meta
        self.slices += slices

    def _read_slice(self, name: str, meta: TensorMeta, value: Any) -> StoredSlice:
        if type(value) is not list or len(value) != 5:
            raise _InvalidManifest(
                f"a box must be [file, begin, length, offset, size], not {describe(value)}"
            )
        file, begin, length, offset, size = value
        dimensions = len(meta.shape)
        if type(file) is not int or not 0 <= file < len(self.file_sizes):
            raise _InvalidManifest(
                f"a box of {describe(name)} is in file {describe(file)}, which is not listed"
            )
        _require_integer(begin, "begin")
        _require_integer(length, "length")
        for corner in (offset, size):
            if type(corner) is not list or len(corner) != dimensions:
                raise _InvalidManifest(
                    f"the offset and the size of a box of {describe(name)} must be lists of "
                    f"{dimensions} integers"
                )
        for low, extent, full_length in zip(offset, size, meta.shape, strict=True):
            _require_integer(low, "offset")
            _require_integer(extent, "size")
            if not extent or low + extent > full_length:
                raise _InvalidManifest(
                    f"a box of {describe(name)} has the range {low} to {low + extent} of "
                    f"{full_length}"
                )
        file_name, file_size = self.file_sizes[file]
        if begin + length > file_size or length < prod(size) * DTYPE_BYTES[meta.dtype]:
            raise _InvalidManifest(
                f"a box of {describe(name)} does not fit bytes {begin} to {begin + length} of "
                f"{file_name}"
            )
        return StoredSlice(name, tuple(offset), tuple(size), file_name, begin, length)


def _is_exact_cover(shape: tuple[int, ...], slices: Sequence[StoredSlice]) -> bool:
    """Return whether slices within a tensor cover each of its elements exactly once.

    Slices cover each element once if the sum of the indicator functions of the slices equals the
    indicator function of the tensor. The code compares the mixed differences of these two
    functions. The mixed difference of a box is 1 or -1 at its corners, and 0 elsewhere, so only
    corners are compared.
    """
    if len(slices) == 1:
        return slices[0].size == shape
    sums: dict[int, int] = {}
    full_tensor = [] if 0 in shape else [((0,) * len(shape), shape, -1)]
    signed_slices = [(stored.offset, stored.size, 1) for stored in slices]
    for offset, size, slice_sign in (*signed_slices, *full_tensor):
        corners = [(0, slice_sign)]
        for low, extent, length in zip(offset, size, shape, strict=True):
            corners = [
                (corner * (length + 1) + low + is_end * extent, -sign if is_end else sign)
                for corner, sign in corners
                for is_end in (0, 1)
            ]
        for corner, sign in corners:
            sums[corner] = sums.get(corner, 0) + sign
    return not any(sums.values())


def is_file_name(name: object) -> bool:
    """Return whether a checkpoint may have a file of this name.

    The name must not be a path, and must not be the name of the manifest.

    Args:
        name: The name.
    """
    return (
        isinstance(name, str)
        and name.isprintable()
        and name not in ("", ".", "..", MANIFEST_NAME)
        and "/" not in name
        and "\\" not in name
        and len(name.encode()) <= 255
    )


def _parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Unlike Python's `json.loads`, this function refuses NaN and duplicate keys.
    """
    if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
        raise _InvalidManifest(f"it has more than {format_bytes(MAX_LINE_BYTES)}, or no line end")
    try:
        value = _DECODER.decode(line.decode("utf-8", "strict"))
    except UnicodeDecodeError:
        raise _InvalidManifest("it is not UTF-8") from None
    except (ValueError, RecursionError):
        raise _InvalidManifest("it is not JSON") from None
    if type(value) is not dict:
        raise _InvalidManifest("it is not an object")
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise _InvalidManifest("it has a key twice")
    return result


def _reject_constant(word: str) -> float:
    raise _InvalidManifest(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
)


def _require_fields(value: Mapping[str, Any], *keys: str) -> list[Any]:
    """Return the values of these keys. Raise _InvalidManifest if keys are missing or unknown."""
    if {*value} != {*keys}:
        raise _InvalidManifest(
            f"it has the keys {', '.join(map(describe, [*value][:9]))}, not {', '.join(keys)}"
        )
    return [value[key] for key in keys]


def _require_integer(value: object, name: str) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise _InvalidManifest(f"{name} must be an integer from 0, not {describe(value)}")


def find_json_error(value: object) -> str:
    """Return why a manifest cannot contain a value, or an empty string if it can.

    Args:
        value: The value to save. Tuples are allowed, and become lists.
    """
    try:
        _require_json(value)
    except _InvalidManifest as reason:
        return str(reason)
    return ""


def _require_json(value: object, depth: int = 0) -> None:
    """Raise _InvalidManifest if JSON cannot represent a value.

    Tuples are allowed, and become lists.
    """
    if depth > _MAX_DEPTH:
        raise _InvalidManifest(f"it is nested more than {_MAX_DEPTH} times")
    if isinstance(value, float) and not isfinite(value):
        raise _InvalidManifest(f"{value} is not a JSON number")
    if isinstance(value, Mapping):
        if bad_keys := [key for key in value if type(key) is not str]:
            raise _InvalidManifest(f"keys must be text, not {describe(bad_keys[0])}")
        value = value.values()
    elif not isinstance(value, list | tuple):
        if not isinstance(value, str | int | float | None):
            raise _InvalidManifest(f"{describe(value)} is not a JSON value")
        return
    for item in value:
        _require_json(item, depth + 1)
