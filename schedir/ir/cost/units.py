"""Parse and print numbers with units, such as 80GB, 300GB/s and 312TFLOP/s."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import Any, Final, NamedTuple

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_RATE, MIN_RATE, NON_NUMBER_TYPES, parse_decimal
from schedir.ir.cost.sizes import parse_bytes


class _Unit(NamedTuple):
    """The text form of a field's numbers: a parser, an example, and units for printing."""

    parse: Callable[[str], float]
    example: str
    can_be_zero: bool = False
    suffixes: tuple[str, ...] = ()  # Units for printing.  The largest is first.
    high: float = MAX_RATE
    base: str = ""  # The quantity that a number without a unit counts, such as bytes per second.
    # A number without a unit that is at least `suspicious_from` and less than `suspicious_below`
    # probably lacks the unit `usual`.
    usual: str = ""
    suspicious_from: float = 0.0
    suspicious_below: float = 0.0
    # The bounds of the numbers of real machines, see `get_physical_bounds`.
    physical_low: float = MIN_RATE
    physical_high: float = MAX_RATE


def _make_unit_parser(**units: float) -> Callable[[str], float]:
    """Return a parser of numbers with one of these units, or without a unit.

    Each unit is given as name=factor.
    """

    def read(text: str) -> float:
        name = next((name for name in units if text.endswith(name)), "")
        number = parse_decimal(text[: len(text) - len(name)])
        unit = units.get(name, 1.0)
        # A division by 1e6 rounds better than a product with 1e-6: 10us is exactly 1e-05.
        return number * unit if unit >= 1 else number / round(1 / unit)

    return read


def _parse_bandwidth(text: str) -> float:
    return parse_bytes(text[:-2]) if text.endswith("/s") else parse_decimal(text)


_FLOP_UNITS: Final = {f"{p}FLOP/s": 1000.0 ** (k + 3) for k, p in enumerate("GTP")}
_BYTE_UNITS: Final = ("TB", "GB", "MB")
_BANDWIDTH_UNIT: Final = _Unit(
    _parse_bandwidth, "300GB/s", suffixes=tuple(f"{size}/s" for size in _BYTE_UNITS),
    base="bytes per second", usual="GB/s", suspicious_below=1e5, physical_low=1e8,
    physical_high=1e15,
)  # fmt: skip
_FLOPS_UNIT: Final = _Unit(
    _make_unit_parser(**_FLOP_UNITS),
    "312TFLOP/s or 312e12",
    suffixes=("PFLOP/s", "TFLOP/s", "GFLOP/s"),
    base="operations per second",
    usual="TFLOP/s",
    suspicious_below=1e5,
    physical_low=1e9,
    physical_high=1e18,
)
_LATENCY_UNIT: Final = _Unit(
    _make_unit_parser(us=1e-6, ms=1e-3, s=1.0),
    "5us or 5e-6",
    can_be_zero=True,
    suffixes=("s", "ms", "us"),
    base="seconds",
    usual="us",
    suspicious_from=0.5,
    suspicious_below=1e6,
    physical_low=1e-7,
    physical_high=0.5,
)
_MEMORY_UNIT: Final = _Unit(
    parse_bytes, "80GB", suffixes=_BYTE_UNITS, base="bytes", usual="GB", suspicious_below=1e3,
    physical_high=1e15,
)  # fmt: skip
# A number of bits per second, such as 400Gb/s and 400 Gbps.
_BITS_PATTERN = re.compile(r"\s*([0-9.]+)\s*([kMGT])(?:b/s|bps|bits?/s|bit)\s*")
_UNIT_BY_FIELD: Final = {
    "nodes": _Unit(parse_decimal, "8"),
    "gpus_per_node": _Unit(parse_decimal, "8"),
    "flops": _FLOPS_UNIT,
    "memory": _MEMORY_UNIT,
    "hbm_bandwidth": _BANDWIDTH_UNIT,
    "nvlink_bandwidth": _BANDWIDTH_UNIT,
    "network_bandwidth": _BANDWIDTH_UNIT._replace(physical_high=2e12),
    "host_bandwidth": _BANDWIDTH_UNIT,
    "disk_bandwidth": _BANDWIDTH_UNIT,
    "dram_bandwidth": _BANDWIDTH_UNIT,
    "latency": _LATENCY_UNIT,
    "network_latency": _LATENCY_UNIT,
    "jitter": _Unit(
        parse_decimal, "0.02", can_be_zero=True, high=1.0, physical_low=1e-4, physical_high=0.3
    ),
    "uncertainty": _Unit(parse_decimal, "0.05", can_be_zero=True),
    "calibrated_gpus": _Unit(parse_decimal, "16"),
    "kernel_us": _Unit(
        parse_decimal, "4", can_be_zero=True, physical_low=0.5, physical_high=10_000.0
    ),
    "data_loading_us": _Unit(parse_decimal, "50", can_be_zero=True, physical_high=1e9),
    "peak": _FLOPS_UNIT,
    "fp8_peak": _FLOPS_UNIT,
    "fp4_peak": _FLOPS_UNIT,
    "num_sms": _Unit(parse_decimal, "108"),
    "itemsize": _Unit(parse_decimal, "2"),
    "processors": _Unit(parse_decimal, "16"),
    "host_memory": _MEMORY_UNIT,
}


