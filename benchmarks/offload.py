"""Offload: predicted against measured steps, what only it makes fit, and torch's `save_on_cpu`.

    python benchmarks/offload.py [--rounds 20] [--only slowed|fits|torch]

slowed: two processes over Gloo, of one thread each.  Copies are slow: each takes at least its
bytes over a bandwidth, in which no processor works (`Lanes.bandwidth`).  Layers are wide and
microbatches small, so that a copy itself is little work beside what is computed, and no NaN is left
behind.  One program, with as few slots as it needs, is run with free lanes and with slowed ones, a
step each by turns.  Costs are calibrated by the step with free lanes of the round.  At these it is
predicted itself, which tells what calibration misses; and, with a copy at its bytes over the
bandwidth, the step with slowed lanes of the same round.

fits: a limit of memory between what a program needs that offloads, and what it needs that keeps or
recomputes; the limit refuses the others, and the one is trained, and what is alive counted.

torch: one process, one thread, a model of one stage, all forwards and then all backwards, as both
would hold little.  Beside ours a loop under `torch.autograd.graph.save_on_cpu(pin_memory=True)`; on
a CPU, where that pins nothing and copies nothing, its hooks with memory that is not pinned, so that
both copy.  Ours in its second column does not make NaN of what it leaves behind.

A ratio is one of two steps of the same round: its median, and in brackets the order statistics
between which the median of such rounds lies 95 times of 100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import (
    WARM,
    deviation,
    gathered,
    head,
    line,
    milliseconds,
    on_ranks,
    pair_ratios,
    parse,
    take_turns,
)
from schedir import PipelineShape, compile, schedules, simulate
from schedir.errors import MemoryLimitError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Lane
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.predict.calibrate import calibrate
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.recording.live_memory import LiveMemory
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.transports.gloo import GlooTransport

RANKS = 2
CONFIG = gpt.GPTConfig(vocab=512, layers=8, hidden=256, heads=4, context=64, tied=False)
DEEP = gpt.GPTConfig(vocab=256, layers=2, hidden=1024, heads=8, context=32, tied=False)
SMALL = gpt.GPTConfig(vocab=256, layers=2, hidden=64, heads=2, context=32, tied=False)
ROWS = 2  # of a microbatch
# Schedule, stages that are offloaded, forwards that a copy takes.
SLOWED: tuple[tuple[str, Any, float], ...] = (
    ("gpipe", "all", 0.5),
    ("gpipe", "all", 1.5),
    ("gpipe", [0, 1], 3.0),
    ("one_f_one_b", "all", 1.5),
    ("one_f_one_b", [0], 4.0),
    ("zb_h1", [0, 1], 2.0),
)


class Run:
    """An executor and its batch."""

    def __init__(self, config: gpt.GPTConfig, program: Program, rank: int) -> None:
        shape, m = program.shape, program.shape.microbatches
        self.stages, self.x, self.y = model(config, shape.stages, m)
        own = [p for s in shape.stages_on_rank[rank] for p in self.stages[s].parameters()]
        self.transport = GlooTransport(program)
        self.executor = Executor(
            program, rank, self.stages, self.transport, loss=gpt.loss,
            boundary=(ROWS, config.context, config.hidden),
            optimizer=torch.optim.AdamW(own, lr=1e-4),
        )  # fmt: skip
        self.scale = 1 / (m * ROWS * config.context)

    def step(self) -> None:
        self.executor.step(self.x, self.y, self.scale)


def model(config: gpt.GPTConfig, stages: int, m: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """The same weights and tokens in all processes."""
    torch.manual_seed(0)
    made: list[nn.Module] = [gpt.build_stage(config, s, stages) for s in range(stages)]
    tokens = torch.randint(config.vocab, (m, ROWS, config.context + 1))
    return made, tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()


def sizes(config: gpt.GPTConfig, stages: int) -> Sizes:
    """Of such a model, with AdamW's states."""
    made, x, y = model(config, stages, 1)
    boundary = (ROWS, config.context, config.hidden)
    return measure_sizes(made, x[0], y[0], loss=gpt.loss, boundary=boundary)


def slowed(
    rank: int, rounds: int, config: gpt.GPTConfig, rows: Sequence[tuple[str, Any, float]]
) -> None:
    """Predicted beside measured, and how well a step predicts another."""
    saved = sizes(config, RANKS).for_stages("saved", RANKS)
    for name, which, share in rows:
        schedule, shape = getattr(schedules, name), PipelineShape(RANKS, 8)
        plain = Run(config, compile(schedule, shape, progress_model="per_edge"), rank)
        for _ in range(WARM):
            plain.step()
        told: list[Any] = [_costs(plain)]
        dist.broadcast_object_list(told)
        forward = float(np.mean(told[0].F))
        bandwidth = float(saved.mean()) / (share * forward)  # a copy takes a share of a forward
        copy = tuple(float(size) / bandwidth for size in saved)
        costs: Costs = replace(told[0], offload=copy, reload=copy)
        program = compile(
            schedule,
            shape,
            costs=costs,
            progress_model="per_edge",
            offload=which,
            buffer_sharing="minimal",
        )
        pair = free, slow = Run(config, program, rank), Run(config, program, rank)
        for each in pair:
            each.executor.resources.service(MemoryTiers).poisons_sources = False
        for lane in (Lane.D2H, Lane.H2D):
            slow.executor.resources.service(CopyLanes).bandwidth[lane] = bandwidth
        took: list[list[float]] = []  # freely and slowed, both measured; and both predicted
        for turn in range(WARM + rounds):
            spans = [0.0] * 4
            for each in pair if turn % 2 else pair[::-1]:
                dist.barrier()
                each.step()
                timeline = gather_timeline(each.executor, each.transport)
                if timeline is None:
                    continue
                spans[pair.index(each)] = timeline.span
                if each is free:
                    costs = calibrate(timeline)
                    for k, at in ((2, costs), (3, replace(costs, offload=copy, reload=copy))):
                        spans[k] = simulate(
                            program, at, progress_model="per_edge", blocking_hosts=True
                        ).span
            took.append(spans)
        if rank:
            continue
        found = np.array(took[WARM:])
        longer = found[:, 3] / found[:, 2]
        line(
            f"{name}, of {which}", f"{share:g} F",
            *(f"{1e3 * each:.1f}" for each in np.median(found[:, :2], 0)),
            f"{np.median(longer):.3f}",
            *(deviation((found[:, a] / found[:, b]).tolist()) for a, b in ((2, 0), (3, 1))),
        )  # fmt: skip


