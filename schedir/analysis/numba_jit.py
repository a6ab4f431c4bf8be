"""Compile loops to machine code with numba, if that saves time.

numba is optional (`schedir[fast]`). The import of numba and its compiled loops takes some tenths of
a second. A small command needs less time for its computation. So a process starts without numba,
and adds up the time of its longest-path computations. If the next computation would bring this sum
to the time of the import, the process imports numba first. So a process takes at most about twice
the shortest possible time, and a command with one small computation never imports numba. Results
with and without numba are bitwise equal. `enable_numba` imports numba immediately.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Literal

from schedir.errors import UsageError
from schedir.extras import install_command

Loop = Callable[..., Any]

# The use of compiled loops in a search: "used", or the reason why they were not used.
NumbaStatus = Literal["used", "not needed", "not installed", "not usable", "no time"]

IMPORT_SECONDS: Final = (
    0.2  # seconds to import numba and load a loop from its cache; 0.4 on the first import
)
MIN_COMPILE_SECONDS: Final = (
    8.0  # seconds; a shorter search does not compile its loops, which takes about 5 seconds
)
MIN_LOAD_SECONDS: Final = 0.4  # seconds; a shorter search does not load cached loops
_uncompiled_seconds = [0.0]  # seconds that this process spent in loops without numba


def add_uncompiled_time(seconds: float) -> None:
    """Add the time of a longest-path computation without compiled loops to the sum of this process.

    Args:
        seconds: The time of the computation, in seconds.
    """
    _uncompiled_seconds[0] += seconds


def compile_if_worthwhile(loops: tuple[Loop, ...], seconds: float = 0.0) -> tuple[Loop, ...] | None:
    """Return `loops` as machine code, or None if numba is missing or would not save time yet.

    Args:
        loops: Python functions that numba can compile.
        seconds: Estimated seconds of the caller's next computation without machine code.
    """
    return _compile(loops) if _uncompiled_seconds[0] + seconds >= IMPORT_SECONDS else None


def compile_within(
    loops: tuple[Loop, ...], seconds: float
) -> tuple[tuple[Loop, ...] | None, NumbaStatus]:
    """Return `loops` as machine code if the time suffices, and the status.

    Args:
        loops: Python functions that numba can compile.
        seconds: Seconds that the caller has left. Loops that this process has compiled, or that are
            in numba's cache on disk, need `MIN_LOAD_SECONDS`. Other loops need
            `MIN_COMPILE_SECONDS`.

    Returns:
        The compiled loops or None, and the status.
    """
    compiled = _compile(loops)
    if compiled is None:
        return None, "not installed" if find_spec("numba") is None else "not usable"
    is_ready = all(loop.dispatcher.signatures or _is_cached(loop.dispatcher) for loop in compiled)
    if seconds < (MIN_LOAD_SECONDS if is_ready else MIN_COMPILE_SECONDS):
        return None, "no time"
    return compiled, "used"


def _is_cached(dispatcher: Any) -> bool:
    """Return whether a compiled loop seems to be in numba's cache on disk."""
    try:
        folder = Path(dispatcher.stats.cache_path)
        loop = dispatcher.py_func
        prefix = f"{Path(loop.__code__.co_filename).stem}.{loop.__name__}-"
        return any(file.name.startswith(prefix) for file in folder.iterdir())
    except (OSError, TypeError):  # numba has no cache folder
        return False


def enable_numba() -> None:
    """Use compiled loops in this process from now on.

    Raises:
        UsageError: numba cannot be imported.
    """
    if not is_installed():
        raise UsageError("numba cannot be imported", hint=install_command("numba"))
    add_uncompiled_time(IMPORT_SECONDS)


def is_installed() -> bool:
    """Return whether numba can be imported and may compile."""
    return _import_numba() is not None


@cache
def _import_numba() -> Any:
    """Return the module numba, or None if its import fails or compiling is disabled."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        return None  # The import alone takes a second.
    try:
        import numba.extending
    except Exception:  # numba raises its own errors for an unsupported numpy or Python
        return None
    return None if numba.config.DISABLE_JIT else numba


class CompiledLoop:
    """A loop that numba compiles at its first call, and then stores in its cache on disk.

    Args:
        dispatcher: The function that numba makes of the loop.
    """

    def __init__(self, dispatcher: Any) -> None:
        self.dispatcher = dispatcher

    def __call__(self, *args: Any) -> Any:
        """Run the loop."""
        try:
            return self.dispatcher(*args)
        except OSError:  # The disk is full. The loop is compiled, but it is not in the cache.
            return self.dispatcher(*args)


@cache
def _compile(loops: tuple[Loop, ...]) -> tuple[CompiledLoop, ...] | None:
    if (numba := _import_numba()) is None:
        return None
    for loop in loops:
        for name in loop.__code__.co_names:
            called = loop.__globals__.get(name)
            # numba compiles a cached loop again only if the file of the loop changes. So the called
            # function must be in that file.
            if isinstance(called, FunctionType):
                numba.extending.register_jitable(called)
    try:
        dispatchers = [*map(numba.njit(cache=True), loops)]
    except RuntimeError:  # numba found no writable cache folder
        dispatchers = [*map(numba.njit, loops)]
    return tuple(map(CompiledLoop, dispatchers))
