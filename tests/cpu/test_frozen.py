"""Frozen stages run forwards only, and all others have the gradients that a plain loop gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ModelError, SchedirError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import find_named_placement
from schedir.ir.program import Program
from schedir.runtime import measure_sizes
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import dualpipe, forward_only, gpipe, one_f_one_b, pipedream_2bw, zb_h1
from schedir.testing import compute_programs
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from schedir.transports.gloo import GlooTransport
from tests.cpu.spawn import run
from tests.cpu.test_updates import stage_by_stage
from tests.cpu.tiny_stages import gradients, same_bits
from tests.mutants import known
from tests.pure.test_frozen_stages import ahead

BOUNDARY = Boundary((2, WIDTH), torch.float64)
sgd = partial(torch.optim.SGD, lr=0.02)


class Dropped(nn.Module):
    """A stage that draws, and keeps statistics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(nn.functional.dropout(self.inner(x), 0.3))
        return y


def stages_of(number: int, frozen_stages: int, *, drops: bool = False) -> list[nn.Module]:
    """A tiny model of which the first stages are frozen."""
    torch.manual_seed(0)
    stages = [Dropped(s) if drops else s for s in make_tiny_stages(number)]
    for stage in stages[:frozen_stages]:
        stage.requires_grad_(False)
    return stages


def of_plain(program: Program, *, whole: bool, drops: bool = False) -> tuple[Tensor, list[Any]]:
    """Loss and gradients of the reference: in the order of the program, or of no program."""
    plain = stages_of(program.shape.stages, program.frozen_stages, drops=drops)
    found = run_sequential(
        plain,
        *make_batch(program.shape.microbatches),
        loss=squared_error,
        program=None if whole else program,
    )
    return found, gradients(plain)


def expect_right(
    program: Program, seed: int | None = None, *, drops: bool = False
) -> InProcessExecutor:
    stages = stages_of(program.shape.stages, program.frozen_stages, drops=drops)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY)
    total = ranks.step(*make_batch(program.shape.microbatches), order_seed=seed)
    for whole in (False, True) if program.reduces_in_microbatch_order else (False,):
        right, plain = of_plain(program, whole=whole, drops=drops)
        assert torch.equal(total, right)
        assert same_bits(gradients(stages), plain)
    frozen = [p for s in stages[: program.frozen_stages] for p in s.parameters()]
    assert frozen or not program.frozen_stages
    assert all(p.grad is None for p in frozen)
    assert all(p.grad is not None for s in stages[program.frozen_stages :] for p in s.parameters())
    return ranks


@settings(max_examples=60)
@given(st.data())
def test_gradients_of_the_reference(data: st.DataObject) -> None:
    """Any schedule, any draft, any placement, any legal order."""
    source: Any = data.draw(
        compute_programs(3, 4) if data.draw(st.booleans()) else st.sampled_from(known())
    )
    shape = None
    if not isinstance(source, Program):
        where, v = getattr(source, "placed", ("loop", None))
        ranks = 2 * data.draw(st.integers(1, 2))
        v = v or find_named_placement(where).stages_per_rank
        shape = PipelineShape(ranks, 2 * data.draw(st.integers(1, 3)), v, where)
    number = (shape or source.shape).stages
    frozen = data.draw(st.integers(0, number - 1))
    how: dict[str, Any] = {
        "buffer_sharing": data.draw(st.sampled_from([None, "minimal"])),
        "overlap": data.draw(st.booleans()),
    }
    try:
        program = compile(source, shape, progress_model="per_edge", frozen_stages=frozen, **how)
    except SchedirError:
        assert shape is not None  # a schedule need not know every shape
        return
    if program.has_backward:
        expect_right(program, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("frozen_stages", [1, 2, 3])
def test_draws_and_buffers_are_those_of_training(frozen_stages: int) -> None:
    program = compile(one_f_one_b, PipelineShape(4, 4), frozen_stages=frozen_stages)
    ranks = expect_right(program, drops=True)
    stages = [ranks.executors[r].stages[r].module for r in range(4)]
    plain = stages_of(4, frozen_stages, drops=True)
    run_sequential(plain, *make_batch(4), loss=squared_error)
    for mine, right in zip(stages, plain, strict=True):
        assert all(map(torch.equal, mine.buffers(), right.buffers()))


def test_nothing_is_kept_of_a_frozen_forward() -> None:
    seen: list[tuple[bool, ...]] = []
    stages = stages_of(3, 2)
    for stage in stages:
        stage.register_forward_hook(
            lambda m, xs, y: seen.append(
                (torch.is_grad_enabled(), xs[0].requires_grad, y.requires_grad)
            )
        )
    program = compile(gpipe, PipelineShape(3, 1), frozen_stages=2)
    InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY).step(*make_batch(1))
    assert seen == [(False, False, False)] * 2 + [(True, False, True)]


