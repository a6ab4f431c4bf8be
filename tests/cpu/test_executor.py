"""Tests of the executor: refusals, few trained weights, split layers, and released values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import SLOT_KINDS
from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    INSTRUCTIONS,
    SEND_OPS,
    TRANSFER_OPS,
    Scope,
    Value,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime import make_backward_splittable
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.runtime.services.pending_sends import PendingSends
from schedir.schedules import gpipe, one_f_one_b
from schedir.schedules.schedule_algebra import F
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.tiny_stages import (
    BATCH,
    BOUNDARY,
    CONTEXT,
    HIDDEN,
    batch,
    expected,
    gpt_stages,
    gradients,
    same_bits,
    zb,
)

# ---------------------------------------------------------------- refusals


def _two_programs(rank: int) -> None:
    GlooTransport(compile([gpipe, one_f_one_b][rank], PipelineShape(2, 4)))


def _wrong_world(rank: int) -> None:
    GlooTransport(compile(gpipe, PipelineShape(3, 4)))


def _rank_of_another_process(rank: int) -> None:
    program = compile(gpipe, PipelineShape(2, 4))
    transport = GlooTransport(program)
    stages = {0: gpt_stages(2, tied=False)[0]}
    if rank == 1:
        with pytest.raises(ModelError, match="rank is 0, but the transport of this process has"):
            Executor(program, 0, stages, transport, loss=gpt.loss, boundary=BOUNDARY)


def test_the_rank_of_an_executor_is_that_of_its_transport() -> None:
    run(_rank_of_another_process, 2)


@pytest.mark.parametrize("fn", [_two_programs, _wrong_world])
def test_ranks_that_disagree_fail_at_once(fn: Any) -> None:
    with pytest.raises(RankError) as caught:
        run(fn, 2)
    assert all("ModelError" in tb for tb in caught.value.tracebacks.values())


def _in_process(program: Program, stages: list[nn.Module]) -> InProcessExecutor:
    return InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY)


def test_models_that_do_not_fit_are_refused() -> None:
    shape = PipelineShape(2, 2)
    tied, untied = gpt_stages(2), gpt_stages(2, tied=False)
    for program, stages in [
        (compile(gpipe, shape), tied),
        (compile(gpipe, shape, tied_weights=True), untied),
        (compile(gpipe, shape, tp=2, tied_weights=True), tied),
        (compile(gpipe, shape, tied_weights=True), tied[:1]),
    ]:
        with pytest.raises(ModelError):
            _in_process(program, stages)


def test_a_failing_stage_is_named() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such luck\nat all")

    program = compile(gpipe, PipelineShape(2, 2), tied_weights=False)
    stages = gpt_stages(2, tied=False)
    stages[1] = Broken(1, 1)
    with pytest.raises(ExecutionError) as caught:
        _in_process(program, stages).step(*batch(2))
    site = caught.value.sites[0]
    assert (site.rank, str(site.instr)) == (1, "F 1.0") or str(site.instr) == "F 1.1"
    with pytest.raises(ExecutionError):
        _in_process(program, stages).step([], [])


@pytest.mark.parametrize("wrong", [lambda x: (x, x), lambda x: x[:, :1], lambda x: x.double()])
def test_what_does_not_fit_the_boundary_is_refused(wrong: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt_stages(2, tied=False)[0]

        def forward(self, x: Tensor) -> Any:
            return wrong(self.inner(x))

    program = compile(gpipe, PipelineShape(2, 2))
    stages = [Odd(), gpt_stages(2, tied=False)[1]]
    with pytest.raises(ExecutionError) as caught:
        _in_process(program, stages).step(*batch(2))
    assert isinstance(caught.value.__cause__, ModelError)
    assert caught.value.sites[0].rank == 0


def test_what_cannot_be_split_runs_whole_with_one_warning_each() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    x = torch.randn(3, BATCH, CONTEXT, HIDDEN)
    shape = PipelineShape(2, 3)
    one, other = [Plain(), Plain()], [Plain(), Plain()]
    run_sequential(one, x, x + 1, loss=loss)
    ranks = InProcessExecutor(compile(zb, shape), other, loss=loss, boundary=BOUNDARY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.step(x, x + 1)
    assert same_bits(gradients(one), gradients(other))
    assert len(caught) == 2 and all("Plain" in str(w.message) for w in caught)


class Scale(nn.Module):
    """Multiplies by a weight, whose dtype may differ from that of the boundary."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((HIDDEN,), 1.5, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight.float() + self.bias)


