"""Tests of forwards that write to trained weights, which is refused if the weights have copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import chimera, gpipe, interleaved_zb, looped_bfs, one_f_one_b, pipedream_2bw

WIDTH, BATCH = 4, 3
torch.set_num_threads(1)


class WritingLayer(nn.Linear):
    """Writes to its weight in each training forward, in one of several ways."""

    def __init__(self, write: str) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](self)
        return super().forward(x)


@torch.no_grad()
def clamp(layer: nn.Linear) -> None:
    layer.weight.clamp_(-0.1, 0.1)


def clamp_data(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


def replace_data(layer: nn.Linear) -> None:
    layer.weight.data = nn.functional.normalize(layer.weight.data)


def renormalize(layer: nn.Linear) -> None:
    nn.functional.embedding(torch.tensor([0]), layer.weight, max_norm=0.1)


def replace_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clamp(-0.1, 0.1))


WRITES: dict[str, Callable[[nn.Linear], None]] = {
    "clamp": clamp,
    "clamp_data": clamp_data,
    "replace_data": replace_data,
    "renormalize": renormalize,
    "replace_parameter": replace_parameter,
}


class TiedHead(nn.Module):
    """Multiplies by the transpose of another stage's weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight.t()
        return y


def make_linears(count: int) -> list[Any]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


def make_executor(
    schedule: Any, shape: PipelineShape, stages: list[Any], lr: float = 0.5, **how: Any
) -> InProcessExecutor:
    ties = schedir.find_tied_weights(stages)
    program = schedir.compile(schedule, shape, tied_weights=ties, **how)
    return InProcessExecutor(
        program, stages, loss=nn.functional.mse_loss, boundary=(BATCH, WIDTH), tied_weights=ties,
        optimizer=lambda p: torch.optim.SGD(p, lr),
    )  # fmt: skip


def make_on_one_rank(stages: list[Any], **how: Any) -> InProcessExecutor:
    return make_executor(looped_bfs, PipelineShape(1, 2, 2), stages, **how)


def make_batch(microbatches: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(microbatches, BATCH, WIDTH, generator=numbers)


def run_step(ranks: InProcessExecutor, microbatches: int) -> Tensor:
    x = make_batch(microbatches)
    return ranks.step(x, x)


def make_stages(write: str, tied: bool, count: int) -> list[Any]:
    torch.manual_seed(0)
    first = WritingLayer(write)
    return [first, *make_linears(count - 1 - tied), *([TiedHead(first.weight)] if tied else [])]


# Programs in which the weight of the first stage has copies, and whether the last stage has it.
COPIES: dict[str, tuple[Any, PipelineShape, bool]] = {
    "two holders": (chimera, PipelineShape(4, 4, 2, "mirror"), False),
    "tied on two ranks": (one_f_one_b, PipelineShape(2, 4), True),
    "tied on one rank": (looped_bfs, PipelineShape(1, 4, 2), True),
    "optimizer_steps": (
        pipedream_2bw, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1), False,
    ),
}  # fmt: skip


def make_with_copies(copies: str, write: str) -> InProcessExecutor:
    schedule, shape, tied = COPIES[copies]
    return make_executor(schedule, shape, make_stages(write, tied, shape.stages))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("copies", COPIES)
def test_write_to_weight_with_copies_is_refused(copies: str, write: str) -> None:
    ranks = make_with_copies(copies, write)
    with pytest.raises((ModelError, ExecutionError)) as caught:
        run_step(ranks, 4)
    assert "stage 0 writes to its weight weight in a " in str(caught.value)
    assert "write to weights between steps" in caught.value.hint


