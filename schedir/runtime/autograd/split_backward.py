"""Split a backward into I, the gradient of inputs, and W, the gradient of weights.

Zero-bubble schedules split the backward of a layer. The previous stage waits for the gradient of
the input, but only the optimizer needs the gradient of the weights. This module has functions that
replace torch's: `linear`, `matmul`, `embedding`, and `run_split_layer` for other layers. Within
`defer_weight_gradients`, the backward of these functions does not compute the gradient of the
weight. The backward saves the tensors for this gradient in a `DeferredGradients`, and
`DeferredGradients.run` computes the gradient later:

    deferred = DeferredGradients()
    with defer_weight_gradients(deferred):
        torch.autograd.backward(y, dy)      # BackwardInput
    ...
    deferred.run()                          # BackwardWeight

The gradients of other parameters, such as norms, biases and position embeddings, are cheap to
compute. The instruction I computes them, unless the caller splits these layers.

A split backward gives the same bits as an unsplit backward, if the deferred gradients of one weight
run in the order of their backward passes. There is one exception: a weight that other operations
also use. Autograd adds the gradients of these operations in I, so the sum is rounded differently.

`make_backward_splittable` makes the layers of a module use these functions.

References:
    Qi et al., Zero bubble pipeline parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from schedir.errors import ModelError
from schedir.runtime.autograd.node_hook_detection import (
    can_defer_gradient,
    count_registrations,
    leaf_has_hooks,
    node_has_hooks,
)
from schedir.runtime.autograd.weight_gradient_formulas import (
    LookupRule,
    ProductRule,
    SharedInputRule,
    WeightGradientRule,
    accumulate_gradient,
    can_add_rows,
    flatten_to_matrix,
    has_wider_gradient,
)


class _DeferredFunction(NamedTuple):
    """A weight gradient to compute, with the tensors that it needs and their version counters."""

    rule: WeightGradientRule
    weight: Tensor
    saved: tuple[Tensor, ...]
    dy: Tensor
    versions: list[int]  # version counters of `saved` and `dy`

    def require_unchanged(self) -> None:
        """Raise ModelError if a saved tensor was written to since BackwardInput."""
        if self.versions != [tensor._version for tensor in (*self.saved, self.dy)]:
            raise ModelError(
                "a tensor that W needs for a weight gradient was changed in place between I and W",
                hint="do not write to the arguments of a hook or of a custom backward",
            )


class DeferredGradients:
    """The deferred weight gradients of a backward pass, in the order of this pass.

    `len(deferred)` is the number of deferred gradients. If it is 0 after a backward, the backward
    was not split: it reached no splittable layer, or torch.compile ran it.

    The object keeps the inputs and the output gradients of layers in memory. An output gradient may
    be the same tensor that the caller passed to `torch.autograd.backward`. `run` raises ModelError
    if the caller has overwritten this tensor.
    """

    def __init__(self) -> None:
        self._deferred: deque[_DeferredFunction] = deque()

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(
        self, rule: WeightGradientRule, weight: Tensor, saved: tuple[Tensor, ...], dy: Tensor
    ) -> None:
        """Defer a weight gradient, so that `run` adds `rule(weight, *saved, dy)` to `weight.grad`.

        Args:
            rule: The function that computes the gradient.
            weight: The weight.
            saved: The tensors that the forward saved, usually its input.
            dy: The gradient of the output.
        """
        # Detach the tensors, because otherwise they would keep the autograd graph of the input
        # alive.
        *detached_saved, dy = (tensor.detach() for tensor in (*saved, dy))
        versions = [tensor._version for tensor in (*detached_saved, dy)]
        self._deferred.append(_DeferredFunction(rule, weight, tuple(detached_saved), dy, versions))

    def list_saved_tensors(self) -> Iterator[Tensor]:
        """Yield the inputs and output gradients that this object keeps in memory."""
        for job in self._deferred:
            yield from (*job.saved, job.dy)

    @property
    def has_custom_rule(self) -> bool:
        """Return whether a rule of `register_splittable_layer` computes one of the gradients."""
        return any(not isinstance(job.rule, ProductRule | LookupRule) for job in self._deferred)

    def list_weights(self) -> Iterator[Tensor]:
        """Yield the weights of the deferred gradients, once for each use."""
        return (job.weight for job in self._deferred)

    def run(self, on_accumulated: Callable[[Tensor], object] | None = None) -> None:
        """Compute each deferred weight gradient, add it to `weight.grad`, and free saved tensors.

        The addition to an existing `grad` is in place, so `grad` may be a view of a flat buffer. If
        a weight has several uses, such as a tied embedding, `run` first sums the gradients of these
        uses in the order of the backward pass. Then it adds the sum in one addition, as autograd
        does. But if `grad` has a wider dtype than the weight, `run` adds the gradient of each use
        directly.

        Args:
            on_accumulated: A function that is called with each weight once its gradient is
                complete.

        Raises:
            ModelError: A saved input or output gradient was written to since the BackwardInput.
        """
        use_counts = Counter(map(id, self.list_weights()))
        gradient_sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self._deferred:  # Remove one entry at a time, to free its memory early.
                job = self._deferred.popleft()
                job.require_unchanged()
                rule, weight, saved, dy, _ = job
                key = id(weight)
                use_counts[key] -= 1
                is_only_use = not use_counts[key] and key not in gradient_sums
                if has_wider_gradient(weight) or (is_only_use and can_add_rows(rule, weight)):
                    accumulate_gradient(rule, weight, saved, dy)
                else:
                    dw = rule(weight, *saved, dy)
                    # If `grad` has a narrower dtype, round the gradient of each use.
                    if weight.grad is not None:
                        dw = dw.to(weight.grad.dtype)
                    if key in gradient_sums:
                        dw = gradient_sums.pop(key) + dw
                    if use_counts[key]:
                        gradient_sums[key] = dw
                    elif weight.grad is None:
                        # Versions of torch before 2.13 may lack `grad_dtype`.
                        weight.grad = dw.to(getattr(weight, "grad_dtype", None) or dw.dtype)
                    else:
                        weight.grad += dw
                if on_accumulated is not None and not use_counts[key]:
                    on_accumulated(weight)


# This is global and not thread-local, because on CUDA autograd runs a backward in other threads. So
# a process can run only one backward with deferred gradients at a time.
_active_deferred_wgrad: DeferredGradients | None = None


@contextmanager
def defer_weight_gradients(deferred_wgrad: DeferredGradients) -> Iterator[DeferredGradients]:
    """Defer the weight gradients of every backward within this context.

    Args:
        deferred_wgrad: The object that collects the deferred gradients.

    Yields:
        The same object.
    """
    global _active_deferred_wgrad
    outer, _active_deferred_wgrad = _active_deferred_wgrad, deferred_wgrad
    try:
        yield deferred_wgrad
    finally:
        _active_deferred_wgrad = outer


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, input_rule: SharedInputRule | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, with a backward that can be split.

    The gradient of the bias is cheap and is not deferred. With an `input_rule`, the weight is split
    over tensor-parallel ranks, and `x` may be a shard of the full input. Only the shard is saved.
    The full input is gathered again in the backward, or in W if the weight gradient is deferred. If
    the weight gradient is not deferred, its computation overlaps with the reduction of the gradient
    of `x`.

    Args:
        x: The input, of shape (..., n).
        weight: The weight, of shape (k, n).
        bias: The bias, of shape (k,).
        input_rule: The communication of the input and of its gradient; None if there is none.

    Returns:
        The output, of shape (..., k).
    """
    y: Tensor = _Linear.apply(x, weight, bias, _LINEAR_RULE, input_rule)  # type: ignore[no-untyped-call]
    return y


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight + bias`, with a backward that can be split.

    Args:
        x: The input, of shape (..., n).
        weight: The weight, of shape (n, k).
        bias: The bias, of shape (k,).

    Returns:
        The output, of shape (..., k).
    """
    y: Tensor = _Linear.apply(x, weight, bias, _MATMUL_RULE, None)  # type: ignore[no-untyped-call]
    return y


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return rows of a weight, with a backward that can be split.

    An embedding has no input gradient, so the split saves no time. The split is for a weight that
    is tied to the output layer. W then adds the gradients of both layers in one addition, as an
    unsplit backward does, so the sum has the same bits.

    Args:
        tokens: Row numbers, int64, of any shape (...).
        weight: The weight, of shape (rows, n).
        padding_idx: The number of the row that gets no gradient, or None.

    Returns:
        The rows, of shape (..., n).
    """
    y: Tensor = _Embedding.apply(tokens, weight, padding_idx)  # type: ignore[no-untyped-call]
    return y


def _defer_or_compute_wgrad(
    ctx: Any,
    input_index: int,
    rule: WeightGradientRule,
    weight: Tensor,
    saved: tuple[Tensor, ...],
    dy: Tensor,
) -> Tensor | None:
    """Return a weight gradient for autograd, or None if it was deferred or already accumulated.

    `input_index` is the position of the weight among the inputs of the autograd Function.
    """
    is_compiling = torch.compiler.is_compiling()
    if not _can_bypass_autograd(ctx, input_index, weight):
        return rule(weight, *saved, dy)
    if _active_deferred_wgrad is not None:
        _active_deferred_wgrad.defer(rule, weight, saved, dy)
    elif has_wider_gradient(weight):
        accumulate_gradient(rule, weight, saved, dy)
    elif not is_compiling and can_add_rows(rule, weight) and _is_first_use_in_pass(weight):
        (tokens,) = saved
        # Autograd adds this gradient, because the weight may have other uses.
        return rule.compute_sparse(weight, tokens, dy)
    else:
        return rule(weight, *saved, dy)
    return None


def _can_bypass_autograd(ctx: Any, input_index: int, weight: Tensor) -> bool:
    """Return whether the Function may add to `weight.grad` without autograd."""
    if not can_defer_gradient(weight):
        return False
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[input_index][0]
    if leaf_has_hooks(weight, node):
        return False
    # A hook on the node of the Function must get all gradients, including the weight gradient.
    # Nodes of torch.compile have no `registrations`.
    if getattr(ctx, "registrations", None) != count_registrations() and node_has_hooks(ctx):
        return False
    return _will_accumulate(node)


def _will_accumulate(leaf: Node) -> bool:
    """Return whether the running backward adds to the `.grad` of the leaf that has this node.

    `torch.autograd.grad`, for example in a hook of the backward, returns gradients and does not add
    to `.grad`.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad was called for the gradient of this leaf.
        return False


def _is_first_use_in_pass(weight: Tensor) -> bool:
    """Return whether this is the first call for a weight in the running backward pass.

    Only the first use of a weight may return a sparse gradient. Autograd concatenates sparse
    gradients, so a row may occur twice in the result. A GPU adds such rows in no fixed order.
    """
    current_pass: int = torch._C._current_graph_task_id()
    last_pass = _last_pass_by_weight.get(id(weight), -1)
    _last_pass_by_weight[id(weight)] = max(current_pass, last_pass)
    # A nested backward, as in recomputation, has a larger number than the outer backward.
    return current_pass > last_pass


# `id` of a weight -> number of the last backward pass that called `_is_first_use_in_pass`.
_last_pass_by_weight: dict[int, int] = {}


def _save_weights(ctx: Any, *weights: Tensor) -> None:
    # The weights are an attribute and not saved tensors. Non-reentrant checkpointing replaces saved
    # tensors by detached aliases, and a gradient added to the `.grad` of an alias would be lost.
    # Autograd does not check the versions of attributes, so `_get_saved_weights` checks them.
    ctx.weights = weights
    ctx.versions = [weight._version for weight in weights]
    if not torch.compiler.is_compiling():
        # The node has no hooks yet. A later hook changes this count.
        ctx.registrations = count_registrations()


def _get_saved_weights(ctx: Any) -> tuple[Tensor, ...]:
    """Return the weights, or raise RuntimeError if one was changed in place since the forward."""
    if ctx.versions != [weight._version for weight in ctx.weights]:
        raise RuntimeError("a weight was changed in place between F and B")
    weights: tuple[Tensor, ...] = ctx.weights
    return weights


_LINEAR_RULE = ProductRule(True)
_MATMUL_RULE = ProductRule(False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: ProductRule,
        input_rule: SharedInputRule | None,
    ) -> Tensor:
        _save_weights(ctx, weight)
        ctx.rule = rule
        ctx.entry = input_rule
        ctx.dtype = x.dtype
        full_input = (
            x
            if input_rule is None or input_rule.start_gather is None
            else input_rule.start_gather(x)()
        )
        if rule.is_transposed:
            y = F.linear(full_input, weight, bias)
        elif bias is None:
            y = full_input @ weight
        else:
            y = torch.addmm(bias, flatten_to_matrix(full_input), weight)
            y = y.view(*full_input.shape[:-1], weight.shape[-1])
        ctx.save_for_backward(x.to(y.dtype))  # Autocast computes in the dtype of y.
        return _as_non_view(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (x,), (dy,) = _get_saved_weights(ctx), ctx.saved_tensors, dys
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        rule, input_rule, wait_for_input, wait_for_dx = ctx.rule, ctx.entry, None, None
        if needs_dw and input_rule is not None and input_rule.start_gather is not None:
            if _active_deferred_wgrad is not None and _can_bypass_autograd(ctx, 1, weight):
                rule = rule._replace(start_gather=input_rule.start_gather)  # W gathers the input.
            else:
                wait_for_input = input_rule.start_gather(x)
        matrix = weight if rule.is_transposed else weight.t()
        dx = dy @ matrix.to(dy.dtype).conj() if needs_dx else None
        if dx is not None and input_rule is not None:
            wait_for_dx = input_rule.start_reduce(dx.to(ctx.dtype).contiguous())
        db = flatten_to_matrix(dy).sum(0) if needs_db else None
        x = x if wait_for_input is None else wait_for_input()
        dw = _defer_or_compute_wgrad(ctx, 1, rule, weight, (x,), dy) if needs_dw else None
        return dx if wait_for_dx is None else wait_for_dx(), dw, db, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        _save_weights(ctx, weight)
        ctx.rule = LookupRule(-1 if padding_idx is None else padding_idx)
        return F.embedding(tokens, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[None, Tensor | None, None]:
        (weight,), (dy,), needs_dw = ctx.weights, dys, ctx.needs_input_grad[1]
        saved = ctx.saved_tensors
        dw = _defer_or_compute_wgrad(ctx, 1, ctx.rule, weight, saved, dy) if needs_dw else None
        return None, dw, None


def _as_non_view(y: Tensor) -> Tensor:
    """Return `y` as a non-view, because a view from a Function cannot be changed in place."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


# ------------------------------------------------------------ layers of registered types


LayerRule = Callable[..., Tensor]  # (layer, *saved, dy) -> a gradient


@dataclass(frozen=True)
class SplitLayer:
    """The forward and the gradient rules of a layer type, from `register_splittable_layer`.

    Attributes:
        forward: A function of (layer, x) that returns y and the tensors to save.
        input_grad: The rule for the gradient of x.
        deferred_grads: Parameter name -> rule, for the parameters whose gradients W computes.
        immediate_grads: Parameter name -> rule, for the parameters whose gradients I computes.
    """

    forward: Callable[[Any, Tensor], tuple[Tensor, ...]]
    input_grad: LayerRule
    deferred_grads: Mapping[str, LayerRule]
    immediate_grads: Mapping[str, LayerRule]


def run_split_layer(split: SplitLayer, layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer so that its backward can be split.

    Args:
        split: The forward and the gradient rules of the layer's type.
        layer: The layer.
        x: Its input.

    Returns:
        The output of the layer.
    """
    parameters = dict(layer.named_parameters(remove_duplicate=False))
    y: Tensor = _SplitLayerFunction.apply(split, layer, (*parameters,), x, *parameters.values())  # type: ignore[no-untyped-call]
    return y


class _SplitLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        split: SplitLayer,
        layer: nn.Module,
        names: tuple[str, ...],
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.how = split
        ctx.layer = layer
        ctx.names = names
        ctx.shape = x.shape
        _save_weights(ctx, *weights)
        y, *saved = split.forward(layer, x)
        ctx.save_for_backward(*saved)
        return _as_non_view(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        weights, saved, split, (dy,) = _get_saved_weights(ctx), ctx.saved_tensors, ctx.how, dys
        needs_dx = ctx.needs_input_grad[3]
        gradients: list[Tensor | None] = []
        need_weight_grads = ctx.needs_input_grad[4:]
        for k, (name, weight, needs_grad) in enumerate(
            zip(ctx.names, weights, need_weight_grads, strict=True), 1
        ):
            rule = partial(
                _compute_layer_gradient,
                ctx.layer,
                name,
                split.immediate_grads.get(name) or split.deferred_grads[name],
            )
            if not needs_grad:
                gradients.append(None)
            elif name in split.immediate_grads:
                gradients.append(rule(weight, *saved, dy))
            else:
                gradients.append(_defer_or_compute_wgrad(ctx, k, rule, weight, saved, dy))
        dx = None
        if needs_dx:
            dx = _require_shape(
                ctx.layer, "its input", ctx.shape, split.input_grad(ctx.layer, *saved, dy)
            )
        return None, None, None, dx, *gradients


def _compute_layer_gradient(
    layer: nn.Module, name: str, rule: LayerRule, weight: Tensor, *saved_and_dy: Tensor
) -> Tensor:
    """Return the gradient of a parameter by the rule of its layer, in the parameter's dtype."""
    return _require_shape(layer, name, weight.shape, rule(layer, *saved_and_dy)).to(weight.dtype)


def _require_shape(layer: nn.Module, name: str, shape: torch.Size, gradient: Tensor) -> Tensor:
    """Return a gradient, or raise ModelError if its shape is wrong.

    Without this check, the addition of gradients could broadcast a gradient of a wrong shape.
    """
    if gradient.shape != shape:
        raise ModelError(
            f"the split backward of {type(layer).__name__} returns a gradient of shape "
            f"{list(gradient.shape)} for {name} of shape {list(shape)}"
        )
    return gradient
