"""The command `export`: write a program or a run in the format of another system."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.errors import UsageError
from schedir.io.files import atomic_write

COMPRESS_ABOVE_BYTES = 5_000_000  # bytes above which JSON is packed


class ExportFormat(NamedTuple):
    """A form: how it says what a source names, how its file ends, and for whom it is."""

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
        _export_torch_csv, ".csv", "for torch.distributed.pipelining of any version: compute only"
    ),
    "torch-2.13": ExportFormat(
        _export_torch_csv, ".csv", "as this version reads transfers and reductions, too"
    ),
    "perfetto": ExportFormat(
        _export_perfetto, ".json", "the run, for ui.perfetto.dev; .json or .json.gz"
    ),
}

EXAMPLES = """\
  schedir export zb_v --ranks 4 --microbatches 8 --to torch -o zb_v.csv
  schedir export run.timeline --to perfetto -o run.json

The page docs/torch.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A source, the form, and where it goes."""
    add_source(parser)
    about = "; ".join(f"{name}: {form.description}" for name, form in EXPORT_FORMATS.items())
    parser.add_argument("--to", metavar="FORM", required=True, help=about)
    parser.add_argument("-o", dest="output", metavar="FILE", required=True)
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """The file; packed if its name says so, or if it is large JSON."""
    if args.to not in EXPORT_FORMATS:
        raise UsageError(
            f"no form {args.to!r} to export to", hint=f"there are {', '.join(EXPORT_FORMATS)}"
        )
    form, output = EXPORT_FORMATS[args.to], args.output
    packed = form.suffix == ".json" and output.endswith(".json.gz")
    if not (output.endswith(form.suffix) or packed):
        raise UsageError(f"the file ends in {form.suffix}: {output} does not")
    content = form.to_text(args).encode()
    if form.suffix == ".json" and not packed and len(content) > COMPRESS_ABOVE_BYTES:
        output, packed = f"{output}.gz", True
    if packed:
        import gzip

        content = gzip.compress(content, mtime=0)
    with atomic_write(output) as path:
        path.write_bytes(content)
    return f"wrote {output}\n"
