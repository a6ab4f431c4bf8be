"""Tests of costs and sizes per microbatch, against a reference that reads each value."""

from __future__ import annotations

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
    schedules,
    simulate,
)
from schedir.analysis.memory.buffer_slots import compute_message_sizes
from schedir.analysis.memory.footprint import compute_footprints
from schedir.commands.common.schedule_options import parse_costs, parse_sizes
from schedir.errors import CostsError, UsageError
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
    Opcode,
)
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate, fill_missing_backwards, format_costs, round_costs
from schedir.predict.what_if import advise
from schedir.schedules.greedy import greedy_schedule
from schedir.testing import compute_programs
from schedir.verify.check import parse_eager_limit
from tests.oracle import Machine

COSTS = ("F", "I", "W", "B", "send", "tp_scatter", "tp_gather")
SIZES = ("activation", "activation_grad", "saved", "deferred_wgrad")


def draw_values(shape: PipelineShape, max_value: int = 5) -> st.SearchStrategy[PerStage]:
    """Return a strategy of integer costs: a number, or numbers per stage, microbatch or both."""
    number = st.integers(0, max_value).map(float)
    row = st.lists(number, min_size=shape.microbatches, max_size=shape.microbatches)
    per_stage = st.lists(number, min_size=shape.stages, max_size=shape.stages).map(tuple)
    rows = st.one_of(*(st.lists(row, min_size=n, max_size=n) for n in {1, shape.stages}))
    return st.one_of(number, per_stage, rows)


def get_value(value: Any, stage: int, mb: int) -> float:
    """Return the cost or size of one microbatch in one stage."""
    if isinstance(value, tuple):
        value = value[0 if len(value) == 1 else stage]
    return float(value[mb] if isinstance(value, tuple) else value)


@given(compute_programs(), st.data())
@settings(max_examples=40)
def test_simulated_times_equal_machine_times(drafted: Program, data: Any) -> None:
    costs = Costs(**{name: data.draw(draw_values(drafted.shape), name) for name in COSTS})
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
def test_number_per_stage_equals_array_of_equal_numbers(drafted: Program, data: Any) -> None:
    """A cost that is equal for all microbatches can be one number or an array of equal numbers."""
    shape = drafted.shape
    per_stage = {
        name: data.draw(st.tuples(*[st.integers(0, 5).map(float)] * shape.stages), name)
        for name in COSTS
    }
    as_arrays = {
        name: [[cost] * shape.microbatches for cost in row] for name, row in per_stage.items()
    }
    programs = [compile(drafted, costs=Costs(**costs)) for costs in (per_stage, as_arrays)]
    assert programs[0] == programs[1]
    runs = [simulate(p, Costs(**c)) for p, c in zip(programs, (per_stage, as_arrays), strict=True)]
    assert (runs[0].spans == runs[1].spans).all()
    sizes = {
        name: data.draw(st.tuples(*[st.integers(0, 5).map(float)] * shape.stages), name)
        for name in SIZES
    }
    sizes_as_arrays = {
        name: np.repeat(np.array(row)[:, None], shape.microbatches, 1)
        for name, row in sizes.items()
    }
    footprints = [
        compute_footprints(programs[0], Sizes(**size_fields))
        for size_fields in (sizes, sizes_as_arrays)
    ]
    for footprint, array_footprint in zip(*footprints, strict=True):
        assert footprint.total_bytes.tolist() == array_footprint.total_bytes.tolist()


@given(compute_programs(), st.data())
def test_message_sizes_are_per_microbatch(drafted: Program, data: Any) -> None:
    program = compile(drafted)
    sizes = Sizes(
        activation=data.draw(draw_values(program.shape)),
        activation_grad=data.draw(draw_values(program.shape)),
    )
    index = InstructionIndex.from_program(program)
    sends = index.find_all_positions(SEND_OPS)
    expected = []
    for position in sends.tolist():
        _, _, (op, s, mb) = index.locate(position)
        is_activation = op is Opcode.SendAct
        size = sizes.activation if is_activation else sizes.activation_grad
        expected.append(get_value(size, s - (not is_activation), mb))
    assert compute_message_sizes(program, sizes, sends).tolist() == expected


@given(compute_programs(), st.data())
def test_calibrate_recovers_costs_per_microbatch(drafted: Program, data: Any) -> None:
    """A simulation with the costs that `calibrate` reads from a run gives the same run."""
    names = ("F", "B", "I", "W")
    costs = Costs(**{name: data.draw(draw_values(drafted.shape), name) for name in names})
    run = simulate(compile(drafted), costs)
    calibrated = calibrate(run, per_microbatch=True)
    prediction = simulate(run.program, calibrated)
    assert (prediction.spans["end"] == run.spans["end"]).all()
    text = format_costs(fill_missing_backwards(calibrated, run.program))
    assert round_costs(parse_costs(text)) == round_costs(
        fill_missing_backwards(calibrated, run.program)
    )


