"""Golden text.  Each file holds what it is checked against; a new test is a new file.

`golden/*.sched`: a program, and in its first line (a comment) the call that compiles it.
`golden/refused/*.txt`: a program (or what should be one), a line of dashes, and the message.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import schedir
from schedir.check import check
from schedir.errors import ProgramError
from schedir.graph import MODELS
from schedir.text import parse, show

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = {**vars(schedir), **vars(schedir.schedules), "partial": partial}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sched")), ids=lambda p: p.stem)
def test_program(path: Path) -> None:
    text = path.read_text()
    call, body = text.split("\n", 1)
    program = eval(call.removeprefix("# "), dict(NAMES))
    assert show(program) == body
    assert parse(text) == program
    for model in MODELS:
        check(parse(text), model)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("refused/*.txt")), ids=lambda p: p.stem)
def test_refused(path: Path) -> None:
    text, message = re.split(r"^-+\n", path.read_text(), maxsplit=1, flags=re.M)
    with pytest.raises(ProgramError) as caught:
        check(parse(text))
    assert str(caught.value) + "\n" == message