def _squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


@pytest.mark.parametrize("schedule", [one_f_one_b, zb])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (0, 1, 2), "parameterless", "mixed"])
@pytest.mark.filterwarnings("ignore:.* is not split")
def test_stages_that_have_little_to_train(schedule: Any, frozen: Any) -> None:
    x = torch.randn(4, BATCH, CONTEXT, HIDDEN, generator=torch.Generator().manual_seed(0))

    def stages() -> list[nn.Module]:
        if frozen == "parameterless":
            return [nn.Tanh(), Scale(), nn.Tanh()]
        if frozen == "mixed":
            return [Scale(torch.bfloat16), Scale(), Scale(torch.float64)]
        made: list[nn.Module] = [Scale(), Scale(), Scale()]
        for k in frozen:
            made[k].requires_grad_(False)
        return made

    one, other = stages(), stages()
    total = run_sequential(one, x, x + 1, loss=_squares, grad_scale=0.5)
    program = compile(schedule, PipelineShape(3, 4), clip_grad_norm=True)
    ranks = InProcessExecutor(
        program, other, loss=_squares, boundary=BOUNDARY, gradients=GradientOptions(max_norm=1e9)
    )
    for _ in range(2):
        assert torch.equal(ranks.step(x, x + 1, 0.5), total)
        assert same_bits(gradients(one), gradients(other))
    assert frozen == (0, 1, 2) or any(g.any() for grads in gradients(one) for g in grads.values())


def test_a_frozen_tied_weight_is_refused() -> None:
    stages = gpt_stages(2)
    stages[0].requires_grad_(False)
    with pytest.raises(ModelError) as caught:
        _in_process(compile(gpipe, PipelineShape(2, 2), tied_weights=True), stages)
    assert "stage 0" in caught.value.fact and "frozen" in caught.value.fact


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_sent_is_let_go_as_the_step_goes(overlap: bool) -> None:
    shape = PipelineShape(4, 16)
    program = compile(
        one_f_one_b, shape, tied_weights=True, overlap=overlap, progress_model="per_edge"
    )
    ranks = _in_process(program, gpt_stages(4))
    most = {(r, op): 0 for r in range(4) for op in SEND_OPS}
    for r, rank in enumerate(ranks.executors):

        def watched(
            index: int, r: int = r, rank: Any = rank, call: Any = rank.runner.run_instruction
        ) -> None:
            call(index)
            for op in SEND_OPS:
                held = sum(
                    rank.state.stream[sent].op == op
                    for sent in rank.state.service(PendingSends).works
                )
                most[r, op] = max(most[r, op], held)

        rank.runner.run_instruction = watched  # type: ignore[method-assign]
    ranks.step(*batch(16), order_seed=1)
    assert not any(rank.state.service(PendingSends).works for rank in ranks.executors)
    # The tensors that the schedule holds, and one or two that are released after the next send.
    assert all(held <= 4 - r + 1 for (r, _), held in most.items()) and most[0, SEND_OPS[0]] >= 3


def test_optimizers_may_forget_gradients_between_steps() -> None:
    """Three steps give the same weights as the reference, with and without zero_grad between."""
    shape, trained = PipelineShape(2, 3), []
    for how in ("kept", "forgotten", "reference"):
        stages = gpt_stages(2, tied=False)
        ranks = _in_process(compile(one_f_one_b, shape), stages)
        for step in range(3):
            inputs, targets, scale = batch(3, seed=step)
            if how == "reference":
                run_sequential(stages, inputs, targets, loss=gpt.loss, grad_scale=scale)
            else:
                ranks.step(inputs, targets, scale)
            for p in (p for s in stages for p in s.parameters()):
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=0.5)
                if how == "forgotten":  # like zero_grad(set_to_none=True)
                    p.grad = None
        trained.append([{n: p.detach() for n, p in s.named_parameters()} for s in stages])
    assert same_bits(trained[0], trained[1]) and same_bits(trained[0], trained[2])
    assert not same_bits(trained[0], [dict(s.named_parameters()) for s in gpt_stages(2, False)])


