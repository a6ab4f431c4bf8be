"""Tests of all collectives over all transports of a CPU, against a plain computation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedules import chimera, gpipe
from schedir.transports.collectives import COLLECTIVES, AllToAll, CollectiveName, GroupKey
from schedir.transports.gloo import GlooTransport
from schedir.transports.in_process import mailbox
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import ALL
from tests.cpu.gloo_processes import run
from tests.cpu.per_device_transport import PerDeviceTransport
from tests.cpu.virtual_gpu import install_virtual_gpu

TRANSPORTS: tuple[Callable[[Program], ProcessTransport], ...] = (
    GlooTransport,
    SharedMemoryTransport,
    EdgeGroups,
    GroupedMessages,
    PerDeviceTransport,
)
TYPES = (torch.float32, torch.bfloat16, torch.complex64)
PART = 3  # elements of a rank's part


def make_input(process: int, members: int, dtype: torch.dtype) -> Tensor:
    """Return the input of a process to a group, whose sums are exact in any order."""
    return (1 + process + torch.arange(members * PART) ** 2 % 7).to(dtype)


def compute_expected(
    kind: CollectiveName, members: list[int], member: int, dtype: torch.dtype
) -> Tensor:
    """Return the expected result of process `member`."""
    all_of = [make_input(process, len(members), dtype) for process in members]
    position = members.index(member)
    if kind == "all_gather":
        return torch.stack([data.view(len(members), PART)[0] for data in all_of]).view(-1)
    total = torch.stack(all_of).sum(0)
    return total if kind == "all_reduce" else total[position * PART : (position + 1) * PART]


def collect(
    transport: Any, group: GroupKey, members: list[int], process: int, dtype: torch.dtype
) -> dict[tuple[CollectiveName, bool], tuple[Any, Tensor]]:
    """Start every collective in a group. Return its Work and result by kind and `in_place`."""
    n, started = len(members), {}
    for kind in COLLECTIVES:
        for in_place in (False, True):
            data = make_input(process, n, dtype)
            own_part = data[members.index(process) * PART :][:PART]
            if kind == "all_reduce":
                out, source = data if in_place else torch.empty_like(data), data
            elif kind == "all_gather":
                source = own_part.copy_(data[:PART]) if in_place else data[:PART]
                out = data if in_place else torch.empty_like(data)
            else:
                out, source = own_part if in_place else torch.empty(PART, dtype=dtype), data
            work = transport.start_collective(kind, group, out, source)
            started[kind, in_place] = work, out
    return started


def wait_for_wrong_results(
    started: Any, members: list[int], process: int, dtype: torch.dtype
) -> list[Any]:
    """Wait for all started collectives, and return those with wrong results."""
    wrong_results = []
    for (kind, in_place), (work, out) in started.items():
        work.wait()
        if not torch.equal(out, compute_expected(kind, members, process, dtype)):
            wrong_results.append((kind, in_place, dtype, out))
    return wrong_results


def list_groups(program: Program, process: int) -> dict[GroupKey, list[int]]:
    """Return the members of the groups of a process, for processes in the order (dp, pp, tp)."""
    tp, dp, pp = program.tp, program.dp, program.shape.ranks
    r, p, t = process // (pp * tp), process // tp % pp, process % tp

    def list_processes(ranks: Any, replicas: Any = (r,), slices: Any = (t,)) -> list[int]:
        return [(x * pp + y) * tp + z for x in replicas for y in ranks for z in slices]

    members: dict[GroupKey, list[int]] = {"model": list_processes(range(pp), slices=range(tp))}
    if dp > 1:
        members["dp"] = list_processes([p], range(dp))
    if (ep := program.ep) > 1:
        members["ep"] = members["ep_counts"] = list_processes(
            [p], range(r // ep * ep, r // ep * ep + ep)
        )
        if dp > ep:
            members["expert_dp"] = list_processes([p], range(r % ep, dp, ep))
    if tp > 1:
        members["tp"] = list_processes([p], slices=range(tp))
    if program.shape.placement_rows > 1:
        members |= {
            (first, pp - 1 - first): list_processes([first, pp - 1 - first])
            for first in range(pp // 2)
        }
    if program.tied_weights:
        members[0, pp - 1] = list_processes([0, pp - 1])
    return members


def exchange(
    transport: Any, group: GroupKey, members: list[int], process: int, dtype: torch.dtype
) -> bool:
    """Send (a + 2b) % 3 elements from member a to b, and return whether they are in order."""
    n, me = range(len(members)), members.index(process)
    sent, received = (tuple((a + 2 * b) % 3 for a, b in pairs) for pairs in (
        [(me, other) for other in n], [(other, me) for other in n]
    ))  # fmt: skip
    out = torch.empty(sum(received), dtype=dtype)
    source = torch.tensor([10 * me + b for b in n for _ in range(sent[b])], dtype=dtype)
    transport.start_collective(AllToAll(sent, received), group, out, source).wait()
    expected = [10 * a + me for a in n for _ in range(received[a])]
    return torch.equal(out, torch.tensor(expected, dtype=dtype))


def check_transports(rank: int) -> list[Any]:
    failures = []
    programs = (
        compile(gpipe, PipelineShape(2, 2), tp=2, tied_weights=True),
        compile(gpipe, PipelineShape(2, 2), dp=2, ep=2, stage_segments="dc"),
        compile(gpipe, PipelineShape(1, 2), dp=4, ep=2, stage_segments="dc"),
        compile(chimera, PipelineShape(2, 2, placement="mirror"), tp=2),
    )
    for p, program in enumerate(programs):
        for t, make in enumerate(TRANSPORTS):
            # Gloo runs all programs. Each other transport runs two, of which one has experts.
            if not ALL and t and (p + t) % 2:
                continue
            transport = make(program)
            groups = list_groups(program, rank)
            assert groups.keys() == transport.groups.keys()
            # Each transport has at least two types, and Gloo all types.
            for dtype in TYPES if ALL else [TYPES[(p + t) % 3]]:
                for group, members in groups.items():
                    started = collect(transport, group, members, rank, dtype)
                    wrong_results = wait_for_wrong_results(started, members, rank, dtype)
                    failures += [(make, group, *result) for result in wrong_results]
                    if not exchange(transport, group, members, rank, dtype):
                        failures.append((make, group, "all_to_all", dtype))
    return failures


def test_collectives_between_processes_are_correct() -> None:
    assert run(check_transports, 4) == [[]] * 4


@pytest.mark.parametrize("on_gpu", [False, True])
def test_collectives_of_virtual_ranks_are_correct(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are correct in any order in which the ranks start a collective."""
    program = compile(gpipe, PipelineShape(3, 2), tied_weights=True)
    for order in permutations(range(3)):
        if on_gpu:
            install_virtual_gpu(monkeypatch)
        ranks = mailbox.make_mailboxes(program, "per_edge", False, [])
        for dtype in TYPES:
            for group in ("dp", "tp", "model"):
                members = {k: m.group_members[group] for k, m in enumerate(ranks)}
                started = {k: collect(ranks[k], group, members[k], k, dtype) for k in order}
                for k in order:
                    assert not wait_for_wrong_results(started[k], members[k], k, dtype)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_virtual_ranks_sum_in_rank_order(
    kind: CollectiveName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded sums have the same bits in any order in which the ranks start a collective."""
    program, results = compile(gpipe, PipelineShape(3, 2)), set()
    for order in permutations(range(3)):
        ranks = mailbox.make_mailboxes(program, "per_edge", False, [])
        inputs = [torch.tensor(part) for part in ([1e16, 1.0, 3.0], [1.0] * 3, [-1e16, 1.0, 1e-9])]
        sizes = {"all_reduce": 3, "all_gather": 9, "reduce_scatter": 1}
        out = [torch.zeros(sizes[kind]) for _ in ranks]
        for k in order:
            ranks[k].start_collective(kind, "model", out[k], inputs[k])
        results.add(str([result.tolist() for result in out]))
    assert len(results) == 1


def test_wait_before_all_ranks_have_started_is_refused() -> None:
    first, second = mailbox.make_mailboxes(
        compile(gpipe, PipelineShape(2, 2)), "per_edge", False, []
    )
    first_data, second_data = torch.ones(2), torch.ones(2)
    work = first.start_collective("all_reduce", "model", first_data, first_data)
    with pytest.raises(AssertionError, match="all ranks are issued before"):
        work.wait()
    second.start_collective("all_reduce", "model", second_data, second_data)
    work.wait()
    assert first_data.tolist() == [2, 2]
    first.start_collective("all_reduce", "model", first_data, first_data)
    with pytest.raises(AssertionError, match="one kind of collective at a time"):
        second.start_collective("reduce_scatter", "model", second_data[:1], second_data)
