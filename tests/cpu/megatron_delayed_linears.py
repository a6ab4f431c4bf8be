"""Linear layers that delay their weight gradients as Transformer Engine's layers do.

They are for one tensor-parallel rank. They have the constructors of Megatron's layers and the
protocol of Transformer Engine: `config.delay_wgrad_compute` and
`config.gradient_accumulation_fusion` are read when a layer is built, `backward_dw` computes the
oldest stored gradient, and the parameters are marked with `skip_backward_post_hook`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class DelayedGroupedLinear(nn.Module):
    """Several linear layers, each with its part of the input. Their weights are `weight0` etc.

    `max_stored` is the largest number of gradients that the layer stored at a time.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.delays = num_gemms, config.delay_wgrad_compute
        self.fuses = config.gradient_accumulation_fusion
        self.returns_bias = skip_bias_add
        self.stored: deque[Callable[[], list[Tensor]]] = deque()
        self.max_stored = 0
        self.hooks: list[Callable[[], None]] = []
        for k in range(num_gemms):
            self.register_parameter(
                f"weight{k}", nn.Parameter(torch.empty(output_size, input_size))
            )
        self.register_parameter("bias", nn.Parameter(torch.empty(output_size)) if bias else None)
        for weight in self.weights:
            weight.skip_backward_post_hook = self.delays  # type: ignore[attr-defined]

    @property
    def weights(self) -> list[nn.Parameter]:
        return [getattr(self, f"weight{k}") for k in range(self.num_gemms)]

    def forward(self, input: Tensor, sizes: list[int] | None = None) -> tuple[Tensor, Any]:
        flat = input.reshape(-1, input.shape[-1])
        weights = self.weights
        output: Any = _Linears.apply(flat, self, sizes or [len(flat)], *weights)  # type: ignore[no-untyped-call]
        output = output.view(*input.shape[:-1], -1)
        if self.returns_bias or self.bias is None:
            return output, self.bias
        return output + self.bias, None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the oldest stored gradient, and call the hooks."""
        if not self.delays:
            return
        gradients = self.stored.popleft()()  # it raises an IndexError if there is none
        if not self.fuses:
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
        for hook in self.hooks:
            hook()


class DelayedLinear(DelayedGroupedLinear):
    """One linear layer."""

    def __init__(self, input_size: int, output_size: int, **arguments: Any) -> None:
        super().__init__(1, input_size, output_size, **arguments)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, module: Any, sizes: list[int], *weights: Tensor) -> Tensor:
        ctx.module, ctx.sizes = module, sizes
        ctx.save_for_backward(input, *weights)
        parts = input.split(sizes)
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        module, (input, *weights) = ctx.module, ctx.saved_tensors
        grad_parts, parts = grads[0].split(ctx.sizes), input.split(ctx.sizes)
        grad_input = torch.cat([g @ w for g, w in zip(grad_parts, weights, strict=True)])

        def compute() -> list[Tensor]:
            gradients = [g.t() @ part for g, part in zip(grad_parts, parts, strict=True)]
            if module.fuses:
                for weight, gradient in zip(module.weights, gradients, strict=True):
                    weight.main_grad.add_(gradient)
            return gradients

        if module.delays:
            module.stored.append(compute)
            module.max_stored = max(module.max_stored, len(module.stored))
        gradients: list[Any] = [None] * len(weights) if module.delays else compute()
        if module.fuses:
            for weight in module.weights:
                weight.grad_added_to_main_grad = True
            gradients = [torch.full_like(weight, torch.nan) for weight in weights]
        return grad_input, None, None, *gradients
