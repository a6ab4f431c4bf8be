"""Faults in one process of a run, for tests and for `benchmarks/faults.py`."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from schedir.ir.isa.instructions import Lane
from schedir.models import gpt
from schedir.runtime import program_runner
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.program_state import Call, ProgramState
from schedir.training.batches import prefetch


def forbid_allocations() -> None:
    """Limit the memory of this process to the memory that it uses now. The hard limit stays."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.getrlimit(resource.RLIMIT_AS)[1]))


def cause_fault(kind: str) -> None:
    """Make a fault happen in this process. "" is no fault."""
    if not kind:
        return
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise":
        raise ValueError("no such luck")
    if kind == "sleep":
        time.sleep(1000)
    while kind == "spin":
        pass
    if kind == "memory":
        forbid_allocations()
        torch.ones(1 << 28)
    if kind == "exit":
        os._exit(7)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    sys.exit(3)


def fail_at_call(number: int, kind: str, whole: Any, at: Callable[[], object]) -> Any:
    """Return a function whose call of that number has a fault, and calls `at` before it."""
    left = itertools.count(number, -1)

    def called(*given: Any, **named: Any) -> Any:
        if next(left) == 1:
            at()
            cause_fault(kind)
        return whole(*given, **named)

    return called


def install_fault(kind: str, where: str, number: int, at: Callable[[], object] = int) -> None:
    """Let this process have a fault in set-up, or at some call.

    The call with that number is one of a batch ("between" steps), of a layer ("inside" of an
    instruction) or of the loss.
    """
    if where == "set-up":
        gpt.build_stage = fail_at_call(1, kind, gpt.build_stage, at)
    if where == "between":
        take = fail_at_call(number, kind, prefetch.Prefetch.take, at)
        prefetch.Prefetch.take = take  # type: ignore[method-assign]
    if where == "inside":
        forward = fail_at_call(number, kind, gpt.Layer.forward, at)
        gpt.Layer.forward = forward  # type: ignore[method-assign]
    if where == "loss":
        gpt.loss = fail_at_call(number, kind, gpt.loss, at)


def install_instruction_fault(k: int, step: int, when: str, fails: Callable[[], object]) -> None:
    """Let instruction k of a rank's first program fail in a step, where the first step is 1.

    It fails "before" the wait for its inputs, "within" its work, "behind" the work that it does at
    once, or "on the lane" on which it starts work.
    """
    of, lanes = cast(Any, program_runner), cast(Any, CopyLanes)
    link, start = of.link_stream, lanes.start
    steps, starts = itertools.count(1), [False]

    def linked(state: ProgramState) -> list[Call]:
        calls: list[Call] = link(state)
        if state.program is state.resources.program:
            calls[k] = Call(None, _failing(calls[k], state))
        return calls

    def _failing(call: Call, state: ProgramState) -> Callable[[], None]:
        def called() -> None:
            due = not state.is_evaluating and next(steps) == step
            if due and when == "before":
                fails()
            if call.wait is not None:
                call.wait()
            if due and when == "within":
                fails()
            starts[0] = due and when == "on the lane"
            call.run()
            starts[0] = False
            if due and when == "behind":
                fails()

        return called

    def started(
        own: CopyLanes, lane: Lane, run: Callable[[], object], *more: Any, **named: Any
    ) -> Any:
        def failing() -> None:
            fails()
            run()

        return start(own, lane, failing if starts[0] else run, *more, **named)

    of.link_stream, lanes.start = linked, started
