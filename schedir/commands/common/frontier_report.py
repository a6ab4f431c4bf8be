"""Report the memory frontier of a search as a table, as JSON and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.commands.common.progress_bar import show_progress
from schedir.errors import UsageError, format_bytes
from schedir.io.files import require_writable
from schedir.io.terminal_output import format_json, format_table
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.possible_saving import compute_saving, format_percent
from schedir.schedule_search.search_results import describe_numba

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from schedir.io.program_request import Request
    from schedir.ir.program import Program
    from schedir.schedule_search.memory_frontier import MemoryFrontier
    from schedir.schedule_search.search_results import SearchStep
    from schedir.schedules.schedule_algebra import Schedule

_format_count = "{:g} in flight".format


def require_frontier_options(args: argparse.Namespace) -> None:
    """Raise an error if an option does not apply to `--frontier`.

    Args:
        args: The parsed options of `search`.

    Raises:
        UsageError: An option does not apply, or the output file has no suffix of a picture.
    """
    for field, option, is_given in (
        ("memory_limit", "--memory-limit", args.memory_limit is not None),
        ("max_in_flight", "--max-in-flight", args.max_in_flight is not None),
        ("objective", "--objective active_span", args.objective == "active_span"),
        ("bound", "--bound solver", args.bound == "solver"),
    ):
        if is_given:
            raise UsageError(f"--frontier cannot be combined with {option}", fields=[field])
    if args.output is not None:
        from schedir.viz.figures.figure_files import require_figure_suffix

        require_figure_suffix(args.output)


def report_frontier(
    args: argparse.Namespace,
    shape: PipelineShape,
    request: Request,
    initial_schedules: Sequence[Schedule | Program],
) -> tuple[str, bool]:
    """Search at each memory limit, and write the picture if `-o` is given.

    Args:
        args: The parsed options of `search`.
        shape: The shape of the pipeline.
        request: The costs, their unit and the sizes. Without sizes, a memory limit is a number of
            (stage, microbatch) pairs in flight.
        initial_schedules: Schedules and programs from which the search starts.

    Returns:
        The text or JSON of the frontier, and False if the search was interrupted, else True.

    Raises:
        UsageError: The output file cannot be written.
    """
    if args.output is not None:
        require_writable(args.output)
    frontier = _search_frontier(args, shape, request, initial_schedules)
    if args.output is not None:
        from schedir.viz import memory_frontier, save

        save(memory_frontier(frontier), args.output)
    text = _format_json(frontier) if args.json else _format_text(args, frontier, request.unit)
    return text, frontier.is_complete


def _search_frontier(
    args: argparse.Namespace,
    shape: PipelineShape,
    request: Request,
    initial_schedules: Sequence[Schedule | Program],
) -> MemoryFrontier:
    from schedir.schedule_search.memory_frontier import memory_frontier

    fmt = format_bytes if request.sizes is not None else _format_count

    def report(limit: float, step: SearchStep, bound: float) -> None:
        show_progress(
            f"{fmt(limit)}: span {step.span:.6g}, found after {step.seconds:.1f} s "
            f"({step.method}); lower bound {bound:.6g}"
        )

    return memory_frontier(
        shape, request.costs, request.sizes,
        split_backward=not args.no_split_backward,
        time_limit=args.time_limit,
        max_evaluations=args.max_evaluations,
        seed=args.seed,
        initial_schedules=initial_schedules,
        report=report,
    )  # fmt: skip


def _format_text(args: argparse.Namespace, frontier: MemoryFrontier, unit: str) -> str:
    fmt, unit = format_bytes if frontier.is_in_bytes else _format_count, unit and f" {unit}"
    lines = format_table(
        ["limit of a rank", "span", "bubble", "lower bound", "to gain"],
        [
            [fmt(limit), f"{run.span:.6g}{unit}", f"{run.bubble:.1%}", f"{bound:.6g}{unit}",
             format_percent(compute_saving(run.span, bound))]
            for limit, run, bound in frontier.levels
        ],
    )  # fmt: skip
    runs = sorted(frontier.timelines, key=frontier.measure_memory)
    compared_runs = (
        f"{t.program.name} {t.span:.6g}{unit} ({fmt(frontier.measure_memory(t))})" for t in runs
    )
    lines += f"compared: {', '.join(compared_runs) or 'no built-in schedule'}\n"
    lines += f"searched {describe_numba(frontier.numba)}\n"
    if not frontier.is_complete:
        lines += "interrupted, larger limits are not searched\n"
    return lines + (f"wrote {args.output}\n" if args.output is not None else "")


def _format_json(frontier: MemoryFrontier) -> str:
    return format_json(
        {
            "memory_unit": "bytes" if frontier.is_in_bytes else "in flight",
            "levels": [
                {"limit": limit, "span": run.span, "bubble": run.bubble, "bound": bound}
                for limit, run, bound in frontier.levels
            ],
            "compared_schedules": [
                {"program": t.program.name, "memory": frontier.measure_memory(t), "span": t.span}
                for t in frontier.timelines
            ],
            "bounds": [{"limit": limit, "bound": bound} for limit, bound in frontier.bounds[:-1]],
            "is_complete": frontier.is_complete,
            "numba": frontier.numba,
        }
    )
