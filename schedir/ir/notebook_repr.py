"""Register the function that shows results in notebooks.

A notebook calls `_repr_html_` of a result, such as a Program.  The code that draws results is in
`schedir.viz`, which imports the classes of results.  To avoid a circular import, `schedir.viz`
registers its function here.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

_RENDERERS: list[Callable[[object], str]] = [lambda shown: f"<pre>{escape(repr(shown))}</pre>"]


def register_renderer(render: Callable[[object], str]) -> None:
    """Set the function that makes the HTML of results.

    Args:
        render: A function that returns the HTML of a result, such as a Program or a Timeline.
    """
    _RENDERERS[:] = [render]


def render_html(value: object) -> str:
    """Return the HTML that a notebook shows for an object.

    Args:
        value: A result whose class calls this function in `_repr_html_`.
    """
    return _RENDERERS[0](value)
