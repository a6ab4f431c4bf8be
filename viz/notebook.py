"""Small pictures and tables of results in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape

from schedir.errors import SchedirError, format_bytes
from schedir.ir.program import Program
from schedir.ir.text_format import to_text
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedule_search.memory_frontier import MemoryFrontier
from schedir.schedule_search.search_results import SearchResult
from schedir.viz.svg_thumbnail import draw_thumbnail

# The largest number of instructions of a run with a picture. A notebook draws the picture of every
# result that it shows, and a large picture takes long.
_MAX_INSTRUCTIONS = 400_000
_MAX_TEXT_LENGTH = 20_000  # characters


def to_html(value: object) -> str:
    """Return the HTML of a result.

    Args:
        value: A program, a timeline, the result of a search, a memory frontier or a plan.
    """
    if isinstance(value, Timeline):
        return timeline_to_html(value)
    if isinstance(value, SearchResult):
        return search_to_html(value)
    if isinstance(value, MemoryFrontier):
        return frontier_to_html(value)
    if isinstance(value, PlanEstimate):
        return plan_to_html(value)
    assert isinstance(value, Program)
    return program_to_html(value)


def search_to_html(result: SearchResult) -> str:
    """Return the chart of the schedule that a search found, below its span and lower bound.

    Args:
        result: The result.
    """
    proof = "proved shortest" if not result.gap_to_bound else f"lower bound {result.bound:.6g}"
    facts = (
        f"length {result.span:.6g}, {proof}; {result.num_evaluated:,} schedules evaluated. Bound: "
        f"{result.explanation}"
    )
    return f"<p>{escape(facts)}</p>{timeline_to_html(result.timeline)}"


def frontier_to_html(frontier: MemoryFrontier) -> str:
    """Return a table with the shortest span and the lower bound at each memory limit.

    Args:
        frontier: The frontier.
    """
    rows = [
        [
            format_bytes(level.limit) if frontier.is_in_bytes else f"{level.limit:g} in flight",
            f"{level.timeline.span:.6g}",
            f"{level.bound:.6g}",
        ]
        for level in frontier.levels
    ]
    return _make_table(["limit of a rank", "span", "lower bound"], rows)


def plan_to_html(plan: PlanEstimate) -> str:
    """Return a table with the layout, the step time and the memory of a plan.

    Args:
        plan: The plan.
    """
    layout = {
        f.name: getattr(plan, f.name)
        for f in fields(ParallelPlan)
        if f.name in ("pp", "tp", "dp", "schedule") or getattr(plan, f.name) != f.default
    }
    parts = {f"{name} of a step": f"{time:.4g} s" for name, time in plan.breakdown._asdict().items()
             if time}  # fmt: skip
    facts = {
        **layout,
        "step time": f"{plan.step_time:.4g} s",
        **parts,
        "memory of the fullest GPU": format_bytes(plan.memory.total),
        "MFU": f"{plan.mfu:.1%}",
        "bottleneck": plan.explanation or plan.bottleneck,
    }
    return _make_table(["plan", ""], [[name, str(value)] for name, value in facts.items()])


def _make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in [("th", headings), *(("td", row) for row in rows)]
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def timeline_to_html(timeline: Timeline) -> str:
    """Return the chart of a timeline below a line with its span and bubble.

    Args:
        timeline: The timeline.

    Returns:
        HTML that needs no other file. An empty or very large timeline has no chart.
    """
    facts = escape(repr(timeline).strip("<>"))
    if not 0 < len(timeline) <= _MAX_INSTRUCTIONS:
        return f"<p>{facts}</p>"
    return f"<p>{facts}</p>{draw_thumbnail(timeline)}"


def program_to_html(program: Program) -> str:
    """Return the chart of a program at the default costs, with its text in a collapsed element.

    Args:
        program: The program.

    Returns:
        HTML that needs no other file. The HTML has an error message instead of a chart if the
        program cannot be simulated. A very large program has neither a chart nor its text.
    """
    facts = f"<p>{escape(repr(program).strip('<>'))}</p>"
    if len(program) > _MAX_INSTRUCTIONS:
        return facts
    text = to_text(program, folded=True)
    text = text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}\n..."
    text = f"<details><summary>text</summary><pre>{escape(text)}</pre></details>"
    try:
        timeline = simulate(program)
    except SchedirError as error:
        return f"{facts}<pre>{escape(str(error))}</pre>{text}"
    return timeline_to_html(timeline) + text
