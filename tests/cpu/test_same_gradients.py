"""Tests of assert_same_gradients with torch's schedules over real processes, right and wrong."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import _backward
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining import stage as their_stage
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import schedir
from schedir.errors import UsageError
from schedir.runtime import Boundary, Executor, GlooTransport
from schedir.testing import assert_same_gradients
from schedir.testing.gradient_comparison import GradientDifference, StageLocation, WrongGradients
from schedir.torch_pipelining import Schedule
from tests.cases import campaign, cases
from tests.cpu.torch_pipelines import (
    LOOP,
    SINGLE,
    VEE,
    WIDTH,
    Layer,
    SharedWeightLayer,
    Step,
    TiedModel,
    make_batch,
    make_model,
    make_replicated_step,
    make_stage,
    make_torch_step,
    run_step,
    squared_error,
)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compare-gradients.md"
assert_same = partial(assert_same_gradients, ranks=2, microbatches=4, loss_fn=mse_loss, timeout=60)


def collect_differences(
    step: Step, model: Any, given: Any = None, **options: Any
) -> list[GradientDifference]:
    with pytest.raises(WrongGradients) as caught:
        assert_same(step, model, make_batch() if given is None else given, **options)
    return [*caught.value.differences]


# ---------------------------------------------------------------- right steps


@pytest.mark.parametrize(
    "name", cases([SINGLE[1], LOOP[0], VEE[0]], [SINGLE[0], *LOOP[1:], *VEE[1:]])
)
def test_torch_schedules_pass(name: str) -> None:
    error = assert_same(make_torch_step(name), make_model(2 if name in SINGLE else 4), make_batch())
    assert error < 1e-6


def test_summed_loss_without_scaling_passes() -> None:
    step = make_torch_step("Schedule1F1B", loss_fn=squared_error, scale_grads=False)
    assert_same(step, make_model(2), make_batch(), loss_fn=squared_error, reduction="sum")


def test_accumulated_steps_pass() -> None:
    step = make_torch_step("ScheduleGPipe", steps=2, microbatches=2, scale_grads=False)
    assert_same(step, make_model(2), make_batch(), reduction="sum")


def wrap_in_ddp(part: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(part, process_group=mesh.get_group())


def wrap_in_fsdp(part: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(part, mesh=mesh)
    return part


@pytest.mark.parametrize("wrap", cases([wrap_in_fsdp], [wrap_in_ddp]))
def test_ddp_and_fsdp_replicas_pass(wrap: Any) -> None:
    step = make_replicated_step("ScheduleInterleaved1F1B", wrap)
    assert_same(step, make_model(4), make_batch(16), ranks=4, replicas=2, microbatches=8)


def test_executor_passes() -> None:
    """A step of `Executor` adds gradients to the parameters, as any other step does."""
    program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))

    def step(rank: int, ranks: int, stages: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
        executor = Executor(
            program, rank, {rank: stages[rank]}, GlooTransport(program), loss=squared_error,
            boundary=Boundary((2, WIDTH)),
        )  # fmt: skip
        x, y = (tensor.unflatten(0, (4, 2)) for tensor in batch)
        executor.step(x, y)

    layers = [Layer(), Layer()]
    options: Any = {"loss_fn": squared_error, "reduction": "sum", "tolerance": 0}
    assert assert_same(step, layers, make_batch(), **options) == 0
    (difference,) = collect_differences(step, layers, loss_fn=squared_error)
    assert difference.stages == (0, 1) and difference.has_all_parameters
    assert difference.error == pytest.approx(3)


def test_extra_forward_for_shape_inference_passes() -> None:
    """torch 2.13 runs a stage once more to learn shapes, which does not change the gradients."""

    def step(rank: int, ranks: int, model: Any, batch: Any) -> None:
        make_torch_step("Schedule1F1B")(rank, ranks, model, batch)
        if torch.__version__.startswith("2.13"):
            assert int(model[rank].num_batches_tracked) == 5

    assert_same(step, make_model(2, partial(nn.BatchNorm1d, WIDTH)), make_batch())


class ModelWithLoss(Layer):
    """A model that takes labels and returns its loss, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if labels is None else SimpleNamespace(loss=mse_loss(y, labels))


