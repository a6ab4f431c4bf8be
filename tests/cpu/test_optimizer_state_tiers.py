"""Tests that optimizer states on host or disk, and host steps, equal those on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import schedir
from benchmarks.zero import Case, find_differences, train
from schedir import PipelineShape
from schedir.checkpoints import Saver, load, save
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale, MainOptimizer
from schedir.schedules import (
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
)
from tests.cases import ALL, cases
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
    are_equal,
    make_executor,
    poison_weights,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.tiny_stages import copy_parameters, make_batch

torch.set_num_threads(1)

PLACEMENTS = ("host", "disk", "cpu_step")
# Schedules with several stages of a rank, several ranks, or replicas of stages.
SMALL_SHAPES = {
    "one rank": (interleaved, PipelineShape(1, 2, 3)),
    "interleaved": (interleaved, PipelineShape(2, 2, 2)),
    "1F1B": (one_f_one_b, PipelineShape(2, 3)),
    "in a vee": (dualpipe_v, PipelineShape(1, 2, 2, "vee")),
    "mirrored": (dualpipe, PipelineShape(2, 4, placement="mirror")),
}
OTHER_OPTIONS: list[dict[str, Any]] = [
    {}, {"recompute": "all"}, {"offload": "all"}, {"offload": "all", "offload_to_disk": [0]},
    {"buffer_sharing": "minimal"}, {"frozen_stages": 1},
]  # fmt: skip


def _make_ranks(
    make: str, folder: Path, case: tuple[Any, PipelineShape], **options: Any
) -> InProcessExecutor:
    scaled = GradientOptions(loss_scale=LossScale(8.0) if options["clip_grad_norm"] else None)
    program = schedir.compile(*case, progress_model="per_edge", **options)
    execution = ExecutionOptions(spill_dir=folder)
    half = make == "bfloat16"
    return make_executor(
        program, OPTIMIZER_FACTORIES[make], half=half, execution=execution, gradients=scaled
    )


@st.composite
def placement_options(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Draw numbers of buffers, and return the options for placements of optimizer states.

    A normal run draws one placement.
    """
    device, host = ({"optimizer_device_buffers": draw(st.integers(1, 3))},
                    {"optimizer_host_buffers": draw(st.integers(1, 3))})  # fmt: skip
    options: dict[str, dict[str, Any]] = {"host": device, "disk": device | host, "cpu_step": {}}
    placement = draw(st.sampled_from(PLACEMENTS))
    return options if ALL else {placement: options[placement]}


@settings(max_examples=30)
@given(
    shape=st.sampled_from(sorted(SMALL_SHAPES)),
    make=st.sampled_from(sorted(OPTIMIZER_FACTORIES)),
    clip=st.booleans(),
    tied=st.booleans(),
    options=st.sampled_from(OTHER_OPTIONS),
    buffers=placement_options(),
    nonfinite_step=st.sampled_from([0, 1, None]),
)
def test_placed_states_equal_states_on_device(
    shape: str,
    make: str,
    clip: bool,
    tied: bool,
    options: dict[str, Any],
    buffers: dict[str, dict[str, Any]],
    nonfinite_step: int | None,
) -> None:
    """States are on the device, host or disk, and the device or the host steps them.

    In one of the steps, the gradient of the first trained stage may be NaN. The gradients of this
    stage are complete last, so all other stages could step before them.
    """
    first_stage = options.get("frozen_stages", 0)
    # The hook below is on the first rank, but the second rank has the Parameters of stage 1.
    assume(not (first_stage and shape == "mirrored"))
    # A MainOptimizer needs a trained weight, and here the first rank has none.
    assume(not (first_stage and shape == "1F1B" and make == "bfloat16"))
    shared: dict[str, Any] = {"clip_grad_norm": clip, **options}
    shared["tied_weights"] = tied and shape != "mirrored" and not first_stage
    with TemporaryDirectory() as folder:
        results = []
        for placement, placed_options in {"device": {}, **buffers}.items():
            all_options = shared | placed_options | {"optimizer_placement": placement}
            world = _make_ranks(make, Path(folder), SMALL_SHAPES[shape], **all_options)
            results.append(_train_with_nonfinite_step(world, first_stage, nonfinite_step))
        assert not [*Path(folder).iterdir()]  # The file of the disk has no name.
    for placed in results[1:]:
        assert are_equal(results[0], placed)


