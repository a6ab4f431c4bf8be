"""Tests of the bytes of a transformer layer against the printed formulas of arXiv 2205.05198."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import activation_bytes_per_layer
from schedir.errors import UsageError
from schedir.predict.activation_bytes import ACTIVATION_TERMS, compute_layer_terms

GOLDEN = Path(__file__).parents[1] / "golden" / "rar_table2_activation_memory.csv"
LINES = [line.partition(",") for line in GOLDEN.read_text().splitlines() if line[0] != "#"]
FORMULAS = {name: formula for name, _, formula in LINES[1:]}
HOW: dict[str, dict[str, Any]] = {
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
def test_the_table_of_the_paper(name: str, s: int, b: int, h: int, a: int, t: int) -> None:
    how = {"tp": t} | HOW[name]
    printed = eval(FORMULAS[name], {}, {"s": s, "b": b, "h": h, "a": a, "t": how["tp"]})
    assert activation_bytes_per_layer(s, b, h, a, **how) == pytest.approx(printed)
    if how.get("recompute") != "full":
        assert len(compute_layer_terms(s, b, h, a, **how)) == len(ACTIVATION_TERMS) - 3 * (
            "recompute" in how
        )


def test_the_table_has_all_rows() -> None:
    assert FORMULAS.keys() == HOW.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence", 0), ("microbatch_size", -1), ("hidden", 1.5), ("heads", True), ("tp", 0),
     ("recompute", "half"), ("recompute", True)],
)  # fmt: skip
def test_what_is_no_size(name: str, value: Any) -> None:
    given: Any = {"sequence": 8, "microbatch_size": 1, "hidden": 8, "heads": 2}
    with pytest.raises(UsageError) as caught:
        activation_bytes_per_layer(**given | {name: value})
    assert caught.value.fields == (name,)
