"""Tests that hooks, Functions and state of stages work under `Schedule` as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.cases import ALL
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule, run_step
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, make_batch


class Stage(nn.Module):
    """Two layers. `seen` collects a number for each call of a hook in the current step."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []
        self.prepare()

    def prepare(self) -> None:
        """Register hooks that stay for all steps."""

    def see(self, *gradients: Tensor | None) -> None:
        self.seen.append(float(sum(g.abs().sum() for g in gradients if g is not None)))

    def hook(self, y: Tensor) -> None:
        """Register hooks on the output of the first layer."""

    def forward(self, x: Tensor) -> Any:
        y = self.one(x)
        if y.requires_grad:
            self.hook(y)
        return torch.tanh(self.two(torch.tanh(y)))


def double_gradients(gradients: Any, _: object = None) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients)


class ActivationHook(Stage):
    def hook(self, y: Tensor) -> None:
        y.register_hook(lambda g: 2 * g)


class ActivationObserver(Stage):
    def hook(self, y: Tensor) -> None:
        y.register_hook(self.see)


class HookInSomeMicrobatches(Stage):
    """Registers hooks for some microbatches only."""

    def hook(self, y: Tensor) -> None:
        if float(y.detach().sum()) > 0:
            y.register_hook(lambda g: 2 * g)


class InputHook(Stage):
    """Registers a hook on the stage's input, which must be a new tensor object in each step."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda g: 2 * g)
        return super().forward(x)


class NodeHook(Stage):
    def hook(self, y: Any) -> None:
        y.grad_fn.register_hook(lambda gradients, _: self.see(*gradients))


class NodePreHook(Stage):
    def hook(self, y: Any) -> None:
        y.grad_fn.register_prehook(double_gradients)


class RetainedGradients(Stage):
    """Retains gradients of activations, for example for a histogram."""

    kept: list[Tensor]

    def prepare(self) -> None:
        self.kept = []

    def hook(self, y: Tensor) -> None:
        y.retain_grad()
        self.kept.append(y)

    def retained(self) -> None:
        self.see(*(y.grad for y in self.kept[-N_MICROBATCHES:]))


class WeightViewHook(Stage):
    def forward(self, x: Tensor) -> Any:
        weight = self.one.weight.t()
        if weight.requires_grad:
            weight.register_hook(lambda g: 2 * g)
        return torch.tanh(self.two(torch.tanh(x @ weight)))


class ParameterHook(Stage):
    def prepare(self) -> None:
        self.one.weight.register_hook(lambda g: 2 * g)


class PostAccumulateHook(Stage):
    """Counts additions to a gradient. torch's split backward never calls such a hook."""

    def prepare(self) -> None:
        self.one.weight.register_post_accumulate_grad_hook(lambda _: self.see(torch.ones(1)))


class AccumulatorPreHook(Stage):
    def prepare(self) -> None:
        self.node = get_gradient_edge(self.one.weight).node
        self.node.register_prehook(double_gradients)


class MultiGradHook(Stage):
    def prepare(self) -> None:
        register_multi_grad_hook([*self.parameters()], lambda gradients: self.see(*gradients))


class ModuleHooks(Stage):
    def prepare(self) -> None:
        self.one.register_full_backward_pre_hook(lambda _, gradients: double_gradients(gradients))
        self.one.register_full_backward_hook(
            lambda _, input_gradients, output_gradients: self.see(
                *input_gradients, *output_gradients
            )
        )
        self.two.register_forward_hook(lambda _, xs, y: y * 2)
        self.two.register_forward_pre_hook(lambda _, xs: (xs[0] + 1,))


