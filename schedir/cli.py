"""The command line.

Exit codes: 0 fine, 2 a refused program or bad usage, 1 a bug of schedir, 130 interrupted.
What a command says is written at its end, in one piece; what it refuses, to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from schedir.errors import DeadlockError, ProgramError, UsageError
from schedir.files import replacing
from schedir.options import add_shape, program_of, timeline_of
from schedir.terminal import as_json, coloured, table

# Commands import what they need themselves: --help must not wait for numpy.
if TYPE_CHECKING:
    from schedir.graph import Model
    from schedir.program import Program
    from schedir.timeline import Timeline

_ABOUT = "Pipeline schedules as programs: compile, check, predict, draw and run them."
_SOURCE = "a built-in schedule, file.py:function, or a program FILE.sched"
_EXIT = "exit code: 0 fine, 2 refused program or bad usage, 1 a bug of schedir"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        args = _parser().parse_args(argv)
        said: str | int = args.run(args)
        return _say(said) if isinstance(said, str) else said
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except ProgramError as error:
        _tell(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        from traceback import print_exc

        print("this is a bug in schedir", file=sys.stderr)
        print_exc()
        return 1


def _say(text: str) -> int:
    """Write to standard output; that nobody reads to the end (`| head`) is fine."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:
        raise UsageError(f"cannot write to standard output: {error.strerror}") from None
    return 0


def _tell(error: ProgramError) -> None:
    """Say what was refused, and where in a person's file it comes from."""
    from schedir.load import origin

    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    if error.__cause__ and (where := origin(error)):
        lines.append(f"  at {where}")
    print("\n".join(lines), file=sys.stderr)


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="schedir", description=_ABOUT, epilog=_EXIT, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], str | int], about: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    show = command("show", _show, "print a program's text, or write it to a file")
    show.add_argument("source", metavar="SCHEDULE", help=_SOURCE)
    show.add_argument("--flat", action="store_true", help="one line per instruction")
    show.add_argument("--draft", action="store_true", help="compute only, before the lowering")
    show.add_argument("-o", dest="output", metavar="FILE.sched", help="write it there")

    check = command("check", _check, "prove that a program is complete and finishes")
    check.add_argument("source", metavar="SCHEDULE", help=_SOURCE)
    check.add_argument("--why", metavar="RANK:INDEX", help="what decides when this one starts")

    simulate = command("simulate", _simulate, "predict when each rank works, and how much it holds")
    simulate.add_argument("source", metavar="SCHEDULE", help=_SOURCE)

    draw = command("draw", _draw, "draw the predicted run")
    draw.add_argument("source", metavar="SCHEDULE", help=_SOURCE)
    draw.add_argument("-o", dest="output", metavar="FILE", required=True, help="png, svg or pdf")

    compare = command(
        "compare", _compare,
        "set schedules of one model side by side: costs are those of a microbatch on a whole "
        "rank, split evenly over its stages; a schedule without a parameter v has one stage per "
        "rank",
    )  # fmt: skip
    compare.add_argument("source", metavar="SCHEDULE", nargs="+", help=_SOURCE)
    compare.add_argument("-o", dest="output", metavar="FILE", help="draw them under each other")

    for sub in (check, simulate, compare):
        sub.add_argument("--json", action="store_true", help="for a program to read")
    for sub in (show, check, simulate, draw, compare):
        add_shape(sub)

    train = command("train", _train, "train a GPT as a configuration says")
    train.add_argument("config", metavar="CONFIG.toml")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    return parser


# ---------------------------------------------------------------- commands


def _show(args: argparse.Namespace) -> str:
    from schedir.text import show

    program, _ = program_of(args, args.source)
    text = show(program, folded=not args.flat)
    if args.output is None:
        return coloured(text)
    if not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    with replacing(args.output) as path:
        path.write_text(text, encoding="utf-8")
    return f"wrote {args.output}\n"


def _check(args: argparse.Namespace) -> str:
    from schedir.check import check
    from schedir.graph import MODELS

    if args.why is not None:
        return _why(args)
    program, _ = program_of(args, args.source)
    check(program, args.model or "device")
    asked = MODELS if args.model is None else (args.model,)
    models = [model for model in asked if _finishes(program, model)]
    fails = [model for model in asked if model not in models]
    if args.json:
        facts = {"program": program.name, "digest": program.digest, "ranks": program.plan.ranks}
        return as_json(facts | {"instructions": len(program), "models": models})
    but = f", but not under {_and(fails)}" if fails else ""
    ranks = f"{program.plan.ranks} rank{'s' * (program.plan.ranks > 1)}"
    return (
        f"{program.name}: {len(program)} instructions on {ranks} are complete "
        f"and in order, and finish under {_and(models)}{but}\n"
    )


_LONGEST = 40  # links of a chain that are shown


