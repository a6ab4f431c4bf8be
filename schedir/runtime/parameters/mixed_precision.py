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
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves


class OptimizerLike(Protocol):
    """The interface that an optimizer must have."""

    def step(self) -> object:
        """Update the parameters by their gradients."""
        ...


def step_if_finite(finite: Tensor, optimizer: OptimizerLike) -> None:
    """Step an optimizer if all gradients are finite. Otherwise change nothing.

    A fused optimizer of torch reads the condition on the device. For any other optimizer, and for
    an optimizer with hooks on its step, the host reads the condition. The host then waits for the
    GPU, if the condition is on a GPU.

    Args:
        finite: The condition, 0-dim bool.
        optimizer: The optimizer.
    """
    inner = unwrap_optimizer(optimizer)
    if not has_gated_step(optimizer) or not ensure_momentum(inner):
        if finite:
            optimizer.step()
        return
    inner.found_inf = finite.logical_not().float()
    try:
        optimizer.step()
    finally:
        del inner.found_inf


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all elements of tensors are finite, as a 0-dim bool tensor on their device.

    Args:
        tensors: The tensors. If they have no elements, the result is True on the CPU.
    """
    # Begin with None, because the copy of a host tensor to a GPU would block.
    finite: Tensor | None = None
    for flat in tensors:
        if flat.numel():
            extremes = torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)
            is_flat_finite = extremes.min.isfinite() & extremes.max.isfinite()
            finite = is_flat_finite if finite is None else finite & is_flat_finite
    return torch.tensor(True) if finite is None else finite


def unwrap_optimizer(optimizer: object) -> Any:
    """Return the inner optimizer of a MainOptimizer, and any other optimizer unchanged.

    Args:
        optimizer: The optimizer.
    """
    return optimizer.inner if isinstance(optimizer, MainOptimizer) else optimizer


def find_optimizers(optimizer: object) -> list[Any]:
    """Return an optimizer and the optimizers that it wraps.

    Args:
        optimizer: An optimizer, or an object with optimizers in its attributes.

    Returns:
        A list with `optimizer` as first entry. If `optimizer` is an object of another library, the
        torch optimizers and MainOptimizers in its attributes follow.
    """
    optimizer_types = (torch.optim.Optimizer, MainOptimizer)
    if isinstance(optimizer, optimizer_types):
        return [optimizer]
    attribute_values = tree_leaves([*getattr(optimizer, "__dict__", {}).values()])
    return [optimizer, *(value for value in attribute_values if isinstance(value, optimizer_types))]


def has_gated_step(optimizer: object) -> bool:
    """Return whether a tensor on the device, `found_inf`, can make an optimizer skip its step.

    torch.amp.GradScaler uses such steps, too. The result is False for a subclass of torch's
    optimizers and for a step with hooks: their code would run even if the step is skipped.

    Args:
        optimizer: The optimizer.
    """
    supports_scaling = getattr(unwrap_optimizer(optimizer), "_step_supports_amp_scaling", False)
    return supports_scaling is True and has_known_effects(optimizer)


def has_known_effects(optimizer: object) -> bool:
    """Return whether a step changes only tensors that schedir can save and restore.

    This is the case for an optimizer of torch, and for a MainOptimizer with such an optimizer, if
    the step has no hooks.

    Args:
        optimizer: The optimizer.
    """
    is_subclass = isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer
    inner = unwrap_optimizer(optimizer)
    return not is_subclass and is_torch_optimizer(inner) and not has_step_hooks(inner)


def is_torch_optimizer(optimizer: object) -> bool:
    """Return whether torch defines the class and the `step` of an optimizer.

    The result is False for a subclass that is defined outside of torch, and for an optimizer with a
    replaced `step`. The wrapper that a learning-rate scheduler puts around `step` is allowed.

    Args:
        optimizer: The optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    # The module of some classes is torch.optim itself.
    is_of_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    replaced_step = vars(optimizer).get("step")
    return is_of_torch and (replaced_step is None or hasattr(replaced_step, "_wrapped_by_lr_sched"))


def has_step_hooks(optimizer: object) -> bool:
    """Return whether the step of an optimizer has hooks, including hooks for all optimizers.

    Args:
        optimizer: The optimizer.
    """
    hook_names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(global_hooks) or any(getattr(optimizer, name, None) for name in hook_names)


def ensure_momentum(optimizer: Any) -> bool:
    """Create missing momentum buffers of SGD, and return whether the optimizer can skip a step.

    A fused SGD creates its momentum in its first step. If that step is skipped, the memory stays
    uninitialised. Without dampening the first step is equal to a step from momentum 0, so this
    function creates zeros. With dampening the two steps differ, so the function creates nothing and
    returns False.

    Args:
        optimizer: An optimizer of torch.
    """
    missing = [
        (group, p)
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
        if p.requires_grad and optimizer.state.get(p, {}).get("momentum_buffer") is None
    ]
    if any(group.get("dampening") for group, _ in missing):
        return False
    for _, p in missing:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p if p.grad is None else p.grad)
    return True


def describe_options(optimizer: object) -> dict[Tensor, str]:
    """Describe, for each parameter, the type of its optimizer and the options of its group.

    Args:
        optimizer: The optimizer. An optimizer without `param_groups` gives an empty dict.

    Returns:
        Parameter -> description. For a MainOptimizer the keys are the 16-bit parameters.
    """
    inner = unwrap_optimizer(optimizer)
    main_pairs = zip(
        getattr(optimizer, "main_parameters", ()),
        getattr(optimizer, "parameters", ()),
        strict=False,
    )
    parameter_of_main = dict(main_pairs) if isinstance(optimizer, MainOptimizer) else {}
    descriptions: dict[Tensor, str] = {}
    for group in getattr(inner, "param_groups", ()):
        options = (f"{k} {group[k]}" for k in getattr(inner, "defaults", {}) if group.get(k))
        text = f"{type(inner).__name__} with {', '.join(options)}"
        descriptions |= {parameter_of_main.get(p, p): text for p in group["params"]}
    return descriptions


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
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        # A weight that several stages share may be in `parameters` several times.
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
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
