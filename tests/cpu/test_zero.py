"""Tests that ZeRO levels 1 to 3 between processes have the bits of plain data parallelism."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from benchmarks.zero import Case, find_differences, train
from schedir import PipelineShape
from schedir.errors import ModelError
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.schedules import dualpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import ALL, cases
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

CASES = {
    "interleaved, bfloat16": Case(interleaved, PipelineShape(2, 2, 2), half=True),
    "DualPipe, not clipped": Case(
        dualpipe, PipelineShape(2, 4, placement="mirror"), options={"clip_grad_norm": False}
    ),
    "three replicas, one unsharded stage, bfloat16": Case(
        looped_bfs, PipelineShape(1, 3, 3), dp=3, half=True, options={"unsharded_stages": 1}
    ),
    # Tests of three-dimensional parallelism also have these traits.
    "1F1B": Case(one_f_one_b, PipelineShape(2, 3)),
    "looped_bfs": Case(looped_bfs, PipelineShape(2, 3, 2)),
    "ZB-H1, bfloat16": Case(zb_h1, PipelineShape(2, 4), half=True),
    "recomputed": Case(interleaved, PipelineShape(2, 4, 2), options={"recompute": "all"}),
    "tensor-parallel": Case(looped_bfs, PipelineShape(1, 2, 2), tp=2),
    "one rank": Case(looped_bfs, PipelineShape(1, 3, 3)),
    "three replicas": Case(one_f_one_b, PipelineShape(1, 3), dp=3),
}


def _train_levels(rank: int, case: Case) -> Any:
    torch.set_num_threads(1)
    return [train(rank, case, zero, steps=2) for zero in case_levels(case)]


def case_levels(case: Case) -> list[int]:
    """Return 0 and another level, or all levels with ALL_CASES=1.

    Only level 3 depends on the number of unsharded stages.
    """
    return [0, 1, 2, 3] if ALL else [0, (2, 1, 3)[[*CASES.values()].index(case) % 3]]


@cache
def _train_case(name: str) -> list[list[Any]]:
    """Train a case at each level, and return the results of each process by level and rank."""
    case = CASES[name]
    by_rank = run(_train_levels, case.processes, case)
    return [[results[k] for results in by_rank] for k in range(len(by_rank[0]))]


@pytest.mark.parametrize("name", cases([*CASES][:3], [*CASES][3:]))
def test_zero_levels_have_bits_of_plain_replicas(name: str) -> None:
    assert not find_differences(*_train_case(name))
    other = [*CASES][name == next(iter(CASES))]
    assert find_differences(_train_case(name)[0], _train_case(other)[0])


class SmallParameters(nn.Module):
    """A stage with fewer elements than replicas in some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)) * self.one) + self.none.sum()
        return y.expand(-1, 3)


class NoParameters(nn.Module):
    """A stage without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def _make_executor(
    zero: int, transport: Any = GlooTransport, **how: Any
) -> tuple[Executor, list[nn.Module]]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [SmallParameters(), NoParameters(), SmallParameters()]
    options: dict[str, Any] = {"clip_grad_norm": True} | {
        k: how.pop(k) for k in ("clip_grad_norm", "reduce_scatter_at") if k in how
    }
    program = schedir.compile(
        interleaved, PipelineShape(1, 4, 3), dp=2, progress_model="per_edge", zero=zero, **options
    )
    sgd = torch.optim.SGD([p for s in stages for p in s.parameters()], 0.1, momentum=0.9)
    return Executor(
        program, 0, stages, transport(program), loss=nn.functional.mse_loss, boundary=(2, 3),
        optimizer=sgd, **how,
    ), stages  # fmt: skip


def _make_batch(executor: Executor) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(executor.state.transport.dp_rank)
    x, y = torch.randn(2, 4, 2, 3, generator=numbers)
    return x, y


def _collect_weights(executor: Executor, stages: list[nn.Module]) -> list[Tensor]:
    with executor.full_parameters():
        return [p.detach().clone() for stage in stages for p in stage.parameters()]


def _run_processes(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for zero in range(4):
        scaled = GradientOptions(loss_scale=LossScale(8.0))
        executor, stages = _make_executor(zero, transport=SharedMemoryTransport, gradients=scaled)
        for _ in range(2):
            executor.step(*_make_batch(executor))
        trained = [*_collect_weights(executor, stages), executor.grad_norm.clone()]
        results.setdefault("trained", []).append(trained)
    for zero in range(1, 4):  # if one replica has a value that is not finite, all replicas skip
        executor, stages = _make_executor(zero, clip_grad_norm=False)
        before = _collect_weights(executor, stages)
        x, y = _make_batch(executor)
        y[1, 0, 0] = torch.nan if rank else 0.0
        executor.step(x, y)
        is_unchanged = have_same_bits(before, _collect_weights(executor, stages))
        results.setdefault("finite", []).append((bool(executor.finite_updates), is_unchanged))
    for zero in (0, 2, 3):
        reduce_at = "each_backward" if zero else "update_end"
        executor, stages = _make_executor(zero, reduce_scatter_at=reduce_at)
        executor.step(*_make_batch(executor))
        results.setdefault("turns", []).append(_collect_weights(executor, stages))
    # The second does not raise the version counter.
    for get_tensor in (nn.Parameter.detach, lambda p: p.data):
        executor, stages = _make_executor(3)
        try:
            with executor.full_parameters(), torch.no_grad():
                for p in stages[0].parameters():
                    get_tensor(p).fill_(float(rank))
        except ModelError as error:
            results.setdefault("written", []).append(str(error))
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run(_run_processes, 2)


def test_small_parameters_have_bits_of_plain_replicas(results: list[dict[str, Any]]) -> None:
    """The replicas have a loss scale, and send their messages through shared memory."""
    for result in results:
        plain, *sharded = result["trained"]
        assert all(have_same_bits(plain, other) for other in sharded)


def test_nonfinite_gradient_of_one_replica_is_skipped_on_all(results: list[dict[str, Any]]) -> None:
    assert [result["finite"] for result in results] == [[(False, True)] * 3] * 2


def test_repeated_reduce_scatters_equal_one_reduction(results: list[dict[str, Any]]) -> None:
    for result in results:
        once, *repeated = result["turns"]
        for other in repeated:
            torch.testing.assert_close(other, once)
        assert have_same_bits(*repeated)


def test_different_writes_of_replicas_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["written"]) == 2
        assert all("do not agree on the values of" in text for text in result["written"])
