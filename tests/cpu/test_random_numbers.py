"""Tests of random numbers: what they depend on, numbered layers, and compiled stages."""

from __future__ import annotations

import runpy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.random_streams import (
    FORWARD,
    RandomStreams,
    derive_key,
    fork_layer_rng,
    list_stream_numbers,
    mix_bits,
)
from schedir.runtime.autograd.splittable_layers import SplitLinear
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import chimera, dualpipe, gpipe, interleaved, one_f_one_b
from tests.cases import cases
from tests.cpu.test_built_in_schedules import M
from tests.cpu.tiny_stages import copy_gradients, have_same_bits, split_1f1b

WIDTH = 6
BOUNDARY = Boundary((2, WIDTH))


class Noisy(nn.Module):
    """A linear layer with dropout by torch's default generator, which records the masks."""

    def __init__(self, k: int, recompute: bool = False, number: int | None = None) -> None:
        super().__init__()
        self.inner = SplitLinear(WIDTH, WIDTH)
        numbers = torch.Generator().manual_seed(k)
        for p in self.inner.parameters():
            p.data = torch.randn(p.shape, generator=numbers)
        self.recompute, self.number = recompute, number
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = self.run
        return checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)

    def run(self, x: Tensor) -> Tensor:
        if self.number is None:
            return self.apply_dropout(x)
        with fork_layer_rng(self.number):
            return self.apply_dropout(x)

    def apply_dropout(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.inner(x)), 0.5)
        self.masks.append(y.detach() == 0)
        return y


def make_noisy_stages(stages: int, **options: Any) -> list[nn.Module]:
    return [Noisy(k, **options) for k in range(stages)]


def squared_error_with_dropout(y: Tensor, target: Tensor) -> Tensor:
    return (F.dropout(y, 0.2) - target).square().sum()


