"""Real processes for tests: run one function on every rank of a Gloo world."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import FunctionType
from typing import Any

import torch

from schedir.transports.local_processes import (
    GRACE_SECONDS,
    RankError,
    call_in_group,
    collect_results,
    end_processes,
    set_up_child,
)
from schedir.transports.local_processes import run_processes as run_in

__all__ = ["CONTEXT", "RankError", "run", "run_fresh"]

# The children fork from a server that has torch loaded and no threads yet, which is as quick as
# fork and as safe as spawn. The server also loads pytest because each child imports the parent's
# main module, torch._dynamo because every optimizer imports it (a second per child), and the
# picture because every successful run draws it. The last module reads the state of all modules once
# for all children.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "numpy", "pytest", "schedir.training.trainer", "schedir.torch_pipelining",
     "schedir.viz.figures.gantt_chart", __name__, "tests.cpu.initial_globals"]
)  # fmt: skip


def run_fresh(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit: float = 240,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Return the results of `fn(rank, *args)` in new processes, for calls that may end them."""
    return run_in(fn, world_size, *args, context=CONTEXT, timeout=limit, grace_seconds=grace)


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit: float = 240,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Return the results of `fn(rank, *args)` in processes that stay alive for the next call.

    Each call has a new process group and the same seed. The processes end if a call fails, or if
    it leaves a change that the next call would see (`Globals`).
    """
    return _WORLD.run((fn, args), world_size, limit, grace)


class _World:
    """Processes that run one function after the other."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, call: Any, world_size: int, limit: float, grace: float) -> list[Any]:
        """Return the results of a call, which is repeated once if Gloo does not connect.

        In one of several thousand process groups of torch 2.13, `init_process_group` hangs.
        """
        pickled = pickle.dumps(call)
        try:
            return self._run_once(pickled, world_size, limit, grace)
        except RankError as error:
            if not _hangs_in_connect(error):
                raise
            return self._run_once(pickled, world_size, limit, grace)

    def _run_once(self, pickled: bytes, world_size: int, limit: float, grace: float) -> list[Any]:
        while len(self.processes) < world_size:
            self._start()
        pipes, processes = self.pipes[:world_size], self.processes[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            for pipe in pipes:
                pipe.send((world_size, folder, limit, pickled))
            try:
                results = collect_results(pipes, processes, folder, limit, grace)
                changes = [change for pipe in pipes for change in _read_changes(pipe, limit)]
            except BaseException:
                self.end()
                raise
        if changes:
            self.end()
        return results

    def _start(self) -> None:
        if not self.processes:
            # At its end, this process waits for its children, but runs finalizers before.
            Finalize(None, self.end, exitpriority=1)
        pipe, child_pipe = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(len(self.processes), child_pipe))
        process.start()
        child_pipe.close()  # otherwise the pipe stays open when the child dies
        self.processes.append(process)
        self.pipes.append(pipe)

    def end(self) -> None:
        end_processes(self.processes)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


_WORLD = _World()


def _hangs_in_connect(error: RankError) -> bool:
    """Return whether a rank hung before it called the function."""
    texts = error.tracebacks.values()
    return bool(error.hung_ranks) and any("in init_process_group" in text for text in texts)


def _read_changes(pipe: Connection, limit: float) -> list[str]:
    try:
        changes: list[str] = pipe.recv() if pipe.poll(limit) else ["hung"]
    except EOFError:
        return ["died"]
    return changes


def _serve(rank: int, pipe: Connection) -> None:
    from tests.cpu.initial_globals import INITIAL  # loaded by the server

    set_up_child()
    INITIAL.start_process()
    seed = torch.initial_seed()
    while True:
        torch.manual_seed(seed)
        world_size, folder, limit, pickled = pipe.recv()
        call_in_group(rank, world_size, folder, limit, pipe, pickled)
        pipe.send(INITIAL.find_changes())
        gc.collect()


class Globals:
    """The state of a process that a function could change for the next one.

    It contains the functions, classes and constants of modules, which tests replace.
    """

    def __init__(self) -> None:
        self.modules: dict[str, _ModuleIds] = {}
        self.names: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self._add_modules()

    def start_process(self) -> None:
        """Read the state of this process, and the names in modules that only this process has."""
        self.state = _read_state()
        self._add_modules()

    def find_changes(self) -> list[str]:
        """Return the names that have another value than before the call."""
        now = _read_state()
        changes = [name for name, value in self.state.items() if now[name] != value]
        for module, ids in self.modules.items():
            if ids.differ():  # only then, because to compare all names takes 40 ms
                found = [k for k, v in _read_names(module) if self.names.get(k) is not v]
                changes += found
                if not found:
                    self.modules[module] = _ModuleIds(module)
        self._add_modules()
        return changes

    def _add_modules(self) -> None:
        """Read the names of the modules that were loaded since the last call."""
        for name in sys.modules.keys() - self.modules:
            if name.startswith(("schedir.", "torch.distributed")) or name == "torch":
                self.modules[name] = _ModuleIds(name)
                self.names |= _read_names(name)


class _ModuleIds:
    """The identities of the values of a module and of its classes."""

    def __init__(self, module: str) -> None:
        names = vars(sys.modules[module])
        classes = [value for value in names.values() if _is_class_of(value, module)]
        self.values = [vars(owner).values() for owner in (sys.modules[module], *classes)]
        self.ids = self._read()

    def differ(self) -> bool:
        return self.ids != self._read()

    def _read(self) -> list[int]:
        return [*map(id, chain.from_iterable(self.values))]


def _is_class_of(value: Any, module: str) -> bool:
    return type(value) is type and value.__module__ == module


def _read_names(module: str) -> Iterator[tuple[str, Any]]:
    """Return the functions, classes and constants of a module, and the functions of its classes."""
    for name, value in [*vars(sys.modules[module]).items()]:
        if issubclass(type(value), _KINDS) or name.isupper():
            yield f"{module}.{name}", value
        if _is_class_of(value, module):
            for own, inner in [*vars(value).items()]:
                if issubclass(type(inner), _KINDS):
                    yield f"{module}.{name}.{own}", inner


_KINDS = (FunctionType, type, classmethod, staticmethod, property)


def _read_state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": [*sys.path],
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "threads": {thread.name for thread in threading.enumerate()},
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
    }
