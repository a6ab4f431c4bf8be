"""Recomputation runs: the bits of what is kept, whatever a stage draws, writes to or is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir.compiler.compile import compile, lower
from schedir.errors import ExecutionError, UsageError
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.boundary_table import PerMicrobatchBoundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from schedir.testing import compute_programs
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu import many_tensors
from tests.cpu.spawn import run
from tests.cpu.test_per_microbatch import Last, Packed
from tests.cpu.test_zoo_runs import ZOO
from tests.laws import least, shape_of
from tests.strategies import with_slots

torch.set_num_threads(1)
WIDTH = 6
BOUNDARY = Boundary((2, WIDTH))


class Noisy(nn.Module):
    """Dropout, running statistics, and a layer that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.norm(self.layer(x))), 0.25).to(x.dtype)


def noisy(stages: int, layer: Callable[[], nn.Module] = Noisy) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make_backward_splittable(layer()) for _ in range(stages)]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, microbatches, *BOUNDARY.shape, generator=draw)
    return x, y


def state(stages: Sequence[nn.Module]) -> list[Tensor]:
    found: list[Tensor] = []
    for stage in stages:
        for p in stage.parameters():
            assert p.grad is not None or not p.requires_grad
            found += [p] if p.grad is None else [p.grad, p]
        found += stage.buffers()
    return [x.detach().clone() for x in found]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def as_reference(
    program: Program, stages: list[nn.Module], steps: int = 2, **more: Any
) -> InProcessExecutor:
    """Steps of a program in orders that a seed picks, beside the reference."""
    plain = deepcopy(stages)
    sgd = partial(torch.optim.SGD, lr=0.1)
    step = sgd([p for stage in plain for p in stage.parameters()])
    world = InProcessExecutor(
        program, stages, loss=squares, boundary=BOUNDARY, optimizer=lambda own: sgd(own), **more
    )
    for k in range(steps):
        x, y = batch(program.shape.microbatches, k)
        step.zero_grad()
        total = run_sequential(plain, x, y, loss=squares, program=program, step=k)
        step.step()
        assert torch.equal(world.step(x, y, order_seed=k), total)
        assert equal(state(stages), state(plain))
    return world


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("slots", [None, "minimal"])
@pytest.mark.parametrize("name", ZOO)
def test_of_the_zoo(name: str, slots: Any) -> None:
    """Dropout and buffers included, in legal orders that a seed picks; of one holder each."""
    shape = shape_of(ZOO[name], 2, max(4, least(ZOO[name], 2)))
    program = compile(
        ZOO[name], shape, progress_model="per_edge", buffer_sharing=slots, recompute="all"
    )
    one = shape.placement_rows == 1
    layer = Noisy if one else (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)))
    in_order = all(
        [i.mb for i in s if i.stage == stage and i.op == 0]
        == sorted(i.mb for i in s if i.stage == stage and i.op == 0)
        for s in program.streams
        for stage in range(shape.stages)
    )
    assert in_order
    as_reference(program, noisy(shape.stages, layer))


@settings(max_examples=25)
@given(compute_programs(ranks=3, microbatches=4), st.integers(0, 10**6), st.booleans())
def test_of_any_draft(draft: Program, seed: int, slots: bool) -> None:
    rng = random.Random(seed)
    program = lower(draft, recompute=lambda s, m: rng.random() < 0.6, recompute_at="late")
    if slots:
        program = with_slots(program, rng)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))

    as_reference(program, noisy(program.shape.stages, layer), steps=1)


