"""Report checkpoints as text and as JSON, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import prod
from typing import Any, Final, NamedTuple

from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.checkpoints.manifest import Manifest, TensorMeta
from schedir.errors import CheckpointError, format_bytes
from schedir.io.terminal_output import format_table, sanitize_line

_GROUP_NAMES: Final = {
    "weights": "weights", "main": "float32 copies", "optimizer": "optimizer", "buffers": "buffers",
}  # fmt: skip
_OTHER_GROUP: Final = "others"
# The text has separate lines for optimizers and extra state. The entry "also" has other names of
# tensors. Only a load uses the entry "world".
_SKIPPED_STATE: Final = ("extra", "also", "optimizers", "world")
_STATE_NAMES: Final = {"next": "step of the next random numbers"}
_MAX_FACT_LENGTH: Final = 400  # A fact with more characters is cut off.


class CheckpointEntry(NamedTuple):
    """A checkpoint in a directory.

    Attributes:
        step: The step after which the checkpoint was written.
        manifest: The manifest, or None if it cannot be read.
        problem: The reason why the checkpoint is not complete, or "" if it is complete.
    """

    step: int
    manifest: Manifest | None
    problem: str


def inspect_checkpoint(directory: CheckpointDirectory, step: int, verify: bool) -> CheckpointEntry:
    """Check the files of the checkpoint of a step, and return its entry.

    Args:
        directory: The directory of the checkpoints.
        step: The step.
        verify: If True, read the files and compare their digests. If False, compare only their
            sizes.
    """
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
    """Return facts of checkpoints, for JSON.

    Args:
        checkpoints: The checkpoints, the newest last.
        is_verified: True if the digests of the files were compared.

    Returns:
        All checkpoints, and the contents of the newest complete checkpoint. "is_complete" is True
        if a checkpoint is complete. "is_complete" is None if only the sizes of the files were
        compared, and the sizes are correct.
    """
    return {
        "checkpoints": [
            {
                "step": checkpoint.step,
                "bytes": checkpoint.manifest and checkpoint.manifest.total_bytes,
                "finished_at": checkpoint.manifest and checkpoint.manifest.finished_at,
                "is_complete": not checkpoint.problem
                if is_verified or checkpoint.problem
                else None,
                "problem": checkpoint.problem,
            }
            for checkpoint in checkpoints
        ],
        "newest_checkpoint": (manifest := _find_newest_complete(checkpoints))
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
    """Return a table of checkpoints, and the contents of the newest complete checkpoint.

    Args:
        checkpoints: The checkpoints, the newest last.
        is_verified: True if the digests of the files were compared.
    """
    rows = [
        [
            str(checkpoint.step),
            format_bytes(checkpoint.manifest.total_bytes) if checkpoint.manifest else "-",
            _format_write_time(checkpoint.manifest),
            "no" if checkpoint.problem else "yes" if is_verified else "by file sizes",
        ]
        for checkpoint in checkpoints
    ]
    text = format_table(["step", "bytes", "written", "complete"], rows)
    text += "".join(
        f"step {checkpoint.step}: {sanitize_line(checkpoint.problem, _MAX_FACT_LENGTH)}\n"
        for checkpoint in checkpoints
        if checkpoint.problem
    )
    if not is_verified:
        text += "only file sizes were compared; --verify reads the files, and compares digests\n"
    manifest = _find_newest_complete(checkpoints)
    return text if manifest is None else f"{text}\n{_format_manifest(manifest)}"


def _format_manifest(manifest: Manifest) -> str:
    """Return the contents of a checkpoint: facts, tensors and totals."""
    text = f"step {manifest.step}\n"
    text += "".join(f"  {name}: {value}\n" for name, value in _list_facts(manifest))
    text += "\n" + format_table(["tensor", "shape", "type", "bytes", "float32 copy", "optimizer"], [
        [sanitize_line(name, _MAX_FACT_LENGTH), "x".join(map(str, kind.shape)) or "scalar",
         kind.dtype, format_bytes(kind.nbytes),
         *(format_bytes(size) if size else "-" for size in sizes)]
        for name, kind, sizes in _list_tensor_rows(manifest)
    ])  # fmt: skip
    totals = [
        [name, f"{total.tensors:,}", f"{total.elements:,}", format_bytes(total.bytes)]
        for name, total in _compute_totals(manifest).items()
    ]
    return f"{text}\n{format_table(['total', 'tensors', 'elements', 'bytes'], totals)}"


def _list_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the names and values of facts, state and settings of `schedir train` as text."""
    other_state = {
        _STATE_NAMES.get(k, k): v for k, v in manifest.state.items() if k not in _SKIPPED_STATE
    }
    optimizers = manifest.state.get("optimizers")
    extra = manifest.state.get("extra")
    if isinstance(optimizers, Mapping) and optimizers:
        other_state["optimizers"] = ", ".join(map(str, optimizers))
    if isinstance(extra, Mapping):
        other_state |= {k: v for k, v in extra.items() if k != "settings"}
        settings = extra.get("settings")
        if isinstance(settings, Mapping):
            other_state |= _group_by_section(settings)
    for name, value in {**manifest.facts, **other_state}.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield sanitize_line(name, _MAX_FACT_LENGTH), sanitize_line(text, _MAX_FACT_LENGTH)


