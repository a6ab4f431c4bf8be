"""Tests that a tensor-parallel layer reduces the gradient of its input while it computes dW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.weight_gradient_formulas import PendingTensor, SharedInputRule
from schedir.tensor_parallel.layers import ColumnParallelLinear
from schedir.tensor_parallel.mappings import select_local_tokens
from schedir.tensor_parallel.vocab_parallel import VocabParallelHead, shard_vocab
from tests.cpu.gloo_processes import run

TOKENS, HIDDEN, WIDTH = 8, 4, 6

Layer = ColumnParallelLinear | VocabParallelHead


class OperationRecorder(TorchDispatchMode):
    """Records the order of matrix products, of sums, and of the waits for sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            names = {(WIDTH // 2, HIDDEN): "dW", (TOKENS, HIDDEN): "dX", (TOKENS, WIDTH // 2): "y"}
            self.operations.append(names[tuple(out.shape)])
        return out

    def record_calls(
        self, name: str, start: Callable[[Tensor], PendingTensor]
    ) -> Callable[[Tensor], PendingTensor]:
        """Wrap `start` such that its calls and the waits for its result are recorded."""

        def record_and_start(x: Tensor) -> PendingTensor:
            self.operations.append(name)
            finish = start(x)

            def wait() -> Tensor:
                self.operations.append(f"{name} waits")
                return finish()

            return wait

        return record_and_start


def run_backward(
    layer: Layer, x: Tensor, tape: DeferredGradients | None
) -> tuple[list[str], Tensor]:
    """Return the order of operations of a backward, and the gradient of x."""
    leaf, recorder = x.clone().requires_grad_(), OperationRecorder()
    y = layer(leaf)
    rule = layer.input_rule
    assert rule is not None
    start_gather = rule.start_gather and recorder.record_calls("gather", rule.start_gather)
    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(
            layer,
            "input_rule",
            SharedInputRule(recorder.record_calls("sum", rule.start_reduce), start_gather),
        )
        if tape is None:
            torch.autograd.backward(layer(leaf), torch.ones_like(y))
        else:
            with defer_weight_gradients(tape):
                torch.autograd.backward(layer(leaf), torch.ones_like(y))
            tape.run()
    assert leaf.grad is not None
    return recorder.operations[recorder.operations.index("y") + 1 :], leaf.grad


def record_orders(rank: int, dtype: torch.dtype, sequence: bool) -> list[list[str]]:
    """Return the orders of a column-parallel layer and of a head, with full and split backward."""
    group, numbers = dist.group.WORLD, torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=numbers).to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=numbers).to(dtype)
    bias = torch.zeros(WIDTH, dtype=dtype)
    x = select_local_tokens(x, group, sequence_parallel=sequence)
    layers: list[Layer] = [
        ColumnParallelLinear(weight, bias, group, sequence_parallel=sequence),
        VocabParallelHead(shard_vocab(weight, group), WIDTH, group, sequence_parallel=sequence),
    ]
    orders = []
    for layer in layers:
        layer.weight.grad_dtype = torch.float32
        layer.weight.grad = torch.zeros(layer.weight.shape)
        expected = torch.ones(TOKENS, WIDTH // 2, dtype=dtype) @ layer.weight.detach()
        dist.all_reduce(expected, group=group)
        expected = select_local_tokens(expected, group, sequence_parallel=sequence)
        for tape in (None, DeferredGradients()):
            operations, dx = run_backward(layer, x, tape)
            assert torch.equal(dx, expected)
            orders.append(operations)
    return orders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduction_of_dx_overlaps_with_dw(dtype: torch.dtype) -> None:
    full, split = ["dX", "sum", "dW", "sum waits"], ["dX", "sum", "sum waits", "dW"]
    assert run(record_orders, 2, dtype, False) == [[full, split] * 2] * 2
    # With sequence parallelism, the gather of tokens overlaps with dX, or starts when dW needs it.
    full = ["gather", "dX", "sum", "gather waits", "dW", "sum waits"]
    split = ["dX", "sum", "sum waits", "gather", "gather waits", "dW"]
    assert run(record_orders, 2, dtype, True) == [[full, split] * 2] * 2
