"""Tests of several tensors between stages, of any shapes and dtypes, with and without gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import infer_boundaries, measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.schedules import (
    chimera,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream_2bw,
    zb_h1,
    zb_v,
)
from schedir.transports.gloo import GlooTransport
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import cases
from tests.cpu.function_stages import (
    COUNT,
    FLOAT_AND_INT_BOUNDARIES,
    TWO_FLOAT_BOUNDARIES,
    FunctionStage,
    X,
    get_weight_gradient,
    make_executor,
    output_sum,
    return_two_outputs,
    squared_error_sum,
)
from tests.cpu.gloo_processes import run
from tests.cpu.multi_tensor_stages import (
    copy_gradients,
    draw_stages,
    have_same_bits,
    make_batch,
    squared_error,
)

torch.set_num_threads(1)


def test_several_updates_leave_gradients_of_last_update() -> None:
    """There is no optimizer, so each update has the same weights."""
    shape = PipelineShape(3, 8, optimizer_steps=2, weight_delay=1)
    stages, boundary = draw_stages(3, 3)
    plain = deepcopy(stages)
    inputs, targets, keywords = make_batch(8)
    InProcessExecutor(
        compile(pipedream_2bw, shape), stages, loss=squared_error, boundary=boundary
    ).step(inputs, targets, keywords=keywords, order_seed=1)
    run_sequential(plain, inputs[4:], targets[4:], loss=squared_error, keywords=keywords[4:])
    assert have_same_bits(copy_gradients(stages), copy_gradients(plain))


def write_to_input(w: Tensor, x: Tensor, count: Tensor) -> Tensor:
    return w * x * count.add_(1)


def test_received_integers_may_be_written_in_place() -> None:
    """Each microbatch receives its own tensor. On one rank it is the previous stage's tensor."""
    world = make_executor(return_two_outputs, write_to_input)
    for _ in range(2):
        assert torch.equal(world.step(X, X), 2 * (COUNT.float()).square().sum())
    with pytest.raises(ExecutionError) as error:
        make_executor(return_two_outputs, write_to_input, ranks=1).step(X, X)
    assert "in place" in error.value.fact and str(error.value.sites[0].instr) == "F 1.0"


def test_write_to_one_input_keeps_other_input() -> None:
    """A stage writes to one of two tensors, and autograd has saved the other."""

    number, count = FLOAT_AND_INT_BOUNDARIES
    world = make_executor(
        lambda w, x: (w * x, COUNT.float(), COUNT.clone()),
        lambda w, x, table, count: w * x * table + count.add_(1),
        boundary=(number, Boundary((4,), requires_grad=False), count), loss=output_sum,
    )  # fmt: skip
    world.step(X, X)
    assert get_weight_gradient(world, 0) == get_weight_gradient(world, 1) == [0.0, 2.0, 4.0, 6.0]


