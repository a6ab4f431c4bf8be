"""The command `checkpoint`: inspect the checkpoints of a run, or export a model from one."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedir.commands.common.schedule_options import parse_count
from schedir.errors import CheckpointError, UsageError, format_bytes
from schedir.extras import require_package
from schedir.io.files import atomic_write, describe_os_error
from schedir.io.terminal_output import format_json, join_words

if TYPE_CHECKING:
    from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
    from schedir.checkpoints.manifest import Manifest
    from schedir.checkpoints.safetensors_export import ExportedTensor

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions `inspect` and `export` with their options.

    Args:
        parser: The parser of the command.
    """
    actions = parser.add_subparsers(metavar="inspect|export", required=True, dest="action")
    about = "list the checkpoints of a run, and the contents of one"
    inspect = actions.add_parser("inspect", help=about, description=about, allow_abbrev=False)
    _add_directory_arguments(inspect, "all")
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="read all files, and compare their digests with the manifest",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    about = "verify a checkpoint, and write its weights and buffers"
    export = actions.add_parser("export", help=about, description=about, allow_abbrev=False)
    _add_directory_arguments(export, "the newest complete one")
    export.add_argument(
        "--to", metavar="PATH", required=True,
        help="the file to write, which must end in .safetensors; with --as transformers, the "
        "folder to write",
    )  # fmt: skip
    export.add_argument(
        "--as", dest="format", metavar="FORMAT", default="safetensors",
        help="safetensors (default) writes a file; transformers writes a folder that "
        "AutoModelForCausalLM.from_pretrained loads, and supports only a GPT of schedir train",
    )  # fmt: skip
    export.add_argument(
        "--dtype", metavar="TYPE",
        help=f"the type of the exported weights: {', '.join(_DTYPES)} (default: as stored); "
        "schedir converts to another type from the float32 copies of the weights, if the "
        "checkpoint has them",
    )  # fmt: skip
    export.add_argument("--replace", action="store_true", help="overwrite existing files")


def _add_directory_arguments(parser: argparse.ArgumentParser, default_step: str) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the folder with the checkpoints of a run")
    parser.add_argument(
        "--step",
        type=parse_count,
        metavar="N",
        help=f"the step of the checkpoint (default: {default_step})",
    )


def run(args: argparse.Namespace) -> str | tuple[str, int]:
    """Return a table of checkpoints, or the path of the exported model.

    Args:
        args: The parsed options of `checkpoint`.

    Returns:
        The text, or the text and an exit code.

    Raises:
        CheckpointError: The directory or the checkpoint does not exist, or the checkpoint to export
            is not complete.
        UsageError: An option is invalid, or a file exists and `--replace` is not given.
    """
    return _inspect(args) if args.action == "inspect" else _export(args)


def _inspect(args: argparse.Namespace) -> tuple[str, int]:
    """Return the table or JSON, and exit code 2 if `--verify` finds an incomplete checkpoint."""
    from schedir.commands.common import checkpoint_report

    folder = _open_directory(args)
    steps = folder.list_steps() if args.step is None else [args.step]
    checkpoints = [
        checkpoint_report.inspect_checkpoint(folder, step, args.verify) for step in steps
    ]
    code = 2 * (args.verify and any(checkpoint.problem for checkpoint in checkpoints))
    if args.json:
        return format_json(checkpoint_report.collect_facts(checkpoints, args.verify)), code
    return checkpoint_report.format_report(checkpoints, args.verify), code


