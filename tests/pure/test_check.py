"""Tests that `check` refuses deadlocks and invalid programs, and accepts valid ones.

`golden/refused/` has most invalid programs, with their errors.
"""

from __future__ import annotations

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
    LoweringLevelError,
)
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, RECV_OPS, SEND_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream, pack
from schedir.ir.text_format import from_text
from schedir.schedules import dualpipe, gpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, overlapped_pair
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check, check_draft
from tests.edits import written


def zero_bubble_schedule(r: int, P: int, m: int) -> RankSchedule:
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + I + W) + lead * (I + W)


def test_wrong_program_size_is_refused_without_large_allocation() -> None:
    one_instruction = Stream(pack(0, 0, 0))
    many_instructions = Stream(np.zeros(100_000, np.int64))
    for shape, stream, fact in (
        (
            PipelineShape(1, 2**20),
            one_instruction,
            "1 instructions are far too few for 1 stages x 1048576 microbatches",
        ),
        (
            PipelineShape(1, 8),
            many_instructions,
            "100000 instructions are far too many for 1 stages x 8 microbatches",
        ),
    ):
        tracemalloc.start()
        with pytest.raises(CompletenessError, match=fact):
            check(Program("x", shape, (stream,)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()


def test_max_instructions_exceeds_compiled_length() -> None:
    for schedule, shape in (
        (zero_bubble_schedule, PipelineShape(4, 6)),
        (dualpipe, PipelineShape(4, 16, placement="mirror")),
        (pipedream_2bw, PipelineShape(4, 16, optimizer_steps=4, weight_delay=1)),
    ):
        program = compile(schedule, shape, tp=2, dp=2, tied_weights=True, clip_grad_norm=True)
        assert shape.stages * shape.microbatches < len(program) < shape.max_instructions


def test_check_refuses_draft_and_check_draft_refuses_program() -> None:
    with pytest.raises(LoweringLevelError):
        check(expand_schedule(one_f_one_b, PipelineShape(2, 4)))
    with pytest.raises(CompletenessError):
        check_draft(compile(one_f_one_b, PipelineShape(2, 4)))


def test_deadlock_error_names_cycle() -> None:
    def late_warmup(r: int, P: int, m: int) -> RankSchedule:
        lead = min(r, m)
        return lead * F + (m - lead) * (F + B) + lead * B

    with pytest.raises(DeadlockError) as caught:
        compile(late_warmup, PipelineShape(4, 8))
    cycle = caught.value.cycle
    assert [(w.rank, w.index, str(w.instr)) for w in cycle] == [(0, 1, "B 0.0"), (1, 1, "F 1.1")]
    assert [(w.needed_rank, str(w.needed_instr)) for w in cycle] == [(1, "B 1.0"), (0, "F 0.1")]
    assert (caught.value.executed_count, caught.value.instruction_count) == (4, 64)


def find_cycle(program: Program, **options: object) -> list[str]:
    """Return the waits, as "instruction < needed instruction", of a deadlock under `per_edge`."""
    with pytest.raises(DeadlockError) as caught:
        check(program, "per_edge", **options)  # type: ignore[arg-type]
    links = caught.value.cycle
    for link, next_link in pairwise([*links, links[0]]):
        assert (link.needed_rank, link.current_index) == (next_link.rank, next_link.index)
    return [f"{w.instr} < {w.needed_instr}" for w in links]


def test_cycle_names_missing_message_of_group() -> None:
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
    assert find_cycle(groups) == ["recv_grad 0.1 < send_grad 1.1", "send_grad 1.0 < recv_grad 0.0"]


def test_group_waits_for_instructions_before_its_messages() -> None:
    """The group on rank 1 has its gradient, but a receive precedes its other message."""
    program = written(
        "F 0.0; send_act 0.0; F 0.1; F 0.2; send_act 0.2; recv_grad 0.0; B 0.0; recv_grad 0.1;"
        "B 0.1; recv_grad 0.2; B 0.2; reduce_grads 0; send_act 0.1; step",
        "recv_act 1.0; F 1.0; recv_act 1.1; B 1.0; recv_act 1.2 & send_grad 1.0; F 1.1; B 1.1;"
        "send_grad 1.1; F 1.2; B 1.2; reduce_grads 1; send_grad 1.2; step",
        microbatches=3,
    )
    assert find_cycle(program, blocking_hosts=True, eager_limit=1, sizes=Sizes(activation=1)) == [
        "recv_grad 0.0 < send_grad 1.0",
        "send_grad 1.0 < recv_act 1.1",
        "recv_act 1.1 < send_act 0.1",
        "send_act 0.1 < B 0.2",
        "B 0.0 < recv_grad 0.0",
    ]


# A mutant of `interleaved`, in which receives are posted early.
MISSING_INPUTS = """
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


def test_groups_with_missing_inputs_form_no_direct_cycle() -> None:
    """Two groups with the sides of one message each miss another input, which is no cycle."""
    steps = find_cycle(from_text(MISSING_INPUTS.strip() + "\n"), host_device_sync=True)
    assert "send_grad 2.0 < recv_grad 1.0" not in steps and len(steps) > 2


def naive(program: Program) -> Program:
    """Put the receives of each compute before it and its sends after it, as hand-written 1F1B."""
    lowered = lower(program)
    streams = []
    for stream in lowered.streams:
        instructions = []
        instrs = list(stream)
        transfers = {(i.op, i.stage, i.mb): i for i in instrs}
        for i in instrs:
            if i.op not in COMPUTE_OPS:
                continue
            is_backward = i.op != COMPUTE_OPS[0]
            receive = transfers.get((RECV_OPS[is_backward], i.stage, i.mb))
            send = transfers.get((SEND_OPS[is_backward], i.stage, i.mb))
            instructions += [x for x in (receive, i, send) if x]
        tail = [i for i in instrs if i.op not in (*COMPUTE_OPS, *SEND_OPS, *RECV_OPS)]
        streams.append(Stream.from_instructions([*instructions, *tail]))
    return replace(lowered, streams=tuple(streams))


def test_naive_1f1b_finishes_only_under_per_edge() -> None:
    for ranks, m in ((2, 4), (4, 8), (8, 16)):
        program = naive(expand_schedule(one_f_one_b, PipelineShape(ranks, m)))
        check(program, "per_edge")
        for model in ("per_pair", "per_device", "blocking_serial"):
            with pytest.raises(DeadlockError) as caught:
                check(program, model)
            assert caught.value.progress_model == model
            assert len({w.rank for w in caught.value.cycle}) == 2


def test_swapped_receives_of_one_edge_deadlock() -> None:
    program = compile(gpipe, PipelineShape(2, 3))
    swapped = _swap_receives(program)
    for model in MODELS:
        with pytest.raises(DeadlockError):
            check(swapped, model)


def _swap_receives(program: Program) -> Program:
    """Make rank 1 receive microbatches 1 and 2 in the wrong order, both before their use."""
    others = [i for i in program.streams[1] if str(i) not in ("recv_act 1.1", "recv_act 1.2")]
    receives = [i for i in program.streams[1] if str(i) in ("recv_act 1.1", "recv_act 1.2")]
    return replace(
        program, streams=(program.streams[0], Stream.from_instructions([*receives[::-1], *others]))
    )


def test_two_ranks_with_same_neighbour_pass() -> None:
    """With P=2 and v=2, one rank is both the previous and the next rank."""
    for model in MODELS:
        check(compile(interleaved, PipelineShape(2, 4, 2), progress_model=model), model)


def test_ring_of_groups_passes() -> None:
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


def test_overlapped_pairs_compile() -> None:
    def overlapped_schedule(r: int, P: int, m: int) -> RankSchedule:
        return F + (m - 1) * overlapped_pair(F, B) + B

    check(compile(overlapped_schedule, PipelineShape(1, 4), debug=True))


def test_forward_only_needs_no_reductions() -> None:
    program = compile(
        lambda r, P, m: m * F, PipelineShape(3, 4), tied_weights=True, clip_grad_norm=True
    )
    assert not program.has_backward
    assert {i.op.name for s in program.streams for i in s} == {"Forward", "SendAct", "RecvAct"}


def test_invalid_instruction_words_are_refused() -> None:
    shape = PipelineShape(1, 1)
    for word in (-1, 99 << 48, 1 << 60, int(pack(15, 3, 0)[0]), int(pack(12, 0, 5)[0])):
        with pytest.raises(CompletenessError):
            check(Program("junk", shape, (Stream(pack(0, 0, 0) * 0 + word),)))
    with pytest.raises(CompletenessError):
        check(Program("short", PipelineShape(2, 1), (Stream(pack(0, 0, 0)),)))
