"""Undone: a step that leaves nothing behind but what is made at first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from schedir.runtime.buffers import restored
from schedir.runtime.precision import innermost, is_gated
from schedir.runtime.rank import State


@contextmanager
def undone(state: State) -> Iterator[None]:
    """What steps change is after this context what it was, in the same memory.

    An optimizer that the device can hold back is launched, and held back: what it has it keeps,
    and state that it makes at its first step is there.  Any other of torch's own steps, and the
    host keeps a copy of weights and state meanwhile.  One that is not torch's is left out: it may
    change what nobody else knows of.
    """
    inner: Any = innermost(state.optimizer)
    steps = _is_torchs(inner) and not is_gated(inner)
    tensors: list[Tensor] = []
    if state.loss_scale is not None:
        tensors += [state.loss_scale.value, state.loss_scale.good]
    if steps:
        tensors += getattr(state.optimizer, "main", [])
        tensors += (p for stage in state.stages.values() for p in stage.module.parameters())
    was = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
    step, might = state.draws.step, state.may_step  # this may be within another
    state.may_step = might and steps
    try:
        with ExitStack() as changed:
            for stage in state.stages.values():
                changed.enter_context(restored(stage.module, state.device))
            if steps:
                changed.enter_context(_stepped_back(inner))
            yield
    finally:
        state.may_step, state.draws.step = might, step
        with torch.no_grad():
            for t, before in was:
                t.copy_(before)


def _is_torchs(optimizer: object) -> bool:
    ours = type(optimizer).__module__.startswith("torch.optim.")
    return ours and isinstance(optimizer, torch.optim.Optimizer)


@contextmanager
def _stepped_back(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """After this context an optimizer has the state, and its groups the options, of before."""
    was = {p: {name: _kept(it) for name, it in own.items()} for p, own in optimizer.state.items()}
    options = [
        {name: deepcopy(it) for name, it in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for p in [p for p in optimizer.state if p not in was]:
            del optimizer.state[p]
        for p, own in was.items():
            for it, copy in own.values():
                if isinstance(it, Tensor):
                    it.copy_(copy)
            optimizer.state[p] = {
                name: it if isinstance(it, Tensor) else copy for name, (it, copy) in own.items()
            }
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)


def _kept(it: Any) -> tuple[Any, Any]:
    """A part of an optimizer's state, and a copy of it."""
    return it, it.detach().to("cpu", copy=True) if isinstance(it, Tensor) else deepcopy(it)
