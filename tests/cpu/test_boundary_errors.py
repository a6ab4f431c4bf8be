"""Tests that a wrong tensor between stages causes an error that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedir.errors import ExecutionError, ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.sequential_reference import run_sequential
from tests.cpu.function_stages import BOTH, COUNT, TWO, Made, X, last, ranks, two

GOLDEN = Path(__file__).parents[1] / "golden" / "boundaries.txt"


def step(*runs: Callable[..., Any], inputs: Any = X, keywords: Any = (), **how: Any) -> object:
    return ranks(*runs, **how).step(inputs, X, keywords=keywords)


WRONG: dict[str, Callable[[], object]] = {
    "nothing": lambda: step(lambda w, x: None, last),
    "a dict": lambda: step(lambda w, x: {"x": w * x}, last),
    "one less": lambda: step(lambda w, x: w * x, last),
    "one more": lambda: step(lambda w, x: (w * x, COUNT, COUNT), last),
    "two for one": lambda: step(two, last, boundary=(4,)),
    "another type": lambda: step(lambda w, x: (w * x, COUNT.int()), last),
    "another shape": lambda: step(lambda w, x: (w * x, COUNT[:3]), last),
    "no tensor": lambda: step(lambda w, x: (w * x, 3), last),
    "attached": lambda: step(
        lambda w, x: (w * x, w),
        last,
        boundary=(Boundary((4,)), Boundary((4,), requires_grad=False)),
    ),
    "detached": lambda: step(lambda w, x: (w * x, x), last, boundary=BOTH),
    "from nothing": lambda: step(lambda w, x: (w * x, w), lambda w, x, y: w * 2, boundary=BOTH),
    "no gradient": lambda: step(lambda w, x: COUNT, last, boundary=TWO[1]),
    "gradients of numbers": lambda: Boundary((4,), torch.int64, True),
    "a gradient by name": lambda: Boundary((4,), requires_grad="yes"),  # type: ignore[arg-type]
    "an edge less": lambda: step(two, last, last, last, boundary={0: TWO, 1: (4,)}),
    "an edge more": lambda: step(two, last, boundary={0: TWO, 1: (4,)}),
    "inputs by name": lambda: step(two, last, inputs=[{"x": X}] * 2),
    "one mapping": lambda: step(two, last, keywords={"mask": X}),
    "no mappings": lambda: step(two, last, keywords=[X, X]),
    "names of numbers": lambda: step(two, last, keywords=[{1: X}] * 2),
    "keywords of one": lambda: step(two, last, keywords=[{"mask": X}]),
    "keywords of a reference": lambda: run_sequential(
        [nn.Identity()], X, X, loss=nn.MSELoss(), keywords=[{}]
    ),
    "a written keyword": lambda: step(
        two, lambda w, x, n, m: w * x * m.zero_(), keywords=[{"m": X[0]}] * 2
    ),
    "a dict of a reference": lambda: run_sequential(
        [Made(lambda w, x: {"x": x}), Made(last)], X, X, loss=nn.MSELoss()
    ),
}


def read_error(call: Callable[[], object]) -> str:
    with pytest.raises((ModelError, ExecutionError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def test_wrong_boundary_tensors_raise_expected_errors() -> None:
    errors = "".join(f"{name}\n  {read_error(call)}\n" for name, call in WRONG.items())
    assert errors == GOLDEN.read_text()
