"""Handlers: what runs each instruction, one for every row of the instruction table.

A handler links an instruction of a rank to a Call: everything that can be looked up is looked
up then, and running it is only the work.  They are in the modules of this folder whose names end
with `_handlers`: by opcode in `HANDLERS`, and in `WRAPPERS` what goes around those of others.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Final

from schedir.ir.ops import Opcode
from schedir.runtime.rank import Handler


def _modules() -> Iterator[ModuleType]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(folder).__path__):
        if module.name.endswith("_handlers"):
            yield import_module(f"{folder}.{module.name}")


def _found() -> dict[Opcode, Handler]:
    modules, found = [*_modules()], dict[Opcode, Handler]()
    for module in modules:
        found |= module.HANDLERS
    for module in modules:
        for op, wrap in getattr(module, "WRAPPERS", {}).items():
            found[op] = wrap(found[op])
    return found


HANDLERS: Final = _found()
