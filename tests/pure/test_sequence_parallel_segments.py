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
    schedules,
    simulate,
    split_costs,
)
from schedir.commands.simulate import count_sent_bytes
from schedir.errors import SchedirError
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, Lane, Opcode
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.what_if import advise
from tests.edits import Edit, move, pull, push
from tests.oracle_threads import verdict

O = Opcode
SEGMENT_COLLECTIVES = (O.TPGatherAct, O.TPReduceAct, O.TPGatherGrad, O.TPReduceGrad)


def compile_segments(
    schedule: Any, shape: PipelineShape, segments: Any = 3, **options: Any
) -> Program:
    return compile(
        schedule, shape, tp=2, stage_segments=segments, sequence_parallel=True, **options
    )


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
