"""Tests of segments with sequence parallelism: where and when tensors are gathered."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Program,
    Sizes,
    check,
    compile,
    evaluation_program,
    from_text,
    schedules,
    simulate,
    split_costs,
    to_text,
)
from schedir.commands.simulate import count_sent_bytes
from schedir.compiler.relower import extract_compute, infer_options
from schedir.errors import SchedirError
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, Lane, Opcode
from schedir.ir.pipeline.placement import find_named_placement
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.what_if import advise
from tests.edits import Edit, move, pull, push
from tests.mutants import built_in_schedules
from tests.oracle import Machine
from tests.oracle_threads import verdict

O = Opcode
SEGMENT_COLLECTIVES = (O.TPGatherAct, O.TPReduceAct, O.TPGatherGrad, O.TPReduceGrad)


def compile_segments(
    schedule: Any, shape: PipelineShape, segments: Any = 3, **options: Any
) -> Program:
    return compile(
        schedule, shape, tp=2, stage_segments=segments, sequence_parallel=True, **options
    )


def make_shape(schedule: Any) -> PipelineShape:
    placement, v = getattr(schedule, "placed", ("loop", None))
    return PipelineShape(2, 4, v or find_named_placement(placement).stages_per_rank, placement)


@pytest.mark.parametrize("schedule", built_in_schedules(), ids=lambda schedule: schedule.__name__)
def test_built_in_schedules_compile_with_segments(schedule: Any) -> None:
    """Programs are complete and in order, and have as many gathers as sums.

    Both independent machines agree. If collectives take no time, the run takes as long as without
    segments, except pairs, which are interleaved.
    """
    shape = make_shape(schedule)
    try:
        uncut = compile(schedule, shape, tp=2, sequence_parallel=True)
    except SchedirError:
        pytest.skip("not for this shape")
    program = compile_segments(schedule, shape)
    assert check(program, "blocking_serial") and verdict(program, "per_edge").kind == "ok"
    assert from_text(to_text(program)) == program
    costs = Costs(F=1, B=2, I=1, W=1, send=0.5, tp_reduce=0.75, tp_gather=0.25)
    machine = Machine(program, "per_edge", costs)
    assert machine.run()
    assert max(machine.ended.values()) == pytest.approx(
        simulate(program, costs, progress_model="per_edge").span
    )
    for has_direction, ops in (
        (1, SEGMENT_COLLECTIVES[:2]),
        (uncut.has_backward, SEGMENT_COLLECTIVES[2:]),
    ):
        counts = [int(np.sum(program.op == op)) for op in ops]
        assert counts == [has_direction * shape.stages * shape.microbatches] * 2
    if not uncut.joined.any():
        full_costs = Costs(F=5, B=10, I=5, W=5, send=0.5)
        span = simulate(program, split_costs(full_costs, 3, shape, (1, 3, 1))).span
        assert span == pytest.approx(simulate(uncut, full_costs).span)


@settings(max_examples=60)
@given(data=st.data())
def test_collectives_follow_segment_boundaries(data: st.DataObject) -> None:
    """For any letters, each compute follows the collective of its letter.

    Programs with a dropped, doubled or moved collective are refused if the machine refuses them.
    """
    ranks, m = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    letters = st.text("fg.", max_size=3)
    boundaries = [data.draw(letters) or 1 for _ in range(ranks)]
    frozen = data.draw(st.integers(0, ranks - 1))
    schedule = data.draw(st.sampled_from([schedules.one_f_one_b, schedules.zb_h1]))
    program = compile_segments(schedule, PipelineShape(ranks, m), boundaries, frozen_stages=frozen)
    for stream in program.streams:
        for before, i in pairwise(
            [None, *(j for j in stream if j.op in (*SEGMENT_COLLECTIVES, *COMPUTE_OPS))]
        ):
            assert i is not None
            if i.op is O.Forward or i.op in BACKWARD_OPS:
                ahead, k = i.op is O.Forward, i.stage - (i.op is O.Forward)
                letter = (program.segment_boundaries + "-")[k : k + 1] if k >= 0 else ""
                expected_ops = dict(
                    zip(
                        "fg",
                        SEGMENT_COLLECTIVES[:2] if ahead else (O.TPReduceGrad, O.TPGatherGrad),
                        strict=True,
                    )
                )
                collective = before is not None and before.op in SEGMENT_COLLECTIVES and before
                assert (collective and collective.op) == expected_ops.get(letter, False)
                assert not collective or collective[1:] == i[1:]
    places = [(r, k) for r, stream in enumerate(program.streams) for k, i in enumerate(stream)
              if i.op in SEGMENT_COLLECTIVES]  # fmt: skip
    if not places:
        return
    rank, position = data.draw(st.sampled_from(places))
    edit = Edit.of(program, Random(0))
    words = edit.lists[rank]
    change = data.draw(st.sampled_from(["drop", "double", "move"]))
    if change == "move":
        move(words, position, data.draw(st.integers(0, len(words))))
    elif change == "drop":
        pull(words, position)
    else:
        push(words, data.draw(st.integers(0, len(words))), words[position])
    is_wrong = verdict(edit.result(), "per_edge").kind != "ok"
    assert is_wrong or change == "move"
    try:
        check(edit.result(), "per_edge")
    except SchedirError:
        assert is_wrong
    else:
        assert not is_wrong


def test_instruction_order_with_segments() -> None:
    program = compile_segments(schedules.one_f_one_b, PipelineShape(1, 1), frozen_stages=0)
    assert [str(i) for i in program.streams[0]][:12] == [
        "F 0.0", "tp_gather_act 1.0", "F 1.0", "tp_reduce_act 2.0", "F 2.0", "B 2.0",
        "reduce_grads 2",
        "tp_gather_grad 1.0", "B 1.0", "reduce_grads 1", "tp_reduce_grad 0.0", "B 0.0",
    ]  # fmt: skip
    assert [str(i) for i in program.streams[0] if i.op is O.ReduceSequenceParallelGrads] == [
        f"reduce_sequence_parallel_grads {s}" for s in range(3)
    ]
    behind = compile_segments(schedules.gpipe, PipelineShape(2, 1), frozen_stages=1)
    collectives = [
        str(i) for stream in behind.streams for i in stream if i.op in SEGMENT_COLLECTIVES
    ]
    assert collectives == ["tp_gather_act 1.0", "tp_reduce_act 2.0", "tp_gather_act 4.0",
                    "tp_reduce_act 5.0", "tp_gather_grad 4.0",
                    "tp_reduce_grad 3.0"]  # fmt: skip


def test_relowered_program_is_unchanged() -> None:
    program = compile_segments(
        schedules.one_f_one_b, PipelineShape(2, 4), "fg", clip_grad_norm=True
    )
    drafted = extract_compute(program)
    assert compile(drafted, **infer_options(program, "per_device", drafted)) == program
    evaluation = evaluation_program(program)
    assert evaluation.sequence_parallel
    assert {*evaluation.used_opcodes} & {*SEGMENT_COLLECTIVES} == {
        O.TPGatherAct,
        O.TPReduceAct,
    }
    grouped = compile_segments(
        schedules.one_f_one_b, PipelineShape(2, 4), "fg", clip_grad_norm=True, overlap=True
    )
    assert sorted(map(str, grouped.streams[0])) == sorted(map(str, program.streams[0]))


@pytest.mark.parametrize(("boundaries", "costs"), [
    ("f", Costs(F=2, B=2, tp_gather=1, tp_reduce=2)),
    ("g", Costs(F=2, B=2, tp_gather=2, tp_reduce=1)),
    ("fg", Costs(F=2, B=2, tp_gather=1, tp_reduce=0.5)),
])  # fmt: skip
def test_segment_collectives_take_their_cost(boundaries: str, costs: Costs) -> None:
    """A blocking host continues during a collective too."""
    program = compile_segments(schedules.gpipe, PipelineShape(1, 1), boundaries)
    collective_time = 3 if len(boundaries) == 1 else 2 * 1.5
    for blocks in (False, True):
        assert (
            simulate(program, costs, blocking_hosts=blocks).span
            == 4 * (len(boundaries) + 1) + collective_time
        )
    text = "F 0.0; tp_gather_act 1.0; F 0.1; tp_gather_act 1.1; F 1.0; F 1.1"
    header = "stages_per_rank 2 placement 0,0 tp 2\nmeets f sequence_parallel yes"
    two = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 2 {header}\nrank 0\n  {text}")
    for blocks in (False, True):
        assert simulate(two, Costs(F=2, tp_gather=2), blocking_hosts=blocks).span == 8


def test_gather_waits_are_filled_and_advised() -> None:
    """Gathers alone can take time, and weight gradients fill the waits for them.

    Waits for gathers count as waits for sums of segments, and not for messages.
    """
    shape, shares = PipelineShape(2, 6), (0.2, 1, 0.2, 1, 0.2)
    two = split_costs(Costs(F=2, I=2, W=2, tp_gather=0.6), 5, shape, shares)
    unfilled, filled = (
        simulate(
            compile_segments(schedules.zb_h1, shape, 5, costs=two, fill_collective_waits=fill), two
        )
        for fill in (None, "W")
    )
    assert filled.span < unfilled.span - 4 * 0.6
    shape, costs = PipelineShape(1, 4), Costs(F=2, I=2, W=2, tp_gather=0.6)
    plain = simulate(compile_segments(schedules.zb_h1, shape, 5), costs)
    idle = sum_by_cause(idleness(plain), 1)[0]
    assert {*np.flatnonzero(idle).tolist()} == {IdleCause.SUM}
    saved_shares = {
        change.description: change.saved_share for change in advise(plain, costs).changes
    }
    free_gathers = next(
        saves for description, saves in saved_shares.items() if "sums of segments" in description
    )
    assert free_gathers == pytest.approx(
        1 - simulate(plain.program, Costs(F=2, I=2, W=2)).span / plain.span
    )
    assert not any(
        saves for description, saves in saved_shares.items() if "messages" in description
    )
    assert any("fill_collective_waits=" in description for description in saved_shares)


def test_gather_and_reduce_scatter_send_all_reduce_bytes() -> None:
    """A reduce-scatter and a gather together send the bytes of an all-reduce.

    The sizes of all tokens and of a rank's own tokens are tested.
    """
    shape = PipelineShape(1, 2)
    unsharded = compile(schedules.gpipe, shape, tp=2, stage_segments="fg")
    sent = [
        count_sent_bytes(p, Sizes(activation=size))[Lane.TP][0]
        for p, size in (
            (unsharded, 100.0),
            (compile_segments(schedules.gpipe, shape, "fg"), 100.0 + 50.0),
        )
    ]
    assert sent == pytest.approx([2 * 2 * 100.0, 2 * 4 * 50.0])
