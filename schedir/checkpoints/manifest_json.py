"""Read, write and validate a manifest as lines of JSON.

    {"schedir_checkpoint": 1, "step": 120, "when": 1763847000, "facts": {...}, "state": {...}}
    {"file": "__0_0.distcp", "size": 4096, "sha256": "..."}
    {"tensor": "weights/norm.bias", "dtype": "float32", "shape": [8], "boxes": [...]}
    {"sha256": "..."}

The first line says what was run; then comes a line for each file, and one for each tensor with its
boxes: [number of the file, where it begins there, its bytes there, offset, size].  The last line is
the digest of all before it: that the file was cut off, or changed by an accident, shows.  It is no
signature: whoever can write the folder can write another digest.  Needs no torch.
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
    BYTES,
    IncompleteCheckpointError,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
)
from schedir.errors import CheckpointError, describe, format_bytes
from schedir.io.files import begin_of

FORMAT: Final = 1
MANIFEST: Final = "manifest.jsonl"
MOST_BYTES: Final = 2**28  # of a manifest
MOST_OF_A_LINE: Final = 2**22
MOST_CORNERS: Final = 2**20  # of the boxes of a tensor: each has 2^n in n dimensions
MOST_DIMENSIONS: Final = 8
_DEEPEST = 50  # lists in lists
_MOST_NUMBERS = 2**53  # of a tensor
_LONGEST = 1000  # characters of a tensor's name
_SEAL = b'{"sha256": "%s"}\n'
_HEX = re.compile(r"[0-9a-f]{64}")


def written(manifest: Manifest) -> Iterator[bytes]:
    """The lines of a manifest.

    Raises CheckpointError for one that `read` would refuse, as where a tensor lacks boxes because
    a process did not tell of them.
    """
    reader, digest = _ManifestReader("it"), sha256()
    try:
        for value in _values(manifest):
            _require_plain(value)
            line = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            reader.take(line)
            digest.update(line)
            yield line
    except _InvalidManifest as why:
        raise CheckpointError(
            f"what is to be saved of step {manifest.step} is not sound: {why}", step=manifest.step
        ) from None
    yield _SEAL % digest.hexdigest().encode()


def _values(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """What each line says."""
    number = {name: k for k, name in enumerate(manifest.files)}
    of: dict[str, list[list[Any]]] = {name: [] for name in manifest.tensors}
    for box in manifest.boxes:
        of[box.tensor].append([number[box.file], box.begin, box.length, box.offset, box.size])
    yield {
        "schedir_checkpoint": FORMAT, "step": manifest.step, "when": manifest.when,
        "facts": manifest.facts, "state": manifest.state,
    }  # fmt: skip
    for name, file in manifest.files.items():
        yield {"file": name, "size": file.size, "sha256": file.sha256}
    for name, kind in manifest.tensors.items():
        yield {"tensor": name, "dtype": kind.dtype, "shape": kind.shape, "boxes": of[name]}


def read(file: BinaryIO, what: str, *, tensors: bool = True) -> Manifest:
    """The manifest that an open file has; `what` is the name of the checkpoint, for errors.

    Without `tensors` it has its facts and files only, which is quick.  Raises
    IncompleteCheckpointError, and CheckpointError for one of another format.
    """
    length = len(_SEAL % b"") + 64
    data = begin_of(file, MOST_BYTES + length + 1)
    try:
        if len(data) < length:
            raise _InvalidManifest("it is cut off")
        if len(data) > MOST_BYTES + length:
            raise _InvalidManifest(f"it has more than {format_bytes(MOST_BYTES)}")
        lines, seal = data[:-length], data[-length:]
        digest = sha256(lines).hexdigest()
        if seal != _SEAL % digest.encode():
            raise _InvalidManifest(
                "it is not as it was written: its last line is not the digest of the rest"
            )
        reader = _ManifestReader(what)
        for line in BytesIO(lines):
            if line.startswith(b'{"tensor"') and not tensors:
                break
            reader.take(line)
        return reader.manifest(digest)
    except _InvalidManifest as why:
        raise IncompleteCheckpointError(f"{what} is not whole: its manifest: {why}") from None


class _InvalidManifest(Exception):
    """Why a manifest is not believed."""


class _ManifestReader:
    """Reads the lines of a manifest one by one. Errors call the manifest `what`."""

    def __init__(self, what: str) -> None:
        self.what, self.line = what, 0
        self.head: dict[str, Any] = {}
        self.files: dict[str, ManifestFile] = {}
        self.sizes: list[tuple[str, int]] = []
        self.tensors: dict[str, TensorMeta] = {}
        self.boxes: list[StoredSlice] = []

    def manifest(self, digest: str) -> Manifest:
        """What has been taken."""
        if not self.head:
            raise _InvalidManifest("it is empty")
        head = self.head
        return Manifest(
            head["step"], self.files, self.tensors, tuple(self.boxes), head["facts"], head["state"],
            head["when"], digest,
        )  # fmt: skip

    def take(self, line: bytes) -> None:
        """Believe a line.  Raises _Unsound, and CheckpointError for another format."""
        self.line += 1
        try:
            value = _object(line)
            if not self.head:
                self._head(value)
            elif "file" in value:
                self._file(value)
            else:
                self._tensor(value)
        except _InvalidManifest as why:
            raise _InvalidManifest(f"line {self.line}: {why}") from None

    def _head(self, value: dict[str, Any]) -> None:
        form = value.get("schedir_checkpoint")
        if type(form) is not int or form < 1:
            raise _InvalidManifest("it begins as no manifest of a checkpoint does")
        if form != FORMAT:
            raise CheckpointError(
                f"{self.what} is of format {describe(form)}, and this schedir reads format {FORMAT}"
            )
        _fields(value, "schedir_checkpoint", "step", "when", "facts", "state")
        for key in ("step", "when"):
            _require_whole(value[key], key)
        for key in ("facts", "state"):
            if type(value[key]) is not dict:
                raise _InvalidManifest(f"{key} are an object, not {describe(value[key])}")
            _require_plain(value[key])
        self.head = value

    def _file(self, value: dict[str, Any]) -> None:
        name, size, sha256 = _fields(value, "file", "size", "sha256")
        if not is_file_name(name):
            raise _InvalidManifest(f"no file of a checkpoint is named {describe(name)}")
        if name in self.files:
            raise _InvalidManifest(f"the file {describe(name)} comes twice")
        if self.tensors:
            raise _InvalidManifest("files come before tensors")
        _require_whole(size, "size")
        if type(sha256) is not str or not _HEX.fullmatch(sha256):
            raise _InvalidManifest(f"{describe(sha256)} is no sha256")
        self.files[name] = ManifestFile(size, sha256)
        self.sizes.append((name, size))

    def _tensor(self, value: dict[str, Any]) -> None:
        name, dtype, shape, boxes = _fields(value, "tensor", "dtype", "shape", "boxes")
        if type(name) is not str or not 0 < len(name) <= _LONGEST or not name.isprintable():
            raise _InvalidManifest(f"no tensor is named {describe(name)}")
        if name in self.tensors:
            raise _InvalidManifest(f"the tensor {describe(name)} comes twice")
        if type(dtype) is not str or dtype not in BYTES:
            raise _InvalidManifest(f"no numbers of a tensor are {describe(dtype)}")
        if type(shape) is not list or len(shape) > MOST_DIMENSIONS:
            raise _InvalidManifest(f"a shape is a list of at most {MOST_DIMENSIONS} numbers")
        for length in shape:
            _require_whole(length, "a length")
        if prod(shape) > _MOST_NUMBERS:
            raise _InvalidManifest(f"{describe(name)} has more than {_MOST_NUMBERS} numbers")
        if type(boxes) is not list or len(boxes) << len(shape) > MOST_CORNERS:
            raise _InvalidManifest(f"boxes are a list of at most {MOST_CORNERS >> len(shape)}")
        kind = TensorMeta(tuple(shape), dtype)
        own = [self._box(name, kind, box) for box in boxes]
        if not _cover(kind.shape, own):
            have, whole = sum(prod(box.size) for box in own), prod(shape)
            why = f"have {have} of its {whole} numbers" if have != whole else "overlap"
            raise _InvalidManifest(f"the boxes of {describe(name)} {why}")
        self.tensors[name] = kind
        self.boxes += own

    def _box(self, name: str, kind: TensorMeta, value: Any) -> StoredSlice:
        if type(value) is not list or len(value) != 5:
            raise _InvalidManifest(
                f"a box is [file, begin, length, offset, size], not {describe(value)}"
            )
        file, begin, length, offset, size = value
        dimensions = len(kind.shape)
        if type(file) is not int or not 0 <= file < len(self.sizes):
            raise _InvalidManifest(
                f"a box of {describe(name)} is in file {describe(file)}: there is none"
            )
        _require_whole(begin, "begin")
        _require_whole(length, "length")
        for corner in (offset, size):
            if type(corner) is not list or len(corner) != dimensions:
                raise _InvalidManifest(
                    f"a box of {describe(name)} has not its {dimensions} dimensions"
                )
        for at, long, whole in zip(offset, size, kind.shape, strict=True):
            _require_whole(at, "offset")
            _require_whole(long, "size")
            if not long or at + long > whole:
                raise _InvalidManifest(
                    f"a box of {describe(name)} goes from {at} to {at + long} of {whole}"
                )
        within, most = self.sizes[file]
        if begin + length > most or length < prod(size) * BYTES[kind.dtype]:
            raise _InvalidManifest(
                f"a box of {describe(name)} cannot be bytes {begin} to {begin + length} of {within}"
            )
        return StoredSlice(name, tuple(offset), tuple(size), within, begin, length)


def _cover(shape: tuple[int, ...], boxes: Sequence[StoredSlice]) -> bool:
    """Whether boxes, which lie within a tensor, have each of its numbers once.

    They do if their indicators add up to that of the whole, and so do the mixed differences of
    these: 1 or -1 at the corners of a box, and 0 elsewhere.
    """
    if len(boxes) == 1:
        return boxes[0].size == shape
    sums: dict[int, int] = {}
    whole = [] if 0 in shape else [((0,) * len(shape), shape, -1)]
    for offset, size, sign in (*((box.offset, box.size, 1) for box in boxes), *whole):
        corners = [(0, sign)]
        for at, long, length in zip(offset, size, shape, strict=True):
            corners = [
                (corner * (length + 1) + at + far * long, -one if far else one)
                for corner, one in corners
                for far in (0, 1)
            ]
        for corner, one in corners:
            sums[corner] = sums.get(corner, 0) + one
    return not any(sums.values())


def is_file_name(name: object) -> bool:
    """Whether a checkpoint may have a file of this name: no path, and none that hides another."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name not in ("", ".", "..", MANIFEST)
        and "/" not in name
        and "\\" not in name
        and len(name.encode()) <= 255
    )


