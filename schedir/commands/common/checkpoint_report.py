"""Report checkpoints as text and as JSON.  Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import prod
from typing import Any, Final, NamedTuple

from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.checkpoints.manifest import Manifest, TensorMeta
from schedir.errors import CheckpointError, format_bytes
from schedir.io.terminal import table

_GROUPS: Final = {
    "weights": "weights", "main": "float32 copies", "optimizer": "optimizer", "buffers": "buffers",
}  # fmt: skip
_OTHERS: Final = "others"
_LONGEST: Final = 400  # characters of a fact that are shown


class CheckpointEntry(NamedTuple):
    """A checkpoint: its manifest, if it can be read, and why it is not whole, "" where it is."""

    step: int
    manifest: Manifest | None
    why: str


def seen(folder: CheckpointDirectory, step: int, verify: bool) -> CheckpointEntry:
    """What there is of a step; files are read to verify them, else their sizes are compared."""
    manifest = None
    try:
        manifest = folder.read(step)
        if verify:
            folder.check_files(manifest)
        else:
            folder.check_sizes(manifest)
    except CheckpointError as error:
        return CheckpointEntry(step, manifest, error.fact)
    return CheckpointEntry(step, manifest, "")


def as_facts(checkpoints: Sequence[CheckpointEntry], verified: bool) -> dict[str, Any]:
    """For a program to read: all, and of the newest that is whole what it has."""
    return {
        "checkpoints": [
            {
                "step": one.step,
                "bytes": one.manifest and one.manifest.bytes,
                "when": one.manifest and one.manifest.when,
                "whole": not one.why if verified or one.why else None,
                "why": one.why,
            }
            for one in checkpoints
        ],
        "newest": (manifest := _newest(checkpoints)) and _facts(manifest),
    }


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "digest": manifest.digest,
        "facts": manifest.facts,
        "state": manifest.state,
        "files": {name: file._asdict() for name, file in manifest.files.items()},
        "tensors": {
            name: kind._asdict() | {"bytes": kind.bytes} for name, kind in manifest.tensors.items()
        },
        "totals": {name: total._asdict() for name, total in _totals(manifest).items()},
    }


def in_words(checkpoints: Sequence[CheckpointEntry], verified: bool) -> str:
    """For people: a row for each, and of the newest that is whole what it has."""
    rows = [
        [
            str(one.step),
            format_bytes(one.manifest.bytes) if one.manifest else "-",
            _when(one.manifest),
            "no" if one.why else "yes" if verified else "by its sizes",
        ]
        for one in checkpoints
    ]
    said = table(["step", "bytes", "written", "whole"], rows)
    said += "".join(f"step {one.step}: {plain(one.why)}\n" for one in checkpoints if one.why)
    if not verified:
        said += "sizes of files were compared; --verify reads them, and compares their digests\n"
    manifest = _newest(checkpoints)
    return said if manifest is None else f"{said}\n{_one(manifest)}"


def _one(manifest: Manifest) -> str:
    """What a checkpoint has."""
    said = f"step {manifest.step}\n"
    said += "".join(f"  {name}: {value}\n" for name, value in _told(manifest))
    said += "\n" + table(["tensor", "shape", "type", "bytes", "float32 copy", "optimizer"], [
        [plain(name), "x".join(map(str, kind.shape)) or "one", kind.dtype, format_bytes(kind.bytes),
         *(format_bytes(size) if size else "-" for size in beside)]
        for name, kind, beside in _rows(manifest)
    ])  # fmt: skip
    totals = [
        [name, f"{total.tensors:,}", f"{total.numbers:,}", format_bytes(total.bytes)]
        for name, total in _totals(manifest).items()
    ]
    return f"{said}\n{table(['in all', 'tensors', 'numbers', 'bytes'], totals)}"


def _told(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What a manifest says of who wrote it: facts, state, and the settings of `schedir train`."""
    rest = {k: v for k, v in manifest.state.items() if k not in ("extra", "also", "optimizers")}
    optimizers, extra = manifest.state.get("optimizers"), manifest.state.get("extra")
    if isinstance(optimizers, Mapping) and optimizers:
        rest["optimizers"] = ", ".join(map(str, optimizers))
    if isinstance(extra, Mapping):
        rest |= {k: v for k, v in extra.items() if k != "settings"}
        settings = extra.get("settings")
        if isinstance(settings, Mapping):
            rest |= _by_section(settings)
    for name, value in {**manifest.facts, **rest}.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield plain(name), plain(text)


def _by_section(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Settings that have been given a value, those of a section in one line."""
    said: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, own = str(name).rpartition(".")
        if value != "None":
            said.setdefault(f"[{section}]" if section else own, []).append(
                f"{own} {value}" if section else str(value)
            )
    return {section: ", ".join(own) for section, own in said.items()}


def _rows(manifest: Manifest) -> Iterator[tuple[str, TensorMeta, tuple[int, int]]]:
    """Weights, with the bytes of their copies and of what an optimizer keeps of each; then all that
    belongs to none."""
    kept: dict[str, int] = {}
    alone: list[tuple[str, TensorMeta]] = []
    for name, kind in manifest.tensors.items():
        group, _, whose = name.partition("/")
        weight = whose.rpartition("/")[0]
        if group == "optimizer" and f"weights/{weight}" in manifest.tensors:
            kept[weight] = kept.get(weight, 0) + kind.bytes
        elif group != "weights" and not (
            group == "main" and f"weights/{whose}" in manifest.tensors
        ):
            alone.append((name, kind))
    for name, kind in manifest.tensors.items():
        if name.startswith("weights/"):
            whose = name.removeprefix("weights/")
            copy = manifest.tensors.get(f"main/{whose}")
            yield whose, kind, (copy.bytes if copy else 0, kept.get(whose, 0))
    for name, kind in alone:
        yield name, kind, (0, 0)


class _TensorTotals(NamedTuple):
    """Of some tensors."""

    tensors: int
    numbers: int
    bytes: int


def _totals(manifest: Manifest) -> dict[str, _TensorTotals]:
    """Of each kind of tensors that there are, and of all."""
    totals: dict[str, _TensorTotals] = {}
    for name, kind in manifest.tensors.items():
        for group in (_GROUPS.get(name.partition("/")[0], _OTHERS), "all"):
            had = totals.get(group, _TensorTotals(0, 0, 0))
            totals[group] = _TensorTotals(
                had.tensors + 1, had.numbers + prod(kind.shape), had.bytes + kind.bytes
            )
    order = [*_GROUPS.values(), _OTHERS, "all"]
    return {group: totals[group] for group in order if group in totals}


def _newest(checkpoints: Sequence[CheckpointEntry]) -> Manifest | None:
    """The newest that is whole, as far as has been looked; of one alone what can be read of it."""
    whole = [one.manifest for one in checkpoints if not one.why or len(checkpoints) == 1]
    return whole[-1] if whole else None


def _when(manifest: Manifest | None) -> str:
    try:
        return f"{datetime.fromtimestamp(manifest.when):%Y-%m-%d %H:%M:%S}" if manifest else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def plain(text: str) -> str:
    """What a file says, so that a terminal takes nothing of it for an order."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)
