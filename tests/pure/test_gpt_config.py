"""Tests of the GPT configuration, and of the division of layers and heads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import UsageError
from schedir.models.gpt_config import GPTConfig, split_heads, split_layers
from schedir.models.llama_config import LlamaConfig
from schedir.models.window_config import get_windows


@given(layers=st.integers(1, 40), stages=st.integers(1, 40))
def test_layers_are_divided_evenly_or_refused(layers: int, stages: int) -> None:
    if layers % stages:
        with pytest.raises(UsageError) as error:
            split_layers(layers, stages)
        assert bool(error.value.hint) == (layers > stages)
        return
    counts = split_layers(layers, stages)
    assert counts == (layers // stages,) * stages
    assert split_layers(layers, stages, counts) == counts


def test_layer_error_hints_at_division() -> None:
    with pytest.raises(UsageError) as error:
        split_layers(10, 4)
    assert "[3, 3, 2, 2]" in error.value.hint
    assert split_layers(10, 4, [3, 3, 2, 2]) == (3, 3, 2, 2)


@pytest.mark.parametrize("division", [(2, 2), (1, 1, 1), (3, 0, 1), (5, -1, 0), ()])
def test_invalid_layer_division_is_refused(division: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        split_layers(4, 3, division)


def test_zero_stages_are_refused() -> None:
    with pytest.raises(UsageError):
        split_layers(4, 0)


def test_heads_are_divided_evenly_or_refused() -> None:
    assert split_heads(12, 4) == 3
    with pytest.raises(UsageError):
        split_heads(4, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": 0}, {"heads": 3}, {"vocab": -1}, {"layers": 0},
        {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": float("nan")},
        {"window": -1}, {"window": 2.5}, {"window": None}, {"window": (4, 0, 0)},
        {"window": (8, 8, 8, 8, 8)}, {"stride": 0, "window": 8}, {"stride": 9, "window": 8},
        {"stride": 2}, {"stride": (1, 1, 1, 3), "window": (0, 0, 0, 2)},
        {"stride": (1, 1), "window": 8}, {"window": True}, {"window": [4] * 4},
    ],
)  # fmt: skip
def test_invalid_gpt_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        GPTConfig(**wrong)


def test_windows_and_strides_of_layers() -> None:
    """A single number applies to all layers. A window of the whole sequence counts as no window."""
    assert get_windows(GPTConfig()) == (None,) * 4
    assert get_windows(GPTConfig(window=32, stride=8)) == ((32, 8),) * 4
    assert get_windows(GPTConfig(window=128)) == (None,) * 4
    windows = get_windows(GPTConfig(window=(32, 0, 64, 200), stride=32))
    assert windows == ((32, 32), None, (64, 32), None)


@pytest.mark.parametrize("wrong", [{"window": -1}, {"stride": 2}, {"window": (8, 8)}])
def test_llama_config_has_same_windows(wrong: dict[str, Any]) -> None:
    assert get_windows(LlamaConfig(window=32, stride=8)) == ((32, 8),) * 4
    with pytest.raises(UsageError, match=next(iter(wrong))):
        LlamaConfig(**wrong)
