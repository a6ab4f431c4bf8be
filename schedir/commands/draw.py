"""Draw a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from schedir.errors import UsageError
from schedir.options import RUN, add_shape, timeline_of

if TYPE_CHECKING:
    from schedir.timeline import Timeline

ABOUT = "draw a run"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Sources, and where the picture goes."""
    parser.add_argument("source", metavar="SCHEDULE", nargs="+", help=RUN)
    parser.add_argument(
        "-o", dest="output", metavar="FILE", required=True,
        help="html for a page to look around in, or png, svg, pdf",
    )  # fmt: skip
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The picture, by the ending of its name."""
    timelines = [timeline_of(args, source) for source in args.source]
    if args.output.lower().endswith(".html"):
        from schedir.viz import save_html

        if len(timelines) > 2:
            raise UsageError(f"a page shows one run or two, not {len(timelines)}")
        if len(timelines) == 1 and timelines[0].kind == "measured":
            timelines.insert(0, _expected(timelines[0]))
        save_html(args.output, *timelines)
    else:
        from schedir.viz import compare, save

        save(compare(timelines), args.output)
    return f"wrote {args.output}\n"


def _expected(measured: Timeline) -> Timeline:
    """The run that the mean times of a measured one predict."""
    from dataclasses import replace

    from schedir.calibrate import calibrate
    from schedir.simulate import simulate

    predicted = simulate(measured.program, calibrate(measured), model=measured.model)
    return replace(predicted, unit=measured.unit)
