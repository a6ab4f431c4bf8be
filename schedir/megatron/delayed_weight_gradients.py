"""Run the weight gradients of modules that delay them, such as the linears of Transformer Engine.

A module of Transformer Engine that is built with `config.delay_wgrad_compute` only stores its
weight gradient in the backward. `module.backward_dw()` computes the oldest stored gradient, and
then calls the hooks that Megatron's DistributedDataParallel registered at the module. These hooks
add the gradient to `main_grad`. The parameters of such a module have the attribute
`skip_backward_post_hook`, which DistributedDataParallel reads, too.

`DelayedModules` records each backward of such a module during a step. The step then calls
`backward_dw` exactly once for each backward: in `W` if the backward is split, and at the end of `B`
otherwise. Megatron itself calls `backward_dw` only with `overlap_moe_expert_parallel_comm`, which
schedir refuses.

A module returns its stored gradients in the order of its backwards. So if a schedule runs the `W`
of two microbatches in another order than their `I`, the first `W` computes the gradient of the
first `I`. The sum over the microbatches is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from schedir.errors import UsageError
from schedir.megatron.weight_gradients import WeightGradients, has_gradient_hooks


class DelayedModules:
    """Records the backwards of the modules that delay their weight gradients.

    Args:
        chunks: The model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        # `require_delay_settings` verified that no other chunk has such modules.
        self.modules = [
            module
            for chunk in chunks
            if _reduces_delayed_gradients(chunk)
            for module in find_delayed_modules(chunk)
        ]
        self._pending: WeightGradients = []

    @contextmanager
    def record_backwards(self) -> Iterator[None]:
        """Record the backwards of the modules that run a forward in this context."""
        handles = [module.register_forward_hook(self._record) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take_weight_gradients(self) -> WeightGradients:
        """Return the computations of the backwards since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _record(self, module: Any, args: Any, output: Any) -> None:
        """Record each backward of the output. It runs again in recomputed forwards."""
        outputs = output if isinstance(output, (tuple, list)) else [output]
        nodes = (tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor))
        node: Any = next((node for node in nodes if node is not None), None)
        if node is not None:
            compute = partial(_compute_weight_gradient, module)
            node.register_hook(lambda *_: self._pending.append(compute))


def find_delayed_modules(chunk: Any) -> list[Any]:
    """Return the modules of a chunk that delay the gradients of trainable weights.

    Args:
        chunk: A model chunk.
    """
    return [
        module
        for module in (chunk.modules() if isinstance(chunk, nn.Module) else ())
        if callable(getattr(module, "backward_dw", None)) and _delayed_weights(module)
    ]


def _reduces_delayed_gradients(chunk: Any) -> bool:
    """Return whether Megatron's DistributedDataParallel expects delayed weight gradients."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "delay_wgrad_compute", False))


def _delayed_weights(module: Any) -> list[Any]:
    return [
        parameter
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and getattr(parameter, "skip_backward_post_hook", False)
    ]


@torch.no_grad()  # as in a backward of autograd
def _compute_weight_gradient(module: Any) -> None:
    """Compute the oldest gradient that a module stored.

    With fused gradient accumulation, the module adds the gradient to `main_grad` itself, and its
    backward gives autograd a gradient without meaning. With `overlap_grad_reduce`, Megatron's hook
    requires such a gradient, and then sets it to None. Autograd adds the gradients of several
    backwards, so the gradient is missing from the second call of the hook.
    """
    for weight in _delayed_weights(module):
        if weight.grad is None and getattr(weight, "grad_added_to_main_grad", False):
            weight.grad = weight.detach().new_zeros(()).expand(weight.shape)
    module.backward_dw()


def require_delay_settings(chunks: Sequence[Any]) -> None:
    """Refuse modules whose delayed weight gradients would be lost.

    Args:
        chunks: The model chunks of this rank.

    Raises:
        UsageError: `delay_wgrad_compute` of DistributedDataParallelConfig is False. Or a weight has
            a gradient hook, which `backward_dw` does not call. Or the modules do not mark their
            parameters, as in versions of Transformer Engine before 2.8.
    """
    for chunk in chunks:
        if find_delayed_modules(chunk) and not _reduces_delayed_gradients(chunk):
            raise UsageError(
                "the model delays weight gradients, but delay_wgrad_compute of "
                "DistributedDataParallelConfig is False, so Megatron would not add them to "
                "main_grad",
                hint="DistributedDataParallelConfig(delay_wgrad_compute=True)",
                fields=["delay_wgrad_compute"],
            )
        for module in find_delayed_modules(chunk):
            if any(map(has_gradient_hooks, _delayed_weights(module))):
                raise UsageError(
                    f"a weight of {type(module).__name__} has a gradient hook, but "
                    "delay_wgrad_compute computes its gradient without autograd, which calls hooks",
                    hint="remove the hook, or unset delay_wgrad_compute",
                    fields=["delay_wgrad_compute"],
                )
        for module in chunk.modules() if isinstance(chunk, nn.Module) else ():
            store = getattr(module, "wgrad_store", None)
            has_weights = any(p.requires_grad for p in module.parameters(recurse=False))
            if store is None or not store.delay_wgrad_compute() or not has_weights:
                continue
            if not _delayed_weights(module):
                raise UsageError(
                    f"{type(module).__name__} delays weight gradients, but does not mark its "
                    "parameters with skip_backward_post_hook",
                    hint="install Transformer Engine 2.8 or later, or unset delay_wgrad_compute",
                    fields=["delay_wgrad_compute"],
                )


@contextmanager
def delay_setting_accepted() -> Iterator[None]:
    """Let TransformerConfig accept `delay_wgrad_compute` for all models.

    Megatron accepts the setting only with `overlap_moe_expert_parallel_comm`, because no other
    schedule of Megatron calls `backward_dw`.
    """
    validate: Callable[[Any], None] = TransformerConfig.__post_init__

    @wraps(validate)
    def validate_other_settings(config: Any) -> None:
        delays, config.delay_wgrad_compute = config.delay_wgrad_compute, False
        validate(config)
        config.delay_wgrad_compute = delays

    TransformerConfig.__post_init__ = validate_other_settings
    try:
        yield
    finally:
        TransformerConfig.__post_init__ = validate
