"""Tests of hosts that wait for their whole device: the checker accepts exactly what finishes."""

from __future__ import annotations

import random

import pytest

from schedir import check, compile, schedules
from schedir.errors import DeadlockError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import post_receives_early, start_gathers_early
from tests.cases import ALL
from tests.edits import written
from tests.mutants import any_legal, refusal, reordered
from tests.oracle import Machine
from tests.strategies import with_slots

CASES = {
    "one_f_one_b": PipelineShape(4, 8), "gpipe": PipelineShape(4, 8), "zb_h1": PipelineShape(4, 8),
    "interleaved": PipelineShape(4, 8, 2), "dualpipe": PipelineShape(4, 8, 2, "mirror"),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_receives_posted_early_do_not_live_through_it(name: str, tp: int) -> None:
    schedule, shape = getattr(schedules, name), CASES[name]
    check(
        compile(schedule, shape, tp=tp, dp=2, progress_model="per_edge"),
        "per_edge",
        host_device_sync=True,
    )
    check(compile(schedule, shape, tp=tp, overlap=True), host_device_sync=True)
    early = compile(schedule, shape, tp=tp, progress_model="per_edge", overlap=True)
    check(early, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError) as caught:
        check(early, "per_edge", host_device_sync=True)
    assert "a host that waits for its device" in caught.value.hint


def test_a_message_behind_a_reduction_is_issued_when_that_has_waited() -> None:
    """The receive before the reduction needs the message sent after it."""
    reduces = ("reduce_grads 2; send_grad 2.0", "send_grad 2.0; reduce_grads 2")
    wrong, right = (
        written(
            "F 0.0; send_act 0.0; recv_act 2.0; F 2.0; send_act 2.0; recv_grad 2.0; B 2.0; "
            f"recv_grad 0.0; {ends}; B 0.0; reduce_grads 0; step",
            "recv_act 1.0; F 1.0; send_act 1.0; recv_act 3.0; F 3.0; B 3.0; send_grad 3.0; "
            "recv_grad 1.0; B 1.0; send_grad 1.0; reduce_grads 3; reduce_grads 1; step",
            header="stages_per_rank 2",
        )
        for ends in reduces
    )
    check(right, "per_edge", host_device_sync=True)
    check(wrong, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError):
        check(wrong, "per_edge", host_device_sync=True)
    assert (lives(wrong), lives(right)) == (False, True)


def lives(program: Program) -> bool:
    """Return whether hosts that make one call after the other finish, under `per_edge`.

    Before each call that is not a message, they wait until all started work has ended. A group is
    in progress when all its members have started and the earlier work of their queues has ended. A
    message or collective ends when all its sides are in progress.
    """
    machine = Machine(program, "per_edge", Costs())
    machine.run()  # fills its tables
    at, lists = [0] * len(program.streams), machine.lists
    over: set[tuple[int, int]] = set()
    grouped = [{k: group for group in groups for k in group} for groups in machine.groups]

    def under_way(rank: int, k: int) -> bool:
        group = grouped[rank][k]
        before = (j for own in machine.before[rank, group[0]] for j in own)
        return group[-1] < at[rank] and all((rank, j) in over for j in before)

    def moves(rank: int, k: int) -> bool:
        message = bool(INSTRUCTIONS[lists[rank][k].op].peer)
        others = (j for j in range(k) if j not in grouped[rank][k])
        return message or all((rank, j) in over for j in others)

    moved = True
    while moved:
        was = sum(at) + len(over)
        for rank, own in enumerate(lists):
            at[rank] += at[rank] < len(own) and moves(rank, at[rank])
            for k in (k for k in range(at[rank]) if (rank, k) not in over):
                sides = machine._partners(rank, own[k])
                if all(under_way(*side) for side in sides):
                    over.update(sides)
        moved = sum(at) + len(over) > was
    return all(k == len(own) for k, own in zip(at, lists, strict=True))


@pytest.mark.parametrize("slots", [False, True])
def test_checker_equals_hosts_that_wait_for_their_device(slots: bool) -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(80 if ALL else 40):
        rng = random.Random(seed)
        program = any_legal(seed)
        if seed % 2:
            program = reordered(program, rng)
        else:
            program = start_gathers_early(
                post_receives_early(program, "per_edge", rng.choice([0, 1, 3])), 3
            )
        program = with_slots(program, rng) if slots else program
        if refusal(program, "per_edge"):
            continue
        try:
            check(program, "per_edge", host_device_sync=True)
        except DeadlockError as error:
            verdicts[False] += 1
            assert str(error) and not lives(program), seed
        else:
            verdicts[True] += 1
            assert lives(program), seed
    assert min(verdicts.values()) > 5
