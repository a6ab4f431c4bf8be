"""Tests of `schedir.torch_pipelining.Schedule`, which replaces torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
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
from schedir.schedules.schedule_algebra import F, I, RankSchedule, W
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing.gradient_assertion import assert_same_gradients
from schedir.torch_pipelining import Schedule
from tests.cpu.drop_in_steps import (
    N_MICROBATCHES,
    GradientCase,
    evaluate_between,
    forwards_then_backwards,
    make_schedule,
    make_step,
    run_gradient_cases,
)
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import Step, make_batch, make_model, make_stage

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
FORMS = ["program", "draft", "sched", "csv", "transfers"]
NAMES = [
    *(name for name, _, _ in SCHEDULES),
    "uneven", "descending", *FORMS, "0 frozen", "1 frozen", "2 frozen", "sums", "steps",
    "evaluations",
]  # fmt: skip


def descending_microbatches(rank: int, ranks: int, m: int, v: int = 1) -> RankSchedule:
    """Return a user's schedule with microbatches in descending order."""
    forward = sum((F.at(mb) for mb in range(m - 1, -1, -1)), F * 0)
    return forward + sum((I.at(mb) + W.at(mb) for mb in range(m)), F * 0)


def list_gradient_cases(folder: Path) -> dict[str, GradientCase]:
    """Return the case of each test of gradients, by name. Some programs are in files."""
    found: dict[str, GradientCase] = {}

    def add(name: str, stages: int, step: Step, *sizes: Any) -> None:
        found[name] = GradientCase(step, make_model(stages), make_batch(), *sizes)

    for name, placement, stages in SCHEDULES:
        add(name, stages, make_step(placement, schedule=name))
    add("uneven", 3, make_step((0, 1, 1), schedule=forwards_then_backwards))
    add("descending", 2, make_step("loop", schedule=descending_microbatches))
    program = compile(schedules.zb_h1, PipelineShape(2, N_MICROBATCHES))
    (folder / "x.sched").write_text(text(program))
    (folder / "x.csv").write_text(to_csv(program, "torch"))
    (folder / "transfers.csv").write_text(to_csv(program, "torch-2.13"))
    draft = expand_schedule(schedules.zb_h1, program.shape)
    forms = program, draft, *(folder / n for n in ("x.sched", "x.csv", "transfers.csv"))
    for form, program_form in zip(FORMS, forms, strict=True):
        add(form, 2, make_step("loop", program=program_form))
    # Programs without a backward of frozen stages, or with a backward that has no effect.
    for frozen_stages in range(3):
        shape = PipelineShape(2, N_MICROBATCHES, placement="vee")
        program = compile(schedules.zb_v, shape, frozen_stages=frozen_stages)
        add(f"{frozen_stages} frozen", 4, make_step("vee", program=program))
        found[f"{frozen_stages} frozen"].model[:2].requires_grad_(False)  # type: ignore[index]
    # Each step scales only the gradients that it adds.
    sums = make_step("loop", schedule="one_f_one_b", scale_grads=False)
    add("sums", 2, sums, N_MICROBATCHES, 1)
    for name, around in (("steps", None), ("evaluations", evaluate_between)):
        step = make_step("vee", schedule="zb_v", steps=2, around=around)
        add(name, 4, step, 2 * N_MICROBATCHES, N_MICROBATCHES)
    return found


