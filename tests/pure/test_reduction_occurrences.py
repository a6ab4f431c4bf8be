"""Tests that sharded gradients are reduced once, or after each run of their backwards."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.schedules import dualpipe, interleaved_zb, looped_bfs
from schedir.schedules.schedule_algebra import B, F, RankSchedule, overlapped_pair
from schedir.testing import shapes
from schedir.testing.strategies import random_compute_program
from schedir.verify.check import check

Events = list[tuple[str, set[int]]]


def list_gradient_events(program: Program, rank: int) -> Events:
    """Return in order the stages that a rank adds gradients to, by group, and reduces."""
    stream, gradient_events = program.streams[rank], list[tuple[str, set[int]]]()
    for instr, joined in zip(stream, stream.joined, strict=True):
        if joined:
            gradient_events[-1][1].update({instr.stage} if instr.op in GRAD_ADDING_OPS else ())
        elif instr.op is Opcode.ReduceScatter:
            gradient_events.append(("reduce", {instr.stage}))
        else:
            gradient_events.append(("add", {instr.stage} if instr.op in GRAD_ADDING_OPS else set()))
    return [(kind, stages) for kind, stages in gradient_events if stages]


def assert_only_accumulating_gradients_unsharded(program: Program) -> None:
    """Assert that only the gradients of the current backwards are full, with few reductions."""
    for rank in range(program.shape.ranks):
        unsharded: set[int] = set()
        for kind, stages in list_gradient_events(program, rank):
            if kind == "add":
                unsharded |= stages
                assert unsharded == stages
            else:
                unsharded -= stages
        assert not unsharded
        adds = [stages for kind, stages in list_gradient_events(program, rank) if kind == "add"]
        runs = [added for added, later in pairwise([*adds, set()]) if added != later]
        reductions = [kind for kind, _ in list_gradient_events(program, rank)].count("reduce")
        assert reductions == sum(map(len, runs))


@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_only_accumulating_gradients_are_unsharded(
    shape: PipelineShape, seed: int, dp: int
) -> None:
    draft = random_compute_program(shape, random.Random(seed))
    program = compile(
        draft,
        dp=dp,
        zero=2,
        reduce_scatter_at="each_backward",
        clip_grad_norm=True,
        tied_weights=shape.stages > 1,
    )
    assert_only_accumulating_gradients_unsharded(program)
    for model in MODELS:
        check(program, model, blocking_hosts=True)
    assert from_text(to_text(program)) == program


def test_overlapped_pair_is_one_occurrence() -> None:
    def both(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
        return m * (F[0] + F[1]) + B[1] + (m - 1) * overlapped_pair(B[1], B[0]) + B[0]

    program = compile(both, PipelineShape(1, 5, 2), dp=2, zero=2, reduce_scatter_at="each_backward")
    assert_only_accumulating_gradients_unsharded(program)
    reduced = [i.stage for i in program.streams[0] if i.op is Opcode.ReduceScatter]
    assert reduced == [1, 0, 1, 0]
    assert_only_accumulating_gradients_unsharded(
        compile(
            dualpipe,
            PipelineShape(4, 8, 2, "mirror"),
            dp=2,
            zero=3,
            reduce_scatter_at="each_backward",
        )
    )


def test_looped_bfs_reduces_once_and_interleaved_zb_often() -> None:
    """If each stage's backwards are one run, there is one reduction at its end."""
    shape = PipelineShape(4, 16, 4)
    end, each_backward = (
        compile(looped_bfs, shape, dp=2, zero=2, reduce_scatter_at=reduce_at)
        for reduce_at in ("update_end", "each_backward")
    )
    assert each_backward.streams == end.streams
    interleaved_program = compile(
        interleaved_zb, shape, dp=2, zero=2, reduce_scatter_at="each_backward"
    )
    counts = [
        sum(i.op is Opcode.ReduceScatter for i in stream) for stream in interleaved_program.streams
    ]
    assert counts == [16, 46, 76, 106]