def _object(line: bytes) -> dict[str, Any]:
    """What a line says.  Python's own reader takes NaN, and keys that come twice."""
    if len(line) > MOST_OF_A_LINE or not line.endswith(b"\n"):
        raise _InvalidManifest(f"it has more than {format_bytes(MOST_OF_A_LINE)}, or no end")
    try:
        value = _JSON.decode(line.decode("utf-8", "strict"))
    except UnicodeDecodeError:
        raise _InvalidManifest("it is no UTF-8") from None
    except (ValueError, RecursionError):
        raise _InvalidManifest("it is no JSON") from None
    if type(value) is not dict:
        raise _InvalidManifest("it is no object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _InvalidManifest("a key comes twice")
    return found


def _refuse(word: str) -> float:
    raise _InvalidManifest(f"{word} is no number of JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


def _fields(value: Mapping[str, Any], *keys: str) -> list[Any]:
    """What an object has under these keys, which are all that it has."""
    if {*value} != {*keys}:
        raise _InvalidManifest(
            f"it says {', '.join(map(describe, [*value][:9]))}, and not {', '.join(keys)}"
        )
    return [value[key] for key in keys]


def _require_whole(value: object, what: str) -> None:
    if type(value) is not int or not 0 <= value <= _MOST_NUMBERS:
        raise _InvalidManifest(f"{what} is a whole number, not {describe(value)}")


def _require_plain(value: object, depth: int = 0) -> None:
    """Refuse what JSON would not give back, but tuples, which become lists."""
    if depth > _DEEPEST:
        raise _InvalidManifest(f"it is nested more than {_DEEPEST} times")
    if isinstance(value, float) and not isfinite(value):
        raise _InvalidManifest(f"{value} is no number of JSON")
    if isinstance(value, Mapping):
        if other := [key for key in value if type(key) is not str]:
            raise _InvalidManifest(f"keys are text, not {describe(other[0])}")
        value = value.values()
    elif not isinstance(value, list | tuple):
        if not isinstance(value, str | int | float | None):
            raise _InvalidManifest(f"{describe(value)} is nothing that JSON has")
        return
    for one in value:
        _require_plain(one, depth + 1)
