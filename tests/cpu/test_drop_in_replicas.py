"""Tests of sharded and replicated stages. Weights are unsharded, gradients are reduced once."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from schedir.errors import SchedirError
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W
from schedir.testing.gradient_assertion import assert_same_gradients
from schedir.testing.strategies import programs
from schedir.torch_pipelining import Schedule
from schedir.torch_pipelining.actions import make_actions
from schedir.torch_pipelining.fsdp_stages import insert_unshards, require_unsharded
from tests.cases import campaign, cases, each_value
from tests.cpu.drop_in_steps import N_MICROBATCHES, Wrap, make_step
from tests.cpu.gloo_processes import run, run_fresh
from tests.cpu.torch_pipelines import WIDTH, Step, make_batch, make_model, make_replicated_step

CASES = [
    ("one_f_one_b", "loop", 2),
    ("interleaved", "loop", 4),
    ("zb_v", "vee", 4),
    ("dualpipe_v", "vee", 4),
]


class TwoLayerStage(nn.Module):
    """Two layers. Each may be sharded separately."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


def sharded(parts: bool = True, **options: Any) -> Wrap:
    def wrap(module: Any, mesh: Any) -> Any:
        for module_part in (module.a, module.b) if parts else ():
            fully_shard(module_part, mesh=mesh, **options)
        return fully_shard(module, mesh=mesh, **options)

    return wrap


