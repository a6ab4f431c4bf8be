"""Tests of split stages in schedules: weights used twice, versions, and unsplit layers."""

from __future__ import annotations

import builtins
import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.autograd import split_backward
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules.schedule_algebra import F, I, W
from tests.cpu.tiny_layers import WIDTH, Conv1D, Square
from tests.cpu.tiny_stages import copy_gradients, have_same_bits, split_1f1b

BOUNDARY = Boundary((3, WIDTH))


def make_executor(
    stages: Sequence[nn.Module], m: int = 4, loss: Any = mse_loss, **options: Any
) -> InProcessExecutor:
    program = compile(split_1f1b, PipelineShape(2, m))
    return InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY, **options)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.layer(x))
        return y


class RepeatedMatmul(nn.Module):
    """Computes `x @ w @ w`, where each product is torch's own or one that can be split."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.one(x, self.w), self.w)
        return y


class Tied(nn.Module):
    """A stage that embeds tokens and computes their scores with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % WIDTH
        y: Tensor = self.head(self.embed(tokens[..., 0])) + x
        return y


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Twice(nn.Linear(WIDTH, WIDTH)),
    "conv1d": lambda: Twice(Conv1D(WIDTH, WIDTH)),
    "tied": Tied,
    "plain": lambda: RepeatedMatmul(torch.matmul, torch.matmul),
    "split": lambda: RepeatedMatmul(split_backward.matmul, split_backward.matmul),
    "mixed": lambda: RepeatedMatmul(torch.matmul, split_backward.matmul),
    "mixed, other way": lambda: RepeatedMatmul(split_backward.matmul, torch.matmul),
}


@pytest.mark.filterwarnings("ignore:.* is not split in")
@pytest.mark.parametrize("kind", REPEATED)
def test_weight_used_twice_gets_both_gradients(kind: str) -> None:
    torch.manual_seed(0)
    plain = [REPEATED[kind]() for _ in range(2)]
    split = [make_backward_splittable(copy.deepcopy(stage)) for stage in plain]
    x = torch.randn(4, 3, WIDTH)
    for mb in x:  # plain autograd, without schedir
        y = plain[1](plain[0](mb))
        (y - 1).square().sum().backward()
    make_executor(split, loss=lambda y, _: (y - 1).square().sum()).step(x, x)
    for got, want in zip(copy_gradients(split), copy_gradients(plain), strict=True):
        assert got.keys() == want.keys() and got
        for name, expected in want.items():
            torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-5)
            assert "mixed" in kind or torch.equal(got[name], expected)


def test_split_rule_reads_weight_version_of_microbatch() -> None:
    """The rule runs after the creation of newer versions, and must read the old version."""
    torch.manual_seed(0)
    input_and_weight = 4 * (I + W)
    program = compile(
        # The last F use the version after the one of the W that follow.
        lambda r, P, m: 8 * F + input_and_weight + 4 * I + 4 * F + 4 * W + input_and_weight,
        PipelineShape(2, 12, optimizer_steps=3, weight_delay=1),
    )
    x = torch.randn(12, 3, WIDTH)
    states = []
    for is_split in (False, True):
        torch.manual_seed(1)
        stages: list[nn.Module] = [Square(WIDTH), Square(WIDTH)]
        if is_split:
            stages = [make_backward_splittable(stage) for stage in stages]
        ranks = InProcessExecutor(
            program, stages, loss=lambda y, t: (y - t).square().sum(), boundary=BOUNDARY,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error" if is_split else "ignore")
            for _ in range(2):
                ranks.step(x, x + 1, 0.1)
        states.append([stage.state_dict() for stage in stages])
    assert have_same_bits(*states)


class MixedLayers(nn.Module):
    """Layers that are split, that could be split, and that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(3, WIDTH))
        self.attn = nn.ModuleDict({"c_attn": Conv1D(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
        self.own = nn.Sequential(
            nn.Bilinear(WIDTH, WIDTH, WIDTH), make_backward_splittable(nn.Linear(WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn["norm"](self.attn["c_attn"](x + self.positions))
        y: Tensor = self.own[1](self.own[0](x, x))
        return y


def test_warning_names_unsplit_layers() -> None:
    x = torch.randn(4, 3, WIDTH)

    def collect_warnings(stages: Sequence[nn.Module]) -> list[str]:
        ranks = make_executor(stages)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranks.step(x, x)
            ranks.step(x, x)  # the warning comes once
        return sorted(str(w.message) for w in caught)

    torch.manual_seed(0)
    plain = [MixedLayers(), MixedLayers()]
    assert run_sequential(copy.deepcopy(plain), x, x, loss=mse_loss).isfinite()
    assert collect_warnings(plain) == [
        f"the backward of MixedLayers (stage {s}) is not split in attn.c_attn (Conv1D), own.0 "
        "(Bilinear): the instruction I runs their full backward; "
        "schedir.runtime.make_backward_splittable(stage) splits Conv1D; "
        "schedir.runtime.register_splittable_layer adds a type"
        for s in range(2)
    ]
    messages = collect_warnings([make_backward_splittable(stage) for stage in plain])
    assert len(messages) == 2
    assert not any("c_attn" in text or "make_backward_splittable" in text for text in messages)
    norms = [nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(9))) for _ in range(2)]
    messages = collect_warnings(norms)
    assert "0 (LayerNorm), 1 (LayerNorm)" in messages[0] and "and 3 more" in messages[0]
    assert not collect_warnings([make_backward_splittable(s, nn.LayerNorm) for s in norms])


class SkippedLayer(nn.Module):
    """A residual layer that some microbatches skip, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        x = self.norm(x)
        y: Tensor = x + self.layer(x) if torch.rand(()) < 0.5 else x
        return y


class AutocastLayer(nn.Module):
    """A layer with a split rule, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Square(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.layer(x).float()
        return y


@pytest.mark.parametrize(("kind", "num_warnings"), [(SkippedLayer, 0), (AutocastLayer, 2)])
def test_unused_layers_and_full_backwards_have_same_bits(kind: Any, num_warnings: int) -> None:
    """Skipped layers give no warning, and layers with a full backward give one."""
    torch.manual_seed(0)
    plain: list[nn.Module] = [kind(), kind()]
    split = [make_backward_splittable(copy.deepcopy(stage)) for stage in plain]
    x = torch.randn(8, 3, WIDTH)
    run_sequential(plain, x, x, loss=mse_loss, seed=1)
    ranks = make_executor(split, 8, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.step(x, x)
    for stage in plain:  # unused weights have gradients of 0 in a buffer
        for p in stage.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    assert have_same_bits(copy_gradients(plain), copy_gradients(split))
    assert len(caught) == num_warnings


def test_bypassed_split_layer_is_refused() -> None:
    class BypassedLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make_backward_splittable(Square(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            (weight,) = self.parameters()
            return x * weight

    ranks = make_executor([BypassedLayer(), BypassedLayer()])
    with pytest.raises(ExecutionError, match="has splittable layers"):
        ranks.step(*torch.randn(2, 4, 3, WIDTH))


def test_page_examples_run_without_warning() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "split-backward.md"
    scope: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in page.read_text().split("```python\n")[1:]:
            exec(builtins.compile(block.split("```")[0], page.name, "exec"), scope)
