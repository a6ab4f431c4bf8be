"""Tests of programs whose steps wait for no other rank, and are validated afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    compile,
    expand_schedule,
    from_text,
    schedules,
    simulate,
    to_text,
)
from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints
from schedir.analysis.progress_models import MODELS
from schedir.compiler.relower import Lowering
from schedir.errors import ShapeError, UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.testing import compute_programs
from schedir.training.config.run_config import Config, PipelineConfig
from schedir.verify.check import check

O = Opcode
SHAPE = PipelineShape(4, 8)


def compile_with_norm_check(norm_check: str, **options: Any) -> Any:
    return compile(schedules.zb_h1, SHAPE, clip_grad_norm=True, norm_check=norm_check, **options)


def test_every_rank_validates_after_its_step() -> None:
    for stream in compile_with_norm_check("after_step").streams:
        assert [instr.op for instr in stream][-2:] == [O.OptimizerStep, O.ReduceNormAfterStep]
        assert O.ReduceNorm not in {instr.op for instr in stream}


@settings(max_examples=10)
@given(compute_programs())
def test_post_validation_is_legal_for_random_programs(drawn: Any) -> None:
    """Check all progress models and blocking hosts, and the program that its text gives."""
    if drawn.shape.optimizer_steps > 1 or not drawn.has_backward:
        return
    lowered = compile(drawn, clip_grad_norm=True, norm_check="after_step")
    for model in MODELS:
        check(lowered, model)
        check(lowered, model, blocking_hosts=True)
    parsed = from_text(to_text(lowered))
    assert (parsed.norm_check, parsed.digest) == ("after_step", lowered.digest)
    assert lowered.digest != compile(drawn, clip_grad_norm=True).digest


def test_step_does_not_wait_for_other_ranks() -> None:
    """With a slow last stage and a slow norm, the first ranks step much earlier."""
    costs = Costs(
        F=(1, 1, 1, 2),
        I=(1, 1, 1, 2),
        W=(1, 1, 1, 2),
        step=1,
        reduce_norm=3,
        reduce_norm_after_step=3,
    )
    step_ends = {}
    for validate in ("before_step", "after_step"):
        run = simulate(compile_with_norm_check(validate), costs)
        steps = run.spans[run.spans["op"] == O.OptimizerStep]
        step_ends[validate] = steps["end"]
    assert len(set(step_ends["before_step"].tolist())) == 1
    assert (step_ends["before_step"] - step_ends["after_step"] >= 3).all()
    assert step_ends["before_step"].max() - step_ends["after_step"].min() > 5


def test_updated_state_is_held_twice() -> None:
    sizes = Sizes(activation=1, saved=2, model_states=(10, 20, 30, 40))
    peaks = [
        np.array(
            [
                rank.total_bytes.max()
                for rank in compute_footprints(compile_with_norm_check(validate, **options), sizes)
            ]
        )
        for validate in ("before_step", "after_step")
        for options in ({}, {"frozen_stages": 2})
    ]
    assert (peaks[2] - peaks[0]).tolist() == [10, 20, 30, 40]
    assert (peaks[3] - peaks[1]).tolist() == [0, 0, 30, 40]


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        ({"clip_grad_norm": False, "norm_check": "after_step"}, ("norm_check", "clip_grad_norm")),
        ({"clip_grad_norm": True, "norm_check": "later"}, ("norm_check",)),
        ({"clip_grad_norm": True, "norm_check": None}, None),
    ],
)
def test_wrong_norm_check_is_refused(how: dict[str, Any], fields: tuple[str, ...] | None) -> None:
    if fields is None:
        assert compile(schedules.gpipe, SHAPE, **how).norm_check == "before_step"
        return
    with pytest.raises(ShapeError) as error:
        compile(schedules.gpipe, SHAPE, **how)
    assert tuple(error.value.fields) == fields


def test_several_updates_are_refused() -> None:
    with pytest.raises(ShapeError, match="optimizer_steps=1, not 2") as error:
        compile(
            schedules.gpipe,
            PipelineShape(2, 4, optimizer_steps=2),
            clip_grad_norm=True,
            norm_check="after_step",
        )
    assert tuple(error.value.fields) == ("norm_check", "optimizer_steps")


def test_advice_keeps_norm_check() -> None:
    """Other schedules are also simulated without a wait for the norm."""
    costs = Costs(F=(1, 1, 1, 2))
    other_draft = expand_schedule(schedules.zb_h1, SHAPE)
    assert (
        Lowering(compile_with_norm_check("after_step"), "per_device")
        .compile_draft(other_draft, costs)
        .norm_check
        == "after_step"
    )


def test_norm_check_on_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ahead.sched"
    assert (
        main(
            [
                "print",
                "zb_h1",
                "-O",
                "clip_grad_norm",
                "-O",
                "norm_check=after_step",
                "-o",
                str(file),
            ]
        )
        == 0
    )
    assert "norm_check after_step" in file.read_text()
    assert main(["check", str(file)]) == 0
    assert main(["check", str(file), "-O", "norm_check=before_step"]) != 0
    assert "norm_check" in capsys.readouterr().err


def test_training_run_refuses_after_step(tmp_path: Path) -> None:
    """A training run uses the results of each step, so it refuses `norm_check="after_step"`."""
    file = tmp_path / "ahead.sched"
    file.write_text(to_text(compile_with_norm_check("after_step", tied_weights=True)))
    config = Config(pipeline=PipelineConfig(ranks=4, microbatches=8, schedule=str(file)))
    with pytest.raises(UsageError, match="has norm_check after_step, but a training run needs"):
        config.request.program  # noqa: B018
