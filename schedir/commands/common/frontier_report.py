"""Report the memory frontier of a search as a table, as JSON and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedir.commands.common.progress_line import ProgressLine
from schedir.errors import UsageError, format_bytes
from schedir.io.files import expect_writable
from schedir.io.terminal import as_json, table
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.possible_saving import gain_of, percent
from schedir.schedule_search.search_results import numba_in_words

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from schedir.ir.cost.costs import Costs
    from schedir.ir.cost.sizes import Sizes
    from schedir.ir.program import Program
    from schedir.schedule_search.memory_frontier import MemoryFrontier
    from schedir.schedule_search.search_results import SearchStep
    from schedir.schedules.schedule_algebra import Schedule

_ONE_LIMIT = {"memory_limit": "--memory-limit", "in_flight": "--max-in-flight"}


@dataclass(frozen=True)
class FrontierRequest:
    """Of what the frontier is."""

    shape: PipelineShape
    costs: Costs | None
    sizes: Sizes | None
    start: Sequence[Schedule | Program]
    unit: str


def require(args: argparse.Namespace) -> None:
    """Refuse what says nothing of a frontier; UsageError."""
    for name in _ONE_LIMIT:
        if getattr(args, name) is not None:
            raise UsageError(
                f"--frontier is of all limits, and {_ONE_LIMIT[name]} says one",
                fields=[name],
            )
    if args.objective == "own":
        raise UsageError("a frontier is of spans, not of own ones", fields=["objective"])
    if args.prove == "solver":
        raise UsageError("the bounds of a frontier are closed ones", fields=["prove"])
    if args.output is not None:
        from schedir.viz.figures.figure_files import suffix_of

        suffix_of(args.output)


def told(args: argparse.Namespace, asked: FrontierRequest) -> tuple[str, bool]:
    """What was found at each limit, and whether at all of them; the picture is written."""
    if args.output is not None:
        expect_writable(args.output)
    found = _found(args, asked)
    if args.output is not None:
        from schedir.viz import memory_frontier, save

        save(memory_frontier(found), args.output)
    said = _json(found) if args.json else _text(args, found, asked.unit)
    return said, found.complete


def _found(args: argparse.Namespace, asked: FrontierRequest) -> MemoryFrontier:
    from schedir.schedule_search.memory_frontier import memory_frontier

    progress, say = ProgressLine(), format_bytes if asked.sizes is not None else _count

    def report(limit: float, step: SearchStep, bound: float) -> None:
        progress.show(
            f"{say(limit)}: {step.span:.6g} since {step.seconds:.1f} s ({step.method}); none is "
            f"shorter than {bound:.6g}"
        )

    try:
        return memory_frontier(
            asked.shape, asked.costs, asked.sizes,
            split=not args.whole,
            seconds=args.seconds,
            evaluations=args.evaluations,
            seed=args.seed,
            start=asked.start,
            report=report,
        )  # fmt: skip
    finally:
        progress.done()


def _count(limit: float) -> str:
    return f"{limit:g} in flight"


def _text(args: argparse.Namespace, found: MemoryFrontier, unit: str) -> str:
    say, unit = format_bytes if found.in_bytes else _count, unit and f" {unit}"
    lines = table(
        ["a rank may hold", "span", "bubble", "none is shorter than", "to gain"],
        [
            [say(limit), f"{run.span:.6g}{unit}", f"{run.bubble:.1%}", f"{bound:.6g}{unit}",
             percent(gain_of(run.span, bound))]
            for limit, run, bound in found.levels
        ],
    )  # fmt: skip
    runs = sorted(found.runs, key=found.memory)
    beside = (f"{t.program.name} {t.span:.6g}{unit} ({say(found.memory(t))})" for t in runs)
    lines += f"beside: {', '.join(beside) or 'none that is built in'}\n"
    lines += f"searched {numba_in_words(found.numba)}\n"
    if not found.complete:
        lines += "interrupted, larger limits have not been searched\n"
    return lines + (f"wrote {args.output}\n" if args.output is not None else "")


def _json(found: MemoryFrontier) -> str:
    return as_json(
        {
            "memory": "bytes" if found.in_bytes else "in flight",
            "levels": [
                {"limit": limit, "span": run.span, "bubble": run.bubble, "bound": bound}
                for limit, run, bound in found.levels
            ],
            "beside": [
                {"program": t.program.name, "memory": found.memory(t), "span": t.span}
                for t in found.runs
            ],
            "bounds": [{"limit": limit, "bound": bound} for limit, bound in found.bounds[:-1]],
            "complete": found.complete,
            "numba": found.numba,
        }
    )
