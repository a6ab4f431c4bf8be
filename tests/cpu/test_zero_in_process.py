"""Tests of ZeRO in one process: full parameters between steps, order of sums, and refusals."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Instr, Opcode
from schedir.ir.program import Program, Stream
from schedir.models import gpt
from schedir.runtime.autograd.splittable_layers import (
    make_backward_splittable,
    register_splittable_layer,
)
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import interleaved, looped_bfs, one_f_one_b
from tests.cpu.test_zero_user_code import Keeps, WritesData
from tests.cpu.tiny_stages import BOUNDARY, copy_gradients, gpt_stages, have_same_bits, make_batch

GOLDEN = Path(__file__).parents[1] / "golden" / "zero_refused.txt"
ADAM = partial(torch.optim.AdamW, lr=1e-2)


def make_executor(program: Program, stages: list[nn.Module], **options: Any) -> InProcessExecutor:
    usual: dict[str, Any] = {"loss": gpt.loss, "boundary": BOUNDARY, "optimizer": ADAM}
    return InProcessExecutor(program, stages, **usual | options)


def list_reduced_microbatches(program: Program, stage: int) -> list[list[int]]:
    """Return the microbatches of each reduction of a stage's gradient, in order."""
    reduced: list[list[int]] = [[]]
    for i in program.streams[int(program.shape.first_rank_per_stage[stage])]:
        if i.stage == stage and i.op in GRAD_ADDING_OPS:
            reduced[-1].append(i.mb)
        elif i.stage == stage and i.op is Opcode.ReduceScatter:
            reduced.append([])
    assert not reduced.pop()
    return reduced


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", [interleaved, looped_bfs, one_f_one_b])
def test_reduce_scatters_add_in_program_order(schedule: Any, zero: int) -> None:
    shape = PipelineShape(2, 4, 1 if schedule is one_f_one_b else 2)
    program = schedir.compile(
        schedule, shape, zero=zero, reduce_scatter_at="each_backward", clip_grad_norm=False
    )
    stages, plain = (gpt_stages(shape.stages, False) for _ in range(2))
    inputs, targets, scale = make_batch(4)
    make_executor(program, stages, optimizer=None).step(inputs, targets, scale)
    gradients_by_mb: list[list[dict[str, Tensor]]] = []
    for mb in range(4):
        run_sequential(plain, inputs[[mb]], targets[[mb]], loss=gpt.loss)
        gradients_by_mb.append(copy_gradients(plain))
    num_repeated = 0
    for s, stage in enumerate(stages):
        reduced_microbatches = list_reduced_microbatches(program, s)
        num_repeated += len(reduced_microbatches) > 1
        for name, p in stage.named_parameters():
            sums = [
                scale * sum(gradients_by_mb[mb][s][name] for mb in microbatches)
                for microbatches in reduced_microbatches
            ]
            total: Any = sum(sums)
            assert p.grad is not None and torch.equal(p.grad, total.flatten())
    assert num_repeated or schedule is not interleaved


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_are_sharded_except_in_full_parameters(zero: int) -> None:
    program = schedir.compile(interleaved, PipelineShape(2, 4, 2), zero=zero, clip_grad_norm=True)
    stages, plain = (gpt_stages(4, False) for _ in range(2))
    shapes = [p.shape for stage in stages for p in stage.parameters()]
    ranks = make_executor(program, stages)
    make_executor(
        schedir.compile(interleaved, PipelineShape(2, 4, 2), clip_grad_norm=True), plain
    ).step(*make_batch(4))
    ranks.step(*make_batch(4))
    assert all(p.dim() == 1 and p.grad is not None for m in stages for p in m.parameters())
    with ExitStack() as stack:
        for rank in ranks.executors:
            stack.enter_context(rank.full_parameters())
        assert [p.shape for stage in stages for p in stage.parameters()] == shapes
        states = [deepcopy(stage.state_dict()) for stage in stages]
        for state, right in zip(states, plain, strict=True):
            assert all(torch.equal(state[n], p) for n, p in right.state_dict().items())
        with pytest.raises(ModelError, match="weights are unsharded within"):
            ranks.step(*make_batch(4))
        for stage in stages:
            for p in stage.parameters():
                p.data = torch.zeros_like(p)
    assert all(p.dim() == 1 and not p.any() for m in stages for p in m.parameters())


def test_optimizer_state_and_main_parameters_are_sharded() -> None:
    """The optimizer has stepped full weights before the executor shards them."""
    results = []
    for zero in (0, 3):
        stages = gpt_stages(2, False)
        for stage in stages:
            use_float32_gradients(stage.bfloat16())
        optimizers = []

        def make_optimizer(parameters: list[nn.Parameter]) -> MainOptimizer:
            optimizer = MainOptimizer(parameters, ADAM)
            for p in parameters:
                p.grad = torch.ones_like(p, dtype=torch.float32)
            optimizer.step()
            optimizers.append(optimizer)  # noqa: B023
            return optimizer

        program = schedir.compile(one_f_one_b, PipelineShape(2, 3), zero=zero, clip_grad_norm=True)
        boundary = Boundary(BOUNDARY.shape, torch.bfloat16)
        ranks = make_executor(program, stages, optimizer=make_optimizer, boundary=boundary)
        ranks.step(*make_batch(3))
        mains = [(m, optimizer) for optimizer in optimizers for m in optimizer.main_parameters]
        states = [(m.detach(), *optimizer.inner.state[m].values()) for m, optimizer in mains]
        results.append([t.flatten() for state in states for t in state])
    assert have_same_bits(*results)


