"""Generate the page about expert parallelism."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

from docs.pages import define_page
from examples import expert_parallel


def build_blocks() -> dict[str, object]:
    """Return the output of the example."""
    with redirect_stdout(StringIO()) as out:
        expert_parallel.main()
    return {"comparison": out.getvalue().rstrip()}


PAGES = define_page("how-to/hide-expert-parallelism", build_blocks)
