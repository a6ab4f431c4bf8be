"""Tests of stages that overwrite or share outputs: same bits as the reference, or one error."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from schedir import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import forward_only, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import cases, each_value, pairs
from tests.cpu.gloo_processes import RankError, run
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

USUAL = ["1f1b, fewest slots", "zb_h1", "one rank", "recomputed", "offloaded on one rank"]
NAMES = cases(USUAL, [name for name in PROGRAMS if name not in USUAL])

# ------------------------------------------------------------ outputs that are overwritten


class ReusedBuffer(nn.Module):
    """Returns its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, 1, out=self.buffer)


class ReusedBufferThroughData(ReusedBuffer):
    """Returns its own buffer, and writes to it without raising its version counter."""

    def forward(self, x: Tensor) -> Tensor:
        self.buffer.data.copy_(x + 1)
        return self.buffer


class NewTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(("name", "others"), each_value(NAMES, [[], [nn.Identity, nn.Identity]]))
def test_reused_output_buffer_has_same_bits_or_is_refused(name: str, others: list[Any]) -> None:
    """The reference returns new tensors. Several execution orders are tested."""
    program, refused = PROGRAMS[name](), 0
    reference_stages = make_stages(NewTensor, *others)
    total = run_sequential(reference_stages, *make_batch(), loss=squared_error)
    for seed in (None, 0, 1, 2):
        stages = make_stages(ReusedBuffer, *others)
        try:
            loss = make_executor(program, stages).step(*make_batch(), order_seed=seed)
            assert torch.equal(loss, total)
            assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))
        except ExecutionError as error:
            assert get_failed_instruction(error).op is not Opcode.OptimizerStep
            refused += 1
    if not program.shares_slots and not (name == "interleaved" and others):
        assert refused  # a value that is still being sent is overwritten


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), kind=st.sampled_from([ReusedBuffer, ReusedBufferThroughData]))
def test_reused_output_in_random_order_is_right_or_refused(seed: int, kind: Any) -> None:
    program = PROGRAMS["zb_h1"]()
    stages, reference_stages = make_stages(kind), make_stages(NewTensor)
    total = run_sequential(reference_stages, *make_batch(), loss=squared_error)
    try:
        loss = make_executor(program, stages).step(*make_batch(), order_seed=seed)
        assert torch.equal(loss, total)
    except ExecutionError as error:
        assert get_failed_instruction(error).stage in (0, 1)
        return
    assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))


def run_reused_buffer(rank: int, kind: Any) -> None:
    program = compile(one_f_one_b, PipelineShape(2, MICROBATCHES), progress_model="per_edge")
    stages = make_stages(ReusedBuffer)[:1] if rank == 0 else [Layer()]
    executor = Executor(
        program, rank, {rank: stages[0]}, kind(program), loss=squared_error, boundary=BOUNDARY
    )
    executor.step(*make_batch())


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_reused_output_buffer_is_refused_on_processes(kind: Any) -> None:
    with pytest.raises(RankError, match="send_act"):
        run(run_reused_buffer, 2, kind)


