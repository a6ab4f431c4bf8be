"""Split a backward into dI, the gradient of inputs, and dW, the gradient of weights.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) cut the backward of a layer in two:
the gradient of the input, which the stage before waits for, and the gradient of the
weights, which only the optimizer needs. Here the cut lies inside functions that stand in for
torch's own (`linear`, `matmul`, `embedding`, and those that `run_split_layer` makes of a layer):
while a
`DeferredGradients` is recording, their backward computes the input gradient only and notes on the
tape what the weight gradient needs; `DeferredGradients.run` computes it.

    with recording(tape):
        torch.autograd.backward(y, dy)      # BackwardInput
    ...
    tape.run()                              # BackwardWeight

Everything else (norms, biases, position embeddings) is cheap and stays in the first
half, unless it is asked for. The gradients are those of the whole backward bit for bit, as long
as the tapes of one weight run in the order in which their backward passes did; those of a weight
that is used otherwise, too, are rounded otherwise: autograd adds its part in the first half.

`make_backward_splittable` puts these functions in the place of the forwards of a module's layers.
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
from schedir.runtime.autograd.weight_gradient_rules import (
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
    rule: WeightGradientRule
    weight: Tensor
    saved: tuple[Tensor, ...]
    dy: Tensor
    versions: list[int]  # of those that it keeps

    def require_unchanged(self) -> None:
        """Raise ModelError where somebody has written to what is kept."""
        if self.versions != [tensor._version for tensor in (*self.saved, self.dy)]:
            raise ModelError(
                "what the gradient of a weight is made of was changed in place between I and W",
                hint="a hook, or a backward of your own, must not write to what it is given",
            )


class DeferredGradients:
    """What one backward pass left undone: its weight gradients, in order.

    `len(tape)` counts them; 0 after a recorded backward means that nothing was split
    (no `linear` took part, or torch.compile ran the backward behind our back).

    The tape keeps inputs and output gradients alive. The last of these may be the very
    tensor given to `torch.autograd.backward`: what overwrites it before `run` is refused there.
    """

    def __init__(self) -> None:
        self._deferred: deque[_DeferredFunction] = deque()

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(
        self, rule: WeightGradientRule, weight: Tensor, saved: tuple[Tensor, ...], dy: Tensor
    ) -> None:
        """Leave `weight.grad += rule(weight, *kept, dy)` for `run`."""
        # Detached, or the tape would keep the graph behind the input alive.
        *without, dy = (tensor.detach() for tensor in (*saved, dy))
        versions = [tensor._version for tensor in (*without, dy)]
        self._deferred.append(_DeferredFunction(rule, weight, tuple(without), dy, versions))

    def list_saved_tensors(self) -> Iterator[Tensor]:
        """The inputs and output gradients that it keeps."""
        for job in self._deferred:
            yield from (*job.saved, job.dy)

    @property
    def has_custom_rule(self) -> bool:
        """Whether a gradient comes by a rule that somebody has written for a layer."""
        return any(not isinstance(job.rule, ProductRule | LookupRule) for job in self._deferred)

    def list_weights(self) -> Iterator[Tensor]:
        """The weights whose gradients it leaves, once for each use."""
        return (job.weight for job in self._deferred)

    def run(self, on_accumulated: Callable[[Tensor], object] | None = None) -> None:
        """Compute every weight gradient, add it to `weight.grad`, and empty the tape.

        `on_accumulated` is told of each weight when it has all of its gradient.

        An existing `grad` is added to in place, so it may be a view of a flat buffer.
        A weight used several times (tied embeddings) gets one addition of the sum, in
        the order of the backward pass, because that is what autograd does.

        Raises ModelError where an input or an output gradient has been written to since.
        """
        uses = Counter(map(id, self.list_weights()))
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self._deferred:  # popped one by one: memory falls as the work goes on
                job = self._deferred.popleft()
                job.require_unchanged()
                rule, weight, kept, dy, _ = job
                key = id(weight)
                uses[key] -= 1
                alone = not uses[key] and key not in sums
                if has_wider_gradient(weight) or (alone and can_add_rows(rule, weight)):
                    accumulate_gradient(rule, weight, kept, dy)
                else:
                    dw = rule(weight, *kept, dy)
                    if weight.grad is not None:  # one of less precision rounds each use
                        dw = dw.to(weight.grad.dtype)
                    if key in sums:
                        dw = sums.pop(key) + dw
                    if uses[key]:
                        sums[key] = dw
                    elif weight.grad is None:
                        weight.grad = dw
                    else:
                        weight.grad += dw
                if on_accumulated is not None and not uses[key]:
                    on_accumulated(weight)


# A global, not a thread-local: on CUDA, backward runs in autograd's own threads.
# Hence one recorded backward at a time per process.
_active_deferred_wgrad: DeferredGradients | None = None


@contextmanager
def defer_weight_gradients(deferred_wgrad: DeferredGradients) -> Iterator[DeferredGradients]:
    """Within this context every backward leaves its weight gradients on `deferred_wgrad`."""
    global _active_deferred_wgrad
    outer, _active_deferred_wgrad = _active_deferred_wgrad, deferred_wgrad
    try:
        yield deferred_wgrad
    finally:
        _active_deferred_wgrad = outer


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, input_rule: SharedInputRule | None = None
) -> Tensor:
    """`x @ weight.T + bias`, splittable: (..., n), (k, n) and (k,) to (..., k).

    The gradient of the bias is cheap, and not left for later.  With an `input_rule`, ranks share
    the weight, and x may be a part of what is multiplied: only that is kept, and put together again
    while its gradient is computed, or later, with that of the weight.  The gradient of x is on its
    way before that of the weight is computed, if this is not left for later, and waited for after.
    """
    y: Tensor = _Linear.apply(x, weight, bias, _LINEAR_RULE, input_rule)  # type: ignore[no-untyped-call]
    return y


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias`, splittable as `linear` is: (..., n), (n, k) and (k,) to (..., k)."""
    y: Tensor = _Linear.apply(x, weight, bias, _MATMUL_RULE, None)  # type: ignore[no-untyped-call]
    return y


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of `weight`, splittable: int64 (...) and (rows, n) to (..., n).

    The row `padding_idx` gets no gradient.

    It has no input gradient to hurry for; it is here because a weight tied to the head
    would otherwise get its two gradients in two additions, and other bits.
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
    """The gradient of a weight, tensor `input_index` of those that a Function was given, for
    autograd.

    None when it went to the tape, or to its sum.
    """
    compiled = torch.compiler.is_compiling()
    if not _can_bypass_autograd(ctx, input_index, weight):
        return rule(weight, *saved, dy)
    if _active_deferred_wgrad is not None:
        _active_deferred_wgrad.defer(rule, weight, saved, dy)
    elif has_wider_gradient(weight):
        accumulate_gradient(rule, weight, saved, dy)
    elif not compiled and can_add_rows(rule, weight) and _is_first_use_in_pass(weight):
        (tokens,) = saved
        return rule.compute_sparse(
            weight, tokens, dy
        )  # for autograd, where there may be other uses
    else:
        return rule(weight, *saved, dy)
    return None


