"""Predict a run, as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from schedir.options import RUN, add_shape, timeline_of
from schedir.terminal import as_json, table

if TYPE_CHECKING:
    from schedir.timeline import Timeline

ABOUT = "predict when each rank works, and how much it holds"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source."""
    parser.add_argument("source", metavar="SCHEDULE", help=RUN)
    parser.add_argument("--json", action="store_true", help="for a program to read")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """A row per rank, and what the ranks come to together."""
    timeline = timeline_of(args, args.source)
    columns = {
        "busy": timeline.busy.tolist(),
        "idle": timeline.idle.tolist(),
        "idle_in_own_span": timeline.idle_in_own_span.tolist(),
        "peak_in_flight": timeline.peak_in_flight.tolist(),
    }
    if args.json:
        return as_json(facts(timeline) | columns)
    rows = enumerate(zip(*columns.values(), strict=True))
    return (
        f"{timeline.program.name}, {timeline.kind}\n"
        + table(
            ["rank", *(name.replace("_", " ") for name in columns)],
            [[str(rank), *(f"{x:.6g}" for x in row)] for rank, row in rows],
        )
        + f"span {timeline.span:.6g}, bubble {timeline.bubble:.1%} of ranks x span, "
        f"{timeline.bubble_over_ideal:.1%} of the busy time\n"
    )


def facts(timeline: Timeline) -> dict[str, Any]:
    """What is said of a run as a whole."""
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
    }
