"""Tests of sharded or replicated stages, which are gathered to compute and reduced once."""

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

from schedir.errors import ExecutionError, SchedirError
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W
from schedir.testing.gradient_assertion import assert_same_gradients
from schedir.testing.strategies import programs
from schedir.torch_pipelining import Schedule
from schedir.torch_pipelining.actions import make_actions
from schedir.torch_pipelining.fsdp_stages import insert_unshards, require_unsharded
from tests.cpu.drop_in_steps import MB, Wrap, step_of
from tests.cpu.gloo_processes import run
from tests.cpu.torch_pipelines import WIDTH, Step, batch, model, replicated

CASES = [
    ("one_f_one_b", "loop", 2),
    ("interleaved", "loop", 4),
    ("zb_v", "vee", 4),
    ("dualpipe_v", "vee", 4),
]


class Two(nn.Module):
    """Two layers, each of which may be sharded separately."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


def sharded(parts: bool = True, **options: Any) -> Wrap:
    def wrap(module: Any, mesh: Any) -> Any:
        for part in (module.a, module.b) if parts else ():
            fully_shard(part, mesh=mesh, **options)
        return fully_shard(module, mesh=mesh, **options)

    return wrap


def in_ddp(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def same(step: Step, stages: int, *, rows: int = 16, **options: Any) -> None:
    given: dict[str, Any] = {"microbatches": 2 * MB, "loss_fn": mse_loss, "replicas": 2} | options
    assert_same_gradients(step, model(stages, Two), batch(rows), ranks=4, **given)


runtimes = pytest.mark.parametrize("runtime", ["torch", "schedir"])


@pytest.mark.parametrize(("active", "runtime"), [(1, "torch"), (3, "torch"), (1, "schedir")])
@pytest.mark.parametrize(("name", "placement", "stages"), CASES)
def test_sharded(name: str, placement: str, stages: int, active: int, runtime: str) -> None:
    """This holds too if forwards reshard the stages, which is the default of `fully_shard`."""
    wrap = sharded(reshard_after_forward=active == 1)
    options: dict[str, Any] = {"unsharded_stages": active, "runtime": runtime}
    same(step_of(placement, schedule=name, dp=2, wrap=wrap, **options), stages)


@runtimes
def test_sharded_as_one(runtime: str) -> None:
    wrap = sharded(parts=False)
    same(step_of("vee", schedule="zb_v", dp=2, wrap=wrap, runtime=runtime), 4)


@runtimes
def test_sharded_in_mixed_precision(runtime: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = sharded(mp_policy=policy)
    same(step_of("vee", schedule="zb_v", dp=2, wrap=wrap, runtime=runtime), 4, tolerance=0.02)


def full_backwards(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    """Return a schedule for the placement of `zb_v` with full backwards."""
    return m * F[0] + m * F[1] + m * B[1] + m * B[0]


def weights_last(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    return m * F[0] + m * F[1] + m * I[1] + m * I[0] + m * W[1] + m * W[0]


def reduced(rank: int, schedule: Any, parts_sharded: bool, runtime: str = "torch") -> list[Tensor]:
    """Return the gradients of a rank's bfloat16 shards after two steps, reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap, found = sharded(parts_sharded, mp_policy=policy), list[Tensor]()

    def keep(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
        found[:] = [p for part in parts.values() for p in part.parameters()]

    step = step_of(
        "vee", schedule=schedule, dp=2, wrap=wrap, around=keep, steps=2, n_microbatches=8,
        runtime=runtime,
    )  # fmt: skip
    step(rank, 4, model(4, Two), batch(64))
    return [p.grad.to_local() for p in found]  # type: ignore[union-attr]


@cache
def _of_full_backwards(parts_sharded: bool) -> list[list[Tensor]]:
    return run(reduced, 4, full_backwards, parts_sharded)


@pytest.mark.parametrize("parts_sharded", [False, True])
@pytest.mark.parametrize(
    ("schedule", "runtime"),
    [("zb_v", "torch"), (weights_last, "torch"), (weights_last, "schedir")],
)
def test_halves_add_up_in_the_type_of_the_reduction(
    schedule: Any, runtime: str, parts_sharded: bool
) -> None:
    """Split backwards give the bits of full ones, although FSDP has no hook in the second half.

    schedir's executor adds products in float32, and does not round them first.
    """
    want = _of_full_backwards(parts_sharded)
    got = run(reduced, 4, schedule, parts_sharded, runtime)
    assert [[g.dtype for g in own] for own in got] == [[torch.float32] * len(own) for own in got]
    tolerance = 0.01 if runtime == "schedir" else 0.0
    assert all(
        (both[0] - both[1]).norm() <= tolerance * both[1].norm()
        for one, other in zip(got, want, strict=True)
        for both in zip(one, other, strict=True)
    )


@runtimes
def test_sharded_gradients_add_up_past_an_evaluation(runtime: str) -> None:
    """When torch infers shapes again, it forgets the gradients of sharded stages."""

    def between(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            schedule.eval(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)

    options: dict[str, Any] = {"steps": 2, "around": between, "runtime": runtime}
    step = step_of("vee", schedule="zb_v", dp=2, wrap=sharded(), **options)
    same(step, 4, rows=32, microbatches=4 * MB, reduction=2 * MB)


@pytest.mark.parametrize(("name", "placement", "stages"), CASES)
def test_replicated(name: str, placement: str, stages: int) -> None:
    same(step_of(placement, schedule=name, dp=2, wrap=in_ddp), stages)


@pytest.mark.parametrize("option", [None, "gradient_as_bucket_view", "static_graph"])
@pytest.mark.parametrize(("name", "placement", "stages"), [CASES[0], CASES[2]])
def test_replicated_gradients_add_up(
    name: str, placement: str, stages: int, option: str | None
) -> None:
    """This holds too if DDP overwrites earlier gradients, and if it counts backwards."""
    options: dict[str, Any] = {option: True} if option else {}
    wrap = partial(in_ddp, **options)
    step = step_of(placement, schedule=name, dp=2, wrap=wrap, steps=2)
    same(step, stages, rows=32, microbatches=4 * MB, reduction=2 * MB)


def test_torchs_own_does_not_reduce_them() -> None:
    """This is pytorch#144530, as of 2.13. Once it is fixed, our code is not needed."""
    with pytest.raises(AssertionError, match="12 of 16 gradients differ"):
        same(replicated("ScheduleZBVZeroBubble", in_ddp), 4)


def test_a_hook_on_the_reduction_is_refused() -> None:
    def hooked(module: nn.Module, mesh: Any) -> nn.Module:
        ddp: Any = in_ddp(module, mesh)
        ddp.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        return ddp  # type: ignore[no-any-return]

    with pytest.raises(ExecutionError, match="with a communication hook"):
        same(step_of("vee", schedule="zb_v", dp=2, wrap=hooked), 4)


def test_parts_that_are_sharded_alone_are_refused() -> None:
    def within(module: Any, mesh: Any) -> Any:
        fully_shard(module.a, mesh=mesh)
        return module

    with pytest.raises(ExecutionError, match="some modules of stage 0 are sharded"):
        same(step_of("loop", schedule="gpipe", dp=2, wrap=within), 2)


def compiled(module: Any, mesh: Any) -> Any:
    return torch.compile(in_ddp(module, mesh), backend="eager")


def part(module: Any, mesh: Any) -> Any:
    module.a = in_ddp(module.a, mesh)
    return module


def unwrapped(module: Any, mesh: Any) -> Any:
    return replicate(module, process_group=mesh.get_group())


@pytest.mark.parametrize("wrap", [compiled, part, unwrapped])
def test_replicas_that_torchs_runtime_does_not_see_are_refused(wrap: Wrap) -> None:
    """torch's runtime would not have told DDP which backward is the last."""
    with pytest.raises(ExecutionError, match="some modules of stage 0 are replicated"):
        same(step_of("loop", schedule="one_f_one_b", dp=2, wrap=wrap), 2)


# ---------------------------------------------------------------- gathers of stages


@given(programs(), st.integers(1, 4))
def test_stages_are_whole_where_they_compute(program: Program, active: int) -> None:
    try:
        orders = make_actions(program)
    except SchedirError:
        return  # torch has no such actions
    for order in orders.values():
        held = insert_unshards(order, active)
        require_unsharded(held, active)
        assert [a for a in held if "SHARD" not in str(a)] == order


@given(programs(), st.integers(1, 4), st.data())
def test_whatever_is_missing_or_too_much_is_refused(
    program: Program, active: int, data: st.DataObject
) -> None:
    try:
        held = insert_unshards(make_actions(program)[0], active)
    except SchedirError:
        return
    at = data.draw(st.sampled_from([k for k, a in enumerate(held) if "SHARD" in str(a)]))
    for wrong in (held[:at] + held[at + 1 :], [*held[: at + 1], held[at], *held[at + 1 :]]):
        with pytest.raises(SchedirError):
            require_unsharded(wrong, active)
