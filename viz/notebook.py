"""Small pictures of a Program or a Timeline in notebooks."""

from __future__ import annotations

from html import escape

from schedir.errors import SchedirError
from schedir.ir.program import Program
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.viz.svg_thumbnail import svg

_MOST = 400_000  # instructions, beyond which nothing is shown that nobody asked for
_TEXT = 20_000  # letters


def of(shown: object) -> str:
    """The HTML of a Program or a Timeline."""
    if isinstance(shown, Timeline):
        return of_timeline(shown)
    assert isinstance(shown, Program)
    return of_program(shown)


def of_timeline(timeline: Timeline) -> str:
    """The chart of a run, under a line of figures; HTML that stands alone."""
    facts = escape(repr(timeline).strip("<>"))
    if not 0 < len(timeline) <= _MOST:
        return f"<p>{facts}</p>"
    return f"<p>{facts}</p>{svg(timeline)}"


def of_program(program: Program) -> str:
    """The chart of a program at unit costs, and its text to unfold; HTML that stands alone."""
    facts = f"<p>{escape(repr(program).strip('<>'))}</p>"
    if len(program) > _MOST:
        return facts
    text = to_text(program, folded=True)
    text = text if len(text) <= _TEXT else f"{text[:_TEXT]}\n..."
    text = f"<details><summary>text</summary><pre>{escape(text)}</pre></details>"
    try:
        timeline = simulate(program)
    except SchedirError as error:
        return f"{facts}<pre>{escape(str(error))}</pre>{text}"
    return of_timeline(timeline) + text
