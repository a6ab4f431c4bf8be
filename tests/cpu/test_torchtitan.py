"""Tests of `schedir.torch_pipelining.Schedule`, built and called as torchtitan does with torch's.

They follow `pipeline_parallel.py`, `trainer.py` and `validate.py` of torchtitan 0.2.2 and 0.3.0.
The class of the schedule decides how many stages a rank has and which. A model on the meta device
is cut into stages, each stage is sharded, then the schedule is created, and only then are weights
created. Version 0.2.2 passes whole batches, and 0.3.0 passes microbatches.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor, distribute_tensor

from schedir.errors import UsageError
from schedir.torch_pipelining import patch_torchtitan
from tests.cases import each_value
from tests.cpu.gloo_processes import run

LAYERS, WIDTH, ROWS, MB = 4, 6, 8, 4


class Linear(nn.Linear):
    """Stores its forward as an attribute, as `parallelize` of 0.3.0 does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward = self.forward  # type: ignore[method-assign]


class Layers(nn.Module):
    """Some layers of a model, which take a factor for what they add."""

    def __init__(self, layer_numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{k}": Linear(WIDTH, WIDTH) for k in layer_numbers})

    def forward(self, x: Tensor, by: Tensor | None = None) -> Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x)) * (1.0 if by is None else by)
        return x

    @torch.no_grad()
    def init_weights(self) -> None:
        for k, layer in self.layers.items():
            torch.manual_seed(int(k))
            for p in layer.parameters():
                full: Tensor = 0.3 * torch.randn(p.shape)
                if isinstance(p, DTensor):
                    full = distribute_tensor(full, p.device_mesh, p.placements)
                p.copy_(full)


def loss_fn(y: Tensor, target: Tensor, global_valid_tokens: float = 1.0) -> Tensor:
    """Return a sum of squares divided by an argument of the step."""
    return (y - target).square().sum() / global_valid_tokens


class PipelineParallel(ModuleType):
    """Chooses a class by name, as `torchtitan.distributed.pipeline_parallel` does."""

    get_schedule_class: Any = staticmethod(theirs.get_schedule_class)
    ScheduleZBVZeroBubble: Any = theirs.ScheduleZBVZeroBubble

    def count_stages(self, name: str, ranks: int) -> int:
        is_single = issubclass(self.get_schedule_class(name), theirs.PipelineScheduleSingle)
        return ranks * (1 if is_single else 2)

    def indices(self, name: str, rank: int, ranks: int, stages: int) -> list[int]:
        kinds = (self.ScheduleZBVZeroBubble, theirs.ScheduleDualPipeV)
        if self.get_schedule_class(name) in kinds:
            return [rank, stages - 1 - rank]
        return [*range(rank, stages, ranks)]

    def build(self, name: str, stages: list[PipelineStage]) -> Any:
        kind = self.get_schedule_class(name)
        looped = issubclass(kind, theirs.PipelineScheduleMulti)
        stage_argument: Any = stages if looped else stages[0]
        return kind(stage_argument, n_microbatches=MB, loss_fn=loss_fn, scale_grads=False)


def install_stand_in(version: str = "0.3.0") -> PipelineParallel:
    """Let imports of torchtitan in this process find a stand-in."""
    module_name = "torchtitan.distributed.pipeline_parallel"
    stand_in = PipelineParallel(module_name)
    metadata.version = lambda distribution_name: version
    sys.modules |= {module_name: stand_in, "torchtitan.models.common.linear": sys.modules[__name__]}
    return stand_in


