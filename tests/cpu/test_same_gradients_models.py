"""Tests of assert_same_gradients with typical models, batches and steps of users."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from schedir.errors import UsageError
from schedir.testing import assert_same_gradients
from schedir.testing.gradient_comparison import GradientDifference, WrongGradients
from schedir.testing.unpipelined_model import compute_loss, split_batch
from tests.cpu.torch_pipelines import WIDTH, Layer, make_batch, make_model, make_torch_step

assert_same = partial(assert_same_gradients, ranks=1, microbatches=4, loss_fn=mse_loss, timeout=60)
Loss = Callable[..., Tensor] | None


def run_plain_loop(
    model: nn.Module, batch: Any, loss_fn: Loss = mse_loss, divisor: float = 4
) -> None:
    for microbatch in split_batch(batch, 4, loss_fn):
        (compute_loss(model, microbatch, loss_fn) / divisor).backward()


def find_difference(*arguments: Any, **options: Any) -> GradientDifference:
    """Return the only difference of gradients."""
    with pytest.raises(WrongGradients) as caught:
        assert_same(*arguments, **options)
    (difference,) = caught.value.differences
    return difference


def run_step(rank: int, ranks: int, model: nn.Module, batch: Any) -> None:
    run_plain_loop(model, batch)


# ---------------------------------------------------------------- models


class ChangingBuffers(Layer):
    """Registers a buffer in its first forward, and replaces two others."""

    seen: Tensor
    late: Tensor
    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scale", None)
        self.other = nn.Module()
        self.other.register_buffer("seen", self.seen)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(WIDTH))
        self.seen = torch.cat([self.seen, self.seen[-1:] + 1])
        self.scale = self.seen[-1:]
        return super().forward(x) * self.late / self.seen[-1]


def test_new_and_growing_buffers_pass() -> None:
    assert_same(run_step, ChangingBuffers(), make_batch())
    undivided = lambda r, P, m, b: run_plain_loop(m, b, divisor=1)  # noqa: E731
    difference = find_difference(undivided, ChangingBuffers(), make_batch())
    assert difference.has_all_parameters and difference.error == pytest.approx(3)


def test_sparse_gradients_pass() -> None:
    layers = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), Layer())
    assert_same(run_step, layers, (torch.arange(8), make_batch()[1]))


def test_gradient_hooks_pass_and_accumulate_hooks_are_refused() -> None:
    layer = Layer()
    layer.linear.weight.register_hook(lambda gradient: gradient * torch.eye(WIDTH))
    assert_same(run_step, layer, make_batch())
    layer.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match=r"linear\.weight has a post-accumulate-grad hook"):
        assert_same(run_step, layer, make_batch())


def test_gradient_of_frozen_weight_is_detected() -> None:
    layers = nn.Sequential(Layer(), Layer())
    layers[0].requires_grad_(False)
    assert_same(run_step, layers, make_batch())

    def step_with_frozen_gradient(rank: int, ranks: int, model: Any, batch: Any) -> None:
        run_plain_loop(model, batch)
        model[0].linear.weight.grad = torch.ones(WIDTH, WIDTH)

    difference = find_difference(step_with_frozen_gradient, layers, make_batch())
    assert difference.names == ("0.linear.weight",)
    assert difference.problem == "a gradient, but none is expected"


@pytest.mark.filterwarnings("error")
def test_complex_gradient_is_compared_in_both_parts() -> None:
    def squared_error(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).abs().square().mean()

    def step_with_scaled_imaginary_part(
        rank: int, ranks: int, model: nn.Module, batch: Any
    ) -> None:
        run_plain_loop(model, batch, squared_error)
        assert isinstance(model.weight, Tensor) and model.weight.grad is not None
        model.weight.grad = torch.complex(model.weight.grad.real, 3 * model.weight.grad.imag)

    layer = nn.Linear(3, 3, dtype=torch.complex64)
    x, y = torch.randn(2, 8, 3, dtype=torch.complex64)
    arguments: Any = {"model": layer, "batch": (x, y), "loss_fn": squared_error}
    assert_same(lambda r, P, m, b: run_plain_loop(m, b, squared_error), **arguments)
    assert find_difference(step_with_scaled_imaginary_part, **arguments).names == ("weight",)


# ---------------------------------------------------------------- steps and batches


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_step_that_wraps_modules_passes(wrap: Any) -> None:
    """The parameters of wrapped modules have other names."""

    def wrapping_step(rank: int, ranks: int, model: Any, batch: Any) -> None:
        model[0] = wrap(model[0])
        model[1].linear.weight = nn.Parameter(model[1].linear.weight.detach().clone())
        model.extra = nn.Parameter(torch.ones(1))
        run_plain_loop(model, batch)

    assert_same(wrapping_step, make_model(2), make_batch())


def test_zero_gradients_of_other_stages_are_ignored() -> None:
    """A rank may have zero gradients for the whole model, but train only one stage."""

    def step_with_zero_gradients(rank: int, ranks: int, model: Any, batch: Any) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        make_torch_step("Schedule1F1B")(rank, ranks, model, batch)

    assert_same(step_with_zero_gradients, make_model(2), make_batch(), ranks=2)


def test_missing_gradient_of_replica_is_detected() -> None:
    """A step may return the gradients of all parameters, as with a sharded optimizer."""

    def train_on_first_replica(rank: int, ranks: int, model: nn.Module, batch: Any) -> None:
        if rank == 0:
            run_plain_loop(model, batch)

    def return_all_gradients(
        rank: int, ranks: int, model: nn.Module, batch: Any
    ) -> dict[str, Tensor | None]:
        train_on_first_replica(rank, ranks, model, batch)
        return {name: p.grad for name, p in model.named_parameters()}

    difference = find_difference(train_on_first_replica, Layer(), make_batch(), ranks=2, replicas=2)
    assert "on only 1 rank, for 2 replicas" in str(difference)
    assert difference.names == ("linear.weight", "linear.bias")
    assert_same(return_all_gradients, Layer(), make_batch(), ranks=2, replicas=2)


def test_step_with_data_loader_and_group_destruction_passes() -> None:
    """The main function of a trainer does both."""

    def train(rank: int, ranks: int, model: Any, batch: Any) -> None:
        for x, y in DataLoader(TensorDataset(*batch), batch_size=8, num_workers=1):
            make_torch_step("Schedule1F1B")(rank, ranks, model, (x, y))
        dist.barrier()
        dist.destroy_process_group()

    assert_same(train, make_model(2), make_batch(), ranks=2)


class OptionalKeyword(Layer):
    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        return super().forward(x)


def test_batch_may_be_any_mapping() -> None:
    """An example is the BatchEncoding of transformers. Each microbatch gets its part."""
    x, y = make_batch(10)

    def step_on_mapping(rank: int, ranks: int, model: nn.Module, batch: Any) -> None:
        inputs, targets = batch
        run_plain_loop(model, ({**inputs}, targets))

    assert_same(step_on_mapping, OptionalKeyword(), (UserDict({"x": x, "scale": None}), y))


def test_inputs_of_caller_get_no_gradient() -> None:
    x, y = make_batch()
    leaf = x.requires_grad_()
    with torch.no_grad():  # applies to the caller, and not to the step
        assert_same(run_step, Layer(), (leaf, y))
    assert_same(run_step, Layer(), (leaf * 2, y))
    assert leaf.grad is None


def test_generator_state_of_caller_is_unchanged() -> None:
    layers, batch = nn.Sequential(Layer(), nn.Dropout()), make_batch()
    before = torch.get_rng_state()
    with pytest.raises(Exception, match="model uses random numbers"):
        assert_same(run_step, layers, batch)
    assert torch.equal(before, torch.get_rng_state())
