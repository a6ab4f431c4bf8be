"""Tests of saves and loads of a `schedir.torch_pipelining.Schedule` that are refused.

All processes raise the same error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from schedir import PipelineShape, schedules
from schedir.checkpoints import Saver, dcp_storage, load, save
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.compiler.compile import compile
from schedir.errors import CheckpointError, ExecutionError, SchedirError, UsageError
from schedir.runtime import InProcessExecutor
from schedir.torch_pipelining import Schedule
from tests.cpu.gloo_processes import run
from tests.cpu.torch_pipelines import WIDTH, Layer, make_stage

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_checkpoints_refused.txt"
MB = 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.1)


class UserOptimizer(torch.optim.SGD):
    """An optimizer class that is not part of torch."""


class TrainedSchedule:
    """A schedule of this rank after one optimizer step. `how` has the options of `save`."""

    def __init__(
        self,
        rank: int,
        *,
        dp: int = 1,
        wrap: Callable[[nn.Module], Any] = nn.Identity,
        optimizer: Any = SGD,
        reduces: bool = True,
        stages: int = 0,
        how: Callable[[Any], dict[str, Any]] | None = None,
    ) -> None:
        stages = stages or 2 // dp
        group = [dist.new_group([0]), dist.new_group([1])][rank] if dp > 1 else None
        self.own = range(stages) if dp > 1 else [rank]
        parts = []
        for s in self.own:
            torch.manual_seed(s)
            part = Layer()
            parts.append(part if wrap is nn.Identity else wrap(part))
        pipeline_stages = [
            make_stage(part, s, stages, group) for s, part in zip(self.own, parts, strict=True)
        ]
        name = "one_f_one_b" if len(pipeline_stages) == 1 else "interleaved"
        self.schedule = Schedule(pipeline_stages, MB, mse_loss, schedule=name)
        self.parameters = [p for part in parts for p in part.parameters()]
        optimizer = optimizer(self.parameters)
        self.last = stages - 1
        torch.manual_seed(rank if dp > 1 else 0)
        x = torch.randn(4, WIDTH)
        self.step(x)
        for p in self.parameters if dp > 1 and reduces else ():
            if type(p.grad) is torch.Tensor:
                dist.all_reduce(p.grad)
        optimizer.step()
        self.how = {"optimizer": optimizer} if how is None else how(self)

    def step(self, x: Any) -> None:
        self.schedule.step(*[x] * (0 in self.own), target=x if self.last in self.own else None)


def _sharded_optimizer(parameters: list[nn.Parameter]) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def _move_stage_to_meta_device(trained: TrainedSchedule) -> dict[str, Any]:
    (stage,) = trained.schedule._stages
    stage.submod = Layer().to("meta")
    return {"optimizer": None}


Make = Callable[[int], TrainedSchedule]
_with_optimizer_of_one_parameter: Make = partial(
    TrainedSchedule, how=lambda trained: {"optimizer": SGD(trained.parameters[:1])}
)
NOT_SAVED: dict[str, Make] = {
    "no word of an optimizer": partial(TrainedSchedule, how=lambda trained: {}),
    "an optimizer of one's own": partial(TrainedSchedule, optimizer=UserOptimizer),
    "an optimizer of what no stage has": partial(
        TrainedSchedule, optimizer=lambda own: SGD([*own, nn.Parameter(torch.ones(3))])
    ),
    "an optimizer that is not made": partial(TrainedSchedule, how=lambda _: {"optimizer": SGD}),
    "two optimizers of one parameter": partial(
        TrainedSchedule,
        how=lambda trained: {"optimizer": [SGD(trained.parameters), ADAM(trained.parameters)]},
    ),
    "a sharded optimizer": partial(TrainedSchedule, dp=2, optimizer=_sharded_optimizer),
    "sharded weights": partial(TrainedSchedule, dp=2, wrap=lambda part: fully_shard(part)),
    "gradients that nobody reduced": partial(TrainedSchedule, dp=2, reduces=False),
    "an optimizer in one replica": lambda rank: TrainedSchedule(
        rank, dp=2, how=None if rank else lambda _: {"optimizer": None}
    ),
    "pipelines of one and of two stages": lambda rank: TrainedSchedule(
        rank, dp=2, stages=1 + rank, reduces=False
    ),
    "on the meta device": partial(TrainedSchedule, how=_move_stage_to_meta_device),
}
NOT_READ: dict[str, Make] = {
    "another optimizer": partial(TrainedSchedule, optimizer=ADAM),
    "an optimizer of some weights": _with_optimizer_of_one_parameter,
    "one stage": partial(TrainedSchedule, dp=2, wrap=DistributedDataParallel),
}


def read_errors(rank: int, folder: Path) -> list[str]:
    texts = []
    for name, make in NOT_SAVED.items():
        trained = make(rank)
        with pytest.raises(CheckpointError) as error:
            save(trained.schedule, folder / name, step=1, **trained.how)
        assert not (folder / name).exists()
        texts.append(f"{name}\n{error.value}\n")
    trained = TrainedSchedule(rank)
    save(trained.schedule, folder, step=1, **trained.how)
    save(trained.schedule, folder / "weights", step=1, optimizer=None)
    for name, make in NOT_READ.items():
        loaded = make(rank)
        before = [p.detach().clone() for p in loaded.parameters]
        with pytest.raises(CheckpointError) as error:
            load(loaded.schedule, folder, **loaded.how)
        assert all(map(torch.equal, before, loaded.parameters))
        texts.append(f"{name}\n{error.value}\n")
    steps, how = folder / "steps", trained.how
    calls: dict[str, Callable[[], object]] = {
        "weights alone": lambda: load(trained.schedule, folder / "weights", **how),
        "a Saver": lambda: Saver(trained.schedule, folder),  # type: ignore[arg-type]
        "two steps": lambda: save(trained.schedule, steps, step=1 + rank, **how),
        "one saves, one loads": lambda: (
            save(trained.schedule, steps, step=2, **how)
            if rank
            else load(trained.schedule, folder, **how)
        ),
    }
    for name, call in calls.items():
        with pytest.raises((CheckpointError, UsageError)) as refused:
            call()
        texts.append(f"{name}\n{refused.value}\n")
    with pytest.raises(CheckpointError, match="is complete: step-00000001 is not complete"):
        load(trained.schedule, folder if rank else folder / "steps", **trained.how)
    partial_optimizer = _with_optimizer_of_one_parameter(rank)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        save(partial_optimizer.schedule, folder / "some", step=1, **partial_optimizer.how)
    assert [str(warning.message) for warning in caught_warnings] == [
        "no saved optimizer has these trained weights: stages.0.linear.bias; stages.1.linear.bias"
    ] * (not rank)
    texts.append(f"a load that has failed\n{read_errors_after_partial_load(folder, trained)}\n")
    return texts


def read_errors_after_partial_load(folder: Path, trained: TrainedSchedule) -> str:
    """Return the errors of a save and a step after a partial load."""
    with pytest.MonkeyPatch.context() as patch:

        def fail_to_read(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(dcp_storage, "read", fail_to_read)
        with pytest.raises(CheckpointError, match="Input/output error"):
            load(trained.schedule, folder, **trained.how)
    with pytest.raises(CheckpointError) as error:
        save(trained.schedule, folder, step=2, **trained.how)
    with pytest.raises(ExecutionError) as stopped:
        trained.step(torch.randn(4, WIDTH))
    return f"{error.value}\n{stopped.value}"


def test_wrong_saves_and_loads_raise_same_error_on_all_ranks(tmp_path: Path) -> None:
    first_errors, second_errors = run(read_errors, 2, tmp_path, limit=60)
    assert first_errors == second_errors
    assert "\n".join(first_errors) == GOLDEN.read_text()
    assert CheckpointDirectory(tmp_path).list_steps() == [1]


def test_save_refuses_another_optimizer_of_executor(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(2, MB))
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    ranks = InProcessExecutor(program, stages, loss=mse_loss, boundary=(1, 4), optimizer=SGD)
    with pytest.raises(SchedirError, match="not the optimizer of the executor"):
        save(ranks, tmp_path, step=1, optimizer=SGD(stages[0].parameters()))
    with pytest.raises(UsageError, match="an InProcessExecutor or a schedir"):
        save(stages[0], tmp_path, step=1)  # type: ignore[arg-type]