class ReusedLoss(nn.Module):
    """A loss that returns its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.sum((y - target).square(), dim=(0, 1), out=self.total)


def test_reused_loss_tensor_is_refused() -> None:
    program = compile(forward_only, PipelineShape(4, MICROBATCHES))
    with pytest.raises(ModelError):
        make_executor(program, make_stages(Layer), loss=ReusedLoss()).step(*make_batch())
    one_microbatch = compile(forward_only, PipelineShape(4, 1))
    stages = make_stages(Layer)
    x, target = make_batch(1)
    expected = run_sequential(deepcopy(stages), x, target, loss=squared_error)
    ranks = make_executor(one_microbatch, stages, loss=ReusedLoss())
    assert torch.equal(ranks.step(x, target), expected)


# ------------------------------------------------------------ outputs that share memory


class TwoOutputs(Layer):
    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, self.second(y)


class InPlaceInput(nn.Module):
    """Changes one of its inputs in place, or none."""

    def __init__(self, input_index: int | None, is_declared: bool) -> None:
        super().__init__()
        self.input_index, self.inplace = input_index, is_declared
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *xs: Tensor) -> Any:
        if self.input_index is not None:
            functional.relu_(xs[self.input_index])
        return self.linear(xs[0] * 2 + xs[1].sum())


OVERLAPPING: list[tuple[Any, Boundary]] = [
    (lambda y: y, BOUNDARY),
    (lambda y: y[:], BOUNDARY),
    (lambda y: y.detach(), Boundary((3, WIDTH), requires_grad=False)),
    (lambda y: y[1:, :2], Boundary((2, 2))),
    (lambda y: y.t(), Boundary((WIDTH, 3))),
]


@pytest.mark.parametrize(("name", "second", "boundary"), each_value(NAMES, OVERLAPPING))
def test_overlapping_outputs_have_gradients_of_plain_loop(
    name: str, second: Any, boundary: Boundary
) -> None:
    """The gradients are those of a loop over the stages without changes in place."""
    stages, plain = (
        make_stages(lambda: TwoOutputs(second), lambda: InPlaceInput(None, is_declared=True))
        for _ in range(2)
    )
    edges = {0: (BOUNDARY, boundary), 1: BOUNDARY, 2: BOUNDARY}
    ranks = make_executor(PROGRAMS[name](), stages, boundary=edges)
    for x, target in zip(*make_batch(), strict=True):
        y = plain[3](plain[2](plain[1](*plain[0](x))))
        squared_error(y, target).backward()
    for _ in range(2):
        ranks.step(*make_batch())
        torch.testing.assert_close(copy_gradients(stages), copy_gradients(plain))


@pytest.mark.parametrize(
    ("name", "second", "boundary", "input_index", "is_declared"),
    pairs(["1f1b", "one rank"], OVERLAPPING, [0, 1], [False, True]),
)
def test_in_place_change_of_overlapping_output_is_refused(
    name: str, second: Any, boundary: Boundary, input_index: int, is_declared: bool
) -> None:
    stages = make_stages(lambda: TwoOutputs(second), lambda: InPlaceInput(input_index, is_declared))
    edges = {0: (BOUNDARY, boundary), 1: BOUNDARY, 2: BOUNDARY}
    with pytest.raises(ExecutionError) as error:
        make_executor(PROGRAMS[name](), stages, boundary=edges).step(*make_batch())
    assert get_failed_instruction(error.value)[:2] == (Opcode.Forward, 1)
    with pytest.raises(ModelError, match="in place"):
        run_sequential(stages, *make_batch(), loss=squared_error)


class TwoHalves(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([self.linear(x), torch.sin(x)], -1)
        return y[:, :WIDTH], y[:, WIDTH:]


@pytest.mark.parametrize("name", NAMES)
def test_disjoint_outputs_in_one_storage_have_same_bits(name: str) -> None:
    reference_stages, stages = (
        make_stages(TwoHalves, lambda: InPlaceInput(0, is_declared=True)) for _ in range(2)
    )
    edges = {0: (BOUNDARY, BOUNDARY), 1: BOUNDARY, 2: BOUNDARY}
    ranks = make_executor(PROGRAMS[name](), stages, boundary=edges)
    for _ in range(2):
        total = run_sequential(reference_stages, *make_batch(), loss=squared_error)
        assert torch.equal(ranks.step(*make_batch()), total)
        assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))


class AliasedOutput(Layer):
    """Returns a tensor that shares memory with another one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.rows = kind, nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return ALIASED[self.kind](x, super().forward(x), self.rows)


# The output, from the input, the output of a layer, and a weight of 4 rows.
ALIASED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "input": lambda x, y, rows: x,
    "view of input": lambda x, y, rows: x.view(-1).view(3, WIDTH),
    "expanded": lambda x, y, rows: y[:1].expand(3, WIDTH),
    "transposed": lambda x, y, rows: y.t().contiguous().t(),
    "weight": lambda x, y, rows: rows[:1].expand(3, WIDTH),
    "view of weight": lambda x, y, rows: rows[1:],
    "saved": lambda x, y, rows: y,
}


class InPlaceStage(Layer):
    def __init__(self, is_declared: bool) -> None:
        super().__init__()
        self.inplace = is_declared

    def forward(self, x: Tensor) -> Any:
        return super().forward(functional.dropout(x.add_(1), 0.5, True, inplace=True))


@pytest.mark.parametrize(
    ("name", "kind", "is_declared"),
    each_value(
        ["1f1b, fewest slots", "zb_h1", "two stages per rank", *ON_ONE_RANK],
        pairs([*ALIASED], [False, True]),
    ),
)
def test_in_place_stage_changes_no_other_tensor(name: str, kind: str, is_declared: bool) -> None:
    """The stage changes a copy, or an error refuses it."""
    returns = lambda: AliasedOutput(kind)  # noqa: E731
    before = [] if "weight" in kind else [Layer]  # a weight does not depend on an input
    makers = [*before, returns, lambda: InPlaceStage(is_declared)]
    reference_stages, own_stages = make_stages(*makers), make_stages(*makers)
    x, target = make_batch()
    input_copy = x.clone()
    initial_states = deepcopy([{**stage.state_dict()} for stage in own_stages])
    ranks = make_executor(PROGRAMS[name](), own_stages)
    try:
        for step in range(2):
            total = run_sequential(reference_stages, x, target, loss=squared_error, step=step)
            assert torch.equal(ranks.step(x, target), total)
            assert have_same_bits(copy_gradients(own_stages), copy_gradients(reference_stages))
    except ExecutionError as error:
        assert not is_declared
        assert get_failed_instruction(error)[:2] == (Opcode.Forward, len(before) + 1)
        return
    assert torch.equal(x, input_copy)
    assert have_same_bits([{**stage.state_dict()} for stage in own_stages], initial_states)
