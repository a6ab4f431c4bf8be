"""Tests of users' own placements, with any ranks and any number of replicas of each stage."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.errors import CompletenessError, ShapeError
from schedir.ir.isa.instructions import BACKWARD, FORWARD, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import NAMED_PLACEMENTS, format_placement
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.testing.strategies import random_compute_program, shapes
from schedir.verify.check import check


def test_named_placement_equals_its_rows() -> None:
    for name, rows in {
        "loop": [[0, 1, 2, 3]],
        "vee": [[0, 1, 2, 3, 3, 2, 1, 0]],
        "mirror": [[0, 1, 2, 3], [3, 2, 1, 0]],
        "mirror-vee": [[0, 1, 2, 3, 3, 2, 1, 0], [3, 2, 1, 0, 0, 1, 2, 3]],
    }.items():
        by_name = PipelineShape(4, 6, placement=name)
        by_rows = PipelineShape(4, 6, placement=tuple(map(tuple, rows)))
        assert by_name.replica_ranks.tolist() == by_rows.replica_ranks.tolist() == rows
        assert by_name.stages_on_rank == by_rows.stages_on_rank
        assert (
            by_name.stages_per_rank
            == by_rows.stages_per_rank
            == NAMED_PLACEMENTS[name].stages_per_rank
        )
        programs = [
            compile(random_compute_program(shape, random.Random(1))) for shape in (by_name, by_rows)
        ]
        assert programs[0].digest == programs[1].digest


@pytest.mark.parametrize(
    ("rows", "m", "parts"),
    [(1, 5, (0, 5)), (2, 5, (0, 3, 5)), (3, 5, (0, 2, 4, 5)), (3, 7, (0, 3, 5, 7))],
)
def test_placement_rows_share_microbatches_evenly(
    rows: int, m: int, parts: tuple[int, ...]
) -> None:
    shape = PipelineShape(3, m, placement=tuple((k, (k + 1) % 3, (k + 2) % 3) for k in range(rows)))
    assert shape.microbatch_row_offsets == parts and shape.placement_rows == rows
    for stage in range(3):
        ranks_by_microbatch = [
            (stage + k) % 3 for k in range(rows) for _ in range(parts[k], parts[k + 1])
        ]
        assert (
            np.broadcast_to(shape.rank_of_stage(stage, range(m)), m).tolist() == ranks_by_microbatch
        )


@pytest.mark.parametrize("text", ["loop", "mirror-vee", "0,1,1", "0,1,2,3/3,2,1,0", "0,1/1,2/2,0"])
def test_placement_round_trips_through_text(text: str) -> None:
    ranks = 4 if text[0] in "lm" or "3" in text else 2 + ("2" in text)
    shape = PipelineShape(ranks, 6, placement=text)
    assert format_placement(shape.placement) == text
    program = compile(random_compute_program(shape, random.Random(0)))
    assert f"placement {text}\n" in to_text(program)
    assert from_text(to_text(program)) == program


@pytest.mark.parametrize(
    ("shape", "fact"),
    [
        (
            {"placement": ((0, 1), (1, 1))},
            "puts stage 1 on rank 1 twice: the replicas of a stage must be",
        ),
        (
            {"placement": ((0, 1), (1,))},
            "each row of placement must have a rank for every stage, but ",
        ),
        ({"placement": ((0, 1), (1, 2))}, "puts stage 1 on rank 2, but the ranks are 0 to 1"),
        (
            {"placement": ((0, 1), 1)},
            "a list with the rank of each stage, or one such list for each stage replica",
        ),
        ({"placement": ((0, 1), "10")}, "or one such list for each stage replica, not "),
        ({"placement": "0,1/1,x"}, "or one such list for each stage replica, not '0,1/1,x'"),
        ({"placement": ((0, 1), (1, 0)), "ranks": 3}, "placement gives rank 2 no stage"),
        ({"placement": ((0, 1), (1, 0)), "stages_per_rank": 4}, "puts up to 2 stages on a rank, "),
        (
            {"placement": ((0, 1), (1, 0)), "microbatches": 1},
            "2 replicas of each stage needs at least 2 microbatches, ",
        ),
        (
            {"placement": ((0, 1), (1, 0)), "optimizer_steps": 2},
            "2 replicas of each stage needs optimizer_steps=1, not ",
        ),
        ({"placement": "mirror-vee", "ranks": 3}, "pairs ranks and their stages: ranks must be "),
        ({"placement": "mirror-vee", "stages_per_rank": 3}, "stages_per_rank must be even, not 3"),
    ],
)
def test_invalid_placement_is_refused(shape: dict[str, Any], fact: str) -> None:
    with pytest.raises(ShapeError) as caught:
        PipelineShape(**{"ranks": 2, "microbatches": 8} | shape)
    assert fact in str(caught.value) and set(caught.value.fields) >= {*shape} - {"ranks"}


def test_stage_has_local_number_on_each_rank() -> None:
    """Stage 1 is `F[1]` on rank 0 and `F[0]` on rank 1."""
    shape = PipelineShape(3, 4, placement=((0, 0), (2, 1)))
    assert shape.stages_on_rank == ((0, 1), (1,), (0,))
    assert shape.local_stage(1, [0, 1]).tolist() == [1, 0]
    rank_schedules = [2 * (F[0] + F[1] + B[1] + B[0]), 2 * (F + B), 2 * (F + B)]

    def mine(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return rank_schedules[rank]

    program = compile(mine, shape)
    check(program)
    forwards = [[(s, mb) for op, s, mb in stream if op is FORWARD] for stream in program.streams]
    assert forwards == [[(0, 0), (1, 0), (0, 1), (1, 1)], [(1, 2), (1, 3)], [(0, 2), (0, 3)]]


@settings(max_examples=25)
@given(shapes(placements=["rows"]), st.randoms(use_true_random=False), st.booleans())
def test_random_stage_replicas_compile_and_reduce(
    shape: PipelineShape, rng: random.Random, tied: bool
) -> None:
    """Each stage replica runs its microbatches, and reduces with the other replicas."""
    for model in MODELS:
        program = compile(
            random_compute_program(shape, rng),
            progress_model=model,
            tied_weights=tied and shape.stages > 1,
        )
        check(program, model)
    for rank, stream in enumerate(program.streams):
        for op, s, mb in stream:
            if op in (FORWARD, BACKWARD):
                assert shape.replica_ranks[shape.replica_row_of_microbatch(mb), s] == rank
    for op in (Opcode.ReduceGrads, Opcode.ReduceReplicatedStages):
        reduced_stages = [[i.stage for i in stream if i.op is op] for stream in program.streams]
        assert [sorted(rank_stages) for rank_stages in reduced_stages] == [
            [*rank_stages] for rank_stages in shape.stages_on_rank
        ]
    # The span is at least the compute of one replica of a stage.
    assert simulate(program).span >= 3 * shape.microbatch_row_offsets[1]


def test_microbatch_of_other_replica_is_refused() -> None:
    def greedy(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return F[0].at(2) + F[0].at(0)

    with pytest.raises(CompletenessError, match="runs microbatch 2 on rank 1, not on rank 0"):
        compile(greedy, PipelineShape(2, 4, placement=((0, 1), (1, 0))))
