"""Tests of which programs the checker refuses, and which it must accept."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile, lower
from schedir.errors import (
    CompletenessError,
    DeadlockError,
    GroupError,
    LoweringLevelError,
    OrderError,
    ReductionError,
    SchedirError,
    UnmatchedTransferError,
)
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, RECV_OPS, SEND_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream, pack
from schedir.ir.text_format import from_text, to_text
from schedir.schedules import dualpipe, gpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, overlapped_pair
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check, check_draft
from tests.edits import written


def zb(r: int, P: int, m: int) -> RankSchedule:
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + I + W) + lead * (I + W)


def edited(program: Program, *edits: tuple[str, str]) -> Program:
    """Edit the flat text of a program with patterns, each of which must match."""
    text = to_text(program, folded=False)
    for old, new in edits:
        assert re.search(old, text, re.M), old
        text = re.sub(old, new, text, count=1, flags=re.M)
    return from_text(text)


WHOLE = compile(one_f_one_b, PipelineShape(2, 4), tied_weights=True, clip_grad_norm=True)
SPLIT = compile(zb, PipelineShape(2, 4))
SHARDED = compile(one_f_one_b, PipelineShape(2, 2), tp=2)

REFUSED = {
    # name: (program, edits, error)
    "a forward less": (WHOLE, [(r"  F 0.2\n", "")], CompletenessError),
    "no backward": (WHOLE, [(r"  B 1.3\n", "")], CompletenessError),
    "twice": (WHOLE, [(r"  F 0.1\n", "  F 0.1\n  F 0.1\n")], CompletenessError),
    "mb out of range": (WHOLE, [(r"  F 0.3", "  F 0.4")], CompletenessError),
    "stage out of range": (WHOLE, [(r"  F 0.3", "  F 7.3")], CompletenessError),
    "foreign stage": (WHOLE, [(r"  F 0.3\n", ""), (r"  F 1.3", "  F 1.3\n  F 0.3")],
                      CompletenessError),
    "W before I": (SPLIT, [(r"  I 1.1\n", "  W 1.1\n  I 1.1\n"),
                           (r"(I 1.1\n(.*\n)*?)  W 1.1\n", r"\1")],
                   OrderError),
    "W without I": (SPLIT, [(r"  I 1.1\n", "")], CompletenessError),
    "I without W": (SPLIT, [(r"  W 1.1\n", "")], CompletenessError),
    "B beside I and W": (SPLIT, [(r"  W 1.1", "  W 1.1\n  B 1.1")], CompletenessError),
    "B beside I": (SPLIT, [(r"  W 1.1", "  B 1.1")], CompletenessError),
    "send without receive": (WHOLE, [(r"  recv_act 1.2\n", "")], UnmatchedTransferError),
    "receive without send": (WHOLE, [(r"  send_grad 1.2\n", "")], UnmatchedTransferError),
    "neither": (WHOLE, [(r"  send_act 0.2\n", ""), (r"  recv_act 1.2\n", "")],
                UnmatchedTransferError),
    "send into nothing": (WHOLE, [(r"  F 1.2", "  F 1.2\n  send_act 1.2")], UnmatchedTransferError),
    "two receives swapped": (WHOLE, [("recv_act 1.0", "recv_act 1.X"), ("recv_act 1.1",
                             "recv_act 1.0"), ("recv_act 1.X", "recv_act 1.1")], OrderError),
    "send before its forward": (WHOLE, [(r"  F 0.0\n  send_act 0.0",
                                         "  send_act 0.0\n  F 0.0")], OrderError),
    "no reduce": (WHOLE, [(r"  reduce_grads 1\n", "")], ReductionError),
    "reduce before the last backward": (
        WHOLE, [(r"  reduce_grads 0\n", ""), (r"  B 0.3", "  reduce_grads 0\n  B 0.3")],
        OrderError),
    "no tied": (WHOLE, [(r"  reduce_tied 1\n", "")], ReductionError),
    "tied twice": (WHOLE, [(r"  reduce_tied 1\n", "  reduce_tied 1\n  reduce_tied 1\n")],
                   ReductionError),
    "tied though not": (WHOLE, [("tied_weights yes", "tied_weights no")], ReductionError),
    "no norm": (WHOLE, [(r"  reduce_norm\n", "")], ReductionError),
    "norm before tied": (WHOLE, [(r"  reduce_tied 0\n  reduce_norm",
                                  "  reduce_norm\n  reduce_tied 0")], OrderError),
    "no step": (WHOLE, [(r"  step\n", "")], ReductionError),
    "two steps": (WHOLE, [(r"  step\n", "  step\n  step\n")], ReductionError),
    "step before norm": (WHOLE, [(r"  reduce_norm\n  step", "  step\n  reduce_norm")],
                         OrderError),
    "scatter without gather": (SHARDED, [(r"  tp_gather_act 1.0\n", "")], UnmatchedTransferError),
    "gather without scatter": (SHARDED, [(r"  tp_scatter_grad 1.1\n", "")], UnmatchedTransferError),
    "gather after use": (SHARDED, [(r"  tp_gather_act 1.0\n  F 1.0",
                                    "  F 1.0\n  tp_gather_act 1.0")],
                         OrderError),
    "scatter after the send": (SHARDED, [(r"  tp_scatter_act 0.0\n  send_act 0.0",
                                          "  send_act 0.0\n  tp_scatter_act 0.0")], OrderError),
    "sharding without tp": (SHARDED, [("tp 2", "tp 1")], CompletenessError),
    "joined to nothing": (WHOLE, [(r"rank 1\n  recv_act 1.0\n",
                                   "rank 1\n  recv_act 1.0 & F 1.0\n"), (r"  F 1.0\n", "")],
                          GroupError),
    "three computes as one": (WHOLE, [(r"  F 0.1\n", ""), (r"  F 0.2\n", ""),
                                      (r"  F 0.0\n", "  F 0.0 & F 0.1 & F 0.2\n")], GroupError),
    "pair that needs each other": (WHOLE, [(r"  F 1.1\n(.*\n)*?  B 1.1\n", "  F 1.1 & B 1.1\n")],
                                   SchedirError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    program, edits, error = REFUSED[name]
    wrong = edited(program, *edits)
    for model in MODELS:
        with pytest.raises(error) as caught:
            check(wrong, model)
        assert caught.value.program == wrong.name
        assert "\n" not in caught.value.fact
    for site in caught.value.sites:
        assert wrong.streams[site.rank][site.index] == site.instr


def test_the_right_ones_pass() -> None:
    for program in (WHOLE, SPLIT, SHARDED):
        for model in MODELS:
            assert check(program, model) is program


def test_a_wrong_size_is_refused_before_anything_is_made() -> None:
    one = Stream(pack(0, 0, 0))
    many = Stream(np.zeros(100_000, np.int64))
    for shape, stream, fact in (
        (
            PipelineShape(1, 2**20),
            one,
            "1 instructions are far too few for 1 stages x 1048576 microbatches",
        ),
        (
            PipelineShape(1, 8),
            many,
            "100000 instructions are far too many for 1 stages x 8 microbatches",
        ),
    ):
        tracemalloc.start()
        with pytest.raises(CompletenessError, match=fact):
            check(Program("x", shape, (stream,)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()


def test_a_plan_has_room_for_its_programs() -> None:
    for schedule, shape in (
        (zb, PipelineShape(4, 6)),
        (dualpipe, PipelineShape(4, 16, placement="mirror")),
        (pipedream_2bw, PipelineShape(4, 16, optimizer_steps=4, weight_delay=1)),
    ):
        program = compile(schedule, shape, tp=2, dp=2, tied_weights=True, clip_grad_norm=True)
        assert shape.stages * shape.microbatches < len(program) < shape.max_instructions


def test_draft_is_refused_where_a_program_is_needed() -> None:
    with pytest.raises(LoweringLevelError):
        check(expand_schedule(one_f_one_b, PipelineShape(2, 4)))
    with pytest.raises(CompletenessError):
        check_draft(WHOLE)


def test_deadlock_names_the_cycle() -> None:
    def wrong(r: int, P: int, m: int) -> RankSchedule:
        lead = min(r, m)
        return lead * F + (m - lead) * (F + B) + lead * B

    with pytest.raises(DeadlockError) as caught:
        compile(wrong, PipelineShape(4, 8))
    cycle = caught.value.cycle
    assert [(w.rank, w.index, str(w.instr)) for w in cycle] == [(0, 1, "B 0.0"), (1, 1, "F 1.1")]
    assert [(w.needed_rank, str(w.needed_instr)) for w in cycle] == [(1, "B 1.0"), (0, "F 0.1")]
    assert (caught.value.executed_count, caught.value.instruction_count) == (4, 64)


def chain(program: Program, **how: object) -> list[str]:
    """Return which instruction waits for which in the cycle of a deadlock under `per_edge`."""
    with pytest.raises(DeadlockError) as caught:
        check(program, "per_edge", **how)  # type: ignore[arg-type]
    links = caught.value.cycle
    for one, after in pairwise([*links, links[0]]):
        assert (one.needed_rank, one.current_index) == (after.rank, after.index)
    return [f"{w.instr} < {w.needed_instr}" for w in links]


def test_two_groups_that_are_there_do_not_wait_for_each_other() -> None:
    """Each group waits for another of its messages, and the cycle names that message."""
    groups = written(
        "F 0.0; send_act 0.0; F 0.1; send_act 0.1 & recv_act 3.0; F 3.0; B 3.0; recv_act 3.1;"
        "send_grad 3.0; F 3.1; B 3.1; reduce_grads 3; send_grad 3.1 & recv_grad 0.1; recv_grad 0.0;"
        "B 0.0; B 0.1; reduce_grads 0; step",
        "recv_act 1.0; recv_act 1.1; F 1.0; F 2.0; send_act 2.0; F 1.1; F 2.1;"
        "send_act 2.1 & recv_grad 2.0; B 2.0; B 1.0; recv_grad 2.1 & send_grad 1.0; B 2.1;"
        "reduce_grads 2; B 1.1; reduce_grads 1; send_grad 1.1; step",
        microbatches=2, header="stages_per_rank 2 placement vee",
    )  # fmt: skip
    assert chain(groups) == ["recv_grad 0.1 < send_grad 1.1", "send_grad 1.0 < recv_grad 0.0"]


def test_a_group_waits_for_what_stands_before_any_of_it() -> None:
    """The group on rank 1 has its gradient, but a receive precedes its other message."""
    program = written(
        "F 0.0; send_act 0.0; F 0.1; F 0.2; send_act 0.2; recv_grad 0.0; B 0.0; recv_grad 0.1;"
        "B 0.1; recv_grad 0.2; B 0.2; reduce_grads 0; send_act 0.1; step",
        "recv_act 1.0; F 1.0; recv_act 1.1; B 1.0; recv_act 1.2 & send_grad 1.0; F 1.1; B 1.1;"
        "send_grad 1.1; F 1.2; B 1.2; reduce_grads 1; send_grad 1.2; step",
        microbatches=3,
    )
    assert chain(program, blocking_hosts=True, eager_limit=1, sizes=Sizes(activation=1)) == [
        "recv_grad 0.0 < send_grad 1.0",
        "send_grad 1.0 < recv_act 1.1",
        "recv_act 1.1 < send_act 0.1",
        "send_act 0.1 < B 0.2",
        "B 0.0 < recv_grad 0.0",
    ]


# A mutant of `interleaved`, in which receives are posted early.
LACKING = """
schedir 1
program interleaved
ranks 2  microbatches 2  stages_per_rank 2  placement loop
tp 1  dp 1  tied_weights no  clip_grad_norm no
rank 0
  F 0.0; send_act 0.0; recv_grad 2.0; F 0.1; send_act 0.1; recv_act 2.0; F 2.0; send_act 2.0
  recv_act 2.1; F 2.1; send_act 2.1; B 2.0; send_grad 2.0 & recv_grad 2.1; B 2.1
  reduce_grads 2; send_grad 2.1; recv_grad 0.0; B 0.0; recv_grad 0.1; B 0.1; reduce_grads 0
  step
