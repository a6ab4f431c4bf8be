"""Compare predictions of the planner with published results about expert parallelism.

    python benchmarks/expert_plans.py
    python benchmarks/expert_plans.py --draws 500

The script prints three tables:

- The bubble of DualPipeV and the formula of DeepSeek-V3 (arXiv 2412.19437, table 2).
- The time of a microbatch divided by its compute, if all-to-alls take as long as compute, as in
  DeepSeek-V3 (section 3.2.1). It is 1 if the schedule hides all all-to-alls. It is less if the
  schedule also hides those of the first forward and the last backward.
- The steps of schedules for Qwen3-235B-A22B, pp 4 and ep 8, relative to 1F1B. Each draw multiplies
  the speeds of the cluster by factors, because the planner does not know the speeds exactly. The
  interval contains 95 % of the draws.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse, print_header, print_row
from schedir import Costs, PipelineShape, compile, planner, schedules, simulate
from schedir.schedules.schedule_algebra import B, F, I, W, overlapped_pair

# The stages per rank of each schedule, and the layers of stages: the end stages have one less.
SCHEDULES = {
    "one_f_one_b": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2, "v_half": 2, "v_min": 2,
    "dualpipe_v": 2,
}  # fmt: skip
LAYERS = {1: (23, 24, 24, 23), 2: (11, *[12] * 6, 11)}
# Factors of the speeds: matrix products, memory and links.
SPREAD = {
    "flops": 0.2, "hbm_bandwidth": 0.1, "nvlink_bandwidth": 0.3, "network_bandwidth": 0.3,
}  # fmt: skip


def print_dualpipe() -> None:
    """Print the bubble of DualPipeV, and the time of a microbatch with all-to-alls."""
    print_header("ranks", "longest idle time of a rank", "(PP/2 - 1)(FB + B - 3W)")
    for ranks in (4, 8):
        costs = Costs(F=1, I=1, B=1.8, W=0.8, FB=2.4)
        shape = PipelineShape(ranks, 4 * ranks, 2, "vee")
        idle = simulate(compile(schedules.dualpipe_v, shape), costs).idle.max()
        print_row(ranks, f"{idle:.2f}", f"{(ranks - 1) * (2.4 + 1.8 - 3 * 0.8):.2f}")
    print()
    print_header("layers of a stage", "pairs of F and B", "pairs of F and I, W in the waits")
    for layers in (1, 2, 4):
        print_row(
            layers,
            *(f"{compute_exposed_share(layers, is_split=split):.2f}" for split in (False, True)),
        )
    print()


def compute_exposed_share(layers: int, *, is_split: bool) -> float:
    """Return the time per microbatch over its compute, if all-to-alls take as long as compute."""
    segments, microbatches = 2 * layers + 1, 12
    # The time of an all-to-all. There are 2 * layers of them in each direction.
    all_to_all = 3 * segments / (4 * layers)
    costs = Costs(F=1, I=1, W=1, B=2, dispatch=all_to_all, combine=all_to_all)
    pair = overlapped_pair(F, I) + W if is_split else overlapped_pair(F, B)
    last_backward = I + W if is_split else B
    options: dict[str, Any] = {"dp": 2, "ep": 2, "stage_segments": "dc" * layers, "costs": costs}
    if is_split:
        options["fill_collective_waits"] = "all"
    program = compile(
        lambda *_: F + (microbatches - 1) * pair + last_backward,
        ranks=1,
        microbatches=microbatches,
        **options,
    )
    # The time of the first forward and the last backward, which overlap with no other instruction.
    exposed_ends = 3 * segments + 4 * layers * all_to_all
    return (simulate(program, costs).span - exposed_ends) / (microbatches - 1) / (3 * segments)


def print_order(draws: int) -> None:
    """Print the steps of schedules relative to 1F1B, and the share of draws with this order."""
    model = planner.load_model("qwen3-235b-a22b")
    cluster, rng = planner.cluster_preset("h100", nodes=16), random.Random(1)
    steps: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    memory: dict[str, float] = {}
    for draw in range(draws + 1):
        factors = {name: 1 + (draw > 0) * rng.uniform(-s, s) for name, s in SPREAD.items()}
        drawn_cluster = replace(
            cluster, **{name: getattr(cluster, name) * f for name, f in factors.items()}
        )
        for name, v in SCHEDULES.items():
            plan = planner.ParallelPlan(
                pp=4, dp=32, ep=8, zero=1, microbatches=16, schedule=name, stages_per_rank=v,
                layers_per_stage=LAYERS[v], rank_order="tp-dp-pp", attention="flash",
            )  # fmt: skip
            estimate = planner.simulate_plan(model, drawn_cluster, plan)
            steps[name].append(estimate.step_time)
            memory.setdefault(name, estimate.memory.total)
    order = sorted(SCHEDULES, key=lambda name: steps[name][0])
    ranked = np.argsort([steps[name][1:] for name in order], axis=0)
    same_order_share = (
        float((ranked == np.arange(len(order))[:, None]).all(0).mean()) if draws else 1.0
    )
    print_header("schedule", "step, s", "step over that of 1F1B", "memory, GB")
    for name in order:
        ratios = [a / b for a, b in zip(steps[name], steps["one_f_one_b"], strict=True)]
        low, high = np.quantile(ratios[1:] or ratios, [0.025, 0.975])
        print_row(name, f"{steps[name][0]:.2f}", f"{median(ratios):.3f} ({low:.3f} to {high:.3f})",
             f"{memory[name] / 1e9:.0f}")  # fmt: skip
    print(f"\n{same_order_share:.0%} of {draws} draws have this order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200, help="number of draws of the speeds")
    args = parse(parser, draws=1)
    print_dualpipe()
    print_order(args.draws)


if __name__ == "__main__":
    main()
