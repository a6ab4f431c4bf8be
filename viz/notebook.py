"""Small pictures of a Program or a Timeline in notebooks."""

from __future__ import annotations

from html import escape

from schedir.errors import SchedirError
from schedir.ir.program import Program
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.viz.svg_thumbnail import draw_thumbnail

_MAX_INSTRUCTIONS = 400_000  # instructions, beyond which nothing is shown that nobody asked for
_MAX_TEXT_LENGTH = 20_000  # letters


def to_html(value: object) -> str:
    """The HTML of a Program or a Timeline."""
    if isinstance(value, Timeline):
        return timeline_to_html(value)
    assert isinstance(value, Program)
    return program_to_html(value)


def timeline_to_html(timeline: Timeline) -> str:
    """The chart of a run, under a line of figures; HTML that stands alone."""
    facts = escape(repr(timeline).strip("<>"))
    if not 0 < len(timeline) <= _MAX_INSTRUCTIONS:
        return f"<p>{facts}</p>"
    return f"<p>{facts}</p>{draw_thumbnail(timeline)}"


def program_to_html(program: Program) -> str:
    """The chart of a program at unit costs, and its text to unfold; HTML that stands alone."""
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
