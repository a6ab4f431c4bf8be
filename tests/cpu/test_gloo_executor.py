"""Tests that the executor has the bits of the reference over Gloo, in real processes."""

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
from schedir.models import gpt
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.verify.check import check
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.tiny_stages import (
    BOUNDARY,
    HIDDEN,
    PLANS,
    batch,
    config,
    expected,
    gpt_executor,
    gpt_stages,
    gradients,
    gradients_by_stage,
    own_batch,
    same_bits,
    zb,
)
from tests.pure.test_blocking_hosts import sends

# ---------------------------------------------------------------- real processes


def _one_rank(rank: int, schedule: Any, shape: PipelineShape, options: dict[str, Any]) -> Any:
    """Run training steps in a process, and return gradients by stage, loss and coordinates."""
    program = compile(schedule, shape, progress_model="per_edge", tied_weights=True, **options)
    transport = GlooTransport(program)
    executor = gpt_executor(
        program,
        transport,
        gradients=GradientOptions(max_norm=0.05 if program.clip_grad_norm else None),
    )
    for _ in range(2):  # twice, since a step must leave no state behind
        loss = executor.step(*own_batch(program, transport))
    timeline = gather_timeline(executor, transport)
    if timeline is not None:
        assert timeline.kind == "measured" and 0 < timeline.bubble < 1
        assert (timeline.spans["end"] >= timeline.spans["start"]).all()
    return gradients_by_stage(executor), loss, float(executor.grad_norm)


def step_on_gloo(schedule: Any, shape: PipelineShape, **options: Any) -> list[Any]:
    world = shape.ranks * options.get("tp", 1) * options.get("dp", 1)
    return run(_one_rank, world, schedule, shape, options)


@pytest.mark.parametrize(("schedule", "shape"), PLANS[:9])
def test_gloo_gives_the_bits_of_the_reference(schedule: Any, shape: PipelineShape) -> None:
    loss, right = expected(shape)
    results = step_on_gloo(schedule, shape)
    got = {s: g for grads, _, _ in results for s, g in grads.items()}
    assert same_bits([got[s] for s in range(shape.stages)], right)
    assert [torch.equal(l, loss) for _, l, _ in results if l is not None] == [True]


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def test_tensor_parallel_schedules_have_the_same_bits_and_are_close_to_one_rank() -> None:
    shape = PipelineShape(2, 4)
    _, right = expected(shape)
    results = {s.__name__: step_on_gloo(s, shape, tp=2) for s in (gpipe, one_f_one_b, zb)}
    first = results["gpipe"]
    for other in results.values():
        for (grads, _, _), (same, _, _) in zip(first, other, strict=True):
            assert same_bits(list(grads.values()), list(same.values()))
    cfg = config(shape.stages)
    for stage in range(shape.stages):
        shards = [first[stage * 2 + t][0][stage] for t in range(2)]
        module = gpt.build_stage(cfg, stage, shape.stages)
        for name, parameter in module.named_parameters():
            whole = _joined([s[name] for s in shards], parameter)
            assert close(whole, right[stage][name], 1e-5), name


def _joined(shards: list[Tensor], parameter: Tensor) -> Tensor:
    """Return a gradient from its shards, which are cut in their shorter dimension, or whole."""
    if shards[0].shape == parameter.shape:
        assert torch.equal(shards[0], shards[1])
        return shards[0]
    dim = next(d for d in range(parameter.dim()) if shards[0].shape[d] != parameter.shape[d])
    return torch.cat(shards, dim).narrow(dim, 0, parameter.shape[dim])