def test_inplace_stage_writes_to_copies_of_its_inputs() -> None:
    """All inputs are copied, because the previous stage is on the same rank and may save them."""

    class InplaceStage(FunctionStage):
        inplace = True

    def keep_output(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(COUNT.clone())
        return w * x, outputs[-1]

    outputs: list[Tensor] = []
    stages = [FunctionStage(keep_output), InplaceStage(write_to_input)]
    world = InProcessExecutor(
        compile(interleaved, PipelineShape(1, 2, 2)),
        stages,
        loss=squared_error_sum,
        boundary=FLOAT_AND_INT_BOUNDARIES,
        execution=ExecutionOptions(record_timestamps=False),
    )
    assert torch.equal(world.step(X, X), 2 * COUNT.float().square().sum())
    assert all(torch.equal(count, COUNT) for count in outputs)


@pytest.mark.parametrize("own", [1, 2], ids=["one rank", "two ranks"])
def test_tensor_sent_twice_gets_sum_of_both_gradients(own: int) -> None:
    world = make_executor(
        lambda w, x: (w * x,) * 2,
        lambda w, x, y: w * (2 * x + 5 * y),
        ranks=own, boundary=TWO_FLOAT_BOUNDARIES, loss=output_sum,
    )  # fmt: skip
    world.step(X, X)
    assert get_weight_gradient(world, 0) == get_weight_gradient(world, 1) == [14.0] * 4


@pytest.mark.parametrize("slots", [None, "minimal"])
def test_unused_input_gets_gradient_of_zeros(slots: Any) -> None:
    """Only some microbatches use the tensor. The gradients of others are not reused."""

    def use_some(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return w * (x + y) if float(x.detach().sum()) > 4 else w * x

    inputs = torch.arange(1, 5).float().view(4, 1).expand(4, 4)
    shape = PipelineShape(2, 4)
    stages: list[nn.Module] = [FunctionStage(lambda w, x: (w * x, w * 3)), FunctionStage(use_some)]
    world = InProcessExecutor(
        compile(one_f_one_b, shape, buffer_sharing=slots),
        stages,
        loss=output_sum,
        boundary=TWO_FLOAT_BOUNDARIES,
    )
    for _ in range(2):
        world.step(inputs, inputs)
        assert get_weight_gradient(world, 0) == [10.0 + 3 * 3] * 4


def test_gradient_has_dtype_of_its_tensor() -> None:
    """The Function of a user may return a gradient of another dtype."""

    class Widen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.double()

        @staticmethod
        def backward(ctx: Any, *dys: Tensor) -> Tensor:
            return dys[0]

    mixed = (Boundary((4,), torch.bfloat16), Boundary((4,)))
    world = make_executor(
        lambda w, x: ((w * x).bfloat16(), w * x),
        lambda w, x, y: w * Widen.apply(x).float() + y,  # type: ignore[no-untyped-call]
        boundary=mixed, loss=output_sum,
    )  # fmt: skip
    world.step(X, X)
    assert get_weight_gradient(world, 0) == [4.0] * 4


def test_sizes_count_all_tensors_of_each_edge() -> None:
    """Slots, messages and predictions have the bytes of all tensors that cross the edge."""
    edges: Any = {0: FLOAT_AND_INT_BOUNDARIES, 1: Boundary((3,), torch.bfloat16)}

    stages = [
        FunctionStage(return_two_outputs),
        FunctionStage(lambda w, x, count: (w * x * count)[:3].bfloat16()),
        FunctionStage(lambda w, x: w[:3] * x),
    ]
    sizes = measure_sizes(stages, X[0], X[0, :3], loss=output_sum, boundary=edges)
    assert sizes.activation == (512.0, 6.0, 0.0) and sizes.activation_grad == (16.0, 6.0, 0.0)
    world = InProcessExecutor(
        compile(gpipe, PipelineShape(3, 2)), stages, loss=squared_error, boundary=edges
    )
    buffers = [rank.state.service(MessageBuffers).received for rank in world.executors]
    received = [{(kind.name, b.nbytes) for (kind, _), b in own.items()} for own in buffers]
    assert received == [{("GRAD_IN", 16)}, {("ACT_IN", 512), ("GRAD_IN", 6)}, {("ACT_IN", 6)}]


def test_forward_only_boundary_needs_no_gradient() -> None:
    world = make_executor(
        lambda w, x: x.long(), lambda w, n: w * n,
        schedule=forward_only, boundary=FLOAT_AND_INT_BOUNDARIES[1], loss=output_sum,
    )  # fmt: skip
    assert float(world.step(X, X)) == 8


def test_infer_boundaries_does_not_change_stages() -> None:
    stages, boundary = draw_stages(4, 9)
    stages[1].register_buffer("seen", torch.zeros(()))

    def add_to_buffer(module: nn.Module, _: object) -> None:
        module.get_buffer("seen").add_(torch.rand(()))

    stages[1].register_forward_pre_hook(add_to_buffer)
    state, (inputs, _, keywords) = torch.get_rng_state(), make_batch(1)
    assert infer_boundaries(stages, inputs[0], keywords=keywords[0]) == boundary
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        not stages[1].get_buffer("seen") and stages[0].get_parameter("take.0.weight").grad is None
    )


def test_outputs_of_frozen_stages_have_no_gradient() -> None:
    """The first frozen stage passes on only integers."""
    stages: list[nn.Module] = [
        FunctionStage(lambda w, x: x.long()),
        FunctionStage(lambda w, n: (w * n, n.float())),
        FunctionStage(lambda w, x, table: (w * x * table, table)),
        FunctionStage(lambda w, x, table: w * (x + table)),
    ]
    for stage in stages[:2]:
        stage.requires_grad_(False)
    inferred = infer_boundaries(stages, X[0], frozen_stages=2)
    assert [[boundary.requires_grad for boundary in edge] for edge in inferred.values()] == [
        [False], [False, False], [True, False],
    ]  # fmt: skip
    plain, program = deepcopy(stages), compile(one_f_one_b, PipelineShape(4, 2), frozen_stages=2)
    world = InProcessExecutor(program, stages, loss=output_sum, boundary=inferred)
    expected_loss = run_sequential(plain, X, X, loss=output_sum, program=program)
    assert torch.equal(world.step(X, X), expected_loss)
    assert have_same_bits(copy_gradients(stages[2:]), copy_gradients(plain[2:]))


class Case(NamedTuple):
    """A program and its transport."""

    transport: Any
    schedule: Any
    shape: PipelineShape
    options: tuple[tuple[str, Any], ...] = ()

    def program(self) -> Program:
        model = self.transport.progress_model
        return compile(
            self.schedule, self.shape, progress_model=model, overlap=True, **dict(self.options)
        )


CASES = cases(
    [
        Case(GlooTransport, zb_v, PipelineShape(4, 8, 2, "vee"), (("buffer_sharing", "minimal"),)),
        Case(GlooTransport, one_f_one_b, PipelineShape(2, 3), (("dp", 2),)),
        Case(SharedMemoryTransport, one_f_one_b, PipelineShape(2, 4), (("tp", 2),)),
        Case(SharedMemoryTransport, chimera, PipelineShape(4, 6, placement="mirror")),
        Case(EdgeGroups, one_f_one_b, PipelineShape(4, 6), (("buffer_sharing", "minimal"),)),
        Case(GroupedMessages, interleaved, PipelineShape(4, 8, 2)),
    ],
    [
        Case(GlooTransport, one_f_one_b, PipelineShape(4, 6)),
        Case(GlooTransport, interleaved, PipelineShape(2, 4, 2), (("tp", 2),)),
        Case(SharedMemoryTransport, zb_h1, PipelineShape(4, 6)),
    ],
)


def run_cases_on_rank(process: int, cases: list[Case], seed: int) -> list[Any]:
    """Return for each case the gradients of this process's stages, and the loss."""
    results = []
    for case in cases:
        program, shape = case.program(), case.shape
        transport = case.transport(program)
        stages, boundary = draw_stages(shape.stages, seed)
        executor = Executor(
            program, transport.rank, stages, transport, loss=squared_error, boundary=boundary
        )
        m = shape.microbatches
        own = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
        batch: Any = make_batch(m * program.dp)
        inputs, targets, keywords = (part[own] for part in batch)
        for _ in range(2):
            sum_of_losses = executor.step(inputs, targets, keywords=keywords)
        local_gradients = {
            s: copy_gradients([stages[s]])[0] for s in shape.stages_on_rank[transport.rank]
        }
        results.append((local_gradients, sum_of_losses))
    return results


def test_every_cpu_transport_equals_reference() -> None:
    """The cases of each transport include replicas, sliced boundaries or shared slots."""
    seed = 1
    results = run(run_cases_on_rank, 4, CASES, seed)
    for case, processes in zip(CASES, zip(*results, strict=True), strict=True):
        plain, _ = draw_stages(case.shape.stages, seed)
        dp = dict(case.options).get("dp", 1)
        inputs, targets, keywords = make_batch(case.shape.microbatches * dp)
        program = None if dp > 1 else case.program()
        expected_loss = run_sequential(
            plain, inputs, targets, loss=squared_error, program=program, keywords=keywords
        )
        expected = copy_gradients(plain)
        for local_gradients, sum_of_losses in processes:
            for s, actual in local_gradients.items():
                if dp == 1:
                    assert have_same_bits([actual], [expected[s]]), (case, s)
                else:
                    assert all(torch.allclose(actual[n], expected[s][n]) for n in actual)
            if sum_of_losses is not None and dp == 1 and case.shape.placement_rows == 1:
                assert torch.equal(sum_of_losses, expected_loss)
