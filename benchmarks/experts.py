"""Measure steps with exposed and hidden all-to-alls of experts, and compare them with predictions.

    python benchmarks/experts.py
    python benchmarks/experts.py --rounds 20 --forward 0.02

Four processes over Gloo (pp 2, dp 2, ep 2) train a small mixture-of-experts GPT. Each segment
sleeps until a set time has passed. Each all-to-all takes a set time, and a rank runs its
all-to-alls one after the other. So the script knows all times, and needs few cores. It runs one
step of each schedule in turn. The table has a row per schedule: the predicted step without and with
all-to-alls, the measured step of the slowest process, and the error of the prediction. The
prediction is a simulation with the set times.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import (
    format_deviation,
    gather_times,
    measure_in_rounds,
    parse,
    print_header,
    print_row,
    run_on_ranks,
)
from examples.expert_parallel import combined_1f1b
from schedir import Costs, Program, compile, simulate
from schedir.models import moe_gpt
from schedir.models.moe_config import MoEConfig
from schedir.runtime import Boundary, Executor, GlooTransport
from schedir.runtime.executor_options import ExecutionOptions
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.transport import Work

MODEL = MoEConfig(
    vocab=64, layers=2, hidden=16, heads=2, context=8, tied=False, experts=4, expert_hidden=16
)
RANKS, REPLICAS, MICROBATCHES = 2, 2, 8
ALL_TO_ALL = 0.7  # time of an all-to-all, as a share of the forward of a segment
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one_f_one_b": ("one_f_one_b", {}),
    "eager_1f1b": ("eager_1f1b", {}),
    "eager_1f1b, waits filled": ("eager_1f1b", {"fill_collective_waits": "all"}),
    "combined_1f1b": (combined_1f1b, {}),
}


class _LateWork:
    """Communication that ends at a set time, or later."""

    def __init__(self, work: Work, end: float) -> None:
        self.work, self.end = work, end

    def wait(self) -> None:
        self.work.wait()
        sleep(max(0.0, self.end - perf_counter()))


class SlowTransport(GlooTransport):
    """Gloo with all-to-alls of experts that take `seconds` each, one after the other."""

    seconds = end = 0.0

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        work = super().start_collective(kind, group, output_tensor, input_tensor)
        if group != "ep":
            return work
        self.end = max(self.end, perf_counter()) + self.seconds
        return _LateWork(work, self.end)


class _StartOfBackward(torch.autograd.Function):
    """The identity. Its backward sets the end time of the backward of a segment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segment: SlowSegment) -> Tensor:
        ctx.segment = segment
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        ctx.segment.end = perf_counter() + 2 * ctx.segment.seconds
        if ctx.segment.is_first:
            ctx.segment.sleep()
        return dys[0], None


class _EndOfBackward(torch.autograd.Function):
    """The identity. Its backward sleeps until the backward of a segment ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segment: SlowSegment) -> Tensor:
        ctx.segment = segment
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        ctx.segment.sleep()
        return dys[0], None


class SlowSegment(nn.Module):
    """A segment whose forward takes `seconds`, and whose backward takes twice as long.

    The first segment of the model has no gradient of its input, so it sleeps before its backward.
    """

    end = 0.0

    def __init__(self, segment: nn.Module, seconds: float, *, is_first: bool) -> None:
        super().__init__()
        self.segment, self.seconds, self.is_first = segment, seconds, is_first

    def sleep(self) -> None:
        sleep(max(0.0, self.end - perf_counter()))

    def forward(self, *inputs: Tensor) -> Any:
        self.end = perf_counter() + self.seconds
        if not self.is_first:
            first, *rest = inputs
            inputs = _EndOfBackward.apply(first, self), *rest  # type: ignore[no-untyped-call]
        first, *rest = self.segment(*inputs)
        first = _StartOfBackward.apply(first, self)  # type: ignore[no-untyped-call]
        self.sleep()
        return first, *rest


def make_costs(forward: float) -> Costs:
    """Return the costs from the set times of segments and all-to-alls."""
    all_to_all = ALL_TO_ALL * forward
    return Costs(F=forward, B=2 * forward, dispatch=all_to_all, combine=all_to_all)


def make_program(name: str, costs: Costs) -> Program:
    schedule, options = SCHEDULES[name]
    fill_options = {**options, "costs": costs} if options else {}
    return compile(
        schedule, ranks=RANKS, microbatches=MICROBATCHES, dp=REPLICAS, ep=REPLICAS,
        stage_segments="dc", progress_model="per_edge", blocking_hosts=True, **fill_options,
    )  # fmt: skip


def make_executor(program: Program, forward: float) -> Executor:
    transport = SlowTransport(program)
    transport.seconds = ALL_TO_ALL * forward
    stage = moe_gpt.build_stage(
        MODEL, transport.rank, RANKS, ep=REPLICAS, ep_rank=transport.dp_rank
    )
    segments = moe_gpt.split_stage(stage)
    first_stage = transport.rank * len(segments)
    stream = Boundary((1, MODEL.context, MODEL.hidden))
    boundary = moe_gpt.build_boundaries(MODEL, [len(segments)] * RANKS, stream, REPLICAS)
    return Executor(
        program,
        transport.rank,
        {
            s: SlowSegment(segment, forward, is_first=s == 0)
            for s, segment in enumerate(segments, first_stage)
        },
        transport,
        loss=moe_gpt.loss,
        boundary=boundary,
        execution=ExecutionOptions(record_timestamps=False),
    )


def measure(rank: int, rounds: int, forward: float) -> dict[str, list[float]]:
    """Return the seconds of each step on the slowest process, by schedule."""
    torch.set_num_threads(1)
    costs = make_costs(forward)
    executors = {name: make_executor(make_program(name, costs), forward) for name in SCHEDULES}
    tokens = torch.randint(MODEL.vocab, (2, MICROBATCHES, 1, MODEL.context))
    steps = {
        name: partial(executor.step, tokens[0], tokens[1], 1e-2)
        for name, executor in executors.items()
    }
    times_by_schedule = gather_times(measure_in_rounds(steps, rounds, dist.barrier))
    return {name: [wall for wall, _ in times] for name, times in times_by_schedule.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="number of steps of each schedule")
    parser.add_argument(
        "--forward", type=float, default=0.02, help="seconds of a segment in a forward"
    )
    args = parse(parser, rounds=1, forward=0.002)
    costs = make_costs(args.forward)
    measured = run_on_ranks(measure, RANKS * REPLICAS, args.rounds, args.forward)[0]
    print_header("schedule", "all-to-alls free, ms", "predicted, ms", "measured, ms",
         "predicted less measured")  # fmt: skip
    for name, times in measured.items():
        program = make_program(name, costs)
        costs_without_all_to_alls = Costs(F=costs.F, B=costs.B)
        spans = [
            simulate(program, simulated_costs, progress_model="per_edge", blocking_hosts=True).span
            for simulated_costs in (costs_without_all_to_alls, costs)
        ]
        print_row(
            name, *(f"{1e3 * span:.0f}" for span in spans), f"{1e3 * median(times):.0f}",
            format_deviation([spans[1] / seconds for seconds in times]),
        )  # fmt: skip


if __name__ == "__main__":
    main()
