"""Tests that a tensor-parallel layer sums its input's gradient while it computes its weight's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.weight_gradient_rules import PendingTensor, SharedInputRule
from schedir.tensor_parallel.layers import ColumnParallelLinear
from schedir.tensor_parallel.mappings import select_local_tokens
from schedir.tensor_parallel.vocab_parallel import VocabParallelHead, shard_vocab
from tests.cpu.gloo_processes import run

TOKENS, HIDDEN, WIDTH = 8, 4, 6

Layer = ColumnParallelLinear | VocabParallelHead


class Order(TorchDispatchMode):
    """Records the order of products, of sums, and of the waits for sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            names = {(WIDTH // 2, HIDDEN): "dW", (TOKENS, HIDDEN): "dX", (TOKENS, WIDTH // 2): "y"}
            self.noted.append(names[tuple(out.shape)])
        return out

    def noting(
        self, name: str, start: Callable[[Tensor], PendingTensor]
    ) -> Callable[[Tensor], PendingTensor]:
        """Return `start` with a record of its calls and of waits for it."""

        def started(x: Tensor) -> PendingTensor:
            self.noted.append(name)
            later = start(x)

            def wait() -> Tensor:
                self.noted.append(f"{name} waits")
                return later()

            return wait

        return started


def backward(layer: Layer, x: Tensor, tape: DeferredGradients | None) -> tuple[list[str], Tensor]:
    """Return the order of operations of a backward, and the gradient of x."""
    leaf, order = x.clone().requires_grad_(), Order()
    y = layer(leaf)
    entry = layer.input_rule
    assert entry is not None
    whole = entry.start_gather and order.noting("gather", entry.start_gather)
    with pytest.MonkeyPatch.context() as patch, order:
        patch.setattr(
            layer, "input_rule", SharedInputRule(order.noting("sum", entry.start_reduce), whole)
        )
        if tape is None:
            torch.autograd.backward(layer(leaf), torch.ones_like(y))
        else:
            with defer_weight_gradients(tape):
                torch.autograd.backward(layer(leaf), torch.ones_like(y))
            tape.run()
    assert leaf.grad is not None
    return order.noted[order.noted.index("y") + 1 :], leaf.grad


def orders(rank: int, dtype: torch.dtype, sequence: bool) -> list[list[str]]:
    """Return the orders of a column-parallel layer and of a head, each whole and split."""
    group, numbers = dist.group.WORLD, torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=numbers).to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=numbers).to(dtype)
    bias = torch.zeros(WIDTH, dtype=dtype)
    x = select_local_tokens(x, group, sequence_parallel=sequence)
    layers: list[Layer] = [
        ColumnParallelLinear(weight, bias, group, sequence_parallel=sequence),
        VocabParallelHead(shard_vocab(weight, group), WIDTH, group, sequence_parallel=sequence),
    ]
    found = []
    for layer in layers:
        layer.weight.grad_dtype = torch.float32
        layer.weight.grad = torch.zeros(layer.weight.shape)
        want = torch.ones(TOKENS, WIDTH // 2, dtype=dtype) @ layer.weight.detach()
        dist.all_reduce(want, group=group)
        want = select_local_tokens(want, group, sequence_parallel=sequence)
        for tape in (None, DeferredGradients()):
            noted, dx = backward(layer, x, tape)
            assert torch.equal(dx, want)
            found.append(noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_dx_is_under_way_while_dw_is_computed(dtype: torch.dtype) -> None:
    whole, split = ["dX", "sum", "dW", "sum waits"], ["dX", "sum", "sum waits", "dW"]
    assert run(orders, 2, dtype, False) == [[whole, split] * 2] * 2
    # With sequence parallelism, tokens are gathered meanwhile, or later when they are needed.
    whole = ["gather", "dX", "sum", "gather waits", "dW", "sum waits"]
    split = ["dX", "sum", "sum waits", "gather", "gather waits", "dW"]
    assert run(orders, 2, dtype, True) == [[whole, split] * 2] * 2
