"""A tensor-parallel layer sums the gradient of its input while it computes its weight's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.parallel import group as layers_group
from schedir.parallel.layers import ColumnParallelLinear
from schedir.parallel.vocab import VocabParallelHead, shard_vocab
from schedir.runtime.split import Tape, recording
from schedir.transports.transport import Work
from tests.cpu.spawn import run

TOKENS, HIDDEN, WIDTH = 5, 4, 6


class Order(TorchDispatchMode):
    """In which order products, by what they give, sums and the waits for them come."""

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

    def start(self, group: Any, x: Tensor) -> Work:
        self.noted.append("sum")
        return Noted(self, start_sum(group, x))


class Noted:
    def __init__(self, order: Order, work: Work) -> None:
        self.order, self.work = order, work

    def wait(self) -> None:
        self.order.noted.append("wait")
        self.work.wait()


start_sum = layers_group._start_sum


def backward(layer: nn.Module, x: Tensor, tape: Tape | None) -> tuple[list[str], Tensor]:
    """The order of a backward pass, and the gradient of x."""
    leaf, order = x.clone().requires_grad_(), Order()
    y = layer(leaf)
    with pytest.MonkeyPatch.context() as patch, order:
        patch.setattr(layers_group, "_start_sum", order.start)
        if tape is None:
            torch.autograd.backward(layer(leaf), torch.ones_like(y))
        else:
            with recording(tape):
                torch.autograd.backward(layer(leaf), torch.ones_like(y))
            tape.run()
    assert leaf.grad is not None
    return order.noted[1:], leaf.grad


def orders(rank: int, dtype: torch.dtype) -> list[list[str]]:
    """Those of a column-parallel layer and of a head, each whole and split."""
    group, numbers = dist.group.WORLD, torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=numbers).to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=numbers).to(dtype)
    layers: list[ColumnParallelLinear | VocabParallelHead] = [
        ColumnParallelLinear(weight, torch.zeros(WIDTH, dtype=dtype), group),
        VocabParallelHead(shard_vocab(weight, group), WIDTH, group),
    ]
    found = []
    for layer in layers:
        layer.weight.grad_dtype = torch.float32
        layer.weight.grad = torch.zeros(layer.weight.shape)
        want = torch.ones(TOKENS, WIDTH // 2, dtype=dtype) @ layer.weight.detach()
        dist.all_reduce(want, group=group)
        for tape in (None, Tape()):
            noted, dx = backward(layer, x, tape)
            assert torch.equal(dx, want)
            found.append(noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_dx_is_under_way_while_dw_is_computed(dtype: torch.dtype) -> None:
    whole, split = ["dX", "sum", "dW", "wait"], ["dX", "sum", "wait", "dW"]
    assert run(orders, 2, dtype) == [[whole, split] * 2] * 2
