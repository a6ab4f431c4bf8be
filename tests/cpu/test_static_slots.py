"""Tests of static slots in a run, with the predicted number and the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.analysis.memory.buffer_slots import SLOT_KINDS, count_slots
from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.ir.isa.instructions import Opcode, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.autograd.split_backward import linear
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.pending_sends import PendingSends
from schedir.schedules import gpipe, one_f_one_b
from schedir.testing import tiny_model
from tests.cases import cases, each_value
from tests.cpu.test_gloo_executor import step_on_gloo
from tests.cpu.tiny_stages import copy_gradients, have_same_bits, split_1f1b
from tests.laws import ZOO, find_min_microbatches, make_shape

BOUNDARY = Boundary((2, tiny_model.WIDTH), torch.float64)


def record_used_slots(rank: Executor, used: dict[Value, set[int]]) -> None:
    """Record which slots are used. A tensor in transit still occupies its slot."""
    call = rank.runner.run_instruction

    def run_and_record(index: int) -> None:
        call(index)
        for kind, slots in rank.state.slot_tables.items():
            used[kind] |= {n for n, value in enumerate(slots.values) if value is not None}
        for kind, send in ((Value.ACT_OUT, Opcode.SendAct), (Value.GRAD_OUT, Opcode.SendGrad)):
            works = rank.state.service(PendingSends).works
            num_in_transit = sum(rank.state.stream[sent].op == send for sent in works)
            slots = rank.state.slot_tables[kind]
            assert slots.num_occupied + num_in_transit <= len(slots.values)

    rank.runner.run_instruction = run_and_record  # type: ignore[method-assign]


def locate_received(rank: Executor) -> dict[Any, int]:
    """Return the addresses of the receive buffers."""
    received = rank.state.service(MessageBuffers).received
    return {key: buffer.data_ptr() for key, buffer in received.items()}


# Schedules with whole, split and paired backwards.
USUAL = ["interleaved_zb", "dualpipe_v", "chimera"]


@pytest.mark.parametrize(
    ("name", "overlap"),
    each_value(cases(USUAL, [name for name in ZOO if name not in USUAL]), [False, True]),
)
def test_used_slots_match_predicted_slots(name: str, overlap: bool) -> None:
    """The numbers are equal for each rank and kind, in random legal orders."""
    schedule = ZOO[name]
    shape = make_shape(schedule, 4, max(6, find_min_microbatches(schedule, 4)))
    stages = tiny_model.make_tiny_stages(shape.stages)
    inputs, targets = tiny_model.make_batch(shape.microbatches)
    choices: list[BufferSharing | None] = [None, "minimal", "latency_preserving"]
    results: list[tuple[Tensor, list[dict[str, Tensor]]]] = []
    for choice in choices:
        program = compile(
            schedule, shape, progress_model="per_edge", overlap=overlap, buffer_sharing=choice
        )
        predicted = count_slots(program)
        ranks = InProcessExecutor(program, stages, loss=tiny_model.squared_error, boundary=BOUNDARY)
        used: list[dict[Value, set[int]]] = [
            {k: set() for k in SLOT_KINDS} for _ in ranks.executors
        ]
        for rank, used_by_kind in zip(ranks.executors, used, strict=True):
            record_used_slots(rank, used_by_kind)
        buffers = [*map(locate_received, ranks.executors)]
        for seed in range(2 if choice == "minimal" else 1):
            loss = ranks.step(inputs, targets, order_seed=seed)
            results.append((loss, copy_gradients(stages)))
        for r, rank in enumerate(ranks.executors):
            num_used = {kind: len(used[r][kind]) for kind in SLOT_KINDS}
            assert num_used == dict(zip(SLOT_KINDS, predicted[r].tolist(), strict=True))
            for slots in rank.state.slot_tables.values():
                assert slots.max_occupied <= len(slots.values) and not slots.num_occupied
            received = locate_received(rank)
            assert received == buffers[r]
            assert len(received) == num_used[Value.ACT_IN] + num_used[Value.GRAD_IN]
    assert all(have_same_bits(result, results[0]) for result in results)


class ReturnsInput(nn.Module):
    """Returns its input. So its input gradient is its output gradient."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.inner is None else linear(x, self.inner.weight)).view(*x.shape)


