"""Compiled: a loop as machine code, where numba is installed (`schedir[fast]`) and it pays.

To import numba and what it has compiled takes some tenths of a second, more than a command has to
compute.  So it is rented until it would have been cheaper to buy: whoever walks without it notes
how long that took, and once this is as much as numba costs, it is imported.  At worst a process
takes twice the time that it could, and a command that walks once never pays.  The results are the
same to the last bit.  `load` asks for it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from schedir.errors import UsageError

Loop = Callable[..., Any]

PRICE: Final = 0.2  # seconds to import numba and a loop from its cache; 0.4 the first time ever
_rent = [0.0]  # seconds that this process has walked without


def paid(seconds: float) -> None:
    """Note the seconds that a walk took for which a compiled loop would have taken next to none."""
    _rent[0] += seconds


def compiled(loops: tuple[Loop, ...]) -> tuple[Loop, ...] | None:
    """Loops as machine code, where that pays by now, or somebody has asked for it; or None."""
    return _compile(loops) if _rent[0] >= PRICE else None


def within(loops: tuple[Loop, ...], seconds: float) -> tuple[Loop, ...] | None:
    """Loops as machine code, if they can be had in a part of some seconds; or None.

    From numba's cache on disk they come at once; a loop that is not there yet takes a second or
    two to be compiled.
    """
    found = _compile(loops)
    ready = found is not None and all(map(_is_kept, found))
    return found if seconds >= (0.4 if ready else 8) else None


def _is_kept(loop: Any) -> bool:
    """Whether a compiled loop is in numba's cache on disk, as far as its files tell."""
    try:
        folder = Path(loop.stats.cache_path)
        own = f"{Path(loop.py_func.__code__.co_filename).stem}.{loop.py_func.__name__}-"
        return any(file.name.startswith(own) for file in folder.iterdir())
    except (OSError, TypeError):  # there is no cache
        return False


def load() -> None:
    """From now on, run compiled loops.  Raises UsageError where numba cannot be imported."""
    if _numba() is None:
        raise UsageError("numba cannot be imported", hint="pip install schedir[fast]")
    paid(PRICE)


@cache
def _numba() -> Any:
    """The module numba, or None where it is not there, does not fit or is told not to compile."""
    try:
        import numba.extending
    except Exception:  # of its own, too, where it does not fit to numpy or Python
        return None
    return None if numba.config.DISABLE_JIT else numba


@cache
def _compile(loops: tuple[Loop, ...]) -> tuple[Loop, ...] | None:
    if (numba := _numba()) is None:
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
