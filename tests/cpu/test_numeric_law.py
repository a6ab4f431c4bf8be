"""Tests of the numeric law: each program trains a model to the bits of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir import find_tied_weights
from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import forward_only, gpipe, one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compile_options, compute_programs, shapes
from schedir.verify.check import check
from tests.cases import ALL
from tests.cpu.activation_offload_programs import offload_randomly
from tests.cpu.optimizer_offload_programs import poison_weights
from tests.cpu.random_models import (
    Batch,
    Traits,
    make_batch,
    make_boundary,
    make_stages,
    squared_error,
)
from tests.cpu.test_built_in_schedules import ZOO, newest_first
from tests.laws import find_min_microbatches, make_shape

torch.set_num_threads(1)

# Norms are not split. Some drafts run the forwards of a stage in another order than microbatches.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is not split in"),
    pytest.mark.filterwarnings("ignore:.* changes its buffer"),
]

SCALE = 0.25
ADAMW = partial(torch.optim.AdamW, lr=0.02)


def adam_with_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with matrices in one group, and other parameters in a group of another rate."""
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 1e-3}]
    return torch.optim.Adam(groups, lr=0.02)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any] | None] = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "AdamW": ADAMW,
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "Adam, groups": adam_with_groups,
    "NAdam": torch.optim.NAdam,
    "none": None,
}


def make_main_optimizer(make: Any, parameters: list[nn.Parameter]) -> Any:
    """Return an optimizer of float32 copies, unless the rank has only frozen parameters."""
    if not any(p.requires_grad for p in parameters):
        return make(parameters)
    return MainOptimizer(parameters, make)


class Reference:
    """The model in one process, which runs one microbatch and one stage after the other."""

    def __init__(self, program: Program, traits: Traits, make: Any, max_norm: float) -> None:
        self.program, self.max_norm = program, max_norm
        self.stages = make_stages(program, traits)
        self.parameters = [*dict.fromkeys(p for s in self.stages for p in s.parameters())]
        self.optimizer = make and make(self.parameters)
        self.ties = find_tied_weights(self.stages) if program.tied_weights else None
        self.losses: list[Tensor] = []
        shape = program.shape
        self.order = program
        if shape.optimizer_steps > 1:
            self.order = compile(
                gpipe, PipelineShape(shape.stages, shape.microbatches_per_update),
                frozen_stages=program.frozen_stages, skips=program.skips,
            )  # fmt: skip

    def step(self, batch: Batch, step: int, norms: Sequence[Tensor]) -> Tensor:
        """Run all optimizer steps of a program; return the sum of the losses.

        Args:
            batch: The batch.
            step: The number of the step.
            norms: The gradient norm of each rank, if gradients are clipped.  It may differ from the
                norm of the reference in its last bits.
        """
        shape = self.program.shape
        versions, used = [], self.stages
        self.losses.clear()
        for update in range(shape.optimizer_steps):
            first = update * shape.microbatches_per_update
            if shape.optimizer_steps > 1:
                versions.append(deepcopy(self.stages))
                needed = [int(shape.weight_version(s, first)) for s in range(shape.stages)]
                used = [versions[version][s] for s, version in enumerate(needed)]
            microbatches = slice(first, first + shape.microbatches_per_update)
            total = self._run(used, batch.select(microbatches), step)
            for stage, other in zip(self.stages, used, strict=True):
                for p, q in zip(stage.parameters(), other.parameters(), strict=True):
                    p.grad = q.grad
            self._clip(norms)
            if self.optimizer is not None:
                self.optimizer.step()
        one_update = shape.optimizer_steps == 1
        return total if one_update else sum(self.losses, torch.zeros(()))

    def _run(self, stages: list[Any], batch: Batch, step: int) -> Tensor:
        for stage in stages:
            stage.zero_grad()
        return run_sequential(
            stages, batch.inputs, batch.targets, loss=self._compute_loss, grad_scale=SCALE,
            program=self.order, step=step, keywords=batch.keywords, tied_weights=self.ties,
        )  # fmt: skip

    def _compute_loss(self, y: Tensor, target: Tensor) -> Tensor:
        """Record the losses, whose sum is in the order of the microbatches of all updates."""
        loss = squared_error(y, target)
        self.losses.append(loss.detach().clone())
        return loss

    def _clip(self, norms: Sequence[Tensor]) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not self.program.clip_grad_norm:
            return
        assert len({float(norm) for norm in norms}) == 1
        if self.max_norm < math.inf:
            expected = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
            assert float(norms[0]) == pytest.approx(float(expected), rel=1e-5)
            for grad in grads:
                grad.mul_((self.max_norm / (norms[0] + 1e-6)).clamp(max=1.0))


