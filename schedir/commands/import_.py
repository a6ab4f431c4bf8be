"""The command `import`: read a program of another system, or the traces of a run."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from schedir.commands.common.schedule_options import add_lowering, count, request_of
from schedir.errors import SchedirError, UsageError
from schedir.io.command_line import option_name
from schedir.io.files import atomic_write, read_text

EXAMPLES = """\
  schedir import traces -o run.timeline
  schedir import schedule.csv -o schedule.sched

The page docs/traces.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Files, and where what they say goes."""
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="FILE.csv, with transfers or compute only; or traces of torch.profiler, of all ranks: "
        "files (.json, .json.gz), a folder or a pattern",
    )
    parser.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        required=True,
        help="a program FILE.sched; of traces also the run, FILE.timeline",
    )
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="how many there must be; a cut CSV has fewer rows"
    )
    parser.add_argument(
        "--step", type=count, metavar="N", help="ProfilerStep of traces; the last whole one"
    )
    add_lowering(parser)


def run(args: argparse.Namespace) -> str:
    """The program, lowered if it has no transfers, and checked in any case."""
    is_csv = [source.endswith(".csv") for source in args.sources]
    if not any(is_csv):
        return _traces(args)
    if len(is_csv) > 1:
        raise UsageError("one CSV is a whole program: name one")
    if args.step is not None:
        raise UsageError(f"{args.sources[0]} is a program: --step is for traces of a run")
    return _csv(args, args.sources[0])


def _csv(args: argparse.Namespace, source: str) -> str:
    from dataclasses import replace

    from schedir.compiler.compile import finish
    from schedir.io import torch_csv
    from schedir.io.source_loader import Source
    from schedir.ir.text_format import to_text

    if not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    text = read_text(source)
    try:
        program = torch_csv.from_csv(text, _name(source), args.ranks, args.zero)
    except SchedirError as error:
        error.add_note(f"in {source}")
        raise
    request = request_of(args, source, lowers=True)
    program = replace(program, **request.traits)
    if not program.is_draft:
        if args.overlap and not args.relower:
            raise UsageError(f"{source} has its transfers: -O overlap is for what has none")
        program = finish(program)
    program = replace(request, source=Source.of(program, source)).program
    with atomic_write(args.output) as path:
        path.write_text(to_text(program), encoding="utf-8")
    shape = program.shape
    return (
        f"wrote {args.output}: {shape.ranks} ranks, {shape.stages} stages, "
        f"{shape.microbatches} microbatches, {len(program)} instructions\n"
        + _read_over(text, program.zero)
    )


def _read_over(text: str, zero: int) -> str:
    """What torch writes for all stages, and a program has only if it is asked for."""
    from schedir.io.torch_unshard import UNSHARD

    if not (number := text.count(UNSHARD)) or zero:
        return ""
    return f"read over {number} {UNSHARD}, as stages need not be sharded: -O zero=3 keeps them\n"


def _traces(args: argparse.Namespace) -> str:
    from schedir.io.timeline_file import SUFFIX, save_timeline
    from schedir.ir.text_format import to_text
    from schedir.traces.trace_files import LARGE, files_of, size_of
    from schedir.traces.trace_import import read_run

    if not args.output.endswith((SUFFIX, ".sched")):
        raise UsageError(f"a run's file ends in {SUFFIX}, a program's in .sched: {args.output}")
    request = request_of(args, args.sources[0])
    own = {"costs": "--costs", "sizes": "--sizes", "memory_limit": "--memory-limit",
           "relower": "--relower"}  # fmt: skip
    for name in (*own, "buffer_sharing", "overlap"):
        if getattr(args, name):
            option = own.get(name) or option_name(name)
            raise UsageError(
                f"traces say what was run, and when: {option} is not for them", fields=[name]
            )
    for name in request.more:
        raise UsageError(
            f"traces say what was run: {option_name(name)} is not for them", fields=[name]
        )
    files = files_of(args.sources)
    found = read_run(
        files,
        step=args.step,
        progress_model=args.progress_model,
        name=_name(args.output),
        traits=request.traits,
        seen=_Progress(len(files)) if size_of(files) >= LARGE else None,
    )
    timeline = found.timeline
    program, shape = timeline.program, timeline.program.shape
    if args.ranks is not None and shape.ranks != args.ranks:
        raise UsageError(
            f"there are {shape.ranks} pipeline ranks in these traces, not {args.ranks}"
        )
    if args.output.endswith(SUFFIX):
        save_timeline(timeline, args.output)
    else:
        with atomic_write(args.output) as path:
            path.write_text(to_text(program), encoding="utf-8")
    lines = [
        f"wrote {args.output}: {shape.ranks} ranks, {shape.stages} stages, {shape.microbatches} "
        f"microbatches, {len(program)} instructions",
        f"{found.step}: {timeline.bubble:.1%} of {shape.ranks} ranks x {timeline.span:.6g} s is "
        "idle",
        *filter(None, [timeline.doubt]),
        *found.notes,
    ]
    if len(found.steps) > 1:
        others = f"{found.steps[0]} to {found.steps[-1]}"
        lines.append(f"--step N reads another ProfilerStep, from {others}")
    return "".join(f"{line}\n" for line in lines)


class _Progress:
    """Says how many files have been read, to who looks on."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0

    def __call__(self, path: Path) -> None:
        self.done += 1
        if sys.stderr.isatty():
            end = "\n" if self.done == self.count else ""
            print(f"\rread {self.done} of {self.count} files", end=end, file=sys.stderr, flush=True)


def _name(source: str) -> str:
    """A name for a program, after the file that it is read from or written to."""
    return re.sub(r"[^\w.-]+", "_", Path(source).stem)
