"""Train 16-bit parameters with float32 main copies and loss scaling.

    module.to(torch.bfloat16)
    float32_gradients(module)
    optimizer = MainOptimizer(module.parameters(), torch.optim.AdamW)

The mixed precision of Micikevicius et al. (arXiv 1710.03740).  Its scaling of the loss is for
float16 alone (`LossScale`): bfloat16 has the exponents of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves


class OptimizerLike(Protocol):
    """What is asked of an optimizer."""

    def step(self) -> object: ...


def step_if_finite(finite: Tensor, optimizer: OptimizerLike) -> None:
    """Let an optimizer step if `finite`, 0-dim bool, is true; else nothing of it changes.

    A fused optimizer of torch decides on the device.  For any other, and for one with hooks on its
    step, the host must know: on a GPU it waits, once in an update.
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
    """Whether no number of these tensors is infinite or NaN: 0-dim bool, on their device."""
    finite: Tensor | None = None  # nothing of the host's: to copy it to a GPU would wait
    for flat in tensors:
        if flat.numel():
            ends = torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)
            both = ends.min.isfinite() & ends.max.isfinite()
            finite = both if finite is None else finite & both
    return torch.tensor(True) if finite is None else finite


def unwrap_optimizer(optimizer: object) -> Any:
    """The optimizer that a MainOptimizer has, or itself."""
    return optimizer.inner if isinstance(optimizer, MainOptimizer) else optimizer


def find_optimizers(optimizer: object) -> list[Any]:
    """The optimizers of torch's kind, and MainOptimizers, that an object is or has; else itself."""
    kinds = (torch.optim.Optimizer, MainOptimizer)
    if isinstance(optimizer, kinds):
        return [optimizer]
    held = tree_leaves([*getattr(optimizer, "__dict__", {}).values()])
    return [optimizer, *(one for one in held if isinstance(one, kinds))]


def has_gated_step(optimizer: object) -> bool:
    """Whether an optimizer itself steps or not as a tensor says, as torch.amp.GradScaler asks.

    What is done beside its step, in a class that derives from torch's or in hooks, would be done
    in any case.
    """
    supports = getattr(unwrap_optimizer(optimizer), "_step_supports_amp_scaling", False)
    return supports is True and has_known_effects(optimizer)


def has_known_effects(optimizer: object) -> bool:
    """Return whether all that a step changes is known: an optimizer of torch's own, or a
    MainOptimizer of one, steps, and no hook."""
    derived = isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer
    inner = unwrap_optimizer(optimizer)
    return not derived and is_torch_optimizer(inner) and not has_step_hooks(inner)


def is_torch_optimizer(optimizer: object) -> bool:
    """Return whether an optimizer is one of torch's own.

    A subclass that is defined outside of torch is not, nor is an optimizer with a replaced `step`.
    The wrapper that a learning-rate scheduler puts around `step` does not count as a replacement.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    ours = f"{type(optimizer).__module__}.".startswith("torch.optim.")  # of some it is torch.optim
    replaced = vars(optimizer).get("step")
    return ours and (replaced is None or hasattr(replaced, "_wrapped_by_lr_sched"))


def has_step_hooks(optimizer: object) -> bool:
    """Whether something else is called at a step of an optimizer, its own or that of any."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    every = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(every) or any(getattr(optimizer, name, None) for name in own)


def ensure_momentum(optimizer: Any) -> bool:
    """Whether a step finds the momentum that it needs.

    A fused SGD makes it in its first step, and where that is skipped leaves memory that nobody
    wrote.  Without dampening the first is a step like any other, from momentum 0; so we make that.
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
    """How an optimizer steps each parameter that it has: its type and its group's options.

    Nothing of an optimizer that is not of torch's kind.
    """
    inner = unwrap_optimizer(optimizer)
    main = zip(
        getattr(optimizer, "main_parameters", ()),
        getattr(optimizer, "parameters", ()),
        strict=False,
    )
    whose = dict(main) if isinstance(optimizer, MainOptimizer) else {}
    found: dict[Tensor, str] = {}
    for group in getattr(inner, "param_groups", ()):
        options = (f"{k} {group[k]}" for k in getattr(inner, "defaults", {}) if group.get(k))
        text = f"{type(inner).__name__} with {', '.join(options)}"
        found |= {whose.get(p, p): text for p in group["params"]}
    return found


def use_float32_gradients(module: nn.Module) -> None:
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

    `make_optimizer` makes it, given the copies in order.  `main_parameters` are the copies, which a
    checkpoint should hold; `param_groups` are the optimizer's.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        # A weight that several stages share is one parameter.
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.main_parameters = [
            nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters
        ]
        self.inner = make_optimizer(self.main_parameters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer: where a learning rate is set."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies by the parameters' gradients, and round."""
        for p, main in zip(self.parameters, self.main_parameters, strict=True):
            main.grad = None if p.grad is None else p.grad.float()  # no copy where it is float32
        self.inner.step()
        torch._foreach_copy_([*self.parameters], [*self.main_parameters])


class LossScale:
    """The factor of a float16 loss: it keeps small gradients from vanishing.

    `value` is 0-dim float32 on `device`.  After a step whose gradients were all finite it is
    multiplied by `growth` if that is the `growth_interval`-th in a row, as long as it stays finite;
    after any other by `backoff`.  Rule and constants are those of torch.amp.GradScaler.

    Each rank has one, and all come to the same: what they judge by is the global norm.
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
        self.growth, self.backoff, self.growth_interval = growth, backoff, growth_interval
        self.value = torch.tensor(value, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)  # finite steps in a row

    def __str__(self) -> str:
        value, growth, backoff = float(self.value), self.growth, self.backoff
        return (
            f"{value:g} (growth {growth:g}, backoff {backoff:g}, interval {self.growth_interval})"
        )

    @property
    def inverse(self) -> Tensor:
        """What gradients of the scaled loss are multiplied by."""
        return self.value.reciprocal()

    def update(self, finite: Tensor) -> None:
        """Set the next value after a step, `finite` (0-dim bool) or not, without the host."""
        good = torch.where(finite, self.good_steps + 1, 0)
        due = good == self.growth_interval
        more = self.value * self.growth
        grown = torch.where(due & more.isfinite(), more, self.value)
        self.value.copy_(torch.where(finite, grown, self.value * self.backoff))
        self.good_steps.copy_(torch.where(due, 0, good))
