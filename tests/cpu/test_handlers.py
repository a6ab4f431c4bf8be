"""Handlers, as they are found in modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from schedir.ir.isa.instructions import ROWS, Opcode
from schedir.runtime.handlers.handler_registry import HANDLERS, found_in
from schedir.runtime.rank_state import State


def skip(state: State, i: object) -> None:
    """A link that nobody calls."""


def test_every_row_has_one() -> None:
    assert HANDLERS.keys() == {row.op for row in ROWS}


def test_two_of_one_instruction_are_refused() -> None:
    handler: Any = skip
    one, other = (
        SimpleNamespace(__name__=name, HANDLERS={Opcode.Forward: handler}) for name in "ab"
    )
    assert found_in([one]) == {Opcode.Forward: handler}
    with pytest.raises(ImportError, match="b has a handler of Forward, and so has a"):
        found_in([one, other])