@pytest.mark.parametrize("write", ["clamp", "replace_data", "renormalize"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_write_to_sharded_weight_is_refused(level: int, write: str) -> None:
    ranks = make_on_one_rank(make_stages(write, False, 2), zero=level)
    written = "the data of weight" if write == "replace_data" else "weight"
    message = f"a forward or a backward writes to {written}, but each replica"
    with pytest.raises(ExecutionError, match=message):
        run_step(ranks, 2)


def test_later_write_to_sharded_weight_is_refused() -> None:
    stages = make_stages("replace_data", False, 2)
    writes = stages[0].eval()
    forward, calls = WRITES["replace_data"], list[nn.Linear]()

    def write_after_6_calls(layer: nn.Linear) -> None:
        calls.append(layer)
        if len(calls) > 6:
            forward(layer)

    ranks = make_on_one_rank(stages, zero=2)
    try:
        WRITES["replace_data"] = write_after_6_calls
        for _ in range(3):
            run_step(ranks, 2)
        with pytest.raises(ExecutionError, match="writes to the data of weight"):
            run_step(ranks, 2)
    finally:
        WRITES["replace_data"] = forward
    assert writes is calls[0]


def test_assignment_to_data_with_cpu_step_is_refused() -> None:
    ranks = make_on_one_rank(make_stages("replace_data", False, 2), optimizer_placement="cpu_step")
    message = "assigns a new tensor to the data of weight of stage 0"
    with pytest.raises(ExecutionError, match=message) as caught:
        run_step(ranks, 2)
    assert "copy_" in caught.value.hint


# ---------------------------------------------------------------- allowed writes

ALLOWED_PROGRAMS: dict[str, dict[str, Any]] = {
    "as it is": {}, "on the host": {"optimizer_placement": "host"}, "looked at later": {
        "clip_grad_norm": True, "norm_check": "after_step"
    },
}  # fmt: skip


@pytest.mark.parametrize("write", ["clamp", "clamp_data", "replace_data", "renormalize"])
@pytest.mark.parametrize("program", ALLOWED_PROGRAMS)
def test_written_weight_without_copies_trains_like_plain_loop(program: str, write: str) -> None:
    stages, plain_stages = make_stages(write, False, 2), make_stages(write, False, 2)
    ranks = make_on_one_rank(stages, lr=0.01, **ALLOWED_PROGRAMS[program])
    optimizer = torch.optim.SGD([p for stage in plain_stages for p in stage.parameters()], 0.01)
    for _ in range(3):
        run_step(ranks, 2)
        optimizer.zero_grad()
        for x in make_batch(2):
            nn.functional.mse_loss(plain_stages[1](plain_stages[0](x)), x).backward()
        if "clip_grad_norm" in ALLOWED_PROGRAMS[program]:
            nn.utils.clip_grad_norm_([p for s in plain_stages for p in s.parameters()], 1.0)
        optimizer.step()
    ranks.validate_last_update()
    for stage, other in zip(stages, plain_stages, strict=True):
        torch.testing.assert_close(stage.weight, other.weight)


@pytest.mark.parametrize("copies", COPIES)
def test_stage_that_only_reads_weights_runs(copies: str) -> None:
    WRITES["none"] = lambda layer: None
    try:
        ranks = make_with_copies(copies, "none")
        for _ in range(2):
            assert run_step(ranks, 4).isfinite()
    finally:
        del WRITES["none"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_write_check_does_not_read_freed_memory(level: int) -> None:
    """With ZeRO 3 a weight-gradient instruction runs while the full weights are freed."""
    stages = [make_backward_splittable(stage) for stage in make_linears(2)]
    stages[1].weight = stages[0].weight
    active = {"unsharded_stages": 1} if level == 3 else {}
    ranks = make_executor(interleaved_zb, PipelineShape(1, 4, 2), stages, zero=level, **active)
    assert run_step(ranks, 4).isfinite() and run_step(ranks, 4).isfinite()


def test_write_check_runs_only_in_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedir.runtime.autograd import stage_context

    ranks = make_executor(chimera, PipelineShape(2, 4, placement="mirror"), make_linears(2))
    run_step(ranks, 4)
    calls: list[Any] = []
    monkeypatch.setattr(stage_context, "compute_checksums", calls.append)
    monkeypatch.setattr(stage_context, "get_write_traces", calls.append)
    run_step(ranks, 4)
    assert not calls


def test_program_without_copies_has_no_write_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedir.runtime.autograd import stage_context

    monkeypatch.setattr(
        stage_context, "get_write_traces", lambda _: pytest.fail("it was looked at")
    )
    ranks = make_executor(gpipe, PipelineShape(2, 4), make_linears(2))
    assert run_step(ranks, 4).isfinite()
