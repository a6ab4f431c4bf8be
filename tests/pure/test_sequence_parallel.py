"""Tests of programs with sequence parallelism: their text, their output, and refusals."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Program,
    check,
    compile,
    evaluation_program,
    from_text,
    planner,
    schedules,
    simulate,
    to_text,
)
from schedir.errors import SchedirError, ShapeError, UsageError
from schedir.ir.isa.instructions import TP_SPLIT_OPS, Opcode
from schedir.models.gpt_config import GPTConfig
from schedir.schedules import interleaved, one_f_one_b, zb_h1
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config, PipelineConfig
from tests.edits import Edit, move, op

O = Opcode


SHAPE = PipelineShape(2, 4)


def compile_sequence_parallel(
    schedule: Any = one_f_one_b, shape: PipelineShape = SHAPE, **options: Any
) -> Program:
    return compile(schedule, shape, tp=2, dp=2, sequence_parallel=True, **options)


@given(
    schedule=st.sampled_from([one_f_one_b, zb_h1, interleaved]),
    ranks=st.integers(1, 3),
    frozen_stages=st.integers(0, 1),
    zero=st.integers(0, 3),
    turn=st.booleans(),
    tied=st.booleans(),
    clip=st.booleans(),
)
def test_trained_stages_are_summed_once_after_reductions(
    schedule: Any, ranks: int, frozen_stages: int, zero: int, turn: bool, tied: bool, clip: bool
) -> None:
    shape = PipelineShape(ranks, 2 * ranks, 2 if schedule is interleaved else 1)
    frozen_stages = min(frozen_stages, shape.stages - 1)
    options: dict[str, Any] = {"reduce_scatter_at": "each_backward"} if turn and zero > 1 else {}
    tied = tied and not frozen_stages
    program = compile_sequence_parallel(
        schedule,
        shape,
        frozen_stages=frozen_stages,
        zero=zero,
        tied_weights=tied,
        clip_grad_norm=clip,
        **options,
    )
    assert program.used_opcodes.isdisjoint(TP_SPLIT_OPS)
    for rank, rank_stages in enumerate(shape.stages_on_rank):
        stream = [*program.streams[rank]]
        summed = [k for k, i in enumerate(stream) if i.op is O.ReduceSequenceParallelGrads]
        assert [stream[k].stage for k in summed] == [s for s in rank_stages if s >= frozen_stages]
        others = (O.ReduceGrads, O.ReduceScatter, O.ReduceTied)
        assert all(k < min(summed) for k, i in enumerate(stream) if i.op in others and summed)
    bare = compile(schedule, shape, tp=2, dp=2, boundary="sharded", frozen_stages=frozen_stages,
                   zero=zero,
                   tied_weights=tied, clip_grad_norm=clip, **options)  # fmt: skip
    other_instructions = [
        [i for i in s if i.op is not O.ReduceSequenceParallelGrads] for s in program.streams
    ]
    assert other_instructions == [[*s] for s in bare.streams]


def test_header_and_digest_contain_sequence_parallel() -> None:
    program = compile_sequence_parallel()
    assert "sequence_parallel yes" in to_text(program) and from_text(to_text(program)) == program
    assert "sequence_parallel" not in to_text(compile(one_f_one_b, PipelineShape(2, 4), tp=2))
    assert from_text(to_text(program)).digest == program.digest
    assert replace(program, sequence_parallel=False).digest != program.digest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_misplaced_sum_is_refused(tied: bool, clip: bool) -> None:
    """Any other position is refused, except neighbouring positions with the same effect."""
    program = compile_sequence_parallel(tied_weights=tied, clip_grad_norm=clip)
    ops = [i.op for i in program.streams[0]]
    sum_index, end = ops.index(O.ReduceSequenceParallelGrads), len(ops)
    last_reduction = ops.index(O.ReduceTied if tied else O.ReduceGrads)
    first_use = ops.index(O.ReduceNorm if clip else O.OptimizerStep)
    for place in range(end):
        edit = Edit.of(program, Random(0))
        move(edit.lists[0], sum_index, place if place <= sum_index else place + 1)
        moved_ops = [op(word) for word in edit.lists[0]]
        assert moved_ops.index(O.ReduceSequenceParallelGrads) == place
        if last_reduction <= place < first_use and (
            place > last_reduction or moved_ops[place - 1] is ops[last_reduction]
        ):
            check(edit.result())
        elif place != sum_index:
            with pytest.raises(SchedirError):
                check(edit.result())


def test_scatter_of_sharded_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="rank has only its own tokens") as caught:
        compile_sequence_parallel(boundary="replicated")
    assert caught.value.fields == ("boundary", "sequence_parallel")


def test_sequence_parallel_needs_tensor_parallelism() -> None:
    for dp in (1, 2):
        with pytest.raises(ShapeError, match="tp is 1") as caught:
            compile(one_f_one_b, PipelineShape(2, 4), dp=dp, sequence_parallel=True)
        assert caught.value.fields == ("sequence_parallel", "tp")


def test_evaluation_program_has_no_sum() -> None:
    for program in (
        evaluation_program(compile_sequence_parallel()),
        compile_sequence_parallel(schedules.forward_only),
    ):
        assert program.sequence_parallel
        assert O.ReduceSequenceParallelGrads not in program.used_opcodes
        assert program.used_opcodes.isdisjoint(TP_SPLIT_OPS)


def test_sum_overlaps_compute_and_takes_its_cost() -> None:
    program = compile_sequence_parallel(one_f_one_b, PipelineShape(1, 2))
    spans = [
        simulate(program, Costs(F=1, B=2, reduce_sequence_parallel_grads=c)).span for c in (0, 0.5)
    ]
    assert spans == [6, 6.5]


def test_config_sets_sequence_parallel() -> None:
    pipeline: Any = {"tp": 2, "sequence_parallel": True}
    config = Config(GPTConfig(heads=2, context=8), PipelineConfig(**pipeline))
    assert config.request.program.sequence_parallel
    with pytest.raises(UsageError, match="tp 2 does not divide the context of 9 tokens") as caught:
        Config(GPTConfig(heads=2, context=9), PipelineConfig(**pipeline))
    assert caught.value.fields == ("context", "sequence_parallel")
    with pytest.raises(ShapeError, match="tp is 1"):
        Config(pipeline=PipelineConfig(**pipeline | {"tp": 1})).request.program  # noqa: B018


def test_plan_with_sequence_parallel_is_trainable(tmp_path: Any) -> None:
    choice = planner.ParallelPlan(pp=2, tp=2, microbatches=4, sequence_parallel=True)
    model = planner.TransformerSpec(layers=4, hidden=64, heads=4, vocab=256, sequence=64)
    file = tmp_path / "plan.toml"
    file.write_text(planner.train_config(model, choice))
    assert "sequence_parallel = true" in file.read_text()
    assert read_config(str(file)).request.program.sequence_parallel
    assert planner.plan_program(choice).sequence_parallel
    assert not planner.plan_program(replace(choice, tp=1)).sequence_parallel
