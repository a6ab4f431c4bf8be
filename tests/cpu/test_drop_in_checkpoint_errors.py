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
from tests.cpu.torch_pipelines import WIDTH, Layer, stage_of

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_checkpoints_refused.txt"
MB = 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.1)


class Own(torch.optim.SGD):
    """An optimizer that is not torch's own."""


class Trained:
    """A schedule of this process, whose optimizer has stepped once, and the options of saves."""

    def __init__(
        self,
        rank: int,
        *,
        dp: int = 1,
        wrap: Callable[[nn.Module], Any] = nn.Identity,
        optimizer: Any = SGD,
        reduces: bool = True,
        stages: int = 0,
    ) -> None:
        stages = stages or 2 // dp
        group = [dist.new_group([0]), dist.new_group([1])][rank] if dp > 1 else None
        self.own = range(stages) if dp > 1 else [rank]
        parts = []
        for s in self.own:
            torch.manual_seed(s)
            part = Layer()
            parts.append(part if wrap is nn.Identity else wrap(part))
        held = [stage_of(part, s, stages, group) for s, part in zip(self.own, parts, strict=True)]
        name = "one_f_one_b" if len(held) == 1 else "interleaved"
        self.schedule = Schedule(held, MB, mse_loss, schedule=name)
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
        self.how = {"optimizer": optimizer}

    def step(self, x: Any) -> None:
        self.schedule.step(*[x] * (0 in self.own), target=x if self.last in self.own else None)


def _without(made: Trained) -> Trained:
    made.how.clear()
    return made


def _none_of_one(rank: int) -> Trained:
    made = Trained(rank, dp=2)
    made.how = made.how if rank else {"optimizer": None}
    return made


def _of_others(rank: int) -> Trained:
    return Trained(rank, optimizer=lambda own: SGD([*own, nn.Parameter(torch.ones(3))]))


def _of_two(rank: int) -> Trained:
    made = Trained(rank)
    made.how = {"optimizer": [SGD(made.parameters), ADAM(made.parameters)]}
    return made


def _not_made(rank: int) -> Trained:
    made = Trained(rank)
    made.how = {"optimizer": SGD}
    return made


def _of_some(rank: int) -> Trained:
    made = Trained(rank)
    made.how = {"optimizer": SGD(made.parameters[:1])}
    return made


def _in_parts(own: list[nn.Parameter]) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(own, torch.optim.SGD, lr=0.1)


def _on_meta(rank: int) -> Trained:
    made = Trained(rank)
    (stage,) = made.schedule._stages
    stage.submod = Layer().to("meta")
    made.how = {"optimizer": None}
    return made


NOT_SAVED: dict[str, Callable[[int], Trained]] = {
    "no word of an optimizer": lambda rank: _without(Trained(rank)),
    "an optimizer of one's own": partial(Trained, optimizer=Own),
    "an optimizer of what no stage has": _of_others,
    "an optimizer that is not made": _not_made,
    "two optimizers of one parameter": _of_two,
    "a sharded optimizer": partial(Trained, dp=2, optimizer=_in_parts),
    "sharded weights": partial(Trained, dp=2, wrap=lambda part: fully_shard(part)),
    "gradients that nobody reduced": partial(Trained, dp=2, reduces=False),
    "an optimizer in one replica": _none_of_one,
    "pipelines of one and of two stages": lambda rank: Trained(
        rank, dp=2, stages=1 + rank, reduces=False
    ),
    "on the meta device": _on_meta,
}
NOT_READ: dict[str, Callable[[int], Trained]] = {
    "another optimizer": partial(Trained, optimizer=ADAM),
    "an optimizer of some weights": _of_some,
    "one stage": partial(Trained, dp=2, wrap=DistributedDataParallel),
}


def refused(rank: int, folder: Path) -> list[str]:
    texts = []
    for name, make in NOT_SAVED.items():
        made = make(rank)
        with pytest.raises(CheckpointError) as error:
            save(made.schedule, folder / name, step=1, **made.how)
        assert not (folder / name).exists()
        texts.append(f"{name}\n{error.value}\n")
    made = Trained(rank)
    save(made.schedule, folder, step=1, **made.how)
    save(made.schedule, folder / "weights", step=1, optimizer=None)
    for name, make in NOT_READ.items():
        other = make(rank)
        before = [p.detach().clone() for p in other.parameters]
        with pytest.raises(CheckpointError) as error:
            load(other.schedule, folder, **other.how)
        assert all(map(torch.equal, before, other.parameters))
        texts.append(f"{name}\n{error.value}\n")
    with pytest.raises(CheckpointError) as error:
        load(made.schedule, folder / "weights", **made.how)
    texts.append(f"weights alone\n{error.value}\n")
    with pytest.raises(UsageError) as usage:
        Saver(made.schedule, folder)  # type: ignore[arg-type]
    texts.append(f"a Saver\n{usage.value}\n")
    with pytest.raises(CheckpointError) as error:
        save(made.schedule, folder / "steps", step=1 + rank, **made.how)
    texts.append(f"two steps\n{error.value}\n")
    with pytest.raises(CheckpointError) as error:
        if rank:
            save(made.schedule, folder / "steps", step=2, **made.how)
        else:
            load(made.schedule, folder, **made.how)
    texts.append(f"one saves, one loads\n{error.value}\n")
    with pytest.raises(CheckpointError, match="is complete: step-00000001 is not complete"):
        load(made.schedule, folder if rank else folder / "steps", **made.how)
    some = _of_some(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        save(some.schedule, folder / "some", step=1, **some.how)
    assert [str(one.message) for one in said] == [
        "no saved optimizer has these trained weights: stages.0.linear.bias; stages.1.linear.bias"
    ] * (not rank)
    texts.append(f"a load that has failed\n{half_read(folder, made)}\n")
    return texts


def half_read(folder: Path, made: Trained) -> str:
    """Return the error of a run that has loaded a part of a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(dcp_storage, "read", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            load(made.schedule, folder, **made.how)
    with pytest.raises(CheckpointError) as error:
        save(made.schedule, folder, step=2, **made.how)
    with pytest.raises(ExecutionError) as stopped:
        made.step(torch.randn(4, WIDTH))
    return f"{error.value}\n{stopped.value}"


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    one, other = run(refused, 2, tmp_path, limit=60)
    assert one == other
    assert "\n".join(one) == GOLDEN.read_text()
    assert CheckpointDirectory(tmp_path).list_steps() == [1]


def test_an_executor_has_its_own_optimizer(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(2, MB))
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    ranks = InProcessExecutor(program, stages, loss=mse_loss, boundary=(1, 4), optimizer=SGD)
    with pytest.raises(SchedirError, match="not the optimizer of the executor"):
        save(ranks, tmp_path, step=1, optimizer=SGD(stages[0].parameters()))
    with pytest.raises(UsageError, match="an InProcessExecutor or a schedir"):
        save(stages[0], tmp_path, step=1)  # type: ignore[arg-type]
