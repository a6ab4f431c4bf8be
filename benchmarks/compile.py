"""Measure the time to compile, check and simulate programs, compared with a commit or torch.

    python benchmarks/compile.py [--large | --zero] [--torch] [--compiled]
    python benchmarks/compile.py --against COMMIT-OR-FOLDER [--compiled]

A turn compiles, checks and simulates one program, in seconds of processor time. Each turn of a
process has a number of microbatches and costs that are new to the process. Each round starts one
process per row (and per checkout). The process first warms up on a small program.

- `--against` runs each turn in both checkouts, one after the other. The table has the median ratio
  of such pairs of turns, with quartiles.
- `--torch` also measures torch.distributed.pipelining.
- With `--compiled`, numba compiles loops before the first turn. Without this option, the process
  does not import numba, as on a machine without numba.
- `--zero` measures programs with ZeRO 3 and two replicas, in which all microbatches read the result
  of one gather.

"B/instr" is the growth of the peak memory after the compilation, in bytes per instruction. "with
Timeline" is the growth after the simulation. The last row compares the command
`schedir check gpipe` with `import numpy`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

# The path is appended, because a worker must import schedir from the checkout that it measures.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse

ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """A shape to measure, the number of turns, and the change of the microbatches between turns."""

    schedule: str
    ranks: int
    v: int
    microbatches: int
    turns: int = 1
    step: int = 1
    zero: int = 0

    @property
    def shape(self) -> tuple[str, ...]:
        """Return the first columns of a table."""
        name = f"{self.schedule}, ZeRO {self.zero}" if self.zero else self.schedule
        return (name, *map(str, self[1:4]))


SMALL_ROWS = (
    Row("one_f_one_b", 4, 1, 8, turns=9),
    Row("one_f_one_b", 8, 1, 64, turns=15),
    Row("one_f_one_b", 64, 1, 1024, turns=3),
    Row("interleaved", 64, 2, 256, turns=3, step=64),
    Row("interleaved", 64, 2, 1024, turns=3, step=64),
    Row("interleaved", 128, 4, 512, turns=1),
)
SMOKE_ROWS = (Row("one_f_one_b", 4, 1, 8, turns=2), Row("interleaved", 4, 2, 8))
LARGE_ROWS = (
    Row("interleaved", 256, 8, 512),
    Row("interleaved", 256, 8, 2048),
    Row("one_f_one_b", 1024, 1, 8192),
)
ZERO_ROWS = tuple(
    Row(name, 8, v, m, turns=3, zero=3)
    for name, v in (("one_f_one_b", 1), ("interleaved", 2))
    for m in (64, 128, 256, 512, 1024)
)
TORCH_ROWS = SMALL_ROWS[3:5] + SMOKE_ROWS[1:]  # torch needs hours for larger programs
PARTS = ("draft", "compile", "simulate", "memory", "show", "parse")
TURN_PARTS = PARTS[:3]  # the parts that a turn includes
MAX_TEXT_INSTRUCTIONS = 2**24  # instructions; larger programs are not printed and parsed

Measurement = dict[str, float]


# ------------------------------------------------------------ in the process that is measured


def read_peak_memory() -> float:
    """Return the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def time_part(measurement: Measurement, part: str, call: Callable[..., Any], *args: Any) -> Any:
    begin = process_time()
    result = call(*args)
    measurement[part] = process_time() - begin
    return result