rank 1
  recv_act 1.0; F 1.0; recv_act 1.1; send_act 1.0; F 1.1; send_act 1.1 & recv_act 3.0; F 3.0
  recv_act 3.1; B 3.0; send_grad 3.0; F 3.1; B 3.1; reduce_grads 3
  recv_grad 1.0 & send_grad 3.1; B 1.0; send_grad 1.0; recv_grad 1.1; B 1.1; reduce_grads 1
  send_grad 1.1; step
"""


def test_who_lacks_something_does_not_wait_for_who_is_first() -> None:
    """Two sides of one message, each in a group that lacks another input, are not a cycle."""
    steps = chain(from_text(LACKING.strip() + "\n"), host_device_sync=True)
    assert "send_grad 2.0 < recv_grad 1.0" not in steps and len(steps) > 2


def naive(program: Program) -> Program:
    """Put the receives of each compute before it and its sends after it, as hand-written 1F1B."""
    lowered = lower(program)
    streams = []
    for stream in lowered.streams:
        out = []
        instrs = list(stream)
        moved = {(i.op, i.stage, i.mb): i for i in instrs}
        for i in instrs:
            if i.op not in COMPUTE_OPS:
                continue
            back = i.op != COMPUTE_OPS[0]
            before = moved.get((RECV_OPS[back], i.stage, i.mb))
            after = moved.get((SEND_OPS[back], i.stage, i.mb))
            out += [x for x in (before, i, after) if x]
        tail = [i for i in instrs if i.op not in (*COMPUTE_OPS, *SEND_OPS, *RECV_OPS)]
        streams.append(Stream.from_instructions([*out, *tail]))
    return replace(lowered, streams=tuple(streams))


def test_naive_1f1b_passes_edge_and_hangs_elsewhere() -> None:
    for ranks, m in ((2, 4), (4, 8), (8, 16)):
        program = naive(expand_schedule(one_f_one_b, PipelineShape(ranks, m)))
        check(program, "per_edge")
        for model in ("per_pair", "per_device", "blocking_serial"):
            with pytest.raises(DeadlockError) as caught:
                check(program, model)
            assert caught.value.progress_model == model
            assert len({w.rank for w in caught.value.cycle}) == 2


def test_receives_swapped_on_one_edge_are_a_deadlock() -> None:
    program = compile(gpipe, PipelineShape(2, 3))
    wrong = _swap(program)
    for model in MODELS:
        with pytest.raises(DeadlockError):
            check(wrong, model)


def _swap(program: Program) -> Program:
    """Make rank 1 receive microbatches 1 and 2 in the wrong order, both before their use."""
    own = [i for i in program.streams[1] if str(i) not in ("recv_act 1.1", "recv_act 1.2")]
    two = [i for i in program.streams[1] if str(i) in ("recv_act 1.1", "recv_act 1.2")]
    return replace(
        program, streams=(program.streams[0], Stream.from_instructions([*two[::-1], *own]))
    )


def test_two_ranks_with_both_neighbours_the_same() -> None:
    """With P=2 and v=2, one peer is both the previous and the next rank. Messages differ anyway."""
    for model in MODELS:
        check(compile(interleaved, PipelineShape(2, 4, 2), progress_model=model), model)


def test_ring_of_groups_is_legal() -> None:
    """Each rank groups a send to the next rank with a receive from the previous one: no cycle."""
    text = """schedir 1
