"""Test the generated pages that need torch. `pure/test_docs.py` tests the others."""

from __future__ import annotations

from pathlib import Path

from docs.generate import PAGES

DOCS = Path(__file__).parents[2] / "docs"


def test_api_page_is_current() -> None:
    name = "reference/api.md"
    assert (DOCS / name).read_text() == PAGES[name](), "run: python docs/generate.py"
