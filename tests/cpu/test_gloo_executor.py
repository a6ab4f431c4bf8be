"""Tests that the executor over Gloo, between processes, is bitwise equal to the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import DeadlockError
from schedir.ir.isa.instructions import RECV_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.schedules import interleaved, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.verify.check import check
from tests.cases import cases
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.stage_chains import squared_error
from tests.cpu.tiny_stages import (
    BOUNDARY,
    HIDDEN,
    PLANS,
    gpt_executor,
    gradients_by_stage,
    have_same_bits,
    make_replica_batch,
    run_reference,
)
from tests.pure.test_blocking_hosts import sends


def _train_rank(rank: int, program: Program) -> Any:
    """Run two steps on a rank, and return gradients by stage, loss and gradient norm."""
    transport = GlooTransport(program)
    gradients = GradientOptions(max_norm=0.05 if program.clip_grad_norm else None)
    executor = gpt_executor(program, transport, gradients=gradients)
    for _ in range(2):  # the first step must not change the second
        loss = executor.step(*make_replica_batch(program, transport))
    timeline = gather_timeline(executor, transport)
    if timeline is not None:
        assert timeline.kind == "measured" and 0 < timeline.bubble < 1
        assert (timeline.spans["end"] >= timeline.spans["start"]).all()
    return gradients_by_stage(executor), loss, float(executor.grad_norm)


def step_on_gloo(schedule: Any, shape: PipelineShape, **options: Any) -> list[Any]:
    program = compile(schedule, shape, progress_model="per_edge", tied_weights=True, **options)
    return run(_train_rank, shape.ranks * program.tp * program.dp, program)


def assert_reference_bits(results: list[Any], schedule: Any, shape: PipelineShape) -> None:
    """Assert that the ranks have the gradients and the loss of the reference."""
    program = compile(schedule, shape)
    loss, expected_gradients = run_reference(shape, program=program)
    actual = {s: g for grads, _, _ in results for s, g in grads.items()}
    assert have_same_bits([actual[s] for s in range(shape.stages)], expected_gradients)
    losses = [rank_loss for _, rank_loss, _ in results if rank_loss is not None]
    assert [torch.equal(rank_loss, loss) for rank_loss in losses] == [True]


@pytest.mark.parametrize(
    ("schedule", "shape"),
    cases([PLANS[k] for k in (3, 4, 6)], [PLANS[k] for k in (0, 1, 2, 5, 7, 8)]),
)
def test_gloo_steps_equal_reference(schedule: Any, shape: PipelineShape) -> None:
    assert_reference_bits(step_on_gloo(schedule, shape), schedule, shape)


def tensors_close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    return float((first - second).norm()) <= tolerance * float(second.norm())


def _take_shard(gradient: Tensor, like: Tensor, rank: int) -> Tensor:
    """Return the shard of a tensor-parallel rank of a gradient without padding."""
    for dim, (full_size, shard_size) in enumerate(zip(gradient.shape, like.shape, strict=True)):
        if full_size != shard_size:
            return gradient.narrow(dim, rank * shard_size, shard_size)
    return gradient


@pytest.mark.parametrize(
    ("ranks", "options"),
    cases([(2, {}), (1, {"tp": 2, "dp": 2}), (2, {"tp": 2})], [(2, {"dp": 2})]),
)
def test_clipping_norm_counts_every_parameter_once(ranks: int, options: dict[str, int]) -> None:
    """The norm counts a tied weight once, and the replicas of a weight once."""
    shape = PipelineShape(ranks, 2, 2 // ranks)
    _, expected_gradients = run_reference(PipelineShape(2, 2 * options.get("dp", 1)))
    unique = [g for s, grads in enumerate(expected_gradients) for n, g in grads.items()
              if not (s == 1 and g.shape == (32, HIDDEN))]  # fmt: skip
    norm = torch.sqrt(sum((g.double().square().sum() for g in unique), torch.zeros(())))
    results = step_on_gloo(interleaved, shape, clip_grad_norm=True, **options)
    for rank, (grads, _, actual_norm) in enumerate(results):
        assert actual_norm == pytest.approx(float(norm), rel=1e-5)
        for stage, stage_gradients in grads.items():
            for name, g in stage_gradients.items():
                expected_shard = _take_shard(
                    expected_gradients[stage][name] * (0.05 / norm), g, rank % options.get("tp", 1)
                )
                assert tensors_close(g, expected_shard, 1e-4), name


def test_gloo_runs_programs_that_need_separate_queues() -> None:
    """The program deadlocks with `per_pair`, and finishes with `per_edge`."""
    shape = PipelineShape(2, 3, 2)
    program = compile(interleaved, shape, tied_weights=True)
    reordered = None
    for rank, stream in enumerate(program.streams):
        receives = [k for k, i in enumerate(stream) if i.op in RECV_OPS]
        for k, next_receive in pairwise(receives):
            if stream[k].op == stream[next_receive].op:
                continue
            # Post it before a receive of the other lane, whose message is sent earlier.
            words = np.insert(np.delete(stream.words, next_receive), k, stream.words[next_receive])
            streams = [*program.streams]
            streams[rank] = Stream(words)
            candidate = replace(program, streams=tuple(streams))
            if _passes_check(candidate, "per_edge") and not _passes_check(candidate, "per_pair"):
                reordered = candidate
    assert reordered is not None
    assert_reference_bits(run(_train_rank, 2, reordered), interleaved, shape)


def test_program_with_deadlocked_hosts_is_refused() -> None:
    results = run(_read_refusal, 2, sends(late=True))
    assert all("host" in hint for hint in results)
    assert run(_read_refusal, 2, sends(late=False)) == ["", ""]


def _read_refusal(rank: int, program: Program) -> str:
    stages = {rank: torch.nn.Linear(HIDDEN, HIDDEN)}
    try:
        executor = Executor(
            program, rank, stages, GlooTransport(program), loss=squared_error, boundary=BOUNDARY,
            execution=ExecutionOptions(allow_identical_stages=True),
        )  # fmt: skip
    except DeadlockError as error:
        return error.hint
    x = torch.ones(2, *BOUNDARY.shape)
    executor.step(x, x)
    return ""


def _passes_check(program: Program, model: Any) -> bool:
    try:
        check(program, model)
    except DeadlockError:
        return False
    return True


class OutOfMemoryStage(nn.Module):
    """Allocates more memory than the address space in its second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        torch.empty(1 << 45 if self.asked == 2 else 1)
        return x * self.weight


def _run_out_of_memory(rank: int) -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    stage = OutOfMemoryStage() if rank else nn.Linear(HIDDEN, HIDDEN)
    executor = Executor(
        program, rank, {rank: stage}, GlooTransport(program), loss=squared_error, boundary=BOUNDARY
    )
    x = torch.ones(4, *BOUNDARY.shape)
    executor.step(x, x)


def test_out_of_memory_error_names_rank_and_instruction() -> None:
    """The waiting processes end, too."""
    with pytest.raises(RankError) as error:
        run(_run_out_of_memory, 2, limit=60)
    first = next(iter(error.value.tracebacks))
    assert first == 1
    message = error.value.tracebacks[first].partition("schedir.errors.ExecutionError: ")[2]
    assert "can't allocate memory" in message and "F 1.1" in message and "rank 1" in message
