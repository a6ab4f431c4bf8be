"""Tests of gathers in flight during collectives of layers: reference bits and predicted times."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir import Costs, compile
from schedir.analysis.dependency_graph import Graph
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import ExecutionOrders, InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import tiny_model
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.gloo import GlooTransport
from schedir.transports.in_process.cuda_streams import StreamHub, StreamMailbox, StreamPoint
from schedir.transports.transport import Work
from tests.cases import cases, each_value
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import (
    copy_gradients,
    gpt_config,
    gpt_executor,
    gradients_by_stage,
    have_same_bits,
    make_batch,
    paired_1f1b,
    split_1f1b,
)
from tests.cpu.virtual_gpu import (
    VirtualGPU,
    assert_runs_as_predicted,
    charge_instructions,
    charge_messages,
    install_virtual_gpu,
)
from tests.laws import make_shape

CASES = [
    (paired_1f1b, PipelineShape(2, 4)),
    (one_f_one_b, PipelineShape(2, 4)),
    (split_1f1b, PipelineShape(2, 4)),
    (interleaved, PipelineShape(2, 4, 2)),
]
SLOTS: list[BufferSharing | None] = [None, "minimal"]


class LateGathers(GlooTransport):
    """A transport whose gathers write as late as they may.

    Before the wait, the output of a gather is NaN. Its input must not change until then.
    """

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.gathers_in_flight: set[_LateGather] = set()
        # The number of layer collectives that were called while a gather was in flight.
        self.num_overlapping = 0

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        if kind == "all_gather":
            return _LateGather(self, output_tensor, input_tensor)
        return super().start_collective(kind, group, output_tensor, input_tensor)

    def all_reduce_of_layers(self, tensor: Tensor, *args: Any, **how: Any) -> Any:
        if how.get("group") is self.tp_group:
            self.num_overlapping += bool(self.gathers_in_flight)
        return _ALL_REDUCE(tensor, *args, **how)


_ALL_REDUCE = dist.all_reduce


class _LateGather:
    def __init__(self, transport: LateGathers, output: Tensor, shard: Tensor) -> None:
        self.transport, self.output, self.shard = transport, output, shard
        self.read, self.written = shard.clone(), output.clone()
        local_part = self.written.view(transport.tp, -1)[transport.tp_rank]
        self.work = GlooTransport.start_collective(
            transport, "all_gather", "tp", self.written, local_part
        )
        output.fill_(torch.nan)
        shard.copy_(self.read)
        transport.gathers_in_flight.add(self)

    def wait(self) -> None:
        self.transport.gathers_in_flight.remove(self)
        self.work.wait()
        assert torch.equal(self.shard, self.read)
        self.output.copy_(self.written)


def return_noncontiguous(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    """Return the same values in another memory layout, so that a slice is not contiguous."""
    y = y.transpose(0, 1).contiguous().transpose(0, 1)
    assert not y.is_contiguous()
    return y


def run_rank(
    rank: int, schedule: Any, shape: PipelineShape, forward_hook: Any = None
) -> list[tuple[bool, int]]:
    """Return whether bits equal the reference, and the number of collectives during gathers."""
    inputs, targets, scale = make_batch(shape.microbatches)
    results = []
    for slots in SLOTS:
        program = compile(
            schedule, shape, tp=2, progress_model="per_edge", tied_weights=True, overlap=True,
            buffer_sharing=slots,
        )  # fmt: skip
        transport = LateGathers(program)
        group = transport.tp_group
        loss = partial(gpt.loss, tp=group)
        reference_stages = [
            gpt.build_stage(gpt_config(shape.stages), s, shape.stages, tp=group)
            for s in range(shape.stages)
        ]
        executor = gpt_executor(program, transport)
        for stage in executor.stages.values() if forward_hook else ():
            stage.module.register_forward_hook(forward_hook)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", transport.all_reduce_of_layers)
            for _ in range(2):  # twice, since a step must not change the next step
                executor.step(inputs, targets, scale)
        assert not transport.gathers_in_flight
        run_sequential(reference_stages, inputs, targets, loss=loss, grad_scale=scale)
        expected = {s: copy_gradients(reference_stages)[s] for s in executor.stages}
        is_same = have_same_bits(gradients_by_stage(executor), expected)
        results.append((is_same, transport.num_overlapping))
    return results


@pytest.mark.parametrize(("schedule", "shape"), cases(CASES[3:], CASES[:3]))
def test_gathers_in_flight_have_reference_bits(schedule: Any, shape: PipelineShape) -> None:
    results = run(run_rank, 4, schedule, shape)
    assert all(same for checks in results for same, _ in checks)
    for checks_by_slots in zip(*results, strict=True):
        assert any(num_collectives for _, num_collectives in checks_by_slots)


def test_noncontiguous_outputs_have_reference_bits() -> None:
    results = run(run_rank, 4, one_f_one_b, PipelineShape(2, 4), return_noncontiguous)
    assert all(same for checks in results for same, _ in checks)


# ---------------------------------------------------------------- on a virtual GPU


class SlicedMailbox(StreamMailbox):
    """One of two tensor-parallel ranks, where the other rank has the same data."""

    tp = 2

    def __init__(self, hub: StreamHub, rank: int, gpu: VirtualGPU, seconds: float) -> None:
        super().__init__(hub, rank, {}, "per_edge")
        self.gpu, self.seconds = gpu, seconds
        self.messages, self.gathers = torch.cuda.Stream(), torch.cuda.Stream()

    def side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.messages)

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        if kind != "all_gather":
            return super().start_collective(kind, group, output_tensor, input_tensor)
        self.gathers.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.gathers):
            output_tensor.view(self.tp, -1)[1].copy_(input_tensor)
            self.gpu.work(self.seconds)
            return StreamPoint(self.gathers)


@pytest.mark.parametrize(
    ("schedule", "buffer_sharing"), each_value([gpipe, one_f_one_b, interleaved], ["minimal", None])
)
def test_gathers_overlap_computes_as_predicted(
    schedule: Schedule, buffer_sharing: BufferSharing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(F=2.0, I=2.0, W=1.0, send=0.25, tp_gather=0.75)
    shape = make_shape(schedule, 4, 5)
    program = compile(
        schedule, shape, tp=2, progress_model="per_edge", costs=costs, overlap=True,
        buffer_sharing=buffer_sharing,
    )  # fmt: skip
    boundary = Boundary((2, tiny_model.WIDTH), torch.float64)
    gpu, hub = install_virtual_gpu(monkeypatch), StreamHub()
    stages = tiny_model.make_tiny_stages(shape.stages)
    # `__init__` refuses tensor-parallel ranks.
    ranks = InProcessExecutor.__new__(InProcessExecutor)
    ranks.program, ranks.graph, ranks.stage_replicas = program, Graph(program, "per_edge"), []
    ranks.execution_orders = {program.digest: ExecutionOrders(program, "per_edge")}
    ranks.mailboxes = [SlicedMailbox(hub, rank, gpu, 0.75) for rank in range(shape.ranks)]
    ranks.executors = []
    for rank, mailbox in enumerate(ranks.mailboxes):
        own_stages = {s: stages[s] for s in shape.stages_on_rank[rank]}
        executor = Executor(
            program, rank, own_stages, mailbox, loss=tiny_model.squared_error, boundary=boundary
        )
        ranks.executors.append(executor)
    charge_instructions(ranks, gpu, replace(costs, tp_gather=0.0))
    for _ in range(2):
        gpu.host = gpu.over
        with charge_messages(gpu, costs):
            ranks.step(*tiny_model.make_batch(shape.microbatches))
    assert_runs_as_predicted(ranks.timeline(), costs)
