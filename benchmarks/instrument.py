"""What `schedir.instrument` costs the steps that no profiler sees: pairs of them, with and without.

    python benchmarks/instrument.py [PAIRS]

torch's Schedule1F1B on two Gloo processes, 16 microbatches, with layers that take next to no time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import schedir
from benchmarks.harness import parse
from benchmarks.paired_steps import on_ranks

MICROBATCHES, WIDTH, STEPS = 16, 8, 5


def times(rank: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step, plain and instrumented, measured in turns."""
    stage = PipelineStage(torch.nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    x = torch.ones(MICROBATCHES, WIDTH)
    given: dict[str, Any] = {"target": x} if rank else {}

    def timed() -> float:
        schedule.step(*(() if rank else (x,)), **given)
        start = perf_counter()
        for _ in range(STEPS):
            schedule.step(*(() if rank else (x,)), **given)
        return (perf_counter() - start) / STEPS

    found = []
    for _ in range(pairs):
        plain = timed()
        with schedir.instrument("torch"):
            found.append((plain, timed()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=int, nargs="?", default=200, help="two or more")
    pairs = parse(parser, pairs=2).pairs
    if pairs < 2:
        parser.error("quartiles need two pairs or more")
    for rank, found in enumerate(on_ranks(times, 2, pairs)):
        low, _, high = quantiles([marked / plain - 1 for plain, marked in found])
        plain, marked = (median(column) for column in zip(*found, strict=True))
        print(
            f"rank {rank}: {1e3 * plain:.3f} ms a step, instrumented {1e3 * marked:.3f} ms; "
            f"of {pairs} pairs, half differ by {low:+.1%} to {high:+.1%}"
        )


if __name__ == "__main__":
    main()
