"""Tests of blocking hosts, as on CPUs: the checker accepts exactly the programs they finish."""

from __future__ import annotations

import random

import pytest

from schedir.errors import DeadlockError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Opcode
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import post_receives_early, start_gathers_early
from schedir.predict.simulate import simulate
from schedir.verify.check import check
from tests.cases import ALL
from tests.edits import written
from tests.mutants import any_legal, refusal, reordered
from tests.oracle import Machine
from tests.strategies import with_slots

OTHER = (
    "recv_act 1.0; F 1.0; recv_act 1.1; F 1.1; B 1.0; send_grad 1.0; B 1.1; send_grad 1.1; "
    "reduce_grads 1; step"
)


def sends(late: bool) -> Program:
    """Return a program that sends its second activation before or after waiting for a gradient."""
    pair = "B 0.0; send_act 0.1" if late else "send_act 0.1; B 0.0"
    first = f"F 0.0; send_act 0.0; F 0.1; recv_grad 0.0; {pair}; recv_grad 0.1; B 0.1"
    return written(f"{first}; reduce_grads 0; step", OTHER, microbatches=2)


def test_a_send_behind_a_compute_waits_with_it() -> None:
    check(sends(late=False), "per_edge", blocking_hosts=True)
    check(sends(late=True), "per_edge")
    with pytest.raises(DeadlockError) as caught:
        check(sends(late=True), "per_edge", blocking_hosts=True)
    steps = [f"{wait.instr} < {wait.needed_instr}" for wait in caught.value.cycle]
    assert steps == [
        "recv_grad 0.0 < send_grad 1.0", "send_grad 1.0 < B 1.0", "F 1.1 < recv_act 1.1",
        "recv_act 1.1 < send_act 0.1", "send_act 0.1 < B 0.0", "B 0.0 < recv_grad 0.0",
    ]  # fmt: skip


def test_a_reduction_that_others_meet_holds_up_the_computes_behind_it() -> None:
    """The host waits for all earlier reductions, and computes nothing meanwhile."""
    ends = "reduce_grads {0}{1}; reduce_tied {0}{1}"
    first, last = (f"{ends}; step 1".format(rank, ".1") for rank in (0, 1))
    program = written(
        f"F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; {ends.format(0, '')}; F 0.1; step; "
        f"send_act 0.1; recv_grad 0.1; B 0.1; {first}",
        f"recv_act 1.0; F 1.0; B 1.0; send_grad 1.0; {ends.format(1, '')}; step; "
        f"recv_act 1.1; F 1.1; B 1.1; send_grad 1.1; {last}",
        microbatches=2,
        header="optimizer_steps 2 weight_delay 1 tied_weights yes",
    )
    costs = Costs(reduce_grads=5)
    began = [
        simulate(program, costs, blocking_hosts=b).instruction_at(0, 6)[1] for b in (False, True)
    ]
    backward = 1 + 1 + 2 + 2  # F and B of both stages
    assert began == [backward, backward + 5]


# Stages 0 and 2 are on one rank. The message of tp_gather_act 2.0 depends on the slices of
# tp_scatter_act 0.0.
BEHIND = written(
    "F 0.0; tp_scatter_act 0.0; send_act 0.0; recv_act 2.0; tp_gather_act 2.0; F 2.0; "
    "tp_scatter_act 2.0; send_act 2.0",
    "recv_act 1.0; tp_gather_act 1.0; F 1.0; tp_scatter_act 1.0; send_act 1.0; recv_act 3.0; "
    "tp_gather_act 3.0; F 3.0",
    header="stages_per_rank 2 tp 2",
)


def test_a_gather_holds_up_gathers_and_hosts_and_no_computes() -> None:
    check(BEHIND, "per_edge", blocking_hosts=True)
    ahead = moved(BEHIND, 0, "tp_gather_act 2.0", "tp_scatter_act 0.0")
    check(ahead, "per_edge")
    with pytest.raises(DeadlockError) as caught:
        check(ahead, "per_edge", blocking_hosts=True)
    assert any(str(wait.instr) == "tp_gather_act 2.0" for wait in caught.value.cycle)
    other = moved(BEHIND, 1, "tp_gather_act 3.0", "tp_gather_act 1.0")
    for blocks in (False, True):  # one communicator
        with pytest.raises(DeadlockError) as caught:
            check(other, "per_edge", blocking_hosts=blocks)
        assert any(str(wait.instr) == "tp_gather_act 3.0" for wait in caught.value.cycle)


def moved(program: Program, rank: int, what: str, ahead: str) -> Program:
    """Move a gather, with its receive, before another instruction."""
    lists = [[*map(str, stream)] for stream in program.streams]
    own = lists[rank]
    at = own.index(what)
    pair = [own.pop(at - 1), own.pop(at - 1)]
    own[own.index(ahead) : own.index(ahead)] = pair
    return written(*map("; ".join, lists), header="stages_per_rank 2 tp 2")


def finishes(program: Program) -> bool:
    """Return whether hosts that make one call after the other finish, under `per_edge`.

    Transfers and reductions are only started. A compute waits for the messages of its inputs, and
    for those that empty its slot. A reduction with partners waits for earlier reductions. That of
    two holders waits only for replicas.
    """
    machine = Machine(program, "per_edge", Costs())
    machine.run()  # fills its tables
    at, lists = [0] * len(program.streams), machine.lists
    begun: set[tuple[int, int]] = set()

    def arrived(rank: int, k: int) -> bool:
        """Return whether all sides of a transfer or collective have started."""
        return all(side in begun for side in machine._partners(rank, lists[rank][k]))

    def may(rank: int, k: int) -> bool:
        row = INSTRUCTIONS[lists[rank][k].op]
        if row.peer or row.op is Opcode.ReduceGrads:
            return True
        if row.op is Opcode.ReduceReplicatedStages and program.dp == 1:
            return True
        if row.lane is Lane.DP or row.op is Opcode.OptimizerStep:
            reduces = [j for j in range(k) if INSTRUCTIONS[lists[rank][j].op].lane is Lane.DP]
            return all(arrived(rank, j) for j in reduces)
        needs = [j for _, j in machine._needs(rank, lists[rank][k])]
        needs += machine.left[rank].get(k, [])
        needs += [j for need in needs for _, j in machine._needs(rank, lists[rank][need])]
        return all(arrived(rank, j) for j in needs if INSTRUCTIONS[lists[rank][j].op].peer)

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while at[rank] < len(own) and may(rank, at[rank]):
                begun.add((rank, at[rank]))
                at[rank] += 1
                moved = True
    return all(k == len(own) for k, own in zip(at, lists, strict=True))


@pytest.mark.parametrize("slots", [False, True])
def test_checker_equals_hosts_that_wait(slots: bool) -> None:
    stuck = 0
    for seed in range(80 if ALL else 40):
        rng = random.Random(seed)
        program = any_legal(seed)
        if seed % 2:
            program = reordered(program, rng)
        else:  # gathers before instructions that their messages may wait for
            program = start_gathers_early(post_receives_early(program, "per_edge", 3), 3)
        program = with_slots(program, rng) if slots else program
        if refusal(program, "per_edge"):
            continue
        try:
            check(program, "per_edge", blocking_hosts=True)
        except DeadlockError as error:
            stuck += 1
            assert str(error) and not finishes(program), seed
        else:
            assert finishes(program), seed
    assert stuck
