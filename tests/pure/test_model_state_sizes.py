"""Tests of the sizes of parameters, gradients and optimizer states, separately or as one sum.

They include the sizes with ZeRO.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, Sizes, compile, simulate, zero_model_states
from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints
from schedir.errors import MemoryLimitError, UsageError
from schedir.ir.cost.sizes import STATIC_SIZES
from schedir.schedules import gpipe, one_f_one_b
from schedir.viz import gantt
from schedir.viz.time_bins import compute_memory_curve

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE = [
    line.split(",")
    for line in (GOLDEN / "zero_table1_memory_GB.csv").read_text().splitlines()
    if line[0].isdigit()
]
CELLS = [
    (float(billions), int(dp), zero, printed)
    for billions, dp, *row in TABLE
    for zero, printed in enumerate(row, 1)
]


def test_separate_sizes_equal_their_sum_in_memory() -> None:
    """The curves are equal, and each size has its own row."""
    program = compile(one_f_one_b, PipelineShape(2, 4))
    sizes: dict[str, Any] = {"params": (1, 2), "grads": (2, 4), "optimizer": 6}
    sizes["buffers"] = (0, 0.5)
    separate = Sizes(activation=3, saved=10, **sizes)
    summed = Sizes(activation=3, saved=10, model_states=(9.0, 12.5))
    assert separate.for_stages("model_states", 2).tolist() == [9, 12.5]
    for footprint, summed_footprint in zip(
        compute_footprints(program, separate), compute_footprints(program, summed), strict=True
    ):
        assert footprint.total_bytes.tolist() == summed_footprint.total_bytes.tolist()
    rows = compute_footprints(program, separate)[1].static_memory
    assert {name: rows[name] for name in STATIC_SIZES} == {
        "params": (1, 2), "grads": (1, 4), "optimizer": (1, 6), "buffers": (1, 0.5)
    }  # fmt: skip
    assert "model_states" not in rows
    assert compute_footprints(program, summed)[1].static_memory["model_states"] == (1, 12.5)
    curve = simulate(program, Costs(), sizes=separate).memory[0]
    assert np.sum([*curve.by_kind.values()], 0).tolist() == curve.total.tolist()


def test_pictures_and_tables_show_separate_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory curve of each rank has a layer for each part, and tables have a column."""
    sizes = Sizes(saved=1, params=2, grads=1, optimizer=(3, 9))
    run = simulate(compile(one_f_one_b, PipelineShape(2, 4)), sizes=sizes)
    floors = {name: tops.tolist() for name, tops in compute_memory_curve(run).static_layers.items()}
    assert floors == {"params": [2, 2], "grads": [3, 3], "optimizer": [6, 12]}
    figure = gantt(run, show=("memory",))
    assert "optimizer" in [text.get_text() for text in figure.axes[0].texts]
    options = "--ranks=2", "--microbatches=4", "--sizes=saved=1,params=2,grads=1,optimizer=3:9"
    assert main(["simulate", "one_f_one_b", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == [3, 9]
    summed = simulate(
        compile(one_f_one_b, PipelineShape(2, 4)), sizes=Sizes(saved=1, model_states=9)
    )
    assert summed.static_memory == {} and compute_memory_curve(summed).static_layers == {}


@pytest.mark.parametrize("name", STATIC_SIZES)
def test_model_states_with_separate_size_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sizes(model_states=0, **{name: 1})
    assert caught.value.fields == ("model_states", name)
    assert Sizes(**{name: (1, 2)}).static_sizes == (name,)
    assert Sizes().static_sizes == Sizes(model_states=1).static_sizes == ("model_states",)


def test_memory_limit_counts_all_sizes() -> None:
    sizes = Sizes(saved=1, params=2, grads=3, optimizer=4, buffers=5)
    compile(gpipe, PipelineShape(1, 2), sizes=sizes, memory_limit=16)
    with pytest.raises(MemoryLimitError) as caught:
        compile(gpipe, PipelineShape(1, 2), sizes=sizes, memory_limit=15)
    assert {name for name, _, _ in caught.value.live_values} == {"saved", *STATIC_SIZES}


# ---------------------------------------------------------------- ZeRO


@pytest.mark.parametrize(("billions", "dp", "zero", "printed"), CELLS)
def test_zero_model_states_match_published_table(
    billions: float, dp: int, zero: int, printed: str
) -> None:
    """Each cell of Table 1 of arXiv 1910.02054 is within one unit of its last digit."""
    digits = len(printed.partition(".")[2])
    psi = billions  # units of 10^9 parameters, and so of 10^9 bytes
    total = zero_model_states(2 * psi, 2 * psi, 12 * psi, zero=zero, dp=dp).total
    assert abs(total - float(printed)) <= 10.0**-digits


def test_published_table_is_complete() -> None:
    assert len(CELLS) == 54


@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    dp=st.integers(1, 64),
    item=st.tuples(*[st.integers(1, 16)] * 3),
)
def test_padded_shards_hold_all_parameters(
    numbers: list[int], dp: int, item: tuple[int, int, int]
) -> None:
    """Shards have whole numbers of parameters, hold all of them, and pad by less than one each."""
    params, grads, optimizer = ([k * n for n in numbers] for k in item)
    for zero in range(4):
        states = zero_model_states(
            params, grads, optimizer, zero=zero, dp=dp, parameter_counts=numbers
        )
        for level, k, bytes_per_replica in zip((3, 2, 1), item, states, strict=True):
            if zero < level or dp == 1:
                assert bytes_per_replica.tolist() == [k * n for n in numbers]
                continue
            shards = np.round(bytes_per_replica / k)
            assert np.allclose(shards * k, bytes_per_replica)
            assert (shards * dp >= numbers).all() and (shards * dp < np.array(numbers) + dp).all()


@pytest.mark.parametrize(
    ("how", "field"),
    [({"zero": 4}, "zero"), ({"zero": -1}, "zero"), ({"zero": True}, "zero"), ({"dp": 0}, "dp"),
     ({"dp": 2.0}, "dp")],
)  # fmt: skip
def test_invalid_zero_or_dp_is_refused(how: dict[str, int], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        zero_model_states(2, 2, 12, **{"zero": 1, "dp": 2, **how})
    assert caught.value.fields == (field,)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(UsageError):
        zero_model_states(-2, 2, 12, zero=1, dp=2)
