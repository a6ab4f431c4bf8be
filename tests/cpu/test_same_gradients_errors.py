"""Tests of errors of assert_same_gradients, also for ranks that fail, die or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from schedir.errors import ExecutionError, SchedirError
from schedir.testing import assert_same_gradients
from tests.cases import campaign
from tests.cpu.torch_pipelines import WIDTH, make_batch, make_model

GOLDEN = Path(__file__).parents[1] / "golden" / "gradients.txt"
assert_same = partial(assert_same_gradients, ranks=2, microbatches=4, loss_fn=mse_loss, timeout=60)


def test_error_of_failed_rank_is_shown_once() -> None:
    def fails(rank: int, ranks: int, model: Any, batch: Any) -> None:
        if rank == 1:
            raise ValueError("no such thing")
        dist.barrier()

    with pytest.raises(ExecutionError) as caught:
        assert_same(fails, make_model(2), make_batch())
    text = str(caught.value)
    assert text.startswith("step failed on rank 1: ValueError: no such thing")
    assert text.count("in fails") == 1 and "rank 0" not in text


def test_dead_rank_is_named() -> None:
    def dies(rank: int, ranks: int, model: Any, batch: Any) -> None:
        if rank == 1:
            os._exit(3)
        dist.barrier()

    message = "rank 1: died without an error report, with exit code 3"
    with pytest.raises(ExecutionError, match=message):
        assert_same(dies, make_model(2), make_batch())


def test_hang_error_has_location_of_rank() -> None:
    def hangs(rank: int, ranks: int, model: Any, batch: Any) -> None:
        if rank == 1:
            time.sleep(1000)

    with pytest.raises(ExecutionError) as caught:
        assert_same(hangs, make_model(2), make_batch(), timeout=8)
    first, location = str(caught.value).splitlines()
    assert first == "rank 1 did not finish the step in 8 s"
    assert "rank 1 is at" in location and "in hangs" in location


def plain_step(rank: int, ranks: int, model: Any, batch: Any) -> None:
    mse_loss(model(batch[0]), batch[1]).backward()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "s").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_processes_are_spawned_if_caller_has_process_group() -> None:
    """Only a spawned process must pickle the step."""
    with pytest.raises(SchedirError, match="start_method 'spawn' must pickle it"):
        assert_same(lambda *_: None, make_model(1), make_batch(), ranks=1)


@campaign
@pytest.mark.usefixtures("process_group")
def test_process_group_of_caller_is_unchanged() -> None:
    """Forked processes would share the connections of the group, so processes are spawned."""
    assert_same(plain_step, make_model(1), make_batch(), ranks=1)


LINEAR = nn.Linear(WIDTH, WIDTH)
WRONG_ARGUMENTS: dict[str, dict[str, Any]] = {
    "no step": {"step": 3},
    "no model": {"model": "gpt2"},
    "a model that is elsewhere": {"model": nn.Linear(6, 6, device="meta")},
    "a batch of one tensor": {"batch": torch.zeros(8, WIDTH)},
    "a batch too short": {"batch": make_batch(2)},
    "no number of microbatches": {"microbatches": None},
    "a list that is cut already": {"batch": [make_batch(2), make_batch(2)]},
    "another reduction": {"reduction": "median"},
    "no ranks": {"ranks": 0},
    "replicas of unequal shares": {"replicas": 3},
    "no time": {"timeout": None},
    "no tolerance": {"tolerance": float("nan")},
    "another start": {"start_method": "forkserver"},
    "dropout": {"model": nn.Sequential(LINEAR, nn.Dropout())},
    "a loss of many numbers": {"loss_fn": lambda y, t: y - t},
    "no loss": {"loss_fn": None, "batch": make_batch()[0]},
    "frozen": {"model": nn.Linear(WIDTH, WIDTH).requires_grad_(False)},
    "a step that does nothing": {},
    "a step that steps": {"step": lambda r, P, model, b: (nn.init.zeros_(model.bias), None)[1]},
    "a step that returns losses": {"step": lambda r, P, model, b: [0.25]},
    "another name": {"step": lambda r, P, model, b: {"weihgt": None}},
    "a slice": {"step": lambda r, P, model, b: {"weight": torch.zeros(3, WIDTH)}},
    "a function of nowhere": {"start_method": "spawn", "step": lambda *_: None},
}


def test_wrong_arguments_are_refused_with_golden_errors() -> None:
    errors = ""
    for name, arguments in WRONG_ARGUMENTS.items():
        usual: dict[str, Any] = {"step": lambda *_: None, "model": LINEAR, "ranks": 1}
        with pytest.raises(SchedirError) as error:
            assert_same(**usual | {"batch": make_batch()} | arguments)
        errors += f"{name}\n  {type(error.value).__name__}: {error.value}\n"
    assert errors == GOLDEN.read_text()
