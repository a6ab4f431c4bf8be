"""Read another system's program."""

from __future__ import annotations

import argparse
import re

from schedir.commands._options import add_lowering, count, request_of
from schedir.errors import ProgramError, UsageError
from schedir.io.files import atomic_write, read_text

ORDER = 9
ABOUT = "read a CSV of torch.distributed.pipelining, check it, and write it as a program"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A file, and where its program goes."""
    parser.add_argument("source", metavar="FILE.csv", help="with transfers, or compute only")
    parser.add_argument("-o", dest="output", metavar="FILE.sched", required=True)
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="how many rows there must be; a cut file has fewer"
    )
    add_lowering(parser)


def run(args: argparse.Namespace) -> str:
    """The program, lowered if it has no transfers, and checked in any case."""
    from dataclasses import replace
    from pathlib import Path

    from schedir.compiler.compile import finish
    from schedir.io import torch_csv
    from schedir.io.load import Source
    from schedir.ir.text import show

    if not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    text = read_text(args.source)
    name = re.sub(r"[^\w.-]+", "_", Path(args.source).stem)
    try:
        program = torch_csv.parse(text, name, args.ranks)
    except ProgramError as error:
        error.add_note(f"in {args.source}")
        raise
    request = request_of(args, args.source, lowers=True)
    program = replace(program, **request.traits)
    if not program.is_draft:
        if args.overlap:
            raise UsageError(f"{args.source} has its transfers: --overlap is for what has none")
        program = finish(program)
    program = replace(request, source=Source.of(program, args.source)).program
    with atomic_write(args.output) as path:
        path.write_text(show(program), encoding="utf-8")
    plan = program.plan
    return (
        f"wrote {args.output}: {plan.ranks} ranks, {plan.stages} stages, "
        f"{plan.microbatches} microbatches, {len(program)} instructions\n"
    )
