"""Measure the error of simulated steps at measured costs, for every schedule that trains.

    python benchmarks/predict.py
    python benchmarks/predict.py zb_v dualpipe_v --ranks 2 --steps 100

Processes train a small GPT. For each schedule, the script records each step after the first five as
a Timeline. The table has a row per schedule, with these columns:

- `own`: the error of a simulation with the mean instruction times of the step itself.
- `next`: the error of a simulation with the mean instruction times of the first half of the steps,
  compared with the median step of the second half.
- `from 1F1B`: the error of a simulation with the costs of the 1F1B run, if the stages are the same.
- `recording`: the processor time of recording a step, divided by the time of the step. The script
  measures it with instructions that do nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

import schedir
from benchmarks.harness import parse, print_row, run_on_ranks
from schedir import Costs, Timeline, schedules
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.models.gpt_config import GPTConfig
from schedir.predict.calibrate import calibrate, fill_missing_backwards
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.program_state import Call
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.schedules.schedule_algebra import get_weight_delay_mark
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.laws import ZOO, make_shape

MODEL = GPTConfig(vocab=256, layers=8, hidden=96, heads=4, context=64)
SEQUENCES = 4  # number of sequences of a microbatch
BASE = "one_f_one_b"
WARM_UP_STEPS, MICROBATCHES, GOAL = 5, 8, 0.03


def compile_program(name: str, ranks: int) -> Program:
    schedule = getattr(schedules, name)
    shape = make_shape(schedule, ranks, MICROBATCHES)
    delay = get_weight_delay_mark(schedule)
    shape = replace(shape, optimizer_steps=2, weight_delay=delay) if delay else shape
    return schedir.compile(schedule, shape, progress_model="per_edge", tied_weights=True)


def list_training_schedules(ranks: int) -> list[str]:
    """Return the schedules that train, 1F1B first."""
    names = [n for n in ZOO if compile_program(n, ranks).has_backward]
    return sorted(names, key=lambda n: n != BASE)


def train(rank: int, name: str, ranks: int, steps: int) -> tuple[list[Timeline], float]:
    """Return Timelines of all steps after the warm-up, and the seconds to record an instruction."""
    torch.manual_seed(rank)
    program = compile_program(name, ranks)
    shape, transport = program.shape, SharedMemoryTransport(program)
    stages = {s: gpt.build_stage(MODEL, s, shape.stages) for s in shape.stages_on_rank[rank]}
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    executor = Executor(
        program, rank, stages, transport, loss=gpt.loss,
        boundary=Boundary((SEQUENCES, MODEL.context, MODEL.hidden)),
        optimizer=torch.optim.AdamW(parameters),
    )  # fmt: skip
    timelines: list[Timeline] = []
    for step in range(steps + WARM_UP_STEPS):
        batch = torch.randint(0, MODEL.vocab, (2, shape.microbatches, SEQUENCES, MODEL.context))
        torch.distributed.barrier()
        executor.step(batch[0], batch[1], 1e-4)
        timeline = gather_timeline(executor, transport)
        if step >= WARM_UP_STEPS and timeline is not None:
            timelines.append(timeline)
    return timelines, _measure_recording(executor)


def _measure_recording(executor: Executor, times: int = 200) -> float:
    """Return the processor seconds of recording one instruction, measured on empty instructions."""
    executor.runner.calls = [Call(None, lambda: None)] * len(executor.state.stream)
    cpu_seconds = [0.0, 0.0]
    for repetition in range(2 * times):
        executor.record_timestamps = repetition % 2 == 0
        start = process_time()
        for k in range(len(executor.runner.calls)):
            executor.runner.run_instruction(k)
        cpu_seconds[repetition % 2] += process_time() - start
    return (cpu_seconds[0] - cpu_seconds[1]) / times / len(executor.runner.calls)


def simulate_span(program: Program, costs: Costs) -> float:
    return schedir.simulate(program, costs, progress_model="per_edge", blocking_hosts=True).span


def average_costs(costs: list[Costs]) -> Costs:
    """Return the mean of each cost."""

    def average_values(values: list[Any]) -> Any:
        if values[0] is None:
            return None
        average = np.mean([np.asarray(v) for v in values], 0)
        return tuple(average.tolist()) if average.ndim else float(average)

    return Costs(
        **{f.name: average_values([getattr(c, f.name) for c in costs]) for f in fields(Costs)}
    )


def measure_rows(names: list[str], ranks: int, steps: int) -> Iterator[tuple[list[str], float]]:
    """Yield the rows of the table, each with the median error of `own`."""
    base: Costs | None = None
    for name in names:
        program = compile_program(name, ranks)
        timelines, recording = run_on_ranks(train, ranks, name, ranks, steps, limit=600)[0]
        costs = [calibrate(t) for t in timelines]
        spans = [t.span for t in timelines]
        own_errors = [simulate_span(program, c) / s - 1 for c, s in zip(costs, spans, strict=True)]
        half = len(spans) // 2
        earlier = average_costs(costs[:half])
        later = statistics.median(spans[half:])
        if name == BASE:
            base = fill_missing_backwards(earlier, program)
        has_same_stages = (
            base is not None and program.shape.stages == ranks and program.shape.placement_rows == 1
        )
        yield (
            [
                name,
                str(ranks),
                f"{1e3 * statistics.median(spans):.1f}",
                f"{np.percentile(spans, 90) / np.percentile(spans, 10) - 1:.0%}",
                f"{statistics.median(own_errors):+.1%}",
                f"{max(map(abs, own_errors)):.1%}",
                f"{simulate_span(program, earlier) / later - 1:+.1%}",
                f"{simulate_span(program, base) / later - 1:+.1%}"
                if has_same_stages and base is not None
                else "",
                f"{recording * len(program.streams[0]) / statistics.median(spans):.3%}",
            ],
            statistics.median(own_errors),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="SCHEDULE", help="schedules (default: all that train)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="P")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    options = parse(parser, names=[BASE, "zb_v"], ranks=[2], steps=2)
    head = ["schedule", "P", "step, ms", "p90 over p10", "own, median", "own, worst", "next",
            "from 1F1B", "recording"]  # fmt: skip
    print(f"| {' | '.join(head)} |\n| --- | {' | '.join(['---:'] * (len(head) - 1))} |")
    for ranks in options.ranks:
        errors = []
        for row, own_error in measure_rows(
            options.names or list_training_schedules(ranks), ranks, options.steps
        ):
            print_row(*row)
            errors.append((abs(own_error), row[0]))
        inaccurate = [name for error, name in errors if error > GOAL]
        accurate_count, (largest_error, worst) = len(errors) - len(inaccurate), max(errors)
        print(
            f"\n{ranks} processes on {len(os.sched_getaffinity(0))} cores: "
            f"{accurate_count} of {len(errors)} "
            f"within {GOAL:.0%} at their own mean times, the worst {worst} with {largest_error:.1%}"
            + f"; not: {', '.join(inaccurate)}" * bool(inaccurate)
            + "\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
