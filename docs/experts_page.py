"""Generate the page about expert parallelism."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

from docs.pages import DOCS, define_page
from examples import expert_parallel


def build_blocks() -> dict[str, object]:
    """Return the output of the example, and the table of measured results."""
    with redirect_stdout(StringIO()) as out:
        expert_parallel.main()
    results, *_ = (DOCS / "results" / "experts.md").read_text().partition("\n## ")
    measured = [line for line in results.splitlines() if line.startswith("|")]
    return {"comparison": out.getvalue().rstrip(), "measured": "\n".join(measured)}


PAGES = define_page("how-to/hide-expert-parallelism", build_blocks)