def _costs(of: Run) -> Costs | None:
    """Those of the last step, on process 0."""
    timeline = gather_timeline(of.executor, of.transport)
    return None if timeline is None else calibrate(timeline)


def fits(rank: int, rounds: int, m: int) -> None:
    """What keeps, what recomputes, and what offloads, at one limit."""
    found = sizes(SMALL, RANKS)
    ways: dict[str, dict[str, Any]] = {
        "kept": {}, "recomputed": {"recompute": "all"}, "offloaded": {"offload": "all"}
    }  # fmt: skip
    shape = PipelineShape(RANKS, m)
    most = {}
    for name, how in ways.items():
        program = compile(schedules.gpipe, shape, buffer_sharing="minimal", **how)
        most[name] = float(simulate(program, sizes=found).peak_memory.max())
    limit = (most["offloaded"] + most["recomputed"]) / 2
    for name, how in ways.items():
        lived: list[Any] = [None] * RANKS
        said = "refused"
        try:
            program = compile(
                schedules.gpipe,
                shape,
                buffer_sharing="minimal",
                sizes=found,
                memory_limit=limit,
                **how,
            )
        except MemoryLimitError:
            pass
        else:
            run_ = Run(SMALL, program, rank)
            losses = [run_.executor.step(run_.x, run_.y, run_.scale) for _ in range(rounds)]
            with LiveMemory(run_.executor) as living:
                run_.step()
            own = [float(loss) for loss in (losses[0], losses[-1]) if loss is not None]
            dist.all_gather_object(lived, (living.peak_bytes, own))
            first, last = next(each for _, each in lived if each)
            said = f"{max(one for one, _ in lived) / 1e6:.3f}, loss {first:.1f} to {last:.1f}"
        if not rank:
            line(name, f"{most[name] / 1e6:.3f}", f"{limit / 1e6:.3f}", said)


def beside_torch(rounds: int, config: gpt.GPTConfig, microbatches: Sequence[int]) -> None:
    """Ours beside `save_on_cpu`, one process."""
    for m in microbatches:
        program = compile(
            schedules.gpipe, PipelineShape(1, m), buffer_sharing="minimal", offload=[0]
        )
        own = [Run(config, program, 0) for _ in range(2)]
        own[1].executor.resources.service(MemoryTiers).poisons_sources = False
        stages, x, y = model(config, 1, m)
        whole, scale = stages[0], own[0].scale
        adam = torch.optim.AdamW(whole.parameters(), lr=1e-4)

        def theirs(
            whole: nn.Module = whole, x: Tensor = x, y: Tensor = y, scale: float = scale,
            adam: torch.optim.AdamW = adam,
        ) -> None:  # fmt: skip
            adam.zero_grad()
            losses = []
            for one, target in zip(x, y, strict=True):
                with saved_tensors_hooks(_pack, _unpack):
                    losses.append(gpt.loss(whole(one), target) * scale)
            while losses:
                losses.pop(0).backward()
            adam.step()

        first, second = (
            gathered(take_turns({"theirs": theirs, "ours": one.step}, rounds, dist.barrier))
            for one in own
        )
        medians = (milliseconds(first[whose]) for whose in ("theirs", "ours"))
        ratios = (pair_ratios(took["ours"], took["theirs"], 3)[0] for took in (first, second))
        line(f"m={m}", *medians, *ratios)


def _pack(tensor: Tensor) -> Tensor:
    """As save_on_cpu(pin_memory=True): a copy of each tensor that is saved."""
    return torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout).copy_(tensor)


def _unpack(packed: Tensor) -> Tensor:
    """Back: another copy."""
    return packed.to("cpu", copy=True)


HEADS = {
    "slowed": ["program, m=8", "a copy takes", "free, ms", "slowed, ms",
               "slowed over free, predicted", "free, predicted less measured",
               "slowed, predicted less measured"],
    "fits": ["2 ranks, m=96", "predicted, MB", "limit, MB", "lived, MB"],
    "torch": ["microbatches", "save_on_cpu, ms", "ours, ms", "ratio", "without NaN"],
}  # fmt: skip


def table(rank: int, rounds: int, name: str, smoke: bool) -> None:
    """Measure a table, and print it on rank 0."""
    if not rank:
        head(*HEADS[name])
    match name:
        case "slowed":
            slowed(rank, rounds, *((SMALL, SLOWED[-1:]) if smoke else (DEEP, SLOWED)))
        case "fits":
            fits(rank, rounds, 32 if smoke else 96)
        case "torch":
            beside_torch(rounds, *((SMALL, (2,)) if smoke else (CONFIG, (4, 8))))


def main() -> None:
    """Print the tables, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--only", default="", choices=("", *HEADS), help="one table")
    args = parse(parser, rounds=1)
    for name in HEADS:
        if args.only in ("", name):
            on_ranks(table, 1 if name == "torch" else RANKS, args.rounds, name, args.smoke)


if __name__ == "__main__":
    main()