def _share(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """Return a tensor-parallel rank's slice of a gradient without padding."""
    for dim, (all_of_it, own) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if all_of_it != own:
            return whole.narrow(dim, rank * own, own)
    return whole


def test_data_parallel_equals_one_replica() -> None:
    loss, right = expected(PipelineShape(2, 4))
    results = step_on_gloo(one_f_one_b, PipelineShape(2, 2), dp=2)
    for grads, _, _ in results:
        for stage, got in grads.items():
            assert all(close(got[n], right[stage][n], 1e-6) for n in got)
    losses = [l for _, l, _ in results if l is not None]
    assert float(sum(losses)) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (2, {"tp": 2}), (2, {"dp": 2}), (1, {"tp": 2, "dp": 2})],
)
def test_clipping_counts_every_parameter_once(ranks: int, options: dict[str, int]) -> None:
    """The norm counts a tied weight once, and the replicas of a weight once."""
    shape = PipelineShape(ranks, 2, 2 // ranks)
    _, right = expected(PipelineShape(2, 2 * options.get("dp", 1)))
    unique = [g for s, grads in enumerate(right) for n, g in grads.items()
              if not (s == 1 and g.shape == (32, HIDDEN))]  # fmt: skip
    norm = torch.sqrt(sum((g.double().square().sum() for g in unique), torch.zeros(())))
    results = step_on_gloo(interleaved, shape, clip_grad_norm=True, **options)
    for rank, (grads, _, got) in enumerate(results):
        assert got == pytest.approx(float(norm), rel=1e-5)
        for stage, mine in grads.items():
            for name, g in mine.items():
                whole = _share(right[stage][name] * (0.05 / norm), g, rank % options.get("tp", 1))
                assert close(g, whole, 1e-4), name


def test_gloo_gives_what_its_model_promises() -> None:
    """A program that only `per_edge` finishes runs, since lanes between two ranks are separate."""
    shape = PipelineShape(2, 3, 2)
    program = compile(interleaved, shape, tied_weights=True)
    found = None
    for rank, stream in enumerate(program.streams):
        receives = [k for k, i in enumerate(stream) if i.op in RECV_OPS]
        for k, late in pairwise(receives):
            if stream[k].op == stream[late].op:
                continue
            # Post it before a receive of the other lane, whose message is sent earlier.
            words = np.insert(np.delete(stream.words, late), k, stream.words[late])
            streams = [*program.streams]
            streams[rank] = Stream(words)
            other = replace(program, streams=tuple(streams))
            if _finishes(other, "per_edge") and not _finishes(other, "per_pair"):
                found = other
    assert found is not None
    _, right = expected(shape)
    results = run(_run_program, 2, found)
    got = {s: g for grads in results for s, g in grads.items()}
    assert same_bits([got[s] for s in range(shape.stages)], right)


def test_a_program_on_which_hosts_would_wait_for_each_other_is_refused() -> None:
    results = run(_refusal, 2, sends(late=True))
    assert all("host" in hint for hint in results)
    assert run(_refusal, 2, sends(late=False)) == ["", ""]


def _refusal(rank: int, program: Program) -> str:
    stages = {rank: torch.nn.Linear(HIDDEN, HIDDEN)}
    try:
        executor = Executor(
            program,
            rank,
            stages,
            GlooTransport(program),
            loss=_squares,
            boundary=BOUNDARY,
            execution=ExecutionOptions(allow_identical_stages=True),
        )
    except DeadlockError as error:
        return error.hint
    x = torch.ones(2, *BOUNDARY.shape)
    executor.step(x, x)
    return ""


def _squares(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().sum()


def _finishes(program: Program, model: Any) -> bool:
    try:
        check(program, model)
    except DeadlockError:
        return False
    return True


def _run_program(rank: int, program: Program) -> dict[int, dict[str, Tensor]]:
    transport = GlooTransport(program)
    stages = {s: m for s, m in enumerate(gpt_stages(4)) if s in program.shape.stages_on_rank[rank]}
    executor = Executor(program, rank, stages, transport, loss=gpt.loss, boundary=BOUNDARY)
    executor.step(*batch(program.shape.microbatches))
    return {s: gradients([m])[0] for s, m in stages.items()}


# ---------------------------------------------------------------- failures


class Greedy(nn.Module):
    """Requests more memory than the address space in its second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        torch.empty(1 << 45 if self.asked == 2 else 1)
        return x * self.weight


def _greedy(rank: int) -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    stage = Greedy() if rank else nn.Linear(HIDDEN, HIDDEN)
    executor = Executor(
        program,
        rank,
        {rank: stage},
        GlooTransport(program),
        loss=lambda y, _: y.square().sum(),
        boundary=BOUNDARY,
    )
    executor.step(torch.ones(4, *BOUNDARY.shape), torch.ones(4))


def test_out_of_memory_names_rank_and_instruction() -> None:
    """The other processes, which wait for it, are ended too."""
    with pytest.raises(RankError) as error:
        run(_greedy, 2, limit=60)
    first = next(iter(error.value.tracebacks))
    assert first == 1
    said = error.value.tracebacks[first].partition("schedir.errors.ExecutionError: ")[2]
    assert "can't allocate memory" in said and "F 1.1" in said and "rank 1" in said
