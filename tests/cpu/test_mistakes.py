"""Tests of common mistakes with modules, processes and torch.distributed.pipelining."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from schedir import compile
from schedir.checkpoints import load, save
from schedir.errors import ExecutionError, SchedirError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import Executor, GlooTransport, InProcessExecutor
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule
from tests.cpu.gloo_processes import run, run_fresh
from tests.cpu.torch_pipelines import WIDTH, make_model
from tests.cpu.train_command import Run

PROGRAM = compile("one_f_one_b", PipelineShape(2, 4))


def create_alone(rank: int, what: str) -> str:
    """Return the error of process 0, which creates an object that process 1 does not create."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    if what == "a GlooTransport" and rank:
        return ""
    try:
        transport = GlooTransport(PROGRAM, group=group)
        if not rank:
            Executor(PROGRAM, 0, {0: nn.Linear(8, 8)}, transport, loss=mse_loss, boundary=(2, 8))
    except ExecutionError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("what", ["a GlooTransport", "an Executor"])
def test_object_created_on_one_rank_is_refused(what: str) -> None:
    error, _ = run_fresh(create_alone, 2, what)
    assert f"while this process created {what}" in error
    assert f"all processes of the group must create {what} at the same place" in error


def find_drop_in_errors(_: int, runtime: str) -> dict[str, str]:
    """Return the errors of steps in one process."""
    x, y = torch.ones(2 * N_MICROBATCHES, WIDTH), torch.ones(2 * N_MICROBATCHES, WIDTH)
    errors = {}
    for name, options, target in (
        ("no inputs", {}, None),
        ("no loss", {"loss_fn": None}, y),
        ("short target", {}, torch.ones(3 * N_MICROBATCHES, WIDTH)),
        ("no reduction", {"loss_fn": nn.MSELoss(reduction="none")}, y),
        ("dict", {}, {"y": y}),
    ):
        parts = dict(enumerate(make_model(2)))
        schedule = make_schedule(parts, 2, schedule="interleaved", runtime=runtime, **options)
        try:
            schedule.step(*[x] * (target is not None), target=y if target is None else target)
            errors[name] = "accepted"
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            is_own = isinstance(error, SchedirError)
            errors[name] = "\n".join([f"{is_own} {error}", *notes])
    return errors


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_drop_in_errors_explain_losses_and_targets(runtime: str) -> None:
    (errors,) = run(find_drop_in_errors, 1, runtime)
    assert "got no inputs, but this rank has stage 0, which needs them" in errors["no inputs"]
    assert "interleaved: step got a target, but loss_fn is None" in errors["no loss"]
    assert "must return a floating-point tensor with one element" in errors["no reduction"]
    assert "target must be a tensor, not a dict" in errors["dict"]
    if runtime == "torch":
        assert "in loss_fn of microbatch 0: the output of the last stage" in errors["short target"]
        assert f"[2, {WIDTH}] of torch.float32, and the target is" in errors["short target"]


@pytest.mark.parametrize(
    ("number", "error", "hint"),
    [
        ("3", "there are 3 processes", "torchrun --nproc-per-node 2 on one machine, or change"),
        ("1", "there is 1 process", "unset RANK, and schedir starts the processes"),
    ],
)
def test_wrong_number_of_processes_is_refused(
    number: str, error: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("[pipeline]\nranks = 2\n")
    variables = {"RANK": "0", "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "LOCAL_RANK": "0",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}  # fmt: skip
    code, _, text = Run(["train", str(tmp_path / "c.toml")], tmp_path, **variables).finish()
    assert code and f"{error}, but pp 2 x tp 1 x dp 1 needs 2" in text and f"hint: {hint}" in text


def create_saved_run() -> InProcessExecutor:
    """Return a run that can be saved."""
    stages = [nn.Linear(8, 8) for _ in range(2)]
    return InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))


def test_load_of_similar_folder_warns(tmp_path: Path) -> None:
    save(create_saved_run(), tmp_path / "checkpoints1", step=1)
    with pytest.warns(UserWarning, match="checkpoints1 has checkpoints"):
        assert load(create_saved_run(), tmp_path / "chekpoints1") is None
    # Without a warning: a second run often has the same name with another number or letter.
    for name in ("checkpoints2", "checkpoints_b", "other"):
        assert load(create_saved_run(), tmp_path / name) is None
