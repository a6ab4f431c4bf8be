"""Names of profiler ranges, and wrappers of functions, for all instrumented trainers.

The name of a range is `PP:` and the name that torch.distributed.pipelining gives to the action:

    PP:0F3                          the forward of microbatch 3 on stage 0; B, I and W likewise
    PP:0SEND_F3                     the post of a message, or post and wait if it blocks
    PP:(0SEND_F1;0RECV_B0)BATCH_P2P the post of several messages as a batch
    PP:1WAIT_RECV_F3                the wait for a message that was posted before
    PP:(0SEND_F1;0RECV_B0)WAIT      the wait for a batch of messages
    PP:1REDUCE_GRAD, PP:STEP        the reduction of gradients, and the optimizer step

SEND_F has the stage of the sender, and RECV_F that of the receiver.
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
    """Return whether a profiler of this process runs. Call this once at the start of a step."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def make_instruction_range(action: str) -> record_function:
    """Return the range of an action.

    Args:
        action: The name of the action, without `PP:`.
    """
    return record_function(f"PP:{action}")


def make_posting_range(actions: Sequence[str]) -> record_function:
    """Return the range in which one message, or a batch of messages, is posted.

    Args:
        actions: The names of the messages.
    """
    return make_instruction_range(_join_actions(actions, "BATCH_P2P"))


def _join_actions(actions: Sequence[str], kind: str) -> str:
    unique_actions = list(dict.fromkeys(actions))  # All tensors of a boundary have the same name.
    return unique_actions[0] if len(unique_actions) == 1 else f"({';'.join(unique_actions)}){kind}"


def open_reduction_ranges(stages: Iterable[int]) -> ExitStack:
    """Open one range per stage for a call that reduces the gradients of several stages.

    Args:
        stages: The stages.

    Returns:
        A context that closes the ranges.
    """
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(make_instruction_range(f"{stage}REDUCE_GRAD"))
        return stack.pop_all()


class PostedMessages:
    """Torch's works of posted messages, with a `wait` that is a profiler range.

    All other attributes are those of the last work.

    Args:
        works: Torch's works.
        actions: The names of the messages.
    """

    def __init__(self, works: Sequence[Any], actions: Sequence[str]) -> None:
        self.works = works
        name = _join_actions(actions, "WAIT")
        self.name = name if ";" in name else re.sub("(?=SEND|RECV)", "WAIT_", name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for all works in one range, and return the result of the last one.

        Args:
            *args: Arguments of the works' `wait`.
            **kwargs: Keyword arguments of the works' `wait`.
        """
        with make_instruction_range(self.name):
            return [work.wait(*args, **kwargs) for work in self.works][-1]

    def is_completed(self) -> bool:
        """Return whether all works are completed."""
        return all(work.is_completed() for work in self.works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.works[-1], name)


def wrap_works(works: Sequence[Any], actions: Sequence[str]) -> list[PostedMessages]:
    """Wrap the works of messages so that their waits are ranges.

    Args:
        works: Torch's works: one work for each message, or one work for all messages of a batch.
        actions: The name of each message. Messages with the same name share a range.
    """
    if len(works) != len(actions):
        return [PostedMessages(works, actions)] if works else []
    works_by_action: dict[str, list[Any]] = {}
    for work, action in zip(works, actions, strict=True):
        works_by_action.setdefault(action, []).append(work)
    return [
        PostedMessages(action_works, [action]) for action, action_works in works_by_action.items()
    ]


class FunctionPatches:
    """Wrappers of other packages' functions, which a `with` block installs.

    Several blocks, also of several threads, may use the same object at the same time. The first
    block installs the wrappers, and the block that ends last removes them.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self._planned: list[tuple[Any, str, Callable[..., Any]]] = []
        self._installed: list[tuple[Any, str, Any, Any]] = []
        self._lock = Lock()

    def wrap_function(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Add a wrapper: `wrapper(original, *args)` is called instead of `owner.name(*args)`.

        Args:
            owner: The module or class that has the function.
            name: The name of the function.
            wrapper: The function to call.

        Raises:
            UsageError: `owner` does not define such a function.
        """
        if not callable(vars(owner).get(name)):
            raise UsageError(f"{owner.__name__} has no function {name}")
        self._planned.append((owner, name, wrapper))

    def __enter__(self) -> None:
        with self._lock:
            self.num_users += 1
            if self.num_users > 1:
                return
            for owner, name, wrapper in self._planned:
                original = vars(owner)[name]
                patched_function = self._make_wrapper(original, wrapper)
                self._installed.append((owner, name, original, patched_function))
                setattr(owner, name, patched_function)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.num_users -= 1
            while self._installed and not self.num_users:
                owner, name, original, patched_function = self._installed.pop()
                # Other code may have wrapped the function since.
                if vars(owner).get(name) is patched_function:
                    setattr(owner, name, original)

    def _make_wrapper(self, original: Any, wrapper: Callable[..., Any]) -> Any:
        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if not self.num_users:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        return patched
