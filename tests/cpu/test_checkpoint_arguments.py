"""Tests of the arguments of `save` and `load`: valid forms are accepted, others are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import schedir
from schedir.checkpoints import load, save
from schedir.errors import CheckpointError
from schedir.runtime import InProcessExecutor


def make_run() -> InProcessExecutor:
    return InProcessExecutor(
        schedir.compile("one_f_one_b", ranks=1, microbatches=2),
        [nn.Linear(2, 2)],
        loss=nn.functional.mse_loss,
        boundary=(1, 2),
        optimizer=torch.optim.SGD,
    )


def test_step_may_be_integer_of_numpy(tmp_path: Path) -> None:
    run = make_run()
    save(run, tmp_path, step=np.int64(7))  # type: ignore[arg-type]
    state = load(run, tmp_path, step=np.int64(7))  # type: ignore[arg-type]
    assert state == {"step": 7, "extra": {}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 1.5}, r"keep must be an integer of 1 or more, not 1\.5"),
        ({"extra_state": {1: 2}}, "the keys of extra_state must be text, not 1"),
        (
            {"extra_state": {"lr": math.nan}},
            "extra_state must .* JSON values only, but 'lr' is nan",
        ),
        ({"extra_state": {"a": {1: 2}}}, r"but 'a' is {1: 2}: keys must be text, not 1"),
        ({"name_map": lambda name: name}, r"name_map must take \(stage, name\), .* takes \(name\)"),
    ],
    ids=["keep", "key", "not finite", "nested key", "name_map"],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(make_run(), tmp_path, step=1, **arguments)
