"""Tests of `schedir.torch_pipelining.Schedule`, which replaces torch's own schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn.functional import mse_loss

from schedir import schedules
from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.io.torch_csv import to_csv
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.text_format import to_text as text
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W
from schedir.testing.gradient_assertion import assert_same_gradients
from schedir.torch_pipelining import Schedule
from tests.cpu.drop_in_steps import MB, made, step_of
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import Step, batch, model, stage_of

SCHEDULES = [
    ("gpipe", "loop", 2),
    ("one_f_one_b", "loop", 2),
    ("zb_h1", "loop", 2),
    ("interleaved", "loop", 4),
    ("interleaved_zb", "loop", 4),
    ("zb_v", "vee", 4),
    ("v_half", "vee", 4),
    ("dualpipe_v", "vee", 4),
]
each = pytest.mark.parametrize(("name", "placement", "stages"), SCHEDULES)


def same(step: Step, stages: int = 2, ranks: int = 2, **options: Any) -> None:
    given: dict[str, Any] = {"microbatches": MB, "loss_fn": mse_loss} | options
    assert_same_gradients(step, model(stages), batch(), ranks=ranks, **given)


def backwards(rank: int, ranks: int, m: int, v: int = 1) -> RankSchedule:
    """Return a user's schedule with microbatches in descending order."""
    forward = sum((F.at(mb) for mb in range(m - 1, -1, -1)), F * 0)
    return forward + sum((I.at(mb) + W.at(mb) for mb in range(m)), F * 0)


@each
def test_gradients_are_those_of_a_plain_loop(name: str, placement: str, stages: int) -> None:
    same(step_of(placement, schedule=name), stages)


def test_of_one_rank_alone() -> None:
    same(step_of("vee", schedule="zb_v"), 2, ranks=1)


