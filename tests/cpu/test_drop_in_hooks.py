"""Tests that hooks, Functions and state of stages act under `Schedule` as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.cpu.drop_in_steps import MB, made, run
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, batch


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


def twice(gradients: Any, _: object = None) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients)


class OnActivation(Stage):
    def hook(self, y: Tensor) -> None:
        y.register_hook(lambda g: 2 * g)


class SeesActivation(Stage):
    def hook(self, y: Tensor) -> None:
        y.register_hook(self.see)


class OnSomeActivations(Stage):
    """Registers hooks for some microbatches only."""

    def hook(self, y: Tensor) -> None:
        if float(y.detach().sum()) > 0:
            y.register_hook(lambda g: 2 * g)


class OnInput(Stage):
    """Registers a hook on the stage's input, which must be a new tensor object in each step."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda g: 2 * g)
        return super().forward(x)


class OnNode(Stage):
    def hook(self, y: Any) -> None:
        y.grad_fn.register_hook(lambda gradients, _: self.see(*gradients))


class BeforeNode(Stage):
    def hook(self, y: Any) -> None:
        y.grad_fn.register_prehook(twice)


class Retained(Stage):
    """Retains gradients of activations, for example for a histogram."""

    kept: list[Tensor]

    def prepare(self) -> None:
        self.kept = []

    def hook(self, y: Tensor) -> None:
        y.retain_grad()
        self.kept.append(y)

    def retained(self) -> None:
        self.see(*(y.grad for y in self.kept[-MB:]))


class OnWeightView(Stage):
    def forward(self, x: Tensor) -> Any:
        weight = self.one.weight.t()
        if weight.requires_grad:
            weight.register_hook(lambda g: 2 * g)
        return torch.tanh(self.two(torch.tanh(x @ weight)))


class OnParameter(Stage):
    def prepare(self) -> None:
        self.one.weight.register_hook(lambda g: 2 * g)


class AfterAccumulation(Stage):
    """Counts additions to a gradient. torch's split backward never calls such a hook."""

    def prepare(self) -> None:
        self.one.weight.register_post_accumulate_grad_hook(lambda _: self.see(torch.ones(1)))


class OnAccumulator(Stage):
    def prepare(self) -> None:
        self.node = get_gradient_edge(self.one.weight).node
        self.node.register_prehook(twice)


class OnAllParameters(Stage):
    def prepare(self) -> None:
        register_multi_grad_hook([*self.parameters()], lambda gradients: self.see(*gradients))


class OnModule(Stage):
    def prepare(self) -> None:
        self.one.register_full_backward_pre_hook(lambda _, gradients: twice(gradients))
        self.one.register_full_backward_hook(lambda _, given, taken: self.see(*given, *taken))
        self.two.register_forward_hook(lambda _, xs, y: y * 2)
        self.two.register_forward_pre_hook(lambda _, xs: (xs[0] + 1,))


class Scaled(torch.autograd.Function):
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


class WithFunction(Stage):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.two(Scaled.apply(self.one(x), self.one.bias, self)))  # type: ignore[no-untyped-call]


class Checkpointed(OnActivation):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Overlapping(Stage):
    """Uses one layer before and after another. A split backward would free tensors both need."""

    def forward(self, x: Tensor) -> Any:
        return self.one(super().forward(x)).add_(1)


class Varying(Stage):
    """Returns a table for the second microbatch, which does not depend on the input."""

    def prepare(self) -> None:
        self.table, self.calls = nn.Parameter(torch.linspace(-1, 1, WIDTH)), 0

    calls: int

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.number == 2 and self.calls % MB == 2:
            return torch.tanh(self.table).expand_as(x) + 0 * x.detach()
        return super().forward(x)


class Strided(Stage):
    """Sends and receives gradients that are not contiguous."""

    def forward(self, x: Tensor) -> Any:
        return (
            (super().forward(x).t() * 1).t() if self.number % 2 else (self.two.weight @ x.t()).t()
        )


