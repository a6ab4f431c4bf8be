"""Find the handler of each instruction.

A handler takes the `ProgramState` of a rank and an instruction `i`, does all look-ups once, and
returns a `Call`. So each run of the Call does only the work of the instruction.

Handlers are in the modules of this folder whose names end with `_handlers`. Each module has a
dictionary `HANDLERS`: opcode -> handler. A module may also have `WRAPPERS`: opcode -> function that
extends the handler of another module. A wrapper takes the arguments (handler, state, i), and
returns the extended `Call`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Opcode
from schedir.runtime.program_state import Call, Handler, ProgramState, chain_calls


def _import_handler_modules() -> Iterator[ModuleType]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(folder).__path__):
        if module.name.endswith("_handlers"):
            yield import_module(f"{folder}.{module.name}")


def collect_handlers(modules: Sequence[Any]) -> dict[Opcode, Handler]:
    """Return a dict: opcode -> handler, for all handlers of modules, with all wrappers applied.

    Args:
        modules: Modules with `HANDLERS`, and perhaps `WRAPPERS`.

    Raises:
        ImportError: Two modules have a handler of the same opcode.
    """
    handlers: dict[Opcode, Handler] = {}
    module_names: dict[Opcode, str] = {}
    for module in modules:
        for op, handler in module.HANDLERS.items():
            if op in handlers:
                raise ImportError(
                    f"{module.__name__} has a handler of {op.name}, and so has {module_names[op]}"
                )
            handlers[op], module_names[op] = handler, module.__name__
    for module in modules:
        for op, wrap in getattr(module, "WRAPPERS", {}).items():
            handlers[op] = partial(wrap, handlers[op])
    return handlers


HANDLERS: Final = collect_handlers([*_import_handler_modules()])


def link_stream(state: ProgramState) -> list[Call]:
    """Return the calls of a rank's stream, in the order of the stream.

    If the transport groups transfers, some of the calls also begin or end a group.

    Args:
        state: The state of the rank.
    """
    stream, transport = state.stream, state.transport
    calls = [HANDLERS[i.op](state, i) for i in stream]
    is_joined = [*stream.joined.tolist(), False]
    for k, i in enumerate(stream if transport.is_grouped else ()):
        if INSTRUCTIONS[i.op].lane not in (Lane.ACT, Lane.GRAD) or is_joined[k] == is_joined[k + 1]:
            continue
        run = calls[k].run
        is_first = is_joined[k + 1]
        calls[k] = calls[k]._replace(
            run=chain_calls(transport.start_group, run)
            if is_first
            else chain_calls(run, transport.end_group)
        )
    return calls