# ---------------------------------------------------------------- updates, norms, holders


@pytest.mark.parametrize("frozen_stages", [0, 1, 2])
@pytest.mark.parametrize("schedule", [pipedream_2bw, one_f_one_b])
def test_several_updates(schedule: Any, frozen_stages: int) -> None:
    """Delayed ones, held to a plain loop that knows nothing of schedules."""
    shape = PipelineShape(3, 9, optimizer_steps=3, weight_delay=1)
    make = partial(stages_of, frozen_stages=frozen_stages)
    stages = make(3)
    ranks = InProcessExecutor(
        compile(schedule, shape, frozen_stages=frozen_stages),
        stages,
        loss=squared_error,
        boundary=BOUNDARY,
        optimizer=sgd,
    )
    ranks.step(*make_batch(9))
    right = stage_by_stage(shape, *make_batch(9), sgd, make)
    assert all(map(torch.equal, [p for s in stages for p in s.parameters()], right))
    before = make(3)
    changed = [
        not torch.equal(a.get_parameter("weight"), b.get_parameter("weight"))
        for a, b in zip(stages, before, strict=True)
    ]
    assert changed == [s >= frozen_stages for s in range(3)]


def test_forwards_run_ahead_of_the_steps_of_their_rank() -> None:
    """Frozen weights have one version, and a trained stage beside them has its own."""
    shape, make = PipelineShape(1, 4, 2, optimizer_steps=2), partial(stages_of, frozen_stages=1)
    stages, program = make(2), compile(ahead, shape, frozen_stages=1)
    InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY, optimizer=sgd).step(
        *make_batch(4)
    )
    right = stage_by_stage(shape, *make_batch(4), sgd, make)
    assert all(map(torch.equal, [p for s in stages for p in s.parameters()], right))


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1])
def test_the_norm_is_of_what_is_trained(schedule: Any) -> None:
    program = compile(schedule, PipelineShape(4, 4), frozen_stages=2, clip_grad_norm=True)
    stages = stages_of(4, 2)
    ranks = InProcessExecutor(
        program,
        stages,
        loss=squared_error,
        boundary=BOUNDARY,
        optimizer=sgd,
        gradients=GradientOptions(max_norm=0.1),
    )
    ranks.step(*make_batch(4))
    _, plain = of_plain(program, whole=True)
    norm = torch.stack([g.norm() for own in plain for g in own.values()]).norm()
    assert [float(rank.grad_norm) for rank in ranks.executors] == pytest.approx([float(norm)] * 4)
    clipped = torch.stack([g.norm() for own in gradients(stages) for g in own.values()]).norm()
    assert float(clipped) == pytest.approx(0.1, rel=1e-3)


def on_gloo(rank: int, program: Program) -> list[dict[str, Tensor]]:
    """Gradients of a process's own stages."""
    transport = GlooTransport(program)
    stages = stages_of(program.shape.stages, program.frozen_stages)
    executor = Executor(
        program, transport.rank, stages, transport, loss=squared_error, boundary=BOUNDARY,
        gradients=GradientOptions(max_norm=inf if program.clip_grad_norm else None),
    )  # fmt: skip
    m, (inputs, targets) = (
        program.shape.microbatches,
        make_batch(program.dp * program.shape.microbatches),
    )
    share = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
    executor.step(inputs[share], targets[share])
    return gradients([stages[s] for s in program.shape.stages_on_rank[transport.rank]])


