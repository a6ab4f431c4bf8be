"""Runs torch's schedules on real Gloo processes under torch.profiler."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import ProfilerActivity, profile, schedule

from tests.cases import cases
from tests.cpu.torch_pipelines import list_rank_stages, make_stage

RANKS, MICROBATCHES, WIDTH, STEPS = 2, 4, 128, 2
VEE = ("ZBVZeroBubble", "DualPipeV")
MULTI_STAGE_NAMES = ("Interleaved1F1B", "InterleavedZeroBubble", *VEE)
NAMES = (*cases(["Interleaved1F1B", *VEE, "GPipe"], ["InterleavedZeroBubble"]),)
NAME_WITH_EVALUATION = "Interleaved1F1B"  # ends with a step and an evaluation


def run_profiled_steps(rank: int, folder: str) -> dict[str, list[str]]:
    """Run some steps of each schedule, and profile the last ones.

    Return this rank's order of computes for schedules whose torch class has one.
    """
    torch.manual_seed(rank)
    said = {}
    for name in NAMES:
        count = 2 * RANKS if name in MULTI_STAGE_NAMES else RANKS
        held = list_rank_stages(f"Schedule{name}", rank, RANKS, count)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in held]
        stages = [make_stage(part, s, count) for part, s in zip(parts, held, strict=True)]
        kind: Any = get_schedule_class(name)
        given = stages if name in MULTI_STAGE_NAMES else stages[0]
        pipe = kind(given, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
        x, target = torch.randn(2, 2 * MICROBATCHES, WIDTH).unbind()

        def save(profiler: Any, name: str = name) -> None:
            profiler.export_chrome_trace(f"{folder}/{name}/rank{rank}.json")

        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=STEPS),
            on_trace_ready=save,
        ) as profiler:
            for _ in range(1 + STEPS):
                mine = (x,) if 0 in held else ()
                kwargs = {"target": target} if count - 1 in held else {}
                pipe.step(*mine, **kwargs)
                profiler.step()
        if name == NAME_WITH_EVALUATION:
            when = schedule(wait=0, warmup=1, active=2)
            to = partial(save, name="evaluated")
            with profile(activities=[ProfilerActivity.CPU], schedule=when, on_trace_ready=to) as p:
                for step in (pipe.step, pipe.step, pipe.eval):
                    step(*mine, **kwargs)
                    p.step()
        order = getattr(pipe, "pipeline_order", {}).get(rank, [])
        said[name] = [str(action) for action in order if action is not None]
    return said


def read_ranges(path: Path) -> list[dict[str, Any]]:
    """Return all complete events of a trace, without the code under test."""
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
