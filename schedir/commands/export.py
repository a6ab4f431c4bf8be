"""The command `export`: write a program or a run in the format of another system."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from schedir.commands.common.schedule_options import add_shape, add_source, request_of
from schedir.errors import UsageError
from schedir.io.files import atomic_write

LARGE = 5_000_000  # bytes above which JSON is packed


class ExportFormat(NamedTuple):
    """A form: how it says what a source names, how its file ends, and for whom it is."""

    text: Callable[[argparse.Namespace], str]
    suffix: str
    about: str


def _torch(args: argparse.Namespace) -> str:
    from schedir.io import torch_csv
    from schedir.verify.check import check, check_draft

    request = request_of(args, args.source)
    program = request.program
    program = check_draft(program) if program.is_draft else check(program, request.proven_model)
    return torch_csv.to_csv(program, args.to)


def _perfetto(args: argparse.Namespace) -> str:
    from schedir.io import perfetto

    return perfetto.text(request_of(args, args.source).timeline)


FORMS = {
    "torch": ExportFormat(
        _torch, ".csv", "for torch.distributed.pipelining of any version: compute only"
    ),
    "torch-2.13": ExportFormat(
        _torch, ".csv", "as this version reads transfers and reductions, too"
    ),
    "perfetto": ExportFormat(_perfetto, ".json", "the run, for ui.perfetto.dev; .json or .json.gz"),
}

EXAMPLES = """\
  schedir export zb_v --ranks 4 --microbatches 8 --to torch -o zb_v.csv
  schedir export run.timeline --to perfetto -o run.json

The page docs/torch.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source, the form, and where it goes."""
    add_source(parser)
    about = "; ".join(f"{name}: {form.about}" for name, form in FORMS.items())
    parser.add_argument("--to", metavar="FORM", required=True, help=about)
    parser.add_argument("-o", dest="output", metavar="FILE", required=True)
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The file; packed if its name says so, or if it is large JSON."""
    if args.to not in FORMS:
        raise UsageError(f"no form {args.to!r} to export to", hint=f"there are {', '.join(FORMS)}")
    form, output = FORMS[args.to], args.output
    packed = form.suffix == ".json" and output.endswith(".json.gz")
    if not (output.endswith(form.suffix) or packed):
        raise UsageError(f"the file ends in {form.suffix}: {output} does not")
    content = form.text(args).encode()
    if form.suffix == ".json" and not packed and len(content) > LARGE:
        output, packed = f"{output}.gz", True
    if packed:
        import gzip

        content = gzip.compress(content, mtime=0)
    with atomic_write(output) as path:
        path.write_bytes(content)
    return f"wrote {output}\n"