class CountingProduct(torch.autograd.Function):
    """x * w. Its backward counts its calls, and scales the gradient by this count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stage: Stage) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stage, ctx.calls = stage, 0
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.calls += 1
        g, (x, w) = gradients[0] * ctx.calls, ctx.saved_tensors
        ctx.stage.see(g)
        return g * w, (g * x).sum(0), None


class FunctionStage(Stage):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.two(CountingProduct.apply(self.one(x), self.one.bias, self)))  # type: ignore[no-untyped-call]


class CheckpointedStage(ActivationHook):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class OneLayerTwice(Stage):
    """Uses one layer twice. A split backward would free tensors that both uses need."""

    def forward(self, x: Tensor) -> Any:
        return self.one(super().forward(x)).add_(1)


class OutputWithoutInput(Stage):
    """Returns a table for the second microbatch, which does not depend on the input."""

    def prepare(self) -> None:
        self.table, self.calls = nn.Parameter(torch.linspace(-1, 1, WIDTH)), 0

    calls: int

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.number == 2 and self.calls % N_MICROBATCHES == 2:
            return torch.tanh(self.table).expand_as(x) + 0 * x.detach()
        return super().forward(x)


class StridedGradients(Stage):
    """Sends and receives gradients that are not contiguous."""

    def forward(self, x: Tensor) -> Any:
        return (
            (super().forward(x).t() * 1).t() if self.number % 2 else (self.two.weight @ x.t()).t()
        )


class StatefulStage(Stage):
    """Has state: a sum, hidden values of the previous microbatch, a count and statistics."""

    hidden: Tensor | None

    def prepare(self) -> None:
        self.total = nn.Buffer(torch.zeros(()))
        self.norm, self.calls, self.hidden = nn.BatchNorm1d(WIDTH), 0, None

    def forward(self, x: Tensor) -> Any:
        self.total.add_(x.detach().sum())
        self.calls += 1
        y = self.norm(super().forward(x)) * self.calls
        output = y if self.hidden is None else y + self.hidden
        self.hidden = y.detach() / 2
        return output


class BackwardInForward(Stage):
    """Runs a backward within its forward."""

    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            torch.tanh(self.one(x.detach())).sum().backward()
        return super().forward(x)


KINDS: dict[str, list[type[Stage]]] = {
    "tensors": [
        ActivationHook,
        ActivationObserver,
        HookInSomeMicrobatches,
        InputHook,
        RetainedGradients,
        WeightViewHook,
    ],
    "nodes": [NodeHook, NodePreHook, AccumulatorPreHook],
    "parameters": [ParameterHook, PostAccumulateHook, MultiGradHook],
    "modules": [ModuleHooks, FunctionStage, CheckpointedStage],
    "graphs": [OneLayerTwice, OutputWithoutInput, StridedGradients],
    "state": [StatefulStage, BackwardInForward],
}
# Our executor refuses a stage that uses the weight of a layer which it never calls, and an output
# that does not depend on the stage's input.
REFUSED: list[type[Stage]] = [
    WeightViewHook,
    OutputWithoutInput,
    StridedGradients,
    BackwardInForward,
]


def list_differences(rank: int, kinds: list[type[Stage]], runtime: str) -> list[str]:
    """Run two steps, or three with ALL_CASES=1, and return what differs from a plain loop."""
    torch.set_default_dtype(torch.float64)
    try:
        return _list_differences(rank, kinds, runtime)
    finally:  # otherwise other processes would have to start for the next call
        torch.set_default_dtype(torch.float32)


def _list_differences(rank: int, kinds: list[type[Stage]], runtime: str) -> list[str]:
    differences = []
    for kind in kinds:
        torch.manual_seed(0)
        expected_stages, stages = (nn.ModuleList(kind(s) for s in range(4)) for _ in range(2))
        stages.load_state_dict(expected_stages.state_dict())
        parts = {s: stages[s] for s in ([0, 3], [1, 2])[rank]}
        schedule = make_schedule(
            parts, 4, schedule="zb_v", runtime=runtime, allow_identical_stages=True
        )
        for step in range(3 if ALL else 2):
            x, y = make_batch()
            x = x + step
            for model in (expected_stages, stages):
                model.zero_grad()
            run_plain_step(expected_stages, x, y)
            run_step(schedule, parts, x, y)
            for s, stage in parts.items():
                names = _list_different_names(stage, expected_stages[s], warm=step > 0)
                differences += [f"{kind.__name__} {s} {name} in step {step}" for name in names]
    return differences


def run_plain_step(model: nn.ModuleList, x: Tensor, y: Tensor) -> None:
    """Run a step without a pipeline."""
    for rows, target in zip(x.chunk(N_MICROBATCHES), y.chunk(N_MICROBATCHES), strict=True):
        output = rows
        for stage in model:
            output = stage(output)
        mse_loss(output, target).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= N_MICROBATCHES


def _list_different_names(actual: Any, expected: Any, *, warm: bool) -> list[str]:
    """Return the names of different gradients and buffers, and the different values of hooks.

    Values of hooks are compared if `warm` is set. Before its first step torch runs a forward and a
    backward to infer shapes, and these also call the hooks.
    """
    pairs = [
        (name, p.grad, expected.get_parameter(name).grad) for name, p in actual.named_parameters()
    ]
    pairs += [(name, b, expected.get_buffer(name)) for name, b in actual.named_buffers()]
    names = [name for name, *tensors in pairs if not _tensors_close(*tensors)]
    for stage in (actual, expected):
        if isinstance(stage, RetainedGradients):
            stage.retained()
    hook_values = [torch.tensor(sorted(stage.seen)) for stage in (actual, expected)]
    if warm and not _tensors_close(*hook_values):
        names.append(f"(hooks saw {hook_values})")
    actual.seen.clear()
    expected.seen.clear()
    return names


def _tensors_close(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kinds", KINDS)
def test_hooks_and_functions_under_torch_runtime(kinds: str) -> None:
    assert spawn(list_differences, 2, KINDS[kinds], "torch") == [[], []]


@pytest.mark.parametrize("kinds", KINDS)
def test_hooks_and_functions_under_executor(kinds: str) -> None:
    accepted = [kind for kind in KINDS[kinds] if kind not in REFUSED]
    if accepted:
        assert spawn(list_differences, 2, accepted, "schedir") == [[], []]
