"""Train 16-bit parameters with float32 main parameters and loss scaling.

    module.to(torch.bfloat16)
    use_float32_gradients(module)
    optimizer = MainOptimizer(module.parameters(), torch.optim.AdamW)

Loss scaling (`LossScale`) is for float16 only: bfloat16 has the exponent range of float32.

References:
    Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from schedir.errors import ModelError


def use_float32_gradients(module: nn.Module) -> None:
    """Accumulate the gradients of all parameters in float32.

    The function sets torch's `grad_dtype` of each parameter. The executor reads only `grad_dtype`,
    so users can also set it for single parameters. In splittable layers, the matrix product adds to
    the float32 gradient directly (`schedir.kernels.weight_gradient`). For other parameters,
    autograd first rounds the gradient of one microbatch to the dtype of the parameter.

    Args:
        module: The module with the parameters.
    """
    for p in module.parameters():
        p.grad_dtype = torch.float32


class MainOptimizer:
    """An optimizer that steps float32 copies of 16-bit parameters, and copies the result back.

    Args:
        parameters: The parameters of the model. Frozen parameters are left out.
        make_optimizer: Creates the optimizer from the list of main parameters, in the order of
            `parameters`.

    Attributes:
        main_parameters: The float32 copies. Save them in checkpoints.
        inner: The optimizer of the main parameters.

    Raises:
        ModelError: All parameters are frozen.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        # A weight that several stages share may be in `parameters` several times.
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        if not self.parameters:
            raise ModelError(
                "MainOptimizer got no parameter that requires a gradient",
                hint="give the executor of a rank with only frozen stages optimizer=None",
            )
        self.main_parameters = [
            nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters
        ]
        self.inner = make_optimizer(self.main_parameters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer, for example to set learning rates."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Step the main parameters with the gradients, and copy the rounded result back."""
        for p, main in zip(self.parameters, self.main_parameters, strict=True):
            main.grad = None if p.grad is None else p.grad.float()  # no copy if it is float32
        self.inner.step()
        torch._foreach_copy_([*self.parameters], [*self.main_parameters])


class LossScale:
    """The factor of a float16 loss, which keeps small gradients from becoming zero.

    The rule and the default values are those of torch.amp.GradScaler. Each rank has a loss scale.
    The loss scales stay equal, because they depend on the global norm, which all ranks share.

    Args:
        value: The first value.
        growth: The factor by which the value grows after `growth_interval` consecutive steps with
            finite gradients. The value does not grow to infinity.
        backoff: The factor by which the value shrinks after a step with gradients that are not
            finite.
        growth_interval: The number of consecutive steps with finite gradients before the value
            grows.
        device: The device of the attribute `value`, which is a 0-dim float32 tensor.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        self.growth: float = growth
        self.backoff: float = backoff
        self.growth_interval: int = growth_interval
        self.value: Tensor = torch.tensor(value, dtype=torch.float32, device=device)
        # The number of consecutive steps with finite gradients.
        self.good_steps: Tensor = torch.zeros((), dtype=torch.int32, device=device)

    def __str__(self) -> str:
        value, growth, backoff = float(self.value), self.growth, self.backoff
        return (
            f"{value:g} (growth {growth:g}, backoff {backoff:g}, interval {self.growth_interval})"
        )

    @property
    def inverse(self) -> Tensor:
        """The factor by which gradients of the scaled loss are multiplied."""
        return self.value.reciprocal()

    def update(self, finite: Tensor) -> None:
        """Set the next value after a step. The host does not wait for the device.

        Args:
            finite: True if all gradients of the step were finite, 0-dim bool.
        """
        good_steps = torch.where(finite, self.good_steps + 1, 0)
        is_due = good_steps == self.growth_interval
        grown_value = self.value * self.growth
        finite_value = torch.where(is_due & grown_value.isfinite(), grown_value, self.value)
        self.value.copy_(torch.where(finite, finite_value, self.value * self.backoff))
        self.good_steps.copy_(torch.where(is_due, 0, good_steps))