def find_forgotten_unit(name: str, number: float) -> tuple[str, str]:
    """Return what a number without a unit counts, and the unit that the user probably means.

    Args:
        name: Name of a field of `Cluster`.
        number: The number.

    Returns:
        Two texts, which are empty if the number can be right without a unit.

    Example:
        >>> find_forgotten_unit("nvlink_bandwidth", 300), find_forgotten_unit("latency", 5e-6)
        (('bytes per second', 'GB/s'), ('', ''))
    """
    unit = _UNIT_BY_FIELD[name]
    is_suspicious = number > 0 and unit.suspicious_from <= number < unit.suspicious_below
    return (unit.base, unit.usual) if is_suspicious else ("", "")


def get_physical_bounds(name: str) -> tuple[float, float]:
    """Return the lowest and the highest number that a calibration finds for a field of `Cluster`.

    No machine has a number above these bounds, and the file of a cluster must not have one. A
    `Cluster` that is made in Python may have one, such as a network without a limit. Numbers below
    the bounds are valid everywhere, because small examples have slow machines.

    Args:
        name: Name of the field.

    Example:
        >>> get_physical_bounds("kernel_us")
        (0.5, 10000.0)
    """
    unit = _UNIT_BY_FIELD[name]
    return unit.physical_low, unit.physical_high


def require_physical(name: str, number: float) -> None:
    """Raise an error if a number is too large for any machine.

    Args:
        name: Name of a field of `Cluster`.
        number: The number, in the unit of the field.

    Raises:
        UsageError: The number is above the bound of `get_physical_bounds`.
    """
    unit = _UNIT_BY_FIELD[name]
    if number > unit.physical_high:
        raise UsageError(
            f"cluster: {name} must be at most {unit.physical_high:g}"
            f"{unit.base and f' {unit.base}'}, not {number:g}",
            hint=f"a number such as {unit.example}",
            fields=[name],
        )


def _convert_bits(name: str, value: Any) -> str:
    """Return a hint with the bytes per second if a value is a number of bits per second, or ""."""
    match = _BITS_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if not match or _UNIT_BY_FIELD[name].parse is not _parse_bandwidth:
        return ""
    number = parse_decimal(match[1]) / 8
    return f'8 bits are a byte: {name} = "{number:g}{match[2]}B/s"'


def parse_cluster_field(name: str, value: Any) -> float:
    """Convert a value of a field of `Cluster` to a number.

    Args:
        name: Name of the field.
        value: A number, or a text with a unit.

    Returns:
        The number, in the unit of the field.

    Raises:
        UsageError: The value is not a number with a unit of this field, or is out of range.
    """
    unit = _UNIT_BY_FIELD[name]
    try:
        if isinstance(value, NON_NUMBER_TYPES) and not isinstance(value, str):
            raise TypeError
        number = unit.parse(value.strip()) if isinstance(value, str) else float(value)
    except OverflowError:  # An integer with hundreds of digits does not fit into a float.
        number = inf
    except (TypeError, ValueError):
        raise UsageError(
            f"cluster: {name} must be a number such as {unit.example}, not {describe(value)}",
            hint=_convert_bits(name, value),
            fields=[name],
        ) from None
    if not (number > 0 or (unit.can_be_zero and number == 0)):
        above = "0 or more" if unit.can_be_zero else "more than 0"
        raise UsageError(f"cluster: {name} must be {above}, not {describe(value)}", fields=[name])
    if number and not MIN_RATE <= number <= unit.high:
        raise UsageError(
            f"cluster: {name} must be from {MIN_RATE:g} to {unit.high:g}, not {describe(value)}",
            hint=f"a number such as {unit.example}",
            fields=[name],
        )
    return number


def format_cluster_field(name: str, number: float) -> str:
    """Format the number of a field of `Cluster` as TOML.

    Args:
        name: Name of the field.
        number: The number.

    Returns:
        A quoted text with a unit if such a text is short and exact, and otherwise the number. The
        number is in quotes if it is so small that its unit seems to be missing.

    Example:
        >>> [format_cluster_field(*one) for one in (("hbm_bandwidth", 2e12), ("nodes", 8))]
        ['"2TB/s"', '8']
    """
    for unit in _UNIT_BY_FIELD[name].suffixes:
        unit_size = parse_cluster_field(name, f"1{unit}")
        text = f"{number / unit_size:.6g}{unit}"
        if number >= unit_size and "e" not in text and parse_cluster_field(name, text) == number:
            return f'"{text}"'
    # `load_cluster` refuses a small number without quotes, because its unit may be missing.
    return f'"{number!r}"' if find_forgotten_unit(name, number)[1] else repr(number)
