"""Tests of user-defined stages and optimizers with ZeRO: they are right, or refused."""

from __future__ import annotations

import gc
import pickle
import warnings
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import looped_bfs, zb_h1

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_executor(
    zero: int, stages: list[nn.Module], optimizer: Any = SGD, ranks: int = 1, **how: Any
) -> InProcessExecutor:
    shape = PipelineShape(ranks, 3, len(stages) // ranks)
    program = schedir.compile(looped_bfs, shape, zero=zero, clip_grad_norm=False, **how)
    return InProcessExecutor(
        program, stages, loss=nn.functional.mse_loss, boundary=(2, 4), optimizer=optimizer
    )


def run_two_steps(ranks: InProcessExecutor) -> None:
    for _ in range(2):
        ranks.step(torch.ones(3, 2, 4), torch.ones(3, 2, 4))


def make_linears(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def collect_weights(stages: list[nn.Module]) -> list[Tensor]:
    return [p.detach().flatten() for stage in stages for p in stage.parameters()]


class WeightAsOutput(nn.Module):
    """Returns a view of its weight. The weight is in the memory of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.prompt[:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_stage_output_may_be_its_weight(ranks: int) -> None:
    results = []
    for zero in (0, 3):
        torch.manual_seed(0)
        stages = [WeightAsOutput(), *make_linears(1), *make_linears(2)[:1]][: 2 * ranks]
        how = {"unsharded_stages": 1} if zero else {}
        run_two_steps(make_executor(zero, stages, ranks=ranks, **how))
        results.append(collect_weights(stages))
    assert all(map(torch.equal, *results))


class WritesData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)  # does not change the version counter
        return super().forward(x)


def test_write_to_data_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ExecutionError, match="writes to one of weight to bias"):
        run_two_steps(make_executor(3, [WritesData(4, 4), nn.Linear(4, 4)]))


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.first = self.weight.detach()[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.first


def test_stale_view_of_weight_is_refused() -> None:
    run_two_steps(make_executor(0, [Keeps(), nn.Linear(4, 4)]))
    with pytest.raises(ModelError, match="share memory"):
        make_executor(1, [Keeps(), nn.Linear(4, 4)])
    with warnings.catch_warnings():  # torch's weight norm recreates the weight in each forward
        warnings.simplefilter("ignore")
        normed = nn.utils.spectral_norm(nn.Linear(4, 4))
        run_two_steps(make_executor(1, [normed, nn.Linear(4, 4)]))


class TwoOptimizers:
    """Two optimizers in one, which have stepped full weights."""

    elementwise = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizers = [SGD(parameters[:2], fused=True), torch.optim.AdamW(parameters[2:])]
        for p in parameters:
            p.grad = torch.arange(float(p.numel())).view_as(p)
        self.step()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def test_state_of_inner_optimizers_is_sharded() -> None:
    results, optimizers = [], []
    for zero in (0, 2):
        stages = make_linears()

        def make_optimizer(parameters: list[nn.Parameter]) -> TwoOptimizers:
            optimizers.append(TwoOptimizers(parameters))
            return optimizers[-1]

        run_two_steps(make_executor(zero, stages, make_optimizer))
        results.append(collect_weights(stages))
    assert all(map(torch.equal, *results))
    states = [state for one in optimizers[1].optimizers for state in one.state.values()]
    assert {t.dim() for state in states for t in state.values()} == {0, 1}


def test_loading_full_state_for_shards_is_refused() -> None:
    """torch's fused optimizers would silently use only a part of the state."""
    optimizers: list[Any] = []

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(SGD(parameters, fused=True))
        return optimizers[-1]  # type: ignore[no-any-return]

    run_two_steps(make_executor(0, make_linears(), make_optimizer))
    ranks = make_executor(1, make_linears(), make_optimizer)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    message = r"momentum_buffer of shape \[4, 4\] for a weight shard of shape \[16\]"
    with pytest.raises(ExecutionError, match=message):
        run_two_steps(ranks)


def test_state_dict_of_shards_warns() -> None:
    stages = make_linears()
    model = nn.Sequential(*stages)
    ranks = make_executor(3, stages)
    for read_state in (model.state_dict, ranks.executors[0].stages[1].module.state_dict):
        with pytest.warns(UserWarning, match=r"only this replica's shard of weight \(zero 3\)"):
            assert all(t.dim() == 1 for t in read_state().values())
    with ExitStack() as stack:
        for rank in ranks.executors:
            stack.enter_context(rank.full_parameters())
        assert model.state_dict()["0.weight"].shape == (4, 4)
        copies = [deepcopy(stages), pickle.loads(pickle.dumps(stages))]
    for copy in copies:  # copies belong to no executor, and are trained like other stages
        run_two_steps(make_executor(3, copy))


class ReadsOtherStage(nn.Module):
    """Multiplies by a weight of another stage."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(4, 4), [other]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(x) * self.others[0].bias.detach()
        return out


def test_read_of_other_stages_weight_is_refused_at_level_3() -> None:
    """At level 3 the memory of that weight is freed, so a read would return arbitrary numbers."""
    first = nn.Linear(4, 4)
    run_two_steps(make_executor(2, [first, ReadsOtherStage(first)]))
    first = nn.Linear(4, 4)
    with pytest.raises(ExecutionError, match="a stage reads a weight of another stage"):
        run_two_steps(make_executor(3, [first, ReadsOtherStage(first)], unsharded_stages=1))


def test_loss_that_reads_other_stages_weight_is_refused_at_level_3() -> None:
    """The memory of the weight may be freed before the backward."""
    first = nn.Linear(4, 4)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(y, target) + first.weight.square().sum()

    program = schedir.compile(zb_h1, PipelineShape(2, 4), zero=3)
    ranks = InProcessExecutor(program, [first, nn.Linear(4, 4)], loss=loss, boundary=(3, 4))
    with pytest.raises(ExecutionError, match="a stage reads a weight of another stage"):
        ranks.step(*torch.randn(2, 4, 3, 4))


def test_executor_may_be_freed_during_forward_of_another() -> None:
    """New tensors may have the addresses of freed weights, and must not be refused."""
    program = schedir.compile(looped_bfs, PipelineShape(1, 1, 2), zero=3)

    def make_executor(stage: nn.Module) -> InProcessExecutor:
        loss = nn.functional.mse_loss
        return InProcessExecutor(program, [stage, nn.Linear(4, 4)], loss=loss, boundary=(3, 4))

    others = [make_executor(nn.Linear(4, 4)) for _ in range(20)]

    class Frees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            others.clear()
            gc.collect()
            # All are alive together, so their addresses differ.
            tensors = [torch.ones(1) for _ in range(2000)]
            return super().forward(x) + sum(tensors)

    ranks = make_executor(Frees(4, 4))
    ranks.step(*torch.randn(2, 1, 3, 4))
    assert not others
