"""The dI/dW split: a backward pass that leaves its weight gradients for later.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) cut the backward of a layer in two:
the gradient of the input, which the stage before waits for, and the gradient of the
weights, which only the optimizer needs. Here the cut lies inside `linear` and
`embedding`, which `split_linears` puts in the place of a module's own: while a `Tape`
is recording, their backward computes the input gradient only and notes on the tape what
the weight gradient needs; `Tape.run` computes it.

    with recording(tape):
        torch.autograd.backward(y, dy)      # BackwardInput
    ...
    tape.run()                              # BackwardWeight

Everything else (norms, biases, position embeddings) is cheap and stays in the first
half. The gradients are those of the whole backward bit for bit, as long as the tapes of
one weight run in the order in which their backward passes did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedir.kernels.weight_gradient import accumulate_

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]  # weight, input, dy -> dW


class _Deferred(NamedTuple):
    rule: Rule
    weight: Tensor
    input: Tensor
    dy: Tensor


class Tape:
    """What one backward pass left undone: its weight gradients, in order.

    `len(tape)` counts them; 0 after a recorded backward means that nothing was split
    (no `linear` took part, or torch.compile ran the backward behind our back).

    The tape keeps inputs and output gradients alive. The last of these may be the very
    tensor given to `torch.autograd.backward`: do not overwrite it before `run`.
    """

    def __init__(self) -> None:
        self._deferred: deque[_Deferred] = deque()

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, rule: Rule, weight: Tensor, input: Tensor, dy: Tensor) -> None:
        """Leave `weight.grad += rule(weight, input, dy)` for `run`."""
        # Detached, or the tape would keep the graph behind the input alive.
        self._deferred.append(_Deferred(rule, weight, input.detach(), dy.detach()))

    def tensors(self) -> Iterator[Tensor]:
        """The inputs and output gradients that it keeps."""
        for job in self._deferred:
            yield from (job.input, job.dy)

    def run(self) -> None:
        """Compute every weight gradient, add it to `weight.grad`, and empty the tape.

        An existing `grad` is added to in place, so it may be a view of a flat buffer.
        A weight used several times (tied embeddings) gets one addition of the sum, in
        the order of the backward pass, because that is what autograd does.
        """
        uses: dict[int, int] = {}
        for job in self._deferred:
            uses[id(job.weight)] = uses.get(id(job.weight), 0) + 1
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self._deferred:  # popped one by one: memory falls as the work goes on
                rule, weight, input, dy = self._deferred.popleft()
                if _adds_up_wider(weight):
                    _add(rule, weight, input, dy)
                    continue
                key, dw = id(weight), rule(weight, input, dy)
                if key in sums:
                    dw = sums.pop(key) + dw
                uses[key] -= 1
                if uses[key]:
                    sums[key] = dw
                elif weight.grad is None:
                    weight.grad = dw
                else:
                    weight.grad += dw


# A global, not a thread-local: on CUDA, backward runs in autograd's own threads.
# Hence one recorded backward at a time per process.
_tape: Tape | None = None


@contextmanager
def recording(tape: Tape) -> Iterator[Tape]:
    """Within this context every backward leaves its weight gradients on `tape`."""
    global _tape
    outer, _tape = _tape, tape
    try:
        yield tape
    finally:
        _tape = outer


def split_linears(module: nn.Module) -> nn.Module:
    """Make every `nn.Linear` and `nn.Embedding` within a module splittable, in place.

    Parameters, names, hooks and results stay as they are, bit for bit; returns the module. Left
    alone are layers with a forward of their own (subclasses), and embeddings with a norm, sparse
    or scaled gradients. A weight gets its gradient in I where it is used otherwise, as by
    `nn.MultiheadAttention`, or is computed (pruned, parametrized), or has hooks. Under
    `torch.compile` nothing may be split: the executor then refuses.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = SplitLinear
        elif type(layer) is nn.Embedding and not (
            layer.max_norm or layer.sparse or layer.scale_grad_by_freq
        ):
            layer.__class__ = SplitEmbedding
    return module


