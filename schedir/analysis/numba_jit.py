"""Compile loops to machine code with numba, if it is installed (`schedir[fast]`) and saves time.

To import numba and its compiled loops takes some tenths of a second, which is more than a small
command computes.  So a process walks without numba at first, and adds up how long that takes.
numba is imported before the walk that would bring this sum to the price of the import.  So a
process takes at most about twice the time that it could, and a command that walks one small program
never imports numba.  Results with and without numba are equal to the last bit.  `enable_numba`
imports numba at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Literal

from schedir.errors import UsageError
from schedir.extras import install_command

Loop = Callable[..., Any]

# Whether a search ran compiled loops, and if not, why.
NumbaStatus = Literal["used", "not needed", "not installed", "not usable", "no time"]

IMPORT_SECONDS: Final = (
    0.2  # seconds to import numba and a loop from its cache; 0.4 the first time ever
)
MIN_COMPILE_SECONDS: Final = (
    8.0  # seconds of search that pay for compiling its loops, which takes about 5
)
MIN_LOAD_SECONDS: Final = 0.4  # seconds of search that pay for loading them from numba's cache
_uncompiled_seconds = [0.0]  # seconds that this process has walked without numba


def add_uncompiled_time(seconds: float) -> None:
    """Note the seconds that a walk took for which a compiled loop would have taken next to none."""
    _uncompiled_seconds[0] += seconds


def compile_if_worthwhile(loops: tuple[Loop, ...], seconds: float = 0.0) -> tuple[Loop, ...] | None:
    """Return `loops` as machine code, or None where numba is missing or does not pay yet.

    Args:
        loops: Python functions that numba can compile.
        seconds: About how long the caller would take without machine code.
    """
    return _compile(loops) if _uncompiled_seconds[0] + seconds >= IMPORT_SECONDS else None


def compile_within(
    loops: tuple[Loop, ...], seconds: float
) -> tuple[tuple[Loop, ...] | None, NumbaStatus]:
    """Return `loops` as machine code, or None, and why.

    Args:
        loops: Python functions that numba can compile.
        seconds: How long the caller goes on.  `MIN_LOAD_SECONDS` are enough for loops that this
        process
            has compiled, or that are in numba's cache on disk.  Others need `MIN_COMPILE_SECONDS`.
    """
    found = _compile(loops)
    if found is None:
        return None, "not installed" if find_spec("numba") is None else "not usable"
    each: tuple[Any, ...] = found  # numba gives them attributes
    ready = all(loop.signatures or _is_cached(loop) for loop in each)
    if seconds < (MIN_LOAD_SECONDS if ready else MIN_COMPILE_SECONDS):
        return None, "no time"
    return found, "used"


def _is_cached(loop: Any) -> bool:
    """Whether a compiled loop is in numba's cache on disk, as far as its files tell."""
    try:
        folder = Path(loop.stats.cache_path)
        own = f"{Path(loop.py_func.__code__.co_filename).stem}.{loop.py_func.__name__}-"
        return any(file.name.startswith(own) for file in folder.iterdir())
    except (OSError, TypeError):  # there is no cache
        return False


def enable_numba() -> None:
    """From now on, run compiled loops.  Raises UsageError where numba cannot be imported."""
    if not is_installed():
        raise UsageError("numba cannot be imported", hint=install_command("numba"))
    add_uncompiled_time(IMPORT_SECONDS)


def is_installed() -> bool:
    """Return whether numba can be imported and may compile."""
    return _import_numba() is not None


@cache
def _import_numba() -> Any:
    """The module numba, or None where it is not there, does not fit or is told not to compile."""
    try:
        import numba.extending
    except Exception:  # of its own, too, where it does not fit to numpy or Python
        return None
    return None if numba.config.DISABLE_JIT else numba


@cache
def _compile(loops: tuple[Loop, ...]) -> tuple[Loop, ...] | None:
    if (numba := _import_numba()) is None:
        return None
    for loop in loops:
        for name in loop.__code__.co_names:
            called = loop.__globals__.get(name)
            if isinstance(called, FunctionType):  # keep it in that file: numba looks at no other
                numba.extending.register_jitable(called)
    try:
        return tuple(map(numba.njit(cache=True), loops))
    except RuntimeError:  # there is no folder that it may keep them in
        return tuple(map(numba.njit, loops))