@pytest.mark.parametrize("updates", [2, 4])
def test_of_several_updates(updates: int) -> None:
    """R uses the version of the weights that its microbatch uses."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))

    from schedir.schedules import pipedream_2bw

    shape = PipelineShape(2, 8, optimizer_steps=updates, weight_delay=1)
    program = compile(pipedream_2bw, shape, recompute="all", progress_model="per_edge")
    assert RECOMPUTE in program.used_opcodes
    plain = compile(pipedream_2bw, shape, progress_model="per_edge")
    found = []
    for each in (program, plain):
        stages = noisy(2, layer)
        world = InProcessExecutor(
            each, stages, loss=squares, boundary=BOUNDARY,
            optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
        )  # fmt: skip
        total = world.step(*batch(8), order_seed=3)
        found.append([total, *(p.detach().clone() for s in stages for p in s.parameters())])
    assert equal(*found)


@pytest.mark.parametrize("seed", range(6))
def test_of_many_tensors_and_keywords(seed: int) -> None:
    shape = PipelineShape(2, 4, 2)
    schedule = interleaved if seed % 2 else gpipe
    shape = shape if seed % 2 else PipelineShape(3, 4)
    stages, boundaries = many_tensors.drawn(shape.stages, seed)
    inputs, targets, keywords = many_tensors.batch(4)
    plain, found = deepcopy(stages), []
    for recompute, own in ((None, plain), ("all", stages)):
        program = compile(
            schedule,
            shape,
            recompute=recompute,
            progress_model="per_edge",
            buffer_sharing="minimal",
        )
        assert (RECOMPUTE in program.used_opcodes) == (recompute is not None)
        world = InProcessExecutor(program, own, loss=many_tensors.loss, boundary=boundaries)
        total = world.step(inputs, targets, keywords=keywords, order_seed=seed)
        found.append((total, many_tensors.gradients(own)))
    assert torch.equal(found[0][0], found[1][0])
    assert many_tensors.same_bits(found[0][1], found[1][1])


def test_where_microbatches_differ() -> None:
    lengths = (3, 1, 4, 2)
    boundary = PerMicrobatchBoundary(
        [(Boundary((n, 4)), Boundary((2,), torch.int64)) for n in lengths]
    )
    x = [(torch.randn(n, 4), torch.tensor([0, n - 1])) for n in lengths]
    y, found = [torch.randn(n, 4) for n in lengths], []
    for recompute in (None, "all"):
        program = compile(
            one_f_one_b, PipelineShape(3, 4), recompute=recompute, buffer_sharing="minimal"
        )
        stages = [Packed(0), Packed(1), Last(2)]
        world = InProcessExecutor(program, stages, loss=squares, boundary=boundary)
        total = world.step(x, y)
        found.append([total, *state(stages)])
    assert equal(*found)


def test_of_skips() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
            y = super().forward(x if skip is None else x + skip)
            return y

    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, 2 * y

    found = []
    for recompute in (None, "all"):
        torch.manual_seed(0)
        stages = [Gives(WIDTH, WIDTH), Two(WIDTH, WIDTH), Two(WIDTH, WIDTH)]
        program = compile(
            gpipe,
            PipelineShape(3, 4),
            skips=[(0, 2)],
            recompute=recompute,
            buffer_sharing="minimal",
        )
        x, y = batch(4)
        world = InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)
        total = world.step(x.requires_grad_(False), y, order_seed=1)
        found.append([total, *state(stages)])
    assert equal(*found)


def test_of_stages_that_share_a_weight() -> None:
    found = []
    for recompute in (None, "all"):
        stages = noisy(3)
        stages[2].layer.weight = stages[0].layer.weight  # type: ignore[union-attr]
        program = compile(
            one_f_one_b, PipelineShape(3, 4), tied_weights=((0, 2),), recompute=recompute
        )
        world = InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)
        total = world.step(*batch(4), order_seed=1)
        found.append([total, *state(stages)])
    assert equal(*found)


def test_under_autocast() -> None:
    found = []
    for recompute in (None, "all"):
        stages = noisy(2)
        program = compile(one_f_one_b, PipelineShape(2, 3), recompute=recompute)
        world = InProcessExecutor(program, stages, loss=squares, boundary=Boundary((2, WIDTH)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = world.step(*batch(3))
        found.append([total, *state(stages)])
    assert equal(*found)


def _unseeded(rank: int, shared: bool) -> list[Any]:
    torch.manual_seed(100 + rank)
    results = []
    for recompute in (None, "all"):
        torch.manual_seed(7)
        program = compile(
            zb_h1, PipelineShape(2, 4), recompute=recompute, progress_model="per_edge"
        )
        stages = noisy(2)
        transport = SharedMemoryTransport(program) if shared else GlooTransport(program)
        torch.manual_seed(rank)
        executor = Executor(
            program, rank, stages, transport, loss=squares, boundary=BOUNDARY,
            optimizer=torch.optim.SGD(stages[rank].parameters(), lr=0.1), seed=None,
        )  # fmt: skip
        losses = [executor.step(*batch(4, k)) for k in range(2)]
        results.append((losses, state([stages[rank]])))
    return results


@pytest.mark.parametrize("shared", [False, True])
def test_between_processes_that_nobody_seeds(shared: bool) -> None:
    """The states of generators are kept, and what is drawn next is as if nothing ran again."""
    for plain, again in run(_unseeded, 2, shared):
        assert all(a is b or torch.equal(a, b) for a, b in zip(plain[0], again[0], strict=True))
        assert equal(plain[1], again[1])


# ---------------------------------------------------------------- what a stage does besides


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.layer = nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.act(x))
        return y


@pytest.mark.parametrize("slots", [None, "minimal"])
@pytest.mark.parametrize(
    ("schedule", "shape"), [(gpipe, PipelineShape(2, 4)), (interleaved, PipelineShape(1, 4, 3))]
)
def test_inputs_are_as_they_were(schedule: Any, shape: PipelineShape, slots: Any) -> None:
    """Also where a stage writes to them."""
    as_reference(
        compile(schedule, shape, recompute="all", buffer_sharing=slots),
        noisy(shape.stages, InPlace),
    )


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * torch.rand(WIDTH, generator=self.draw)
        return y


def test_a_stage_that_does_not_do_the_same_again() -> None:
    program = compile(gpipe, PipelineShape(2, 4), recompute="all")
    world = InProcessExecutor(program, noisy(2, Own), loss=squares, boundary=BOUNDARY)
    with pytest.raises(ExecutionError, match="returns a different output for microbatch") as caught:
        world.step(*batch(4))
    assert str(caught.value.sites[0].instr).startswith("R ")
    assert "generators" in caught.value.hint


def test_a_loss_that_writes_to_its_target() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target.mul_(2)).square().sum()

    program = compile(gpipe, PipelineShape(2, 4), recompute="all")
    world = InProcessExecutor(program, noisy(2), loss=loss, boundary=BOUNDARY)
    with pytest.raises(ExecutionError, match="changes the target of microbatch 0 in place"):
        world.step(*batch(4))


def test_debug_is_yes_or_no() -> None:
    program = compile(gpipe, PipelineShape(1, 1))
    with pytest.raises(UsageError, match="debug"):
        InProcessExecutor(
            program,
            noisy(1),
            loss=squares,
            boundary=BOUNDARY,
            execution=ExecutionOptions(debug=2),  # type: ignore[arg-type]
        )


class _HooksItsInput(nn.Module):
    """Doubles the gradient of its input in a hook on that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_backward_splittable(nn.Sequential(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("schedule", [gpipe, interleaved, zb_h1])
def test_a_hook_on_an_input_runs_once(schedule: Any) -> None:
    """The first run of a forward must not leave its hooks on what the second run takes."""
    found = []
    every: list[dict[str, Any]] = [{}, {"recompute": "all"}]
    for options in every:
        torch.manual_seed(0)
        program = compile(
            schedule, PipelineShape(2, 2, 2 if schedule is interleaved else 1), **options
        )
        stages = [_HooksItsInput() for _ in range(program.shape.stages)]
        loss = nn.functional.mse_loss
        InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY).step(
            *torch.ones(2, 2, 2, WIDTH)
        )
        found.append([p.grad for stage in stages for p in stage.parameters()])
    for kept, recomputed in zip(*found, strict=True):
        assert kept is not None and recomputed is not None and torch.equal(kept, recomputed)