def _why(args: argparse.Namespace) -> str:
    """The chain of instructions that decides when one starts."""
    timeline = timeline_of(args, args.source)
    rank, _, index = args.why.partition(":")
    streams = timeline.program.streams
    if not (rank.isdecimal() and index.isdecimal()):
        raise UsageError(f"--why takes RANK:INDEX, not {args.why!r}")
    if len(rank) > 9 or int(rank) >= len(streams):
        raise UsageError(f"--why: there is no rank {rank}: they are 0 to {len(streams) - 1}")
    if len(index) > 9 or int(index) >= len(streams[int(rank)]):
        most = len(streams[int(rank)]) - 1
        raise UsageError(f"--why: rank {rank} has no #{index}: its Stream ends at #{most}")
    offsets = timeline.program.offsets
    chain = timeline.path_to(int(offsets[int(rank)]) + int(index)).tolist()
    shown = []
    for position in chain:
        at = timeline.spans[position]
        number = position - int(offsets[at["rank"]])
        instr, start, end = timeline.of(int(at["rank"]), number)
        shown.append((int(at["rank"]), number, str(instr), start, end))
    if args.json:
        keys = ("rank", "index", "instruction", "start", "end")
        return as_json([dict(zip(keys, link, strict=True)) for link in shown])
    _, _, last, begin, _ = shown[-1]
    left = len(shown) - _LONGEST
    return (
        f"{timeline.program.name}: rank {rank} #{index} {last} starts at {begin:.6g} under "
        f"{timeline.model}; what decides it, each link from the end of the one before\n"
        + (f"the last {_LONGEST} of {len(shown)} links\n" if left > 0 else "")
        + table(
            ["start", "end", "rank", "index", "instruction"],
            [[f"{s:.6g}", f"{e:.6g}", str(r), f"#{k}", i] for r, k, i, s, e in shown[-_LONGEST:]],
        )
    )


def _finishes(program: Program, model: Model) -> bool:
    from schedir.check import check

    try:
        check(program, model)
    except DeadlockError:
        return False
    return True


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _simulate(args: argparse.Namespace) -> str:
    timeline = timeline_of(args, args.source)
    columns = {
        "busy": timeline.busy.tolist(),
        "idle": timeline.idle.tolist(),
        "idle_in_own_span": timeline.idle_in_own_span.tolist(),
        "peak_in_flight": timeline.peak_in_flight.tolist(),
    }
    if args.json:
        return as_json(_facts(timeline) | columns)
    rows = enumerate(zip(*columns.values(), strict=True))
    return (
        f"{timeline.program.name}, predicted\n"
        + table(
            ["rank", *(name.replace("_", " ") for name in columns)],
            [[str(rank), *(f"{x:.6g}" for x in row)] for rank, row in rows],
        )
        + f"span {timeline.span:.6g}, bubble {timeline.bubble:.1%} of ranks x span, "
        f"{timeline.bubble_over_ideal:.1%} of the busy time\n"
    )


def _facts(timeline: Timeline) -> dict[str, Any]:
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
    }


def _draw(args: argparse.Namespace) -> str:
    from schedir.viz import gantt, save

    save(gantt(timeline_of(args, args.source)), args.output)
    return f"wrote {args.output}\n"


def _compare(args: argparse.Namespace) -> str:
    timelines = [timeline_of(args, source, share=True) for source in args.source]
    said = _compared(timelines, as_table=not args.json)
    if args.output is not None:
        from schedir.viz import compare, save

        save(compare(timelines), args.output)
        said += "" if args.json else f"wrote {args.output}\n"
    return said


def _compared(timelines: Sequence[Timeline], *, as_table: bool) -> str:
    facts = []
    for t in timelines:
        plan, peak = t.program.plan, int(t.peak_in_flight.max())
        shape = {"ranks": plan.ranks, "microbatches": plan.microbatches, "stages": plan.stages}
        # In activations of a whole rank, so that a stage of half a rank counts half.
        size = {"peak_in_flight": peak, "peak_activations": peak * plan.ranks / plan.stages}
        facts.append(_facts(t) | shape | size)
    if not as_table:
        return as_json(facts)
    return table(
        ["schedule", "ranks", "microbatches", "stages", "span", "bubble", "of busy time",
         "peak in flight", "peak activations"],
        [
            [f["program"], *(str(f[name]) for name in ("ranks", "microbatches", "stages")),
             f"{f['span']:.6g}", f"{f['bubble']:.1%}", f"{f['bubble_over_ideal']:.1%}",
             str(f["peak_in_flight"]), f"{f['peak_activations']:.6g}"]
            for f in facts
        ],
    )  # fmt: skip


def _train(args: argparse.Namespace) -> int:
    from schedir.train import run

    return run(args.config, args.sets)
