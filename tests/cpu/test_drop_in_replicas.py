"""Tests of sharded and replicated stages. Weights are unsharded, gradients are reduced once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
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
from schedir.transports.local_processes import run_processes
from tests.cases import campaign, cases, each_value
from tests.cpu.drop_in_steps import (
    N_MICROBATCHES,
    GradientCase,
    Wrap,
    evaluate_between,
    make_step,
    run_gradient_cases,
)
from tests.cpu.torch_pipelines import WIDTH, make_batch, make_model, make_replicated_step

FORKS = multiprocessing.get_context("fork")

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


def make_gradient_cases() -> dict[str, GradientCase]:
    """Return the cases of gradients on two replicas of two ranks, by name."""
    found: dict[str, GradientCase] = {}

    def add(name: str, stages: int, steps: int = 1, tolerance: Any = None, **options: Any) -> None:
        step = make_step(dp=2, steps=steps, **options)
        microbatches = 2 * steps * N_MICROBATCHES
        found[name] = GradientCase(
            step, make_model(stages, TwoLayerStage), make_batch(2 * microbatches),
            microbatches, 2 * N_MICROBATCHES, replicas=2, tolerance=tolerance,
        )  # fmt: skip

    for name, placement, stages, active, runtime in each_value(
        cases(CASES[1:3], [CASES[0], CASES[3]]), [(1, "torch"), (3, "torch"), (1, "schedir")]
    ):
        # With one unsharded stage, forwards reshard stages, as `fully_shard` does by default.
        add(
            f"sharded {name} {active} {runtime}", stages, placement=placement, schedule=name,
            wrap=sharded(reshard_after_forward=active == 1), unsharded_stages=active,
            runtime=runtime,
        )  # fmt: skip
    vee: dict[str, Any] = {"placement": "vee", "schedule": "zb_v", "stages": 4}
    for runtime in cases(["schedir"], ["torch"]):
        add(f"one module {runtime}", wrap=sharded(parts=False), runtime=runtime, **vee)
    wrap = sharded(mp_policy=BFLOAT16_WEIGHTS)
    for runtime in cases(["torch"], ["schedir"]):
        add(f"mixed precision {runtime}", wrap=wrap, runtime=runtime, tolerance=0.02, **vee)
    # torch infers shapes again after the evaluation, and drops gradients of sharded stages.
    between: dict[str, Any] = {"steps": 2, "around": evaluate_between}
    for runtime in ("torch", "schedir"):
        add(f"evaluation {runtime}", wrap=sharded(), runtime=runtime, **between, **vee)
    for name, placement, stages in cases(CASES[2:3], CASES[:2] + CASES[3:]):
        add(f"replicated {name}", stages, placement=placement, schedule=name, wrap=wrap_in_ddp)
    # The options make DDP overwrite earlier gradients, or count backwards.
    options = [None, "gradient_as_bucket_view", "static_graph"]
    for name, placement, stages, option in each_value([CASES[0], CASES[2]], options):
        ddp_options: dict[str, Any] = {option: True} if option else {}
        wrap = partial(wrap_in_ddp, **ddp_options)
        key = f"accumulated {name} {option}"
        add(key, stages, steps=2, placement=placement, schedule=name, wrap=wrap)
    return found


BFLOAT16_WEIGHTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GRADIENT_CASES = make_gradient_cases()


@pytest.fixture(scope="module")
def check_same_gradients() -> Callable[[Any], None]:
    return run_gradient_cases(GRADIENT_CASES, ranks=4)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_equal_plain_loop(name: str, check_same_gradients: Any) -> None:
    check_same_gradients(name)


def full_backwards(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    """Return a schedule for the placement of `zb_v` with full backwards."""
    return m * F[0] + m * F[1] + m * B[1] + m * B[0]


def weights_last(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    return m * F[0] + m * F[1] + m * I[1] + m * I[0] + m * W[1] + m * W[0]


def compute_reduced_gradients(
    rank: int, schedule: Any, parts_sharded: bool, runtime: str = "torch"
) -> list[Tensor]:
    """Return the gradients of a rank's bfloat16 shards after two steps, reduced in float32."""
    wrap, parameters = sharded(parts_sharded, mp_policy=BFLOAT16_WEIGHTS), list[Tensor]()

    def keep(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
        parameters[:] = [p for stage in parts.values() for p in stage.parameters()]

    step = make_step(
        "vee", schedule=schedule, dp=2, wrap=wrap, around=keep, steps=2, runtime=runtime,
    )  # fmt: skip
    step(rank, 4, make_model(4, TwoLayerStage), make_batch(32))
    return [p.grad.to_local() for p in parameters]  # type: ignore[union-attr]


SPLIT_BACKWARDS = cases(
    [(weights_last, "torch", False), (weights_last, "schedir", False)],
    [("zb_v", "torch", False), ("zb_v", "torch", True), (weights_last, "torch", True),
     (weights_last, "schedir", True)],
)  # fmt: skip


def compute_all_reduced_gradients(rank: int) -> dict[Any, list[Tensor]]:
    full = [(full_backwards, "torch", parts_sharded) for parts_sharded in cases([False], [True])]
    return {
        (schedule, runtime, parts_sharded): compute_reduced_gradients(
            rank, schedule, parts_sharded, runtime
        )
        for schedule, runtime, parts_sharded in (*full, *SPLIT_BACKWARDS)
    }


@cache
def run_reduced_gradients() -> list[dict[Any, list[Tensor]]]:
    """Return the gradients of all ranks from processes that start once."""
    return run_processes(compute_all_reduced_gradients, 4, context=FORKS)


@pytest.mark.parametrize(("schedule", "runtime", "parts_sharded"), SPLIT_BACKWARDS)
def test_split_backwards_accumulate_in_reduction_dtype(
    schedule: Any, runtime: str, parts_sharded: bool
) -> None:
    """Split backwards under torch are bitwise equal to full ones, although FSDP has no hook in W.

    schedir's executor adds products in float32 without rounding them first, so it is only close.
    """
    actual, expected = (
        [gradients[key] for gradients in run_reduced_gradients()]
        for key in ((schedule, runtime, parts_sharded), (full_backwards, "torch", parts_sharded))
    )
    assert [[g.dtype for g in gradients] for gradients in actual] == [
        [torch.float32] * len(gradients) for gradients in actual
    ]
    tolerance = 0.01 if runtime == "schedir" else 0.0
    assert all(
        (pair[0] - pair[1]).norm() <= tolerance * pair[1].norm()
        for actual_rank, expected_rank in zip(actual, expected, strict=True)
        for pair in zip(actual_rank, expected_rank, strict=True)
    )


@campaign
def test_torch_schedule_does_not_reduce_replicated_gradients() -> None:
    """torch 2.13 still has the bug pytorch#144530. After its fix, our code is not needed."""
    step = make_replicated_step("ScheduleZBVZeroBubble", wrap_in_ddp)
    with pytest.raises(AssertionError, match="12 of 16 gradients differ"):
        assert_same_gradients(
            step, make_model(4, TwoLayerStage), make_batch(16), ranks=4, replicas=2,
            microbatches=2 * N_MICROBATCHES, loss_fn=mse_loss,
        )  # fmt: skip


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
    (errors,) = run_processes(collect_refusals, 1, context=FORKS)
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
