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
from typing import Any, Final

from schedir.errors import UsageError

Loop = Callable[..., None]

PRICE: Final = 0.2  # seconds to import numba and a loop from its cache; 0.4 the first time ever
_rent = [0.0]  # seconds that this process has walked without


def paid(seconds: float) -> None:
    """Note the seconds that a walk took for which a compiled loop would have taken next to none."""
    _rent[0] += seconds


def compiled(loops: tuple[Loop, ...]) -> tuple[Loop, ...] | None:
    """Loops as machine code, where that pays by now, or somebody has asked for it; or None."""
    return _compile(loops) if _rent[0] >= PRICE else None


def load() -> None:
    """From now on, run compiled loops.  Raises UsageError where numba cannot be imported."""
    if _numba() is None:
        raise UsageError("numba cannot be imported", hint="pip install schedir[fast]")
    paid(PRICE)


@cache
def _numba() -> Any:
    """The module numba, or None where it is not there, does not fit or is told not to compile."""
    try:
        import numba
    except Exception:  # of its own, too, where it does not fit to numpy or Python
        return None
    return None if numba.config.DISABLE_JIT else numba


@cache
def _compile(loops: tuple[Loop, ...]) -> tuple[Loop, ...] | None:
    if (numba := _numba()) is None:
        return None
    try:
        return tuple(map(numba.njit(cache=True), loops))
    except RuntimeError:  # there is no folder that it may keep them in
        return tuple(map(numba.njit, loops))
