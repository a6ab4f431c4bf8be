"""Undone: a step that leaves nothing behind but what is made at first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.runtime.batch import Batch, Microbatches
from schedir.runtime.buffers import restored
from schedir.runtime.precision import has_hooks, innermost, is_gated, is_torchs
from schedir.runtime.rank import State


@contextmanager
def undone(state: State) -> Iterator[None]:
    """What steps change is after this context what it was, in the same memory.

    That is weights, which a forward may write to, and of which the host keeps a copy meanwhile;
    buffers, of a loss that is a module, too; the loss scale; torch's generators; and the gradients
    that Parameters have which are the optimizer's or the loss's alone.

    An optimizer that the device can hold back is launched, and held back: what it has it keeps,
    and state that it makes at its first step is there.  Any other of torch's own steps, and the
    host keeps a copy of its state, too.  One that is not torch's, or has hooks on its step, is left
    out: it may change what nobody else knows of.
    """
    inner: Any = innermost(state.optimizer)
    steps = is_torchs(inner) and not is_gated(inner) and not has_hooks(inner)
    modules = [stage.module for stage in state.stages.values()]
    own = {p for module in modules for p in module.parameters()}
    if isinstance(state.loss, nn.Module):
        modules.append(state.loss)
    others = {p for group in getattr(inner, "param_groups", ()) for p in group["params"]}
    others |= {p for module in modules for p in module.parameters()} - own
    others -= own.union(getattr(state.optimizer, "main", ()))
    gradients = [(p, p.grad) for p in others]
    kept: list[object] = [*own, *(gradient for _, gradient in gradients)]
    if state.loss_scale is not None:
        kept += [state.loss_scale.value, state.loss_scale.good]
    if steps:
        kept += [*inner.param_groups, *inner.state.values()]
    tensors = dict.fromkeys(t for t in tree_leaves(kept) if isinstance(t, Tensor))
    was = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
    step, might = state.draws.step, state.may_step  # this may be within another
    state.may_step = might and steps
    try:
        with ExitStack() as changed:
            for module in modules:
                changed.enter_context(restored(module, state.device))
            if steps:
                changed.enter_context(_with_its_tables(inner))
            yield
    finally:
        state.may_step, state.draws.step = might, step
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for t, before in was:
                t.copy_(before)


def copied(batch: Batch) -> Batch:
    """A batch of which each look gives a copy, as a loss may write to its target, and inputs may
    have a `grad`."""
    inputs, targets, scale, keywords = batch
    return Batch(Copies(inputs), Copies(targets), scale, Copies(keywords))


class Copies(Sequence[Any]):
    """Microbatches of which each look gives a copy."""

    def __init__(self, of: Microbatches) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, mb: Any) -> Any:
        return tree_map_only(Tensor, _copy, self.of[mb])


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@contextmanager
def _with_its_tables(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """After this context an optimizer's state and its groups hold what they held before."""
    tables: list[dict[Any, Any]] = [
        optimizer.state, *optimizer.state.values(), *optimizer.param_groups,
    ]  # fmt: skip
    was = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, was, strict=True):
            table.clear()
            table.update(before)