def measure_schedir(
    name: str, ranks: int, v: int, microbatches: int, zero: int, turn: int, text: bool
) -> Measurement:
    """Measure the seconds of each part, and the bytes per instruction.

    The function uses only names of schedir that every checkout has.
    """
    import schedir

    shape, costs = schedir.PipelineShape(ranks, microbatches, v), schedir.Costs(F=1 + turn / 1024)
    zero_options: dict[str, Any] = {"dp": 2, "zero": zero} if zero else {}
    measurement: Measurement = {}
    gc.collect()
    base = read_peak_memory()
    draft = time_part(
        measurement, "draft", schedir.expand_schedule, getattr(schedir.schedules, name), shape
    )
    program = time_part(
        measurement, "compile", partial(schedir.compile, draft, costs=costs, **zero_options)
    )
    del draft
    compiled = read_peak_memory()
    timeline = time_part(measurement, "simulate", schedir.simulate, program, costs)
    simulated, n = read_peak_memory(), len(program)
    if text:
        time_part(measurement, "memory", lambda: timeline.peak_in_flight)
        if n < MAX_TEXT_INSTRUCTIONS:
            time_part(
                measurement,
                "parse",
                schedir.from_text,
                time_part(measurement, "print", schedir.to_text, program),
            )
    measurement |= {
        "instructions": n,
        "B/instr": compiled - base,
        "with Timeline": simulated - base,
    }
    return {key: value / n if key in ("B/instr", "with Timeline") else value
            for key, value in measurement.items()}  # fmt: skip


def measure_torch(name: str, ranks: int, v: int, microbatches: int, *_: object) -> Measurement:
    """Measure torch: the constructor of a schedule, and the simulator of its instruction lists."""
    from unittest.mock import create_autospec

    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    assert name == "interleaved"
    stages = []
    for j in range(v):
        stage = create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.group = 0, ranks, None
        stage.stage_index, stage.num_stages = j * ranks, ranks * v
        stage.is_first, stage.is_last, stage.has_backward = j == 0, False, True
        stage.stage_index_to_group_rank = {s: s % ranks for s in range(ranks * v)}
        stages.append(stage)
    measurement: Measurement = {}
    base = read_peak_memory()
    schedule = time_part(
        measurement,
        "compile",
        lambda: schedules.ScheduleInterleaved1F1B(
            stages, n_microbatches=microbatches, loss_fn=lambda *_: None
        ),
    )
    kinds = schedules._ComputationType
    zero_kinds = {kinds.UNSHARD, kinds.RESHARD, kinds.REDUCE_GRAD}
    order = {
        rank: [a for a in actions if a is None or a.computation_type not in zero_kinds]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    n = sum(map(len, order.values()))
    time_part(
        measurement,
        "simulate",
        lambda: schedules._simulate_comms_compute(
            order, stage_to_rank=lambda s: s % ranks, num_stages=ranks * v
        ),
    )
    return measurement | {"instructions": n, "with Timeline": (read_peak_memory() - base) / n}


def serve(implementation: str) -> None:
    """Read a row and a turn from each line of stdin, and print their measurement as JSON."""
    measure_functions: dict[str, Callable[..., Measurement]] = {
        "schedir": measure_schedir, "compiled": measure_schedir, "torch": measure_torch,
    }  # fmt: skip
    measure = measure_functions[implementation]
    if implementation == "compiled":
        with suppress(ImportError):  # an old checkout does not have this module
            import_module("schedir.analysis.numba_jit").enable_numba()
    else:
        sys.modules["numba"] = None  # type: ignore[assignment]
    if implementation != "torch":
        for turn in range(2):
            measure_schedir("gpipe", 3, 1, 5 + turn, 0, turn, True)
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line))), flush=True)


# ------------------------------------------------------------ in the main process


class Worker:
    """A process that measures turns of a checkout."""

    def __init__(self, checkout: Path, implementation: str = "schedir") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **_make_process_options(checkout),
        )

    def turn(self, row: Row, turn: int, text: bool = False) -> Measurement:
        """Measure a turn. Turn 0 has the microbatches of the row, others more or fewer."""
        assert self.process.stdin and self.process.stdout
        microbatch_offset = (turn + 1) // 2 * (1 if turn % 2 else -1)
        arguments = (
            *row[:3],
            row.microbatches + microbatch_offset * row.step,
            row.zero,
            turn,
            text,
        )
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process that measured {row} ended with {self.process.wait()}")
        measurement: Measurement = json.loads(line)
        return measurement

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes stdin, which ends the process


