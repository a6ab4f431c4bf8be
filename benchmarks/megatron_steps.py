"""Measure step times in Megatron-core: programs of schedir compared with Megatron's schedules.

    OMP_NUM_THREADS=1 python benchmarks/megatron_steps.py

Processes train a GPTModel of megatron-core over Gloo on CPUs. Each round has one step of every
schedule. The table has the median step time of each schedule, and its median ratio to the step of
Megatron's schedule with the same number of model chunks in the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import (
    Times,
    format_milliseconds,
    format_pair_ratios,
    gather_times,
    measure_in_rounds,
    parse,
    print_header,
    print_row,
    report_missing,
    run_on_ranks,
)
from tests.cpu.megatron_gpt import Case, build_chunks, megatron_on_cpu, run_step

SCHEDULES = {1: ("one_f_one_b", "zb_h1"), 2: ("interleaved", "interleaved_zb")}


def time_steps(rank: int, case: Case, schedules: tuple[str, ...], rounds: int) -> dict[str, Times]:
    """Return the step times of Megatron's schedule and of schedir's, gathered over all ranks."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import schedir.megatron

    def make_step(function: Any) -> Callable[[], object]:
        chunks = build_chunks(case, lambda build: build)

        def step() -> None:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            run_step(case, function, chunks, 0)

        return step

    with megatron_on_cpu(case):
        model_chunks = case.chunks if case.chunks > 1 else None
        functions = {"Megatron": get_forward_backward_func(case.pp, model_chunks)}
        functions |= {name: schedir.megatron.forward_backward(name) for name in schedules}
        steps = {name: make_step(function) for name, function in functions.items()}
        return gather_times(measure_in_rounds(steps, rounds, dist.barrier))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each schedule")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    args = parse(parser, rounds=2, hidden=32, length=16)
    if not find_spec("megatron"):
        return report_missing("megatron-core is not installed", args.smoke)
    print_header("chunks per rank", "schedule", "ms per step", "ratio to Megatron's (95 %)")
    for chunks, schedules in SCHEDULES.items():
        case = Case(chunks=chunks, microbatches=8, layers=8, hidden=args.hidden, length=args.length)
        times = run_on_ranks(time_steps, case.pp, case, schedules, args.rounds)[0]
        for name, schedule_times in times.items():
            ratio = format_pair_ratios(schedule_times, times["Megatron"], 3)[0]
            print_row(chunks, name, format_milliseconds(schedule_times), ratio)
    return 0


if __name__ == "__main__":
    sys.exit(main())
