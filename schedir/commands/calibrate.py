"""The command `calibrate`: print the mean times of a run as costs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from schedir.errors import UsageError

if TYPE_CHECKING:
    from schedir.predict.timeline import Timeline

EXAMPLES = """\
  schedir calibrate run.timeline

The page docs/how-to/import-traces.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "source",
        metavar="FILE.timeline",
        help="the run whose times are averaged, usually a measured run",
    )
    parser.add_argument(
        "--per-microbatch", action="store_true",
        help="print one time per microbatch instead of the mean of all microbatches",
    )  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """Return the costs of a run on one line, in the form of `--costs`.

    Args:
        args: The parsed options of `calibrate`.

    Raises:
        UsageError: The source is not a FILE.timeline.
    """
    from schedir.io.source_loader import suggest_source
    from schedir.io.timeline_file import load_timeline
    from schedir.predict.calibrate import (
        calibrate,
        fill_missing_backwards,
        format_costs,
        simulate_at_mean_times,
    )

    if not args.source.endswith(".timeline"):
        raise UsageError(
            f"{args.source!r} is not a run: the name of a run must end in .timeline",
            hint="" if args.source.endswith(".toml") else suggest_source(args.source),
        )
    timeline = load_timeline(args.source)
    if timeline.causality_warning:  # Other commands read the standard output.
        print(f"{args.source}: {timeline.causality_warning}", file=sys.stderr)
    costs = calibrate(timeline, per_microbatch=args.per_microbatch)
    if note := _describe_unexplained_time(timeline, simulate_at_mean_times(timeline, costs)):
        print(f"{args.source}: {note}", file=sys.stderr)
    return f"{format_costs(fill_missing_backwards(costs, timeline.program))}\n"


def _describe_unexplained_time(run: Timeline, predicted: Timeline) -> str:
    """Return a note if the prediction at mean times is much busier than the run, else ""."""
    from schedir.predict.calibrate import MIN_REPORTED_SHARE, compute_unexplained_share

    if compute_unexplained_share(predicted, run) < MIN_REPORTED_SHARE:
        return ""
    share = 1 - run.busy.sum() / predicted.busy.sum()
    rank, unit = int((predicted.busy - run.busy).argmax()), run.unit and f" {run.unit}"
    return (
        f"{share:.1%} of the busy time at these costs is not compute. The costs of F, B, I and W "
        "contain delays of the host, late messages and noise, and a prediction repeats them as "
        f"work. Most are on rank {rank}: busy for {predicted.busy[rank]:.4g}{unit}, in the run "
        f"for {run.busy[rank]:.4g}{unit}"
    )
