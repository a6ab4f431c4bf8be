"""Precision: bfloat16 parameters, with gradients and an optimizer's state in float32.

    module.to(torch.bfloat16)
    float32_gradients(module)
    optimizer = MainOptimizer(module.parameters(), torch.optim.AdamW)

The mixed precision of Micikevicius et al. (arXiv 1710.03740), without its scaling of the loss:
bfloat16 has the exponents of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def float32_gradients(module: nn.Module) -> None:
    """Let every parameter have its gradient in float32, whatever its own type.

    It is torch's `grad_dtype` of a parameter that says so, and only that: the executor looks at
    it, and a parameter may have it set by hand.  Splittable weights add up their gradients in
    the product itself (`schedir.kernels.weight_gradient`); what other parameters get from one
    microbatch is rounded to their own type first.
    """
    for p in module.parameters():
        p.grad_dtype = torch.float32


class MainOptimizer:
    """An optimizer of float32 copies, from which the parameters are rounded after each step.

    `make` makes it, given the copies in order.  `main` are the copies, which a checkpoint
    should hold; `param_groups` are the optimizer's.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.main = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters]
        self.inner = make(self.main)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer: where a learning rate is set."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies by the parameters' gradients, and round."""
        for p, main in zip(self.parameters, self.main, strict=True):
            main.grad = None if p.grad is None else p.grad.float()  # no copy where it is float32
        self.inner.step()
        torch._foreach_copy_([*self.parameters], [*self.main])
