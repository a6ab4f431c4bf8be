"""Tests that a program in one total order finishes, whatever delays a rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from schedir import check
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.total_order import find_total_order
from schedir.errors import SchedirError
from schedir.ir.isa.instructions import COMPUTE_OPS, RECV_OPS
from schedir.ir.program import JOINED_BIT, Program
from schedir.passes.communication.transfer_overlap import post_receives_early, start_gathers_early
from tests.cases import ALL
from tests.mutants import any_legal, refusal
from tests.strategies import with_slots


def apply_total_order(program: Program) -> Program:
    """Return a program with Streams in the order of `find_total_order`, without groups."""
    orders = find_total_order(Graph.from_program(program, "per_edge"))
    streams = []
    for stream, order in zip(program.streams, orders, strict=True):
        assert sorted(order) == [*range(len(stream))]
        words = stream.words[order] & ~JOINED_BIT
        streams.append(type(stream)(words))
    return replace(program, streams=tuple(streams), message_order={})


@pytest.mark.parametrize("slots", [False, True])
def test_total_order_is_legal_with_host_device_sync(slots: bool) -> None:
    groups = 0
    for seed in range(100 if ALL else 50):
        rng = random.Random(seed)
        program = any_legal(seed)
        if seed % 2:
            program = start_gathers_early(
                post_receives_early(program, "per_edge", rng.choice([1, 3])), 3
            )
        program = with_slots(program, rng) if slots else program
        if refusal(program, "per_edge"):
            continue
        groups += bool(program.joined.any())
        ordered = apply_total_order(program)
        for model in ("blocking_serial", "per_edge"):
            check(ordered, model, host_device_sync=True)
        for original, reordered in zip(program.streams, ordered.streams, strict=True):
            assert [i for i in original if i.op in COMPUTE_OPS] == [
                i for i in reordered if i.op in COMPUTE_OPS
            ]
    assert groups > 5


def test_total_order_moves_only_receives() -> None:
    """With enough slots, only receives move, so memory is used as in the Streams."""
    num_checked = 0
    for seed in range(100 if ALL else 50):
        program = start_gathers_early(post_receives_early(any_legal(seed), "per_edge", 3), 3)
        if program.joined.any():
            continue
        try:
            check(program, "per_edge", blocking_hosts=True)
        except SchedirError:
            continue
        num_checked += 1
        for original, reordered in zip(
            program.streams, apply_total_order(program).streams, strict=True
        ):
            others = (
                [i for i in stream if i.op not in RECV_OPS] for stream in (original, reordered)
            )
            assert next(others) == next(others)
    assert num_checked > 15