class SplitLinear(nn.Linear):
    """An `nn.Linear` whose weight gradient can be left for later."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class SplitEmbedding(nn.Embedding):
    """An `nn.Embedding` whose gradient can be left for later."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, self.padding_idx)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, splittable: (..., n), (k, n) and (k,) to (..., k).

    The gradient of the bias is cheap, and not left for later.
    """
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def embedding(tokens: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """Rows of `weight`, splittable: int64 (...) and (rows, n) to (..., n).

    The row `padding` gets no gradient.

    It has no input gradient to hurry for; it is here because a weight tied to the head
    would otherwise get its two gradients in two additions, and other bits.
    """
    y: Tensor = _Embedding.apply(tokens, weight, padding)  # type: ignore[no-untyped-call]
    return y


def _weight_gradient(ctx: Any, rule: Rule, input: Tensor, dy: Tensor) -> Tensor | None:
    """The weight gradient for autograd, or None when it went to the tape."""
    weight: Tensor = ctx.weight
    if not can_wait(weight):
        return rule(weight, input, dy)
    if _tape is not None:
        _tape.defer(rule, weight, input, dy)
    elif _adds_up_wider(weight):
        _add(rule, weight, input, dy)
    else:
        return rule(weight, input, dy)
    return None


def can_wait(weight: Tensor) -> bool:
    """Whether a gradient may be left for later: only a leaf collects its own, and hooks see none
    but autograd's.
    """
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and not hooks


def _adds_up_wider(weight: Tensor) -> bool:
    """Whether gradients are added up in a wider type: then each at once, in the product if it can.

    Autograd would round each to the weight's own type first.
    """
    return weight.grad is not None and weight.grad.dtype != weight.dtype


def _add(rule: Rule, weight: Tensor, input: Tensor, dy: Tensor) -> None:
    """Add a gradient to one of another type."""
    assert weight.grad is not None
    with torch.no_grad():
        if rule is _linear_dw:
            accumulate_(weight.grad, _rows(dy), _rows(input))
        else:
            weight.grad += rule(weight, input, dy)


def _remember_weight(ctx: Any, weight: Tensor) -> None:
    # As an attribute: under non-reentrant checkpointing saved tensors come back as
    # detached aliases, whose .grad nobody reads. So autograd's check that the weight is
    # unchanged is ours to do.
    ctx.weight, ctx.version = weight, weight._version


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _remember_weight(ctx, weight)
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype))  # under autocast, what was multiplied
        # A view may not be changed in place where a Function made it.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x,), (dy,) = ctx.saved_tensors, dys
        if ctx.weight._version != ctx.version:
            raise RuntimeError("a weight was changed in place between F and B")
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = dy @ ctx.weight.to(dy.dtype).conj() if needs_dx else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs_db else None
        return dx, _weight_gradient(ctx, _linear_dw, x, dy) if needs_dw else None, db


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        _remember_weight(ctx, weight)
        ctx.rule = partial(_embedding_dw, padding=-1 if padding is None else padding)
        return F.embedding(tokens, weight, padding)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,), (dy,) = ctx.saved_tensors, dys
        needs_dw = ctx.needs_input_grad[1]
        return None, _weight_gradient(ctx, ctx.rule, tokens, dy) if needs_dw else None, None


def _linear_dw(weight: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    # A product and then a sum: fused into the accumulator (addmm) the bits differ.
    return (_rows(dy).t() @ _rows(x).conj()).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _embedding_dw(weight: Tensor, tokens: Tensor, dy: Tensor, padding: int) -> Tensor:
    rows = weight.shape[0]
    dw: Tensor = torch.ops.aten.embedding_dense_backward(dy, tokens, rows, padding, False)
    return dw
