"""Tests of the period of consecutive steps, with and without a gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, compile, schedules, simulate
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import UsageError
from schedir.ir.program import Program
from schedir.predict.step_period import compute_step_period
from schedir.testing import compute_programs

TIMES = st.floats(0.0, 4.0)
ZERO_BUBBLE = [
    (schedules.zb_h1, PipelineShape(4, 12)),
    (schedules.zb_h2, PipelineShape(4, 12)),
    (schedules.zb_v, PipelineShape(4, 12, placement="vee")),
]


def compile_both_norm_checks(
    source: Any, shape: PipelineShape | None = None
) -> tuple[Program, Program]:
    before_step = compile(source, shape, clip_grad_norm=True)
    return before_step, compile(source, shape, clip_grad_norm=True, norm_check="after_step")


@pytest.mark.parametrize("slow", [1.0, 1.3])
@pytest.mark.parametrize("blocking_hosts", [False, True])
@pytest.mark.parametrize(("schedule", "shape"), ZERO_BUBBLE)
def test_period_without_norm_wait_is_active_span(
    schedule: Any, shape: PipelineShape, blocking_hosts: bool, slow: float
) -> None:
    """The period is the longest active span of a rank, as in papers, and not the span of a step."""
    stage_costs = (1.0,) * (shape.stages - 1) + (slow,)
    costs = Costs(F=stage_costs, I=stage_costs, W=stage_costs)
    before, after = compile_both_norm_checks(schedule, shape)
    run = simulate(before, costs, blocking_hosts=blocking_hosts)
    assert compute_step_period(before, costs, blocking_hosts=blocking_hosts) == pytest.approx(
        run.span
    )
    assert compute_step_period(after, costs, blocking_hosts=blocking_hosts) == pytest.approx(
        run.active_span.max()
    )
    gains = schedule is not schedules.zb_h1 or slow > 1
    assert (run.active_span.max() < run.span - 1) == gains


@settings(max_examples=60, deadline=None)
@given(
    compute_programs(),
    st.builds(Costs, F=TIMES, I=TIMES, W=TIMES, send=TIMES, step=TIMES),
    st.sampled_from(MODELS),
    st.booleans(),
)
def test_period_without_norm_wait_is_never_longer(
    draft: Any, at: Costs, model: ProgressModel, blocks: bool
) -> None:
    if draft.shape.optimizer_steps > 1 or not draft.has_backward:
        return
    before, after = (
        compute_step_period(program, at, progress_model=model, blocking_hosts=blocks, steps=5)
        for program in compile_both_norm_checks(draft)
    )
    assert after <= before * (1 + 1e-9) + 1e-9


def test_long_norm_lengthens_period() -> None:
    """A norm adds to the period only if it takes longer than a step."""
    _, after = compile_both_norm_checks(schedules.zb_h2, PipelineShape(4, 12))
    periods = [
        compute_step_period(after, Costs(reduce_norm_after_step=cost)) for cost in (0.0, 30.0, 60.0)
    ]
    assert periods[:2] == [36.0, 36.0] and periods[2] == 60.0


def test_single_step_is_refused() -> None:
    with pytest.raises(UsageError, match="steps must be at least 2, not 1"):
        compute_step_period(
            compile_both_norm_checks(schedules.gpipe, PipelineShape(2, 2))[0], steps=1
        )
