"""What pages for readers show in Python and needs torch."""

import pytest

from tests.tutorial import READERS, ROOT, steps

BLOCKS = [
    (name, step.text)
    for name in READERS
    for step in steps((ROOT / "docs" / f"{name}.md").read_text())
    if step.kind == "python" and step.needs_torch
]


@pytest.mark.parametrize("text", [text for _, text in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_block_runs(text: str) -> None:
    exec(compile(text, "page", "exec"), {})