def _make_process_options(checkout: Path) -> dict[str, Any]:
    """Return arguments of `subprocess` with which a process imports schedir from a folder."""
    return {"cwd": checkout, "env": os.environ | {"PYTHONPATH": str(checkout)}}


@contextmanager
def open_checkout(name: str) -> Iterator[Path]:
    """Yield the folder with this name, or a temporary work tree of this commit."""
    if Path(name, "schedir").is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        result = subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), name])
        if result.returncode:
            raise SystemExit(f"--against takes a folder with schedir in it, or a commit: {name}")
        try:
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def measure_command(checkout: Path, *command: str) -> float:
    """Return the processor time of a command, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True,
                   **_make_process_options(checkout))  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


COMMANDS = {
    "import numpy": ("-c", "import numpy"),
    "schedir check gpipe": ("-m", "schedir", "check", "gpipe"),
}


def sum_turn_parts(measurement: Measurement) -> float:
    """Return the time of a turn."""
    return sum(measurement.get(part, 0.0) for part in TURN_PARTS)


def format_quartiles(values: list[float], form: str = ".2f") -> str:
    """Return the median and the quartiles as text."""
    low, middle, high = (
        statistics.quantiles(values, method="inclusive") if values[1:] else values * 3
    )
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def compare_checkouts(
    new_checkout: Path,
    old_checkout: Path,
    rows: tuple[Row, ...],
    rounds: int,
    implementation: str,
    report: Any,
) -> list[Any]:
    """Return table rows with the times in two checkouts, and the ratios of paired turns."""
    cells = []
    for row in rows:
        ratios: dict[str, list[float]] = {}
        times: tuple[list[float], list[float]] = ([], [])
        n = 0.0
        for _ in range(rounds):
            report(f"{row}")
            with (
                Worker(old_checkout, implementation) as old_worker,
                Worker(new_checkout, implementation) as new_worker,
            ):
                for turn in range(row.turns):
                    old, new = old_worker.turn(row, turn), new_worker.turn(row, turn)
                    for part in TURN_PARTS:
                        ratios.setdefault(part, []).append(new[part] / old[part])
                    ratios.setdefault("all", []).append(sum_turn_parts(new) / sum_turn_parts(old))
                    times[0].append(sum_turn_parts(old))
                    times[1].append(sum_turn_parts(new))
                    if turn == 0:
                        n = new["instructions"]
                        for part in ("B/instr", "with Timeline"):
                            memory_ratio = new[part] / old[part] if old[part] else float("nan")
                            ratios.setdefault(part, []).append(memory_ratio)
        seconds = [f"{1e3 * statistics.median(samples):.2f}" for samples in times]
        ratio_columns = [*TURN_PARTS, "all", "B/instr", "with Timeline"]
        if n < 2**16:
            ratio_columns[-2:] = []  # the memory of a small program is noise
        cells.append(
            [
                *row.shape,
                f"{n:,.0f}",
                *seconds,
                *(format_quartiles(ratios[p]) for p in ratio_columns),
            ]
        )
    for name, command in COMMANDS.items():
        report(name)
        pairs = [
            [measure_command(checkout, *command) for checkout in (old_checkout, new_checkout)]
            for _ in range(3 * rounds)
        ]
        seconds = [
            f"{1e3 * statistics.median(samples):.2f}" for samples in zip(*pairs, strict=True)
        ]
        ratio = format_quartiles([after / before for before, after in pairs])
        cells.append([name, *[""] * 4, *seconds, *[""] * len(TURN_PARTS), ratio])
    return cells


def measure_this_checkout(
    rows: tuple[Row, ...], rounds: int, schedir_implementation: str, torch: bool, report: Any
) -> Iterator[list[str]]:
    """Yield table rows with the times of this checkout and of torch."""
    for row in rows:
        implementations = (schedir_implementation, "torch")[: 1 + (torch and row in TORCH_ROWS)]
        measurements: dict[str, list[Measurement]] = {
            implementation: [] for implementation in implementations
        }
        for k in range(rounds):
            report(f"{row}")
            with ExitStack() as stack:
                for implementation in implementations:
                    if implementation == "torch" and k:
                        continue  # torch takes minutes, so it runs only in the first round
                    worker = stack.enter_context(Worker(ROOT, implementation))
                    turns = 1 if implementation == "torch" else row.turns
                    measurements[implementation] += [
                        worker.turn(row, turn, text=turn == 0) for turn in range(turns)
                    ]
        for implementation, samples in measurements.items():
            first = samples[0]
            cells = [f"{1e3 * statistics.median(g[p] for g in samples if p in g):.2f}"
                     if p in first else "" for p in PARTS]  # fmt: skip
            sums = format_quartiles([1e3 * sum_turn_parts(g) for g in samples])
            bytes_ = [f"{first[p]:.0f}" if p in first else "" for p in ("B/instr", "with Timeline")]
            yield [
                implementation,
                *row.shape,
                f"{first['instructions']:,.0f}",
                *cells,
                sums,
                *bytes_,
            ]
        if len(implementations) > 1:
            ratios = [
                sum_turn_parts(measurements["torch"][0]) / sum_turn_parts(g)
                for g in measurements[schedir_implementation]
            ]
            yield [
                "",
                *row.shape,
                *[""] * (1 + len(PARTS)),
                f"torch x {format_quartiles(ratios, '.0f')}",
            ]
    numpy, check = (
        [measure_command(ROOT, *c) for _ in range(3 * rounds)] for c in COMMANDS.values()
    )
    for name, seconds in zip(COMMANDS, (numpy, check), strict=True):
        yield ["", name, *[""] * (4 + len(PARTS)), format_quartiles([1e3 * s for s in seconds])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--large", action="store_true", help="also programs of up to 34 million instructions"
    )
    parser.add_argument("--zero", action="store_true", help="measure programs with ZeRO 3")
    parser.add_argument(
        "--torch", action="store_true", help="also measure torch.distributed.pipelining"
    )
    parser.add_argument("--against", metavar="CHECKOUT", help="compare with a folder or a commit")
    parser.add_argument("--compiled", action="store_true", help="let numba compile loops")
    parser.add_argument("--rounds", type=int, default=3, help="processes per row (default 3)")
    parser.add_argument("--rows", help="the rows to measure, counted from 0: 0,1,3")
    parser.add_argument("--serve", choices=("schedir", "compiled", "torch"), help=argparse.SUPPRESS)
    args = parse(parser, rounds=1, torch=True)
    if args.serve:
        return serve(args.serve)

    from rich.console import Console
    from rich.table import Table

    rows = (
        SMOKE_ROWS
        if args.smoke
        else ZERO_ROWS
        if args.zero
        else SMALL_ROWS + LARGE_ROWS * args.large
    )
    if args.rows:
        rows = tuple(rows[int(k)] for k in args.rows.split(","))
    implementation = "compiled" if args.compiled else "schedir"
    console, progress = Console(width=200), Console(stderr=True)

    def report(text: str) -> None:
        progress.print(text, style="dim")

    shape = ["schedule", "P", "v", "m", "instructions"]
    bytes_ = ["B/instr", "with Timeline"]
    if args.against or args.smoke:
        with open_checkout(args.against or str(ROOT)) as other_checkout:
            table = Table(*shape, "ms before", "ms now", *TURN_PARTS, "all", *bytes_)
            for cells in compare_checkouts(
                ROOT, other_checkout, rows, args.rounds, implementation, report
            ):
                table.add_row(*cells)
        console.print(table)
        console.print("ms are of the whole; ratios, now by before: the median and the quartiles")
    if not args.against:
        table = Table("", *shape, *PARTS, "compiled and simulated", *bytes_)
        for cells in measure_this_checkout(rows, args.rounds, implementation, args.torch, report):
            table.add_row(*cells)
        console.print(table)
        console.print("medians in milliseconds of processor time; in brackets the quartiles")


if __name__ == "__main__":
    main()
