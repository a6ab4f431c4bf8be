"""Parse and print numbers with units, such as 80GB, 300GB/s and 312TFLOP/s."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final, NamedTuple

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import LARGEST_RATE, NO_NUMBERS, SMALLEST_RATE, decimal
from schedir.ir.cost.sizes import bytes_of


class _Unit(NamedTuple):
    """How a text says a number of a field, and an example of it."""

    read: Callable[[str], float]
    example: str
    zero: bool = False  # whether it may be 0
    units: tuple[str, ...] = ()  # in which it is written, the largest first


def _with_units(**units: float) -> Callable[[str], float]:
    """Reads a number that one of these may follow."""

    def read(text: str) -> float:
        name = next((name for name in units if text.endswith(name)), "")
        number, unit = decimal(text[: len(text) - len(name)]), units.get(name, 1.0)
        return number * unit if unit >= 1 else number / round(1 / unit)  # 10us is 1e-05

    return read


def _rate(text: str) -> float:
    return bytes_of(text[:-2]) if text.endswith("/s") else decimal(text)


_FLOPS: Final = {f"{p}FLOP/s": 1000.0 ** (k + 3) for k, p in enumerate("GTP")}
_SIZES: Final = ("TB", "GB", "MB")
_PER_SECOND: Final = _Unit(_rate, "300GB/s", units=tuple(f"{size}/s" for size in _SIZES))
_DONE: Final = _Unit(
    _with_units(**_FLOPS), "312TFLOP/s or 312e12", units=("PFLOP/s", "TFLOP/s", "GFLOP/s")
)
_UNITS: Final = {
    "nodes": _Unit(decimal, "8"),
    "gpus_per_node": _Unit(decimal, "8"),
    "flops": _DONE,
    "memory": _Unit(bytes_of, "80GB", units=_SIZES),
    "hbm": _PER_SECOND,
    "nvlink": _PER_SECOND,
    "network": _PER_SECOND,
    "host": _PER_SECOND,
    "disk": _PER_SECOND,
    "dram": _PER_SECOND,
    "latency": _Unit(
        _with_units(us=1e-6, ms=1e-3, s=1.0), "5us or 5e-6", zero=True, units=("s", "ms", "us")
    ),
    "kernel_us": _Unit(decimal, "4", zero=True),
    "peak": _DONE,
    "sms": _Unit(decimal, "108"),
    "itemsize": _Unit(decimal, "2"),
    "processors": _Unit(decimal, "16"),
    "host_memory": _Unit(bytes_of, "200GB", units=_SIZES),
}


def number_of(name: str, value: Any) -> float:
    """A field's number; UsageError that says which unit it takes."""
    unit = _UNITS[name]
    try:
        if isinstance(value, NO_NUMBERS) and not isinstance(value, str):
            raise TypeError
        number = unit.read(value.strip()) if isinstance(value, str) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = inf
    except (TypeError, ValueError):
        raise UsageError(
            f"cluster: {name} is a number like {unit.example}, not {describe(value)}", fields=[name]
        ) from None
    if not (number > 0 or (unit.zero and number == 0)):
        above = "0 or more" if unit.zero else "more than 0"
        raise UsageError(f"cluster: {name} must be {above}, not {describe(value)}", fields=[name])
    if number and not SMALLEST_RATE <= number <= LARGEST_RATE:
        raise UsageError(
            f"cluster: {name} must be from {SMALLEST_RATE:g} to {LARGEST_RATE:g}, not "
            f"{describe(value)}",
            fields=[name],
        )
    return number


def text_of(name: str, number: float) -> str:
    """A field's number as TOML: with a unit where that says it shortly, and always the same number.

    >>> text_of("hbm", 2.039e12), text_of("latency", 5e-6), text_of("nodes", 8)
    ('"2039GB/s"', '"5us"', '8')
    """
    for unit in _UNITS[name].units:
        one = number_of(name, f"1{unit}")
        text = f"{number / one:.6g}{unit}"
        if number >= one and "e" not in text and number_of(name, text) == number:
            return f'"{text}"'
    return repr(number)