class Block(nn.Module):
    """A residual block of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


def _blocks() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Block(), Block()]


def test_split_layers_leave_their_gradients_to_w() -> None:
    x = torch.randn(4, BATCH, CONTEXT, HIDDEN, generator=torch.Generator().manual_seed(0))
    one, other = _blocks(), [make_backward_splittable(block) for block in _blocks()]
    run_sequential(one, x, x + 1, loss=_squares)
    ranks = InProcessExecutor(
        compile(zb, PipelineShape(2, 4)), other, loss=_squares, boundary=BOUNDARY
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks.step(x, x + 1)
    assert same_bits(gradients(one), gradients(other))
    plain = InProcessExecutor(
        compile(zb, PipelineShape(2, 4)), _blocks(), loss=_squares, boundary=BOUNDARY
    )
    with pytest.warns(
        UserWarning, match=r"stage [01].*layers\.0 \(Linear\), layers\.2.*make_backward_splittable"
    ):
        plain.step(x, x + 1)


def test_linears_whose_weights_have_hooks_run_whole() -> None:
    stages = [make_backward_splittable(block) for block in _blocks()]
    for block in stages:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.register_hook(lambda grad: grad / 2)
    x = torch.randn(4, BATCH, CONTEXT, HIDDEN)
    ranks = InProcessExecutor(
        compile(zb, PipelineShape(2, 4)), stages, loss=_squares, boundary=BOUNDARY
    )
    with pytest.warns(UserWarning, match=r"layers\.0 \(SplitLinear\)"):
        ranks.step(x, x + 1)


def test_a_split_that_does_not_happen_is_refused() -> None:
    """This happens under torch.compile, for example, whose backward is one compiled graph."""

    class Traced(Block):
        def forward(self, x: Tensor) -> Tensor:
            weight, bias, *_ = self.parameters()
            return x + torch.nn.functional.linear(x, weight, bias)[..., :HIDDEN]

    x = torch.randn(4, BATCH, CONTEXT, HIDDEN)
    stages = [make_backward_splittable(Traced()), make_backward_splittable(Block())]
    ranks = InProcessExecutor(
        compile(zb, PipelineShape(2, 4)), stages, loss=_squares, boundary=BOUNDARY
    )
    with pytest.raises(ExecutionError) as caught:
        ranks.step(x, x + 1)
    assert "Traced (stage 0)" in str(caught.value) and "I 0." in str(caught.value)


def test_evaluation_has_no_gradients() -> None:
    shape = PipelineShape(2, 3)
    program = compile(lambda r, P, m: m * F, shape)
    stages = gpt_stages(2, tied=False)
    loss, _ = expected(shape, tied=False)
    got = _in_process(program, stages).step(*batch(3))
    assert torch.equal(got, loss)
    assert not any(g.any() for grads in gradients(stages) for g in grads.values())


def test_rows_do_not_lie() -> None:
    """Each instruction of a middle stage reads, stores and clears the values its row declares."""
    met = set()
    for schedule, recompute in ((one_f_one_b, None), (zb, None), (one_f_one_b, "all")):
        program = compile(schedule, PipelineShape(3, 3), tied_weights=True, recompute=recompute)
        ranks = InProcessExecutor(program, gpt_stages(3), loss=gpt.loss, boundary=BOUNDARY)
        middle = ranks.executors[1]
        call = middle.runner.run_instruction

        def watched(index: int, call: Any = call, middle: Executor = middle) -> None:
            instr = middle.state.stream[index]
            row = INSTRUCTIONS[instr.op]

            def held() -> set[Value]:
                return {
                    t
                    for t in SLOT_KINDS
                    if any(
                        middle.state.slot_tables[t].values[at] is not None
                        for at in middle.state.slot_assignment.get((t, 1, instr.mb), {}).values()
                    )
                }

            before = held()
            call(index)
            after, known = held(), {*SLOT_KINDS}
            if row.scope is Scope.MICROBATCH:
                there = {t for t in known if middle.program.takes_memory(t)}  # there are no skips
                assert {*row.needs} & there <= before, instr
                assert after - before == {*row.gives} & there - before, instr
                assert before - after == {*row.frees} & there, instr
                met.add(row.op)

        middle.runner.run_instruction = watched  # type: ignore[method-assign]
        ranks.step(*batch(3))
    assert met == {op for op in COMPUTE_OPS + TRANSFER_OPS if "Skip" not in op.name}
