"""Tests that early gathers and receives are as early as allowed, and no earlier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.compiler.compile import lower
from schedir.ir.isa.instructions import COMPUTE_OPS, Instr, Opcode
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import (
    group_opposite_transfers,
    post_receives_early,
    start_gathers_early,
)
from schedir.testing import compute_programs
from tests.edits import written

O = Opcode
GATHER_NEIGHBORS = {O.TPGatherAct: (O.RecvAct, (O.Forward,)),
         O.TPGatherGrad: (O.RecvGrad, (O.Backward, O.BackwardInput))}  # fmt: skip


def list_groups(program: Program, rank: int) -> list[list[Instr]]:
    """Return the groups of a Stream."""
    groups: list[list[Instr]] = []
    stream = program.streams[rank]
    for instr, joined in zip(stream, stream.joined.tolist(), strict=True):
        groups[-1:] = [[*groups[-1], instr]] if joined else [*groups[-1:], [instr]]
    return groups


def find_gather_positions(program: Program) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield the positions of each gather, its receive and its consumer, and of all computes."""
    for rank in range(program.shape.ranks):
        issued = list_groups(program, rank)
        group_of = {instr: k for k, group in enumerate(issued) for instr in group}
        computes = [k for k, group in enumerate(issued) if group[0].op in COMPUTE_OPS]
        for instr, k in group_of.items():
            if instr.op in GATHER_NEIGHBORS:
                receive, users = GATHER_NEIGHBORS[instr.op]
                (user,) = (group_of[u] for op in users if (u := instr._replace(op=op)) in group_of)
                yield k, group_of[instr._replace(op=receive)], user, computes


@settings(max_examples=100)
@given(compute_programs(), st.booleans(), st.integers(1, 3))
def test_gather_starts_requested_computes_ahead(draft: Program, grouped: bool, ahead: int) -> None:
    """Between a gather and its consumer are `ahead` computes, or all that follow its receive."""
    program = lower(replace(draft, tp=2))
    program = start_gathers_early(group_opposite_transfers(program) if grouped else program, ahead)
    for gather, receive, user, computes in find_gather_positions(program):
        assert receive < gather < user
        between = sum(gather < k < user for k in computes)
        assert between == min(ahead, sum(receive < k < user for k in computes))
    # Its message may be posted even earlier.
    for gather, receive, _, _ in find_gather_positions(
        post_receives_early(program, "per_edge", ahead)
    ):
        assert receive < gather


def test_overlapped_pair_counts_as_one_compute() -> None:
    rank_0 = "; ".join(f"F 0.{k}; scatter 0.{k}; send_act 0.{k}" for k in range(3))
    taken = "recv_act 1.0; recv_act 1.1; recv_act 1.2; tp_gather_act 1.0; F 1.0; tp_gather_act 1.1"
    program = written(rank_0, f"{taken}; F 1.1 & B 1.0; tp_gather_act 1.2; F 1.2 & B 1.1; B 1.2",
                   microbatches=3, header="tp 2")  # fmt: skip
    rank_1_order = [str(group[-1]) for group in list_groups(start_gathers_early(program), 1)]
    assert rank_1_order[3:] == [
        "tp_gather_act 1.0",
        "tp_gather_act 1.1",
        "F 1.0",
        "tp_gather_act 1.2",
        "B 1.0",
        "B 1.1",
        "B 1.2",
    ]