def wrap_in_ddp(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def check_same_gradients(step: Step, stages: int, *, rows: int = 16, **options: Any) -> None:
    arguments: dict[str, Any] = {
        "microbatches": 2 * N_MICROBATCHES,
        "loss_fn": mse_loss,
        "replicas": 2,
    } | options
    assert_same_gradients(
        step, make_model(stages, TwoLayerStage), make_batch(rows), ranks=4, **arguments
    )


@pytest.mark.parametrize(
    ("name", "placement", "stages", "active", "runtime"),
    each_value(CASES, [(1, "torch"), (3, "torch"), (1, "schedir")]),
)
def test_gradients_of_sharded_stages(
    name: str, placement: str, stages: int, active: int, runtime: str
) -> None:
    """With one unsharded stage, forwards reshard stages, as `fully_shard` does by default."""
    wrap = sharded(reshard_after_forward=active == 1)
    options: dict[str, Any] = {"unsharded_stages": active, "runtime": runtime}
    check_same_gradients(make_step(placement, schedule=name, dp=2, wrap=wrap, **options), stages)


@pytest.mark.parametrize("runtime", cases(["schedir"], ["torch"]))
def test_gradients_of_stages_sharded_as_one_module(runtime: str) -> None:
    wrap = sharded(parts=False)
    check_same_gradients(make_step("vee", schedule="zb_v", dp=2, wrap=wrap, runtime=runtime), 4)


@pytest.mark.parametrize("runtime", cases(["torch"], ["schedir"]))
def test_gradients_of_sharded_stages_in_mixed_precision(runtime: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = sharded(mp_policy=policy)
    check_same_gradients(
        make_step("vee", schedule="zb_v", dp=2, wrap=wrap, runtime=runtime), 4, tolerance=0.02
    )


def full_backwards(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    """Return a schedule for the placement of `zb_v` with full backwards."""
    return m * F[0] + m * F[1] + m * B[1] + m * B[0]


def weights_last(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    return m * F[0] + m * F[1] + m * I[1] + m * I[0] + m * W[1] + m * W[0]


def compute_reduced_gradients(
    rank: int, schedule: Any, parts_sharded: bool, runtime: str = "torch"
) -> list[Tensor]:
    """Return the gradients of a rank's bfloat16 shards after two steps, reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap, parameters = sharded(parts_sharded, mp_policy=policy), list[Tensor]()

    def keep(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
        parameters[:] = [p for stage in parts.values() for p in stage.parameters()]

    step = make_step(
        "vee", schedule=schedule, dp=2, wrap=wrap, around=keep, steps=2, n_microbatches=8,
        runtime=runtime,
    )  # fmt: skip
    step(rank, 4, make_model(4, TwoLayerStage), make_batch(64))
    return [p.grad.to_local() for p in parameters]  # type: ignore[union-attr]


@cache
def _compute_full_backward_gradients(parts_sharded: bool) -> list[list[Tensor]]:
    return run(compute_reduced_gradients, 4, full_backwards, parts_sharded)


@pytest.mark.parametrize(
    ("schedule", "runtime", "parts_sharded"),
    each_value(
        [("zb_v", "torch"), (weights_last, "torch"), (weights_last, "schedir")], [False, True]
    ),
)
def test_split_backwards_accumulate_in_reduction_dtype(
    schedule: Any, runtime: str, parts_sharded: bool
) -> None:
    """Split backwards under torch are bitwise equal to full ones, although FSDP has no hook in W.

    schedir's executor adds products in float32 without rounding them first, so it is only close.
    """
    expected = _compute_full_backward_gradients(parts_sharded)
    actual = run(compute_reduced_gradients, 4, schedule, parts_sharded, runtime)
    assert [[g.dtype for g in gradients] for gradients in actual] == [
        [torch.float32] * len(gradients) for gradients in actual
    ]
    tolerance = 0.01 if runtime == "schedir" else 0.0
    assert all(
        (pair[0] - pair[1]).norm() <= tolerance * pair[1].norm()
        for actual_rank, expected_rank in zip(actual, expected, strict=True)
        for pair in zip(actual_rank, expected_rank, strict=True)
    )


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_sharded_gradients_accumulate_past_evaluation(runtime: str) -> None:
    """torch infers shapes again after the evaluation, and drops gradients of sharded stages."""

    def evaluate_between(
        schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor
    ) -> None:
        with torch.no_grad():
            schedule.eval(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)

    options: dict[str, Any] = {"steps": 2, "around": evaluate_between, "runtime": runtime}
    step = make_step("vee", schedule="zb_v", dp=2, wrap=sharded(), **options)
    check_same_gradients(
        step, 4, rows=32, microbatches=4 * N_MICROBATCHES, reduction=2 * N_MICROBATCHES
    )


@pytest.mark.parametrize(("name", "placement", "stages"), cases(CASES[2:3], CASES[:2] + CASES[3:]))
def test_gradients_of_replicated_stages(name: str, placement: str, stages: int) -> None:
    check_same_gradients(make_step(placement, schedule=name, dp=2, wrap=wrap_in_ddp), stages)


@pytest.mark.parametrize(
    ("name", "placement", "stages", "option"),
    each_value([CASES[0], CASES[2]], [None, "gradient_as_bucket_view", "static_graph"]),
)
def test_replicated_gradients_accumulate_over_steps(
    name: str, placement: str, stages: int, option: str | None
) -> None:
    """The options make DDP overwrite earlier gradients, or count backwards."""
    options: dict[str, Any] = {option: True} if option else {}
    wrap = partial(wrap_in_ddp, **options)
    step = make_step(placement, schedule=name, dp=2, wrap=wrap, steps=2)
    check_same_gradients(
        step, stages, rows=32, microbatches=4 * N_MICROBATCHES, reduction=2 * N_MICROBATCHES
    )


@campaign
def test_torch_schedule_does_not_reduce_replicated_gradients() -> None:
    """torch 2.13 still has the bug pytorch#144530. After its fix, our code is not needed."""
    with pytest.raises(AssertionError, match="12 of 16 gradients differ"):
        check_same_gradients(make_replicated_step("ScheduleZBVZeroBubble", wrap_in_ddp), 4)


def wrap_with_hook(module: nn.Module, mesh: Any) -> nn.Module:
    ddp: Any = wrap_in_ddp(module, mesh)
    ddp.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    return ddp  # type: ignore[no-any-return]


def shard_one_layer(module: Any, mesh: Any) -> Any:
    fully_shard(module.a, mesh=mesh)
    return module


def wrap_and_compile(module: Any, mesh: Any) -> Any:
    return torch.compile(wrap_in_ddp(module, mesh), backend="eager")


def wrap_one_layer(module: Any, mesh: Any) -> Any:
    module.a = wrap_in_ddp(module.a, mesh)
    return module


def replicate_in_place(module: Any, mesh: Any) -> Any:
    return replicate(module, process_group=mesh.get_group())


# torch's runtime would not tell a DDP inside of a stage which backward is the last one.
REFUSED: list[tuple[Wrap, str]] = [
    (wrap_with_hook, "with a communication hook"),
    (shard_one_layer, "some modules of stage 0 are sharded"),
    (wrap_and_compile, "some modules of stage 0 are replicated"),
    (wrap_one_layer, "some modules of stage 0 are replicated"),
    (replicate_in_place, "some modules of stage 0 are replicated"),
]


def collect_refusals(rank: int) -> list[str]:
    """Return the error of each wrapper that is refused."""
    errors = []
    for wrap, _ in REFUSED:
        try:
            step = make_step("vee", schedule="zb_v", wrap=wrap)
            step(rank, 1, make_model(2, TwoLayerStage), make_batch())
            errors.append("")
        except SchedirError as error:
            errors.append(error.fact)
    return errors


def test_wrappers_that_lose_gradients_are_refused() -> None:
    (errors,) = run_fresh(collect_refusals, 1)
    for error, (_, text) in zip(errors, REFUSED, strict=True):
        assert text in error


@given(programs(), st.integers(1, 4))
def test_stages_are_unsharded_for_every_compute(program: Program, active: int) -> None:
    try:
        orders = make_actions(program)
    except SchedirError:
        return  # torch has no such actions
    for order in orders.values():
        actions = insert_unshards(order, active)
        require_unsharded(actions, active)
        assert [a for a in actions if "SHARD" not in str(a)] == order


@given(programs(), st.integers(1, 4), st.data())
def test_missing_or_repeated_unshard_is_refused(
    program: Program, active: int, data: st.DataObject
) -> None:
    try:
        actions = insert_unshards(make_actions(program)[0], active)
    except SchedirError:
        return
    position = data.draw(st.sampled_from([k for k, a in enumerate(actions) if "SHARD" in str(a)]))
    for wrong_actions in (
        actions[:position] + actions[position + 1 :],
        [*actions[: position + 1], actions[position], *actions[position + 1 :]],
    ):
        with pytest.raises(SchedirError):
            require_unsharded(wrong_actions, active)
