"""Small pictures of a Program or a Timeline in notebooks."""

from __future__ import annotations

from html import escape

from schedir.errors import SchedirError
from schedir.ir.program import Program
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.viz.svg_thumbnail import draw_thumbnail

# Larger runs have no picture, because a notebook draws them without a request of the user.
_MAX_INSTRUCTIONS = 400_000
_MAX_TEXT_LENGTH = 20_000  # characters


def to_html(value: object) -> str:
    """Return the HTML of a Program or a Timeline.

    Args:
        value: The program or the timeline.
    """
    if isinstance(value, Timeline):
        return timeline_to_html(value)
    assert isinstance(value, Program)
    return program_to_html(value)


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
    """Return the chart of a program at unit costs, with its text in a collapsed element.

    Args:
        program: The program.

    Returns:
        HTML that needs no other file. It has an error message instead of a chart if the program
        cannot be simulated.
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
