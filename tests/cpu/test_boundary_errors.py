"""Tests that a wrong tensor between stages causes an error that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.sequential_reference import run_sequential
from tests.cpu.function_stages import (
    COUNT,
    FLOAT_AND_INT_BOUNDARIES,
    TWO_FLOAT_BOUNDARIES,
    FunctionStage,
    X,
    make_executor,
    multiply_first_input,
    return_two_outputs,
)
from tests.cpu.test_argument_forms import read_error

GOLDEN = Path(__file__).parents[1] / "golden" / "boundaries.txt"


def step(
    run: Any = return_two_outputs, *others: Any, inputs: Any = X, keywords: Any = (), **how: Any
) -> object:
    """Run a step of several stages. By default, the last stage multiplies."""
    runs = run, *(others or [multiply_first_input])
    return make_executor(*runs, **how).step(inputs, X, keywords=keywords)


EDGES = {0: FLOAT_AND_INT_BOUNDARIES, 1: (4,)}
WRONG: dict[str, Callable[[], object]] = {
    "nothing": lambda: step(lambda w, x: None),
    "a dict": lambda: step(lambda w, x: {"x": w * x}),
    "one less": lambda: step(lambda w, x: w * x),
    "one more": lambda: step(lambda w, x: (w * x, COUNT, COUNT)),
    "two for one": lambda: step(boundary=(4,)),
    "another type": lambda: step(lambda w, x: (w * x, COUNT.int())),
    "another shape": lambda: step(lambda w, x: (w * x, COUNT[:3])),
    "no tensor": lambda: step(lambda w, x: (w * x, 3)),
    "attached": lambda: step(
        lambda w, x: (w * x, w), boundary=(Boundary((4,)), Boundary((4,), requires_grad=False))
    ),
    "detached": lambda: step(lambda w, x: (w * x, x), boundary=TWO_FLOAT_BOUNDARIES),
    "from nothing": lambda: step(
        lambda w, x: (w * x, w), lambda w, x, y: w * 2, boundary=TWO_FLOAT_BOUNDARIES
    ),
    "no gradient": lambda: step(lambda w, x: COUNT, boundary=FLOAT_AND_INT_BOUNDARIES[1]),
    "gradients of numbers": lambda: Boundary((4,), torch.int64, True),
    "a gradient by name": lambda: Boundary((4,), requires_grad="yes"),  # type: ignore[arg-type]
    "an edge less": lambda: step(return_two_outputs, *[multiply_first_input] * 3, boundary=EDGES),
    "an edge more": lambda: step(boundary=EDGES),
    "inputs by name": lambda: step(inputs=[{"x": X}] * 2),
    "one mapping": lambda: step(keywords={"mask": X}),
    "no mappings": lambda: step(keywords=[X, X]),
    "names of numbers": lambda: step(keywords=[{1: X}] * 2),
    "keywords of one": lambda: step(keywords=[{"mask": X}]),
    "keywords of a reference": lambda: run_sequential(
        [nn.Identity()], X, X, loss=nn.MSELoss(), keywords=[{}]
    ),
    "a written keyword": lambda: step(
        return_two_outputs, lambda w, x, n, m: w * x * m.zero_(), keywords=[{"m": X[0].clone()}] * 2
    ),
    "a dict of a reference": lambda: run_sequential(
        [FunctionStage(lambda w, x: {"x": x}), nn.Identity()], X, X, loss=nn.MSELoss()
    ),
}


def test_wrong_boundary_tensors_raise_expected_errors() -> None:
    errors = "".join(f"{name}\n  {read_error(call)}\n" for name, call in WRONG.items())
    assert errors == GOLDEN.read_text()
