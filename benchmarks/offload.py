"""Measure steps with offload, and compare them with predictions and with torch's `save_on_cpu`.

    python benchmarks/offload.py [--rounds 20] [--only slowed|fits|torch]

- `slowed`: two processes over Gloo, of one thread each, alternate steps with fast copies and with
  slowed copies. `CopyLanes.bandwidth` sets the least time of a slowed copy, which needs no
  processor. Layers are wide and microbatches small, so a copy needs little processor time compared
  with the compute. The program has the fewest possible slots. The executor does not overwrite
  offloaded tensors with NaN. The costs are those of the step with fast copies. The table compares
  two predictions with measured steps of the same round: that with fast copies, which shows the
  error of the calibration, and that with slowed copies.
- `fits`: a memory limit that only the program with offload meets. schedir refuses the program
  without offload, and that with recomputation instead, because they need more memory. The script
  trains the program with offload, and measures its live memory.
- `torch`: one process of one thread trains a model of one stage. All forwards run before all
  backwards, so that both loops save the same tensors. The reference is a loop with
  `torch.autograd.graph.save_on_cpu(pin_memory=True)`. On a CPU this function copies nothing, so the
  loop uses hooks that copy to unpinned memory. In the second column of schedir, the executor does
  not overwrite offloaded tensors with NaN.

A ratio compares two steps of a round: the median and, in brackets, its 95 % confidence interval.
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
    WARM_UP_STEPS,
    format_deviation,
    format_milliseconds,
    format_pair_ratios,
    gather_times,
    measure_in_rounds,
    parse,
    print_header,
    print_row,
    run_on_ranks,
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
MEDIUM = gpt.GPTConfig(vocab=512, layers=8, hidden=256, heads=4, context=64, tied=False)
DEEP = gpt.GPTConfig(vocab=256, layers=2, hidden=1024, heads=8, context=32, tied=False)
SMALL = gpt.GPTConfig(vocab=256, layers=2, hidden=64, heads=2, context=32, tied=False)
SEQUENCES = 2  # sequences of a microbatch
# The schedule, the offloaded stages, and the time of a copy in forwards.
SLOWED_ROWS: tuple[tuple[str, Any, float], ...] = (
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
        self.stages, self.x, self.y = build_model(config, shape.stages, m)
        parameters = [p for s in shape.stages_on_rank[rank] for p in self.stages[s].parameters()]
        self.transport = GlooTransport(program)
        self.executor = Executor(
            program, rank, self.stages, self.transport, loss=gpt.loss,
            boundary=(SEQUENCES, config.context, config.hidden),
            optimizer=torch.optim.AdamW(parameters, lr=1e-4),
        )  # fmt: skip
        self.scale = 1 / (m * SEQUENCES * config.context)

    def step(self) -> None:
        self.executor.step(self.x, self.y, self.scale)


def build_model(
    config: gpt.GPTConfig, stages: int, m: int
) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Return a model and tokens, with the same values in all processes."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [gpt.build_stage(config, s, stages) for s in range(stages)]
    tokens = torch.randint(config.vocab, (m, SEQUENCES, config.context + 1))
    return modules, tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()


def measure_model_sizes(config: gpt.GPTConfig, stages: int) -> Sizes:
    """Return the sizes of a model of `build_model` with the states of AdamW."""
    modules, x, y = build_model(config, stages, 1)
    boundary = (SEQUENCES, config.context, config.hidden)
    return measure_sizes(modules, x[0], y[0], loss=gpt.loss, boundary=boundary)


def compare_slowed_copies(
    rank: int, rounds: int, config: gpt.GPTConfig, rows: Sequence[tuple[str, Any, float]]
) -> None:
    """Compare predicted and measured steps with fast and slowed copies."""
    saved = measure_model_sizes(config, RANKS).for_stages("saved", RANKS)
    for name, offloaded_stages, share in rows:
        schedule, shape = getattr(schedules, name), PipelineShape(RANKS, 8)
        calibration_run = Run(config, compile(schedule, shape, progress_model="per_edge"), rank)
        for _ in range(WARM_UP_STEPS):
            calibration_run.step()
        broadcast_costs: list[Any] = [_calibrate_last_step(calibration_run)]
        dist.broadcast_object_list(broadcast_costs)
        forward = float(np.mean(broadcast_costs[0].F))
        bandwidth = float(saved.mean()) / (share * forward)  # a copy takes `share` forwards
        copy = tuple(float(size) / bandwidth for size in saved)
        costs: Costs = replace(broadcast_costs[0], offload=copy, reload=copy)
        program = compile(
            schedule,
            shape,
            costs=costs,
            progress_model="per_edge",
            offload=offloaded_stages,
            buffer_sharing="minimal",
        )
        pair = free, slow = Run(config, program, rank), Run(config, program, rank)
        for run in pair:
            run.executor.resources.service(MemoryTiers).poisons_sources = False
        for lane in (Lane.D2H, Lane.H2D):
            slow.executor.resources.service(CopyLanes).bandwidth[lane] = bandwidth
        all_spans: list[
            list[float]
        ] = []  # measured fast and slowed, then predicted fast and slowed
        for round_index in range(WARM_UP_STEPS + rounds):
            spans = [0.0] * 4
            for run in pair if round_index % 2 else pair[::-1]:
                dist.barrier()
                run.step()
                timeline = gather_timeline(run.executor, run.transport)
                if timeline is None:
                    continue
                spans[pair.index(run)] = timeline.span
                if run is free:
                    costs = calibrate(timeline)
                    for k, simulated_costs in (
                        (2, costs),
                        (3, replace(costs, offload=copy, reload=copy)),
                    ):
                        spans[k] = simulate(
                            program, simulated_costs, progress_model="per_edge", blocking_hosts=True
                        ).span
            all_spans.append(spans)
        if rank:
            continue
        round_spans = np.array(all_spans[WARM_UP_STEPS:])
        longer = round_spans[:, 3] / round_spans[:, 2]
        print_row(
            f"{name}, of {offloaded_stages}",
            f"{share:g} F",
            *(f"{1e3 * run:.1f}" for run in np.median(round_spans[:, :2], 0)),
            f"{np.median(longer):.3f}",
            *(
                format_deviation((round_spans[:, a] / round_spans[:, b]).tolist())
                for a, b in ((2, 0), (3, 1))
            ),
        )


def _calibrate_last_step(run: Run) -> Costs | None:
    """Return the costs of the last step, on process 0."""
    timeline = gather_timeline(run.executor, run.transport)
    return None if timeline is None else calibrate(timeline)


def compare_peak_memory(rank: int, rounds: int, m: int) -> None:
    """Compare programs that keep, recompute and offload activations, at one memory limit."""
    sizes = measure_model_sizes(SMALL, RANKS)
    programs: dict[str, dict[str, Any]] = {
        "kept": {}, "recomputed": {"recompute": "all"}, "offloaded": {"offload": "all"}
    }  # fmt: skip
    shape = PipelineShape(RANKS, m)
    predicted_peaks = {}
    for name, options in programs.items():
        program = compile(schedules.gpipe, shape, buffer_sharing="minimal", **options)
        predicted_peaks[name] = float(simulate(program, sizes=sizes).peak_memory.max())
    limit = (predicted_peaks["offloaded"] + predicted_peaks["recomputed"]) / 2
    for name, options in programs.items():
        rank_results: list[Any] = [None] * RANKS
        result = "refused"
        try:
            program = compile(
                schedules.gpipe,
                shape,
                buffer_sharing="minimal",
                sizes=sizes,
                memory_limit=limit,
                **options,
            )
        except MemoryLimitError:
            pass
        else:
            run_ = Run(SMALL, program, rank)
            losses = [run_.executor.step(run_.x, run_.y, run_.scale) for _ in range(rounds)]
            with LiveMemory(run_.executor) as memory:
                run_.step()
            rank_losses = [float(loss) for loss in (losses[0], losses[-1]) if loss is not None]
            dist.all_gather_object(rank_results, (memory.peak_bytes, rank_losses))
            first, last = next(each for _, each in rank_results if each)
            result = (
                f"{max(one for one, _ in rank_results) / 1e6:.3f}, loss {first:.1f} to {last:.1f}"
            )
        if not rank:
            print_row(name, f"{predicted_peaks[name] / 1e6:.3f}", f"{limit / 1e6:.3f}", result)


def compare_with_torch(rounds: int, config: gpt.GPTConfig, microbatches: Sequence[int]) -> None:
    """Compare offload with `save_on_cpu` in one process."""
    for m in microbatches:
        program = compile(
            schedules.gpipe, PipelineShape(1, m), buffer_sharing="minimal", offload=[0]
        )
        runs = [Run(config, program, 0) for _ in range(2)]
        runs[1].executor.resources.service(MemoryTiers).poisons_sources = False
        stages, x, y = build_model(config, 1, m)
        torch_model, scale = stages[0], runs[0].scale
        adam = torch.optim.AdamW(torch_model.parameters(), lr=1e-4)

        def run_torch_step(
            torch_model: nn.Module = torch_model,
            x: Tensor = x,
            y: Tensor = y,
            scale: float = scale,
            adam: torch.optim.AdamW = adam,
        ) -> None:
            adam.zero_grad()
            losses = []
            for microbatch, target in zip(x, y, strict=True):
                with saved_tensors_hooks(_pack, _unpack):
                    losses.append(gpt.loss(torch_model(microbatch), target) * scale)
            while losses:
                losses.pop(0).backward()
            adam.step()

        first, second = (
            gather_times(
                measure_in_rounds(
                    {"theirs": run_torch_step, "ours": run.step}, rounds, dist.barrier
                )
            )
            for run in runs
        )
        medians = (format_milliseconds(first[pipeline]) for pipeline in ("theirs", "ours"))
        ratios = (
            format_pair_ratios(took["ours"], took["theirs"], 3)[0] for took in (first, second)
        )
        print_row(f"m={m}", *medians, *ratios)


def _pack(tensor: Tensor) -> Tensor:
    """Return a copy of a saved tensor, as `save_on_cpu(pin_memory=True)` makes it."""
    return torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout).copy_(tensor)


def _unpack(packed: Tensor) -> Tensor:
    """Return a copy of the packed tensor, in place of a copy to the device."""
    return packed.to("cpu", copy=True)


HEADERS = {
    "slowed": ["program, m=8", "a copy takes", "free, ms", "slowed, ms",
               "slowed over free, predicted", "free, predicted less measured",
               "slowed, predicted less measured"],
    "fits": ["2 ranks, m=96", "predicted, MB", "limit, MB", "lived, MB"],
    "torch": ["microbatches", "save_on_cpu, ms", "ours, ms", "ratio", "without NaN"],
}  # fmt: skip


def print_table(rank: int, rounds: int, name: str, smoke: bool) -> None:
    """Measure a table, and print it on rank 0."""
    if not rank:
        print_header(*HEADERS[name])
    match name:
        case "slowed":
            compare_slowed_copies(
                rank, rounds, *((SMALL, SLOWED_ROWS[-1:]) if smoke else (DEEP, SLOWED_ROWS))
            )
        case "fits":
            compare_peak_memory(rank, rounds, 32 if smoke else 96)
        case "torch":
            compare_with_torch(rounds, *((SMALL, (2,)) if smoke else (MEDIUM, (4, 8))))


def main() -> None:
    """Print the tables, each row when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of steps of each kind")
    parser.add_argument("--only", default="", choices=("", *HEADERS), help="print only this table")
    args = parse(parser, rounds=1)
    for name in HEADERS:
        if args.only in ("", name):
            run_on_ranks(
                print_table, 1 if name == "torch" else RANKS, args.rounds, name, args.smoke
            )


if __name__ == "__main__":
    main()
