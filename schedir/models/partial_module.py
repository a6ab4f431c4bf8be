"""Modules that share submodules and parameters with another module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from typing import TypeVar

from torch import nn

from schedir.errors import ModelError

M = TypeVar("M", bound=nn.Module)


def select_submodules(module: M, names: Iterable[str]) -> M:
    """Return a copy of a module that has only the named submodules and parameters.

    The copy shares these submodules and parameters with the module, under the same names. Other
    parameters and submodules are None in the copy, or missing in a ModuleDict. The copy has the
    methods of the module. For example, one segment of a stage can have only `proj.weight`, and
    another segment only `proj.bias`.

    Args:
        module: The module.
        names: Dotted names of submodules and parameters.

    Raises:
        ModelError: The module has no submodule or parameter with one of the names.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(4, 2)
        >>> bias = select_submodules(layer, ["bias"])
        >>> bias.bias is layer.bias, bias.weight, [name for name, _ in bias.named_parameters()]
        (True, None, ['bias'])
    """
    names_below: dict[str, list[str]] = defaultdict(list)
    for name in names:
        child, _, remainder = name.partition(".")
        names_below[child].append(remainder)
    part = copy(module)
    is_dict = isinstance(module, nn.ModuleDict)
    part._parameters = dict.fromkeys(module._parameters)
    part._modules = {} if is_dict else dict.fromkeys(module._modules)
    part._buffers = dict(module._buffers) if not names_below.keys() - module._buffers.keys() else {}
    for name, child_names in names_below.items():
        if name in module._parameters:
            part._parameters[name] = module._parameters[name]
        elif (submodule := module._modules.get(name)) is not None:
            is_complete = "" in child_names
            part._modules[name] = (
                submodule if is_complete else select_submodules(submodule, child_names)
            )
        else:
            raise ModelError(f"{type(module).__name__} has no parameter or submodule {name!r}")
    return part
