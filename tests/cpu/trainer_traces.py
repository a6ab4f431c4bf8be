"""Runs other trainers under torch.profiler, and reads their traces."""

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

# `torch_lazy` is the way in which torch's own schedules issue messages. A single message is in no
# batch there, unlike in Megatron and DeepSpeed.
OTHER_MODELS = [model for model in MODELS if model != "torch_lazy"]


# The folder of the traces of several runs, and the ranges of each run by rank.
Runs = tuple[Path, list[dict[str, list[str]]]]


def profile_step(step: Callable[[], Any], path: Path | str) -> list[str]:
    """Return a step's ranges by their start, the outer before the inner, and save its trace."""
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


def import_traces(folder: str | Path, name: str) -> Program:
    """Return the program that `schedir import` reads from a run's traces."""
    return read_run([f"{folder}/{name}-*.json"]).timeline.program


def list_computes(program: Program) -> list[list[int]]:
    """Return the forwards and backwards of each rank in order."""
    return [s.words[np.isin(s.op, COMPUTE_OPS)].tolist() for s in program.streams]