@pytest.fixture(scope="module")
def check_same_gradients(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], None]:
    return run_gradient_cases(list_gradient_cases(tmp_path_factory.mktemp("programs")), ranks=2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_plain_loop(name: str, check_same_gradients: Any) -> None:
    check_same_gradients(name)


def test_single_rank() -> None:
    step = make_step("vee", schedule="zb_v")
    assert_same_gradients(
        step, make_model(2), make_batch(), ranks=1, microbatches=N_MICROBATCHES, loss_fn=mse_loss
    )


def test_trained_stage_without_backward_is_refused() -> None:
    program = compile(schedules.one_f_one_b, PipelineShape(2, N_MICROBATCHES), frozen_stages=1)
    step = make_step("loop", program=program)
    with pytest.raises(ExecutionError, match="no backward of stage 0"):
        assert_same_gradients(
            step, make_model(2), make_batch(), ranks=2, microbatches=N_MICROBATCHES,
            loss_fn=mse_loss,
        )  # fmt: skip


def test_schedule_has_base_classes_of_torchtitan() -> None:
    assert issubclass(Schedule, theirs.PipelineScheduleMulti)
    assert issubclass(Schedule.with_options(schedule="zb_v"), theirs._PipelineScheduleRuntime)


class ScaledLayer(nn.Module):
    """A layer that takes a scale, either one for all or one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, by: Tensor, times: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)) * by * times


def weighted_loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return mse_loss(y, target) * weight


SCHEDULES_OF_OUTPUTS = [*SCHEDULES[1::3], ("mine", "loop", 2)]


def run_all_schedules(rank: int) -> list[list[list[Tensor]]]:
    return [run_steps_and_evaluations(rank, *case) for case in SCHEDULES_OF_OUTPUTS]


def run_steps_and_evaluations(
    rank: int, name: str, placement: str, stages: int
) -> list[list[Tensor]]:
    """Return losses and outputs of alternating steps and evaluations, called in several ways."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(ScaledLayer() for _ in range(stages)))
    local_stages = PipelineShape(2, N_MICROBATCHES, stages // 2, placement).stages_on_rank[rank]
    parts: dict[int, nn.Module] = {s: layers[s] for s in local_stages}
    schedule_function = getattr(schedules, name, descending_microbatches)
    schedule = make_schedule(parts, stages, schedule=schedule_function, loss_fn=weighted_loss)
    (x, y), scales = make_batch(), torch.linspace(1, 2, 8)[:, None]
    first, last = 0 in parts, stages - 1 in parts
    kwargs = {"by": scales, "times": 0.5}
    by_microbatch: dict[str, Any] = {
        "arg_mbs": [(part,) for part in x.chunk(N_MICROBATCHES)] if first else None,
        "kwarg_mbs": [{"by": part, "times": 0.5} for part in scales.chunk(N_MICROBATCHES)],
        "target_mbs": [*y.chunk(N_MICROBATCHES)] if last else None,
    }
    whole_batch: dict[str, Any] = {"target": y if last else None, **kwargs}
    args = (x,) if first else ()
    loss_options = {"loss_kwargs": {"weight": 3.0}}
    results: list[list[Tensor]] = []
    calls = [
        (schedule.eval, args, whole_batch),  # before any step
        (schedule.step, args, whole_batch),
        (schedule.eval, (), by_microbatch),
        (schedule.step, (), by_microbatch | loss_options),
        (schedule.step, args, whole_batch | loss_options),
        (schedule.eval, args, whole_batch | loss_options),
    ]
    for call, positional, keywords in calls:
        losses: list[Tensor] = [torch.ones(())]  # the call empties it first
        out = call(*positional, losses=losses, **keywords)
        assert (out is None) == (not last)
        results.append([out.detach(), *(loss.detach() for loss in losses)] if last else [])
    assert schedule.step(*args, **whole_batch, return_outputs=False) is None
    return results


def test_losses_and_outputs_are_in_microbatch_order() -> None:
    """The order of the schedule has no effect.

    The cases are whole batches and microbatches, steps and evaluations, and arguments for stages
    and loss.
    """
    (x, y), scales = make_batch(), torch.linspace(1, 2, 8)[:, None]
    for (_, _, stages), *ranks in zip(
        SCHEDULES_OF_OUTPUTS, *spawn(run_all_schedules, 2), strict=True
    ):
        torch.manual_seed(0)
        layers = nn.Sequential(*(ScaledLayer() for _ in range(stages)))
        chunks = []
        for part, scale in zip(x.chunk(N_MICROBATCHES), scales.chunk(N_MICROBATCHES), strict=True):
            for layer in layers:
                part = layer(part, scale, 0.5)
            chunks.append(part.detach())
        losses = [mse_loss(*pair) for pair in zip(chunks, y.chunk(N_MICROBATCHES), strict=True)]
        (results,) = (results for results in ranks if results[0])
        for (out, *actual_losses), weight in zip(results, [1, 1, 1, 3, 3, 3], strict=True):
            torch.testing.assert_close(out, torch.cat(chunks))
            torch.testing.assert_close(actual_losses, [weight * loss for loss in losses])


def run_forwards(rank: int, names: Sequence[str]) -> list[Any]:
    """Return the outputs of a forward-only run of each schedule."""
    layers = make_model(4)
    local_stages = PipelineShape(2, N_MICROBATCHES, placement="vee").stages_on_rank[rank]
    parts: dict[int, nn.Module] = {s: layers[s] for s in local_stages}
    x, _ = make_batch()
    outputs = []
    for name in names:
        schedule = make_schedule(parts, 4, schedule=name, loss_fn=None)
        assert not schedule._has_backward
        outputs.append(schedule.step(*((x,) if 0 in parts else ())))
    return [out if out is None else out.detach() for out in outputs]


def test_schedule_without_loss_runs_only_forwards() -> None:
    outs, nothing = spawn(run_forwards, 2, ["zb_v", "dualpipe_v", "v_min"])
    assert nothing == [None] * 3
    for out in outs:
        torch.testing.assert_close(out, make_model(4)(make_batch()[0]).detach())


def run_torch_eval(rank: int) -> str:
    """Return the error of torch's evaluation of a vee placement on one rank."""
    stages: list[Any] = [make_stage(module, s, 2) for s, module in enumerate(make_model(2))]
    schedule = theirs.ScheduleZBVZeroBubble(stages, n_microbatches=N_MICROBATCHES, loss_fn=mse_loss)
    x, y = make_batch()
    try:
        schedule.eval(x, target=y)
    except AssertionError as error:
        return str(error)
    return ""


def test_torch_evaluation_of_vee_fails() -> None:
    """torch 2.13 runs backwards in an evaluation, and has no gradients for them."""
    assert "can't steal_bwd_input" in spawn(run_torch_eval, 1)[0]