def _train_with_nonfinite_step(
    world: InProcessExecutor, first_stage: int, nonfinite_step: int | None
) -> list[Tensor]:
    """Return the losses and the training state after three steps, one of which may be skipped."""
    optimizer = world.executors[0].resources.optimizer
    if nonfinite_step is None or not isinstance(optimizer, MainOptimizer):
        # A read of weights while the host steps them finds NaN. A MainOptimizer copies no weights
        # to the device after an update that is not finite, so these weights would stay NaN.
        poison_weights(world)
    rank = next(rank for rank in world.executors if first_stage in rank.stages)
    weight = next(rank.stages[first_stage].module.parameters())
    # Gradient clipping skips the update on all ranks.
    skipping_ranks = world.executors if world.program.clip_grad_norm else [rank]
    losses = []
    for step in range(3):
        before = copy_parameters(*skipping_ranks)
        hook = weight.register_hook(lambda gradient, step=step: gradient
                                    * (torch.nan if step == nonfinite_step else 1))  # fmt: skip
        losses += run_steps_in_random_order(world, step)
        hook.remove()
        is_skipped = all(not bool(rank.finite_updates) for rank in skipping_ranks)
        assert is_skipped == (step == nonfinite_step)
        assert are_equal(before, copy_parameters(*skipping_ranks)) == is_skipped
    return losses + read_training_state(world)


LEVELS = cases([(1, True, False), (3, False, True)], [(0, True, False), (2, True, False)])


def _train_levels(rank: int, folder: str) -> Any:
    torch.set_num_threads(1)
    return [
        train(
            rank,
            Case(
                looped_bfs, PipelineShape(1, 2, 2), half=half,
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


def test_several_programs_share_optimizer_states(tmp_path: Path) -> None:
    """Two programs train different numbers of microbatches, and a third one evaluates."""
    results = []
    for placement in ("device", *PLACEMENTS):
        compiled: Any = partial(
            schedir.compile, progress_model="per_edge", optimizer_placement=placement
        )
        large, small = (compiled(gpipe, PipelineShape(2, m), clip_grad_norm=True) for m in (2, 1))
        evaluation = compiled(forward_only, PipelineShape(2, 1))
        execution = ExecutionOptions(spill_dir=tmp_path)
        world = make_executor(small, ADAMW, extra_programs=[large, evaluation], execution=execution)
        x, y, scale = make_batch(3)
        losses = []
        for _ in range(2):
            losses.append(world.step(x[:2], y[:2], scale, program=large))
            losses.append(world.step(x[2:], y[2:], scale, program=small))
            losses.append(world.evaluate(x[:1], y[:1], program=evaluation))
        results.append([*losses, *read_training_state(world)])
    assert all(are_equal(results[0], placed) for placed in results[1:])


MODEL = Model(dropout=0.1, clip=True)


def _make_layout(placement: str, folder: Path, model: Model = MODEL, **options: Any) -> Any:
    layout = Layout(
        interleaved, PipelineShape(1, 2, 2), options={"optimizer_placement": placement, **options}
    )
    return create_in_process_executor(layout, model, execution=ExecutionOptions(spill_dir=folder))


@pytest.mark.parametrize(
    ("first", "then", "half"),
    cases(
        [("disk", "host", False), ("cpu_step", "disk", True)],
        [("host", "device", True), ("device", "cpu_step", False)],
    ),
)
def test_checkpoint_loads_with_another_placement(
    first: str, then: str, half: bool, tmp_path: Path
) -> None:
    model = MODEL._replace(half=half)
    saved, resumed, unbroken = (
        _make_layout(placement, tmp_path, model) for placement in (first, then, "device")
    )
    run_steps(saved, 0, 1)
    save(saved, tmp_path / "saved", step=1, name_map=keep_name)
    load(resumed, tmp_path / "saved", name_map=keep_name)
    run_steps(resumed, 1, 2)
    run_steps(unbroken, 0, 2)
    assert are_equal(read_training_state(resumed), read_training_state(unbroken))


@pytest.mark.parametrize("placement", cases(["disk"], ["host"]))
def test_snapshot_has_state_of_its_step(placement: str, tmp_path: Path) -> None:
    world = _make_layout(placement, tmp_path, checkpoint_snapshots=True)
    saver = Saver(world, tmp_path / "snapshot", name_map=keep_name)
    run_steps(world, 0, 1)
    save(world, tmp_path / "saved", step=1, name_map=keep_name)
    saver.schedule_save(1)
    run_steps(world, 1, 2)
    saver.write()
    run_steps(world, 2, 3)
    saver.wait()
    results = []
    for folder in ("snapshot", "saved"):
        loaded = _make_layout(placement, tmp_path)
        load(loaded, tmp_path / folder, name_map=keep_name)
        results.append(read_training_state(loaded))
    assert are_equal(*results)
