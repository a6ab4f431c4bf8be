"""Replicas of stages with special gradients, and a log of when sums over replicas begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir import compile
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.parameters import buckets
from schedir.runtime.parameters.mixed_precision import LossScale, use_float32_gradients
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.gloo import GlooTransport
from schedir.transports.transport import Work
from tests.cpu.tiny_stages import split_1f1b

WIDTH, ROWS = 6, 3
Log = list[str]
LOG: Log = []  # of a process: the sums that began, and the layers that backwards reached


class _Mark(torch.autograd.Function):
    """Returns its input. Its backward logs that it was reached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        LOG.append(ctx.name)
        return dys[0], None


class _Puts(torch.autograd.Function):
    """Returns its input. Its backward replaces the gradient of a layer's weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        ctx.layer.weight.grad = ctx.layer.weight.grad + 1
        return dys[0], None


class ReplicatedLayers(nn.Module):
    """Linear layers. `how` selects what is special about their gradients."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.writes = how, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        if how == "frozen":
            self.layers[2].requires_grad_(False)
        if how == "hooks":
            weights: Any = [layer.weight for layer in self.layers]
            weights[3].register_hook(lambda g: 2 * g)
            weights[0].register_post_accumulate_grad_hook(_halve)
        if how == "hook of a module":
            self.layers[0].register_full_backward_hook(self._write)
        if how == "put in its place":
            weights = [layer.weight for layer in self.layers]
            weights[2].register_post_accumulate_grad_hook(_clamp)
        if how == "wide":
            use_float32_gradients(self.bfloat16())

    def _write(self, *_: Any) -> None:
        weight: Any = self.layers[3].weight
        with torch.no_grad():
            if self.how == "hook of a module":
                weight.grad.data.mul_(0.5)  # does not raise the version counter
            elif self.how == "put in its place late":
                self.writes += 1
                if not self.writes % 3:  # otherwise it is known before the last backward
                    weight.grad = weight.grad + 1
            else:
                weight.grad += 1

    def _layer(self, k: int, x: Tensor) -> Tensor:
        mark: Tensor = _Mark.apply(x, f"layer {k}")  # type: ignore[no-untyped-call]
        return torch.tanh(self.layers[k](mark))

    def forward(self, x: Tensor) -> Tensor:
        if self.how.startswith("checkpoint") and not x.requires_grad:
            x = x.detach().requires_grad_()
        if self.how == "checkpoint, reentrant, shared":
            x = checkpoint(partial(self._layer, 3), x, use_reentrant=True)
        some = self.how == "some" and float(x[0, 0]) > 0
        for k in range(4):
            if self.how == "put by a Function" and k == 3:
                x = _Puts.apply(x, self.layers[3])  # type: ignore[no-untyped-call]
            if some and k == 2:
                continue  # depends on the data, and so does not happen on all replicas
            layer = partial(self._layer, k)
            if self.how == "checkpoint":
                x = checkpoint(layer, x, use_reentrant=False)
            elif self.how.startswith("checkpoint, reentrant") and k < 2:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
            if self.how.endswith("late") and k == 0 and x.requires_grad:
                x.register_hook(self._write)
        if self.how == "twice":
            x = torch.tanh(self.layers[0](x))
        if self.how == "checkpoint, reentrant, twice":
            x = checkpoint(partial(self._layer, 1), x, use_reentrant=True)
        y: Tensor = self.norm(x)
        return y


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad.clamp(-0.5, 0.5)


class LoggingTransport(GlooTransport):
    """Logs the collectives that begin for replicas, and the position of the rank."""

    executor: Executor

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        if group == "dp":
            i = self.executor.state.stream[self.executor.runner.position]
            LOG.append(f"{'bucket' if i.op in GRAD_ADDING_OPS else 'late'} {output_tensor.numel()}")
            assert i.op in GRAD_ADDING_OPS or i.op is Opcode.ReduceGrads
        return super().start_collective(kind, group, output_tensor, input_tensor)


class Case(NamedTuple):
    schedule: Any
    shape: PipelineShape
    how: str = ""
    clip: bool = True
    scaled: bool = False


@contextmanager
def limit_bucket_size(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", size)
        yield


def loss_with_nan(y: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is NaN with a gradient of zero if the target contains a NaN."""
    usual = (y.float() - target.nan_to_num()).square().sum()
    return torch.where(target.isnan().any(), torch.nan, usual)


def create_executor(case: Case, transport: type[GlooTransport] = LoggingTransport) -> Executor:
    program = compile(
        case.schedule, case.shape, dp=2, progress_model="per_edge", overlap=True,
        clip_grad_norm=case.clip
    )  # fmt: skip
    torch.manual_seed(0)
    stages: list[nn.Module] = [ReplicatedLayers(case.how) for _ in range(case.shape.stages)]
    if case.schedule is split_1f1b:
        for stage in stages:
            make_backward_splittable(stage)
    gloo = transport(program)
    own = {s: stages[s] for s in program.shape.stages_on_rank[gloo.rank]}
    parameters = [p for stage in own.values() for p in stage.parameters() if p.requires_grad]
    dtype = parameters[0].dtype
    executor = Executor(
        program, gloo.rank, own, gloo, loss=loss_with_nan, boundary=Boundary((ROWS, WIDTH), dtype),
        optimizer=torch.optim.SGD(parameters, 0.1) if dtype == torch.float32 else None,
        gradients=GradientOptions(loss_scale=LossScale(8.0) if case.scaled else None),
    )  # fmt: skip
    if isinstance(gloo, LoggingTransport):
        gloo.executor = executor
    return executor


def run_two_steps(executor: Executor, bad: bool = False) -> Any:
    """Return gradients, weights and norm after two steps, and the logs of both steps."""
    logs: list[Log] = []
    m = executor.program.shape.microbatches
    numbers = torch.Generator().manual_seed(executor.state.transport.dp_rank)
    dtype = next(iter(executor.stages.values())).gradients.parameters[0].dtype
    for _ in range(2):
        LOG.clear()
        x, y = torch.randn(2, m, ROWS, WIDTH, generator=numbers)
        if bad and executor.state.transport.dp_rank == 0:
            y[0, 0, 0] = torch.nan
        executor.step(x.to(dtype), y, torch.tensor(0.125))
        logs.append([*LOG])
    state = executor.stages.values()
    found = [p.grad.clone() for s in state for p in s.module.parameters() if p.grad is not None]
    found += [p.detach().clone() for s in state for p in s.module.parameters()]
    return [*found, executor.grad_norm.clone(), executor.finite_updates], logs


def have_same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(one, other, strict=True)
    )