def test_model_that_returns_its_loss_passes() -> None:
    def step(rank: int, ranks: int, model: Any, batch: dict[str, Tensor]) -> None:
        assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == str(ranks)
        run_step("Schedule1F1B", {rank: model}, 1, [(batch["x"], batch["labels"])])

    x, y = make_batch()
    assert_same(step, ModelWithLoss(), {"x": x, "labels": y}, ranks=1, loss_fn=None)


def test_step_on_copies_must_return_gradients() -> None:
    def step(rank: int, ranks: int, model: nn.Module, batch: Any) -> dict[str, Tensor | None]:
        layer = Layer()
        layer.load_state_dict(model[rank].state_dict())  # type: ignore[index]
        run_step("Schedule1F1B", {rank: layer}, 2, [batch])
        return {f"{rank}.{name}": p.grad for name, p in layer.named_parameters()}

    assert_same(step, make_model(2), make_batch())

    def return_nothing(*args: Any) -> None:
        step(*args)

    with pytest.raises(UsageError, match="parameters that `model` does not have"):
        assert_same(return_nothing, make_model(2), make_batch())


# ---------------------------------------------------------------- known mistakes of users


def test_wrong_loss_scaling_is_detected() -> None:
    """This is the fault of pytorch/torchtitan#2972 and of inclusionAI/AReaL PR 1273."""
    step = make_torch_step("Schedule1F1B", scale_grads=False)
    (not_divided,) = collect_differences(step, make_model(2))
    assert not_divided.has_all_parameters
    assert not_divided.locations == (StageLocation(0, 0), StageLocation(1, 1))
    assert not_divided.problem == "relative error 3, norm 4 times the expected norm"
    step = make_torch_step("ScheduleGPipe")
    (divided_once,) = collect_differences(step, make_model(2), reduction="sum")
    assert divided_once.stages == (0, 1) and divided_once.error == pytest.approx(3 / 4)
    step = make_torch_step("ScheduleInterleavedZeroBubble", loss_fn=lambda y, t: mse_loss(y, t) / 4)
    (divided_twice,) = collect_differences(step, make_model(4))
    assert divided_twice.stages == (0, 1, 2, 3) and divided_twice.error == pytest.approx(3 / 4)


@campaign
def test_gradients_scaled_at_every_step_are_detected() -> None:
    """In pytorch/torchtitan#1733, scale_grads=True while several steps accumulate gradients."""
    step = make_torch_step("Schedule1F1B", steps=2, microbatches=2)
    differences = collect_differences(step, make_model(2), reduction=2)
    assert [d.stages for d in differences] == [(0,), (1,)]
    assert all(d.has_all_parameters and 0.1 < d.error < 1 for d in differences)


