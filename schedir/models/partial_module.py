"""A module that shares submodules and parameters with another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from typing import TypeVar

from torch import nn

from schedir.errors import ModelError

M = TypeVar("M", bound=nn.Module)


def select_submodules(module: M, names: Iterable[str]) -> M:
    """A module like another, with those of its submodules and parameters that are named: the very
    same, under the same names.  What is not named is None there, or missing in a ModuleDict.

    A piece of a stage that computes with `part.proj.weight`, and another with `part.proj.bias`, are
    so stages with parameters of their own; their methods are those of the module.

    Raises ModelError for a name that the module has not.

    >>> from torch import nn
    >>> layer = nn.Linear(4, 2)
    >>> bias = select_submodules(layer, ["bias"])
    >>> bias.bias is layer.bias, bias.weight, [name for name, _ in bias.named_parameters()]
    (True, None, ['bias'])
    """
    inside: dict[str, list[str]] = defaultdict(list)
    for name in names:
        first, _, rest = name.partition(".")
        inside[first].append(rest)
    part = copy(module)
    many = isinstance(module, nn.ModuleDict)
    part._parameters = dict.fromkeys(module._parameters)
    part._modules = {} if many else dict.fromkeys(module._modules)
    part._buffers = dict(module._buffers) if not inside.keys() - module._buffers.keys() else {}
    for name, below in inside.items():
        if name in module._parameters:
            part._parameters[name] = module._parameters[name]
        elif (own := module._modules.get(name)) is not None:
            part._modules[name] = own if "" in below else select_submodules(own, below)
        else:
            raise ModelError(f"{type(module).__name__} has no parameter or submodule {name!r}")
    return part
