"""The page about expert parallelism, with the table that its example prints."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

from docs.pages import page
from examples import expert_parallel


def blocks() -> dict[str, object]:
    """Return what the example prints."""
    with redirect_stdout(StringIO()) as out:
        expert_parallel.main()
    return {"comparison": out.getvalue().rstrip()}


PAGES = page("how-to/hide-expert-parallelism", blocks)