@st.composite
def compiled_programs(draw: st.DrawFn, draft: Program) -> Program:
    """Compile a draft with any options; offloads may be anywhere between save and use."""
    options = draw(compile_options(draft))
    if not draw(st.booleans()):
        return compile(draft, progress_model="per_edge", **options)
    shares = options.pop("buffer_sharing"), options.pop("overlap")
    options = {name: value for name, value in options.items() if "offload" not in name}
    program = compile(draft, progress_model="per_edge", **options)
    program = offload_randomly(program, draw(st.integers(0, 99)), share=0.7, spilled=0.4)
    return check(share_slots(program, "minimal") if any(shares) else program, "per_edge")


@st.composite
def model_traits(draw: st.DrawFn, program: Program) -> Traits:
    """Draw the traits of a model that a program can train."""
    shape, booleans = program.shape, st.booleans()
    one_update = shape.optimizer_steps == 1
    dtype_changes = draw(booleans) and one_update
    rows = st.lists(st.integers(2, 3), min_size=shape.microbatches, max_size=shape.microbatches)
    replicated = shape.placement_rows > 1
    crosses = any(
        len({rank for s in stages for rank in shape.replica_ranks[:, s].tolist()}) > 1
        for stages in program.tied_weights
    )
    return Traits(
        rows=tuple(draw(rows if draw(booleans) else st.just([2] * shape.microbatches))),
        dropout=draw(booleans) and one_update,
        batch_norm=draw(booleans) and one_update and not replicated,
        writes_to_input=draw(booleans),
        second_tensor=draw(booleans),
        keywords=draw(booleans),
        bfloat16=dtype_changes,
        tied_copies=draw(booleans) or (program.zero > 0 and crosses),
    )


@st.composite
def optimizers(draw: st.DrawFn, program: Program) -> str:
    """Draw the name of an optimizer.  Some programs need one."""
    needs_one = program.shape.optimizer_steps > 1 or program.optimizer_placement != "device"
    needs_one |= program.norm_check == "after_step"
    return draw(st.sampled_from(sorted(OPTIMIZERS)[: -1 if needs_one else None]))


orders = st.lists(st.none() | st.integers(0, 2**32), min_size=2, max_size=2)


def assert_law(program: Program, traits: Traits, optimizer: str, orders: Sequence[Any]) -> None:
    """Assert that steps of a program have the bits of the reference.

    Args:
        program: The program.
        traits: The traits of the model.
        optimizer: The name of the optimizer.
        orders: The `order_seed` of each step.
    """
    make = OPTIMIZERS[optimizer]
    if traits.bfloat16 and make is not None:
        make = partial(make_main_optimizer, make)
    one_update = program.shape.optimizer_steps == 1
    max_norm = 0.5 if one_update else math.inf
    reference = Reference(program, traits, make, max_norm)
    stages = make_stages(program, traits, copies=traits.tied_copies)
    with TemporaryDirectory() as folder:
        ranks = InProcessExecutor(
            program, stages, loss=squared_error, boundary=make_boundary(program, traits),
            optimizer=make,
            gradients=GradientOptions(max_norm=max_norm if program.clip_grad_norm else None),
            tied_weights=reference.ties, execution=ExecutionOptions(spill_dir=folder),
        )  # fmt: skip
        poison_weights(ranks)
        for step, order in enumerate(orders):
            inputs, targets, keywords = deepcopy(make_batch(traits, step))
            loss = ranks.step(inputs, targets, SCALE, order_seed=order, keywords=keywords)
            ranks.validate_last_update()
            norms = [rank.grad_norm for rank in ranks.executors if program.clip_grad_norm]
            assert torch.equal(loss, reference.step(make_batch(traits, step), step, norms))
            assert_same_state(ranks, reference)


