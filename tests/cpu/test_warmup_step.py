"""Tests of the warm-up step over transports with streams, which runs and is undone."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from schedir import check, compile
from schedir.errors import DeadlockError, ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.step_inputs import StepInputs
from schedir.schedules import dualpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from schedir.transports.transport import CompletedWork, Work
from tests.cases import cases
from tests.cpu.caching_allocator import CachingAllocator
from tests.cpu.gloo_processes import run
from tests.cpu.nccl_stand_in import NcclStandIn
from tests.cpu.race_detector import RaceDetector
from tests.cpu.tiny_stages import (
    Case,
    copy_parameters,
    gpt_executor,
    gradients_by_stage,
    have_same_bits,
    make_replica_batch,
    split_1f1b,
)
from tests.cpu.virtual_gpu import install_virtual_gpu

TWO_UPDATES = PipelineShape(2, 4, optimizer_steps=2, weight_delay=1)
CASES = dict(
    cases(
        [
            ("1f1b, tp", Case(one_f_one_b, PipelineShape(2, 3), tp=2, buffer_sharing="minimal")),
            ("split, dp", Case(split_1f1b, PipelineShape(2, 3), dp=2)),
            ("optimizer_steps", Case(pipedream_2bw, TWO_UPDATES, dp=2, clip=False)),
        ],
        [
            ("1f1b", Case(one_f_one_b, PipelineShape(4, 8))),
            ("interleaved", Case(interleaved, PipelineShape(2, 4, 2), tp=2)),
            ("two holders", Case(dualpipe, PipelineShape(2, 4, 2, "mirror"), dp=2, tied=False)),
        ],
    )
)


class Streamed(EdgeGroups):
    """A transport that claims to use streams, and records the groups that communicate.

    `works` are the messages that were not awaited yet.
    """

    def __init__(self, program: Program) -> None:
        self.used_groups: Counter[GroupKey] = Counter()
        self.works: list[_AwaitedWork] = []
        super().__init__(program)
        self.uses_static_buffers = True

    def _hold(self, work: Work) -> Work:
        self.works.append(awaited := _AwaitedWork(work))
        return awaited

    def send(self, tensor: Tensor, peer: int, lane: Any) -> Work:
        return self._hold(super().send(tensor, peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Any) -> Work:
        return self._hold(super().recv(tensor, peer, lane))

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        self.used_groups[group] += 1
        return self._hold(super().start_collective(kind, group, output_tensor, input_tensor))

    def synchronize(self) -> None:
        """Wait for the whole device."""
        while self.works:
            self.works.pop().wait()


class _AwaitedWork:
    """Work that can be waited for several times."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def wait(self) -> None:
        work, self.work = self.work, CompletedWork()
        work.wait()


def make_executor(case: Case, program: Program, transport: Any, fused: bool) -> Executor:
    make_optimizer = partial(torch.optim.AdamW, lr=1e-2, fused=fused)
    return gpt_executor(program, transport, make_optimizer=make_optimizer, **case.get_options())


def _collect_state(executor: Executor) -> list[Any]:
    """Return the gradients, and all state that a step changes."""
    optimizer: Any = executor.resources.optimizer
    gradients, step = gradients_by_stage(executor), executor.random_streams.step
    return [gradients, copy_parameters(executor), optimizer.state_dict(), step]


def compare_warm_and_cold(rank: int) -> dict[str, tuple[bool, set[GroupKey], set[GroupKey]]]:
    """Return for each case whether the warmup step leaves the bits of later steps unchanged.

    Also return the groups that communicated in the warm-up step, and those of later steps.
    """
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        program, fused = case.compile(), number % 2 > 0
        states = []
        for warm in (False, True):
            transport = Streamed(program)
            executor = make_executor(case, program, transport, fused)
            assert not executor.runner.is_warm
            executor.runner.is_warm = not warm
            inputs, targets, scale = make_replica_batch(program, transport)
            if warm:
                before = _collect_state(executor)
                executor.runner._warm_up(StepInputs(inputs, targets, scale))
                after, groups = _collect_state(executor), {*transport.used_groups}
                if fused:  # the state exists, with its initial values
                    state = after[2].pop("state")
                    before[2].pop("state")
                    assert not any(
                        t.any() for of_weight in state.values() for t in of_weight.values()
                    )
                assert executor.runner.is_warm and have_same_bits(before[1:], after[1:])
                transport.used_groups.clear()
            for seed in range(2):
                executor.step(*make_replica_batch(program, transport, seed))
            states.append(_collect_state(executor))
        results[name] = (have_same_bits(*states), groups, {*transport.used_groups})
    return results


def test_warmup_step_changes_no_later_step() -> None:
    for results in run(compare_warm_and_cold, 4):
        for name, (same, warmup_groups, step_groups) in results.items():
            assert same and warmup_groups == step_groups, name
            assert ("model" in warmup_groups) == CASES[name].clip, name


