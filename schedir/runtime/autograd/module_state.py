"""Restore the state that a module keeps outside of its parameters and buffers.

A stage may count its calls in an attribute, keep hidden values of an earlier microbatch, or use its
own random generator. A run that only measures shapes must not change this state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import NoneType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from schedir.runtime.model_checks.memory_overlap import MODULE_ATTRIBUTES

_Undo = Callable[[], object]
_RESTORED_TYPES: Final = (
    NoneType, Tensor, int, float, str, tuple, list, dict, set, deque,
    torch.Generator, np.random.Generator, Random,
)  # fmt: skip
# The first forward initializes these modules, and the initialization must not be undone.
_SELF_INITIALIZING_TYPES: Final = (DistributedDataParallel, LazyModuleMixin)


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[None]:
    """Restore a module's plain attributes and its gradients at the end of this context.

    It restores the attributes, the content of lists, dicts, sets and deques, the values of tensors,
    and the states of generators of torch, numpy and Python. Other objects are not restored, and new
    attributes stay. Within the context parameters have no gradients. The gradients that a backward
    computes there are dropped.

    Args:
        module: A module; its submodules are included.
    """
    undo = list(_make_attribute_undos(module))
    before = {p: p.grad for p in module.parameters()}
    for p in before:
        p.grad = None
    try:
        yield
    finally:
        for each in undo:
            each()
        for p, gradient in before.items():
            p.grad = gradient


def _make_attribute_undos(module: nn.Module) -> Iterator[_Undo]:
    """Yield functions that restore the attributes of a module and their content."""
    tensors: dict[int, Tensor] = {}
    for owner in module.modules():
        if isinstance(owner, _SELF_INITIALIZING_TYPES):
            continue
        attributes = vars(owner)
        own = {
            name: value
            for name, value in attributes.items()
            if name not in MODULE_ATTRIBUTES and isinstance(value, _RESTORED_TYPES)
        }
        yield lambda attributes=attributes, own=own: attributes.update(own)  # type: ignore[misc]
        for value in own.values():
            if (undo := _make_content_undo(value)) is not None:
                yield undo
        leaves = (leaf for leaf in tree_leaves([*own.values()]) if isinstance(leaf, Tensor))
        tensors.update((id(t), t) for t in leaves if not t.is_inference())
    for t in tensors.values():
        yield _make_write_undo(t)


def _make_content_undo(value: object) -> _Undo | None:
    """Return a function that restores the content of a container or the state of a generator."""
    if isinstance(value, list):
        items = [*value]
        return lambda: value.__setitem__(slice(None), items)
    if isinstance(value, dict | set | deque):
        content = value.copy()

        def refill() -> None:
            value.clear()
            (value.extend if isinstance(value, deque) else value.update)(content)

        return refill
    if isinstance(value, torch.Generator):
        drawn = value.get_state()
        return lambda: value.set_state(drawn)
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if isinstance(value, Random):
        before = value.getstate()
        return lambda: value.setstate(before)
    return None


def _make_write_undo(tensor: Tensor) -> _Undo:
    """Return a function that restores the values of a tensor if it was written to."""
    version, numbers = tensor._version, tensor.detach().clone()

    def put_back() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.detach().copy_(numbers)

    return put_back
