"""Tests of memory in bytes: curve and peak of each rank, and programs over their limit."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.analysis.memory.buffer_slots import SLOT_KINDS, count_slots
from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import check_memory, compile, lower
from schedir.errors import MemoryLimitError, UsageError, format_bytes
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, parse_bytes
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS, Instr, Opcode, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, interleaved, one_f_one_b, v_half, zb_h1, zb_v
from schedir.schedules.schedule_algebra import F, I, Schedule, W
from schedir.testing import compute_programs
from tests.commands import run_command
from tests.oracle import Machine
from tests.pure.test_microbatch_costs import draw_values, get_value
from tests.strategies import costs, with_slots


@st.composite
def sizes(draw: st.DrawFn, shape: PipelineShape) -> Sizes:
    """Draw integer sizes, so that sums are exact."""
    names = ("activation", "activation_grad", "saved", "deferred_wgrad")
    drawn = Sizes(
        **{name: draw(draw_values(shape, 9)) for name in names if draw(st.booleans())},
        model_states=draw(st.tuples(*[st.integers(0, 9)] * shape.stages) | st.integers(0, 9)),
    )
    if draw(st.booleans()):
        grid = np.array([
            [[get_size(drawn, name, s, mb) for mb in range(shape.microbatches)]
             for s in range(shape.stages)] for name in ("saved", "deferred_wgrad")
        ])  # fmt: skip
        new = [[draw(st.integers(0, int(n))) for n in row] for row in grid.min(0)]
        drawn = replace(drawn, saved_and_deferred=cast("Any", grid.max(0) + new))
    return drawn


def get_size(sizes: Sizes, name: str, stage: int, mb: int) -> float:
    """Return a size of one microbatch in one stage, or what it defaults to."""
    if (value := getattr(sizes, name)) is not None:
        return get_value(value, stage, mb)
    if name == "saved_and_deferred":
        return max(get_size(sizes, part, stage, mb) for part in ("saved", "deferred_wgrad"))
    defaults = {"activation_grad": "activation", "deferred_wgrad": "saved"}
    return get_size(sizes, defaults[name], stage, mb)


def compute_reference(machine: Machine, value_sizes: Sizes, rank: int) -> list[dict[str, float]]:
    """Return the bytes of each kind of value of a rank during each instruction.

    `machine` must have run the program.
    """
    program = machine.program
    shape, stream = program.shape, program.streams[rank]
    size = partial(get_size, value_sizes)
    values, position_of = machine.values(rank), {i: k for k, i in enumerate(stream)}
    slot_of = assign_reference_slots(machine, rank)
    fixed = {"model_states": sum(size("model_states", s, 0) for s in shape.stages_on_rank[rank])}
    handed_over: list[tuple[int, int, float]] = []  # (first index, last index, bytes)
    for kind in SlotCounts._fields:
        largest, slot_shares = 0.0, set[tuple[int, float]]()  # (slot, its share of a boundary)
        for (value_kind, stage, mb), (fill, free) in values.items():
            if value_kind != kind:
                continue
            edge = stage - 1 if kind in ("act_in", "grad_out") else stage
            value_size = size(
                "activation" if kind.startswith("act") else "activation_grad", edge, mb
            )
            out = {"act_out": Opcode.TPScatterAct, "grad_out": Opcode.TPScatterGrad}.get(kind)
            scatter = position_of.get(Instr(out, stage, mb)) if out is not None else None
            has_slot = out is None or stream[free].op in SEND_OPS
            if has_slot:
                largest = max(largest, value_size)
                slot_shares.add(
                    (slot_of[kind, stage, mb], 1 if scatter is None else 1 / program.tp)
                )
            if not has_slot or scatter is not None:
                handed_over.append((fill, free if scatter is None else scatter, value_size))
        fixed[kind] = largest * sum(share for _, share in slot_shares)
    holds, live = [], {"saved": 0.0, "deferred_wgrad": 0.0, "handed_over": 0.0}
    for group in machine.groups[rank]:
        rows = [(INSTRUCTIONS[stream[k].op], stream[k][1:]) for k in group]
        live["handed_over"] += sum(
            value_size for fill, _, value_size in handed_over if fill in group
        )
        for row, place in rows:
            for token in (
                {Value.SAVED, Value.DEFERRED_WGRAD} & {*row.gives} if program.has_backward else ()
            ):
                live[token.name.lower()] += size(token.name.lower(), *place)
        # I frees saved activations while it creates deferred tensors. Some of them are shared.
        shared = sum(
            size("saved", *place)
            + size("deferred_wgrad", *place)
            - size("saved_and_deferred", *place)
            for row, place in rows
            if row.op is Opcode.BackwardInput
        )
        live["deferred_wgrad"] -= shared
        holds += [fixed | live] * len(group)
        live["deferred_wgrad"] += shared
        for row, place in rows:
            for token in {Value.SAVED, Value.DEFERRED_WGRAD} & {*row.frees}:
                live[token.name.lower()] -= size(token.name.lower(), *place)
        live["handed_over"] -= sum(value_size for _, end, value_size in handed_over if end in group)
    assert not any(live.values())
    return holds


def assign_reference_slots(machine: Machine, rank: int) -> dict[tuple[str, int, int], int]:
    """Return the slot of each value: the free slot of its kind that was freed first."""
    program, values, slots = machine.program, machine.values(rank), {}
    for kind in SlotCounts._fields:
        lifetimes = {value: lifetime for value, lifetime in values.items() if value[0] == kind}
        count = getattr(program.slots[rank], kind) if program.slots else len(lifetimes)
        free = deque(range(min(count, len(lifetimes))))
        for group in machine.groups[rank]:
            for value, _ in sorted(lifetimes.items(), key=lambda item: item[1]):
                if lifetimes[value][0] in group:
                    slots[value] = free.popleft()
            for _, value in sorted((end, value) for value, (_, end) in lifetimes.items()):
                if lifetimes[value][1] in group:
                    free.append(slots[value])
    return slots


@settings(max_examples=60)
@given(compute_programs(), st.data(), st.randoms(use_true_random=False))
def test_peak_memory_matches_reference(
    draft: Program, data: st.DataObject, rng: random.Random
) -> None:
    program = lower(replace(draft, tp=data.draw(st.sampled_from([1, 2]))))
    if data.draw(st.booleans()):
        program = group_opposite_transfers(program)
    program, drawn = with_slots(program, rng), data.draw(sizes(draft.shape))
    timeline = simulate(program, data.draw(costs(draft.shape)), sizes=drawn)
    machine = Machine(program, "blocking_serial", Costs())
    machine.run()
    peaks = []
    for rank, curve in enumerate(timeline.memory):
        holds = compute_reference(machine, drawn, rank)
        total = [sum(kinds.values()) for kinds in holds]
        peaks.append(max(total))
        assert curve.total.max() == timeline.peak_memory[rank] == max(total)
        for kind, part in curve.by_kind.items():
            assert part.max() == max(kinds[kind] for kinds in holds)
        assert np.array_equal(np.sum([*curve.by_kind.values()], axis=0), curve.total)
        assert curve.total[0] == curve.total[-1]  # a step frees all memory that it allocates
        assert (np.diff(curve.times) >= 0).all() and curve.times[0] == timeline.start_time
    assert check_memory(program, drawn, max(peaks)) is program
    if not max(peaks):
        return
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(program, drawn, max(peaks) - 1)
    error, site = caught.value, caught.value.sites[0]
    assert error.required_bytes == peaks[site.rank] == sum(size for _, _, size in error.live_values)
    expected = compute_reference(machine, drawn, site.rank)[site.index]
    assert {kind: size for kind, _, size in error.live_values} == {
        k: b for k, b in expected.items() if b
    }


def test_memory_without_sizes_is_in_activations() -> None:
    for schedule, shape in ((zb_h1, PipelineShape(3, 6)), (interleaved, PipelineShape(2, 4, 2))):
        timeline = simulate(compile(schedule, shape))
        assert timeline.peak_memory.tolist() == timeline.peak_in_flight.tolist()
        assert [c.total.max() for c in timeline.memory] == timeline.peak_in_flight.tolist()


def test_saved_bytes_last_from_forward_start_to_backward_end() -> None:
    timeline = simulate(
        compile(gpipe, PipelineShape(1, 2)), Costs(F=1, B=2), sizes=Sizes(saved=5, model_states=1)
    )
    curve = timeline.memory[0]
    assert curve.times.tolist() == [0, 0, 1, 4, 6]
    assert curve.total.tolist() == [1, 6, 11, 6, 1]


def test_forward_only_saves_nothing() -> None:
    program = compile(lambda r, P, m: m * F, PipelineShape(2, 4), buffer_sharing="minimal")
    value_sizes = Sizes(activation=3, saved=100, model_states=10)
    assert simulate(program, sizes=value_sizes).peak_memory.tolist() == [13, 13]
    assert simulate(program).peak_memory.tolist() == [0, 0]
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(program, value_sizes, 12)
    assert caught.value.sites[0].index == 0


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1, v_half])
@given(st.floats(0.1, 1.0))
def test_memory_limit_error_has_peak_without_limit(schedule: Schedule, share: float) -> None:
    """The required bytes are the peak of a run without a limit, for any limit."""
    program = compile(schedule, ranks=4, microbatches=8)
    sizes = Sizes(activation=1, saved=3, model_states=5)
    peaks = simulate(program, sizes=sizes).peak_memory
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(program, sizes, share * 0.99 * peaks.max())
    assert caught.value.required_bytes >= peaks.max()
    assert caught.value.required_bytes == max(
        footprint.total_bytes.max()
        for footprint in compute_footprints(program, sizes, worst_case=True)
    )


def test_memory_limit_error_has_two_different_numbers() -> None:
    """With three digits, both numbers would be 2 GB."""
    sizes = Sizes(saved=2.000001e9)
    with pytest.raises(MemoryLimitError, match="2,000,001,000 bytes, but the limit is 2,000,000,0"):
        compile(one_f_one_b, PipelineShape(1, 1), sizes=sizes, memory_limit=2e9)


def test_memory_limit_error_lists_rank_instruction_and_values() -> None:
    value_sizes = Sizes(activation=32e6, saved=1.2e9, model_states=8e9)
    with pytest.raises(MemoryLimitError) as caught:
        compile(gpipe, PipelineShape(4, 16), sizes=value_sizes, memory_limit=27.5e9)
    assert (
        str(caught.value)
        == """\
