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
from schedir.io.terminal import format_table

_GROUP_NAMES: Final = {
    "weights": "weights", "main": "float32 copies", "optimizer": "optimizer", "buffers": "buffers",
}  # fmt: skip
_OTHER_GROUP: Final = "others"
_MAX_FACT_LENGTH: Final = 400  # characters of a fact that are shown


class CheckpointEntry(NamedTuple):
    """A checkpoint: its manifest, if it can be read, and why it is not whole, "" where it is."""

    step: int
    manifest: Manifest | None
    problem: str


def inspect_checkpoint(directory: CheckpointDirectory, step: int, verify: bool) -> CheckpointEntry:
    """What there is of a step; files are read to verify them, else their sizes are compared."""
    manifest = None
    try:
        manifest = directory.load_manifest(step)
        if verify:
            directory.check_files(manifest)
        else:
            directory.check_sizes(manifest)
    except CheckpointError as error:
        return CheckpointEntry(step, manifest, error.fact)
    return CheckpointEntry(step, manifest, "")


def collect_facts(checkpoints: Sequence[CheckpointEntry], is_verified: bool) -> dict[str, Any]:
    """For a program to read: all, and of the newest that is whole what it has."""
    return {
        "checkpoints": [
            {
                "step": one.step,
                "bytes": one.manifest and one.manifest.total_bytes,
                "when": one.manifest and one.manifest.finished_at,
                "whole": not one.problem if is_verified or one.problem else None,
                "why": one.problem,
            }
            for one in checkpoints
        ],
        "newest": (manifest := _find_newest_complete(checkpoints))
        and _collect_manifest_facts(manifest),
    }


def _collect_manifest_facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "digest": manifest.digest,
        "facts": manifest.facts,
        "state": manifest.state,
        "files": {name: file._asdict() for name, file in manifest.files.items()},
        "tensors": {
            name: kind._asdict() | {"bytes": kind.nbytes} for name, kind in manifest.tensors.items()
        },
        "totals": {name: total._asdict() for name, total in _compute_totals(manifest).items()},
    }


def format_report(checkpoints: Sequence[CheckpointEntry], is_verified: bool) -> str:
    """For people: a row for each, and of the newest that is whole what it has."""
    rows = [
        [
            str(one.step),
            format_bytes(one.manifest.total_bytes) if one.manifest else "-",
            _format_write_time(one.manifest),
            "no" if one.problem else "yes" if is_verified else "by its sizes",
        ]
        for one in checkpoints
    ]
    said = format_table(["step", "bytes", "written", "whole"], rows)
    said += "".join(
        f"step {one.step}: {sanitize_text(one.problem)}\n" for one in checkpoints if one.problem
    )
    if not is_verified:
        said += "sizes of files were compared; --verify reads them, and compares their digests\n"
    manifest = _find_newest_complete(checkpoints)
    return said if manifest is None else f"{said}\n{_format_manifest(manifest)}"


def _format_manifest(manifest: Manifest) -> str:
    """What a checkpoint has."""
    said = f"step {manifest.step}\n"
    said += "".join(f"  {name}: {value}\n" for name, value in _list_facts(manifest))
    said += "\n" + format_table(["tensor", "shape", "type", "bytes", "float32 copy", "optimizer"], [
        [sanitize_text(name), "x".join(map(str, kind.shape)) or "one", kind.dtype,
            format_bytes(kind.nbytes),
         *(format_bytes(size) if size else "-" for size in beside)]
        for name, kind, beside in _list_tensor_rows(manifest)
    ])  # fmt: skip
    totals = [
        [name, f"{total.tensors:,}", f"{total.numbers:,}", format_bytes(total.bytes)]
        for name, total in _compute_totals(manifest).items()
    ]
    return f"{said}\n{format_table(['in all', 'tensors', 'numbers', 'bytes'], totals)}"


def _list_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What a manifest says of who wrote it: facts, state, and the settings of `schedir train`."""
    rest = {k: v for k, v in manifest.state.items() if k not in ("extra", "also", "optimizers")}
    optimizers, extra = manifest.state.get("optimizers"), manifest.state.get("extra")
    if isinstance(optimizers, Mapping) and optimizers:
        rest["optimizers"] = ", ".join(map(str, optimizers))
    if isinstance(extra, Mapping):
        rest |= {k: v for k, v in extra.items() if k != "settings"}
        settings = extra.get("settings")
        if isinstance(settings, Mapping):
            rest |= _group_by_section(settings)
    for name, value in {**manifest.facts, **rest}.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield sanitize_text(name), sanitize_text(text)


def _group_by_section(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Settings that have been given a value, those of a section in one line."""
    said: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, own = str(name).rpartition(".")
        if value != "None":
            said.setdefault(f"[{section}]" if section else own, []).append(
                f"{own} {value}" if section else str(value)
            )
    return {section: ", ".join(own) for section, own in said.items()}


def _list_tensor_rows(manifest: Manifest) -> Iterator[tuple[str, TensorMeta, tuple[int, int]]]:
    """Weights, with the bytes of their copies and of what an optimizer keeps of each; then all that
    belongs to none."""
    kept: dict[str, int] = {}
    alone: list[tuple[str, TensorMeta]] = []
    for name, kind in manifest.tensors.items():
        group, _, whose = name.partition("/")
        weight = whose.rpartition("/")[0]
        if group == "optimizer" and f"weights/{weight}" in manifest.tensors:
            kept[weight] = kept.get(weight, 0) + kind.nbytes
        elif group != "weights" and not (
            group == "main" and f"weights/{whose}" in manifest.tensors
        ):
            alone.append((name, kind))
    for name, kind in manifest.tensors.items():
        if name.startswith("weights/"):
            whose = name.removeprefix("weights/")
            copy = manifest.tensors.get(f"main/{whose}")
            yield whose, kind, (copy.nbytes if copy else 0, kept.get(whose, 0))
    for name, kind in alone:
        yield name, kind, (0, 0)


class _TensorTotals(NamedTuple):
    """Of some tensors."""

    tensors: int
    numbers: int
    bytes: int


def _compute_totals(manifest: Manifest) -> dict[str, _TensorTotals]:
    """Of each kind of tensors that there are, and of all."""
    totals: dict[str, _TensorTotals] = {}
    for name, kind in manifest.tensors.items():
        for group in (_GROUP_NAMES.get(name.partition("/")[0], _OTHER_GROUP), "all"):
            had = totals.get(group, _TensorTotals(0, 0, 0))
            totals[group] = _TensorTotals(
                had.tensors + 1, had.numbers + prod(kind.shape), had.bytes + kind.nbytes
            )
    order = [*_GROUP_NAMES.values(), _OTHER_GROUP, "all"]
    return {group: totals[group] for group in order if group in totals}


def _find_newest_complete(checkpoints: Sequence[CheckpointEntry]) -> Manifest | None:
    """The newest that is whole, as far as has been looked; of one alone what can be read of it."""
    whole = [one.manifest for one in checkpoints if not one.problem or len(checkpoints) == 1]
    return whole[-1] if whole else None


def _format_write_time(manifest: Manifest | None) -> str:
    try:
        return (
            f"{datetime.fromtimestamp(manifest.finished_at):%Y-%m-%d %H:%M:%S}" if manifest else "-"
        )
    except (OverflowError, ValueError, OSError):
        return "-"


def sanitize_text(text: str) -> str:
    """What a file says, so that a terminal takes nothing of it for an order."""
    cut = text if len(text) <= _MAX_FACT_LENGTH else f"{text[:_MAX_FACT_LENGTH]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)
