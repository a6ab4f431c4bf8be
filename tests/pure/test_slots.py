"""Tests of slots: which value uses which slot, how few are enough, and what time they cost."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedir.analysis.critical_path.longest_path import compute_remaining_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    assign_slots,
    count_min_slots,
    find_slot_reuses,
)
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile, lower
from schedir.errors import ParseError, ShapeError, SlotError, UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import BOUNDARY_VALUES, INSTRUCTIONS, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.ir.text_format import from_text, to_text
from schedir.passes.communication.transfer_overlap import (
    group_opposite_transfers,
    post_receives_early,
    start_gathers_early,
)
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.passes.pass_types import BufferSharing
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import Schedule
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs
from schedir.verify.check import check
from tests.cases import each_value
from tests.commands import run_command
from tests.laws import ZOO, find_min_microbatches, make_shape
from tests.oracle import Machine
from tests.strategies import costs, with_slots

models = st.sampled_from(MODELS)


def lower_variant(draft: Program, data: st.DataObject, progress_model: ProgressModel) -> Program:
    """Lower a program, perhaps with groups, tensor parallelism, early gathers and receives."""
    program = lower(replace(draft, tp=data.draw(st.integers(1, 2))))
    if data.draw(st.booleans()):
        program = group_opposite_transfers(program)
    if data.draw(st.booleans()):
        program = start_gathers_early(program)
    if data.draw(st.booleans()):
        program = post_receives_early(program, progress_model, data.draw(st.integers(1, 3)))
    return program


@settings(max_examples=200)
@given(compute_programs(), models, st.data(), st.randoms(use_true_random=False))
def test_values_never_share_slot(
    draft: Program, progress_model: ProgressModel, data: st.DataObject, rng: random.Random
) -> None:
    """Each value gets one existing slot, and the slot's next value waits for its last reader.

    The test goes from group to group along the Stream, since the values of a group are in memory
    together.
    """
    program = with_slots(lower_variant(draft, data, progress_model), rng)
    index = InstructionIndex(program)
    machine = Machine(program, progress_model, Costs())
    machine.run()
    waits = None
    if program.slots:
        waits = np.full(len(index), -1)
        for fills, frees in find_slot_reuses(program).values():
            waits[fills] = frees
    for rank, stream in enumerate(program.streams):
        positions = {i: k for k, i in enumerate(stream)}
        group = np.cumsum(~stream.joined).tolist()
        slots = assign_slots(program, rank)
        lives: dict[tuple[str, int], list[tuple[int, int]]] = {}
        values = machine.values(rank)
        for (kind, stage, mb), (slot,) in (
            (value, fills.values()) for value, fills in slots.items()
        ):
            if kind in BOUNDARY_VALUES:
                fill, freed_at = values.pop((kind.name.lower(), stage, mb))
            else:  # only compute instructions fill and free this slot
                uses = [k for i, k in positions.items() if i[1:] == (stage, mb)
                        and kind in (*INSTRUCTIONS[i.op].gives,
                            *INSTRUCTIONS[i.op].frees)]  # fmt: skip
                fill, freed_at = min(uses), max(uses)
            lives.setdefault((kind.name, slot), []).append((fill, freed_at))
            if program.slots and kind in BOUNDARY_VALUES:
                assert slot < program.slots[rank][BOUNDARY_VALUES.index(kind)]
        assert not values
        for (kind_name, _), used in lives.items():
            used.sort()
            for (_, freed), (filled, _) in pairwise(used):
                assert group[freed] < group[filled]
                if waits is not None and kind_name in {k.name for k in BOUNDARY_VALUES}:
                    assert waits[int(program.offsets[rank]) + filled] == (
                        int(program.offsets[rank]) + freed
                    )


@settings(max_examples=200)
@given(compute_programs(), models, st.data())
def test_min_slots_equal_max_overlap(
    draft: Program, progress_model: ProgressModel, data: st.DataObject
) -> None:
    program = lower_variant(draft, data, progress_model)
    machine = Machine(program, progress_model, Costs())
    machine.run()
    min_slots = count_min_slots(program)
    for rank, stream in enumerate(program.streams):
        group = np.cumsum(~stream.joined).tolist()
        alive = [Counter[str]() for _ in range(max(group, default=0) + 1)]
        for (name, _, _), (fill, freed_at) in machine.values(rank).items():
            for g in range(group[fill], group[freed_at] + 1):
                alive[g][name] += 1
        for kind, count in zip(BOUNDARY_VALUES, min_slots[rank].tolist(), strict=False):
            assert count == max(a[kind.name.lower()] for a in alive)
        used = Counter(kind for kind, _ in {(k, *s.values()) for (k, _, _), s in assign_slots(
            replace(program, slots=tuple(SlotCounts(*row[:4]) for row in min_slots.tolist())), rank
        ).items()})  # fmt: skip
        assert [used[kind] for kind in SLOT_KINDS] == min_slots[rank].tolist()


@settings(max_examples=100)
@given(compute_programs(), models, st.data())
def test_one_slot_less_is_refused(
    draft: Program, progress_model: ProgressModel, data: st.DataObject
) -> None:
    program = share_slots(lower_variant(draft, data, progress_model), "minimal")
    check(program, progress_model)
    used_kinds = [(r, k) for r, counts in enumerate(program.slots) for k in range(4) if counts[k]]
    assume(used_kinds)
    rank, kind = data.draw(st.sampled_from(used_kinds))
    counts = list(program.slots[rank])
    counts[kind] -= 1
    slots = (*program.slots[:rank], SlotCounts(*counts), *program.slots[rank + 1 :])
    with pytest.raises(SlotError) as caught:
        check(replace(program, slots=slots), progress_model)
    fills, frees = caught.value.sites
    assert fills.rank == frees.rank == rank
    assert f"{BOUNDARY_VALUES[kind].name.lower()} slot" in caught.value.fact
    assert f"needs {counts[kind] + 1}" in caught.value.hint


@settings(max_examples=150)
@given(compute_programs(), models, st.data())
def test_latency_preserving_keeps_span(
    draft: Program, progress_model: ProgressModel, data: st.DataObject
) -> None:
    program = lower_variant(draft, data, progress_model)
    priced = data.draw(costs(draft.shape))
    shared = check(
        share_slots(program, "latency_preserving", priced, progress_model), progress_model
    )
    min_slots, stream_lengths = count_min_slots(program)[:, :4], [len(s) for s in program.streams]
    assert shared.streams == program.streams
    assert (np.array(shared.slots)[:, :4] >= min_slots).all()
    assert all(
        max(counts[:4]) <= max(n, 1) for counts, n in zip(shared.slots, stream_lengths, strict=True)
    )
    unshared_span, shared_span = (
        simulate(p, priced, progress_model=progress_model).span for p in (program, shared)
    )
    assert unshared_span == shared_span


@pytest.mark.parametrize(("schedule", "overlap"), each_value([*ZOO.values()], [False, True]))
def test_minimal_slots_finish_under_every_model(schedule: Schedule, overlap: bool) -> None:
    shape = make_shape(schedule, 4, max(8, find_min_microbatches(schedule, 4)))
    for model in MODELS:
        program = compile(
            schedule, shape, tp=2, progress_model=model, overlap=overlap, buffer_sharing="minimal"
        )
        assert simulate(program, Costs(send=0.5), progress_model=model).span > 0
        if not overlap:
            for checked_model in MODELS:
                check(program, checked_model)


def test_minimal_slots_slow_gpipe() -> None:
    """With two slots a message overlaps a forward. With one slot both ranks wait for it."""
    shape, priced = PipelineShape(4, 16), Costs(F=1, B=2, send=0.1)

    def compute_span(buffer_sharing: BufferSharing | None, costs: Costs | None = None) -> float:
        program = compile(
            gpipe, shape, progress_model="per_edge", costs=costs, buffer_sharing=buffer_sharing
        )
        return round(simulate(program, priced, progress_model="per_edge").span, 9)

    assert (
        compute_span(None)
        == compute_span(None, priced)
        == compute_span("latency_preserving", priced)
        == 57.6
    )
    assert compute_span("minimal") == compute_span("minimal", priced) == 60.6
    assert set(compile(gpipe, shape, buffer_sharing="minimal").slots[1:3]) == {
        SlotCounts(1, 1, 1, 1)
    }


@pytest.mark.parametrize("schedule", ZOO.values(), ids=ZOO)
def test_slots_for_free_messages_keep_span_of_others(schedule: Schedule) -> None:
    """Slots chosen for messages that take no time lose no time when messages do take time."""
    shape = make_shape(schedule, 4, max(8, find_min_microbatches(schedule, 4)))
    unslotted = compile(schedule, shape, progress_model="per_edge", overlap=True)
    shared = share_slots(unslotted, "latency_preserving", None, "per_edge")
    for send in (0, 0.02, 0.1, 0.2, 0.3, 0.5):
        unshared_span, shared_span = (
            simulate(p, Costs(send=send), progress_model="per_edge").span
            for p in (unslotted, shared)
        )
        assert shared_span == pytest.approx(unshared_span, rel=1e-9)


def test_latency_preserving_slots_are_minimal() -> None:
    """GPipe needs each of its slots: one less of any kind on any rank makes the step longer."""
    priced = Costs(F=1, B=2, send=0.1)
    program = compile(
        gpipe,
        PipelineShape(4, 16),
        progress_model="per_edge",
        costs=priced,
        buffer_sharing="latency_preserving",
    )
    span = simulate(program, priced, progress_model="per_edge").span
    assert program.slots == (
        SlotCounts(0, 2, 2, 0), SlotCounts(2, 2, 2, 2),
        SlotCounts(2, 2, 2, 2), SlotCounts(2, 0, 0, 2),
    )  # fmt: skip
    for rank in range(4):
        for kind, count in enumerate(program.slots[rank][:4]):
            slots = [list(counts) for counts in program.slots]
            slots[rank][kind] = max(count - 1, 0)
            fewer = replace(program, slots=tuple(SlotCounts(*counts) for counts in slots))
            assert not count or simulate(fewer, priced, progress_model="per_edge").span > span


def test_slow_stage_needs_few_slots() -> None:
    """A slow stage delays its neighbours anyway, so a long queue of its inputs gains nothing."""
    priced = Costs(F=(1, 1, 1, 2), B=(2, 2, 2, 4), send=0.1)
    program = compile(
        one_f_one_b,
        PipelineShape(4, 32),
        progress_model="per_edge",
        costs=priced,
        buffer_sharing="latency_preserving",
    )
    assert max(max(counts[:4]) for counts in program.slots) <= 3


def test_slots_are_in_text_and_digest() -> None:
    program = compile(one_f_one_b, PipelineShape(3, 6), buffer_sharing="minimal")
    assert from_text(to_text(program)) == program == from_text(to_text(program, folded=False))
    assert "rank 1  act_in 1  act_out 1  grad_in 1  grad_out 1\n" in to_text(program)
    unslotted = replace(program, slots=())
    assert unslotted != program and unslotted.digest != program.digest
    assert replace(unslotted, slots=program.slots).digest == program.digest


@pytest.mark.parametrize(
    "head",
    ["rank 0  act_in 1", "rank 0  act_in 1  act_out 1  grad_in 1  grad_out x",
     "rank 0  act_out 1  act_in 1  grad_in 1  grad_out 1"],
)  # fmt: skip
def test_invalid_slot_text_is_refused(head: str) -> None:
    text = to_text(compile(one_f_one_b, PipelineShape(2, 2)))
    with pytest.raises(ParseError) as caught:
        from_text(text.replace("rank 0", head))
    assert caught.value.line == 6


def test_slots_on_some_ranks_are_refused() -> None:
    text = to_text(compile(one_f_one_b, PipelineShape(2, 2), buffer_sharing="minimal"))
    for line in [x for x in text.splitlines() if x.startswith("rank ") and "act_in" in x]:
        with pytest.raises(ParseError, match="either all ranks or no ranks must have slots"):
            from_text(text.replace(line, line[:6]))


def test_invalid_slot_counts_are_refused() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 2))
    for slots in [(SlotCounts(1, 1, 1, 1),), (SlotCounts(1, 1, 1, -1),) * 2]:
        with pytest.raises(ShapeError):
            replace(program, slots=slots)
    with pytest.raises(UsageError):
        share_slots(program, "few")  # type: ignore[arg-type]


CROSSED = """schedir 1
program crossed
ranks 2  microbatches 2

