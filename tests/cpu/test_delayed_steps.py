"""Tests of the CPU optimizer with weight delay, which steps while the next update computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import schedir
from schedir import PipelineShape
from schedir.analysis.memory.footprint import compute_footprints, count_peak_versions
from schedir.checkpoints import load, save
from schedir.errors import ModelError
from schedir.ir.isa.instructions import FORWARD_OPS, SEND_OPS, Lane
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import ExecutionOrders, InProcessExecutor
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.services.stage_weight_versions import StageWeightVersions
from schedir.schedules import one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.testing.tiny_model import make_batch, make_tiny_stages, squared_error
from schedir.transports.gloo import GlooTransport
from tests.cpu import tiny_stages as of_gpt
from tests.cpu.checkpoint_layouts import Layout, Model, in_process, same, steps
from tests.cpu.gloo_processes import run
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    MAKES,
    equal,
    left,
    made,
    poison_weights,
    stepped,
)
from tests.cpu.test_host_steps import steps_of
from tests.cpu.test_several_updates import BOUNDARY, adam, split, stage_by_stage, weights

torch.set_num_threads(1)
WHERE = ("device", "cpu_step")


def flushed(r: int, P: int, m: int) -> RankSchedule:
    """Return updates of two microbatches, which all ranks run one after the other."""
    return m // 2 * (2 * F + 2 * B)


def deep(r: int, P: int, m: int) -> RankSchedule:
    """Return depth-first updates of two microbatches, for two stages per rank."""
    return m // 2 * (2 * F[0] + 2 * F[1] + 2 * B[1] + 2 * B[0])


CASES: list[tuple[Any, PipelineShape]] = [
    (pipedream_2bw, PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)),
    (pipedream_2bw, PipelineShape(3, 9, optimizer_steps=3, weight_delay=1)),
    (split, PipelineShape(3, 12, optimizer_steps=4, weight_delay=1)),
    (split, PipelineShape(2, 8, optimizer_steps=4, weight_delay=2)),
    (one_f_one_b, PipelineShape(3, 5, optimizer_steps=5, weight_delay=(2, 1, 0))),
    (flushed, PipelineShape(2, 6, optimizer_steps=3)),
    (deep, PipelineShape(1, 6, 2, optimizer_steps=3, weight_delay=1)),
    (deep, PipelineShape(1, 6, 2, optimizer_steps=3)),
]
momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def world_of(
    schedule: Any, shape: PipelineShape, states: str, optimizer: Any, **how: Any
) -> InProcessExecutor:
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", optimizer_placement=states, **how
    )
    return InProcessExecutor(
        program,
        make_tiny_stages(shape.stages),
        loss=squared_error,
        boundary=BOUNDARY,
        optimizer=optimizer,
    )


@settings(max_examples=25)
@given(st.sampled_from(CASES), st.sampled_from([adam, momentum]), st.integers(0, 2**32 - 1))
def test_a_microbatch_uses_its_version_whatever_takes_how_long(
    case: tuple[Any, PipelineShape], optimizer: Any, seed: int
) -> None:
    """Random legal orders are compared with a plain loop that keeps versions."""
    schedule, shape = case
    right = stage_by_stage(shape, *make_batch(shape.microbatches), optimizer)
    world = world_of(schedule, shape, "cpu_step", optimizer)
    poison_weights(world)
    slow = [lane for k, lane in enumerate((Lane.HOST, Lane.D2H, Lane.H2D)) if seed >> k & 1]
    event(f"slow: {len(slow)} lanes")
    for k, rank in enumerate(world.executors):
        for lane in slow:  # about a millisecond per stage
            rank.state.resources.service(CopyLanes).bandwidth[lane] = 2e6
        if Lane.HOST in slow:  # also delay the start of its work
            own = steps_of(world, k)
            vars(own)["step"] = partial(_late, own.step)
    world.step(*make_batch(shape.microbatches), order_seed=seed)
    modules = {s: stage.module for rank in world.executors for s, stage in rank.stages.items()}
    assert equal(weights([modules[s] for s in range(shape.stages)]), right)


def _late(step: Any, *what: Any) -> None:
    sleep(0.02)
    step(*what)


@pytest.mark.parametrize(
    ("case", "make", "how"),
    [
        (1, "bfloat16", {"clip_grad_norm": True, "tied_weights": True}),
        (1, "AdamW", {"clip_grad_norm": True, "frozen_stages": 1, "checkpoint_snapshots": True}),
        (4, "Adam, groups", {"clip_grad_norm": True, "recompute": "all"}),
    ],
)
def test_the_bits_are_those_of_steps_on_the_device(case: int, make: str, how: Any) -> None:
    """Losses are equal too."""
    schedule, shape = CASES[case]
    half, found = make == "bfloat16", []
    for states in WHERE:
        program = schedir.compile(
            schedule, shape, progress_model="per_edge", optimizer_placement=states, **how
        )
        world = made(program, MAKES[make], half=half)
        poison_weights(world)
        found.append(
            [*stepped(world, 0, 1, 2), *left(world), *(r.grad_norm for r in world.executors)]
        )
    assert equal(*found)


@pytest.mark.parametrize("clip", [False, True])
def test_only_the_update_that_is_not_finite_is_left_out(clip: bool) -> None:
    schedule, shape = CASES[0]
    found = []
    for states in WHERE:
        program = schedir.compile(
            schedule,
            shape,
            clip_grad_norm=clip,
            progress_model="per_edge",
            optimizer_placement=states,
        )
        world = made(program, ADAMW)
        last, calls = world.executors[-1].stages[shape.stages - 1].module, count()
        hook = partial(_spoil, calls)
        last.register_forward_hook(hook)
        poison_weights(world)
        world.step(*of_gpt.batch(shape.microbatches, 0), order_seed=3)
        finite = [rank.finite_updates.tolist() for rank in world.executors]
        assert finite[1] == [True, False, True]
        assert finite[0] == (finite[1] if clip else finite[0])
        found.append([*left(world), *(rank.finite_updates for rank in world.executors)])
    assert equal(*found)


def _spoil(calls: Iterator[int], module: Any, taken: Any, out: Tensor) -> Tensor:
    """Make the third forward of a stage return values that are not finite."""
    return out * (torch.nan if next(calls) == 2 else 1.0)


@pytest.mark.parametrize("states", WHERE)
def test_a_rank_that_adds_to_no_gradient_judges_each_update_by_its_own_norm(states: str) -> None:
    """A rank that ends updates late may receive the next norm before it has used the first."""
    shape, seen = PipelineShape(2, 2, optimizer_steps=2, weight_delay=1), 0
    own = schedir.compile(
        pipedream_2bw,
        shape,
        clip_grad_norm=True,
        frozen_stages=1,
        progress_model="per_edge",
        optimizer_placement=states,
    )
    first, rest = schedir.to_text(own, folded=False).split("\nrank 1\n")
    ends = [f"  {i}" for i in own.streams[0] if i.op not in (*FORWARD_OPS, *SEND_OPS)]
    kept = [line for line in first.split("\n") if line not in ends]
    program = schedir.from_text("\n".join([*kept, *ends, "rank 1", rest]))
    judges = ends[1].strip()
    for seed in range(100):
        order = [
            (r, str(program.streams[r][k]))
            for r, k in ExecutionOrders(program, "per_edge").random_order(seed)
        ]
        if order.index((0, "reduce_norm 1")) > order.index((0, judges)):
            continue
        seen += 1
        world = made(program, ADAMW)
        last = world.executors[-1].stages[shape.stages - 1].module
        last.register_forward_hook(partial(_spoil, count(2)))
        world.step(*of_gpt.batch(shape.microbatches, 0), order_seed=seed)
        assert [rank.finite_updates.tolist() for rank in world.executors] == [[False, True]] * 2
        assert torch.equal(*(rank.grad_norm for rank in world.executors))
    assert seen


def _processes(rank: int) -> Any:
    torch.set_num_threads(1)
    found = []
    schedule, shape = CASES[0]
    for states in WHERE:
        program = schedir.compile(
            schedule, shape, clip_grad_norm=True, dp=1, optimizer_placement=states
        )
        stages = {
            s: m
            for s, m in enumerate(make_tiny_stages(shape.stages))
            if s in shape.stages_on_rank[rank]
        }
        executor = Executor(
            program, rank, stages, GlooTransport(program), loss=squared_error, boundary=BOUNDARY,
            gradients=GradientOptions(max_norm=0.5),
            optimizer=adam([p for m in stages.values() for p in m.parameters()]),
        )  # fmt: skip
        if states == "cpu_step":
            executor.state.resources.service(CopyLanes).bandwidth[Lane.HOST] = 1e6
        for _ in range(2):
            executor.step(*make_batch(shape.microbatches))
        found.append([*weights([*stages.values()]), executor.grad_norm.clone()])
    return found


def test_on_processes() -> None:
    for device, host in run(_processes, 2):
        assert equal(device, host)


@pytest.mark.parametrize("case", [0, 1, 4, 5, 6])
def test_as_much_is_on_each_tier_as_was_predicted(case: int) -> None:
    """In any order, no more versions exist than are counted."""
    schedule, shape = CASES[case]
    stages, (x, y, _) = of_gpt.gpt_stages(shape.stages, tied=False), of_gpt.batch(2)
    sizes = measure_sizes(
        stages, x[0], y[0], loss=gpt.loss, boundary=of_gpt.BOUNDARY, optimizer_state=ADAMW
    )
    world = made(
        schedir.compile(schedule, shape, progress_model="per_edge", optimizer_placement="cpu_step"),
        ADAMW,
    )
    stepped(world, 0)
    most = [0] * shape.ranks
    for r, rank in enumerate(world.executors):
        for versions in rank.state.service(StageWeightVersions).by_stage.values():
            _counted(versions, most, r)
    stepped(world, 1)
    assert most == count_peak_versions(world.program).tolist()
    host, device = (compute_footprints(world.program, sizes, tier) for tier in ("host", "device"))
    for r, rank in enumerate(world.executors):
        assert set(host[r].total_bytes) == {
            sum(t.nbytes for t in steps_of(world, r).list_host_memory())
        }
        assert "optimizer" not in device[r].static_memory
        (number, size) = device[r].static_memory["versions"]
        own = [p for s in rank.stages.values() for p in s.module.parameters()]
        assert size == most[r] * sum(p.nbytes for p in own)
        assert number == most[r] * len(rank.stages)


def _counted(versions: Any, most: list[int], rank: int) -> None:
    keep = versions.keep_version

    def counts(*more: Any) -> None:
        keep(*more)
        most[rank] = max(most[rank], len(versions.copies_by_version))

    vars(versions)["keep_version"] = counts


def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Each run of a program begins without delay, so checkpoints contain no versions."""
    model = Model(dropout=0.1, clip=True)

    def layout(states: str) -> Layout:
        shape = PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)
        return Layout(pipedream_2bw, shape, options={"optimizer_placement": states})

    one, other, whole = (in_process(layout(s), model) for s in ("cpu_step", "cpu_step", "device"))
    steps(one, 0, 2)
    save(one, tmp_path, step=2, name_map=same)
    load(other, tmp_path, name_map=same)
    steps(other, 2, 4)
    steps(whole, 0, 4)
    assert equal(left(other), left(whole))


def test_the_host_steps_while_the_next_update_is_computed() -> None:
    """In a measured run, the host's step overlaps with computes and ends before the step."""
    schedule, shape = CASES[0]
    world = made(
        schedir.compile(schedule, shape, progress_model="per_edge", optimizer_placement="cpu_step"),
        ADAMW,
    )
    stepped(world, 0, 1)
    spans = world.timeline().spans
    for rank in range(shape.ranks):
        own = spans[spans["rank"] == rank]
        (first,) = own[(own["lane"] == Lane.HOST) & (own["mb"] == 0)]
        text = [str(i) for i in world.program.streams[rank]]
        step = own[text.index("step")]
        between = own[text.index(f"host_step {rank}") : text.index("step")]
        assert sum(each["op"] < 2 for each in between) >= 2  # F and B of the next update
        assert first["end"] <= step["start"]


def test_what_is_refused() -> None:
    program = schedir.compile(*CASES[0], clip_grad_norm=True, optimizer_placement="cpu_step")
    with pytest.raises(ModelError, match="a loss scale needs a program with one update per step"):
        made(program, ADAMW, gradients=GradientOptions(loss_scale=LossScale(8.0)))
