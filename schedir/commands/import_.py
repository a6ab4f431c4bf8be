"""Read another system's program."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from schedir.commands.options import add_lowering, costs_of, count, sizes_of
from schedir.errors import ProgramError, UsageError
from schedir.io.files import atomic_write, read_text

if TYPE_CHECKING:
    from schedir.analysis.graph import Model

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

    from schedir.io import torch_csv
    from schedir.ir.text import show
    from schedir.ir.ties import tied_stages
    from schedir.passes.compile import compile, finish, within
    from schedir.passes.share_slots import share_slots
    from schedir.verify.check import check

    if not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    costs, text = costs_of(args.costs), read_text(args.source)
    name = re.sub(r"[^\w.-]+", "_", Path(args.source).stem)
    try:
        program = torch_csv.parse(text, name, args.ranks)
    except ProgramError as error:
        error.add_note(f"in {args.source}")
        raise
    tied, clip = tied_stages(args.tied or False, program.plan), bool(args.clip)
    program = replace(program, tp=args.tp or 1, dp=args.dp or 1, tied=tied, clip=clip)
    model: Model = args.model or "device"
    if program.is_draft:
        program = compile(program, model=model, costs=costs, overlap=args.overlap, slots=args.slots)
    elif args.overlap:
        raise UsageError(f"{args.source} has its transfers: --overlap is for what has none")
    else:
        program = check(finish(program), model)
        program = share_slots(program, args.slots, costs, model) if args.slots else program
    check(program, model)
    if args.limit is not None:
        within(program, sizes_of(args), args.limit)
    with atomic_write(args.output) as path:
        path.write_text(show(program), encoding="utf-8")
    plan = program.plan
    return (
        f"wrote {args.output}: {plan.ranks} ranks, {plan.stages} stages, "
        f"{plan.microbatches} microbatches, {len(program)} instructions\n"
    )
