"""Tests that optimizer states on host or disk, and host steps, equal those on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import schedir
from benchmarks.zero import Case, find_differences, train
from schedir import PipelineShape
from schedir.checkpoints import Saver, load, save
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.schedules import forward_only, gpipe, interleaved, looped_bfs
from tests.cpu.checkpoint_layouts import (
    Layout,
    Model,
    create_in_process_executor,
    keep_name,
    run_steps,
)
from tests.cpu.gloo_processes import run
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    OPTIMIZER_FACTORIES,
    SHAPES,
    are_equal,
    make_executor,
    poison_weights,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.tiny_stages import make_batch

torch.set_num_threads(1)

PLACEMENTS = ("host", "disk", "cpu_step")
# Options of the program, and those for one placement only, by shape and optimizer.
CASES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    ("interleaved", "AdamW"): (
        {"clip_grad_norm": True, "tied_weights": True},
        {"disk": {"optimizer_host_buffers": 1}},
    ),
    ("interleaved", "bfloat16"): ({"recompute": "all", "frozen_stages": 2}, {}),
    ("interleaved", "AdamW, fused"): (
        {},
        {"host": {"optimizer_device_buffers": 1}, "cpu_step": {"offload": "all"}},
    ),
    ("1F1B", "momentum"): (
        {"tied_weights": True},
        {"disk": {"offload": "all", "offload_to_disk": [0]}},
    ),
    ("1F1B", "NAdam"): ({"clip_grad_norm": True}, {}),
    ("in a vee", "Adam, groups"): (
        {"clip_grad_norm": True, "tied_weights": True, "buffer_sharing": "minimal"},
        {"disk": {"optimizer_host_buffers": 3}},
    ),
    ("mirrored", "bfloat16"): (
        {"clip_grad_norm": True},
        {"disk": {"optimizer_device_buffers": 1}},
    ),
}


def _make_ranks(
    make: str, folder: Path, case: tuple[Any, PipelineShape], **options_and_arguments: Any
) -> InProcessExecutor:
    options = {
        name: options_and_arguments.pop(name)
        for name in ("gradients", "extra_programs")
        if name in options_and_arguments
    }
    program = schedir.compile(*case, progress_model="per_edge", **options_and_arguments)
    execution = ExecutionOptions(spill_dir=folder)
    half = make == "bfloat16"
    return make_executor(
        program, OPTIMIZER_FACTORIES[make], half=half, execution=execution, **options
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("shape", "make"), CASES)
def test_offloaded_states_equal_states_on_device(
    shape: str, make: str, placement: str, tmp_path: Path
) -> None:
    options, placement_options = CASES[shape, make]
    extra_options = placement_options.get(placement, {})
    shared = {name: value for name, value in extra_options.items() if name.startswith("offload")}
    device = _make_ranks(make, tmp_path, SHAPES[shape], **options, **shared)
    placed = _make_ranks(
        make, tmp_path, SHAPES[shape], optimizer_placement=placement, **options, **extra_options
    )
    poison_weights(placed)  # A read of weights while the host steps them finds NaN.
    assert are_equal(*(run_steps_in_random_order(world, 0, 1, 2) for world in (device, placed)))
    assert are_equal(read_training_state(device), read_training_state(placed))
    assert not [*tmp_path.iterdir()]  # The file of the disk has no name.


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("make", "clip"),
    [("AdamW", True), ("AdamW, fused", False), ("momentum", True), ("bfloat16", False)],
)
def test_one_nonfinite_gradient_skips_all_stages(
    make: str, clip: bool, placement: str, tmp_path: Path
) -> None:
    """The gradient of the first stage is complete last. All other stages could step before it."""
    options = {
        "clip_grad_norm": clip,
        "gradients": GradientOptions(loss_scale=LossScale(8.0) if clip else None),
    }
    worlds = [
        _make_ranks(
            make,
            tmp_path,
            (interleaved, PipelineShape(1, 4, 3)),
            optimizer_placement=tier,
            **options,
        )
        for tier in ("device", placement)
    ]
    for world in worlds:
        run_steps_in_random_order(world, 0)
        (rank,) = world.executors
        before = read_training_state(world)
        first = next(rank.stages[0].module.parameters())
        hook = first.register_hook(lambda gradient: gradient * torch.nan)
        run_steps_in_random_order(world, 1)
        hook.remove()
        after = read_training_state(world)
        assert not bool(rank.finite_updates)
        if clip:
            assert float(after.pop()) == float(before.pop()) / 2
        assert are_equal(before, after)
    losses = [run_steps_in_random_order(world, 2, 3) for world in worlds]
    assert are_equal(*losses) and are_equal(*map(read_training_state, worlds))
    assert bool(rank.finite_updates) and not any(t.isnan().any() for t in after)


LEVELS = ((0, True, False), (1, False, True), (2, False, True), (3, True, True), (3, False, False))


def _train_levels(rank: int, folder: str) -> Any:
    torch.set_num_threads(1)
    return [
        train(
            rank,
            Case(
                looped_bfs, PipelineShape(1, 3, 3), half=half,
                options={"optimizer_placement": placement, "clip_grad_norm": clip},
                folder=folder,
            ),
            zero,
        )
        for zero, half, clip in LEVELS
        for placement in ("device", *PLACEMENTS)
    ]  # fmt: skip


def test_each_replica_offloads_its_shard(tmp_path: Path) -> None:
    """At each ZeRO level the shard is on the host, or in a file of the replica."""
    results = run(partial(_train_levels, folder=str(tmp_path)), 2)
    count = 1 + len(PLACEMENTS)
    runs = [[rank_results[k] for rank_results in results] for k in range(count * len(LEVELS))]
    for k, placed in enumerate(runs):
        assert not find_differences(runs[k - k % count], placed)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_programs_share_offloaded_states(placement: str, tmp_path: Path) -> None:
    """Two programs train different numbers of microbatches, and a third one evaluates."""
    results = []
    for tier in ("device", placement):
        options: dict[str, Any] = {"progress_model": "per_edge", "optimizer_placement": tier}
        large, small = (
            schedir.compile(gpipe, PipelineShape(2, m), clip_grad_norm=True, **options)
            for m in (3, 2)
        )
        evaluation = schedir.compile(forward_only, PipelineShape(2, 2), **options)
        execution = ExecutionOptions(spill_dir=tmp_path)
        world = make_executor(small, ADAMW, extra_programs=[large, evaluation], execution=execution)
        x, y, scale = make_batch(5)
        losses = []
        for _ in range(2):
            losses.append(world.step(x[:3], y[:3], scale, program=large))
            losses.append(world.step(x[3:], y[3:], scale, program=small))
            losses.append(world.evaluate(x[:2], y[:2], program=evaluation))
        results.append((losses, read_training_state(world)))
    assert are_equal(results[0][0], results[1][0]) and are_equal(results[0][1], results[1][1])


MODEL = Model(dropout=0.1, clip=True)


def _make_layout(placement: str, folder: Path, model: Model = MODEL, **options: Any) -> Any:
    layout = Layout(
        interleaved, PipelineShape(2, 4, 2), options={"optimizer_placement": placement, **options}
    )
    return create_in_process_executor(layout, model, execution=ExecutionOptions(spill_dir=folder))


@pytest.mark.parametrize(
    ("first", "then", "half"),
    [
        ("host", "device", True),
        ("device", "host", False),
        ("disk", "device", True),
        ("device", "disk", False),
        ("cpu_step", "device", True),
        ("host", "cpu_step", False),
    ],
)
def test_checkpoint_loads_with_another_placement(
    first: str, then: str, half: bool, tmp_path: Path
) -> None:
    model = MODEL._replace(half=half)
    saved, resumed, unbroken = (
        _make_layout(placement, tmp_path, model) for placement in (first, then, "device")
    )
    run_steps(saved, 0, 2)
    save(saved, tmp_path / "saved", step=2, name_map=keep_name)
    load(resumed, tmp_path / "saved", name_map=keep_name)
    run_steps(resumed, 2, 4)
    run_steps(unbroken, 0, 4)
    assert are_equal(read_training_state(resumed), read_training_state(unbroken))


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_snapshot_has_state_of_its_step(placement: str, tmp_path: Path) -> None:
    world = _make_layout(placement, tmp_path, checkpoint_snapshots=True)
    saver = Saver(world, tmp_path / "snapshot", name_map=keep_name)
    run_steps(world, 0, 2)
    save(world, tmp_path / "saved", step=2, name_map=keep_name)
    saver.schedule_save(2)
    run_steps(world, 2, 3)
    saver.write()
    run_steps(world, 3, 4)
    saver.wait()
    results = []
    for folder in ("snapshot", "saved"):
        loaded = _make_layout(placement, tmp_path)
        load(loaded, tmp_path / folder, name_map=keep_name)
        results.append(read_training_state(loaded))
    assert are_equal(*results)
