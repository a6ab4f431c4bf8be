"""Draw a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from schedir.errors import UsageError
from schedir.numerals import decimal
from schedir.options import SOURCE, add_shape, timeline_of

if TYPE_CHECKING:
    from schedir.timeline import Timeline

ABOUT = "draw runs: on the terminal, as a picture, or as a page to look around in"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Sources, where the picture goes, and what it shows."""
    parser.add_argument("source", metavar="SCHEDULE", nargs="+", help=SOURCE)
    parser.add_argument(
        "-o", dest="output", metavar="FILE",
        help="html for a page of one run or two; png, svg or pdf for a picture; "
        "without it, letters on the terminal",
    )  # fmt: skip
    add_picture(parser)
    parser.add_argument("--idle", action="store_true", help="why which rank is idle, in a map")
    add_shape(parser)


def add_picture(parser: argparse.ArgumentParser) -> None:
    """What a chart shows, and how wide it is."""
    parser.add_argument(
        "--show", metavar="MARKS",
        help="of lanes,arrows,path,in_flight,memory,phases, or none (lanes)",
    )  # fmt: skip
    parser.add_argument(
        "--width", metavar="WIDTH", type=_width, help="column or page of a paper, or inches"
    )


def _width(text: str) -> float | str:
    try:
        inches = decimal(text)
    except ValueError:
        return text
    if not 1 <= inches <= 100:
        raise argparse.ArgumentTypeError(f"must be from 1 to 100 inches, not {text}")
    return inches


def only_charts(args: argparse.Namespace, what: str) -> None:
    """Refuse what `add_picture` takes where something else is drawn."""
    for name in ("show", "width"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for Gantt charts, not for {what}")


def run(args: argparse.Namespace) -> str:
    """The picture, by the ending of its name."""
    page = args.output is not None and args.output.lower().endswith(".html")
    if args.idle and (page or args.output is None):
        raise UsageError("a map of idle time is a picture", hint="-o FILE.png")
    if page or args.idle or args.output is None:
        only_charts(args, "a page" if page else "a map of idle time" if args.idle else "letters")
    timelines = [timeline_of(args, source) for source in args.source]
    if args.output is None:
        return "\n".join(map(in_letters, timelines))
    if page:
        from schedir.viz import save_html

        if len(timelines) > 2:
            raise UsageError(f"a page shows one run or two, not {len(timelines)}")
        if len(timelines) == 1 and timelines[0].kind == "measured":
            timelines.insert(0, _expected(timelines[0]))
        save_html(args.output, *timelines)
    elif args.idle:
        from schedir.viz import idle_map, save

        if len(timelines) > 1:
            raise UsageError(f"a map of idle time is of one run, not {len(timelines)}")
        save(idle_map(timelines[0]), args.output)
    else:
        save_chart(args, timelines)
    return f"wrote {args.output}\n"


def in_letters(timeline: Timeline, before: str = "") -> str:
    """The run in letters, as wide as the terminal; each line begins with `before`."""
    from shutil import get_terminal_size

    from schedir.terminal import painted
    from schedir.viz.lettering import letters

    lines = letters(timeline, get_terminal_size().columns - len(before))
    return painted([[(before, ""), *line] for line in lines])


def save_chart(args: argparse.Namespace, timelines: list[Timeline]) -> None:
    """A Gantt chart of runs under each other, as `add_picture` says."""
    from schedir.viz import compare, save
    from schedir.viz.output import suffix_of

    suffix_of(args.output)  # a wrong ending is told before anything is drawn
    show = "lanes" if args.show is None else args.show
    marks = "" if show == "none" else show
    save(compare(timelines, width=args.width, show=marks), args.output)


def _expected(measured: Timeline) -> Timeline:
    """The run that the mean times of a measured one predict."""
    from dataclasses import replace

    from schedir.calibrate import calibrate
    from schedir.simulate import simulate

    predicted = simulate(
        measured.program, calibrate(measured), model=measured.model, sizes=measured.sizes
    )
    return replace(predicted, unit=measured.unit)
