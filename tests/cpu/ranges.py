"""Runs of other people's trainers under torch.profiler, and what their traces say is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from schedir.analysis.progress_models import MODELS
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.ir.program import Program
from schedir.traces.trace_import import read_run

# `torch_lazy` is how torch's own schedules issue messages: one alone is in no batch there, as it is
# in Megatron's and DeepSpeed's.
ELSEWHERE = [model for model in MODELS if model != "torch_lazy"]


def profiled(step: Callable[[], Any], path: Path | str) -> list[str]:
    """What ranges a step has, by their start, the outer before the inner; the trace is kept."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        step()
    profile.export_chrome_trace(str(path))
    events = [
        (event["ts"], -event["dur"], event["name"].removeprefix("PP:"))
        for event in json.loads(Path(path).read_text())["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("PP:")
    ]
    found: list[str] = []
    around: list[tuple[float, str]] = []
    for start, minus, name in sorted(events):
        while around and around[-1][0] <= start:
            around.pop()
        around.append((start - minus, name))
        found.append(">".join(one for _, one in around))  # a range in another: 0F1>0WAIT_RECV_F1
    return found


def imported(folder: str | Path, name: str) -> Program:
    """What `schedir import` makes of a run's traces: a program that is whole, and finishes."""
    return read_run([f"{folder}/{name}-*.json"]).timeline.program


def computes(program: Program) -> list[list[int]]:
    """Forwards and backwards, by rank, in order."""
    return [s.words[np.isin(s.op, COMPUTE_OPS)].tolist() for s in program.streams]