gpipe: rank 1 needs 29.25 GB, but the limit is 27.5 GB
  rank 1 #46  F 1.15  while it runs
    saved         16   19.2 GB
    model_states   1      8 GB
    act_in        16    512 MB
    act_out       16    512 MB
    grad_in       16    512 MB
    grad_out      16    512 MB
  hint: with buffer_sharing="minimal" ranks need at most 27.33 GB"""
    )
    compile(
        gpipe,
        PipelineShape(4, 16),
        buffer_sharing="minimal",
        sizes=value_sizes,
        memory_limit=27.5e9,
    )
    with pytest.raises(MemoryLimitError) as caught:
        compile(
            gpipe,
            PipelineShape(4, 16),
            buffer_sharing="minimal",
            sizes=value_sizes,
            memory_limit=27e9,
        )
    assert caught.value.hint.startswith('19.2 GB are saved activations: offload="fit"')


def test_split_backward_has_peak_of_full_backward() -> None:
    """ZB-H1 has the peaks of 1F1B if deferred tensors are a part of the saved ones."""
    small = Sizes(saved=10, deferred_wgrad=4)
    full, split = (
        simulate(compile(s, PipelineShape(3, 8)), sizes=small) for s in (one_f_one_b, zb_h1)
    )
    assert full.peak_memory.tolist() == [30, 20, 10]
    assert split.peak_memory[0] == 30
    curve = split.memory[0]
    assert curve.by_kind["deferred_wgrad"].max() == 4 and curve.by_kind["saved"].max() == 30


def test_values_between_stages_of_one_rank_have_no_slot() -> None:
    """The last rank of a vee has two adjacent stages, which exchange values without slots."""
    program = compile(zb_v, PipelineShape(2, 8, placement="vee"))
    assert count_slots(program)[1, SLOT_KINDS.index(Value.ACT_OUT)] == 16
    curve = simulate(program, sizes=Sizes(activation=1)).memory[1]
    assert curve.by_kind["act_out"].max() == 8  # the outputs of its second stage
    assert curve.by_kind["handed_over"].max() == 2  # not one value per microbatch


def test_scattered_values_and_shared_deferred_bytes() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 8), tp=4, buffer_sharing="minimal")
    curve = simulate(program, sizes=Sizes(activation=1)).memory[0]
    assert {kind: part.max() for kind, part in curve.by_kind.items() if part.any()} == {
        "act_out": 0.25, "grad_in": 1, "handed_over": 1
    }  # fmt: skip

    program = compile(lambda r, P, m: F + I + W, PipelineShape(1, 1))
    value_sizes = Sizes(saved=10, deferred_wgrad=4, saved_and_deferred=12)
    curve = simulate(program, Costs(), sizes=value_sizes).memory[0]
    assert [part.tolist() for part in (curve.times, curve.total)] == [
        [0, 0, 1, 2, 2, 3],
        [0, 10, 12, 2, 4, 0],
    ]
    assert curve.by_kind["saved"].tolist() == [0, 10, 10, 0, 0, 0]
    assert simulate(program, sizes=Sizes(saved=4, deferred_wgrad=10)).peak_memory.tolist() == [10]
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(program, value_sizes, 11)
    assert caught.value.required_bytes == 12 and caught.value.sites[0].index == 1
    assert caught.value.live_values == (("saved", 1, 10.0), ("deferred_wgrad", 1, 2.0))
    assert (
        str(caught.value)
        == """\
