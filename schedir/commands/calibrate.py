"""The command `calibrate`: print the mean times of a run as costs."""

from __future__ import annotations

import argparse
import sys

from schedir.errors import UsageError

EXAMPLES = """\
  schedir calibrate run.timeline

The page docs/how-to/import-traces.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument("source", metavar="FILE.timeline", help="a run, usually a measured one")
    parser.add_argument(
        "--per-microbatch", action="store_true",
        help="print the time of each microbatch, not the mean",
    )  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """Return the costs of a run on one line, in the form of `--costs`.

    Args:
        args: The parsed options of `calibrate`.

    Raises:
        UsageError: The source is not a FILE.timeline.
    """
    from schedir.io.timeline_file import load_timeline
    from schedir.predict.calibrate import calibrate, fill_missing_backwards, format_costs

    if not args.source.endswith(".timeline"):
        raise UsageError(f"{args.source!r} is not a run: its file must end in .timeline")
    timeline = load_timeline(args.source)
    if timeline.causality_warning:  # not on standard output, which another command parses
        print(f"{args.source}: {timeline.causality_warning}", file=sys.stderr)
    costs = calibrate(timeline, per_microbatch=args.per_microbatch)
    return f"{format_costs(fill_missing_backwards(costs, timeline.program))}\n"