def _export(args: argparse.Namespace) -> str:
    require_package("torch", "schedir checkpoint export")
    if args.dtype not in (None, *_DTYPES):
        raise UsageError(
            f"--dtype {args.dtype}: there is no such type",
            hint=" or ".join(_DTYPES),
            fields=["dtype"],
        )
    if args.format not in (formats := ("safetensors", "transformers")):
        raise UsageError(f"--as {args.format}: there is no such format", hint=" or ".join(formats))
    to, transformers = Path(args.to), args.format == "transformers"
    if not transformers and to.suffix != ".safetensors":
        raise UsageError(f"--to {to}: the file must end in .safetensors", fields=["to"])
    targets = [to / "model.safetensors", to / "config.json"] if transformers else [to]
    _require_absent(targets, args.replace)
    folder = _open_directory(args)
    manifest, skipped = _find_complete_checkpoint(folder, args.step)

    from schedir.checkpoints.safetensors_export import list_exported_tensors
    from schedir.training.gpt2_export import convert_to_gpt2

    tensors, config = list_exported_tensors(manifest, args.dtype), None
    if transformers:
        config, tensors = convert_to_gpt2(manifest, tensors)
    size = _write_export(targets, folder, manifest, tensors, config, args.replace)
    types = join_words(sorted({tensor.meta.dtype for tensor in tensors}))
    copies = any(tensor.stored_name.startswith("main/") for tensor in tensors)
    text = "".join(f"skipped: {reason}\n" for reason in skipped)
    text += f"wrote {to}: step {manifest.step}, {len(tensors)} tensors of {types}, "
    text += f"{format_bytes(size)}{', from the float32 copies' * copies}\n"
    if args.dtype is None and any(name.startswith("main/") for name in manifest.tensors):
        text += "the weights have float32 copies; --dtype float32 exports them\n"
    return text


def _write_export(
    targets: list[Path],
    directory: CheckpointDirectory,
    manifest: Manifest,
    tensors: list[ExportedTensor],
    config: dict[str, Any] | None,
    replace: bool,
) -> int:
    """Write the tensors, and the configuration if there is one. Return the bytes of the tensors.

    If an error occurs, none of the files is written.
    """
    from schedir.checkpoints.safetensors_export import write_safetensors

    metadata = {"step": str(manifest.step)}
    also = manifest.state.get("also")
    # The entry "also" has other names of tensors. safetensors' `save_model` writes such names in
    # the same format.
    if config is None and isinstance(also, dict):
        metadata |= {str(name): str(value) for name, value in also.items()}
    is_new_folder = config is not None and not targets[0].parent.exists()
    try:
        if config is not None:
            targets[0].parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            paths = [stack.enter_context(atomic_write(target)) for target in targets]
            size = write_safetensors(
                paths[0], directory.locate_step(manifest.step), manifest, tensors, metadata
            )
            if config is not None:
                paths[1].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            _require_absent(targets, replace)  # Check again, because the export takes long.
        return size
    except OSError as error:
        raise UsageError(f"cannot write {targets[0]}: {describe_os_error(error)}") from None
    finally:
        if is_new_folder:
            with suppress(OSError):  # `rmdir` fails if the folder contains the files.
                targets[0].parent.rmdir()


def _open_directory(args: argparse.Namespace) -> CheckpointDirectory:
    """Return the directory of the checkpoints.

    Raises:
        CheckpointError: The directory, its checkpoints or the checkpoint of `--step` do not exist.
    """
    from schedir.checkpoints.checkpoint_directory import CheckpointDirectory

    folder = CheckpointDirectory(args.folder)
    if not folder.path.exists():
        raise CheckpointError(f"there is no folder {args.folder}")
    steps = folder.list_steps()
    if steps and args.step in (None, *steps):
        return folder
    hint = "give the folder that train.checkpoint_dir names" if args.step is None else ""
    if steps:
        first = f"{len(steps) - 8} older, " if len(steps) > 8 else ""
        hint = f"the steps are {first}{join_words([str(step) for step in steps[-8:]])}"
    step_text = "" if args.step is None else f" of step {args.step}"
    raise CheckpointError(f"there is no checkpoint{step_text} in {args.folder}", hint=hint)


def _find_complete_checkpoint(
    directory: CheckpointDirectory, step: int | None
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of a verified checkpoint, and why newer checkpoints were skipped.

    The checkpoint is that of `step`, or the newest complete checkpoint if `step` is None.
    """
    from schedir.checkpoints.manifest import IncompleteCheckpointError, join_facts

    if step is not None:
        return directory.verify(step), ()
    latest = directory.find_checkpoint()
    if latest.manifest is None:
        raise IncompleteCheckpointError(
            f"no checkpoint in {directory.path_text} is complete",
            hint=join_facts(latest.skip_reasons),
        )
    return latest.manifest, latest.skip_reasons


def _require_absent(paths: list[Path], replace: bool) -> None:
    """Raise UsageError if a file exists and may not be replaced."""
    for path in paths:
        if path.exists() and not replace:
            raise UsageError(
                f"{path} exists", hint="--replace overwrites it", fields=["to", "replace"]
            )