def test_mean_costs_underestimate_uneven_microbatches() -> None:
    costs = Costs(F=((1, 1, 1, 9, 1, 1, 1, 1),), B=((2, 2, 2, 18, 2, 2, 2, 2),))
    run = simulate(compile(schedules.one_f_one_b, PipelineShape(4, 8)), costs)
    assert simulate(run.program, calibrate(run, per_microbatch=True)).span == run.span
    assert simulate(run.program, calibrate(run)).span < 0.95 * run.span


@pytest.mark.parametrize(
    ("value", "message"),
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
def test_invalid_array_is_refused(value: Any, message: str) -> None:
    for error, make in (
        (CostsError, lambda: Costs(F=value)),
        (UsageError, lambda: Sizes(saved=value)),
    ):
        with pytest.raises(error, match=message):
            make()


def test_repr_has_only_given_costs() -> None:
    for costs in (Costs(F=1, send=(0.1, 0.2)), Costs()):
        assert eval(repr(costs)) == costs
    assert repr(Costs(F=1, B=2)) == "Costs(F=1.0, B=2.0)"


def test_costs_without_microbatch_refuse_arrays() -> None:
    for name in ("step", "reduce_grads", "reduce_replicated_stages", "reduce_tied", "reduce_norm"):
        with pytest.raises(CostsError, match=f"cost {name} must be a number or one per stage, not"):
            Costs(**{name: ((1.0, 2.0),)})
    for name in ("model_states", "version"):
        with pytest.raises(UsageError, match=f"size {name} must be a number or one per stage, not"):
            Sizes(**{name: ((1.0, 2.0),)})


@pytest.mark.parametrize("shape", [(2, 7), (3, 8), (8, 2), (1, 1), (2, 1)])
def test_array_of_other_shape_is_refused(shape: tuple[int, int]) -> None:
    """Refuse an array of another shape. An array of (2, 1) is not a number per stage."""
    program, array = compile(schedules.gpipe, PipelineShape(2, 8)), cast("PerStage", np.ones(shape))
    with pytest.raises(
        CostsError, match=f"{shape[0]} x {shape[1]} numbers; it must have 2 stages x 8"
    ):
        simulate(program, Costs(F=array))
    for call in (
        lambda sizes: check(program, sizes=sizes),
        lambda sizes: compute_footprints(program, sizes),
        lambda sizes: simulate(program, sizes=sizes).peak_memory,
    ):
        with pytest.raises(
            UsageError, match=f"{shape[0]} x {shape[1]} numbers; it must have 2 stages x 8"
        ):
            call(Sizes(saved=array))


def test_unused_sizes_of_other_shape_are_refused_before_saving(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(4, 8))
    for name in ("skip", "deferred_wgrad"):  # the program has no such values
        with pytest.raises(UsageError, match=f"size {name} is an array of 4 x 3 numbers"):
            run = simulate(program, sizes=Sizes(**{name: cast("Any", np.ones((4, 3)))}))
            save_timeline(run, tmp_path / "a.timeline")


def test_arrays_are_stored_as_tuples() -> None:
    """Costs and sizes can be compared, and can be keys of a dict."""
    array: Any = np.array([[1, 2], [3, 4]])
    costs, sizes = Costs(F=array), Sizes(activation=array[:1])
    assert costs.F == ((1.0, 2.0), (3.0, 4.0)) and sizes.activation == ((1.0, 2.0),)
    assert {costs: 1}[Costs(F=((1, 2), (3, 4)))] == 1
    program = compile(schedules.gpipe, PipelineShape(2, 2))
    assert parse_eager_limit(1.0, sizes, program) in {parse_eager_limit(1.0, sizes, program)}
    assert sizes.for_stages("activation_grad", 3).tolist() == [2.0] * 3  # the largest activation


def test_greedy_schedule_uses_costs_per_microbatch() -> None:
    """The order depends on whether the first gradient arrives before the third forward."""
    for first_cost, expected in ((1.0, "F 0.0 F 0.1 B"), (9.0, "F 0.0 F 0.1 F 0.2")):
        costs = Costs(F=((1.0, 3.0, 1.0), (first_cost, 1.0, 1.0)), B=1.0)
        first_stream = greedy_schedule(PipelineShape(2, 3), "BF", 3, costs).streams[0]
        assert " ".join(map(str, first_stream)).startswith(expected)


def test_advice_accepts_costs_per_microbatch() -> None:
    """Changes of the stages or the number of microbatches keep the costs per microbatch."""
    costs = Costs(F=((1, 2, 3, 4), (3, 6, 9, 12)), B=((2, 4, 6, 8), (6, 12, 18, 24)))
    run = simulate(compile(schedules.one_f_one_b, PipelineShape(2, 4)), costs)
    saved_shares = {
        change.description.split(" (")[0]: change.saved_share
        for change in advise(run, costs).changes
    }
    even = Costs(F=((2, 4, 6, 8),), B=((4, 8, 12, 16),))
    expected = 1 - simulate(run.program, even).span / run.span
    assert saved_shares["stages that all take the mean"] == pytest.approx(expected)
    twice: Any = {name: np.tile(to_grid(costs.specified[name]), 2) for name in ("F", "B")}
    expected = (
        1
        - simulate(compile(schedules.one_f_one_b, PipelineShape(2, 8)), Costs(**twice)).span
        / 2
        / run.span
    )
    assert saved_shares["twice as many microbatches of this size"] == pytest.approx(expected)


def test_arrays_are_parsed_from_text(tmp_path: Any) -> None:
    assert parse_costs("F=1/2:3/4,B=5/6").F == ((1.0, 2.0), (3.0, 4.0))
    assert parse_costs("F=1/2:3/4,B=5/6").B == ((5.0, 6.0),)
    assert parse_sizes("saved=1KB/2KB").saved == ((1000.0, 2000.0),)
    (tmp_path / "costs").write_text("F=1/2:\n  3/4,\nB=5/6\n")
    assert parse_costs(f"@{tmp_path}/costs") == parse_costs("F=1/2:3/4,B=5/6")
    for invalid in ("F=1/", "F=/", "F=1/x", "F=1//2"):
        with pytest.raises(UsageError, match="--costs: F must be"):
            parse_costs(invalid)
    with pytest.raises(CostsError, match="rows of 1 and of 2"):
        parse_costs("F=1/2:3")
    with pytest.raises(UsageError, match="cannot read"):
        parse_costs(f"@{tmp_path}/none")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_stages_are_redistributed_per_microbatch(parts: int, into: int, m: int, data: Any) -> None:
    rows = [data.draw(st.tuples(*[st.integers(0, 5).map(float)] * m)) for _ in range(parts)]
    redistributed = to_grid(redistribute_stages(tuple(rows), parts, into))
    for mb in range(m):
        of_microbatch = redistribute_stages(tuple(row[mb] for row in rows), parts, into)
        expected = expand_by_stage("x", of_microbatch, into, UsageError)
        if parts == 1:  # a single row is for all stages
            expected = np.full((1, 1), rows[0][mb] / into)
        assert redistributed[:, mb] == pytest.approx(expected[:, 0])
    assert to_grid(from_grid(redistributed)).tolist() == redistributed.tolist()


def test_timeline_file_keeps_sizes(tmp_path: Path) -> None:
    run = simulate(
        compile(schedules.gpipe, PipelineShape(2, 3)), sizes=Sizes(saved=((1, 2, 3), (4, 5, 6)))
    )
    save_timeline(run, tmp_path / "run.timeline")
    assert load_timeline(tmp_path / "run.timeline").sizes == run.sizes
    large = 10 ** np.random.default_rng(0).random((2, 250_000))
    run = replace(run, sizes=Sizes(saved=cast("PerStage", large)))
    with pytest.raises(UsageError, match="more than 8388608"):
        save_timeline(run, tmp_path / "large.timeline")
    assert not (tmp_path / "large.timeline").exists()


@given(
    st.floats(0, 100) | st.none(),
    st.floats(0, 100) | st.lists(st.floats(0, 100), min_size=3, max_size=3) | st.none(),
)
def test_missing_compute_costs_follow_given_ones(F: float | None, B: Any) -> None:
    """I and W without costs follow from B, or from F if B has no cost either."""
    costs, shape = Costs(F=F, B=B), PipelineShape(3, 2)
    forward, full, input_grads, weight_grads = (
        costs.for_opcode(op, shape) for op in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    np.testing.assert_array_equal(forward, np.full((3, 1), 1.0 if F is None else F))
    np.testing.assert_array_equal(input_grads, weight_grads)
    np.testing.assert_allclose(full, input_grads + weight_grads, atol=5e-324, rtol=1e-15)
    if B is None:
        np.testing.assert_array_equal(input_grads, forward)
    else:
        np.testing.assert_array_equal(full[:, 0], np.broadcast_to(B, 3))
