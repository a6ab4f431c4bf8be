"""Tests of several programs on the same stages: partial batches, and evaluations between steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError, ProgramSequenceError, SchedirError
from schedir.io.terminal_output import format_error
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.extra_programs import ProgramOrder
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import forward_only, get_built_in_schedules, gpipe, interleaved, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, have_same_bits, make_batch
from tests.laws import make_shape

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-several-programs.md"
GOLDEN = Path(__file__).parents[1] / "golden" / "programs"
ZOO = {name: s for name, s in get_built_in_schedules().items() if s is not forward_only}
ADAM = partial(torch.optim.AdamW, lr=1e-2)


class DropoutStage(nn.Module):
    """A stage that draws random numbers, and counts its training forwards in a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("trained", torch.zeros(()))

    @property
    def tied_weight(self) -> Any:
        return getattr(self.inner, "tied_weight", None)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return nn.functional.dropout(y, 0.2, self.training) if y.is_floating_point() else y


def make_executor(program: Program, stages: list[nn.Module], **options: Any) -> InProcessExecutor:
    usual: dict[str, Any] = {"loss": gpt.loss, "boundary": BOUNDARY, "optimizer": ADAM}
    return InProcessExecutor(program, stages, **usual | options)


def collect_results(
    ranks: InProcessExecutor, stages: list[nn.Module], total: Tensor
) -> list[Tensor]:
    """Return the results of a step: its loss, its norm, weights and gradients."""
    parameters = [p for stage in stages for p in stage.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [total, ranks.executors[0].grad_norm, *parameters, *gradients]
    return [x.detach().clone() for x in tensors]


@pytest.mark.parametrize(
    ("name", "zero"),
    cases(
        [("dualpipe", 3), ("pipedream_2bw", 0)],
        [("interleaved", 2), ("one_f_one_b", 2), ("interleaved", 3), ("dualpipe", 0)],
    ),
)
def test_evaluations_do_not_change_training(name: str, zero: int) -> None:
    """A run with evaluations between and within steps has the bits of a run without them."""
    schedule, m = ZOO[name], 4
    shape = make_shape(schedule, 2, m)
    if name == "pipedream_2bw":
        shape = PipelineShape(2, m, optimizer_steps=2, weight_delay=1)
    is_bidirectional = shape.placement_rows > 1
    program = schedir.compile(
        schedule, shape, tied_weights=True, clip_grad_norm=True, zero=zero,
        progress_model="per_edge",
    )  # fmt: skip
    evaluation = schedir.evaluation_program(program, "per_edge")
    results, losses = [], []
    for evaluates in (False, True):
        stages: list[nn.Module] = [DropoutStage(s) for s in gpt_stages(shape.stages)]
        ranks = make_executor(program, stages, extra_programs=[evaluation])
        steps: list[Tensor] = []
        for k in range(2):
            if evaluates:
                before = ranks.executors[0].random_streams.step
                n = evaluation.shape.microbatches
                inputs, targets, _ = make_batch(n, 99)
                losses += [ranks.evaluate(inputs, targets, order_seed=s) for s in (None, 5)]
                assert ranks.executors[0].random_streams.step == before
                assert all(module.training for module in stages)
            inputs, targets, scale = make_batch(shape.microbatches, k)
            steps += collect_results(ranks, stages, ranks.step(inputs, targets, scale))
        results.append(steps)
    assert have_same_bits(*results) and is_bidirectional == (name == "dualpipe")
    assert all(map(torch.equal, losses[::2], losses[1::2]))
    assert losses[0] != losses[-1]


def test_page_example_runs() -> None:
    (body,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(body, PAGE.name, "exec"), {})


# ---------------------------------------------------------------- processes


def compile_programs(dp: int, zero: int) -> list[Program]:
    """Return programs that train 6 microbatches, train 3, and evaluate 2."""
    how: dict[str, Any] = {"dp": dp, "zero": zero, "progress_model": "per_edge"}
    training = how | {"clip_grad_norm": True, "tied_weights": True}
    large = schedir.compile(gpipe, PipelineShape(2, 6), **training)
    small = schedir.compile(one_f_one_b, PipelineShape(2, 3), **training)
    return [large, small, schedir.compile(forward_only, PipelineShape(2, 2), **how)]


def make_own_stage(rank: int) -> dict[int, nn.Module]:
    return {rank: DropoutStage(gpt_stages(2)[rank])}


def run_with_and_without_evaluations(
    rank: int, kind: str, dp: int, zero: int
) -> list[list[Tensor]]:
    """Return the results of steps of two programs, without and with evaluations between them."""
    results: list[list[Tensor]] = []
    large, small, evaluation = compile_programs(dp, zero)
    for evaluates in (False, True):
        programs = [small, evaluation] if evaluates else [small]
        transport = {"gloo": GlooTransport, "shared": SharedMemoryTransport}[kind](
            large, 20.0, extra_programs=programs
        )
        extra_programs: list[Any] = [
            p if p.has_backward else (p, (1, *BOUNDARY.shape[1:])) for p in programs
        ]
        stages = make_own_stage(transport.rank)
        optimizer = ADAM([p for stage in stages.values() for p in stage.parameters()])
        executor = Executor(
            large, transport.rank, stages, transport, loss=gpt.loss, boundary=BOUNDARY,
            optimizer=optimizer, extra_programs=extra_programs,
        )  # fmt: skip
        tensors: list[Tensor] = []
        for k, program in enumerate([large, small, small, large]):
            m = program.shape.microbatches
            inputs, targets, scale = make_batch(m * dp, k)
            local_batch = [t[transport.dp_rank * m :][:m] for t in (inputs, targets)]
            if evaluates:
                executor.evaluate(local_batch[0][:2, :1], local_batch[1][:2, :1])
            total = executor.step(local_batch[0], local_batch[1], scale, program=program)
            tensors += [torch.zeros(()) if total is None else total, executor.grad_norm]
            with executor.full_parameters():
                tensors += [p.detach().clone() for p in stages[transport.rank].parameters()]
        results.append(tensors)
    return results


@pytest.mark.parametrize(
    ("kind", "dp", "zero"), cases([("shared", 2, 3)], [("gloo", 2, 0), ("shared", 1, 0)])
)
def test_evaluations_do_not_change_training_on_processes(kind: str, dp: int, zero: int) -> None:
    for without, with_evaluations in run(run_with_and_without_evaluations, 2 * dp, kind, dp, zero):
        assert have_same_bits(without, with_evaluations)


def run_out_of_order(rank: int) -> str:
    """Evaluate twice before the second step on rank 0, but once on rank 1."""
    _, program, evaluation = compile_programs(1, 0)
    transport = SharedMemoryTransport(program, 20.0, extra_programs=[evaluation])
    executor = Executor(
        program, rank, make_own_stage(rank), transport, loss=gpt.loss, boundary=BOUNDARY,
        extra_programs=[evaluation],
    )  # fmt: skip
    inputs, targets, scale = make_batch(3)
    with pytest.raises(ProgramSequenceError) as error:
        for evaluations in (1, 1 if rank else 2):
            for _ in range(evaluations):
                executor.evaluate(inputs[:2], targets[:2])
            executor.step(inputs, targets, scale)
    return format_error(error.value)


def test_different_program_order_on_ranks_is_refused() -> None:
    """Rank 0 only sends in an evaluation, so it would continue with the step."""
    first_error, second_error = run(run_out_of_order, 2)
    assert first_error == second_error
    assert first_error + "\n" == (GOLDEN / "sequence.txt").read_text()


def test_timeout_of_program_switch_names_programs() -> None:
    class Deserted(GlooTransport):
        dp_rank = tp_rank = 0

        def __init__(self) -> None: ...

        def check_agreement(self, *_: Any) -> Any:
            raise RuntimeError("Timed out waiting 12000ms for send operation to complete")

    train = schedir.compile(gpipe, PipelineShape(2, 4))
    order = ProgramOrder([train, schedir.evaluation_program(train)], 0, Deserted())
    order.start_run(0)
    message = "this process runs forwards of gpipe after gpipe"
    with pytest.raises(ExecutionError, match=message) as error:
        order.start_run(1)
    assert "same order on all processes" in error.value.hint
    assert isinstance(error.value.__cause__, RuntimeError)


# ---------------------------------------------------------------- refusals


def list_refused_calls() -> list[Callable[[], object]]:
    """Return calls with wrong combinations of programs."""
    clipped: Any = partial(schedir.compile, clip_grad_norm=True)
    after_step: Any = partial(clipped, norm_check="after_step")
    shape, stages = PipelineShape(2, 4), gpt_stages(2, False)
    program = clipped(one_f_one_b, shape)
    evaluation = schedir.evaluation_program(program)
    refused_programs = [
        (program, clipped(interleaved, PipelineShape(2, 4, 2))),
        (program, schedir.compile(gpipe, shape)),
        (program, clipped(gpipe, shape, zero=1)),
        (program, clipped(gpipe, shape, dp=2)),
        (program, program),
        (evaluation, program),
        (after_step(one_f_one_b, shape), after_step(gpipe, shape)),
    ]
    partial_batch = clipped(one_f_one_b, PipelineShape(2, 2))
    ranks = make_executor(
        program, stages, extra_programs=[evaluation, partial_batch], optimizer=None
    )
    single_program = make_executor(program, stages, optimizer=None)
    inputs, targets, _ = make_batch(4)
    return [
        *(partial(make_executor, one, stages, extra_programs=[other])
          for one, other in refused_programs),
        lambda: ranks.step(inputs, targets, program=evaluation),
        lambda: single_program.evaluate(inputs, targets),
        lambda: ranks.evaluate(inputs[:2], targets[:2], program=partial_batch),
    ]  # fmt: skip


def test_incompatible_programs_are_refused() -> None:
    errors = ""
    for call in list_refused_calls():
        with pytest.raises(SchedirError) as error:
            call()
        errors += format_error(error.value) + "\n"
    assert errors == (GOLDEN / "refused.txt").read_text()


class WritingStage(nn.Module):
    """A stage that writes to its weight, or to a buffer, in each forward."""

    def __init__(self, *, parameter: bool, data: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.parameter, self.data = parameter, data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.weight if self.parameter else self.seen
            assert isinstance(target, Tensor)
            (target.data if self.data else target).add_(1.0)
        return x * self.weight


@pytest.mark.parametrize("data", [False, True])
def test_evaluation_undoes_buffer_writes_and_refuses_weight_writes(data: bool) -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2))
    evaluation, x = schedir.evaluation_program(program), torch.ones(2, 1, 4)
    for parameter in (False, True):
        stages = [WritingStage(parameter=parameter, data=data), WritingStage(parameter=False)]
        ranks = InProcessExecutor(
            program, stages, loss=nn.functional.mse_loss, boundary=(1, 4),
            extra_programs=[evaluation], execution=ExecutionOptions(allow_identical_stages=True),
        )  # fmt: skip
        if parameter:
            with pytest.raises(ModelError, match="writes to Parameter weight in an evaluation"):
                ranks.evaluate(x, x)
        else:
            ranks.evaluate(x, x)
        assert not any(stage.get_buffer("seen").any() for stage in stages)
