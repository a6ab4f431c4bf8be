"""Tests that `check` accepts exactly the programs that finish if hosts wait for their devices."""

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
def test_early_receives_deadlock_with_host_device_sync(name: str, tp: int) -> None:
    schedule, shape = getattr(schedules, name), CASES[name]
    check(
        compile(schedule, shape, tp=tp, dp=2, progress_model="per_edge"),
        "per_edge",
        host_device_sync=True,
    )
    check(compile(schedule, shape, tp=tp, overlap=True), host_device_sync=True)
    program = compile(schedule, shape, tp=tp, progress_model="per_edge", overlap=True)
    check(program, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError) as caught:
        check(program, "per_edge", host_device_sync=True)
    assert "a host that waits for its device" in caught.value.hint


def test_message_after_reduction_deadlocks_with_host_device_sync() -> None:
    """The receive before the reduction needs the message sent after it."""
    endings = ("reduce_grads 2; send_grad 2.0", "send_grad 2.0; reduce_grads 2")
    send_after_reduction, send_before_reduction = (
        written(
            "F 0.0; send_act 0.0; recv_act 2.0; F 2.0; send_act 2.0; recv_grad 2.0; B 2.0; "
            f"recv_grad 0.0; {ending}; B 0.0; reduce_grads 0; step",
            "recv_act 1.0; F 1.0; send_act 1.0; recv_act 3.0; F 3.0; B 3.0; send_grad 3.0; "
            "recv_grad 1.0; B 1.0; send_grad 1.0; reduce_grads 3; reduce_grads 1; step",
            header="stages_per_rank 2",
        )
        for ending in endings
    )
    check(send_before_reduction, "per_edge", host_device_sync=True)
    check(send_after_reduction, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError):
        check(send_after_reduction, "per_edge", host_device_sync=True)
    assert (
        synchronizing_hosts_finish(send_after_reduction),
        synchronizing_hosts_finish(send_before_reduction),
    ) == (False, True)


def synchronizing_hosts_finish(program: Program) -> bool:
    """Return whether hosts that make one call after the other finish, under `per_edge`.

    Before each call that is not a message, they wait until all started work has ended. A group is
    in progress when all its members have started and the earlier work of their queues has ended. A
    message or collective ends when all its sides are in progress.
    """
    machine = Machine(program, "per_edge", Costs())
    machine.run()  # fills the tables of the machine
    positions, lists = [0] * len(program.streams), machine.lists
    ended: set[tuple[int, int]] = set()
    grouped = [{k: group for group in groups for k in group} for groups in machine.groups]

    def is_in_progress(rank: int, k: int) -> bool:
        group = grouped[rank][k]
        earlier = (j for lane in machine.before[rank, group[0]] for j in lane)
        return group[-1] < positions[rank] and all((rank, j) in ended for j in earlier)

    def can_issue(rank: int, k: int) -> bool:
        message = bool(INSTRUCTIONS[lists[rank][k].op].peer)
        others = (j for j in range(k) if j not in grouped[rank][k])
        return message or all((rank, j) in ended for j in others)

    has_advanced = True
    while has_advanced:
        progress_before = sum(positions) + len(ended)
        for rank, instructions in enumerate(lists):
            positions[rank] += positions[rank] < len(instructions) and can_issue(
                rank, positions[rank]
            )
            for k in (k for k in range(positions[rank]) if (rank, k) not in ended):
                sides = machine._partners(rank, instructions[k])
                if all(is_in_progress(*side) for side in sides):
                    ended.update(sides)
        has_advanced = sum(positions) + len(ended) > progress_before
    return all(k == len(instructions) for k, instructions in zip(positions, lists, strict=True))


def test_check_accepts_programs_that_synchronizing_hosts_finish() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(160 if ALL else 24):
        rng = random.Random(seed)
        program = any_legal(seed)
        if seed % 2:
            program = reordered(program, rng)
        else:
            program = start_gathers_early(
                post_receives_early(program, "per_edge", rng.choice([0, 1, 3])), 3
            )
        program = with_slots(program, rng) if seed % 4 > 1 else program
        if refusal(program, "per_edge"):
            continue
        try:
            check(program, "per_edge", host_device_sync=True)
        except DeadlockError as error:
            verdicts[False] += 1
            assert str(error) and not synchronizing_hosts_finish(program), seed
        else:
            verdicts[True] += 1
            assert synchronizing_hosts_finish(program), seed
    assert min(verdicts.values()) > (5 if ALL else 2)