def check_separate_memory(rank: Executor) -> None:
    """Check that outputs, saved values and deferred gradients do not use receive buffers."""
    call, slots = rank.runner.run_instruction, rank.state.slot_tables
    received = rank.state.service(MessageBuffers).received.values()
    static = {*map(storage_address, received)}

    def run_and_check(index: int) -> None:
        call(index)
        out = [*slots[Value.ACT_OUT].values, *slots[Value.GRAD_OUT].values]
        for tape in filter(None, slots[Value.DEFERRED_WGRAD].values):
            out += tape.list_saved_tensors()
        out += [saved[0] for saved in slots[Value.SAVED].values if saved is not None]
        used = {storage_address(value) for value in tree_leaves(out) if value is not None}
        assert not static & used

    rank.runner.run_instruction = run_and_check  # type: ignore[method-assign]


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("schedule", cases([split_1f1b], [gpipe, one_f_one_b]))
def test_unchanged_inputs_and_gradients_are_not_overwritten(schedule: Any) -> None:
    """Some stages return their input, and several steps run."""
    shape = PipelineShape(4, 6)
    inputs, targets = tiny_model.make_batch(shape.microbatches)

    def make_stages() -> list[nn.Module]:
        first, inner, last = tiny_model.make_tiny_stages(3)
        return [first, ReturnsInput(), ReturnsInput(inner), last]

    reference_stages = make_stages()
    expected_loss = run_sequential(reference_stages, inputs, targets, loss=tiny_model.squared_error)
    for choice in (None, "minimal"):
        stages = make_stages()
        program = compile(
            schedule, shape, progress_model="per_edge", overlap=True, buffer_sharing=choice
        )
        ranks = InProcessExecutor(program, stages, loss=tiny_model.squared_error, boundary=BOUNDARY)
        # Without sharing, a buffer has one value per step.
        for rank in ranks.executors if choice else ():
            check_separate_memory(rank)
        for seed in range(2):
            assert torch.equal(ranks.step(inputs, targets, order_seed=seed), expected_loss)
            assert have_same_bits(copy_gradients(reference_stages), copy_gradients(stages))


def test_outputs_are_freed_after_send() -> None:
    """A backward needs the graph of an output, but not its memory."""
    program = compile(gpipe, PipelineShape(2, 4), progress_model="per_edge")
    ranks = InProcessExecutor(
        program, tiny_model.make_tiny_stages(2), loss=tiny_model.squared_error, boundary=BOUNDARY
    )
    saved = ranks.executors[0].state.slot_tables[Value.SAVED]
    call, roots = ranks.executors[0].runner.run_instruction, list[Any]()

    def run_and_record(index: int) -> None:
        call(index)
        roots.extend(value[1] for value in saved.values if value is not None)

    ranks.executors[0].runner.run_instruction = run_and_record  # type: ignore[method-assign]
    ranks.step(*tiny_model.make_batch(4))
    assert roots and not any(isinstance(root, Tensor) for root in roots)


def test_minimal_slots_with_tensor_parallelism_have_same_bits() -> None:
    """Slices are received into their position in the whole tensor."""
    shape = PipelineShape(2, 4)
    default_results, minimal_results = (
        step_on_gloo(split_1f1b, shape, tp=2, buffer_sharing=slots) for slots in (None, "minimal")
    )
    for default, minimal in zip(default_results, minimal_results, strict=True):
        assert have_same_bits(default[0], minimal[0])


class FailsOnce(nn.Linear):
    """Fails once, in its second forward."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 2:
            raise KeyboardInterrupt
        return super().forward(x)


def test_step_after_failed_step_is_refused() -> None:
    """The next step would receive messages of the failed step."""
    stages = [FailsOnce(1, 1), nn.Linear(1, 1)]
    program = compile(one_f_one_b, PipelineShape(2, 3))
    x = torch.ones(3, 1)
    ranks = InProcessExecutor(program, stages, loss=nn.MSELoss(), boundary=Boundary((1,)))
    with pytest.raises(ExecutionError, match="2 inputs"):
        ranks.step(x[:2], x)  # refused before it begins
    with pytest.raises(KeyboardInterrupt):
        ranks.step(x, x)
    with pytest.raises(ExecutionError) as error:
        ranks.step(x, x)
    assert "an earlier step failed on rank 0" in error.value.fact
