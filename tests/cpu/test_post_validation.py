"""Tests that post-validation has the same bits as updates that wait for the global norm.

Some steps are repeated, because their gradients must be clipped or are not finite.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir import compile, schedules
from schedir.compiler.compile import lower
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import normalize_tied_stages
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import (
    LossScale,
    MainOptimizer,
    use_float32_gradients,
)
from schedir.runtime.parameters.post_validation import PostValidation
from schedir.testing import random_compute_program, shapes
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport, can_share_memory
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.test_nonfinite_steps import learned, set_stage, spoilt
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, have_same_bits, list_parameters, make_batch

ADAMW = partial(torch.optim.AdamW, lr=0.1)


def make_both(
    make: Callable[[str], InProcessExecutor],
) -> tuple[InProcessExecutor, InProcessExecutor]:
    """Return virtual ranks that wait for the norm, and virtual ranks with post-validation."""
    return make("before_step"), make("after_step")


def make_gpts(
    draft: Program, tied: bool, max_norm: float
) -> tuple[InProcessExecutor, InProcessExecutor]:
    def make(validate: str) -> InProcessExecutor:
        ties = normalize_tied_stages(tied, draft.shape)
        program = replace(draft, clip_grad_norm=True, norm_check=validate, tied_weights=ties)
        stages = [spoilt(stage) for stage in gpt_stages(draft.shape.stages, tied=tied)]
        return InProcessExecutor(
            lower(program), stages, loss=gpt.loss, boundary=BOUNDARY, optimizer=ADAMW,
            gradients=GradientOptions(max_norm=max_norm),
        )  # fmt: skip

    return make_both(make)


def count_repeated_steps(ranks: InProcessExecutor) -> int:
    """Return the number of repeated steps. It must be equal on all ranks."""
    (number,) = {
        rank.state.service(PostValidation).repeated_steps
        for rank in ranks.executors
        if rank.program.norm_check == "after_step"
    }
    return number


def same(one: InProcessExecutor, other: InProcessExecutor) -> bool:
    """Return whether the whole state of two runs is equal, including norms and finite flags."""
    return have_same_bits(_read_state(one), _read_state(other))


def _read_state(ranks: InProcessExecutor) -> list[Tensor]:
    """Return the state without NaN, which is not equal to itself."""
    state = learned(ranks)
    for rank in ranks.executors:
        state += [rank.grad_norm, rank.finite_updates]
        state += [p.grad for p in list_parameters(rank) if p.grad is not None]
        state += [buffer for stage in rank.stages.values() for buffer in stage.module.buffers()]
    return [t.nan_to_num(-7.0) for t in state]


@settings(max_examples=25, deadline=None)
@given(
    shapes(ranks=2, microbatches=3, stages_per_rank=2),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([0.5, 0.9, 1.3, math.inf]),
    st.lists(
        st.tuples(
            st.integers(0, 2**32), st.sampled_from([1.0, 1.0, math.nan, math.inf]), st.booleans()
        ),
        min_size=2,
        max_size=3,
    ),
)
def test_random_schedules_orders_and_norms_have_same_bits(
    shape: PipelineShape,
    seed: int,
    tied: bool,
    max_norm: float,
    steps: list[tuple[int, float, bool]],
) -> None:
    draft = random_compute_program(shape, random.Random(seed))
    if draft.shape.optimizer_steps > 1:
        return
    waiting, validated = make_gpts(draft, tied and shape.stages > 1, max_norm)
    for k, (order, gradient, validates) in enumerate(steps):
        for ranks in (waiting, validated):
            set_stage(ranks, shape.stages - 1, gradient=gradient)
        data = make_batch(shape.microbatches, k)
        assert torch.equal(waiting.step(*data), validated.step(*data, order_seed=order))
        if validates:
            validated.validate_last_update()
            assert same(waiting, validated)
    validated.validate_last_update()
    assert same(waiting, validated)


class StatefulStage(nn.Module):
    """Draws random numbers, and changes buffers and frozen parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        kinds = ("written", "traceless", "set")
        self.means = nn.ParameterDict(
            {kind: nn.Parameter(torch.zeros(8), requires_grad=False) for kind in kinds}
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.means["written"].mul_(0.9).add_(x.mean(0))
        self.means["traceless"].data.mul_(0.9).add_(x.mean(0).detach())
        self.means["set"].data = self.means["set"].data * 0.9 + x.mean(0).detach()
        y: Tensor = self.drop(torch.relu(self.norm(self.layer(x))))
        return y


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAMW,
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, foreach=True),
    "rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),  # its module is torch.optim itself
    "main": lambda ps: MainOptimizer(ps, ADAMW),
}


USUAL = ("rate", "momentum", "adafactor", "main")
SEEDS = cases(
    [*((each, 0) for each in USUAL), ("sgd", None)],
    [(each, 0) for each in OPTIMIZERS if each not in USUAL],
)