rank 0  act_in 0  act_out 1  grad_in 0  grad_out 0
  F 0.0; send_act 0.0; F 0.1; send_act 0.1

rank 1  act_in 1  act_out 0  grad_in 0  grad_out 0
  recv_act 1.0; F 1.0; recv_act 1.1; F 1.1
"""


def test_critical_path_includes_slot_wait() -> None:
    """With one slot per kind, the second message waits until the first has been used."""
    program = check(from_text(CROSSED), "per_edge")
    priced = Costs(F=(1, 5), send=1)
    timeline = simulate(program, priced, progress_model="per_edge")
    unslotted = simulate(replace(program, slots=()), priced, progress_model="per_edge")
    assert (timeline.span, unslotted.span) == (13, 12)
    second_receive = int(program.offsets[1]) + 2
    assert timeline.critical_predecessor[second_receive] == second_receive - 1  # F 1.0


GROUPED = """schedir 1
program grouped
ranks 2  microbatches 4

rank 0  act_in 0  act_out 4  grad_in 0  grad_out 0
  4 x  F 0.0+
  send_act 0.0 & send_act 0.1; send_act 0.2 & send_act 0.3

rank 1  act_in 2  act_out 0  grad_in 0  grad_out 0
  recv_act 1.0 & recv_act 1.1; F 1.0; F 1.1
  recv_act 1.2 & recv_act 1.3; F 1.2; F 1.3
