"""Tests of the handlers of instructions, which are collected from modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode
from schedir.runtime.handlers.handler_registry import HANDLERS, collect_handlers
from schedir.runtime.program_state import ProgramState


def skip(state: ProgramState, i: object) -> None:
    """A handler that is never called."""


def test_every_instruction_has_handler() -> None:
    assert HANDLERS.keys() == {row.op for row in INSTRUCTIONS}


def test_two_handlers_of_one_instruction_are_refused() -> None:
    handler: Any = skip
    first, second = (
        SimpleNamespace(__name__=name, HANDLERS={Opcode.Forward: handler}) for name in "ab"
    )
    assert collect_handlers([first]) == {Opcode.Forward: handler}
    with pytest.raises(ImportError, match="b has a handler of Forward, and so has a"):
        collect_handlers([first, second])
