"""Arguments of another kind than a function of Python takes: one error that says what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedir import Costs, F, Plan, check, compile, draft, show, simulate, torch_csv
from schedir.errors import ProgramError
from schedir.schedules import one_f_one_b
from schedir.text import parse

PLAN = Plan(2, 4)
PROGRAM = compile(one_f_one_b, PLAN)
KINDS: list[Any] = [
    None,
    3,
    {},
    [1],
    np.arange(3),
    Plan,
    PLAN,
    one_f_one_b,
    PROGRAM,
    Costs(),
    Costs,
    F,
    "x",
]
TAKES: dict[str, tuple[Callable[[Any], object], tuple[type, ...]]] = {
    "compile": (lambda v: compile(one_f_one_b, v), (Plan,)),
    "compile for": (lambda v: compile(one_f_one_b, PLAN, model=v), ()),
    "check": (check, ()),
    "check under": (lambda v: check(PROGRAM, v), ()),
    "simulate": (lambda v: simulate(v), ()),
    "simulate under": (lambda v: simulate(PROGRAM, model=v), ()),
    "draft": (lambda v: draft(one_f_one_b, v), (Plan,)),
    "show": (show, ()),
    "parse": (parse, ()),
    "torch_csv.parse": (torch_csv.parse, ()),
}


@pytest.mark.parametrize("value", KINDS, ids=lambda v: getattr(v, "__name__", type(v).__name__))
@pytest.mark.parametrize("name", TAKES)
def test_a_wrong_kind_is_one_error(name: str, value: Any) -> None:
    call, fine = TAKES[name]
    programs = name in ("check", "simulate", "show") and value is PROGRAM
    if isinstance(value, fine) or programs:
        call(value)
        return
    with pytest.raises(ProgramError) as error:
        call(value)
    assert " at 0x" not in str(error.value)
