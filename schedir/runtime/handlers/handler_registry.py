"""Find the handler of each instruction.

A handler links an instruction of a rank to a Call: everything that can be looked up is looked
up then, and running it is only the work.  They are in the modules of this folder whose names end
with `_handlers`: by opcode in `HANDLERS`, and in `WRAPPERS` what goes around those of others.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Opcode
from schedir.runtime.rank_state import Call, Handler, State, chain_calls


def _import_handler_modules() -> Iterator[ModuleType]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(folder).__path__):
        if module.name.endswith("_handlers"):
            yield import_module(f"{folder}.{module.name}")


def collect_handlers(modules: Sequence[Any]) -> dict[Opcode, Handler]:
    """The handlers of modules by opcode, wrapped.  Raises ImportError for two of one opcode."""
    found: dict[Opcode, Handler] = {}
    home: dict[Opcode, str] = {}
    for module in modules:
        for op, handler in module.HANDLERS.items():
            if op in found:
                raise ImportError(
                    f"{module.__name__} has a handler of {op.name}, and so has {home[op]}"
                )
            found[op], home[op] = handler, module.__name__
    for module in modules:
        for op, wrap in getattr(module, "WRAPPERS", {}).items():
            found[op] = wrap(found[op])
    return found


HANDLERS: Final = collect_handlers([*_import_handler_modules()])


def link_stream(state: State) -> list[Call]:
    """The calls of a rank's Stream, in its order.

    A transport that groups is told where a group of transfers begins and ends.
    """
    stream, transport = state.stream, state.transport
    calls = [HANDLERS[i.op](state, i) for i in stream]
    joined = [*stream.joined.tolist(), False]
    for k, i in enumerate(stream if transport.is_grouped else ()):
        if INSTRUCTIONS[i.op].lane not in (Lane.ACT, Lane.GRAD) or joined[k] == joined[k + 1]:
            continue
        run = calls[k].run
        first = joined[k + 1]
        calls[k] = calls[k]._replace(
            run=chain_calls(transport.start_group, run)
            if first
            else chain_calls(run, transport.end_group)
        )
    return calls
