"""Costs and sizes per microbatch, compared with a reference that reads each of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    check,
    compile,
    expand_schedule,
    schedules,
    simulate,
)
from schedir.__main__ import main
from schedir.analysis.memory.buffer_slots import compute_message_sizes
from schedir.analysis.memory.footprint import compute_footprints
from schedir.commands.common.schedule_options import parse_costs, parse_sizes
from schedir.errors import CostsError, MemoryLimitError, UsageError
from schedir.io.timeline_file import load_timeline, save_timeline
from schedir.ir.cost.per_stage_values import (
    PerStage,
    expand_by_stage,
    from_grid,
    redistribute_stages,
    to_grid,
)
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SEND_OPS,
    VALUES,
    Instr,
    Opcode,
    Value,
)
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate, fill_missing_backwards, format_costs, round_costs
from schedir.predict.what_if import advise
from schedir.schedules.greedy import greedy_schedule
from schedir.testing import compute_programs
from schedir.verify.check import parse_eager_limit
from tests.oracle import Machine
from tests.strategies import with_slots

COSTS = ("F", "I", "W", "B", "send", "tp_scatter", "tp_gather")
SIZES = ("activation", "activation_grad", "saved", "deferred_wgrad")


def arrays(shape: PipelineShape, most: int = 5) -> st.SearchStrategy[PerStage]:
    """Return a strategy of integer costs: a number, or numbers per stage, microbatch or both."""
    one = st.integers(0, most).map(float)
    row = st.lists(one, min_size=shape.microbatches, max_size=shape.microbatches)
    several = st.lists(one, min_size=shape.stages, max_size=shape.stages).map(tuple)
    rows = st.one_of(*(st.lists(row, min_size=n, max_size=n) for n in {1, shape.stages}))
    return st.one_of(one, several, rows)


def naive(value: Any, stage: int, mb: int) -> float:
    """Return the cost or size of one microbatch in one stage."""
    if isinstance(value, tuple):
        value = value[0 if len(value) == 1 else stage]
    return float(value[mb] if isinstance(value, tuple) else value)


@given(compute_programs(), st.data())
@settings(max_examples=40)
def test_times_are_those_of_a_machine_that_looks_each_up(drafted: Program, data: Any) -> None:
    costs = Costs(**{name: data.draw(arrays(drafted.shape), name) for name in COSTS})
    model = data.draw(st.sampled_from(["per_device", "per_edge", "per_direction"]))
    tp = data.draw(st.sampled_from([1, 2]))
    program = compile(drafted, progress_model=model, costs=costs, tp=tp)
    run = simulate(program, costs, progress_model=model)
    machine = Machine(program, model, costs)
    assert machine.run()
    for rank in range(program.shape.ranks):
        ends = [machine.ended[rank, k] for k in range(len(program.streams[rank]))]
        assert run.spans["end"][run.spans["rank"] == rank].tolist() == ends


@given(compute_programs(), st.data())
@settings(max_examples=40)
def test_a_draft_takes_as_long_as_with_arrays_of_one_number(drafted: Program, data: Any) -> None:
    """A cost that is equal for all microbatches can be one number or an array of equal numbers."""
    shape = drafted.shape
    few = {
        name: data.draw(st.tuples(*[st.integers(0, 5).map(float)] * shape.stages), name)
        for name in COSTS
    }
    many = {name: [[each] * shape.microbatches for each in row] for name, row in few.items()}
    programs = [compile(drafted, costs=Costs(**costs)) for costs in (few, many)]
    assert programs[0] == programs[1]
    runs = [simulate(p, Costs(**c)) for p, c in zip(programs, (few, many), strict=True)]
    assert (runs[0].spans == runs[1].spans).all()
    sizes = {
        name: data.draw(st.tuples(*[st.integers(0, 5).map(float)] * shape.stages), name)
        for name in SIZES
    }
    wide = {
        name: np.repeat(np.array(row)[:, None], shape.microbatches, 1)
        for name, row in sizes.items()
    }
    held_by = [compute_footprints(programs[0], Sizes(**each)) for each in (sizes, wide)]
    for one, other in zip(*held_by, strict=True):
        assert one.total_bytes.tolist() == other.total_bytes.tolist()


def swept(program: Program, rank: int, sizes: Sizes) -> float:
    """Return the peak memory of a rank, by adding the sizes of all live values.

    It supports only programs without split backwards. Values of messages count with their slots. A
    slot has the size of the largest value of its kind.
    """
    own = list(program.streams[rank])
    machine = Machine(program, "per_device", Costs())
    machine.lists = [list(s) for s in program.streams]
    kinds: dict[str, list[float]] = {}
    for kind, s, mb in machine.values(rank):
        row = VALUES[Value[kind.upper()]]
        ops = {"act_out": Opcode.SendAct, "grad_out": Opcode.SendGrad}
        if kind in ops and Instr(ops[kind], s, mb) not in own:
            continue  # the next stage is on the same rank, so the value has no slot
        said = (
            sizes.activation_grad
            if row.size == "activation_grad" and sizes.activation_grad is not None
            else None
        )
        value = sizes.activation if said is None else said
        kinds.setdefault(kind, []).append(naive(value, s - (kind in ("act_in", "grad_out")), mb))
    total = 0.0
    for kind, each in kinds.items():
        said_slots = program.slots[rank]._asdict()[kind] if program.slots else len(each)
        total += min(said_slots, len(each)) * max(each)
    now = most = 0.0
    for instr in own:
        if instr.op is Opcode.Forward:
            now += naive(sizes.saved, instr.stage, instr.mb)
        most = max(most, now)
        if instr.op is Opcode.Backward:
            now -= naive(sizes.saved, instr.stage, instr.mb)
    return total + most


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_bytes_are_those_of_a_sweep(ranks: int, microbatches: int, data: Any) -> None:
    """Compare with `swept`, for programs with one stage per rank and full backwards."""
    shape = PipelineShape(ranks, microbatches)
    which = data.draw(st.sampled_from([schedules.gpipe, schedules.one_f_one_b]))
    program = with_slots(compile(which, shape), random.Random(data.draw(st.integers(0, 9))))
    sizes = Sizes(
        **{
            name: data.draw(arrays(shape), name)
            for name in ("activation", "activation_grad", "saved")
        }
    )
    footprints = compute_footprints(program, sizes)
    most = [float(own.total_bytes.max()) for own in footprints]
    assert most == [swept(program, rank, sizes) for rank in range(ranks)]
    if max(most) > 0:
        with pytest.raises(MemoryLimitError) as caught:
            compile(expand_schedule(which, shape), sizes=sizes, memory_limit=0.0)
        assert caught.value.limit_bytes == 0
    assert simulate(program, sizes=sizes).peak_memory.tolist() == most


@given(compute_programs(), st.data())
def test_messages_have_their_own_sizes(drafted: Program, data: Any) -> None:
    program = compile(drafted)
    sizes = Sizes(
        activation=data.draw(arrays(program.shape)),
        activation_grad=data.draw(arrays(program.shape)),
    )
    index = InstructionIndex.from_program(program)
    sends = index.find_all_positions(SEND_OPS)
    expected = []
    for at in sends.tolist():
        _, _, (op, s, mb) = index.locate(at)
        act = op is Opcode.SendAct
        expected.append(
            naive(sizes.activation if act else sizes.activation_grad, s - (not act), mb)
        )
    assert compute_message_sizes(program, sizes, sends).tolist() == expected


@given(compute_programs(), st.data())
def test_a_run_tells_the_costs_of_each_microbatch(drafted: Program, data: Any) -> None:
    """A simulation with the costs that `calibrate` reads from a run gives the same run."""
    names = ("F", "B", "I", "W")
    costs = Costs(**{name: data.draw(arrays(drafted.shape), name) for name in names})
    run = simulate(compile(drafted), costs)
    found = calibrate(run, per_microbatch=True)
    again = simulate(run.program, found)
    assert (again.spans["end"] == run.spans["end"]).all()
    text = format_costs(fill_missing_backwards(found, run.program))
    assert round_costs(parse_costs(text)) == round_costs(fill_missing_backwards(found, run.program))


def test_the_mean_misses_what_an_array_tells() -> None:
    costs = Costs(F=((1, 1, 1, 9, 1, 1, 1, 1),), B=((2, 2, 2, 18, 2, 2, 2, 2),))
    run = simulate(compile(schedules.one_f_one_b, PipelineShape(4, 8)), costs)
    assert simulate(run.program, calibrate(run, per_microbatch=True)).span == run.span
    assert simulate(run.program, calibrate(run)).span < 0.95 * run.span


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([[1, 2], [3]], "rows of 1 and of 2"),
        ([[1, 2, 3, 4], 5], "must be a number or one per stage, or an array"),
        ([[[1]]], "must be a number or one per stage, or an array"),
        (np.ones((2, 2, 2)), "must be a number or one per stage, or an array"),
        ([[]], "empty"),
        ([[1, -1]], "not -1"),
        ([[1, float("nan")]], "not nan"),
    ],
)
def test_what_is_no_array(value: Any, says: str) -> None:
    for error, make in (
        (CostsError, lambda: Costs(F=value)),
        (UsageError, lambda: Sizes(saved=value)),
    ):
        with pytest.raises(error, match=says):
            make()


def test_only_given_costs_are_printed() -> None:
    for costs in (Costs(F=1, send=(0.1, 0.2)), Costs()):
        assert eval(repr(costs)) == costs
    assert repr(Costs(F=1, B=2)) == "Costs(F=1.0, B=2.0)"


def test_what_is_of_no_microbatch_takes_no_array() -> None:
    for name in ("step", "reduce_grads", "reduce_replicated_stages", "reduce_tied", "reduce_norm"):
        with pytest.raises(CostsError, match=f"cost {name} must be a number or one per stage, not"):
            Costs(**{name: ((1.0, 2.0),)})
    for name in ("model_states", "version"):
        with pytest.raises(UsageError, match=f"size {name} must be a number or one per stage, not"):
            Sizes(**{name: ((1.0, 2.0),)})


@pytest.mark.parametrize("shape", [(2, 7), (3, 8), (8, 2), (1, 1), (2, 1)])
def test_an_array_of_another_plan(shape: tuple[int, int]) -> None:
    """Refuse an array of another shape. An array of (2, 1) is not a number per stage."""
    program, given = compile(schedules.gpipe, PipelineShape(2, 8)), cast("PerStage", np.ones(shape))
    with pytest.raises(
        CostsError, match=f"{shape[0]} x {shape[1]} numbers; it must have 2 stages x 8"
    ):
        simulate(program, Costs(F=given))
    for call in (
        lambda sizes: check(program, sizes=sizes),
        lambda sizes: compute_footprints(program, sizes),
        lambda sizes: simulate(program, sizes=sizes).peak_memory,
    ):
        with pytest.raises(
            UsageError, match=f"{shape[0]} x {shape[1]} numbers; it must have 2 stages x 8"
        ):
            call(Sizes(saved=given))


def test_sizes_that_nobody_asks_for_are_refused_before_a_file_has_them(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(4, 8))
    for name in ("skip", "deferred_wgrad"):  # the program has no such values
        with pytest.raises(UsageError, match=f"size {name} is an array of 4 x 3 numbers"):
            run = simulate(program, sizes=Sizes(**{name: cast("Any", np.ones((4, 3)))}))
            save_timeline(run, tmp_path / "a.timeline")


def test_arrays_are_kept_as_tuples() -> None:
    """Arrays become tuples, so that costs and sizes can be compared and be keys."""
    given: Any = np.array([[1, 2], [3, 4]])
    costs, sizes = Costs(F=given), Sizes(activation=given[:1])
    assert costs.F == ((1.0, 2.0), (3.0, 4.0)) and sizes.activation == ((1.0, 2.0),)
    assert {costs: 1}[Costs(F=((1, 2), (3, 4)))] == 1
    program = compile(schedules.gpipe, PipelineShape(2, 2))
    assert parse_eager_limit(1.0, sizes, program) in {parse_eager_limit(1.0, sizes, program)}
    assert sizes.for_stages("activation_grad", 3).tolist() == [2.0] * 3  # the largest activation


def test_greedy_knows_what_each_microbatch_takes() -> None:
    """The order depends on whether the first gradient arrives before the third forward."""
    for first, expected in ((1.0, "F 0.0 F 0.1 B"), (9.0, "F 0.0 F 0.1 F 0.2")):
        costs = Costs(F=((1.0, 3.0, 1.0), (first, 1.0, 1.0)), B=1.0)
        own = greedy_schedule(PipelineShape(2, 3), "BF", 3, costs).streams[0]
        assert " ".join(map(str, own)).startswith(expected)


def test_advice_takes_arrays() -> None:
    """Changes of the stages or the number of microbatches keep the costs per microbatch."""
    costs = Costs(F=((1, 2, 3, 4), (3, 6, 9, 12)), B=((2, 4, 6, 8), (6, 12, 18, 24)))
    run = simulate(compile(schedules.one_f_one_b, PipelineShape(2, 4)), costs)
    found = {
        change.description.split(" (")[0]: change.saved_share
        for change in advise(run, costs).changes
    }
    even = Costs(F=((2, 4, 6, 8),), B=((4, 8, 12, 16),))
    wanted = 1 - simulate(run.program, even).span / run.span
    assert found["stages that all take the mean"] == pytest.approx(wanted)
    twice: Any = {name: np.tile(to_grid(costs.specified[name]), 2) for name in ("F", "B")}
    wanted = (
        1
        - simulate(compile(schedules.one_f_one_b, PipelineShape(2, 8)), Costs(**twice)).span
        / 2
        / run.span
    )
    assert found["twice as many microbatches of this size"] == pytest.approx(wanted)


def test_arrays_as_text(tmp_path: Any) -> None:
    assert parse_costs("F=1/2:3/4,B=5/6").F == ((1.0, 2.0), (3.0, 4.0))
    assert parse_costs("F=1/2:3/4,B=5/6").B == ((5.0, 6.0),)
    assert parse_sizes("saved=1KB/2KB").saved == ((1000.0, 2000.0),)
    (tmp_path / "costs").write_text("F=1/2:\n  3/4,\nB=5/6\n")
    assert parse_costs(f"@{tmp_path}/costs") == parse_costs("F=1/2:3/4,B=5/6")
    for bad in ("F=1/", "F=/", "F=1/x", "F=1//2"):
        with pytest.raises(UsageError, match="--costs: F must be"):
            parse_costs(bad)
    with pytest.raises(CostsError, match="rows of 1 and of 2"):
        parse_costs("F=1/2:3")
    with pytest.raises(UsageError, match="cannot read"):
        parse_costs(f"@{tmp_path}/none")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_stages_are_cut_for_each_microbatch(parts: int, into: int, m: int, data: Any) -> None:
    rows = [data.draw(st.tuples(*[st.integers(0, 5).map(float)] * m)) for _ in range(parts)]
    found = to_grid(redistribute_stages(tuple(rows), parts, into))
    for mb in range(m):
        alone = redistribute_stages(tuple(row[mb] for row in rows), parts, into)
        expected = expand_by_stage("x", alone, into, UsageError)
        if parts == 1:  # a single row is for all stages
            expected = np.full((1, 1), rows[0][mb] / into)
        assert found[:, mb] == pytest.approx(expected[:, 0])
    assert to_grid(from_grid(found)).tolist() == found.tolist()


REFUSED = (Path(__file__).parents[1] / "golden" / "arrays.txt").read_text().split("\n\n")


@pytest.mark.parametrize("told", REFUSED, ids=lambda told: told.split("\n")[0].split()[-1])
def test_what_a_person_is_told(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, message = told.strip().split("\n", 1)
    assert main(command.removeprefix("$ schedir ").split()) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_file_keeps_sizes(tmp_path: Path) -> None:
    run = simulate(
        compile(schedules.gpipe, PipelineShape(2, 3)), sizes=Sizes(saved=((1, 2, 3), (4, 5, 6)))
    )
    save_timeline(run, tmp_path / "run.timeline")
    assert load_timeline(tmp_path / "run.timeline").sizes == run.sizes
    many = 10 ** np.random.default_rng(0).random((2, 250_000))
    run = replace(run, sizes=Sizes(saved=cast("PerStage", many)))
    with pytest.raises(UsageError, match="more than 8388608"):
        save_timeline(run, tmp_path / "large.timeline")
    assert not (tmp_path / "large.timeline").exists()


@given(
    st.floats(0, 100) | st.none(),
    st.floats(0, 100) | st.lists(st.floats(0, 100), min_size=3, max_size=3) | st.none(),
)
def test_computes_that_are_not_given_follow_those_that_are(F: float | None, B: Any) -> None:
    """I and W without costs follow from B, or from F if B has no cost either."""
    costs, shape = Costs(F=F, B=B), PipelineShape(3, 2)
    forward, whole, first, late = (
        costs.for_opcode(op, shape) for op in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    np.testing.assert_array_equal(forward, np.full((3, 1), 1.0 if F is None else F))
    np.testing.assert_array_equal(first, late)
    np.testing.assert_allclose(whole, first + late, atol=5e-324, rtol=1e-15)
    if B is None:
        np.testing.assert_array_equal(first, forward)
    else:
        np.testing.assert_array_equal(whole[:, 0], np.broadcast_to(B, 3))