def compute_old_weight_gradients(
    weights: Any, groups: Any, retain_graph: bool = False
) -> tuple[()]:
    """Compute weight gradients as torch did before PR 181365, with a backward from each use.

    Each such backward also runs all nodes behind that use.
    """
    weight_by_node = {_backward._get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    for group in groups:
        edges, gradients = [], []
        for node_gradients, node in zip(group["grads"], group["intermediates"], strict=True):
            for k, gradient in enumerate(node_gradients):
                if gradient is not None:
                    edges.append(GradientEdge(node, k))
                    gradients.append(gradient)
        nodes = [*group["params"]]
        ends = [GradientEdge(node, 0) for node in nodes]
        for node, dw in zip(nodes, torch.autograd.grad(edges, ends, gradients), strict=True):
            weight = weight_by_node[node]
            weight.grad = dw if weight.grad is None else weight.grad + dw
    return ()


@campaign
def test_double_counted_weight_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split backward counts a part of its gradient twice: pytorch/pytorch#180952.

    PR 181365 fixed this.
    """
    step = make_torch_step("ScheduleInterleavedZeroBubble")
    layers = make_model(4, SharedWeightLayer)
    if torch.__version__ >= (2, 13):  # type: ignore[operator]  # mended there
        assert_same(step, layers, make_batch())
    monkeypatch.setattr(their_stage, "stage_backward_weight", compute_old_weight_gradients)
    differences = collect_differences(step, layers)
    assert [d.stages for d in differences] == [(1,), (2,), (3,)]  # stage 0 splits nothing
    assert [d.names for d in differences] == [(f"{s}.weight",) for s in (1, 2, 3)]


def run_tied_step(rank: int, ranks: int, model: Any, batch: Any, *, summed: bool) -> None:
    part = [nn.Sequential(model.embed, model.middle), model.head][rank]
    run_step("Schedule1F1B", {rank: part}, 2, [batch])
    if summed:
        dist.all_reduce(model.embed.weight.grad)


def test_unsummed_tied_weight_gradient_is_detected() -> None:
    """This is the fault of uw-syfi/piper#13."""
    torch.manual_seed(0)
    assert_same(partial(run_tied_step, summed=True), TiedModel(), make_batch())
    first, last = collect_differences(partial(run_tied_step, summed=False), TiedModel())
    assert (first.locations, first.names) == ((StageLocation(0, 0),), ("embed.weight",))
    assert (last.locations, last.names) == ((StageLocation(1, 1),), ("head.weight",))


def collect_torch_2_13_differences(
    step: Step, model: Any, inputs: Any, **options: Any
) -> list[GradientDifference]:
    """Return the faults of torch 2.13, and skip the test if this torch has none of them."""
    if torch.__version__.startswith("2.13"):
        return collect_differences(step, model, inputs, **options)
    try:
        assert_same(step, model, inputs, **options)
    except WrongGradients as error:
        return [*error.differences]
    pytest.skip("this torch is right")


BOTH_STAGES = [((0,), True), ((1,), True)]


def test_lost_gradients_between_steps_are_detected() -> None:
    def clear_gradients(schedule: Any, *_: Any) -> None:
        schedule._stage.submod.zero_grad(set_to_none=True)

    step = make_torch_step(
        "Schedule1F1B", steps=2, microbatches=2, scale_grads=False, between=clear_gradients
    )
    differences = collect_differences(step, make_model(2), reduction="sum")
    assert [(d.stages, d.has_all_parameters) for d in differences] == BOTH_STAGES


@campaign
def test_lost_gradients_of_prepared_fsdp_stages_are_detected() -> None:
    """FSDP stages lose their gradients when they are prepared again: NeMo/Automodel PR 3530.

    torch prepares stages again when `eval` follows `step`, or `step` follows `eval`.
    """

    def run_sharded_step(evaluates: bool, rank: int, ranks: int, model: Any, batch: Any) -> None:
        def evaluate(schedule: Any, args: tuple[Any, ...], target: Any) -> None:
            if evaluates:
                schedule.eval(*args, target=target)

        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
        halves = [*zip(*(tensor.chunk(2) for tensor in batch), strict=True)]
        run_step(
            "Schedule1F1B", {rank: wrap_in_fsdp(model[rank], mesh["dp"])}, ranks, halves,
            between=evaluate, group=mesh["pp"].get_group(), microbatches=2, scale_grads=False,
        )  # fmt: skip

    arguments = make_model(2), make_batch()
    assert_same(partial(run_sharded_step, False), *arguments, reduction="sum")
    differences = collect_torch_2_13_differences(
        partial(run_sharded_step, True), *arguments, reduction="sum"
    )
    assert [(d.stages, d.has_all_parameters) for d in differences] == BOTH_STAGES


def test_missing_ddp_reduction_of_split_backward_is_detected() -> None:
    """Split backwards call no hooks, so DDP reduces nothing: pytorch/pytorch#144530."""
    torch.manual_seed(0)
    step = make_replicated_step("ScheduleInterleavedZeroBubble", wrap_in_ddp)
    differences = collect_torch_2_13_differences(
        step, make_model(4), make_batch(16), ranks=4, replicas=2, microbatches=8
    )
    places = {place for difference in differences for place in difference.locations}
    assert places == {
        StageLocation(s, rank) for s in (1, 2, 3) for rank in (2 * (s % 2), 2 * (s % 2) + 1)
    }
    assert all(d.has_all_parameters and f"  {d}\n" in PAGE.read_text() for d in differences)


class NormAndHead(nn.Module):
    """A norm and a head. Under torchtitan's chunked loss, the loss runs the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_head_in_loss = False

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return y if self.is_head_in_loss else self.head(y)


class PrecomputedGradient(torch.autograd.Function):
    """A loss whose backward returns a precomputed gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return *ctx.saved_tensors, None, None


def make_chunked_loss_step(make: Any) -> Step:
    """Return a step of a vee pipeline as torchtitan 0.3.0 builds it.

    Its last stage shards the norm and the head as one FSDP group. Its loss runs the head forward
    and backward for each of two chunks. At the end the loss reshards the head, and so the norm.
    """

    def step(rank: int, ranks: int, layers: Any, batch: tuple[Tensor, Tensor]) -> None:
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
        last = layers[3]
        last.is_head_in_loss = True

        def loss_fn(y: Tensor, target: Tensor) -> Any:
            if not y.requires_grad:
                return mse_loss(last.head(y), target)
            leaf, total = y.detach().requires_grad_(), torch.zeros(())
            for k, (chunk, wanted) in enumerate(zip(leaf.chunk(2), target.chunk(2), strict=True)):
                last.head.set_requires_gradient_sync(k == 1)
                loss = mse_loss(last.head(chunk), wanted) / 2
                loss.backward()
                total = total + loss.detach()
            last.head.reshard()
            assert leaf.grad is not None
            return PrecomputedGradient.apply(y, leaf.grad, total)  # type: ignore[no-untyped-call]

        own_stages = [rank, 3 - rank]
        if 3 in own_stages:
            fully_shard([last.norm, last.head], mesh=mesh["dp"])
        stages = [
            make_stage(fully_shard(layers[s], mesh=mesh["dp"]), s, 4, mesh["pp"].get_group())
            for s in own_stages
        ]
        schedule = make(stages, n_microbatches=4, loss_fn=loss_fn)
        x, y = batch
        schedule.step(*((x,) if rank == 0 else ()), target=y if 3 in own_stages else None)

    return step


@campaign
def test_norm_resharded_by_chunked_loss_is_detected() -> None:
    """torchtitan 0.3.0 with ZBVZeroBubble trains its last norm without a gradient."""
    torch.manual_seed(0)
    layers = [Layer(), Layer(), Layer(), NormAndHead()]
    step = make_chunked_loss_step(theirs.ScheduleZBVZeroBubble)
    (difference,) = collect_differences(step, layers)
    assert difference.stages == (3,)
    assert difference.names == ("3.norm.weight", "3.norm.bias")
    for runtime in ("torch", "schedir"):
        schedir_schedule = Schedule.with_options(schedule="zb_v", runtime=runtime)
        assert_same(make_chunked_loss_step(schedir_schedule), layers, make_batch())


@campaign
def test_gradients_scaled_by_every_stage_are_detected() -> None:
    """A hook on each stage's output divides its gradient, as in deepspeedai/DeepSpeed PR 8154."""

    def step(rank: int, ranks: int, model: Any, batch: Any) -> None:
        def divide(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda dy: dy / 4)

        model[rank].register_forward_hook(divide)
        run_step("Schedule1F1B", {rank: model[rank]}, ranks, [batch], scale_grads=False)

    first, second = collect_differences(step, make_model(3), ranks=3)
    assert (first.stages, second.stages) == ((0,), (1,))
    assert first.error == pytest.approx(1 - 1 / 16) and second.error == pytest.approx(1 - 1 / 4)


def test_layer_without_stage_is_detected() -> None:
    """As in NVIDIA/Megatron-LM#1304, where 28 of 30 layers are built on 4 stages."""

    def step(rank: int, ranks: int, model: Any, batch: Any) -> None:
        run_step("Schedule1F1B", {rank: model[rank]}, ranks, [batch])

    *_, missing = collect_differences(step, make_model(3))
    assert missing.names == ("2.linear.weight", "2.linear.bias")
    assert str(missing) == "on no rank, all 2 parameters: no gradient"


def test_page_example_raises_documented_error() -> None:
    page = PAGE.read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python")[1].split("```")[0], names)
    names["test_gradients"]()
    names["SCALE"] = False
    with pytest.raises(AssertionError) as error:
        names["test_gradients"]()
    assert str(error.value) in page