<lambda>: rank 0 needs 12 B, but the limit is 11 B
  rank 0 #1   I 0.0  while it runs, and makes deferred weight gradients
    saved           1      10 B
    deferred_wgrad  1       2 B"""
    )
    assert check_memory(program, value_sizes, 12) is program


@pytest.mark.parametrize("both", [9, 15, (12, 15)])
def test_invalid_saved_and_deferred_is_refused(both: float) -> None:
    with pytest.raises(UsageError, match=r"size saved_and_deferred .* from 10 to 14, not"):
        Sizes(saved=10, deferred_wgrad=4, saved_and_deferred=both)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("1.5GB", 1.5e9),
        ("40 GiB", 40 * 2**30),
        ("2kB", 2e3),
        ("5KB", 5e3),
        ("1e3MB", 1e9),
    ],
)
def test_bytes_are_parsed(text: str, number: float) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GB", "4G", "4gb", "-1GB", "nan", "1.2.3", "1 GB x"])
def test_invalid_bytes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_bytes_are_formatted() -> None:
    assert [format_bytes(b) for b in (0, 999, 1000, 1.5e9, 2.25e16)] == [
        "0 B", "999 B", "1 kB", "1.5 GB", "22.5 PB"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"saved": -1}, {"saved": float("nan")}, {"saved": "x"}, {"saved": ()}]
)
def test_invalid_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="saved"):
        Sizes(**wrong)


def test_size_with_unit_is_refused_with_hint() -> None:
    with pytest.raises(UsageError) as caught:
        Sizes(saved="1.2GB")  # type: ignore[arg-type]
    assert caught.value.fields == ("saved",) and caught.value.hint == "Sizes(saved=1.2e+09)"


def test_sizes_of_too_few_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="2 numbers for 3 stages"):
        assert simulate(compile(gpipe, PipelineShape(3, 3)), sizes=Sizes(saved=(1, 2))).memory


def test_simulate_prints_time_cost_of_slots(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("simulate", "gpipe", "--microbatches", "16", "--progress-model", "per_edge",
            "--costs", "F=1,B=2,send=0.1")  # fmt: skip
    out = run_command(
        capsys, *argv, "-O", "buffer_sharing=minimal", "--sizes", "activation=32MB,saved=1.2GB"
    )
    assert "span 60.6" in out and "the span would be 57.6, 5.0% less" in out
    assert "19.33 GB" in out
    out = run_command(capsys, *argv, "-O", "buffer_sharing=latency_preserving")
    assert "the span would be 57.6, the same" in out
    # The idle time is 0, without a rounding error such as 7e-15.
    assert out.splitlines()[6].split() == ["3", "48", "9.6", "0", "16"]


def test_simulate_hints_at_memory_saved_by_slots(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("simulate", "gpipe", "--microbatches", "16", "--sizes", "activation=32MB")
    hint = "with -O buffer_sharing=latency_preserving, no rank uses more than "
    assert f"{hint}192 MB" in run_command(capsys, *argv)
    assert (
        "192 MB"
        in (shared := run_command(capsys, *argv, "-O", "buffer_sharing=latency_preserving"))
        and hint not in shared
    )
    assert hint not in run_command(capsys, "simulate", "gpipe", "--microbatches", "1", *argv[4:])


@given(compute_programs(), st.data())
def test_peak_over_all_ranks_is_sum_at_one_time(draft: Program, data: st.DataObject) -> None:
    shape = draft.shape
    timeline = simulate(lower(draft), data.draw(costs(shape)), sizes=data.draw(sizes(shape)))
    curves = timeline.memory
    # If memory changes several times at one time, the last change counts.
    totals = [
        sum(float(c.total[np.searchsorted(c.times, t, "right") - 1]) for c in curves)
        for t in {*np.concatenate([c.times for c in curves]).tolist()}
    ]
    assert max(totals) <= timeline.peak_over_all_ranks <= timeline.peak_memory.sum()
    if timeline.ranks == 1:
        assert timeline.peak_over_all_ranks == timeline.peak_memory[0]


def test_unknown_memory_is_refused() -> None:
    run = simulate(compile(one_f_one_b, PipelineShape(2, 4)))
    for tier in ("device", "host", "attic"):
        with pytest.raises(UsageError):
            run.memory_on(tier)
