"""Kill a process before a chosen system call, to test what remains on the disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

# Modules with system calls, and their functions that change no file. A kill before one of them
# leaves what a kill before the next change leaves.
READING: Final[dict[str, tuple[str, ...]]] = {
    "posix": (
        "fspath", "stat", "lstat", "fstat", "is_dir", "scandir", "statvfs", "_path_normpath",
        "getpid", "close", "__exit__",
    ),
    "_io": ("fileno",),
    "fcntl": (),
}  # fmt: skip


def kill_before_system_call(call: int, work: Callable[[], object]) -> bool:
    """Run work in a process that kills itself before a system call that can change a file.

    Args:
        call: The number of such calls that the process makes.
        work: The function that the process runs.

    Returns:
        True if the process killed itself, and False if `work` ended first.
    """
    child = os.fork()
    if child == 0:
        left = call

        def profile(frame: FrameType, event: str, function: object) -> None:
            nonlocal left
            if event == "c_call":
                owner = getattr(function, "__self__", None)
                module = getattr(function, "__module__", None) or type(owner).__module__
                if module in READING and function.__name__ not in READING[module]:  # type: ignore[attr-defined]
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