@pytest.mark.parametrize(
    ("schedule", "shape", "traits"),
    [
        (one_f_one_b, PipelineShape(2, 4), {"frozen_stages": 1, "dp": 2}),
        (zb_h1, PipelineShape(4, 4), {"frozen_stages": 2, "clip_grad_norm": True}),
        (dualpipe, PipelineShape(2, 4, placement="mirror"), {"frozen_stages": 1}),
    ],
)
def test_real_processes(schedule: Any, shape: PipelineShape, traits: dict[str, Any]) -> None:
    program = compile(schedule, shape, progress_model="per_edge", **traits)
    world = shape.ranks * program.dp
    found = run(on_gloo, world, program)
    plain = stages_of(shape.stages, program.frozen_stages)
    run_sequential(
        plain, *make_batch(program.dp * shape.microbatches), loss=squared_error,
        program=None if program.dp > 1 else program,
    )  # fmt: skip
    right = gradients(plain)
    for process, own in enumerate(found):
        rank = process % shape.ranks
        for s, mine in zip(shape.stages_on_rank[rank], own, strict=True):
            assert bool(mine) == (s >= program.frozen_stages)
            for name, grad in mine.items():
                torch.testing.assert_close(grad, right[s][name], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- what is refused, and what is not


def test_a_frozen_stage_has_nothing_to_train() -> None:
    stages = stages_of(3, 1)
    program = compile(one_f_one_b, PipelineShape(3, 4), frozen_stages=2)
    with pytest.raises(ModelError, match="stage 1 is frozen, but its parameter weight") as caught:
        InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY)
    assert "frozen_stages=1" in caught.value.hint
    evaluation = compile(
        forward_only, PipelineShape(3, 4), frozen_stages=2
    )  # where nothing is trained anyway
    InProcessExecutor(evaluation, stages, loss=squared_error, boundary=BOUNDARY).step(
        *make_batch(4)
    )


def test_frozen_parameters_alone_are_run_back_through() -> None:
    """Nobody said that stages are frozen: right, with backwards that nobody needs."""
    stages, plain = stages_of(3, 2), stages_of(3, 2)
    ranks = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(3, 4)), stages, loss=squared_error, boundary=BOUNDARY
    )
    total = ranks.step(*make_batch(4))
    assert torch.equal(total, run_sequential(plain, *make_batch(4), loss=squared_error))
    assert same_bits(gradients(stages), gradients(plain))


def test_whole_numbers_may_leave_a_frozen_stage() -> None:
    """As of a tokenizer: nothing goes back."""

    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().round().long().clamp(max=7)

    stages: Sequence[nn.Module] = [Rounds(), nn.Sequential(nn.Embedding(8, WIDTH), Last())]
    program = compile(one_f_one_b, PipelineShape(2, 4), frozen_stages=1)
    whole = Boundary((2, WIDTH), torch.int64)
    x, target = make_batch(4)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=whole)
    ranks.step(x, target)
    mine = gradients(stages)
    run_sequential(stages, x, target, loss=squared_error, program=program)
    assert same_bits(mine, gradients(stages)) and mine[1]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).double()


# ---------------------------------------------------------------- sizes


def test_sizes() -> None:
    stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    stages[0].requires_grad_(False)
    x = torch.ones(8, 64)
    how: Any = dict(loss=nn.functional.mse_loss, boundary=(8, 64))
    usual, frozen = (
        measure_sizes(stages, x, x, **how),
        measure_sizes(stages, x, x, frozen_stages=1, **how),
    )
    assert (
        frozen.for_stages("saved", 3)[0]
        == frozen.for_stages("deferred_wgrad", 3)[0]
        == frozen.for_stages("saved_and_deferred", 3)[0]
        == 0.0
    )
    assert (frozen.for_stages("saved", 3)[1:] == usual.for_stages("saved", 3)[1:]).all()
    assert (
        frozen.for_stages("model_states", 3) == usual.for_stages("model_states", 3)
    ).all()  # as parameters say it
    assert frozen.for_stages("model_states", 3)[0] < frozen.for_stages("model_states", 3)[1]
    elu = [*stages[:1], nn.Sequential(nn.ELU(), nn.Linear(64, 64)), *stages[2:]]
    less, more = (
        measure_sizes(elu, x, x, frozen_stages=n, **how).for_stages("saved", 3)[1] for n in (1, 0)
    )
    assert less < more  # nothing for a gradient of its input
