"""Tests of the CPU optimizer with weight delay: it steps while the next update computes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.analysis.memory.footprint import compute_footprints, count_peak_versions
from schedir.checkpoints import load, save
from schedir.errors import ModelError
from schedir.ir.isa.instructions import FORWARD_OPS, SEND_OPS, Lane
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import ExecutionOrders, InProcessExecutor
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.services.stage_weight_versions import StageWeightVersions
from schedir.schedules import one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W
from schedir.testing.tiny_model import make_batch, make_tiny_stages, squared_error
from tests.cases import ALL, cases
from tests.cpu import tiny_stages as of_gpt
from tests.cpu.checkpoint_layouts import (
    Layout,
    Model,
    create_in_process_executor,
    keep_name,
    run_steps,
)
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    are_equal,
    make_executor,
    poison_weights,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.test_host_steps import get_placement
from tests.cpu.test_several_updates import BOUNDARY, LR, compute_gradient, weights

torch.set_num_threads(1)
PLACEMENTS = ("device", "cpu_step")


def one_f_one_b_with_split_backwards(r: int, P: int, m: int) -> RankSchedule:
    """Return 1F1B with split backwards, where W directly follows I."""
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + I + W) + lead * (I + W)


def run_updates_in_turn(r: int, P: int, m: int) -> RankSchedule:
    """Return updates of two microbatches. Each rank runs one update after the other."""
    return m // 2 * (2 * F + 2 * B)


def run_depth_first(r: int, P: int, m: int) -> RankSchedule:
    """Return depth-first updates of two microbatches, for two stages per rank."""
    return m // 2 * (2 * F[0] + 2 * F[1] + 2 * B[1] + 2 * B[0])


CASES: list[tuple[Any, PipelineShape]] = [
    (pipedream_2bw, PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)),
    (pipedream_2bw, PipelineShape(3, 9, optimizer_steps=3, weight_delay=1)),
    (one_f_one_b_with_split_backwards, PipelineShape(3, 12, optimizer_steps=4, weight_delay=1)),
    (one_f_one_b_with_split_backwards, PipelineShape(2, 8, optimizer_steps=4, weight_delay=2)),
    (one_f_one_b, PipelineShape(3, 5, optimizer_steps=5, weight_delay=(2, 1, 0))),
    (run_updates_in_turn, PipelineShape(2, 6, optimizer_steps=3)),
    (run_depth_first, PipelineShape(1, 6, 2, optimizer_steps=3, weight_delay=1)),
    (run_depth_first, PipelineShape(1, 6, 2, optimizer_steps=3)),
]
adam = partial(torch.optim.AdamW, lr=LR)
momentum = partial(torch.optim.SGD, lr=LR, momentum=0.9)


def train_stage_by_stage(
    shape: PipelineShape, inputs: Tensor, targets: Tensor, optimizer: Any
) -> list[Tensor]:
    """Return the weights of a plain loop, which assembles each model from old versions."""
    stages = make_tiny_stages(shape.stages)
    steps = [optimizer([*stage.parameters()]) for stage in stages]
    versions_by_stage = [[deepcopy(stage)] for stage in stages]
    for u in range(shape.optimizer_steps):
        mb = slice(u * shape.microbatches_per_update, (u + 1) * shape.microbatches_per_update)
        used = [
            versions[int(shape.weight_version(s, mb.start))]
            for s, versions in enumerate(versions_by_stage)
        ]
        compute_gradient(nn.Sequential(*used), inputs[mb], targets[mb])
        for stage, old, step, versions in zip(stages, used, steps, versions_by_stage, strict=True):
            for p, q in zip(stage.parameters(), old.parameters(), strict=True):
                p.grad = q.grad
            step.step()
            versions.append(deepcopy(stage))
    return weights(stages)


def compile_case(case: tuple[Any, PipelineShape], states: str, **options: Any) -> Program:
    return schedir.compile(*case, progress_model="per_edge", optimizer_placement=states, **options)


@settings(max_examples=25)
@given(st.sampled_from(CASES), st.sampled_from([adam, momentum]), st.integers(0, 2**32 - 1))
def test_microbatches_use_their_weight_version_in_any_order(
    case: tuple[Any, PipelineShape], optimizer: Any, seed: int
) -> None:
    """Random legal orders with slow lanes are compared with a plain loop that keeps versions."""
    shape = case[1]
    expected = train_stage_by_stage(shape, *make_batch(shape.microbatches), optimizer)
    world = InProcessExecutor(
        compile_case(case, "cpu_step"), make_tiny_stages(shape.stages), loss=squared_error,
        boundary=BOUNDARY, optimizer=optimizer,
    )  # fmt: skip
    poison_weights(world)
    slow_lanes = [lane for k, lane in enumerate((Lane.HOST, Lane.D2H, Lane.H2D)) if seed >> k & 1]
    event(f"slow: {len(slow_lanes)} lanes")
    for k, rank in enumerate(world.executors):
        for lane in slow_lanes:  # about a millisecond per stage
            rank.state.resources.service(CopyLanes).bandwidth[lane] = 2e6
        if Lane.HOST in slow_lanes:  # also delay the start of its work
            host_steps = get_placement(world, k)
            vars(host_steps)["step_on_host"] = partial(_step_late, host_steps.step_on_host)
    world.step(*make_batch(shape.microbatches), order_seed=seed)
    modules = {s: stage.module for rank in world.executors for s, stage in rank.stages.items()}
    assert are_equal(weights([modules[s] for s in range(shape.stages)]), expected)


def _step_late(step: Any, *arguments: Any) -> None:
    sleep(0.02)
    step(*arguments)


@pytest.mark.parametrize("clip", [False, True])
def test_only_nonfinite_update_is_skipped(clip: bool) -> None:
    shape, results = CASES[0][1], []
    for states in PLACEMENTS:
        world = make_executor(compile_case(CASES[0], states, clip_grad_norm=clip), ADAMW)
        last = world.executors[-1].stages[shape.stages - 1].module
        last.register_forward_hook(partial(_spoil_third_forward, count()))
        poison_weights(world)
        world.step(*of_gpt.make_batch(shape.microbatches, 0), order_seed=3)
        finite = [rank.finite_updates.tolist() for rank in world.executors]
        assert finite[1] == [True, False, True]
        assert finite[0] == (finite[1] if clip else finite[0])
        flags = [rank.finite_updates for rank in world.executors]
        results.append([*read_training_state(world), *flags])
    assert are_equal(*results)


def _spoil_third_forward(calls: Iterator[int], module: Any, inputs: Any, out: Tensor) -> Tensor:
    """Make the third forward of a stage return values that are not finite."""
    return out * (torch.nan if next(calls) == 2 else 1.0)


@pytest.mark.parametrize("states", PLACEMENTS)
def test_frozen_rank_uses_norm_of_each_update(states: str) -> None:
    """A rank that ends updates late may receive the next norm before it has used the first."""
    shape, tested_orders = PipelineShape(2, 2, optimizer_steps=2, weight_delay=1), 0
    compiled = compile_case((pipedream_2bw, shape), states, clip_grad_norm=True, frozen_stages=1)
    first, second_rank = schedir.to_text(compiled, folded=False).split("\nrank 1\n")
    ends = [f"  {i}" for i in compiled.streams[0] if i.op not in (*FORWARD_OPS, *SEND_OPS)]
    other_lines = [line for line in first.split("\n") if line not in ends]
    program = schedir.from_text("\n".join([*other_lines, *ends, "rank 1", second_rank]))
    first_step = ends[1].strip()
    for seed in range(100):
        order = [
            (r, str(program.streams[r][k]))
            for r, k in ExecutionOrders(program, "per_edge").random_order(seed)
        ]
        if order.index((0, "reduce_norm 1")) > order.index((0, first_step)):
            continue
        tested_orders += 1
        world = make_executor(program, ADAMW)
        last = world.executors[-1].stages[shape.stages - 1].module
        last.register_forward_hook(partial(_spoil_third_forward, count(2)))
        world.step(*of_gpt.make_batch(shape.microbatches, 0), order_seed=seed)
        assert [rank.finite_updates.tolist() for rank in world.executors] == [[False, True]] * 2
        assert torch.equal(*(rank.grad_norm for rank in world.executors))
        if tested_orders == 5 and not ALL:
            break
    assert tested_orders


@pytest.mark.parametrize("case", cases([0, 4], [1, 5, 6]))
def test_memory_of_each_tier_equals_prediction(case: int) -> None:
    """The peak number of weight versions equals the count, too."""
    schedule, shape = CASES[case]
    stages, (x, y, _) = of_gpt.gpt_stages(shape.stages, tied=False), of_gpt.make_batch(2)
    sizes = measure_sizes(
        stages, x[0], y[0], loss=gpt.loss, boundary=of_gpt.BOUNDARY, optimizer_state=ADAMW
    )
    world = make_executor(compile_case((schedule, shape), "cpu_step"), ADAMW)
    run_steps_in_random_order(world, 0)
    peak_versions = [0] * shape.ranks
    for r, rank in enumerate(world.executors):
        for versions in rank.state.service(StageWeightVersions).by_stage.values():
            _record_peak_versions(versions, peak_versions, r)
    run_steps_in_random_order(world, 1)
    assert peak_versions == count_peak_versions(world.program).tolist()
    host, device = (compute_footprints(world.program, sizes, tier) for tier in ("host", "device"))
    for r, rank in enumerate(world.executors):
        host_tensors = get_placement(world, r).list_host_tensors()
        assert set(host[r].total_bytes) == {sum(t.nbytes for t in host_tensors)}
        assert "optimizer" not in device[r].static_memory
        (number, size) = device[r].static_memory["versions"]
        parameters = [p for s in rank.stages.values() for p in s.module.parameters()]
        assert size == peak_versions[r] * sum(p.nbytes for p in parameters)
        assert number == peak_versions[r] * len(rank.stages)


def _record_peak_versions(versions: Any, peak_versions: list[int], rank: int) -> None:
    keep_version = versions.keep_version

    def keep_and_count(*arguments: Any) -> None:
        keep_version(*arguments)
        peak_versions[rank] = max(peak_versions[rank], len(versions.copies_by_version))

    vars(versions)["keep_version"] = keep_and_count


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Each run of a program begins without delay, so checkpoints contain no versions."""
    model = Model(dropout=0.1, clip=True)

    def layout(states: str) -> Layout:
        shape = PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)
        return Layout(pipedream_2bw, shape, options={"optimizer_placement": states})

    saved, resumed, uninterrupted = (
        create_in_process_executor(layout(s), model) for s in ("cpu_step", "cpu_step", "device")
    )
    run_steps(saved, 0, 1)
    save(saved, tmp_path, step=1, name_map=keep_name)
    load(resumed, tmp_path, name_map=keep_name)
    run_steps(resumed, 1, 2)
    run_steps(uninterrupted, 0, 2)
    assert are_equal(read_training_state(resumed), read_training_state(uninterrupted))


def test_host_step_overlaps_with_next_update() -> None:
    """In a measured run, the host step overlaps with computes and ends before `step` begins."""
    shape = CASES[0][1]
    world = make_executor(compile_case(CASES[0], "cpu_step"), ADAMW)
    run_steps_in_random_order(world, 0, 1)
    spans = world.timeline().spans
    for rank in range(shape.ranks):
        rank_spans = spans[spans["rank"] == rank]
        (first_host_step,) = rank_spans[(rank_spans["lane"] == Lane.HOST) & (rank_spans["mb"] == 0)]
        text = [str(i) for i in world.program.streams[rank]]
        step = rank_spans[text.index("step")]
        between = rank_spans[text.index(f"host_step {rank}") : text.index("step")]
        assert sum(span["op"] < 2 for span in between) >= 2  # F and B of the next update
        assert first_host_step["end"] <= step["start"]


def test_loss_scale_with_several_updates_is_refused() -> None:
    program = schedir.compile(*CASES[0], clip_grad_norm=True, optimizer_placement="cpu_step")
    with pytest.raises(ModelError, match="a loss scale needs a program with one update per step"):
        make_executor(program, ADAMW, gradients=GradientOptions(loss_scale=LossScale(8.0)))
