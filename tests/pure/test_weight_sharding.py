"""Tests of sharded weights: when a stage is unsharded, and how many stages are at once."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import schedules
from schedir.analysis.memory.buffer_slots import SLOT_KINDS, count_min_slots
from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.compiler.relower import extract_compute, infer_options
from schedir.errors import ShapeError, UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Opcode, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.passes.communication.unshard_placement import find_stays
from schedir.predict.simulate import simulate
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import shapes
from schedir.testing.strategies import random_compute_program, tied_weights
from schedir.training.config.config_file import read_config
from schedir.training.train import build_program
from schedir.verify.check import check

FULL = SLOT_KINDS.index(Value.UNSHARDED_PARAMS)


def count_unshards(program: Program) -> list[int]:
    """Return the number of unshards of each rank."""
    return [int((stream.op == Opcode.Unshard).sum()) for stream in program.streams]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "shape", "fewest"),
    [
        (schedules.one_f_one_b, PipelineShape(4, 8), 1),
        (schedules.looped_bfs, PipelineShape(4, 16, 4), 6),
        (schedules.looped_bfs, PipelineShape(1, 4, 6), 10),
        (schedules.interleaved, PipelineShape(4, 16, 4), 18),
        (schedules.zb_v, PipelineShape(4, 8, 2, "vee"), 2),
        (schedules.dualpipe, PipelineShape(4, 8, placement="mirror"), 2),
        (schedules.dualpipe_v, PipelineShape(4, 8, 2, "vee"), 2),
    ],
)
def test_stages_are_unsharded_where_used(
    schedule: Schedule, shape: PipelineShape, fewest: int, zero: int
) -> None:
    program = compile(schedule, shape, dp=2, zero=zero, clip_grad_norm=True)
    stages_by_rank = [len(stages) for stages in shape.stages_on_rank]
    for model in MODELS:
        check(program, model, blocking_hosts=True)
    if zero < 3:
        assert count_unshards(program) == stages_by_rank
        assert not any("unsharded_params" in slots.specified() for slots in program.slots)
    else:
        max_unsharded = [min(stages, 2) for stages in stages_by_rank]
        assert min(count_unshards(program)) >= fewest
        assert (
            count_min_slots(program)[:, FULL].tolist()
            == [s.unsharded_params for s in program.slots]
            == max_unsharded
        )


@given(shapes(), st.integers(0, 2**32 - 1), st.data())
def test_random_draft_compiles_for_every_zero_level(
    shape: PipelineShape, seed: int, data: st.DataObject
) -> None:
    zero = data.draw(st.integers(1, 3))
    frozen, tied = data.draw(st.integers(0, shape.stages - 1)), data.draw(tied_weights(shape))
    if any(stages[0] < frozen <= stages[-1] for stages in tied):
        frozen = 0
    model, overlap = data.draw(st.sampled_from(MODELS)), data.draw(st.booleans())
    program = compile(
        random_compute_program(shape, random.Random(seed)),
        progress_model=model,
        zero=zero,
        reduce_scatter_at=data.draw(
            st.sampled_from(["update_end", "each_backward"][: max(1, zero)])
        )
        if zero > 1
        else "update_end",
        frozen_stages=frozen,
        tied_weights=tied,
        clip_grad_norm=data.draw(st.booleans()),
        dp=data.draw(st.integers(1, 3)),
        tp=data.draw(st.integers(1, 2)),
        buffer_sharing=data.draw(st.sampled_from([None, "minimal", "latency_preserving"])),
        overlap=overlap,
        recompute=data.draw(st.sampled_from([None, "all"])),
    )
    for checked_model in (model,) if overlap else MODELS:
        check(program, checked_model, blocking_hosts=True)
    assert from_text(to_text(program)) == program
    if zero == 3:
        full = [slots.unsharded_params for slots in program.slots]
        assert (count_min_slots(program)[:, FULL] == full).all()


Steps = list[set[int]]
STEPS = st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=2), max_size=9)


def list_required_stages(steps: Steps, position: int, active: int, ahead: int) -> set[int]:
    """Return the stages of a step and of the next ones, as many as may be unsharded."""
    nearest: dict[int, None] = {}
    for step_stages in steps[position : position + ahead + 1]:
        nearest |= dict.fromkeys(sorted(step_stages))
    return {*[*nearest][:active]}


def count_fewest_stays(steps: Steps, active: int, ahead: int) -> int:
    """Return the minimum number of unshards, by trying all sets of stages in each step."""
    stage_sets = [{*c} for k in range(active + 1) for c in combinations(range(4), k)]
    min_stays = {0: 0}  # bits of the set of unsharded stages -> unshards
    for position in range(len(steps)):
        required = list_required_stages(steps, position, active, ahead)
        min_stays = {
            encode_bits(unsharded): min(
                stays + (encode_bits(unsharded) & ~before).bit_count()
                for before, stays in min_stays.items()
            )
            for unsharded in stage_sets
            if required <= unsharded
        }
    return min(min_stays.values())


def encode_bits(stages: set[int]) -> int:
    return sum(1 << stage for stage in stages)


@given(STEPS, st.integers(2, 4), st.integers(0, 4))
def test_unshard_count_is_minimal(steps: Steps, active: int, ahead: int) -> None:
    """Compare with brute force. Required stages are unsharded, and never more than the limit."""
    step = np.array([k for k, step_stages in enumerate(steps) for _ in step_stages], np.int64)
    stage = np.array(
        [used_stage for step_stages in steps for used_stage in sorted(step_stages)], np.int64
    )
    stays = find_stays(step, stage, active, ahead)
    assert len(stays) == count_fewest_stays(steps, active, ahead)
    begins = [-1] * active + sorted(int(step[last_use]) for _, last_use in stays)
    for position in range(len(steps)):
        unsharded = [
            int(stage[first_use])
            for begin, (first_use, last_use) in zip(begins, stays, strict=False)
            if begin < position <= step[last_use]
        ]
        assert list_required_stages(steps, position, active, ahead) <= {*unsharded}
        assert len(unsharded) == len({*unsharded}) <= active


def test_prefetched_unshard_overlaps_compute() -> None:
    """A prefetched unshard overlaps with the run before. Without prefetch, unshards are fewer."""
    without_prefetch, prefetched = (
        compile(
            schedules.interleaved, PipelineShape(4, 16, 4), dp=2, zero=3, unshard_prefetch=ahead
        )
        for ahead in (0, 1)
    )
    assert (count_unshards(without_prefetch), count_unshards(prefetched)) == ([18] * 4, [20] * 4)
    costs = Costs(F=1, B=2, send=0.05, unshard=0.5)
    free_span = simulate(prefetched, replace(costs, unshard=0)).span
    spans = [simulate(program, costs).span for program in (prefetched, without_prefetch)]
    assert free_span < spans[0] <= free_span + 0.5 + 1e-9 < spans[1]


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        ({"zero": 3, "unsharded_stages": 3}, ("unsharded_stages",)),
        ({"zero": 3, "unsharded_stages": 0}, ("unsharded_stages",)),
        ({"zero": 3, "unsharded_stages": 1.5}, ("unsharded_stages",)),
        ({"zero": 3, "unsharded_stages": True}, ("unsharded_stages",)),
        ({"zero": 3, "unshard_prefetch": -1}, ("unshard_prefetch",)),
        ({"zero": 2, "unsharded_stages": 1}, ("unsharded_stages", "zero")),
        ({"zero": 2, "unshard_prefetch": 1}, ("unshard_prefetch", "zero")),
        ({"unsharded_stages": 1}, ("unsharded_stages", "zero")),
    ],
)
def test_wrong_unshard_options_are_refused(how: dict[str, Any], fields: tuple[str, ...]) -> None:
    with pytest.raises((UsageError, ShapeError)) as caught:
        compile(schedules.looped_bfs, PipelineShape(2, 4, 2), dp=2, **how)
    assert caught.value.fields == fields


def test_overlapped_pair_needs_two_unsharded_stages() -> None:
    with pytest.raises(ShapeError, match="at once") as caught:
        compile(
            schedules.dualpipe,
            PipelineShape(4, 8, placement="mirror"),
            dp=2,
            zero=3,
            unsharded_stages=1,
        )
    assert caught.value.fields == ("unsharded_stages",)


@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 3))
def test_unshard_options_are_inferred_from_program(
    shape: PipelineShape, seed: int, active: int, ahead: int
) -> None:
    """A program can be lowered again with the inferred options."""
    max_stages = max(map(len, shape.stages_on_rank))
    program = compile(
        random_compute_program(shape, random.Random(seed)),
        zero=3,
        dp=2,
        unsharded_stages=min(active, max_stages),
        unshard_prefetch=ahead,
    )
    assert compile(extract_compute(program), **infer_options(program, "per_device")) == program


def test_config_sets_unshard_options(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    pipeline = '[pipeline]\nschedule = "looped_bfs"\nranks = 2\nstages_per_rank = 2\nzero = 3\n'
    path.write_text(pipeline + "[memory]\nunsharded_stages = 1\nunshard_prefetch = 0\n")
    assert [slots.unsharded_params for slots in build_program(read_config(str(path))).slots] == [
        1,
        1,
    ]