def _group_by_section(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Return section -> text of its settings that have a value, as in "[model]" -> "layers 4"."""
    lines: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = str(name).rpartition(".")
        if value != "None":
            lines.setdefault(f"[{section}]" if section else key, []).append(
                f"{key} {value}" if section else str(value)
            )
    return {section: ", ".join(texts) for section, texts in lines.items()}


def _list_tensor_rows(manifest: Manifest) -> Iterator[tuple[str, TensorMeta, tuple[int, int]]]:
    """Yield the name and metadata of each tensor, and two sizes in bytes.

    The sizes are those of the float32 copy and of the optimizer state of a weight. Weights come
    first. Tensors that belong to no weight follow, with sizes of 0.
    """
    optimizer_bytes: dict[str, int] = {}
    other_tensors: list[tuple[str, TensorMeta]] = []
    for name, kind in manifest.tensors.items():
        group, _, tensor_name = name.partition("/")
        weight = tensor_name.rpartition("/")[0]
        if group == "optimizer" and f"weights/{weight}" in manifest.tensors:
            optimizer_bytes[weight] = optimizer_bytes.get(weight, 0) + kind.nbytes
        elif group != "weights" and not (
            group == "main" and f"weights/{tensor_name}" in manifest.tensors
        ):
            other_tensors.append((name, kind))
    for name, kind in manifest.tensors.items():
        if name.startswith("weights/"):
            tensor_name = name.removeprefix("weights/")
            copy = manifest.tensors.get(f"main/{tensor_name}")
            yield (
                tensor_name,
                kind,
                (copy.nbytes if copy else 0, optimizer_bytes.get(tensor_name, 0)),
            )
    for name, kind in other_tensors:
        yield name, kind, (0, 0)


class _TensorTotals(NamedTuple):
    """The numbers of tensors, of elements and of bytes in a group of tensors."""

    tensors: int
    elements: int
    bytes: int


def _compute_totals(manifest: Manifest) -> dict[str, _TensorTotals]:
    """Return group of tensors -> totals, for the groups with tensors and for all tensors."""
    totals: dict[str, _TensorTotals] = {}
    for name, kind in manifest.tensors.items():
        for group in (_GROUP_NAMES.get(name.partition("/")[0], _OTHER_GROUP), "all"):
            previous = totals.get(group, _TensorTotals(0, 0, 0))
            totals[group] = _TensorTotals(
                previous.tensors + 1,
                previous.elements + prod(kind.shape),
                previous.bytes + kind.nbytes,
            )
    order = [*_GROUP_NAMES.values(), _OTHER_GROUP, "all"]
    return {group: totals[group] for group in order if group in totals}


def _find_newest_complete(checkpoints: Sequence[CheckpointEntry]) -> Manifest | None:
    """Return the manifest of the newest checkpoint without a known problem, or None.

    If there is only one checkpoint, its manifest is returned even with a problem, so that the
    report has its contents.
    """
    manifests = [
        checkpoint.manifest
        for checkpoint in checkpoints
        if not checkpoint.problem or len(checkpoints) == 1
    ]
    return manifests[-1] if manifests else None


def _format_write_time(manifest: Manifest | None) -> str:
    try:
        return (
            f"{datetime.fromtimestamp(manifest.finished_at):%Y-%m-%d %H:%M:%S}" if manifest else "-"
        )
    except (OverflowError, ValueError, OSError):
        return "-"
