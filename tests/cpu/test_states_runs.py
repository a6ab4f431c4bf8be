"""States on the host: the bits of states on the device, in memory that is moved, and as much."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import schedir
from benchmarks.zero import Case, differing, train
from schedir import PipelineShape
from schedir.analysis.memory.footprint import compute_footprints
from schedir.checkpoints import Saver, load, save
from schedir.ir.isa.instructions import TIERS
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import (
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
)
from tests.cpu.layouts import Layout, Model, in_process, same, steps
from tests.cpu.spawn import run
from tests.cpu.stated import (
    ADAMW,
    MAKES,
    SHAPES,
    both,
    equal,
    left,
    made,
    optimizer_of,
    stepped,
)
from tests.cpu.tiny_stages import BOUNDARY, batch, gpt_stages

torch.set_num_threads(1)

# ---------------------------------------------------------------- bits


@pytest.mark.parametrize(
    ("shape", "make", "how"),
    [
        ("interleaved", "AdamW", {"clip_grad_norm": True, "tied_weights": True}),
        ("interleaved", "bfloat16", {"recompute": "all", "frozen_stages": 2}),
        ("interleaved", "AdamW, fused", {"optimizer_device_buffers": 1}),
        ("1F1B", "momentum", {"tied_weights": True}),
        ("1F1B", "NAdam", {"clip_grad_norm": True}),
        (
            "in a vee",
            "Adam, groups",
            {"clip_grad_norm": True, "tied_weights": True, "buffer_sharing": "minimal"},
        ),
        ("mirrored", "bfloat16", {"clip_grad_norm": True}),
    ],
)
def test_the_bits_are_those_of_states_on_the_device(shape: str, make: str, how: Any) -> None:
    half = make == "bfloat16"
    worlds = [made(p, MAKES[make], half=half) for p in both(*SHAPES[shape], **how)]
    losses = [stepped(world, 0, 1, 2) for world in worlds]
    assert equal(*losses) and equal(*map(left, worlds))


LEVELS = ((0, True, False), (1, False, True), (3, True, True), (3, False, False))


def _processes(rank: int, folder: str) -> Any:
    torch.set_num_threads(1)
    return [
        train(
            rank,
            Case(
                looped_bfs, PipelineShape(1, 3, 3), half=half,
                options={"optimizer_placement": states, "clip_grad_norm": clip},
                folder=folder,
            ),
            zero,
        )
        for zero, half, clip in LEVELS
        for states in TIERS
    ]  # fmt: skip


def test_parts_of_replicas_are_moved(tmp_path: Path) -> None:
    """At each level of ZeRO: a replica has its own part on the host, or in a file of its own."""
    told = run(partial(_processes, folder=str(tmp_path)), 2)
    runs = [[own[k] for own in told] for k in range(len(TIERS) * len(LEVELS))]
    for device, host, disk in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        assert not differing(device, host)
        assert not differing(device, disk)


@pytest.mark.parametrize("make", ["AdamW", "AdamW, fused", "momentum"])
@pytest.mark.parametrize("clip", [True, False])
def test_nothing_is_stepped_where_one_gradient_is_not_finite(make: str, clip: bool) -> None:
    """Of a stage that comes last: those before it would have been stepped by then."""
    gradients = GradientOptions(loss_scale=LossScale(8.0) if clip else None)
    worlds = [
        made(p, MAKES[make], gradients=gradients)
        for p in both(interleaved, PipelineShape(1, 4, 3), clip_grad_norm=clip)
    ]
    for world in worlds:
        stepped(world, 0)
        (rank,) = world.executors
        before = left(world)
        first = next(rank.stages[0].module.parameters())
        hook = first.register_hook(lambda gradient: gradient * torch.nan)
        stepped(world, 1)
        hook.remove()
        after = left(world)
        assert not bool(rank.finite_updates)
        if clip:
            assert float(after.pop()) == float(before.pop()) / 2
        assert equal(before, after)
    losses = [stepped(world, 2, 3) for world in worlds]
    assert equal(*losses) and equal(*map(left, worlds))


def test_programs_beside_each_other() -> None:
    """Two that train, with other microbatches, and one that evaluates."""
    found = []
    for states in ("device", "host"):
        how: dict[str, Any] = {"progress_model": "per_edge", "optimizer_placement": states}
        large, small = (
            schedir.compile(gpipe, PipelineShape(2, m), clip_grad_norm=True, **how) for m in (3, 2)
        )
        looks = schedir.compile(forward_only, PipelineShape(2, 2), **how)
        world = made(small, ADAMW, extra_programs=[large, looks])
        x, y, scale = batch(5)
        losses = []
        for _ in range(2):
            losses.append(world.step(x[:3], y[:3], scale, program=large))
            losses.append(world.step(x[3:], y[3:], scale, program=small))
            losses.append(world.evaluate(x[:2], y[:2], program=looks))
        found.append((losses, left(world)))
    assert equal(found[0][0], found[1][0]) and equal(found[0][1], found[1][1])


# ---------------------------------------------------------------- where it lies


def kept_by(rank: Executor) -> list[Tensor]:
    return [t for kept in optimizer_of(rank).state.values() for t in kept.values()]


def test_between_steps_all_of_it_is_on_the_host_and_nothing_is_left() -> None:
    """What was on the device is poisoned before it goes: whoever reads it, does not find it."""
    world = made(
        schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host"), ADAMW
    )
    stepped(world, 0)
    (rank,) = world.executors
    states = rank.state.service(OptimizerPlacement).optimizer_state
    assert states is not None and all(map(states.is_on_host, kept_by(rank)))
    places = [t.data_ptr() for t in kept_by(rank)]
    seen: list[Tensor] = []
    gone = states.finish_store

    def leave(stage: int) -> None:
        found = [here for _, _, here in states.pending_stores[stage].tensors]
        seen.extend(t for t in found if t.dim())
        resized = torch.UntypedStorage.resize_
        with patch.object(torch.UntypedStorage, "resize_", lambda *_: None):
            gone(stage)
        assert all(t.isnan().all() for t in found)
        for t in found:
            resized(t.untyped_storage(), 0)

    with patch.object(states, "finish_store", leave):
        stepped(world, 1)
    assert seen and all(map(states.is_on_host, kept_by(rank)))
    assert places == [t.data_ptr() for t in kept_by(rank)]  # one memory, made once


def test_as_much_is_on_each_tier_as_was_predicted() -> None:
    """To the byte; what else lives beside it, `test_zero_bytes` looks at."""
    shape, most = PipelineShape(1, 2, 3), []
    for slots in (1, 2, 3):
        stages, (x, y, _) = gpt_stages(shape.stages, tied=False), batch(2)
        sizes = measure_sizes(
            stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
        )
        how: dict[str, Any] = {"optimizer_placement": "host", "optimizer_device_buffers": slots}
        world = made(schedir.compile(looped_bfs, shape, progress_model="per_edge", **how), ADAMW)
        stepped(world, 0)
        (rank,) = world.executors
        (own,) = compute_footprints(world.program, sizes)
        here: list[int] = []
        rank.runner.calls = [
            call._replace(run=partial(_look, rank, call.run, here)) for call in rank.runner.calls
        ]
        stepped(world, 1)
        assert max(here) == own.dynamic_memory["state"][1].max()
        states = rank.state.service(OptimizerPlacement).optimizer_state
        assert states is not None
        on_host = compute_footprints(world.program, sizes, "host")[0].total_bytes
        assert set(on_host) == {sum(t.nbytes for t in states.list_host_memory())}
        most.append(max(here))
    assert most == sorted(set(most))


def _look(rank: Executor, run: Any, here: list[int]) -> None:
    run()
    states = rank.state.service(OptimizerPlacement).optimizer_state
    assert states is not None
    moving = [*states.pending_loads.values(), *states.pending_stores.values()]
    found = [
        t
        for stage in states.optimizer_parameters
        for t in states.list_state_tensors(stage)
        if not states.is_on_host(t)
    ]
    found += [memory for each in moving for _, _, memory in each.tensors]
    here.append(sum(t.nbytes for t in dict.fromkeys(found)))


# ---------------------------------------------------------------- checkpoints


MODEL = Model(dropout=0.1, clip=True)


def layout(states: str, **more: Any) -> Layout:
    return Layout(
        interleaved, PipelineShape(2, 4, 2), options={"optimizer_placement": states, **more}
    )


@pytest.mark.parametrize(
    ("first", "then", "half"), [("host", "device", True), ("device", "host", False)]
)
def test_a_checkpoint_has_what_lies_on_the_host(
    first: str, then: str, half: bool, tmp_path: Path
) -> None:
    model = MODEL._replace(half=half) if hasattr(MODEL, "_replace") else MODEL
    one, other, whole = (in_process(layout(states), model) for states in (first, then, "device"))
    steps(one, 0, 2)
    save(one, tmp_path, step=2, name_map=same)
    load(other, tmp_path, name_map=same)
    steps(other, 2, 4)
    steps(whole, 0, 4)
    assert equal(left(other), left(whole))


def test_a_snapshot_is_of_the_step_before(tmp_path: Path) -> None:
    world = in_process(layout("host", checkpoint_snapshots=True), MODEL)
    saver = Saver(world, tmp_path / "beside", name_map=same)
    steps(world, 0, 2)
    save(world, tmp_path / "at once", step=2, name_map=same)
    saver.schedule_save(2)
    steps(world, 2, 3)
    saver.write()
    steps(world, 3, 4)
    saver.wait()
    found = []
    for folder in ("beside", "at once"):
        other = in_process(layout("host"), MODEL)
        load(other, tmp_path / folder, name_map=same)
        found.append(left(other))
    assert equal(*found)


def test_state_of_elsewhere_is_moved_before_the_next_step() -> None:
    """Loaded by the optimizer's own method, it is on the device: in new memory."""
    program = schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host")
    one, other, plain = made(program, ADAMW), made(program, ADAMW), made(program, ADAMW)
    stepped(one, 0, 1)
    stepped(plain, 0, 1, 2)
    for a, b in zip(one.executors, other.executors, strict=True):
        optimizer_of(b).load_state_dict(optimizer_of(a).state_dict())
        for s, stage in b.stages.items():
            stage.module.load_state_dict(a.stages[s].module.state_dict())
    other.executors[0].random_streams.step = 2
    stepped(other, 2)
    assert equal(left(other), left(plain))