def make_batch(microbatches: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(microbatches, *BOUNDARY.shape, generator=torch.Generator().manual_seed(9))
    return x, x + 1


def make_executor(program: Any, stages: list[nn.Module], **options: Any) -> InProcessExecutor:
    return InProcessExecutor(
        program, stages, loss=squared_error_with_dropout, boundary=BOUNDARY, **options
    )


def run_reference(stages: list[nn.Module], m: int = M, **options: Any) -> tuple[Tensor, Any]:
    loss = run_sequential(stages, *make_batch(m), loss=squared_error_with_dropout, **options)
    return loss, copy_gradients(stages)


def collect_masks(**options: Any) -> list[Tensor]:
    """Return the dropout masks of the stages of a model, by stage and microbatch."""
    stages = make_noisy_stages(2, **options.pop("model", {}))
    run_reference(stages, 4, **options)
    return [mask for stage in stages for mask in stage.masks]  # type: ignore[union-attr]


def test_seed_and_step_determine_dropout_masks() -> None:
    default_masks = collect_masks()
    assert all(torch.equal(a, b) for a, b in zip(default_masks, collect_masks(), strict=True))
    all_masks = [*default_masks, *collect_masks(seed=1), *collect_masks(step=1)]
    assert not any(torch.equal(a, b) for k, a in enumerate(all_masks) for b in all_masks[:k])
    ranks = make_executor(compile(gpipe, PipelineShape(2, 4)), make_noisy_stages(2))
    first_loss = ranks.step(*make_batch(4))
    assert not torch.equal(ranks.step(*make_batch(4)), first_loss)
    for rank in ranks.executors:
        rank.random_streams.step = 0
    assert torch.equal(ranks.step(*make_batch(4)), first_loss)


def test_derived_keys_match_splitmix64() -> None:
    """The expected numbers are those of Vigna's splitmix64.c for the seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    mixed_numbers = [mix_bits(1234567 + k * golden & 2**64 - 1) for k in range(3)]
    assert mixed_numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = {
        derive_key(*numbers)
        for numbers in ((), (0,), (0, 0), (1,), (1, 2), (2, 1), (-1,), (2**70,))
    }
    assert len(keys) == 7  # only the lowest 64 bits of 2**70 count


def test_step_restores_torch_generator_state() -> None:
    x, _ = make_batch(4)
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    ranks, stages = make_executor(program, make_noisy_stages(2)), make_noisy_stages(2)
    before = torch.get_rng_state()
    ranks.step(*make_batch(4))
    assert torch.equal(torch.get_rng_state(), before)
    run_reference(stages, 4)
    assert torch.equal(torch.get_rng_state(), before)
    measure_sizes(stages, x[0], x[0], loss=squared_error_with_dropout, boundary=BOUNDARY)
    assert torch.equal(torch.get_rng_state(), before)
    with fork_layer_rng(3):  # it has no effect outside of a step
        drawn = torch.rand(1)
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(1), drawn)


def test_layer_number_must_be_32_bit_integer() -> None:
    """In a step, NumPy integers are accepted, and different numbers give different draws."""
    for number in (-1, 2**32, 1.5, "h.0", None):
        fork: Any = fork_layer_rng
        with pytest.raises(ModelError, match="number of a layer or slice must be from 0 to"):
            fork(number).__enter__()
    draws = RandomStreams(0, torch.device("cpu"))
    draws.begin_step(list_stream_numbers(1))

    def draw_number(*numbers: Any) -> float:
        draws.make_seeded(FORWARD, 0, 0)()
        with fork_layer_rng(*numbers):
            return float(torch.rand(()))

    with draws.preserve_generators():
        assert draw_number(np.int64(3), np.int64(1)) == draw_number(3, 1)
        assert len({draw_number(*n) for n in ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))}) == 6


class StepInForward(Noisy):
    """Runs `run_sequential` on other layers within its forward while it is in training mode."""

    others = (nn.Linear(4, 4),)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            ones = torch.ones(1, 1, 4)
            run_sequential(self.others, ones, ones, loss=squared_error_with_dropout)
        with fork_layer_rng(7):
            return F.dropout(super().forward(x))


def test_nested_step_does_not_change_random_numbers() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    nesting_stages, plain_stages = ([StepInForward(k) for k in range(2)] for _ in range(2))
    for stage in plain_stages:
        stage.eval()
    losses = [
        make_executor(program, [*stages]).step(*make_batch(4))
        for stages in (nesting_stages, plain_stages)
    ]
    assert torch.equal(*losses)


def test_failed_step_restores_generator_state() -> None:
    def fail_loss(y: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no such luck")

    stages, before = make_noisy_stages(2), torch.get_rng_state()
    ranks = InProcessExecutor(
        compile(gpipe, PipelineShape(2, 4)), stages, loss=fail_loss, boundary=BOUNDARY
    )
    with pytest.raises(ExecutionError):
        ranks.step(*make_batch(4))
    assert stages[0].masks and torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError):
        run_sequential(stages, *make_batch(4), loss=fail_loss)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number", [None, 5])
@pytest.mark.parametrize("schedule", [one_f_one_b, split_1f1b, dualpipe])
def test_recompute_draws_same_random_numbers(schedule: Any, number: int | None) -> None:
    shape = PipelineShape(2, 4, placement="mirror" if schedule is dualpipe else "loop")
    program = compile(schedule, shape, progress_model="per_edge")
    _, expected_gradients = run_reference(make_noisy_stages(2, number=number), 4, program=program)
    recomputed_stages = make_noisy_stages(2, recompute=True, number=number)
    ranks = make_executor(program, recomputed_stages)
    for order in (None, 1):
        for rank in ranks.executors:
            rank.random_streams.step = 0
        ranks.step(*make_batch(4), order_seed=order)
        assert have_same_bits(copy_gradients(recomputed_stages), expected_gradients)


def test_numbered_layers_draw_same_numbers_in_any_stage() -> None:
    """Four layers have the same loss in one, two and four stages."""
    results = []
    for stages in (1, 2, 4):
        layers = [Noisy(k, number=k) for k in range(4)]
        modules = [nn.Sequential(*layers[k : k + 4 // stages]) for k in range(0, 4, 4 // stages)]
        options: Any = {"loss": lambda y, t: (y - t).square().sum()}
        loss = run_sequential(modules, *make_batch(3), **options)
        results.append((loss, [layer.masks for layer in layers]))
        program = compile(interleaved, PipelineShape(1, 3, stages))
        ranks = InProcessExecutor(program, modules, boundary=BOUNDARY, **options)
        assert torch.equal(ranks.step(*make_batch(3)), loss)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    assert len({str(mask) for mask in results[0][1]}) == 4


def test_second_update_continues_microbatch_numbering() -> None:
    shape = PipelineShape(2, 4, optimizer_steps=2, weight_delay=1)
    loss, _ = run_reference(make_noisy_stages(2), 4)
    assert torch.equal(
        make_executor(compile(one_f_one_b, shape), make_noisy_stages(2)).step(*make_batch(4)), loss
    )


class NoisySGD(torch.optim.SGD):
    """Adds noise from torch's default generator to the weights that it trains."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data += torch.rand_like(p)


def test_optimizers_of_stage_replicas_draw_same_numbers() -> None:
    program = compile(chimera, PipelineShape(4, 4, placement="mirror"))
    ranks = make_executor(program, make_noisy_stages(4), optimizer=lambda ps: NoisySGD(ps, lr=0.1))
    ranks.step(*make_batch(4), order_seed=3)
    for s, (one, other) in enumerate(program.shape.replica_ranks.T.tolist()):
        replicas = (ranks.executors[r].stages[s].module.parameters() for r in (one, other))
        assert have_same_bits(*map(list, replicas))


def test_optimizer_noise_on_tied_weight_copies_warns() -> None:
    """With both stages on one rank, the optimizer steps one Parameter, so there is no warning."""
    for ranks in (1, 2):
        stages: list[Any] = make_noisy_stages(2)
        stages[1].inner.weight = stages[0].inner.weight
        program = compile(interleaved, PipelineShape(ranks, 2, 2 // ranks), tied_weights=True)
        executor = make_executor(program, stages, optimizer=NoisySGD)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                executor.step(*make_batch(2))
        assert [
            "for each copy of a tied weight: the copies will differ" in str(warning.message)
            for warning in caught
        ] == [True] * 2 * (ranks > 1)


class CompiledLayer(nn.Module):
    """A linear layer with dropout, which is compiled with or without recomputation."""

    def __init__(self, k: int, recompute: bool) -> None:
        super().__init__()
        self.inner, self.recompute = nn.Linear(WIDTH, WIDTH), recompute
        numbers = torch.Generator().manual_seed(k)
        for p in self.inner.parameters():
            p.data = torch.randn(p.shape, generator=numbers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.recompute:
            z: Tensor = checkpoint(self.apply_dropout, y, use_reentrant=False)
            return z
        return self.apply_dropout(y)

    def apply_dropout(self, y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(y), 0.5)


@pytest.mark.parametrize(
    ("backend", "recompute"),
    cases([("aot_eager", True)], [("aot_eager", False), ("inductor", False), ("inductor", True)]),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports
# torch suppresses this warning, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_stages_match_compiled_reference(backend: str, recompute: bool) -> None:
    """The backend aot_eager draws the numbers of eager torch, and inductor draws others."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    if backend == "inductor" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch 2.13's inductor writes C++ that does not compile without AVX2")

    def stages() -> list[Any]:
        return [torch.compile(CompiledLayer(k, recompute), backend=backend) for k in range(2)]

    reference_stages, compiled_stages = stages(), stages()
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    ranks = make_executor(program, compiled_stages, seed=3)
    for step, order in enumerate((None, 1)):
        loss, expected_gradients = run_reference(reference_stages, 4, seed=3, step=step)
        assert torch.equal(ranks.step(*make_batch(4), order_seed=order), loss)
        assert have_same_bits(copy_gradients(compiled_stages), expected_gradients)
        eager, _ = run_reference(
            [CompiledLayer(k, recompute) for k in range(2)], 4, seed=3, step=step
        )
        assert torch.equal(eager, loss) == (backend == "aot_eager")


def test_dropout_example_prints_equal_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples/dropout.py"), run_name="__main__")
    first, *others = (line.split()[-1] for line in capsys.readouterr().out.splitlines())
    assert others == [first, first]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("always", [False, True])
def test_generators_are_preserved_with_seed_or_always(seed: int | None, always: bool) -> None:
    generator = torch.default_generator
    before = generator.get_state()
    with RandomStreams(seed, torch.device("cpu")).preserve_generators(always=always):
        torch.rand(1)
    assert torch.equal(generator.get_state(), before) == (always or seed is not None)
