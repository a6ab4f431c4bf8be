"""Tests of found schedules, which `schedir train` runs. The numeric law has any schedule."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from schedir import search_schedule
from schedir.__main__ import main
from schedir.compiler.relower import extract_compute
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text
from schedir.predict.simulate import simulate
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.training.config.config_file import read_config
from tests.cpu.train_command import train, train_in_this_process

M = 6


def make_costs(shape: PipelineShape) -> Costs:
    """Return costs with a different time for each stage."""
    draw = random.Random(shape.stages)
    times = [tuple(draw.uniform(0.7, 1.3) for _ in range(shape.stages)) for _ in range(3)]
    return Costs(F=times[0], I=times[1], W=times[2], send=0.05)


@cache
def search_program(shape: PipelineShape, in_flight: int, split: bool = True) -> Program:
    """Return a found schedule."""
    return search_schedule(
        shape, make_costs(shape), max_in_flight=in_flight, split_backward=split, time_limit=60,
        max_evaluations=30,
    ).program  # fmt: skip


CASES = [
    (PipelineShape(4, M), 3, True),
    (PipelineShape(4, M), 2, False),
    (PipelineShape(2, M, 2), 5, True),
    (PipelineShape(2, M, 2, "vee"), 4, True),
]


@pytest.mark.parametrize(("shape", "in_flight", "split"), CASES)
def test_searched_schedule_reduces_in_microbatch_order(
    shape: PipelineShape, in_flight: int, split: bool
) -> None:
    assert search_program(shape, in_flight, split).reduces_in_microbatch_order


def test_searched_schedule_differs_from_built_in_schedules() -> None:
    shape, in_flight, split = CASES[0]
    streams = extract_compute(search_program(shape, in_flight, split)).streams
    for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "eager_1f1b"):
        assert expand_schedule(get_built_in_schedules()[name], shape).streams != streams


def test_trainer_runs_searched_program_file(config: str, tmp_path: Path) -> None:
    """An untied model uses the file unchanged. For a tied model it is lowered again."""
    file, tied = str(tmp_path / "best.sched"), str(tmp_path / "tied.sched")
    costs = "--costs=F=1:1.2,I=1.3:0.9,W=0.8:1.1,send=0.05"
    options = ("--ranks=2", "--microbatches=3", costs)
    assert main(["search", *options, "--max-in-flight=2", "--max-evaluations=30", "-o", file]) == 0
    relower = ["--relower", "-O", "tied_weights", "-O", "clip_grad_norm", costs, "-o", tied]
    assert main(["print", file, *relower]) == 0
    programs = [from_text(Path(name).read_text()) for name in (file, tied)]
    costs_by_stage = Costs(F=(1, 1.2), I=(1.3, 0.9), W=(0.8, 1.1), send=0.05)
    assert simulate(programs[0], costs_by_stage).span == simulate(programs[1], costs_by_stage).span
    shape = ("pipeline.ranks=2", "pipeline.stages_per_rank=1", "pipeline.tp=1", "train.steps=2")
    untied_model = ["model.tied=false", "train.clip_grad_norm=0.0"]
    untied = read_config(config, [*shape, f'pipeline.schedule="{file}"', *untied_model])
    assert extract_compute(untied.request.program).streams == extract_compute(programs[0]).streams
    pipeline_losses = train(config, tmp_path / "many", *shape, f'pipeline.schedule="{tied}"')
    plain_losses = train_in_this_process(
        config, tmp_path / "one", *shape, 'pipeline.schedule="one_f_one_b"'
    )
    assert pipeline_losses == pytest.approx(plain_losses, rel=1e-5)