program ring
ranks 3  microbatches 3  stages_per_rank 2  placement loop
rank 0
  F 0.0; send_act 0.0; F 0.1; send_act 0.1; F 0.2
  send_act 0.2 & recv_act 3.0; F 3.0; send_act 3.0; recv_act 3.1; F 3.1
  send_act 3.1; recv_act 3.2; F 3.2; send_act 3.2
rank 1
  recv_act 1.0; F 1.0; send_act 1.0; recv_act 1.1; F 1.1
  send_act 1.1 & recv_act 1.2; F 1.2; send_act 1.2; recv_act 4.0; F 4.0
  send_act 4.0; recv_act 4.1; F 4.1; send_act 4.1; recv_act 4.2
  F 4.2; send_act 4.2
rank 2
  recv_act 2.0; F 2.0; send_act 2.0 & recv_act 2.1; F 2.1; recv_act 2.2
  send_act 2.1; F 2.2; recv_act 5.0; F 5.0; send_act 2.2
  recv_act 5.1; F 5.1; recv_act 5.2; F 5.2
"""
    program = from_text(text)
    for model in MODELS:
        check(program, model)
    ungrouped = from_text(text.replace(" & ", "; "))
    check(ungrouped, "per_edge")
    with pytest.raises(DeadlockError):
        check(ungrouped, "blocking_serial")


def test_overlapped_pair_is_one_node() -> None:
    def cell(r: int, P: int, m: int) -> RankSchedule:
        return F + (m - 1) * overlapped_pair(F, B) + B

    check(compile(cell, PipelineShape(1, 4), debug=True))


def test_forward_only_needs_no_reductions() -> None:
    program = compile(
        lambda r, P, m: m * F, PipelineShape(3, 4), tied_weights=True, clip_grad_norm=True
    )
    assert not program.has_backward
    assert {i.op.name for s in program.streams for i in s} == {"Forward", "SendAct", "RecvAct"}


def test_words_that_are_no_instructions() -> None:
    shape = PipelineShape(1, 1)
    for word in (-1, 99 << 48, 1 << 60, int(pack(15, 3, 0)[0]), int(pack(12, 0, 5)[0])):
        with pytest.raises(CompletenessError):
            check(Program("junk", shape, (Stream(pack(0, 0, 0) * 0 + word),)))
    with pytest.raises(CompletenessError):
        check(Program("short", PipelineShape(2, 1), (Stream(pack(0, 0, 0)),)))
