"""Write a program for another system."""

from __future__ import annotations

import argparse

from schedir.errors import UsageError
from schedir.files import replacing
from schedir.options import SOURCE, add_shape, program_of

ABOUT = "write a program as the CSV that torch.distributed.pipelining loads"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source, the form, and where it goes."""
    parser.add_argument("source", metavar="SCHEDULE", help=SOURCE)
    parser.add_argument(
        "--to",
        metavar="FORM",
        required=True,
        help="torch: compute only, for any version; torch-2.13: with transfers and reductions, "
        "as this version reads them",
    )
    parser.add_argument("-o", dest="output", metavar="FILE.csv", required=True)
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The CSV of a program that was checked."""
    from schedir import torch_csv
    from schedir.check import check, check_draft

    if not args.output.endswith(".csv"):
        raise UsageError(f"the file ends in .csv: {args.output} does not")
    program, _ = program_of(args, args.source)
    program = check_draft(program) if program.is_draft else check(program, args.model or "device")
    text = torch_csv.show(program, args.to)
    with replacing(args.output) as path:
        path.write_text(text, encoding="utf-8")
    return f"wrote {args.output}\n"