class Counting(Stage):
    """Has state: a sum, hidden values of the previous microbatch, a count and statistics."""

    hidden: Tensor | None

    def prepare(self) -> None:
        self.total = nn.Buffer(torch.zeros(()))
        self.norm, self.calls, self.hidden = nn.BatchNorm1d(WIDTH), 0, None

    def forward(self, x: Tensor) -> Any:
        self.total.add_(x.detach().sum())
        self.calls += 1
        y = self.norm(super().forward(x)) * self.calls
        given = y if self.hidden is None else y + self.hidden
        self.hidden = y.detach() / 2
        return given


class Auxiliary(Stage):
    """Runs a backward within its forward."""

    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            torch.tanh(self.one(x.detach())).sum().backward()
        return super().forward(x)


KINDS: dict[str, list[type[Stage]]] = {
    "tensors": [OnActivation, SeesActivation, OnSomeActivations, OnInput, Retained, OnWeightView],
    "nodes": [OnNode, BeforeNode, OnAccumulator],
    "parameters": [OnParameter, AfterAccumulation, OnAllParameters],
    "modules": [OnModule, WithFunction, Checkpointed],
    "graphs": [Overlapping, Varying, Strided],
    "state": [Counting, Auxiliary],
}
# Our executor refuses a stage that uses the weight of a layer which it never calls, and an output
# that does not depend on the stage's input.
REFUSED: list[type[Stage]] = [OnWeightView, Varying, Strided, Auxiliary]


def differ(rank: int, kinds: list[type[Stage]], runtime: str) -> list[str]:
    """Return what differs on a rank from a plain loop, in three steps."""
    torch.set_default_dtype(torch.float64)
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        loop, own = (nn.ModuleList(kind(s) for s in range(4)) for _ in range(2))
        own.load_state_dict(loop.state_dict())
        parts = {s: own[s] for s in ([0, 3], [1, 2])[rank]}
        schedule = made(parts, 4, schedule="zb_v", runtime=runtime, allow_identical_stages=True)
        for step in range(3):
            x, y = batch()
            x = x + step
            for model in (loop, own):
                model.zero_grad()
            plain(loop, x, y)
            run(schedule, parts, x, y)
            for s, stage in parts.items():
                wrong = _wrong(stage, loop[s], warm=step > 0)
                found += [f"{kind.__name__} {s} {name} in step {step}" for name in wrong]
    return found


def plain(model: nn.ModuleList, x: Tensor, y: Tensor) -> None:
    """Run a step without a pipeline."""
    for rows, target in zip(x.chunk(MB), y.chunk(MB), strict=True):
        given = rows
        for stage in model:
            given = stage(given)
        mse_loss(given, target).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= MB


def _wrong(got: Any, want: Any, *, warm: bool) -> list[str]:
    """Return the names of gradients and buffers that differ, and differing values from hooks.

    Before the first step torch runs a forward and a backward to find shapes, and calls hooks.
    """
    pairs = [(name, p.grad, want.get_parameter(name).grad) for name, p in got.named_parameters()]
    pairs += [(name, b, want.get_buffer(name)) for name, b in got.named_buffers()]
    wrong = [name for name, *both in pairs if not _same(*both)]
    for each in (got, want):
        if isinstance(each, Retained):
            each.retained()
    saw = [torch.tensor(sorted(each.seen)) for each in (got, want)]
    if warm and not _same(*saw):
        wrong.append(f"(hooks saw {saw})")
    got.seen.clear()
    want.seen.clear()
    return wrong


def _same(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kinds", KINDS)
def test_hooks_and_functions_under_torchs_runtime(kinds: str) -> None:
    assert spawn(differ, 2, KINDS[kinds], "torch") == [[], []]


@pytest.mark.parametrize("kinds", KINDS)
def test_hooks_and_functions_under_our_executor(kinds: str) -> None:
    kept = [kind for kind in KINDS[kinds] if kind not in REFUSED]
    if kept:
        assert spawn(differ, 2, kept, "schedir") == [[], []]