def test_evaluation_with_sharded_weights_has_same_loss() -> None:
    losses = []
    for zero in (0, 1, 3):
        stages = gpt_stages(4, False)
        program = schedir.compile(
            schedir.schedules.forward_only, PipelineShape(2, 4, 2), zero=zero, clip_grad_norm=False
        )
        losses.append(make_executor(program, stages, optimizer=None).step(*make_batch(4)))
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


class FailingLayer(nn.Linear):
    now = False

    def forward(self, x: Tensor) -> Tensor:
        if FailingLayer.now:
            raise ValueError("as told")
        return super().forward(x)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_failed_step_leaves_sharded_weights(zero: int) -> None:
    stages: list[nn.Module] = [FailingLayer(4, 4), nn.Linear(4, 4)]
    before = [p.detach().flatten().clone() for stage in stages for p in stage.parameters()]
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), zero=zero)
    ranks = InProcessExecutor(program, stages, **MSE_OPTIONS)
    FailingLayer.now = True
    try:
        with pytest.raises(ExecutionError, match="as told"):
            ranks.step(torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    finally:
        FailingLayer.now = False
    assert have_same_bits([p.detach() for stage in stages for p in stage.parameters()], before)


_F, _I, _W = Opcode.Forward, Opcode.BackwardInput, Opcode.BackwardWeight
ORDER = (_F, 0), (_F, 1), (_I, 1), (_I, 0), (_W, 1), (_W, 0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("reads", [False, True])
def test_split_rule_that_reads_sharded_weight_is_refused(reads: bool) -> None:
    """W runs without full weights, so a user's split rule must not read them."""

    def weight_grad(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
        total = (x * dy).flatten(0, -2).sum(0)
        return total + 0 * layer.weight if reads else total

    class Own(Scale):
        pass

    input_grad = lambda layer, x, dy: dy * layer.weight  # noqa: E731
    register_splittable_layer(Own, input_grad=input_grad, deferred_grads={"weight": weight_grad})
    shape = PipelineShape(1, 2, 2)
    stages: list[nn.Module] = [Own(), Own()]
    for stage in stages:
        make_backward_splittable(stage)

    # W follow all instructions that need weights.
    order = [Instr(op, s, mb) for op, s in ORDER for mb in range(2)]
    draft = Program("late", shape, (Stream.from_instructions(order),))
    program = schedir.compile(draft, zero=3, unsharded_stages=1, clip_grad_norm=False)
    ranks = InProcessExecutor(program, stages, **MSE_OPTIONS)
    x = torch.ones(2, 2, 4)
    if reads:
        with pytest.raises(ExecutionError, match="reads a weight"):
            ranks.step(x, x)
    else:
        ranks.step(x, x)


# ------------------------------------------------------------ refusals


class Own(torch.optim.SGD):
    pass


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def make_strided_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4).t())
    layer.weight.data = torch.randn(4, 4).t()
    return layer


def make_shared_memory_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.other = nn.Parameter(layer.weight.data)
    return layer


def make_scaled_rows() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))


REFUSED_MODELS: dict[str, tuple[Any, Any]] = {
    "muon": (lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]), None),
    "an optimizer of one's own": (lambda p: Own(p, 0.1), None),
    "not contiguous": (ADAM, make_strided_layer),
    "one memory": (ADAM, make_shared_memory_layer),
    "a view is kept": (ADAM, Keeps),
    "scaled rows": (ADAM, make_scaled_rows),
    "written in a forward": (ADAM, lambda: Writes(4, 4)),
    "written to data": (ADAM, lambda: WritesData(4, 4)),
}


MSE_OPTIONS: dict[str, Any] = {
    "loss": nn.functional.mse_loss, "boundary": (2, 4), "optimizer": ADAM,
}  # fmt: skip


def get_refusal(make: Any, module: Any) -> str:
    stages = [module() if module else nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.zeros(3, 2, dtype=torch.long) if module is make_scaled_rows else torch.ones(3, 2, 4)
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), zero=3)
    with pytest.raises((ModelError, ExecutionError)) as error:
        ranks = InProcessExecutor(program, stages, **MSE_OPTIONS | {"optimizer": make})
        ranks.step(x, torch.ones(3, 2, 4))
    return str(error.value)


def test_unshardable_models_are_refused_with_golden_errors() -> None:
    texts = [f"{name}\n{get_refusal(*how)}\n" for name, how in REFUSED_MODELS.items()]
    stages: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), zero=1)
    ranks = InProcessExecutor(program, stages, **MSE_OPTIONS)
    with pytest.raises(ModelError) as second_executor:
        InProcessExecutor(schedir.compile(one_f_one_b, PipelineShape(2, 3)), stages, **MSE_OPTIONS)
    stages[1].double()
    with pytest.raises(ModelError) as moved:
        ranks.step(torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    texts += [f"in parts already\n{second_executor.value}\n", f"moved\n{moved.value}\n"]
    assert "\n".join(texts) == GOLDEN.read_text()
