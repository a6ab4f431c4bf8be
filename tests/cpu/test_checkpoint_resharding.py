"""Tests that any layout of ranks loads another layout's checkpoint and continues the run."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from schedir import PipelineShape
from schedir.schedules import dualpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from tests.cases import cases
from tests.cpu.checkpoint_layouts import (
    LAST_STEP,
    SAVED_STEP,
    Layout,
    Model,
    create_in_process_executor,
    load_and_resume,
    run_all_layouts,
)
from tests.cpu.checkpoint_layouts import read_checkpoint_tensors as read_whole
from tests.cpu.gloo_processes import run

BASE = Layout(one_f_one_b, PipelineShape(2, 4), dp=2)
# These layouts have the same replicas and sum in the same order, so they have the same bits.
SAME_SUMS = {
    "the same": BASE,
    "zero 1": BASE._replace(zero=1),
    "zero 2": BASE._replace(zero=2),
    "zero 3": BASE._replace(zero=3),
    "two stages of each rank": Layout(interleaved, PipelineShape(2, 4, 2), dp=2, zero=1),
    "split backwards": Layout(zb_h1, PipelineShape(2, 4), dp=2),
}
OTHERS = {
    "two holders": Layout(dualpipe, PipelineShape(2, 4, placement="mirror"), dp=2, zero=3),
    "slices": Layout(one_f_one_b, PipelineShape(2, 8), tp=2),
    "slices and replicas": Layout(one_f_one_b, PipelineShape(1, 4), tp=2, dp=2, zero=2),
    "slices of the sequence": Layout(
        one_f_one_b, PipelineShape(1, 4), tp=2, dp=2, zero=3, options={"sequence_parallel": True}
    ),
    "four replicas": Layout(looped_bfs, PipelineShape(1, 2, 2), dp=4, zero=3),
    "four ranks": Layout(one_f_one_b, PipelineShape(4, 8)),
    "one rank": Layout(one_f_one_b, PipelineShape(1, 8)),
    "no replicas": Layout(looped_bfs, PipelineShape(2, 8, 2)),
}
ADAM = partial(torch.optim.AdamW, lr=1e-3)
MODELS = {
    "float32": Model(optimizer=ADAM),
    "bfloat16, dropped, clipped": Model(half=True, dropout=0.1, clip=True, optimizer=ADAM),
}
# The second model has a main copy of its weights, random numbers and a norm, with these layouts.
HALF = ("zero 1", "zero 3", "split backwards", "two holders", "slices and replicas", "one rank")
# Checkpoints of virtual ranks have float32 weights and two holders.
USUAL = [(name, [*MODELS][1]) for name in ("zero 3", "slices and replicas", "one rank")]
CASES = cases(
    USUAL,
    [(name, model) for model in MODELS for name in SAME_SUMS | OTHERS
     if (model == "float32" or name in HALF) and (name, model) not in USUAL],
)  # fmt: skip


read_tensors = cache(read_whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write checkpoints of one run per model, and continue each run in every layout."""
    folder, layouts_by_name = tmp_path_factory.mktemp("checkpoints"), SAME_SUMS | OTHERS
    same_process_cases = [
        case for case in CASES if layouts_by_name[case[0]].processes == BASE.processes
    ]
    layouts = {
        model: {n: layouts_by_name[n] for n, m in same_process_cases if m == model}
        for model in MODELS
    }
    models = {model: MODELS[model] for model in MODELS if layouts[model]}
    run(run_all_layouts, BASE.processes, BASE, layouts, models, folder)
    for name, model in [case for case in CASES if case not in same_process_cases]:
        load_and_resume(
            create_in_process_executor(layouts_by_name[name], MODELS[model]), folder / model, name
        )
    return folder


def compute_differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, float]:
    assert first.keys() == second.keys()
    return {
        name: float((first[name].double() - second[name].double()).abs().max())
        for name in first
        if not torch.equal(first[name], second[name])
    }


@pytest.mark.parametrize(("name", "model"), CASES)
def test_any_layout_loads_and_resumes(name: str, model: str, folder: Path) -> None:
    """Dropout of tensor-parallel ranks differs between layouts, so its results are not compared."""
    loaded, resumed = (
        compute_differences(
            read_tensors(folder / model, step), read_tensors(folder / model / name, step)
        )
        for step in (SAVED_STEP, LAST_STEP)
    )
    assert not loaded and len(read_tensors(folder / model, LAST_STEP)) > 200
    assert bool(resumed) == (name in OTHERS)
    if resumed and not (MODELS[model].dropout and OTHERS[name].tp > 1):
        assert max(resumed.values()) < 1e-6