def test_of_ranks_that_hold_more_than_others() -> None:
    def mine(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
        forward = [*(F[j] for j in range(v))]
        return m * sum(forward[1:], forward[0]) + m * sum((B[v - 1 - j] for j in range(v)), F * 0)

    same(step_of((0, 1, 1), schedule=mine), 3)


def test_one_of_ones_own_whose_microbatches_come_in_another_order() -> None:
    """torch orders losses by their computation, and this class by microbatch."""
    same(step_of("loop", schedule=backwards))


@pytest.mark.parametrize("form", ["program", "draft", "sched", "csv", "transfers"])
def test_programs(form: str, tmp_path: Any) -> None:
    made = compile(schedules.zb_h1, PipelineShape(2, MB))
    (tmp_path / "x.sched").write_text(text(made))
    (tmp_path / "x.csv").write_text(to_csv(made, "torch-2.13" if form == "transfers" else "torch"))
    draft = {"program": made, "draft": schedules_draft(), "sched": tmp_path / "x.sched"}
    same(step_of("loop", program=draft.get(form, str(tmp_path / "x.csv"))))


@pytest.mark.parametrize("frozen_stages", [0, 1, 2])
def test_first_stages_that_are_not_trained(frozen_stages: int) -> None:
    """A program has no backward of them, or one that does nothing."""
    whole = model(4)
    whole[:2].requires_grad_(False)
    program = compile(
        schedules.zb_v, PipelineShape(2, MB, placement="vee"), frozen_stages=frozen_stages
    )
    step = step_of("vee", program=program)
    assert_same_gradients(step, whole, batch(), ranks=2, microbatches=MB, loss_fn=mse_loss)


def test_a_stage_that_would_not_be_trained_is_refused() -> None:
    program = compile(schedules.one_f_one_b, PipelineShape(2, MB), frozen_stages=1)
    with pytest.raises(ExecutionError, match="no backward of stage 0"):
        same(step_of("loop", program=program))


def schedules_draft() -> Any:
    from schedir.schedules.schedule_expansion import expand_schedule

    return expand_schedule(schedules.zb_h1, PipelineShape(2, MB))


def test_gradients_add_up_over_steps_and_evaluations() -> None:
    """Each step scales what it adds, and not the earlier gradients."""

    def between(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            schedule.eval(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)

    def step(**options: Any) -> Step:
        return step_of("vee", schedule="zb_v", steps=2, **options)

    four: dict[str, Any] = {"microbatches": 2 * MB, "reduction": MB}
    assert_same_gradients(step(), model(4), batch(16), ranks=2, loss_fn=mse_loss, **four)
    assert_same_gradients(
        step(around=between), model(4), batch(16), ranks=2, loss_fn=mse_loss, **four
    )


def test_gradients_that_are_not_scaled() -> None:
    same(step_of("loop", schedule="one_f_one_b", scale_grads=False, steps=1), reduction="sum")


def test_its_kind_is_what_torchtitan_asks_for() -> None:
    assert issubclass(Schedule, theirs.PipelineScheduleMulti)
    assert issubclass(Schedule.with_options(schedule="zb_v"), theirs._PipelineScheduleRuntime)


# ---------------------------------------------------------------- losses and outputs


class Scaled(nn.Module):
    """A layer that takes a scale, either one for all or one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, by: Tensor, times: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)) * by * times


def weighted(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return mse_loss(y, target) * weight


TURNS = [*SCHEDULES[1::3], ("mine", "loop", 2)]


def all_given(rank: int) -> list[list[list[Tensor]]]:
    return [given(rank, *each) for each in TURNS]


def given(rank: int, name: str, placement: str, stages: int) -> list[list[Tensor]]:
    """Return losses and outputs of alternating steps and evaluations, called in several ways."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(Scaled() for _ in range(stages)))
    own = PipelineShape(2, MB, stages // 2, placement).stages_on_rank[rank]
    parts: dict[int, nn.Module] = {s: whole[s] for s in own}
    found = getattr(schedules, name, backwards)
    schedule = made(parts, stages, schedule=found, loss_fn=weighted)
    (x, y), by = batch(), torch.linspace(1, 2, 8)[:, None]
    first, last = 0 in parts, stages - 1 in parts
    kwargs = {"by": by, "times": 0.5}
    cut: dict[str, Any] = {
        "arg_mbs": [(part,) for part in x.chunk(MB)] if first else None,
        "kwarg_mbs": [{"by": part, "times": 0.5} for part in by.chunk(MB)],
        "target_mbs": [*y.chunk(MB)] if last else None,
    }
    whole_batch: dict[str, Any] = {"target": y if last else None, **kwargs}
    args = (x,) if first else ()
    more = {"loss_kwargs": {"weight": 3.0}}
    told: list[list[Tensor]] = []
    calls = [
        (schedule.eval, args, whole_batch),  # before any step
        (schedule.step, args, whole_batch),
        (schedule.eval, (), cut),
        (schedule.step, (), cut | more),
        (schedule.step, args, whole_batch | more),
        (schedule.eval, args, whole_batch | more),
    ]
    for call, positional, keywords in calls:
        losses: list[Tensor] = [torch.ones(())]  # the call empties it first
        out = call(*positional, losses=losses, **keywords)
        assert (out is None) == (not last)
        told.append([out.detach(), *(loss.detach() for loss in losses)] if last else [])
    assert schedule.step(*args, **whole_batch, return_outputs=False) is None
    return told


def test_losses_and_outputs() -> None:
    """Losses and outputs are in the order of microbatches, whatever the order of the schedule.

    This is tested for whole batches and microbatches, for steps and evaluations, and with arguments
    for stages and loss.
    """
    (x, y), by = batch(), torch.linspace(1, 2, 8)[:, None]
    for (_, _, stages), *ranks in zip(TURNS, *spawn(all_given, 2), strict=True):
        torch.manual_seed(0)
        whole = nn.Sequential(*(Scaled() for _ in range(stages)))
        chunks = []
        for part, scale in zip(x.chunk(MB), by.chunk(MB), strict=True):
            for layer in whole:
                part = layer(part, scale, 0.5)
            chunks.append(part.detach())
        losses = [mse_loss(*pair) for pair in zip(chunks, y.chunk(MB), strict=True)]
        (told,) = (told for told in ranks if told[0])
        for (out, *seen), weight in zip(told, [1, 1, 1, 3, 3, 3], strict=True):
            torch.testing.assert_close(out, torch.cat(chunks))
            torch.testing.assert_close(seen, [weight * loss for loss in losses])


def forward_alone(rank: int, names: Sequence[str]) -> list[Any]:
    """Return the outputs of forwards without a loss for each schedule."""
    whole = model(4)
    own = PipelineShape(2, MB, placement="vee").stages_on_rank[rank]
    parts: dict[int, nn.Module] = {s: whole[s] for s in own}
    x, _ = batch()
    give = []
    for name in names:
        schedule = made(parts, 4, schedule=name, loss_fn=None)
        assert not schedule._has_backward
        give.append(schedule.step(*((x,) if 0 in parts else ())))
    return [out if out is None else out.detach() for out in give]


def test_without_a_loss_only_forwards_are_run() -> None:
    outs, nothing = spawn(forward_alone, 2, ["zb_v", "dualpipe_v", "v_min"])
    assert nothing == [None] * 3
    for out in outs:
        torch.testing.assert_close(out, model(4)(batch()[0]).detach())


def their_eval(rank: int) -> str:
    """Return the error of torch's own evaluation of a vee, here with one rank."""
    held: list[Any] = [stage_of(part, s, 2) for s, part in enumerate(model(2))]
    schedule = theirs.ScheduleZBVZeroBubble(held, n_microbatches=MB, loss_fn=mse_loss)
    x, y = batch()
    try:
        schedule.eval(x, target=y)
    except AssertionError as error:
        return str(error)
    return ""


def test_torchs_own_evaluation_of_a_vee_fails() -> None:
    """As of torch 2.13 it runs backwards, which find no gradients to pass on."""
    assert "can't steal_bwd_input" in spawn(their_eval, 1)[0]
