"""State sizes: how large what is trained of a stage is, with its gradient and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError, in_words
from schedir.ir.zero import ModelStates
from schedir.runtime.layout import Share, buckets_of
from schedir.runtime.precision import innermost
from schedir.runtime.reduction import BUCKET

State = Callable[[list[nn.Parameter]], Any]  # makes an optimizer


def _gradient(p: nn.Parameter) -> float:
    """Bytes of a parameter's gradient."""
    return float(p.numel() * (p.grad_dtype or p.dtype).itemsize)


def states_of(module: nn.Module, state: float | State, share: Share, parts: range) -> ModelStates:
    """Bytes of a stage's parameters that are trained, of their gradients and the optimizer's state.

    All are whole, as `sizes_of` tells them; `parts` are those of which the one with most counts.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    storages = {x.data_ptr(): x.nbytes() for x in (p.untyped_storage() for p in trained)}
    params = float(sum(storages.values()))
    if share == Share():
        return ModelStates(params, float(sum(map(_gradient, trained))), _state(trained, state))
    tied = getattr(module, "tied_weight", None)
    alone = [p for p in trained if p is tied]
    buckets = buckets_of(trained, BUCKET, share.replicas, alone, aligned=True)
    grads = float(sum(b.numel * b.grad_dtype.itemsize for b in buckets))
    if not share.zero:
        return ModelStates(params, grads, _state(trained, state))
    params = float(sum(b.numel * b.dtype.itemsize for b in buckets))
    most = 0.0
    for k in parts:
        pieces = []
        for bucket in buckets:
            for low, high, _ in bucket.ranges(k):
                if high > low:
                    numbers = torch.empty(high - low, dtype=bucket.dtype, device="meta")
                    pieces.append(nn.Parameter(numbers))
                    pieces[-1].grad_dtype = bucket.grad_dtype
        most = max(most, _state(pieces, state))
    return ModelStates(params, grads, share.replicas * most)


def _state(trained: Sequence[nn.Parameter], state: float | State) -> float:
    """Bytes that an optimizer holds for parameters once it has stepped, without them and their
    gradients.

    One that is made is made of parameters on the device "meta", which have no memory, and so
    takes none itself.
    """
    if not callable(state):
        return state * sum(p.numel() for p in trained)
    if not trained:
        return 0.0
    own = []
    for p in trained:
        own.append(nn.Parameter(torch.empty_like(p, device="meta")))
        own[-1].grad_dtype = p.grad_dtype
        own[-1].grad = torch.empty_like(p, device="meta", dtype=p.grad_dtype or p.dtype)
    try:
        optimizer = state(own)
        optimizer.step()
        held = [
            *getattr(optimizer, "main", ()),
            *tree_leaves([*innermost(optimizer).state.values()]),
        ]
    except Exception as error:
        raise ModelError(
            f"the optimizer cannot be measured without its memory: {in_words(error)}",
            hint="state=8.0, say: how many bytes it holds for each number",
        ) from error
    # On "meta" all memory is at the address 0, so what has one memory is told by its tensor.
    tensors = {id(x): x for x in held if isinstance(x, Tensor)}
    return float(sum(x.untyped_storage().nbytes() for x in tensors.values()))
