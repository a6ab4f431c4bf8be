"""Kill a process before a chosen system call, to test what remains on the disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

SYSTEM = ("posix", "_io", "fcntl")  # Python modules with system calls


def kill_before_system_call(call: int, work: Callable[[], object]) -> bool:
    """Run work in a process that kills itself before a system call; return whether it did."""
    child = os.fork()
    if child == 0:
        left = call

        def profile(frame: FrameType, event: str, function: object) -> None:
            nonlocal left
            if event == "c_call":
                owner = getattr(function, "__self__", None)
                module = getattr(function, "__module__", None) or type(owner).__module__
                if module in SYSTEM:
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.setprofile(profile)
            work()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed"
    return False
