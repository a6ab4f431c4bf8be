"""Tests that `check` accepts exactly the programs that blocking hosts, as on CPUs, finish."""

from __future__ import annotations

import random

import pytest

from schedir.errors import DeadlockError
from schedir.ir.cost.costs import Costs
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import post_receives_early, start_gathers_early
from schedir.predict.simulate import simulate
from schedir.verify.check import check
from tests.cases import ALL
from tests.edits import written
from tests.mutants import FEW, any_legal, refusal, reordered
from tests.oracle_threads import verdict
from tests.strategies import with_slots

SECOND_RANK = (
    "recv_act 1.0; F 1.0; recv_act 1.1; F 1.1; B 1.0; send_grad 1.0; B 1.1; send_grad 1.1; "
    "reduce_grads 1; step"
)


def sends(late: bool) -> Program:
    """Return a program that sends its second activation before or after waiting for a gradient."""
    pair = "B 0.0; send_act 0.1" if late else "send_act 0.1; B 0.0"
    first = f"F 0.0; send_act 0.0; F 0.1; recv_grad 0.0; {pair}; recv_grad 0.1; B 0.1"
    return written(f"{first}; reduce_grads 0; step", SECOND_RANK, microbatches=2)


def test_send_after_waiting_compute_deadlocks_blocking_hosts() -> None:
    check(sends(late=False), "per_edge", blocking_hosts=True)
    check(sends(late=True), "per_edge")
    with pytest.raises(DeadlockError) as caught:
        check(sends(late=True), "per_edge", blocking_hosts=True)
    steps = [f"{wait.instr} < {wait.needed_instr}" for wait in caught.value.cycle]
    assert steps == [
        "recv_grad 0.0 < send_grad 1.0", "send_grad 1.0 < B 1.0", "F 1.1 < recv_act 1.1",
        "recv_act 1.1 < send_act 0.1", "send_act 0.1 < B 0.0", "B 0.0 < recv_grad 0.0",
    ]  # fmt: skip


def test_blocking_host_waits_for_reductions_before_compute() -> None:
    """The host waits for all earlier reductions, and starts no compute in the meantime."""
    reductions = "reduce_grads {0}{1}; reduce_tied {0}{1}"
    first, last = (f"{reductions}; step 1".format(rank, ".1") for rank in (0, 1))
    program = written(
        f"F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; {reductions.format(0, '')}; F 0.1; step; "
        f"send_act 0.1; recv_grad 0.1; B 0.1; {first}",
        f"recv_act 1.0; F 1.0; B 1.0; send_grad 1.0; {reductions.format(1, '')}; step; "
        f"recv_act 1.1; F 1.1; B 1.1; send_grad 1.1; {last}",
        microbatches=2,
        header="optimizer_steps 2 weight_delay 1 tied_weights yes",
    )
    costs = Costs(reduce_grads=5)
    start_times = [
        simulate(program, costs, blocking_hosts=is_blocking).instruction_at(0, 6)[1]
        for is_blocking in (False, True)
    ]
    backward = 1 + 1 + 2 + 2  # F and B of both stages
    assert start_times == [backward, backward + 5]


# Stages 0 and 2 are on one rank. The message of tp_gather_act 2.0 depends on the slices of
# tp_scatter_act 0.0.
GATHER_PROGRAM = written(
    "F 0.0; tp_scatter_act 0.0; send_act 0.0; recv_act 2.0; tp_gather_act 2.0; F 2.0; "
    "tp_scatter_act 2.0; send_act 2.0",
    "recv_act 1.0; tp_gather_act 1.0; F 1.0; tp_scatter_act 1.0; send_act 1.0; recv_act 3.0; "
    "tp_gather_act 3.0; F 3.0",
    header="stages_per_rank 2 tp 2",
)


def test_early_gather_deadlocks_gathers_and_blocking_hosts() -> None:
    check(GATHER_PROGRAM, "per_edge", blocking_hosts=True)
    on_rank_0 = move_gather(GATHER_PROGRAM, 0, "tp_gather_act 2.0", "tp_scatter_act 0.0")
    check(on_rank_0, "per_edge")
    with pytest.raises(DeadlockError) as caught:
        check(on_rank_0, "per_edge", blocking_hosts=True)
    assert any(str(wait.instr) == "tp_gather_act 2.0" for wait in caught.value.cycle)
    on_rank_1 = move_gather(GATHER_PROGRAM, 1, "tp_gather_act 3.0", "tp_gather_act 1.0")
    for blocks in (False, True):  # both gathers use one communicator
        with pytest.raises(DeadlockError) as caught:
            check(on_rank_1, "per_edge", blocking_hosts=blocks)
        assert any(str(wait.instr) == "tp_gather_act 3.0" for wait in caught.value.cycle)


def move_gather(program: Program, rank: int, gather: str, target: str) -> Program:
    """Move a gather, with its receive, before another instruction."""
    lists = [[*map(str, stream)] for stream in program.streams]
    instructions = lists[rank]
    position = instructions.index(gather)
    pair = [instructions.pop(position - 1), instructions.pop(position - 1)]
    instructions[instructions.index(target) : instructions.index(target)] = pair
    return written(*map("; ".join, lists), header="stages_per_rank 2 tp 2")


@pytest.mark.parametrize("slots", [False, True])
def test_check_accepts_programs_that_blocking_hosts_finish(slots: bool) -> None:
    deadlocks = 0
    for seed in range(80 if ALL else 14):
        rng = random.Random(seed)
        program = any_legal(seed, corpus=FEW)
        if seed % 2:
            program = reordered(program, rng)
        else:  # gathers before instructions that their messages may wait for
            program = start_gathers_early(post_receives_early(program, "per_edge", 3), 3)
        program = with_slots(program, rng) if slots else program
        if refusal(program, "per_edge"):
            continue
        finishes = verdict(program, "per_edge", seed, blocking_hosts=True).kind
        try:
            check(program, "per_edge", blocking_hosts=True)
        except DeadlockError as error:
            deadlocks += 1
            assert str(error) and finishes != "ok", seed
        else:
            assert finishes == "ok", seed
    assert deadlocks
