"""Preserve state that a repeated step, a measurement or an evaluation must not change.

A stage may count its calls in an attribute, keep hidden states of an earlier microbatch, or use a
private random generator. A forward may write to buffers and to parameters, and an optimizer may
write to its state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from schedir.runtime.autograd.random_streams import get_default_generators
from schedir.runtime.model_checks.memory_overlap import MODULE_ATTRIBUTES
from schedir.runtime.model_checks.tensor_fingerprint import has_same_bits

_Undo = Callable[[], object]
_RESTORED_TYPES: Final = (
    NoneType, Tensor, int, float, str, tuple, list, dict, set, deque,
    torch.Generator, np.random.Generator, Random,
)  # fmt: skip
# The first forward initializes these modules, and the initialization must not be undone.
_SELF_INITIALIZING_TYPES: Final = (DistributedDataParallel, LazyModuleMixin)


class PreservedState(ExitStack):
    """State that is restored at the end of this context, or by `close`.

    Each `add` method records some present state. The state that was added last is restored first.
    All tensors keep their memory.
    """

    def add_fields(self, owner: object, *names: str) -> None:
        """Preserve attributes of an object.

        Args:
            owner: The object.
            *names: The names of the attributes.
        """
        for name in names:
            self.callback(setattr, owner, name, getattr(owner, name))

    def add_tables(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Preserve the entries of dictionaries, such as optimizer states, but not tensor values.

        Args:
            tables: The dictionaries.
        """
        for table in tables:
            self.callback(_refill, table, dict(table))

    def add_values(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> None:
        """Preserve the values of tensors.

        Args:
            tensors: The tensors.
            on_host: True if the copies are in host memory.
        """
        for t in dict.fromkeys(tensors):
            copy = t.detach().to("cpu", copy=True) if on_host else t.detach().clone()
            self.callback(_write, t, copy)

    def add_written_values(self, t: Tensor) -> None:
        """Preserve the values of a tensor, and restore them only if its version counter changed.

        Args:
            t: The tensor.
        """
        version, values = t._version, t.detach().clone()
        self.callback(lambda: _write(t, values) if t._version != version else None)

    def add_gradients(self, parameters: Iterable[Tensor], *, clear: bool = False) -> None:
        """Preserve the `grad` attribute of tensors, but not its values.

        Args:
            parameters: The tensors.
            clear: True to set `grad` to None within the context.
        """
        for p in [*parameters]:
            self.add_fields(p, "grad")
            if clear:
                p.grad = None

    def add_buffers(self, module: nn.Module) -> None:
        """Preserve the buffers of a module and their values.

        Args:
            module: A module; its submodules are included.
        """
        tables = [submodule._buffers for submodule in module.modules()]
        buffers = {b for table in tables for b in table.values() if b is not None}
        self.add_values(map(_narrow_expanded_dims, buffers))
        self.add_tables(tables)

    def add_frozen_parameters(self, module: nn.Module) -> None:
        """Preserve parameters that are not trained, because a forward may write to them.

        The copies are in host memory.

        Args:
            module: A module; its submodules are included.
        """
        for p in module.parameters():
            if not p.requires_grad:
                copy = p.detach().to("cpu", copy=True)
                self.callback(_restore_if_written, p, p.data, copy)

    def add_attributes(self, module: nn.Module) -> None:
        """Preserve the plain attributes of a module.

        The preserved state includes the content of lists, dicts, sets and deques, the values of
        tensors, and the states of generators of torch, numpy and Python. Other objects are not
        restored. Attributes that were added within the context are not removed.

        Args:
            module: A module; its submodules are included.
        """
        tensors: dict[int, Tensor] = {}
        for submodule in module.modules():
            if isinstance(submodule, _SELF_INITIALIZING_TYPES):
                continue
            attributes = {
                name: value
                for name, value in vars(submodule).items()
                if name not in MODULE_ATTRIBUTES and isinstance(value, _RESTORED_TYPES)
            }
            for undo in filter(None, map(_make_content_undo, attributes.values())):
                self.callback(undo)
            self.callback(vars(submodule).update, attributes)
            leaves = (
                leaf for leaf in tree_leaves([*attributes.values()]) if isinstance(leaf, Tensor)
            )
            tensors.update((id(t), t) for t in leaves if not t.is_inference())
        for t in tensors.values():
            self.add_written_values(t)

    def add_modes(self, module: nn.Module) -> None:
        """Preserve whether a module and its submodules are in training mode.

        Args:
            module: The module.
        """
        for submodule in module.modules():
            self.add_fields(submodule, "training")

    def add_generators(self, generators: Iterable[torch.Generator]) -> None:
        """Preserve the states of random generators.

        Args:
            generators: The generators.
        """
        for generator in generators:
            self.callback(generator.set_state, generator.get_state())


@contextmanager
def preserve_module(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Preserve all state of a module that a measurement with one microbatch must not change.

    This state includes torch's generators. Within the context, parameters have no gradients.

    Args:
        module: A module; its submodules are included.
        device: The device of the module.
    """
    with PreservedState() as preserved:
        preserved.add_gradients(module.parameters(), clear=True)
        preserved.add_attributes(module)
        preserved.add_frozen_parameters(module)
        preserved.add_buffers(module)
        preserved.add_generators(get_default_generators(device))
        yield


@torch.no_grad()
def _write(tensor: Tensor, values: Tensor) -> None:
    tensor.detach().copy_(values)


def _restore_if_written(p: nn.Parameter, data: Tensor, copy: Tensor) -> None:
    if not has_same_bits(p.detach().cpu(), copy):
        p.data = data
        data.copy_(copy)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(content)


def _narrow_expanded_dims(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of a buffer with size 1 in expanded dimensions, which have stride 0."""
    strides = buffer.stride() if buffer.layout is torch.strided else ()
    for dim, stride in enumerate(strides):
        if not stride:
            buffer = buffer.narrow(dim, 0, min(1, buffer.shape[dim]))
    return buffer


def _make_content_undo(value: object) -> _Undo | None:
    """Return a function that restores a container's content or a generator's state, or None."""
    if isinstance(value, list):
        return partial(value.__setitem__, slice(None), [*value])
    if isinstance(value, dict | set | deque):
        return partial(_refill, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, Random):
        return partial(value.setstate, value.getstate())
    return None