def _can_bypass_autograd(ctx: Any, input_index: int, weight: Tensor) -> bool:
    """Whether the gradient of tensor `input_index`, a weight, may go elsewhere than to autograd."""
    if not can_defer_gradient(weight):
        return False
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[input_index][0]
    if leaf_has_hooks(weight, node):
        return False
    # A hook on this node expects all gradients.  Nodes that torch.compile traced have no count.
    if getattr(ctx, "registrations", None) != count_registrations() and node_has_hooks(ctx):
        return False
    return _will_accumulate(node)


def _will_accumulate(leaf: Node) -> bool:
    """Whether the backward that runs adds to the gradient of a leaf, of which this is the node.

    A `torch.autograd.grad` does not, as within a hook of the backward: it gives some away.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it is asked for the gradient of this leaf
        return False


def _is_first_use_in_pass(weight: Tensor) -> bool:
    """Whether the backward pass that runs asks this of a weight for the first time.

    Two sparse gradients autograd joins to one, in which rows come twice, and which a GPU would add
    in any order.
    """
    running: int = torch._C._current_graph_task_id()
    before = _last_pass_by_weight.get(id(weight), -1)
    _last_pass_by_weight[id(weight)] = max(running, before)
    return running > before  # less within one that has begun another, as of what is checkpointed


_last_pass_by_weight: dict[
    int, int
] = {}  # by weight, the last backward pass that asked: they are numbered


def _save_weights(ctx: Any, *weights: Tensor) -> None:
    # As an attribute: under non-reentrant checkpointing saved tensors come back as
    # detached aliases, whose .grad nobody reads. So autograd's check that the weight is
    # unchanged is ours to do.
    ctx.weights, ctx.versions = weights, [weight._version for weight in weights]
    if not torch.compiler.is_compiling():
        ctx.registrations = (
            count_registrations()
        )  # hooks on this node come later, and change the count


def _get_saved_weights(ctx: Any) -> tuple[Tensor, ...]:
    """The weights, which must be as they were."""
    if ctx.versions != [weight._version for weight in ctx.weights]:
        raise RuntimeError("a weight was changed in place between F and B")
    weights: tuple[Tensor, ...] = ctx.weights
    return weights


_LINEAR_RULE, _MATMUL_RULE = ProductRule(True), ProductRule(False)


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
        ctx.rule, ctx.entry, ctx.dtype = rule, input_rule, x.dtype
        whole = (
            x
            if input_rule is None or input_rule.start_gather is None
            else input_rule.start_gather(x)()
        )
        if rule.is_transposed:
            y = F.linear(whole, weight, bias)
        elif bias is None:
            y = whole @ weight
        else:
            y = torch.addmm(bias, flatten_to_matrix(whole), weight)
            y = y.view(*whole.shape[:-1], weight.shape[-1])
        ctx.save_for_backward(x.to(y.dtype))  # under autocast, what was multiplied
        return _as_non_view(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (x,), (dy,) = _get_saved_weights(ctx), ctx.saved_tensors, dys
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        rule, entry, whole, sum_of_dx = ctx.rule, ctx.entry, None, None
        if needs_dw and entry is not None and entry.start_gather is not None:
            if _active_deferred_wgrad is not None and _can_bypass_autograd(ctx, 1, weight):
                rule = rule._replace(start_gather=entry.start_gather)  # when it is needed
            else:
                whole = entry.start_gather(x)
        back = weight if rule.is_transposed else weight.t()
        dx = dy @ back.to(dy.dtype).conj() if needs_dx else None
        if dx is not None and entry is not None:
            sum_of_dx = entry.start_reduce(dx.to(ctx.dtype).contiguous())
        db = flatten_to_matrix(dy).sum(0) if needs_db else None
        x = x if whole is None else whole()
        dw = _defer_or_compute_wgrad(ctx, 1, rule, weight, (x,), dy) if needs_dw else None
        return dx if sum_of_dx is None else sum_of_dx(), dw, db, None, None


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
        kept = ctx.saved_tensors
        dw = _defer_or_compute_wgrad(ctx, 1, ctx.rule, weight, kept, dy) if needs_dw else None
        return None, dw, None


def _as_non_view(y: Tensor) -> Tensor:
    """The same as no view, which may not be changed in place where a Function made it."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


