"""Register the function that draws programs and timelines in notebooks.

A notebook asks the object itself, and pictures are made further up: so these register here.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

_RENDERERS: list[Callable[[object], str]] = [lambda shown: f"<pre>{escape(repr(shown))}</pre>"]


def register_renderer(render: Callable[[object], str]) -> None:
    """From now on `render` makes the HTML of Programs and Timelines."""
    _RENDERERS[:] = [render]


def render_html(value: object) -> str:
    """The HTML of an object."""
    return _RENDERERS[0](value)
