"""What the benchmarks share: a command line with `--smoke`, tables, and medians of pairs.

    python benchmarks/NAME.py --smoke

Each script runs all its code on small sizes with `--smoke`, in seconds.  The figures that it then
prints mean nothing.  `tests/cpu/test_benchmarks.py` runs every script in this way.

This module does not import torch: some benchmarks measure processes that have not loaded it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from math import comb
from statistics import median
from typing import Any


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **smoke: Any
) -> argparse.Namespace:
    """Add `--smoke` to a parser, and parse the command line.

    Args:
        parser: A parser with all other arguments of the script.
        argv: The arguments, `sys.argv[1:]` by default.
        smoke: Defaults of arguments that replace the usual ones with `--smoke`.

    Returns:
        The arguments; `smoke` is one of them.
    """
    parser.add_argument(
        "--smoke", action="store_true", help="run all code on small sizes, in seconds"
    )
    args = parser.parse_args(argv)
    unknown = smoke.keys() - vars(args).keys()
    assert not unknown, f"the parser has no argument {unknown}"
    if args.smoke:
        parser.set_defaults(**smoke)
        args = parser.parse_args(argv)
    return args


def lacks(message: str, smoke: bool) -> int:
    """Print what the script needs and this machine lacks, and return the exit code.

    The exit code is 2, and 0 with `--smoke`: nothing more can be tried on this machine.
    """
    print(message, file=sys.stderr)
    return 0 if smoke else 2


def line(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: object) -> None:
    """Print the first two rows of a Markdown table."""
    line(*cells)
    line(*["---"] * len(cells))


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median of what `values` are a sample of.

    Both ends are values of the sample: the interval of the sign test.
    """
    ordered = sorted(values)
    n, low, beyond = len(ordered), 0, 0.0
    while low < (n - 1) // 2 and (beyond := beyond + comb(n, low) / 2**n) <= 0.025:
        low += 1
    return ordered[max(low - 1, 0)], ordered[n - max(low, 1)]


def ratio(values: Sequence[float], digits: int = 3) -> str:
    """Format the median of ratios, and its confidence interval."""
    low, high = spread(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def deviation(values: Sequence[float]) -> str:
    """Format the median of `value - 1`, and its confidence interval, in percent."""
    low, high = spread(values)
    return f"{median(values) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
