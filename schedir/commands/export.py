"""The command `export`: write a program or a run in the format of another system."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.errors import UsageError
from schedir.io.files import atomic_write

COMPRESS_ABOVE_BYTES = 5_000_000  # JSON files with more bytes are compressed with gzip.


class ExportFormat(NamedTuple):
    """A file format of another system.

    Attributes:
        to_text: A function that returns the contents of the file for the parsed options.
        suffix: The suffix of the file.
        description: A phrase for the help.
    """

    to_text: Callable[[argparse.Namespace], str]
    suffix: str
    description: str


def _export_torch_csv(args: argparse.Namespace) -> str:
    from schedir.io import torch_csv
    from schedir.verify.check import check, check_draft

    request = make_request(args, args.source)
    program = request.program
    program = (
        check_draft(program) if program.is_draft else check(program, request.proven_progress_model)
    )
    return torch_csv.to_csv(program, args.to)


def _export_perfetto(args: argparse.Namespace) -> str:
    from schedir.io import perfetto

    return perfetto.to_json(make_request(args, args.source).timeline)


EXPORT_FORMATS = {
    "torch": ExportFormat(
        _export_torch_csv, ".csv", "compute only, for torch.distributed.pipelining of any version"
    ),
    "torch-2.13": ExportFormat(
        _export_torch_csv, ".csv", "with transfers and reductions, as torch 2.13 reads them"
    ),
    "perfetto": ExportFormat(
        _export_perfetto, ".json", "the run for ui.perfetto.dev, as .json or .json.gz"
    ),
}

EXAMPLES = """\
  schedir export zb_v --ranks 4 --microbatches 8 --to torch -o zb_v.csv
  schedir export run.timeline --to perfetto -o run.json

The page docs/how-to/run-in-torch.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    about = "; ".join(f"{name} ({form.description})" for name, form in EXPORT_FORMATS.items())
    parser.add_argument("--to", metavar="FORMAT", required=True, help=about)
    parser.add_argument(
        "-o", dest="output", metavar="FILE", required=True, help="write to this file"
    )
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Write a program or a run in another format, and return a line with the file name.

    A JSON file is compressed if it is large, or if its name ends in ".json.gz".

    Args:
        args: The parsed options of `export`.

    Raises:
        UsageError: The format is unknown, or the file has the wrong suffix.
    """
    if args.to not in EXPORT_FORMATS:
        raise UsageError(
            f"--to {args.to}: there is no such format",
            hint=f"the formats are {', '.join(EXPORT_FORMATS)}",
        )
    form, output = EXPORT_FORMATS[args.to], args.output
    is_compressed = form.suffix == ".json" and output.endswith(".json.gz")
    if not (output.endswith(form.suffix) or is_compressed):
        raise UsageError(f"-o {output}: a file of the format {args.to} must end in {form.suffix}")
    content = form.to_text(args).encode()
    if form.suffix == ".json" and not is_compressed and len(content) > COMPRESS_ABOVE_BYTES:
        output, is_compressed = f"{output}.gz", True
    if is_compressed:
        import gzip

        content = gzip.compress(content, mtime=0)
    with atomic_write(output) as path:
        path.write_bytes(content)
    return f"wrote {output}\n"
