"""The command `import`: read a program of another system, or the traces of a run."""

from __future__ import annotations

import argparse
import re
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from schedir.commands.common.progress_bar import show_progress
from schedir.commands.common.schedule_options import add_lowering_options, make_request, parse_count
from schedir.commands.print import write_program
from schedir.errors import SchedirError, UsageError
from schedir.io.files import read_text, require_suffix
from schedir.io.option_spelling import option_name

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.ir.pipeline.pipeline_shape import PipelineShape
    from schedir.traces.trace_import import ImportedRun

EXAMPLES = """\
  schedir import traces -o run.timeline
  schedir import schedule.csv -o schedule.sched

The page docs/how-to/import-traces.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `import`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+",
        help="the FILE.csv of a torch schedule, with or without transfers; or torch.profiler "
        "traces of all ranks: files (.json, .json.gz), a folder or a pattern",
    )  # fmt: skip
    parser.add_argument(
        "-o", dest="output", metavar="FILE", required=True,
        help="the file to write: FILE.sched contains the program of a CSV or of traces, and "
        "FILE.timeline the run of traces",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=parse_count, metavar="N",
        help="expected number of ranks: refuse a file with more or fewer, such as a truncated CSV",
    )  # fmt: skip
    parser.add_argument(
        "--step", type=parse_count, metavar="N",
        help="number of the ProfilerStep to read (default: the last complete one)",
    )  # fmt: skip
    add_lowering_options(parser)


def run(args: argparse.Namespace) -> str:
    """Write the program of a CSV or the run of traces, and return a summary.

    A program without transfers is lowered. Every program is checked.

    Args:
        args: The parsed options of `import`.

    Raises:
        UsageError: The options cannot be combined, or a CSV file is not the only source.
        SchedirError: The CSV or the traces cannot be read, or the program is wrong.
    """
    for source in args.sources:
        _require_foreign_file(source)
    is_csv = [source.endswith(".csv") for source in args.sources]
    if not any(is_csv):
        return _import_traces(args)
    if len(is_csv) > 1:
        raise UsageError("a CSV contains a complete program, so it must be the only SOURCE")
    if args.step is not None:
        raise UsageError(f"{args.sources[0]} is a program: --step applies only to traces")
    return _import_csv(args, args.sources[0])


def _require_foreign_file(source: str) -> None:
    """Refuse a program, a run or a configuration, which other commands read without an import."""
    kinds = {
        ".sched": ("a program", f"schedir check {source}"),
        ".timeline": ("a run", f"schedir explain {source}"),
        ".toml": ("a configuration", f"schedir train {source}"),
    }
    kind, command = kinds.get(Path(source).suffix, ("", ""))
    if kind:
        raise UsageError(
            f"{source} is {kind} of schedir, and needs no import: import reads a FILE.csv of "
            "torch.distributed.pipelining, or traces of torch.profiler",
            hint=command,
        )


def _import_csv(args: argparse.Namespace, source: str) -> str:
    from dataclasses import replace

    from schedir.compiler.compile import finish_lowering
    from schedir.io import torch_csv
    from schedir.io.source_loader import Source

    if args.output.endswith(".timeline"):
        program_file = Path(args.output).with_suffix(".sched")
        raise UsageError(
            f"-o {args.output}: a CSV contains no times, so its import is a program, not a run",
            hint=f"first schedir import {source} -o {program_file}, then schedir simulate "
            f"{program_file} -o {args.output}",
        )
    require_suffix(args.output, "the file of a program", ".sched")
    text = read_text(source)
    try:
        program = torch_csv.from_csv(text, _derive_program_name(source), args.ranks, args.zero)
    except SchedirError as error:
        error.add_note(f"in {source}")
        raise
    request = make_request(args, source, lower_drafts=True)
    program = replace(program, **request.traits)
    if not program.is_draft:
        if args.overlap and not args.relower:
            raise UsageError(f"{source} already has transfers, so -O overlap also needs --relower")
        program = finish_lowering(program)
    program = replace(request, source=Source.from_loaded(program, source)).program
    write_program(program, args.output)
    shape = program.shape
    return (
        f"wrote {args.output}: {shape.ranks} ranks, {shape.stages} stages, "
        f"{shape.microbatches} microbatches, {len(program)} instructions\n"
        + _describe_unnamed_placement(shape)
        + _describe_skipped_unshards(text, program.zero)
    )


def _describe_unnamed_placement(shape: PipelineShape) -> str:
    """Return a line with the rank of each stage if the placement has no name, or "".

    Two swapped rows of a CSV are a valid program, but its stages are on other ranks.
    """
    if isinstance(shape.placement, str):
        return ""
    rows = "/".join(",".join(map(str, row)) for row in shape.replica_ranks)
    return (
        f"placement: stages 0 to {shape.stages - 1} are on ranks {rows}, because row k of a CSV "
        "has the actions of rank k\n"
    )


def _describe_skipped_unshards(text: str, zero: int) -> str:
    """Return a line with the number of UNSHARD actions that the import skipped, or "".

    torch writes UNSHARD actions for all stages, but a program has unshards only with zero=3.
    """
    from schedir.io.torch_unshard import UNSHARD

    if not (number := text.count(UNSHARD)) or zero == 3:
        return ""
    return f"skipped {number} {UNSHARD}, because weights are not sharded; -O zero=3 keeps them\n"


def _import_traces(args: argparse.Namespace) -> str:
    from schedir.io.timeline_file import TIMELINE_SUFFIX, save_timeline
    from schedir.traces.trace_files import PARALLEL_READ_BYTES, find_trace_files, sum_file_sizes
    from schedir.traces.trace_import import read_run

    if not args.output.endswith((TIMELINE_SUFFIX, ".sched")):
        raise UsageError(
            f"-o {args.output}: the file must end in {TIMELINE_SUFFIX} for a run, or in .sched for "
            "a program"
        )
    request = make_request(args, args.sources[0])
    _require_trace_options(args, request)
    files = find_trace_files(args.sources)
    numbers = count(1)

    def show_number(path: Path) -> None:
        number = next(numbers)
        show_progress(f"read {number} of {len(files)} files", number, len(files))

    result = read_run(
        files,
        step=args.step,
        progress_model=args.progress_model,
        name=_derive_program_name(args.output),
        program_attributes=request.traits,
        on_read=show_number if sum_file_sizes(files) >= PARALLEL_READ_BYTES else None,
    )
    timeline = result.timeline
    program, shape = timeline.program, timeline.program.shape
    if args.ranks is not None and shape.ranks != args.ranks:
        raise UsageError(
            f"--ranks is {args.ranks}, but these traces have {shape.ranks} pipeline ranks"
        )
    if args.output.endswith(TIMELINE_SUFFIX):
        save_timeline(timeline, args.output)
    else:
        write_program(program, args.output)
    return _describe_run(args.output, result)


def _require_trace_options(args: argparse.Namespace, request: Request) -> None:
    """Raise UsageError if an option applies only to programs, and not to traces."""
    option_names = {"costs": "--costs", "sizes": "--sizes", "memory_limit": "--memory-limit",
           "relower": "--relower"}  # fmt: skip
    for name in (*option_names, "buffer_sharing", "overlap"):
        if getattr(args, name):
            option = option_names.get(name) or option_name(name)
            raise UsageError(
                f"{option} does not apply to traces, which contain the program and its times",
                fields=[name],
            )
    for name in request.compile_options:
        raise UsageError(
            f"{option_name(name)} does not apply to traces, which contain the program",
            fields=[name],
        )


def _describe_run(output: str, result: ImportedRun) -> str:
    """Return a line for the written file, and lines for the run and its idle time."""
    timeline = result.timeline
    program, shape = timeline.program, timeline.program.shape
    lines = [
        f"wrote {output}: {shape.ranks} ranks, {shape.stages} stages, {shape.microbatches} "
        f"microbatches, {len(program)} instructions",
        f"{result.step}: {timeline.bubble:.1%} of {shape.ranks} ranks x {timeline.span:.6g} s is "
        "idle",
        *filter(None, [timeline.causality_warning]),
        *result.notes,
    ]
    if len(result.steps) > 1:
        other_steps = f"{result.steps[0]} to {result.steps[-1]}"
        lines.append(f"--step N reads another ProfilerStep, from {other_steps}")
    return "".join(f"{line}\n" for line in lines)


def _derive_program_name(source: str) -> str:
    return re.sub(r"[^\w.-]+", "_", Path(source).stem)
