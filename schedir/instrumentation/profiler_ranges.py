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


def is_profiling() -> bool:
    """Whether a profiler of this process runs.  Asked once at the start of a step."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def make_instruction_range(action: str) -> record_function:
    """The range of an action."""
    return record_function(f"PP:{action}")


def make_posting_range(actions: Sequence[str]) -> record_function:
    """The range in which messages are posted, as one where they are several."""
    return make_instruction_range(_join_actions(actions, "BATCH_P2P"))


def _join_actions(actions: Sequence[str], kind: str) -> str:
    once = list(dict.fromkeys(actions))  # tensors of one boundary are one message
    return once[0] if len(once) == 1 else f"({';'.join(once)}){kind}"


def open_reduction_ranges(stages: Iterable[int]) -> ExitStack:
    """The range of one call that reduces the gradients of several stages: one of each stage."""
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(make_instruction_range(f"{stage}REDUCE_GRAD"))
        return stack.pop_all()


class PostedMessages:
    """Messages under way: their wait is a range, and all else is that of torch's works."""

    def __init__(self, works: Sequence[Any], actions: Sequence[str]) -> None:
        self.works = works
        name = _join_actions(actions, "WAIT")
        self.name = name if ";" in name else re.sub("(?=SEND|RECV)", "WAIT_", name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with make_instruction_range(self.name):
            return [work.wait(*args, **kwargs) for work in self.works][-1]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.works[-1], name)


def wrap_works(works: Sequence[Any], actions: Sequence[str]) -> list[PostedMessages]:
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
        self.num_users = 0
        self._planned: list[tuple[Any, str, Callable[..., Any]]] = []
        self._installed: list[tuple[Any, str, Any, Any]] = []
        self._lock = Lock()

    def wrap_function(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Plan that `ours(original, *args)` is called where `owner.name(*args)` is.

        Raises UsageError where `owner` itself has no such function.
        """
        if not callable(vars(owner).get(name)):
            raise UsageError(f"{owner.__name__} has no {name}")
        self._planned.append((owner, name, wrapper))

    def __enter__(self) -> None:
        with self._lock:
            self.num_users += 1
            if self.num_users > 1:
                return
            for owner, name, ours in self._planned:
                original = vars(owner)[name]
                called = self._make_wrapper(original, ours)
                self._installed.append((owner, name, original, called))
                setattr(owner, name, called)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.num_users -= 1
            while self._installed and not self.num_users:
                owner, name, original, called = self._installed.pop()
                if vars(owner).get(name) is called:  # or others have come on top, and stay
                    setattr(owner, name, original)

    def _make_wrapper(self, original: Any, wrapper: Callable[..., Any]) -> Any:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.num_users:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        return called
