"""Compute the weight gradients of Megatron's linear layers separately from their input gradients.

A split backward has two halves. `I` computes the gradient of the stage's input, and `W` computes
the gradients of weights. Megatron's `ColumnParallelLinear` and `RowParallelLinear` compute both
gradients in one autograd function. `split_linear_backward` replaces this function during a step.
The replacement computes the input gradient in the backward. In `I`, it stores the computation of
the weight gradient, and `W` runs this computation later. In an unsplit backward, it computes the
weight gradient immediately.

Autograd does not see the weight as an input of the replacement. Otherwise autograd would call the
gradient hook of Megatron's DistributedDataParallel in `I`, when no gradient of the weight exists
yet. With `overlap_grad_reduce` this hook raises an AssertionError. The computation adds the
gradient to `weight.main_grad`, as the hook does. A weight without `main_grad` gets it in `grad`.

Three kinds of weights keep Megatron's function, so their gradients are computed in `I`:

- Weights with a gradient hook of the user, because only autograd calls such hooks.
- Weights that are computed from other parameters, as with `torch.nn.utils.parametrizations`.
  Autograd computes the gradients of these parameters from the gradient of the weight.
- A weight that the embedding and the output layer of one stage share. Autograd sums the gradients
  of both layers, and Megatron's hook then adds this sum to `main_grad`. (With
  `gradient_accumulation_fusion`, a kernel adds the output layer's gradient directly.)

`delayed_weight_gradients` has the rule for Transformer Engine modules and grouped GEMMs. Other
gradients (biases, norms, embeddings) are computed in `I`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

WeightGradients = list[Callable[[], None]]

# The list to which the current `I` defers weight gradients. The list is None outside of `I`, where
# weight gradients are computed immediately.
_deferred: WeightGradients | None = None


@contextmanager
def defer_weight_gradients(into: WeightGradients | None) -> Iterator[None]:
    """Store the computations of weight gradients in a list, instead of running them.

    Args:
        into: The list, or None to run the computations immediately.
    """
    global _deferred
    previous, _deferred = _deferred, into
    try:
        yield
    finally:
        _deferred = previous


@contextmanager
def split_linear_backward() -> Iterator[None]:
    """Replace Megatron's linear function by one that can defer weight gradients."""
    name = "linear_with_grad_accumulation_and_async_allreduce"
    original = getattr(layers, name)

    @wraps(original)  # Megatron's function reads an attribute of `layers.NAME`; `wraps` copies it
    def apply(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        function = original if _needs_autograd(weight) else _apply_linear
        return function(input, weight, *args, **kwargs)

    setattr(layers, name, apply)
    try:
        yield
    finally:
        setattr(layers, name, original)


def _needs_autograd(weight: Tensor) -> bool:
    """Return whether autograd must compute the gradient of a weight."""
    is_shared_in_stage = getattr(weight, "zero_out_wgrad", False)  # set by Megatron if shared
    return has_gradient_hooks(weight) or bool(is_shared_in_stage) or not weight.is_leaf


def has_gradient_hooks(weight: Tensor) -> bool:
    """Return whether a weight has a gradient hook of the user.

    The function ignores the hooks of Megatron's DistributedDataParallel, because they are on the
    AccumulateGrad node of the weight.

    Args:
        weight: The weight.
    """
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


class _LinearSettings(NamedTuple):
    """A linear layer's weight, and the arguments of Megatron's function for this layer.

    Attributes:
        weight: The weight, of shape (output size, input size) of this tensor-parallel rank.
        fuses_accumulation: True if Megatron's CUDA kernel adds the gradient to `main_grad`.
        reduces_input_grad: True if the input gradient is summed over tensor-parallel ranks.
        sequence_parallel: True if the input is a shard of the sequence.
        grad_output_buffer: Megatron's list of output gradients of a deferred output layer, or None.
        deferral_limit: The largest length of `grad_output_buffer`, or 0 for no limit.
        tp_group: The tensor-parallel group.
    """

    weight: Any
    fuses_accumulation: bool
    reduces_input_grad: bool
    sequence_parallel: bool
    grad_output_buffer: list[Tensor] | None
    deferral_limit: int
    tp_group: Any


def _apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: Any = None,
) -> Any:
    """Run a linear layer with `_SplitLinear`. The parameters are Megatron's."""
    settings = _LinearSettings(
        weight,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit or 0,
        layers.get_tensor_model_parallel_group_if_none(tp_group),
    )
    if not input.requires_grad:  # autograd runs a backward only if an input requires a gradient
        input = input.detach().requires_grad_()
    return _SplitLinear.apply(input, bias, settings)  # type: ignore[no-untyped-call]


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose weight is hidden from autograd."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, settings: _LinearSettings) -> Tensor:
        ctx.settings = settings
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input)
        output = torch.matmul(_full_input(input, settings), settings.weight.detach().t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_output,), (input,), settings = grads, ctx.saved_tensors, ctx.settings
        weight = settings.weight
        buffer, limit = settings.grad_output_buffer, settings.deferral_limit
        grad_input = grad_output.matmul(weight.detach())
        work = None
        if settings.reduces_input_grad:
            work = dist.all_reduce(grad_input, group=settings.tp_group, async_op=True)
        elif settings.sequence_parallel:
            shard = torch.empty_like(input)
            work = dist.reduce_scatter_tensor(
                shard, grad_input.contiguous(), group=settings.tp_group, async_op=True
            )
            grad_input = shard

        def add_weight_gradient() -> None:
            _add_weight_gradient(settings, input, grad_output)

        if buffer is not None and (limit == 0 or len(buffer) < limit):
            buffer.append(grad_output)  # Megatron uses the buffer at the end of the step
        elif _deferred is not None:
            _deferred.append(add_weight_gradient)
        else:
            add_weight_gradient()  # overlaps with the communication of the input gradient
        if work is not None:
            work.wait()
        grad_bias = _flatten_tokens(grad_output).sum(dim=0) if ctx.has_bias else None
        return grad_input, grad_bias, None


@torch.no_grad()
def _add_weight_gradient(settings: _LinearSettings, input: Tensor, grad_output: Tensor) -> None:
    weight = settings.weight
    full_input = _flatten_tokens(_full_input(input, settings))
    flat_grad = _flatten_tokens(grad_output)
    if settings.fuses_accumulation:
        kernels: Any = layers.fused_weight_gradient_mlp_cuda
        is_float32 = weight.main_grad.dtype == torch.float32
        accumulate = kernels.wgrad_gemm_accum_fp32 if is_float32 else kernels.wgrad_gemm_accum_fp16
        accumulate(full_input, flat_grad, weight.main_grad)
        return
    gradient = flat_grad.t().matmul(full_input)
    if hasattr(weight, "main_grad"):
        weight.main_grad.add_(gradient)
    else:
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _full_input(input: Tensor, settings: _LinearSettings) -> Tensor:
    """Return the input of all tokens. With sequence parallelism, gather the shards."""
    if not settings.sequence_parallel:
        return input
    size = settings.tp_group.size()
    gathered = input.new_empty((input.shape[0] * size, *input.shape[1:]))
    dist.all_gather_into_tensor(gathered, input.contiguous(), group=settings.tp_group)
    return gathered


def _flatten_tokens(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])
