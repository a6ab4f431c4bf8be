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
from schedir.transports.gloo import GlooTransport, ProcessTransport
from schedir.transports.in_process import mailbox
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.per_device_transport import Strict
from tests.cpu.virtual_gpu import install

TRANSPORTS: tuple[Callable[[Program], ProcessTransport], ...] = (
    GlooTransport,
    SharedMemoryTransport,
    EdgeGroups,
    GroupedMessages,
    Strict,
)
TYPES = (torch.float32, torch.bfloat16, torch.complex64)
PART = 3  # elements of a rank's part


def brings(process: int, members: int, dtype: torch.dtype) -> Tensor:
    """Return the input of a process to a group, whose sums are exact in any order."""
    return (1 + process + torch.arange(members * PART) ** 2 % 7).to(dtype)


def plainly(kind: CollectiveName, members: list[int], own: int, dtype: torch.dtype) -> Tensor:
    """Return the right result of process `own`."""
    all_of = [brings(process, len(members), dtype) for process in members]
    at = members.index(own)
    if kind == "all_gather":
        return torch.stack([one.view(len(members), PART)[0] for one in all_of]).view(-1)
    total = torch.stack(all_of).sum(0)
    return total if kind == "all_reduce" else total[at * PART : (at + 1) * PART]


def collect(
    transport: Any, group: GroupKey, members: list[int], own: int, dtype: torch.dtype
) -> dict[tuple[CollectiveName, bool], tuple[Any, Tensor]]:
    """Start every collective in a group. Return its Work and result by kind and `in_place`."""
    n, started = len(members), {}
    for kind in COLLECTIVES:
        for in_place in (False, True):
            whole = brings(own, n, dtype)
            mine = whole[members.index(own) * PART :][:PART]
            if kind == "all_reduce":
                out, given = whole if in_place else torch.empty_like(whole), whole
            elif kind == "all_gather":
                given = mine.copy_(whole[:PART]) if in_place else whole[:PART]
                out = whole if in_place else torch.empty_like(whole)
            else:
                out, given = mine if in_place else torch.empty(PART, dtype=dtype), whole
            work = transport.start_collective(kind, group, out, given)
            started[kind, in_place] = work, out
    return started


def wrong(started: Any, members: list[int], own: int, dtype: torch.dtype) -> list[Any]:
    """Wait for all started collectives, and return those with wrong results."""
    found = []
    for (kind, in_place), (work, out) in started.items():
        work.wait()
        if not torch.equal(out, plainly(kind, members, own, dtype)):
            found.append((kind, in_place, dtype, out))
    return found


