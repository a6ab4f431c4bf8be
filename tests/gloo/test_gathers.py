"""Gathers in flight while layers talk: 2 x 2 processes, and the bits of the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir import compile, gpt
from schedir.passes.slots import Choice
from schedir.plan import Plan
from schedir.runtime.c10d import Gloo
from schedir.runtime.executor import Executor
from schedir.runtime.reference import reference
from schedir.runtime.transport import Work
from schedir.schedules import interleaved, one_f_one_b
from tests.gloo.spawn import run
from tests.gloo.tiny_stages import BOUNDARY, batch, config, gradients, paired, same_bits, zb

PLANS = [
    (paired, Plan(2, 4)),
    (one_f_one_b, Plan(2, 4)),
    (zb, Plan(2, 4)),
    (interleaved, Plan(2, 4, 2)),
]
SLOTS: list[Choice | None] = [None, "fewest"]


class Late(Gloo):
    """A transport whose gathers write as late as they may.

    Until it is waited for, a gather has spoilt what it is to write; and nobody may write what it
    reads.
    """

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.open: set[_LateGather] = set()
        self.beside = 0  # collectives of layers that were called while a gather was in flight

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        return _LateGather(self, whole, shard)

    def all_reduce_of_layers(self, tensor: Tensor, *args: Any, **how: Any) -> Any:
        if how.get("group") is self.tp_group:
            self.beside += bool(self.open)
        return _ALL_REDUCE(tensor, *args, **how)


_ALL_REDUCE = dist.all_reduce


class _LateGather:
    def __init__(self, transport: Late, whole: Tensor, shard: Tensor) -> None:
        self.transport, self.whole, self.shard = transport, whole, shard
        self.read, self.written = shard.clone(), whole.clone()
        own = self.written.view(transport.tp, -1)[transport.tp_rank]
        self.work = Gloo.all_gather(transport, self.written, own)
        whole.fill_(torch.nan)
        shard.copy_(self.read)
        transport.open.add(self)

    def wait(self) -> None:
        self.transport.open.remove(self)
        self.work.wait()
        assert torch.equal(self.shard, self.read)
        self.whole.copy_(self.written)


def one_rank(rank: int, schedule: Any, plan: Plan) -> list[tuple[bool, int]]:
    """Whether the bits are those of the reference, and what was called beside a gather."""
    inputs, targets, scale = batch(plan.microbatches)
    found = []
    for slots in SLOTS:
        program = compile(schedule, plan, tp=2, model="edge", tied=True, overlap=True, slots=slots)
        transport = Late(program)
        group = transport.tp_group
        loss = partial(gpt.loss, tp=group)
        ours, right = (
            [gpt.build_stage(config(plan.stages), s, plan.stages, tp=group) for s in own]
            for own in (plan.stages_of[transport.rank], range(plan.stages))
        )
        stages = dict(zip(plan.stages_of[transport.rank], ours, strict=True))
        executor = Executor(
            program, transport.rank, stages, transport, loss=loss, boundary=BOUNDARY
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", transport.all_reduce_of_layers)
            for _ in range(2):  # twice: a step leaves nothing behind
                executor.step(inputs, targets, scale)
        assert not transport.open
        reference(right, inputs, targets, loss=loss, scale=scale)
        wanted = [gradients(right)[s] for s in stages]
        found.append((same_bits(gradients(ours), wanted), transport.beside))
    return found


@pytest.mark.parametrize(("schedule", "plan"), PLANS)
def test_the_bits_of_the_reference_with_gathers_in_flight(schedule: Any, plan: Plan) -> None:
    results = run(one_rank, 4, schedule, plan)
    assert all(same for found in results for same, _ in found)
    for of_slots in zip(*results, strict=True):
        assert any(beside for _, beside in of_slots)