class GrowingMemory(nn.Module):
    """A layer that waits for the device when its number of microbatches reaches a new maximum."""

    def __init__(self, transport: Streamed) -> None:
        super().__init__()
        self.layer, self.transport, self.max_held, self.num_held = nn.Linear(4, 4), transport, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_held += 1
        if self.num_held > self.max_held:
            self.max_held = self.num_held
            self.transport.synchronize()
        y: Tensor = _ReleaseMicrobatch.apply(self.layer(x), self)  # type: ignore[no-untyped-call]
        return y


class _ReleaseMicrobatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: GrowingMemory) -> Tensor:
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        ctx.layer.num_held -= 1
        return dys[0], None


def run_growing_memory(rank: int, cold: bool) -> int:
    """Run steps of a program that would hang if a rank waited for the device."""
    program = compile(one_f_one_b, PipelineShape(4, 8), progress_model="per_edge", overlap=True)
    with pytest.raises(DeadlockError):
        check(program, "per_edge", host_device_sync=True)
    transport = Streamed(program)
    layer = GrowingMemory(transport)
    executor = Executor(
        program, rank, {rank: layer}, transport, loss=lambda y, _: y.sum(), boundary=Boundary((4,)),
        execution=ExecutionOptions(allow_identical_stages=True),
    )  # fmt: skip
    executor.runner.is_warm = cold
    x = torch.ones(8, 4)
    for _ in range(2):
        executor.step(x, x)
    return layer.max_held


def test_warmup_step_reaches_peak_memory_without_deadlock() -> None:
    assert run(run_growing_memory, 4, False) == [4, 3, 2, 1]


_all_reduce = dist.all_reduce


def _all_reduce_copy(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
    """All-reduce a copy, since Gloo's thread may use its argument after the call."""
    with _disable_current_modes():
        copy = tensor.clone()
        _all_reduce(copy, *args, **kwargs)
        tensor.copy_(copy)
    return CompletedWork() if async_op else None


def count_memory_requests(rank: int, warm: bool) -> dict[str, list[int]]:
    """Return for each case the number of memory requests in each of three steps, or in one."""
    counts: dict[str, list[int]] = {}
    for name, case in cases([("split, dp", CASES["split, dp"])], [*CASES.items()] * warm):
        program = case.compile()
        with pytest.MonkeyPatch.context() as patch:
            gpu = install_virtual_gpu(patch)
            patch.setattr(dist, "all_reduce", _all_reduce_copy)
            transport = NcclStandIn(program, gpu, RaceDetector(gpu))
            executor = make_executor(case, program, transport, True)
            inputs = make_replica_batch(program, transport)
            with CachingAllocator(gpu) as allocator:
                if warm:
                    executor.runner._warm_up(StepInputs(*inputs))
                executor.runner.is_warm = True
                counts[name] = []
                for _ in range(3 if warm else 1):
                    before = allocator.asked
                    executor.step(*inputs)
                    counts[name].append(allocator.asked - before)
    return counts


@pytest.mark.parametrize("warm", [True, False])
def test_steps_after_warmup_request_no_memory(warm: bool) -> None:
    for rank in run(count_memory_requests, 4, warm):
        for name, (first, *others) in rank.items():
            assert (first, others) == (0, [0, 0]) if warm else first, (name, first, others)


def compare_serialized_step(rank: int, kind: str) -> bool:
    """Return whether a step that issues grouped messages one by one has the same bits."""
    program = compile(
        one_f_one_b, PipelineShape(4, 8), overlap=True, tied_weights=True, clip_grad_norm=True
    )
    assert program.joined.any()
    states = []
    for is_serialized in (False, True):
        transport = (GroupedMessages if kind == "grouped" else EdgeGroups)(program)
        transport.uses_static_buffers = True
        executor = gpt_executor(
            program, transport, lr=1e-2, gradients=GradientOptions(max_norm=1.0)
        )
        executor.runner.is_warm = True
        step = executor.runner.step_serialized if is_serialized else executor.step
        for seed in range(2):
            step(*make_replica_batch(program, transport, seed))
        states.append(_collect_state(executor))
    return have_same_bits(*states)


@pytest.mark.parametrize("kind", cases(["grouped"], ["edge"]))
def test_serialized_step_has_same_bits(kind: str) -> None:
    assert all(run(compare_serialized_step, 4, kind))


class HugeAllocation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(1 << 45)  # larger than the address space


def run_huge_allocation(rank: int) -> tuple[int, str, str]:
    program = compile(interleaved, PipelineShape(1, 2, 2), progress_model="per_edge")
    executor = Executor(
        program, rank, [nn.Linear(4, 4), HugeAllocation()], Streamed(program),
        loss=lambda y, _: y.sum(), boundary=Boundary((2, 4)),
    )  # fmt: skip
    with pytest.raises(ExecutionError) as error:
        executor.step(torch.ones(2, 2, 4), torch.ones(2, 2))
    (site,) = error.value.sites
    return site.rank, str(site.instr), error.value.fact


def test_out_of_memory_names_stage() -> None:
    ((rank, instr, fact),) = run(run_huge_allocation, 1)
    assert (rank, instr) == (0, "F 1.0") and "memory" in fact
