"""Tests that static memory for sends and receives is allocated as predicted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import compile, lower
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.handlers.handler_registry import HANDLERS
from schedir.runtime.program_state import ProgramState
from schedir.runtime.rank_resources import RankOptions, RankResources
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.schedules import one_f_one_b
from schedir.testing import compute_programs
from schedir.transports.in_process.mailbox import Mailbox, MailboxHub, list_group_members
from tests.cases import each_value
from tests.laws import ZOO, find_min_microbatches, make_shape
from tests.strategies import with_slots

WIDTH = 8  # elements of a boundary, a multiple of every tp here


class StaticMailbox(Mailbox):
    """Sends from static memory, as NCCL does, in a tensor-parallel group of any size."""

    uses_static_buffers = True


def measure_static_memory(program: Program, rank: int) -> dict[str, int]:
    """Return the bytes that a rank allocates by kind when a program is linked."""
    transport = StaticMailbox(MailboxHub(), rank, list_group_members(program, rank), "per_edge")
    transport.tp = program.tp
    stages = {s: nn.Identity() for s in program.shape.stages_on_rank[rank]}
    boundary = Boundary((2, WIDTH // 2), torch.float64)
    boundary_table = BoundaryTable.from_boundary(boundary, program)
    loss = nn.functional.mse_loss
    resources = RankResources(program, rank, stages, transport, None, RankOptions(loss=loss))
    resources.service(MessageBuffers).allocate([(program, boundary_table)])
    state = ProgramState(program, resources, transport, boundary_table)
    for i in state.stream:
        HANDLERS[i.op](state, i)
    bytes_by_kind = dict.fromkeys(SlotCounts._fields, 0)
    received = state.service(MessageBuffers).received
    sent = resources.service(MessageBuffers).sent
    memory = [(key[0], tensor) for key, tensor in received.items()]
    memory += [(key[0], tensor) for key, tensor in sent.items()]
    for kind, tensor in memory:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        bytes_by_kind[kind.name.lower()] += tensor.nbytes
    return bytes_by_kind


def assert_matches_prediction(program: Program) -> None:
    for rank, footprint in enumerate(compute_footprints(program, Sizes(activation=8 * WIDTH))):
        predicted = {kind: size for kind, (_, size) in footprint.static_memory.items()}
        assert measure_static_memory(program, rank) == {
            kind: predicted.get(kind, 0) for kind in SlotCounts._fields
        }


CHOICES: list[BufferSharing | None] = [None, "latency_preserving", "minimal"]


@pytest.mark.parametrize(("name", "tp", "slots"), each_value([*ZOO], [1, 8], CHOICES))
def test_static_memory_of_schedules_matches_prediction(
    name: str, tp: int, slots: BufferSharing | None
) -> None:
    schedule = ZOO[name]
    shape = make_shape(schedule, 4, max(8, find_min_microbatches(schedule, 4)))
    program = compile(
        schedule, shape, tp=tp, progress_model="per_edge", overlap=True, buffer_sharing=slots
    )
    assert_matches_prediction(program)


@settings(max_examples=60)
@given(compute_programs(), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_static_memory_of_random_programs_matches_prediction(
    draft: Program, tp: int, rng: random.Random
) -> None:
    assert_matches_prediction(with_slots(lower(replace(draft, tp=tp)), rng))


def test_scattered_send_needs_only_its_shard() -> None:
    program = compile(one_f_one_b, PipelineShape(4, 8), tp=8, buffer_sharing="minimal")
    full_boundary, shard = 8 * WIDTH, WIDTH
    assert program.slots[1] == SlotCounts(1, 1, 1, 1)
    measured = {kind: size for kind, size in measure_static_memory(program, 1).items() if size}
    sizes = (full_boundary, shard, full_boundary, shard)
    assert measured == dict(zip(("act_in", "act_out", "grad_in", "grad_out"), sizes, strict=True))
