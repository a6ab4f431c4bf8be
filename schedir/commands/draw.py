"""Draw a run."""

from __future__ import annotations

import argparse

from schedir.options import RUN, add_shape, timeline_of

ABOUT = "draw the predicted run"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source, and where the picture goes."""
    parser.add_argument("source", metavar="SCHEDULE", help=RUN)
    parser.add_argument("-o", dest="output", metavar="FILE", required=True, help="png, svg or pdf")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The picture, by the ending of its name."""
    from schedir.viz import gantt, save

    save(gantt(timeline_of(args, args.source)), args.output)
    return f"wrote {args.output}\n"
