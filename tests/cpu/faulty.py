"""What goes wrong in one process of a run, for tests and for `benchmarks/faults.py`."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from schedir.training import gpt, prefetch


def fault(kind: str) -> None:
    """What happens to a process."""
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
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        torch.ones(1 << 28)
    if kind == "exit":
        os._exit(7)
    if kind == "interrupt":
        raise KeyboardInterrupt
    sys.exit(3)


def after(number: int, kind: str, whole: Any, at: Callable[[], object]) -> Any:
    """A function whose call of that number has a fault, and calls `at` before."""
    left = itertools.count(number, -1)

    def called(*given: Any, **named: Any) -> Any:
        if next(left) == 1:
            at()
            fault(kind)
        return whole(*given, **named)

    return called


def goes_wrong(kind: str, where: str, number: int, at: Callable[[], object] = int) -> None:
    """Let this process have a fault: in set-up, or at the so many-th batch ("between" steps),
    layer ("inside" of an instruction) or loss."""
    if where == "set-up":
        gpt.build_stage = after(1, kind, gpt.build_stage, at)
    if where == "between":
        take = after(number, kind, prefetch.Prefetch.take, at)
        prefetch.Prefetch.take = take  # type: ignore[method-assign]
    if where == "inside":
        forward = after(number, kind, gpt.Layer.forward, at)
        gpt.Layer.forward = forward  # type: ignore[method-assign]
    if where == "loss":
        gpt.loss = after(number, kind, gpt.loss, at)
