"""Names of profiler ranges, and wrappers of functions, for all instrumented trainers.

A range says an instruction as torch.distributed.pipelining names its actions, behind `PP:`:

    PP:0F3                          the forward of microbatch 3 on stage 0; B, I and W likewise
    PP:0SEND_F3                     a message is posted, or the whole of one that blocks
    PP:(0SEND_F1;0RECV_B0)BATCH_P2P several, issued as one
    PP:1WAIT_RECV_F3                the wait for a message that was posted before
    PP:(0SEND_F1;0RECV_B0)WAIT      the one wait for several
    PP:1REDUCE_GRAD, PP:STEP        gradients are reduced, the optimizer steps

The stage of SEND_F is the sender's, that of RECV_F the receiver's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch.profiler import record_function

from schedir.errors import UsageError


def profiling() -> bool:
    """Whether a profiler of this process runs.  Asked once at the start of a step."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def mark(action: str) -> record_function:
    """The range of an action."""
    return record_function(f"PP:{action}")


def posting(actions: Sequence[str]) -> record_function:
    """The range in which messages are posted, as one where they are several."""
    return mark(_together(actions, "BATCH_P2P"))


def _together(actions: Sequence[str], kind: str) -> str:
    once = list(dict.fromkeys(actions))  # tensors of one boundary are one message
    return once[0] if len(once) == 1 else f"({';'.join(once)}){kind}"


def reducing(stages: Iterable[int]) -> ExitStack:
    """The range of one call that reduces the gradients of several stages: one of each stage."""
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(mark(f"{stage}REDUCE_GRAD"))
        return stack.pop_all()


class PostedMessages:
    """Messages under way: their wait is a range, and all else is that of torch's works."""

    def __init__(self, works: Sequence[Any], actions: Sequence[str]) -> None:
        self.works = works
        name = _together(actions, "WAIT")
        self.name = name if ";" in name else re.sub("(?=SEND|RECV)", "WAIT_", name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with mark(self.name):
            return [work.wait(*args, **kwargs) for work in self.works][-1]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.works[-1], name)


def posted(works: Sequence[Any], actions: Sequence[str]) -> list[PostedMessages]:
    """The works of messages, one of each message, or one of all where a batch has one work."""
    if len(works) != len(actions):
        return [PostedMessages(works, actions)] if works else []
    each: dict[str, list[Any]] = {}
    for work, action in zip(works, actions, strict=True):
        each.setdefault(action, []).append(work)
    return [PostedMessages(some, [action]) for action, some in each.items()]


class FunctionPatches:
    """Functions of others, each with one of ours around it for as long as a `with` lasts.

    Several may last at a time; the first puts ours there, and the last takes them away.
    """

    def __init__(self) -> None:
        self.users = 0
        self._wanted: list[tuple[Any, str, Callable[..., Any]]] = []
        self._placed: list[tuple[Any, str, Any, Any]] = []
        self._lock = Lock()

    def around(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Plan that `ours(original, *args)` is called where `owner.name(*args)` is.

        Raises UsageError where `owner` itself has no such function.
        """
        if not callable(vars(owner).get(name)):
            raise UsageError(f"{owner.__name__} has no {name}")
        self._wanted.append((owner, name, ours))

    def __enter__(self) -> None:
        with self._lock:
            self.users += 1
            if self.users > 1:
                return
            for owner, name, ours in self._wanted:
                original = vars(owner)[name]
                called = self._around(original, ours)
                self._placed.append((owner, name, original, called))
                setattr(owner, name, called)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.users -= 1
            while self._placed and not self.users:
                owner, name, original, called = self._placed.pop()
                if vars(owner).get(name) is called:  # or others have come on top, and stay
                    setattr(owner, name, original)

    def _around(self, original: Any, ours: Callable[..., Any]) -> Any:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.users:
                return original(*args, **kwargs)
            return ours(original, *args, **kwargs)

        return called
