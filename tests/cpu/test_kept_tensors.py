"""Tests of modules that keep a reference to a tensor.

The tensor does not change, or the executor refuses the module.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.executor import Executor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import cases, each_value
from tests.cpu.gloo_processes import run
from tests.cpu.stage_chains import (
    BOUNDARY,
    MICROBATCHES,
    ON_ONE_RANK,
    PROGRAMS,
    WIDTH,
    Layer,
    get_failed_instruction,
    make_batch,
    make_executor,
    make_stages,
    squared_error,
)
from tests.cpu.tiny_stages import copy_gradients, have_same_bits


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Spare the garbage collector the modules that a first backward imports.

    The executor searches for garbage before it refuses a module.
    """
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    gc.freeze()
    yield


USUAL = ("1f1b", "zb_h1", "two stages per rank", "recomputed on one rank", "offloaded")
NAMES = cases(USUAL, [name for name in PROGRAMS if name not in USUAL])
NOT_RECOMPUTED = [name for name in NAMES if "recomputed" not in name]


class KeepsTensor(Layer):
    """Keeps a tensor of each forward. If `reads`, its mean is added to the next output."""

    def __init__(self, what: str, reads: bool) -> None:
        super().__init__()
        self.what, self.reads, self.last = what, reads, None

    def forward(self, x: Tensor) -> Tensor:
        before: Tensor | None = self.last
        hidden = torch.tanh(self.linear(x))
        y = hidden * hidden
        if self.reads and before is not None:
            y = y + before.detach().mean()
        tensors = {"input": x, "view": x.detach()[1:], "hidden": hidden, "output": y}
        tensors["loss"] = y.sum()
        self.last = tensors[self.what]  # type: ignore[assignment]
        return y


def copy_kept_tensors(stages: list[nn.Module]) -> list[Tensor]:
    tensors: list[Any] = [stage.last for stage in stages]
    return [last.detach().clone() for last in tensors]


def make_keeping_stages(what: str, reads: bool) -> list[nn.Module]:
    return make_stages(*[lambda: KeepsTensor(what, reads)] * 4)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "input") for name in dict.fromkeys([*NAMES, "1f1b, fewest slots"])),
        *each_value(NAMES, ["hidden", "output", "loss", "view"]),
    ],
)
def test_kept_tensors_do_not_change_or_are_refused(name: str, what: str) -> None:
    """A refused stage is refused in the first step."""
    reads = "recomputed" not in name  # a recomputed forward would read another tensor
    reference_stages, stages = make_keeping_stages(what, reads), make_keeping_stages(what, reads)
    ranks = make_executor(PROGRAMS[name](), stages)
    received = what in ("input", "view") and name not in ON_ONE_RANK
    if received and not ranks.program.shares_slots:
        with pytest.raises(ModelError):
            ranks.step(*make_batch())
        return
    for _ in range(3):
        total = run_sequential(reference_stages, *make_batch(), loss=squared_error)
        assert torch.equal(ranks.step(*make_batch()), total)
        assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))
        if reads:  # the last forward of a stage is that of the last microbatch
            assert all(
                map(torch.equal, copy_kept_tensors(stages), copy_kept_tensors(reference_stages))
            )
        assert all(x.isfinite().all() for x in copy_kept_tensors(stages))


class KeepsBuffers(Layer):
    """Keeps each buffer that it replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.past.append(self.mean)
        self.mean = self.mean * 0.5 + x.detach().mean()
        return torch.tanh(self.linear(x) * self.mean)


def test_kept_buffers_are_not_offloaded() -> None:
    program = compile(one_f_one_b, PipelineShape(4, MICROBATCHES), recompute="all", offload="all")
    stages = make_stages(*[KeepsBuffers] * 4)
    make_executor(program, stages).step(*make_batch())
    past: list[Any] = [stage.past for stage in stages]
    assert all(torch.stack(buffers).isfinite().all() for buffers in past)


class KeepsGradient(Layer):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y.register_hook(lambda gradient: setattr(self, "last", gradient))
        return y


@pytest.mark.parametrize("name", NAMES)
def test_kept_gradient_of_message_is_refused(name: str) -> None:
    ranks = make_executor(PROGRAMS[name](), make_stages(*[KeepsGradient] * 4))
    if name in ON_ONE_RANK:
        ranks.step(*make_batch())
        return
    with pytest.raises((ModelError, ExecutionError), match="keeps a reference to the gradient"):
        ranks.step(*make_batch())


class CyclicReference(Layer):
    """Creates a reference cycle with its input, which the garbage collector frees."""

    def forward(self, x: Tensor) -> Any:
        cycle: list[Any] = [x]
        cycle.append(cycle)
        return super().forward(x)


def test_unreachable_cycles_do_not_count_as_references() -> None:
    ranks = make_executor(PROGRAMS["1f1b"](), make_stages(*[CyclicReference] * 4))
    for _ in range(2):
        ranks.step(*make_batch())


def _is_refused(rank: int, kind: Any) -> bool:
    program = compile(one_f_one_b, PipelineShape(2, MICROBATCHES), progress_model="per_edge")
    stage = [Layer(), KeepsTensor("input", reads=False)][rank]
    executor = Executor(
        program, rank, {rank: stage}, kind(program), loss=squared_error, boundary=BOUNDARY
    )
    try:
        executor.step(*make_batch())
    except ModelError:
        return True
    return False


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_kept_input_is_refused_between_processes(kind: Any) -> None:
    assert run(_is_refused, 2, kind) == [False, True]


class UsesEarlierGraph(Layer):
    """Computes with the input of the previous microbatch and its autograd graph."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        before, self.last = self.last, x
        y = super().forward(x)
        return y if before is None else y + before.mean()


@pytest.mark.parametrize("name", NOT_RECOMPUTED)
def test_gradient_to_another_microbatch_is_refused(name: str) -> None:
    with pytest.raises(ExecutionError) as error:
        make_executor(PROGRAMS[name](), make_stages(*[UsesEarlierGraph] * 4)).step(*make_batch())
    assert get_failed_instruction(error.value).op in (Opcode.Backward, Opcode.BackwardInput)


class KeepsWeight(Layer):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.linear.weight.detach()
        return super().forward(x)


def test_kept_full_weight_is_refused_with_zero_3() -> None:
    for zero in (0, 1, 2):
        stages = make_stages(*[KeepsWeight] * 4)
        program = compile(one_f_one_b, PipelineShape(4, MICROBATCHES), zero=zero)
        make_executor(program, stages).step(*make_batch())
        assert all(last.isfinite().all() for last in copy_kept_tensors(stages))
    program = compile(one_f_one_b, PipelineShape(4, MICROBATCHES), zero=3)
    with pytest.raises(ModelError):
        make_executor(program, make_stages(*[KeepsWeight] * 4)).step(*make_batch())


class BackwardInForward(Layer):
    """Adds the gradient of its own loss in its forward."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y.square().mean().backward(retain_graph=True)
        return y


@pytest.mark.parametrize("name", NOT_RECOMPUTED)
def test_backward_in_forward_equals_plain_loop(name: str) -> None:
    stages, copies = (make_stages(Layer, BackwardInForward, Layer) for _ in range(2))
    plain = nn.Sequential(*copies)
    ranks = make_executor(PROGRAMS[name](), stages)
    xs, targets = make_batch()
    for _ in range(2):  # the first step has checks that later ones do not have
        ranks.step(xs, targets)
        for p in plain.parameters():
            p.grad = None
        for x, target in zip(xs, targets, strict=True):
            squared_error(plain(x), target).backward()
        for p, q in zip(nn.ModuleList(stages).parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)
