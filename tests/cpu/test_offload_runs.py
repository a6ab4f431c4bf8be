"""Offload runs: the bits of what stays, wherever it is meanwhile."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir.compiler.compile import compile, lower
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.activation_offloader import OffloadMoves
from schedir.schedules import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream_2bw,
    zb_h1,
)
from schedir.testing import compute_programs
from schedir.transports.gloo import GlooTransport
from schedir.verify.check import check
from tests.cases import cases
from tests.cpu import many_tensors
from tests.cpu.moved import moved
from tests.cpu.spawn import run
from tests.cpu.test_recompute_runs import (
    BOUNDARY,
    WIDTH,
    InPlace,
    Noisy,
    as_reference,
    batch,
    equal,
    noisy,
    squares,
    state,
)
from tests.cpu.test_zoo_runs import ZOO
from tests.laws import least, shape_of

torch.set_num_threads(1)


def checked(program: Program, slots: str | None = None) -> Program:
    if slots:
        program = share_slots(program, "minimal")
    return check(program, "per_edge")


_USUAL = [("dualpipe_v", None), ("zb_h1", "minimal"), ("looped_bfs", "minimal"), ("dualpipe", None)]
_EACH = [(name, slots) for name in ZOO for slots in (None, "minimal")]


@pytest.mark.parametrize(
    ("name", "slots"), cases(_USUAL, [one for one in _EACH if one not in _USUAL])
)
def test_of_the_zoo(name: str, slots: Any) -> None:
    shape = shape_of(ZOO[name], 2, max(4, least(ZOO[name], 2)))
    one = shape.placement_rows == 1
    layer = Noisy if one else (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)))
    for seed, recompute in enumerate([None, "all"]):
        program = compile(ZOO[name], shape, progress_model="per_edge", recompute=recompute)
        program = checked(moved(program, seed), slots)
        assert {Opcode.Offload, Opcode.Reload} <= program.used_opcodes
        as_reference(program, noisy(shape.stages, layer))


@settings(max_examples=20)
@given(compute_programs(ranks=3, microbatches=4), st.integers(0, 10**6))
def test_of_any_draft(draft: Program, seed: int) -> None:
    """With and without recomputation, slots that are shared, and a disk."""
    rng = random.Random(seed)
    program = lower(draft, recompute=lambda s, m: rng.random() < 0.4, recompute_at="late")
    program = moved(program, seed, share=0.7, spilled=0.4)
    program = checked(program, rng.choice([None, "minimal"]))
    with TemporaryDirectory() as folder:
        as_reference(
            program,
            noisy(program.shape.stages, _dropped),
            steps=1,
            execution=ExecutionOptions(spill_dir=folder),
        )


def _dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))


def compared(
    plain: Program, make: Any, inputs: Any = (), steps: int = 2, folder: Any = None, **how: Any
) -> InProcessExecutor:
    """A program that moves all, and some to the disk if there is a folder, beside itself without:
    the same losses, weights, gradients and buffers."""
    found = []
    program = checked(moved(plain, 7, spilled=0.5 * (folder is not None)), "minimal")
    for each in (plain, program):
        torch.manual_seed(0)
        stages = make()
        given = {"boundary": BOUNDARY, "loss": squares, **how}
        more: dict[str, Any] = (
            {"execution": ExecutionOptions(spill_dir=folder)} if each is program else {}
        )
        world = InProcessExecutor(
            each, stages, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), **given, **more
        )
        data = inputs or [batch(each.shape.microbatches, k) for k in range(steps)]
        totals = [world.step(x, y, order_seed=k) for k, (x, y) in enumerate(data)]
        found.append([*totals, *state(stages)])
    assert equal(*found)
    return world


def test_of_several_updates(tmp_path: Path) -> None:
    shape = PipelineShape(2, 8, optimizer_steps=4, weight_delay=1)
    compared(
        compile(pipedream_2bw, shape, progress_model="per_edge"),
        lambda: noisy(2, _dropped),
        folder=tmp_path,
    )


def test_of_skips_and_of_several_tensors() -> None:
    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, torch.sigmoid(y)

    class Takes(nn.Linear):
        def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
            return torch.relu(super().forward(x if skip is None else x * skip))

    def make() -> list[nn.Module]:
        return [Gives(WIDTH, WIDTH), Takes(WIDTH, WIDTH), Takes(WIDTH, WIDTH)]

    compared(compile(gpipe, PipelineShape(3, 4), skips=[(0, 2)]), make)
    compared(compile(interleaved, PipelineShape(1, 4, 3), skips=[(0, 2)]), make)  # on one rank


@pytest.mark.parametrize("seed", range(3))
def test_of_many_tensors_and_keywords(seed: int) -> None:
    shape = PipelineShape(2, 4, 2) if seed else PipelineShape(3, 4)
    stages, boundaries = many_tensors.drawn(shape.stages, seed)
    inputs, targets, keywords = many_tensors.batch(4)
    plain, found = deepcopy(stages), []
    program = compile(interleaved if seed else gpipe, shape, progress_model="per_edge")
    for each, own in ((program, plain), (checked(moved(program, seed), "minimal"), stages)):
        world = InProcessExecutor(each, own, loss=many_tensors.loss, boundary=boundaries)
        total = world.step(inputs, targets, keywords=keywords, order_seed=seed)
        found.append((total, many_tensors.gradients(own)))
    assert torch.equal(found[0][0], found[1][0])
    assert many_tensors.same_bits(found[0][1], found[1][1])


def test_of_stages_that_share_a_weight() -> None:
    def make() -> list[nn.Module]:
        stages = noisy(3)
        stages[2].layer.weight = stages[0].layer.weight  # type: ignore[union-attr]
        return stages

    compared(compile(one_f_one_b, PipelineShape(3, 4), tied_weights=((0, 2),)), make)


@pytest.mark.parametrize(
    ("schedule", "shape"), [(gpipe, PipelineShape(2, 4)), (interleaved, PipelineShape(1, 4, 2))]
)
def test_of_stages_that_write_to_their_input(schedule: Any, shape: PipelineShape) -> None:
    compared(compile(schedule, shape), lambda: noisy(2, InPlace))


def test_of_frozen_stages_and_of_half_precision() -> None:
    boundary = Boundary((2, WIDTH), torch.bfloat16)

    def make() -> list[nn.Module]:
        stages = [stage.bfloat16() for stage in noisy(3)]
        stages[0].requires_grad_(False)
        return stages

    data = [tuple(x.bfloat16() for x in batch(4, k)) for k in range(2)]
    compared(
        compile(one_f_one_b, PipelineShape(3, 4), frozen_stages=1), make, data, boundary=boundary
    )


def test_of_views_that_share_memory() -> None:
    """One storage moves once, and is one again, with a layout that is not the plain one."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            both: Tensor = self.layer(x)
            one, other = both[:, ::2], both[:, 1::2]
            turned = (one * other).tanh().t() @ one
            return (one * other.sigmoid()) @ turned.t().tanh()

    program = checked(moved(compile(gpipe, PipelineShape(1, 2)), 0, late=1), "minimal")
    stages = noisy(1, Views)
    world = InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)
    x, y = batch(2)
    sizes = measure_sizes(stages, x[0], y[0], loss=squares, boundary=BOUNDARY)
    world.step(x, y)
    value = world.executors[0].state.service(OffloadMoves).values[0, 1]
    assert [value.nbytes] == sizes.for_stages("saved", 1).tolist()
    compared(compile(gpipe, PipelineShape(1, 2)), lambda: noisy(1, Views))