"""


def test_group_waits_for_all_slots() -> None:
    program = check(from_text(GROUPED), "per_edge")
    priced = Costs(F=(1, 5), send=1)
    assert simulate(program, priced, progress_model="per_edge").span == 24
    assert simulate(replace(program, slots=()), priced, progress_model="per_edge").span == 23


@settings(max_examples=100)
@given(compute_programs(), models, st.data(), st.randoms(use_true_random=False))
def test_remaining_times_bound_span(
    draft: Program, progress_model: ProgressModel, data: st.DataObject, rng: random.Random
) -> None:
    """From each start to the end of the run, there is time for the longest path of successors.

    On the critical path the two times are equal.
    """
    program = with_slots(lower_variant(draft, data, progress_model), rng)
    priced = data.draw(costs(draft.shape))
    timeline = simulate(program, priced, progress_model=progress_model)
    remaining = compute_remaining_times(Graph(program, progress_model), priced)
    assert (timeline.spans["start"] + remaining).max(initial=0) == timeline.span
    path = timeline.critical_path
    assert (timeline.spans["start"][path] + remaining[path] == timeline.span).all()


def test_draft_needs_no_message_slots() -> None:
    program = expand_schedule(one_f_one_b, PipelineShape(3, 4))
    assert not count_min_slots(program)[:, :4].any()
    looped = count_min_slots(expand_schedule(interleaved, PipelineShape(1, 4, 2)))
    assert looped[0, BOUNDARY_VALUES.index(Value.ACT_OUT)] > 0


@pytest.mark.parametrize("skips", [[], ["-O", "skips=0=3"]])
def test_simulate_prints_slots(capsys: pytest.CaptureFixture[str], skips: list[str]) -> None:
    argv = ["simulate", "gpipe", "-O", "buffer_sharing=minimal", *skips]
    kinds = ["act_in", "act_out", "grad_in", "grad_out"]
    kinds += ["skip_in", "skip_out", "skip_grad_in", "skip_grad_out"] * bool(skips)
    line = next(
        line for line in run_command(capsys, *argv).splitlines() if line.startswith("slots")
    )
    slot_pairs = [pair.split() for pair in line.split(": ")[1].split(";")[0].split(", ")]
    assert [kind for kind, _ in slot_pairs] == kinds
    assert all(1 <= int(number) <= 8 for _, number in slot_pairs)
    slots = json.loads(run_command(capsys, *argv, "--json"))["slots"]
    assert all([*counts] == kinds for counts in slots)