@pytest.mark.parametrize(("optimizer", "seed"), SEEDS)
def test_repeated_step_restores_all_state(optimizer: str, seed: int | None) -> None:
    """The state includes buffers, random numbers, optimizer states and learning rates."""
    is_bfloat16 = optimizer == "main"
    torch.manual_seed(2)
    generator_states = dict.fromkeys(("before_step", "after_step"), torch.get_rng_state())

    def step(ranks: InProcessExecutor, x: Tensor, y: Tensor) -> Tensor:
        """Run a step from the state of torch's generator after the previous step of `ranks`."""
        torch.set_rng_state(generator_states[ranks.program.norm_check])
        loss = ranks.step(x, y)
        generator_states[ranks.program.norm_check] = torch.get_rng_state()
        return loss

    def make(validate: str) -> InProcessExecutor:
        torch.manual_seed(0)
        stages = [StatefulStage() for _ in range(3)]
        for stage in stages if is_bfloat16 else ():
            use_float32_gradients(stage.to(torch.bfloat16))
        program = compile(
            schedules.one_f_one_b, PipelineShape(3, 4), clip_grad_norm=True, norm_check=validate
        )
        return InProcessExecutor(
            program, stages, loss=squares, gradients=GradientOptions(max_norm=260.0), seed=seed,
            optimizer=lambda ps: OPTIMIZERS[optimizer]([p for p in ps if p.requires_grad]),
            boundary=Boundary((4, 8), torch.bfloat16 if is_bfloat16 else torch.float32),
        )  # fmt: skip

    waiting, validated = make_both(make)
    numbers = torch.Generator().manual_seed(1)
    for k in range(6):
        x, y = (torch.randn(4, 4, 8, generator=numbers) for _ in range(2))
        y = y * (5.0 if k in (0, 3, 4) else 1.0)
        x, y = (t.to(torch.bfloat16) if is_bfloat16 else t for t in (x, y))
        assert torch.equal(step(waiting, x, y), step(validated, x, y))
        for ranks in (waiting, validated):
            for rank in ranks.executors:
                group = rank.resources.optimizer.param_groups[0]  # type: ignore[union-attr]
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.9)
                else:
                    group["lr"] *= 0.9
                for p in rank.stages[rank.rank].module.parameters():
                    p.grad = None  # as zero_grad does
    validated.validate_last_update()
    pairs = [*zip(learned(waiting), learned(validated), strict=True)]
    for a, b in zip(waiting.executors, validated.executors, strict=True):
        modules = (rank.stages[rank.rank].module for rank in (a, b))
        pairs += zip(*(module.state_dict().values() for module in modules), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert count_repeated_steps(validated) >= 2


def test_loss_scale_follows_validated_updates() -> None:
    """The initial loss scale is too large. It halves until updates are finite, and grows again."""
    scale = LossScale(2.0**20, growth_interval=2)

    def make(validate: str) -> InProcessExecutor:
        stages = [spoilt(stage.to(torch.float16)) for stage in gpt_stages(3, tied=False)]
        for stage in stages:
            use_float32_gradients(stage)
        return InProcessExecutor(
            compile(schedules.one_f_one_b, PipelineShape(3, 4), clip_grad_norm=True,
                    norm_check=validate),
            stages,
            loss=gpt.loss, boundary=Boundary(BOUNDARY.shape, torch.float16),
            gradients=GradientOptions(loss_scale=scale, max_norm=math.inf),
            optimizer=lambda ps: MainOptimizer(ps, ADAMW),
        )  # fmt: skip

    waiting, validated = make_both(make)
    for k in range(8):
        data = make_batch(4, k)
        assert torch.equal(waiting.step(*data), validated.step(*data))
    validated.validate_last_update()
    assert same(waiting, validated)
    values = [
        [float(rank.state.options.gradients.loss_scale.value) for rank in w.executors]  # type: ignore[union-attr]
        for w in (waiting, validated)
    ]
    assert values[0] == values[1] != [2.0**20] * 3


def _train_rank(rank: int, name: str, dp: int, max_norm: float) -> Any:
    schedule, shape = getattr(schedules, name), PipelineShape(4 // dp, 4)
    results = []
    for validate in ("before_step", "after_step"):
        program = compile(schedule, shape, dp=dp, clip_grad_norm=True, norm_check=validate)
        shares = name == "zb_h1" and can_share_memory()
        transport = (SharedMemoryTransport if shares else GlooTransport)(program)
        stages = [spoilt(stage) for stage in gpt_stages(shape.stages, tied=False)]
        local_stages = {s: stages[s] for s in shape.stages_on_rank[transport.rank]}
        ps = [p for stage in local_stages.values() for p in stage.parameters()]
        executor = Executor(
            program, transport.rank, local_stages, transport, loss=gpt.loss, boundary=BOUNDARY,
            optimizer=ADAMW(ps),
            gradients=GradientOptions(max_norm=max_norm),
            execution=ExecutionOptions(record_timestamps=validate == "before_step"),
        )  # fmt: skip
        losses = []
        for k in range(6):
            for stage in local_stages.values():
                stage.gradient = math.nan if k == 3 and 1 in local_stages else 1.0  # type: ignore[assignment]
            inputs, targets, scale = make_batch(8, k)
            part = slice(4 * transport.dp_rank, 4 * transport.dp_rank + 4)
            loss = executor.step(inputs[part], targets[part], scale)
            losses.append(0.0 if loss is None else float(loss))
        norm = float(executor.grad_norm)
        executor.validate_last_update()
        repeated_steps = 0
        if executor.program.norm_check == "after_step":
            repeated_steps = executor.state.service(PostValidation).repeated_steps
        results.append((losses, norm, [p.tolist() for p in ps], repeated_steps))
    (*waiting, _), (*validated, repeated_steps) = results
    return waiting == validated, repeated_steps


@pytest.mark.parametrize(
    ("name", "dp", "max_norm"),
    cases(
        [("zb_h1", 2, 0.5)],
        [("zb_h1", 1, 1.0), ("one_f_one_b", 1, math.inf), ("one_f_one_b", 2, 0.9)],
    ),
)
def test_post_validation_between_processes_has_same_bits(
    name: str, dp: int, max_norm: float
) -> None:
    """One step has a wrong prediction, so it is repeated: the first one, or the one with NaN."""
    assert run(_train_rank, 4, name, dp, max_norm) == [(True, 1)] * 4