# ------------------------------------------------------------ any layer


LayerRule = Callable[..., Tensor]  # layer, what the forward has kept, dy -> a gradient


@dataclass(frozen=True)
class SplitLayer:
    """How a layer computes: see `register_splittable_layer`, which makes it."""

    forward: Callable[[Any, Tensor], tuple[Tensor, ...]]  # y, and what is to be kept
    input_grad: LayerRule
    deferred_grads: Mapping[str, LayerRule]
    immediate_grads: Mapping[str, LayerRule]


def run_split_layer(split: SplitLayer, layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer gives for x, such that its backward can be split."""
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
        ctx.how, ctx.layer, ctx.names, ctx.shape = split, layer, names, x.shape
        _save_weights(ctx, *weights)
        y, *kept = split.forward(layer, x)
        ctx.save_for_backward(*kept)
        return _as_non_view(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        weights, kept, how, (dy,) = _get_saved_weights(ctx), ctx.saved_tensors, ctx.how, dys
        needs_dx = ctx.needs_input_grad[3]
        gradients: list[Tensor | None] = []
        asked = ctx.needs_input_grad[4:]
        for k, (name, weight, needs) in enumerate(zip(ctx.names, weights, asked, strict=True), 1):
            rule = partial(
                _compute_layer_gradient,
                ctx.layer,
                name,
                how.immediate_grads.get(name) or how.deferred_grads[name],
            )
            if not needs:
                gradients.append(None)
            elif name in how.immediate_grads:
                gradients.append(rule(weight, *kept, dy))
            else:
                gradients.append(_defer_or_compute_wgrad(ctx, k, rule, weight, kept, dy))
        dx = None
        if needs_dx:
            dx = _require_shape(
                ctx.layer, "its input", ctx.shape, how.input_grad(ctx.layer, *kept, dy)
            )
        return None, None, None, dx, *gradients


def _compute_layer_gradient(
    layer: nn.Module, name: str, rule: LayerRule, weight: Tensor, *saved_and_dy: Tensor
) -> Tensor:
    """The gradient of a parameter, by the rule of its layer."""
    return _require_shape(layer, name, weight.shape, rule(layer, *saved_and_dy)).to(weight.dtype)


def _require_shape(layer: nn.Module, name: str, shape: torch.Size, gradient: Tensor) -> Tensor:
    """A gradient, which must have its shape: autograd, and sums, would spread it."""
    if gradient.shape != shape:
        raise ModelError(
            f"the split of {type(layer).__name__} gives {name}, which is {list(shape)}, "
            f"a gradient of {list(gradient.shape)}"
        )
    return gradient
