"""Functions that benchmarks share: options, processes, alternating steps, tables and medians.

    python benchmarks/NAME.py --smoke

With `--smoke`, each script runs all its code on small sizes within seconds. The figures of such a
run mean nothing. `tests/cpu/test_benchmarks.py` runs every script in this way.

Importing this module does not import torch, because some benchmarks measure processes without
torch. Functions that start processes or gather their results import it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

WARM_UP_STEPS = 3  # steps of each kind before the measurement
Times = list[tuple[float, float]]  # wall and processor seconds of steps


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
        "--smoke", action="store_true", help="run all code on small sizes, within seconds"
    )
    args = parser.parse_args(argv)
    unknown = smoke.keys() - vars(args).keys()
    assert not unknown, f"the parser has no argument {unknown}"
    if args.smoke:
        parser.set_defaults(**smoke)
        args = parser.parse_args(argv)
    return args


def report_missing(message: str, smoke: bool) -> int:
    """Print the missing requirement of a script, and return its exit code.

    The exit code is 2. With `--smoke` it is 0, because this machine can run no more of the script.
    """
    print(message, file=sys.stderr)
    return 0 if smoke else 2


def print_row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*cells: object) -> None:
    """Print the first two rows of a Markdown table."""
    print_row(*cells)
    print_row(*["---"] * len(cells))


def compute_median_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of a sample, by the sign test.

    Both ends are values of the sample.
    """
    ordered = sorted(values)
    n, low, tail = len(ordered), 0, 0.0
    while low < (n - 1) // 2 and (tail := tail + comb(n, low) / 2**n) <= 0.025:
        low += 1
    return ordered[max(low - 1, 0)], ordered[n - max(low, 1)]


def format_ratio(values: Sequence[float], digits: int = 3) -> str:
    """Format the median of ratios, and its confidence interval."""
    low, high = compute_median_interval(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def format_deviation(values: Sequence[float]) -> str:
    """Format the median of `value - 1`, and its confidence interval, in percent."""
    low, high = compute_median_interval(values)
    return f"{median(values) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"


def run_on_ranks(
    work: Callable[..., Any], processes: int, *args: Any, limit: float = 3600
) -> list[Any]:
    """Run `work(rank, *args)` in forked processes of one Gloo world; return the results by rank.

    If a process fails, dies or hangs for `limit` seconds, RankError has its traceback.
    """
    import torch._dynamo  # noqa: F401  # every optimizer imports it, so import it before the fork

    from schedir.transports.local_processes import run_processes

    context = multiprocessing.get_context("fork")
    return run_processes(
        _run_without_warnings, processes, work, *args, context=context, timeout=limit
    )


def _run_without_warnings(rank: int, work: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")  # otherwise each process would print torch's warnings
    return work(rank, *args)


def find_free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def fork_ranks(
    processes: int, port: int, output_path: Path, work: Callable[[int], object], **environ: str
) -> list[int]:
    """Fork processes, and set the environment variables that torchrun sets.

    Args:
        processes: The number of processes.
        port: The port of the store on rank 0.
        output_path: A file to which each process appends its output.
        work: Called with the rank in each process. The process exits with 1 if `work` returns or
            raises.
        environ: More environment variables.

    Returns:
        The process ids, by rank.
    """
    children = []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        try:
            output_fd = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output_fd, 1), os.dup2(output_fd, 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                           "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                           "MASTER_PORT": str(port), **environ}  # fmt: skip
            work(rank)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(1)
    return children


def measure_in_rounds(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object],
    *,
    rotate: bool = True,
    clock: Callable[[], float] = process_time,
) -> dict[str, Times]:
    """Measure a step of each kind in each round, after `WARM_UP_STEPS` warm-up rounds.

    Args:
        steps: The steps, by name.
        rounds: The number of measured steps of each kind.
        prepare: Called before each step, outside of the measured time. If several processes run
            the step together, it must end with a barrier.
        rotate: Begin each round with the next kind.
        clock: Returns processor time. The default is that of the process.

    Returns:
        The times of this process, by name.
    """
    times: dict[str, Times] = {name: [] for name in steps}
    names = [*steps]
    for round_index in range(WARM_UP_STEPS + rounds):
        first = round_index % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            prepare()
            wall_start, cpu_start = perf_counter(), clock()
            steps[name]()
            if round_index >= WARM_UP_STEPS:
                times[name].append((perf_counter() - wall_start, clock() - cpu_start))
    return times


def gather_times(took: dict[str, Times]) -> dict[str, Times]:
    """Gather the times of all processes of a Gloo world.

    Returns:
        For each step, the wall time of the slowest process and the processor time of all processes.
    """
    import torch.distributed as dist

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, took)
    return {
        name: [
            (max(wall for wall, _ in step_times), sum(cpu for _, cpu in step_times))
            for step_times in zip(*(rank_times[name] for rank_times in ranks), strict=True)
        ]
        for name in took
    }


def format_milliseconds(times: Times) -> str:
    """Format the median wall time in ms."""
    return f"{median(wall for wall, _ in times) * 1e3:.1f}"


def format_pair_ratios(times: Times, base: Times, digits: int) -> list[str]:
    """Format the median ratios of wall times and of CPU times to those of `base`, per round."""
    pairs = [*zip(times, base, strict=True)]
    cpu = median(one / other for (_, one), (_, other) in pairs)
    return [
        format_ratio([one / other for (one, _), (other, _) in pairs], digits),
        f"{cpu:.{digits}f}",
    ]