def assert_same_state(ranks: InProcessExecutor, reference: Reference) -> None:
    """Assert that all ranks have the parameters, gradients and buffers of the reference."""
    program = ranks.program
    with ExitStack() as stack:
        for rank in ranks.executors if program.zero else ():
            stack.enter_context(rank.full_parameters())
        for rank in ranks.executors:
            for s, stage in rank.stages.items():
                for name, expected in reference.stages[s].named_parameters():
                    parameter = stage.module.get_parameter(name)
                    assert torch.equal(parameter, expected), f"{name} of stage {s}"
                    assert parameter.requires_grad or parameter.grad is None
                if rank is ranks.executors[program.shape.first_rank_per_stage[s]]:
                    assert all(
                        map(torch.equal, stage.module.buffers(), reference.stages[s].buffers())
                    )
    if reference.optimizer is None:
        for rank in ranks.executors:
            for s, stage in rank.stages.items():
                for name, expected in reference.stages[s].named_parameters():
                    assert_same_gradient(stage.module.get_parameter(name), expected)


def assert_same_gradient(parameter: nn.Parameter, expected: nn.Parameter) -> None:
    assert parameter.grad is not None or not expected.requires_grad
    if parameter.grad is not None and expected.grad is not None:
        assert torch.equal(parameter.grad.flatten(), expected.grad.flatten())


def assert_random_law(data: st.DataObject, draft: Program) -> None:
    """Assert the law of a draft with random options, traits, optimizer and orders."""
    program = data.draw(compiled_programs(draft))
    traits = data.draw(model_traits(program))
    optimizer = data.draw(optimizers(program))
    assert_law(program, traits, optimizer, data.draw(orders))


LIMITS = settings(deadline=None, suppress_health_check=[*HealthCheck])


@settings(LIMITS, max_examples=150 if ALL else 16)
@given(compute_programs(3, 3, 2), st.data())
def test_any_draft(draft: Program, data: st.DataObject) -> None:
    assert_random_law(data, draft)


@settings(LIMITS, max_examples=30 if ALL else 12)
@given(compute_programs(3, 2, 2, placements=("loop", "vee"), optimizer_steps=4), st.data())
def test_drafts_of_several_optimizer_steps(draft: Program, data: st.DataObject) -> None:
    assert_random_law(data, draft)


@settings(LIMITS, max_examples=100 if ALL else 12)
@given(st.sampled_from([*ZOO.values(), newest_first]), st.data())
def test_schedules(schedule: Any, data: st.DataObject) -> None:
    """The schedules are those of `schedir.schedules`, and one with descending backwards."""
    shape = make_shape(schedule, 2, max(4, find_min_microbatches(schedule, 2)))
    assert_random_law(data, expand_schedule(schedule, shape))


@settings(LIMITS, max_examples=16 if ALL else 12)
@given(st.sampled_from([one_f_one_b, pipedream_2bw]), st.data())
def test_schedules_of_several_optimizer_steps(schedule: Any, data: st.DataObject) -> None:
    """The schedules are PipeDream, whose delays differ by stage, and PipeDream-2BW."""
    ranks = data.draw(st.integers(1, 3))
    delay: Any = tuple(range(ranks))[::-1] if schedule is one_f_one_b else 1
    microbatches_per_update = 1 if schedule is one_f_one_b else ranks
    shape = PipelineShape(ranks, 3 * microbatches_per_update, optimizer_steps=3, weight_delay=delay)
    assert_random_law(data, expand_schedule(schedule, shape))


@settings(LIMITS, max_examples=15 if ALL else 12)
@given(shapes(3, 3, 2, ("loop", "vee", "given")), st.data())
def test_forward_only_programs(shape: PipelineShape, data: st.DataObject) -> None:
    draft = expand_schedule(forward_only, shape)
    options = data.draw(compile_options(draft))
    used = ("tied_weights", "skips", "overlap", "buffer_sharing", "zero")
    options = {name: value for name, value in options.items() if name in used}
    program = compile(draft, progress_model="per_edge", **options)
    traits = data.draw(model_traits(program))
    inputs, targets, keywords = make_batch(traits, 0)
    ranks = InProcessExecutor(
        program, make_stages(program, traits, copies=True), loss=squared_error,
        boundary=make_boundary(program, traits),
    )  # fmt: skip
    loss = ranks.step(inputs, targets, order_seed=data.draw(st.integers(0, 99)), keywords=keywords)
    expected = run_sequential(
        make_stages(program, traits), *make_batch(traits, 0)[:2], loss=squared_error,
        program=program, keywords=keywords,
    )  # fmt: skip
    assert torch.equal(loss, expected)
