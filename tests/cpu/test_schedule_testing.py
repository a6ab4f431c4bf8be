"""Tests that schedir.testing accepts right schedules, and finds and names wrong ones."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch import Tensor

import schedir
from schedir import schedules
from schedir.analysis.progress_models import MODELS
from schedir.errors import (
    DeadlockError,
    SchedirError,
    ScheduleError,
    UsageError,
)
from schedir.extras import MissingPackageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, weave
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import (
    assert_schedule,
    compute_programs,
    programs,
    schedule_assertion,
    shapes,
    shapes_for,
    tiny_model,
)
from schedir.verify.check import check, check_draft
from tests.cases import ALL

SMALL_SHAPES = [PipelineShape(1, 3), PipelineShape(2, 1), PipelineShape(3, 4)]


@pytest.mark.parametrize("name", sorted(schedules.__all__))
def test_built_in_schedules_pass(name: str) -> None:
    schedule = getattr(schedules, name)

    def takes(shape: PipelineShape) -> bool:
        try:
            return expand_schedule(schedule, shape).is_draft
        except ScheduleError:
            return False  # for example, it has too few microbatches

    # test_numeric_law.py runs the schedules on many shapes.
    accepted = list(filter(takes, shapes_for(schedule)))
    assert_schedule(schedule, shapes=accepted[::5] if ALL else accepted[len(accepted) // 2 :: 30])


def test_schedule_is_called_for_given_shapes() -> None:
    calls: list[tuple[int, int]] = []

    def mine(r: int, P: int, m: int) -> RankSchedule:
        calls.append((P, m))
        return m * F + m * B

    assert_schedule(mine, shapes=[PipelineShape(2, 3), PipelineShape(1, 1)])
    assert set(calls) == {(2, 3), (1, 1)}
    calls.clear()
    assert_schedule(mine, shapes=shapes(ranks=2, stages_per_rank=1), max_examples=10)
    assert {P for P, _ in calls} <= {1, 2}
    assert_schedule(partial(schedules.interleaved, group=4), shapes=[PipelineShape(2, 8, 2)])


def test_wrong_update_of_gradients_is_refused() -> None:
    shape = PipelineShape(2, 8, optimizer_steps=4, weight_delay=1)
    assert_schedule(schedules.pipedream_2bw, shapes=[shape])
    with pytest.raises(AssertionError, match="would add its gradients to update 0"):
        assert_schedule(schedules.zb_h1, shapes=[shape])


def test_shapes_for_fits_placement_of_schedule() -> None:
    """The shapes have the placement of the schedule, and each shape occurs once."""
    interleaved_shapes = shapes_for(schedules.interleaved)
    assert {(p.placement, p.stages_per_rank) for p in interleaved_shapes} == {
        ("loop", v) for v in (1, 2, 3)
    }
    assert len(interleaved_shapes) == len(set(interleaved_shapes)) == 4 * 6 * 3
    assert {p.stages_per_rank for p in shapes_for(schedules.zb_v)} == {2}
    assert {p.ranks for p in shapes_for(schedules.dualpipe)} == {2, 4}


def test_empty_shapes_are_refused() -> None:
    with pytest.raises(UsageError):
        assert_schedule(schedules.gpipe, shapes=[])


@pytest.mark.parametrize("other", [3, [3], "x", PipelineShape, {"ranks": 2}])
def test_wrong_types_of_shapes_and_progress_models_are_refused(other: Any) -> None:
    with pytest.raises(UsageError, match=r"shapes(\[0\])? must be a PipelineShape, not"):
        assert_schedule(schedules.gpipe, shapes=other)
    with pytest.raises(UsageError, match="progress_models must be one or more of 'per_edge'"):
        assert_schedule(schedules.gpipe, progress_models=other)


def test_single_shape_and_progress_model_are_accepted() -> None:
    assert_schedule(schedules.gpipe, shapes=PipelineShape(2, 2), progress_models="per_device")  # type: ignore[arg-type]


def test_strategy_reports_smallest_failing_shape() -> None:
    """The example of an earlier failure is not reported for this schedule."""
    for least in (3, 2):

        def omit_backward(r: int, P: int, m: int, least: int = least) -> RankSchedule:
            return m * F + (m if least > m else m - 1) * B

        error = str(get_failure(omit_backward, shapes=shapes(2, 6, 1, ("loop",))))
        assert f"PipelineShape(ranks=1, microbatches={least})" in error


def get_failure(schedule: Any, **options: Any) -> AssertionError:
    with pytest.raises(AssertionError) as caught:
        assert_schedule(schedule, **options)
    return caught.value


def send_too_late(r: int, P: int, m: int) -> RankSchedule:
    lead = min(r, m)
    return lead * F + (m - lead) * (F + B) + lead * B


def omit_backwards(r: int, P: int, m: int) -> RankSchedule:
    return m * F + min(m, 3) * B


@pytest.mark.parametrize(
    ("schedule", "cause", "shape"),
    [
        (send_too_late, DeadlockError, "PipelineShape(ranks=2, microbatches=2)"),
        (omit_backwards, SchedirError, "PipelineShape(ranks=1, microbatches=4)"),
    ],
)
def test_refused_schedule_is_reported(schedule: Any, cause: Any, shape: str) -> None:
    error = get_failure(schedule)
    assert isinstance(error.__cause__, cause)
    assert shape in str(error) and str(error.__cause__) in str(error)


def test_schedule_that_raises_is_reported() -> None:
    def needy(r: int, P: int, m: int) -> RankSchedule:
        return weave(m * F, m * B, warmup=8 // (3 - P))

    assert "PipelineShape(ranks=3, microbatches=1)" in str(get_failure(needy))
    assert_schedule(needy, shapes=shapes(ranks=2, stages_per_rank=1), max_examples=10)


def test_bitwise_option_detects_other_backward_order() -> None:
    def backwards(r: int, P: int, m: int) -> RankSchedule:
        return sum((F.at(k) for k in range(m)), m * F * 0) + sum(
            (B.at(k) for k in reversed(range(m))), m * B * 0
        )

    assert_schedule(backwards, shapes=[PipelineShape(3, 4)])  # the same but for rounding
    error = get_failure(backwards, bitwise=True)
    assert "in stage" in str(error) and "are not in the order of the microbatches" in str(error)


def test_deferred_weight_gradients_have_same_bits() -> None:
    assert_schedule(lambda r, P, m: m * F + m * I + m * W, shapes=SMALL_SHAPES, bitwise=True)


def test_wrong_loss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one microbatch is halved. No schedule alone can cause this fault."""
    plain = tiny_model.squared_error
    calls: list[float] = []

    def halve_second_loss(y: Tensor, target: Tensor) -> Tensor:
        """Return the loss with half of its weight in the second call."""
        calls.append(float(target.sum()))
        return plain(y, target) * (0.5 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(tiny_model, "squared_error", halve_second_loss)
    assert "the loss" in str(get_failure(schedules.gpipe, shapes=[PipelineShape(2, 2)]))


@settings(max_examples=50)
@given(programs(ranks=3, microbatches=3))
def test_programs_strategy_is_legal_under_all_models(program: Program) -> None:
    for model in MODELS:
        check(program, model)


@settings(max_examples=50)
@given(compute_programs(ranks=3, microbatches=3))
def test_compute_programs_strategy_gives_complete_drafts(made: Program) -> None:
    assert check_draft(made).is_draft and made.reduces_in_microbatch_order == (
        made.shape.placement_rows == 1
    )


def test_missing_hypothesis_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`assert_same_gradients` needs no hypothesis. Its modules are imported again."""
    for name in [name for name in sys.modules if name.startswith("schedir.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.setattr(schedir, "testing", schedir.testing)  # restores it after the test
    names: dict[str, Any] = {}
    exec("from schedir.testing import assert_same_gradients", names)
    assert callable(names["assert_same_gradients"])
    with pytest.raises(MissingPackageError) as error:
        exec("from schedir.testing import assert_schedule", names)
    assert "schedir.testing.assert_schedule needs hypothesis" in str(error.value)


def test_page_example_passes_and_fails_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "test-a-schedule.md"
    names: dict[str, Any] = {}
    code, rest = page.read_text().split("```python")[1].split("```", 1)
    exec(code, names)
    with monkeypatch.context() as patch:
        patch.setattr(schedule_assertion, "shapes_for", lambda _: SMALL_SHAPES)
        names["test_mine"]()
    exec(code.replace("min(ranks - 1 - rank, microbatches)", "min(rank, microbatches)"), names)
    with pytest.raises(AssertionError) as caught:
        names["test_mine"]()
    shown = rest.split("```\n")[1].removesuffix("  ...\n").removeprefix("AssertionError: ")
    assert str(caught.value).startswith(shown)