def groups_of(program: Program, process: int) -> dict[GroupKey, list[int]]:
    """Return the members of the groups of a process, for processes in the order (dp, pp, tp)."""
    tp, dp, pp = program.tp, program.dp, program.shape.ranks
    r, p, t = process // (pp * tp), process // tp % pp, process % tp

    def at(ranks: Any, replicas: Any = (r,), slices: Any = (t,)) -> list[int]:
        return [(x * pp + y) * tp + z for x in replicas for y in ranks for z in slices]

    found: dict[GroupKey, list[int]] = {"model": at(range(pp), slices=range(tp))}
    if dp > 1:
        found["dp"] = at([p], range(dp))
    if (ep := program.ep) > 1:
        found["ep"] = found["ep_counts"] = at([p], range(r // ep * ep, r // ep * ep + ep))
        if dp > ep:
            found["expert_dp"] = at([p], range(r % ep, dp, ep))
    if tp > 1:
        found["tp"] = at([p], slices=range(tp))
    if program.shape.placement_rows > 1:
        found |= {(one, pp - 1 - one): at([one, pp - 1 - one]) for one in range(pp // 2)}
    if program.tied_weights:
        found[0, pp - 1] = at([0, pp - 1])
    return found


def exchange(
    transport: Any, group: GroupKey, members: list[int], own: int, dtype: torch.dtype
) -> bool:
    """Send (a + 2b) % 3 elements from member a to b, and return whether they are in order."""
    n, me = range(len(members)), members.index(own)
    sent, received = (tuple((a + 2 * b) % 3 for a, b in pairs) for pairs in (
        [(me, other) for other in n], [(other, me) for other in n]
    ))  # fmt: skip
    out = torch.empty(sum(received), dtype=dtype)
    given = torch.tensor([10 * me + b for b in n for _ in range(sent[b])], dtype=dtype)
    transport.start_collective(AllToAll(sent, received), group, out, given).wait()
    expected = [10 * a + me for a in n for _ in range(received[a])]
    return torch.equal(out, torch.tensor(expected, dtype=dtype))


def in_processes(rank: int) -> list[Any]:
    found = []
    for program in (
        compile(gpipe, PipelineShape(2, 2), tp=2, tied_weights=True),
        compile(gpipe, PipelineShape(2, 2), dp=2, ep=2, stage_segments="dc"),
        compile(gpipe, PipelineShape(1, 2), dp=4, ep=2, stage_segments="dc"),
        compile(chimera, PipelineShape(2, 2, placement="mirror"), tp=2),
    ):
        for make in TRANSPORTS:
            transport = make(program)
            groups = groups_of(program, rank)
            assert groups.keys() == transport.groups.keys()
            for dtype in TYPES:
                for group, members in groups.items():
                    started = collect(transport, group, members, rank, dtype)
                    said = wrong(started, members, rank, dtype)
                    found += [(make, group, *one) for one in said]
                    if not exchange(transport, group, members, rank, dtype):
                        found.append((make, group, "all_to_all", dtype))
    return found


def test_processes() -> None:
    assert run(in_processes, 4) == [[]] * 4


@pytest.mark.parametrize("on_gpu", [False, True])
def test_virtual_ranks(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right in any order of the ranks."""
    program = compile(gpipe, PipelineShape(3, 2), tied_weights=True)
    for order in permutations(range(3)):
        if on_gpu:
            install(monkeypatch)
        ranks = mailbox.make_mailboxes(program, "per_edge", False, [])
        for dtype in TYPES:
            for group in ("dp", "tp", "model"):
                members = {k: m.group_members[group] for k, m in enumerate(ranks)}
                started = {k: collect(ranks[k], group, members[k], k, dtype) for k in order}
                assert not [one for k in order for one in wrong(started[k], members[k], k, dtype)]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_virtual_ranks_meet_in_their_own_order(
    kind: CollectiveName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded sums have the same bits, whichever rank comes last."""
    program, results = compile(gpipe, PipelineShape(3, 2)), set()
    for order in permutations(range(3)):
        ranks = mailbox.make_mailboxes(program, "per_edge", False, [])
        own = [torch.tensor(part) for part in ([1e16, 1.0, 3.0], [1.0] * 3, [-1e16, 1.0, 1e-9])]
        sizes = {"all_reduce": 3, "all_gather": 9, "reduce_scatter": 1}
        out = [torch.zeros(sizes[kind]) for _ in ranks]
        for k in order:
            ranks[k].start_collective(kind, "model", out[k], own[k])
        results.add(str([one.tolist() for one in out]))
    assert len(results) == 1


def test_nobody_goes_on_before_all_have_come() -> None:
    first, second = mailbox.make_mailboxes(
        compile(gpipe, PipelineShape(2, 2)), "per_edge", False, []
    )
    one, other = torch.ones(2), torch.ones(2)
    work = first.start_collective("all_reduce", "model", one, one)
    with pytest.raises(AssertionError, match="all ranks are issued before"):
        work.wait()
    second.start_collective("all_reduce", "model", other, other)
    work.wait()
    assert one.tolist() == [2, 2]
    first.start_collective("all_reduce", "model", one, one)
    with pytest.raises(AssertionError, match="one kind of collective at a time"):
        second.start_collective("reduce_scatter", "model", other[:1], other)