def test_beside_programs_that_evaluate_and_train() -> None:
    shape = PipelineShape(2, 4)
    program = checked(moved(compile(one_f_one_b, shape), 0), "minimal")
    half = checked(moved(compile(gpipe, PipelineShape(2, 2)), 1), "minimal")
    look = compile(forward_only, shape)
    found = []
    for each, first in (
        (compile(one_f_one_b, shape), compile(gpipe, PipelineShape(2, 2))),
        (program, half),
    ):
        stages = noisy(2, _dropped)
        world = InProcessExecutor(
            each, stages, loss=squares, boundary=BOUNDARY, extra_programs=[first, look]
        )
        (x, y), (more, targets) = batch(4), batch(2, 1)
        totals = [
            world.evaluate(x, y),
            world.step(more, targets, program=first),
            world.step(x, y),
            world.evaluate(x, y),
        ]
        found.append([*totals, *state(stages)])
    assert equal(*found)


def _between_processes(rank: int, folder: str) -> list[Any]:
    found = []
    plain = compile(zb_h1, PipelineShape(2, 4), zero=3, dp=1)
    for program in (plain, checked(moved(plain, 3, spilled=0.5), "minimal")):
        stages = noisy(2, _dropped)
        executor = Executor(
            program, rank, stages, GlooTransport(program), loss=squares, boundary=BOUNDARY,
            optimizer=torch.optim.SGD(stages[rank].parameters(), lr=0.1),
            execution=ExecutionOptions(spill_dir=folder),
        )  # fmt: skip
        losses = [executor.step(*batch(4, k)) for k in range(2)]
        with executor.full_parameters():
            found.append((losses, [p.detach().clone() for p in stages[rank].parameters()]))
    return found


def test_between_processes_whose_weights_are_in_parts(tmp_path: Path) -> None:
    for plain, away in run(_between_processes, 2, str(tmp_path)):
        assert all(a is b or torch.equal(a, b) for a, b in zip(plain[0], away[0], strict=True))
        assert equal(plain[1], away[1])
    assert not [*tmp_path.iterdir()]
