"""Step times of `schedir.torch.Schedule` beside torch's own schedules.

    python benchmarks/torch_face.py [--quick] [--rounds 20] [--only gpt]

Four processes over Gloo, of one thread each.  Each row has three pipelines of the same weights in
the same processes: torch's schedule, ours of the same name in torch's runtime, and the same in
schedir's executor.  They take turns, a step each, in an order that moves on with each round.  A
step begins as all ranks leave a barrier, and takes as long as on the rank where it takes longest;
gradients are set to None between steps, outside of what is timed.  A ratio is one of two steps of
the same round: its median, and in brackets the order statistics between which the median of such
rounds lies 95 times of 100.  "CPU" is the same of the processor time of all ranks together, Gloo's
threads included, which another job on the machine changes less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import PipelineStage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import head, line, parse, ratio
from benchmarks.paired_steps import WARM, Model, on_ranks, small_gpt, tiny
from schedir import schedules
from schedir.torch import Schedule

RANKS = 4
MODELS: dict[str, Callable[[int, int], Model]] = {"gpt": small_gpt, "tiny": tiny}
MICROBATCHES = {"gpt": 16, "tiny": 64}


class Pair(NamedTuple):
    """A schedule of torch's and ours of that name."""

    theirs: str
    ours: str
    stages: int
    placement: str = "loop"

    def held(self, rank: int) -> list[int]:
        if self.placement == "vee":
            return [rank, self.stages - 1 - rank]
        return [*range(rank, self.stages, RANKS)]


PAIRS = (
    Pair("ScheduleGPipe", "gpipe", 4),
    Pair("Schedule1F1B", "one_f_one_b", 4),
    Pair("ScheduleInterleaved1F1B", "interleaved", 8),
    Pair("ScheduleInterleavedZeroBubble", "zb_h1", 4),
    Pair("ScheduleInterleavedZeroBubble", "interleaved_zb", 8),
    Pair("ScheduleZBVZeroBubble", "zb_v", 8, "vee"),
    Pair("ScheduleDualPipeV", "dualpipe_v", 8, "vee"),
)
SMOKE_PAIRS = (PAIRS[1], PAIRS[5])
WHOSE: tuple[Literal["theirs", "torch", "schedir"], ...] = ("theirs", "torch", "schedir")


class Bench:
    """The three pipelines of a row, of one rank."""

    def __init__(self, rank: int, kind: str, pair: Pair, microbatches: int) -> None:
        own, last = pair.held(rank), pair.stages - 1
        self.modules: list[torch.nn.Module] = []
        self.steps: dict[str, Callable[[], Any]] = {}
        for whose in WHOSE:
            torch.manual_seed(0)
            model = MODELS[kind](pair.stages, microbatches)
            self.modules += [model.stages[s] for s in own]
            stages = [
                PipelineStage(model.stages[s], s, pair.stages, torch.device("cpu")) for s in own
            ]
            options: dict[str, Any] = {
                "n_microbatches": microbatches,
                "loss_fn": model.loss,
                "scale_grads": False,
            }
            if whose == "theirs":
                single = pair.theirs in ("ScheduleGPipe", "Schedule1F1B")
                schedule = getattr(theirs, pair.theirs)(stages[0] if single else stages, **options)
            else:
                schedule = Schedule(
                    stages, schedule=getattr(schedules, pair.ours), runtime=whose, **options
                )
            self.steps[whose] = partial(
                schedule.step,
                *((model.inputs.flatten(0, 1),) if 0 in own else ()),
                target=model.targets.flatten(0, 1) if last in own else None,
                return_outputs=False,
            )

    def run(self, rounds: int) -> dict[str, list[tuple[float, float]]]:
        """Seconds of each step on this rank, of the clock and of processors."""
        took: dict[str, list[tuple[float, float]]] = {whose: [] for whose in WHOSE}
        for turn in range(WARM + rounds):
            for k in range(len(WHOSE)):
                whose = WHOSE[(turn + k) % len(WHOSE)]
                for module in self.modules:
                    module.zero_grad()
                dist.barrier()
                began, cpu = perf_counter(), process_time()
                self.steps[whose]()
                if turn >= WARM:
                    took[whose].append((perf_counter() - began, process_time() - cpu))
        return took


def rows(rank: int, rounds: int, only: str, pairs: Sequence[Pair], smoke: bool) -> None:
    """Measure each row, and print it on rank 0."""
    for kind in MODELS:
        for pair in pairs if only in ("", kind) else ():
            ranks: list[Any] = [None] * RANKS
            bench = Bench(rank, kind, pair, 2 * RANKS if smoke else MICROBATCHES[kind])
            dist.all_gather_object(ranks, bench.run(rounds))
            if rank:
                continue
            steps = {
                whose: [
                    (max(wall for wall, _ in each), sum(cpu for _, cpu in each))
                    for each in zip(*(took[whose] for took in ranks), strict=True)
                ]
                for whose in WHOSE
            }
            medians = (
                f"{statistics.median(wall for wall, _ in steps[w]) * 1e3:.1f}" for w in WHOSE
            )
            cells = []
            for whose in WHOSE[1:]:
                both = [*zip(steps[whose], steps["theirs"], strict=True)]
                ratios = [one / other for (one, _), (other, _) in both]
                cpu = statistics.median(one / other for (_, one), (_, other) in both)
                cells += [ratio(ratios, 2), f"{cpu:.2f}"]
            line(kind, f"{pair.ours}, {pair.stages} stages", *medians, *cells)


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each pipeline")
    parser.add_argument("--quick", action="store_true", help="five rounds")
    parser.add_argument("--only", default="", choices=("", *MODELS), help="one model's rows")
    args = parse(parser, rounds=1, only="tiny")
    head("model", "schedule", "step, ms: torch's", "runtime=torch", "runtime=schedir",
         "torch: ratio", "CPU", "schedir: ratio", "CPU")  # fmt: skip
    rounds, pairs = 5 if args.quick else args.rounds, SMOKE_PAIRS if args.smoke else PAIRS
    on_ranks(rows, RANKS, rounds, args.only, pairs, args.smoke)


if __name__ == "__main__":
    main()
