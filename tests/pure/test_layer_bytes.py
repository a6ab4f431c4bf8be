"""Tests of the bytes of a transformer layer against the printed formulas of arXiv 2205.05198."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import activation_bytes_per_layer
from schedir.errors import UsageError
from schedir.predict.layer_activation_bytes import ACTIVATION_TERMS, compute_layer_terms

GOLDEN = Path(__file__).parents[1] / "golden" / "rar_table2_activation_memory.csv"
LINES = [line.partition(",") for line in GOLDEN.read_text().splitlines() if line[0] != "#"]
FORMULAS = {name: formula for name, _, formula in LINES[1:]}
OPTIONS: dict[str, dict[str, Any]] = {
    "no parallelism": {"tp": 1},
    "tensor parallel (baseline)": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+selective": {"recompute": "selective"},
    "tensor+sequence+selective": {"sequence_parallel": True, "recompute": "selective"},
    "full recomputation": {"recompute": "full"},
}
SIZE = st.integers(1, 10**4)


@pytest.mark.parametrize("name", FORMULAS)
@given(s=SIZE, b=SIZE, h=SIZE, a=SIZE, t=st.integers(1, 64))
def test_activation_bytes_match_published_formulas(
    name: str, s: int, b: int, h: int, a: int, t: int
) -> None:
    options = {"tp": t} | OPTIONS[name]
    printed = eval(FORMULAS[name], {}, {"s": s, "b": b, "h": h, "a": a, "t": options["tp"]})
    assert activation_bytes_per_layer(s, b, h, a, **options) == pytest.approx(printed)
    if options.get("recompute") != "full":
        assert len(compute_layer_terms(s, b, h, a, **options)) == len(ACTIVATION_TERMS) - 3 * (
            "recompute" in options
        )


def test_published_table_is_complete() -> None:
    assert FORMULAS.keys() == OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence", 0), ("microbatch_size", -1), ("hidden", 1.5), ("heads", True), ("tp", 0),
     ("recompute", "half"), ("recompute", True)],
)  # fmt: skip
def test_invalid_argument_is_refused(name: str, value: Any) -> None:
    arguments: Any = {"sequence": 8, "microbatch_size": 1, "hidden": 8, "heads": 2}
    with pytest.raises(UsageError) as caught:
        activation_bytes_per_layer(**arguments | {name: value})
    assert caught.value.fields == (name,)