def make_batch(step: int, replica: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(10 * step + replica)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.rand(ROWS, 1)


class Trainer:
    """The part of a trainer of either version that a rank runs."""

    def __init__(self, titan: PipelineParallel, name: str, stages: int, pre_split: bool) -> None:
        assert titan.count_stages(name, 2) == stages
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp, self.replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        pipeline_stages, self.parts = [], []
        for s in titan.indices(name, pp, 2, stages):
            with torch.device("meta"):
                part = Layers([*range(s * LAYERS // stages, (s + 1) * LAYERS // stages)])
            group = mesh["pp"].get_group()
            pipeline_stages.append(PipelineStage(part, s, stages, torch.device("cpu"), group=group))
            self.parts.append(part)
        for k, stage in enumerate(pipeline_stages):
            self.parts[k] = fully_shard(  # type: ignore[call-overload]
                self.parts[k], mesh=mesh["dp"], reshard_after_forward=False
            )
            stage.submod = self.parts[k]
        self.schedule = titan.build(name, pipeline_stages)
        self.first, self.last = (
            any(getattr(s, e) for s in pipeline_stages) for e in ("is_first", "is_last")
        )
        for part in self.parts:
            part.to_empty(device="cpu")
            part.init_weights()
        parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)
        self.pre_split = pre_split

    def call(self, method: Any, step: int, tokens: float) -> float | None:
        """Run a step or an evaluation, and return the sum of its losses where they are known."""
        x, y, by = make_batch(step, self.replica)
        losses: list[Tensor] | None = [] if self.last else None
        options: dict[str, Any] = {"losses": losses, "return_outputs": False}
        if self.pre_split:
            method(
                arg_mbs=[(part,) for part in x.chunk(MB)] if self.first else None,
                kwarg_mbs=[{"by": part} for part in by.chunk(MB)],
                target_mbs=[*y.chunk(MB)] if self.last else None,
                loss_kwargs={"global_valid_tokens": tokens},
                **options,
            )
        elif self.first:
            method(x, by=by, target=y if self.last else None, **options)
        else:
            method(by=by, target=y if self.last else None, **options)
        return torch.stack([one.detach() for one in losses]).sum().item() if losses else None

    def train(self) -> list[float | None]:
        """Run two steps, with an evaluation before each, and return all losses."""
        losses = []
        for step in range(2):
            with torch.no_grad():
                for part in self.parts:
                    part.eval()
                losses.append(self.call(self.schedule.eval, step + 5, 2.0))
            for part in self.parts:
                part.train()
            self.optimizer.zero_grad()
            losses.append(self.call(self.schedule.step, step, 2.0))
            self.optimizer.step()
        return losses


# The schedule, the runtime, torchtitan's name of a schedule, the stages, and whether the trainer
# passes microbatches.
CASES = each_value(
    [
        ("one_f_one_b", "torch", "1F1B", 2),
        ("zb_h1", "torch", "Interleaved1F1B", 2),
        ("zb_v", "torch", "ZBVZeroBubble", 4),
        ("interleaved", "torch", "1F1B", 4),
        ("zb_h1", "schedir", "1F1B", 2),
        ("zb_v", "schedir", "ZBVZeroBubble", 4),
    ],
    [False, True],
)


def train_cases(rank: int) -> list[list[float | None]]:
    titan, results = install_stand_in(), []
    for schedule, runtime, name, stages, pre_split in CASES:
        patch_torchtitan(schedule, runtime=runtime)
        results.append(Trainer(titan, name, stages, pre_split).train())
    return results


def train_plain_loop(pre_split: bool) -> list[list[float]]:
    """Return the same losses of each replica from one process."""
    model = Layers([*range(LAYERS)])
    model.init_weights()
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.01), 2.0 if pre_split else 1.0
    losses: list[list[float]] = [[], []]
    for step in range(2):
        for replica in range(2):
            x, y, by = make_batch(step + 5, replica)
            losses[replica].append(loss_fn(model(x, by), y, tokens).item())
        optimizer.zero_grad()
        for replica in range(2):
            x, y, by = make_batch(step, replica)
            loss = loss_fn(model(x, by), y, tokens)
            (loss / 2).backward()  # the mean over replicas
            losses[replica].append(loss.item())
        optimizer.step()
    return losses


def test_torchtitan_losses_equal_one_process() -> None:
    """Both versions of torchtitan are tested in one run of processes, which is faster."""
    for case, *ranks in zip(CASES, *run(train_cases, 4), strict=True):
        last = [losses for losses in ranks if losses[0] is not None]
        for one, other in zip(last, train_plain_loop(case[-1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=str(case))


@pytest.mark.parametrize("version", ["0.1.0", "0.4.0", "0.0.0+unknown"])
def test_other_torchtitan_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(UsageError, match=r"0\.3\.0"):
        patch_torchtitan("zb_h1")


def test_missing_torchtitan_is_refused() -> None:
    with pytest.raises(UsageError, match="not installed"):
        patch_torchtitan("zb_h1")


def test_unsupported_placement_and_wrong_class_name_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(metadata, "version", metadata.version)  # `install_stand_in` sets it
    titan = install_stand_in()
    with pytest.raises(UsageError) as caught:
        patch_torchtitan("chimera")
    assert caught.value.fields == ("schedule",)
    vee, single = "ZBVZeroBubble", "1F1B"
    for schedule, right, wrong in (("zb_v", vee, single), ("zb_h1", single, vee)):
        replacement = patch_torchtitan(schedule)
        assert titan.get_schedule_class(right) is replacement
        assert (titan.ScheduleZBVZeroBubble is replacement) == (schedule == "zb_v")
        with pytest.raises(UsageError) as caught:
            titan.get_schedule_class(wrong)
        assert right in caught.value.hint
