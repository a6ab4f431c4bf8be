"""Tests that any layout of ranks reads another's checkpoint and continues as in one run."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from schedir import PipelineShape
from schedir.schedules import dualpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from tests.cpu.checkpoint_layouts import Layout, Model, all_of, in_process, resumed
from tests.cpu.checkpoint_layouts import whole as read_whole
from tests.cpu.gloo_processes import run

BASE = Layout(one_f_one_b, PipelineShape(2, 4), dp=2)
# These layouts have the same replicas and sum in the same order, so they have the same bits.
ALIKE = {
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
CASES = [(name, model) for model in MODELS for name in ALIKE | OTHERS
         if model == "float32" or name in HALF]  # fmt: skip


whole = cache(read_whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of a run, continued in every layout, for every model."""
    folder, every = tmp_path_factory.mktemp("checkpoints"), ALIKE | OTHERS
    several = [case for case in CASES if every[case[0]].processes == BASE.processes]
    layouts = {model: {n: every[n] for n, m in several if m == model} for model in MODELS}
    run(all_of, BASE.processes, BASE, layouts, MODELS, folder)
    for name, model in [case for case in CASES if case not in several]:
        resumed(in_process(every[name], MODELS[model]), folder / model, name)
    return folder


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    assert one.keys() == other.keys() and len(one) > 200
    return {
        name: float((one[name].double() - other[name].double()).abs().max())
        for name in one
        if not torch.equal(one[name], other[name])
    }


@pytest.mark.parametrize(("name", "model"), CASES)
def test_any_layout_reads_what_was_written(name: str, model: str, folder: Path) -> None:
    assert not differing(whole(folder / model, 3), whole(folder / model / name, 3))


@pytest.mark.parametrize(("name", "model"), [case for case in CASES if case[0] in ALIKE])
def test_layouts_that_sum_alike_go_on_with_the_bits_of_one_run(
    name: str, model: str, folder: Path
) -> None:
    assert not differing(whole(folder / model, 6), whole(folder / model / name, 6))


@pytest.mark.parametrize(("name", "model"), [case for case in CASES if case[0] in OTHERS])
def test_any_layout_goes_on(name: str, model: str, folder: Path) -> None:
    """The exception is dropout of tensor-parallel ranks, which differs between layouts."""
    found = differing(whole(folder / model, 6), whole(folder / model / name, 6))
    assert found
    if not (MODELS[model].dropout and OTHERS[name].tp > 1):
        assert max(found.values()) < 1e-6
