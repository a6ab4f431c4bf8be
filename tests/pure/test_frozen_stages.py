"""Tests of frozen stages, which have no backward, gradient messages or reductions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    compile,
    expand_schedule,
    from_text,
    greedy_schedule,
    schedules,
    simulate,
    to_text,
)
from schedir.__main__ import main
from schedir.analysis.memory.footprint import (
    compute_footprints,
    count_peak_versions,
    peak_in_flight,
)
from schedir.analysis.progress_models import MODELS
from schedir.errors import (
    SchedirError,
    ShapeError,
)
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.isa.instructions import OPTIMIZER_STEP_OPS, TRAINED_STAGE_OPS, Opcode
from schedir.ir.program import Program
from schedir.passes.splitting.frozen_stages import drop_frozen_backwards
from schedir.schedules import one_f_one_b, pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, RankSchedule, overlapped_pair
from schedir.testing import compute_programs, shapes
from schedir.verify.check import check, check_draft
from tests.mutants import built_in_schedules
from tests.oracle_threads import verdict
from tests.pure.test_stage_segments import shape_of
from tests.strategies import costs

O = Opcode
SHAPE = PipelineShape(4, 8)


def compile_or_skip(
    source: Any, shape: PipelineShape | None = None, **traits: Any
) -> Program | None:
    """Compile a program, or return None for a schedule that does not support the shape."""
    try:
        return compile(source, shape, **traits)
    except SchedirError:
        assert not isinstance(source, Program)
        with pytest.raises(SchedirError):
            check_draft(expand_schedule(source, shape or SHAPE))
        return None


def list_compute(program: Program) -> list[list[str]]:
    """Return the compute instructions of each rank in order."""
    return [
        [
            str(i)
            for i in stream
            if i.op in (O.Forward, O.Backward, O.BackwardInput, O.BackwardWeight)
        ]
        for stream in program.streams
    ]


@settings(max_examples=60)
@given(st.data())
def test_freezing_removes_only_backwards_of_frozen_stages(data: st.DataObject) -> None:
    """The remaining compute keeps its order, for any schedule or draft and progress model."""
    source: Any = data.draw(
        compute_programs() if data.draw(st.booleans()) else st.sampled_from(built_in_schedules())
    )
    if isinstance(source, Program):
        shape = source.shape
    else:
        ranks, microbatches = 2 * data.draw(st.integers(1, 2)), 2 * data.draw(st.integers(1, 3))
        shape = shape_of(source, ranks, microbatches)
    frozen = data.draw(st.integers(0, shape.stages - 1))
    options = {"clip_grad_norm": data.draw(st.booleans()), "tp": data.draw(st.integers(1, 2))}
    source_shape = None if isinstance(source, Program) else shape
    program, trained = (
        compile_or_skip(source, source_shape, frozen_stages=n, **options) for n in (frozen, 0)
    )
    if program is None or trained is None:
        return
    for model in MODELS:
        check(program, model)
        assert verdict(program, model).kind == "ok"
    assert not [
        i for s in program.streams for i in s if i.op in TRAINED_STAGE_OPS and i.stage < frozen
    ]
    dropped = {f"{text} {s}" for text in "BIW" for s in range(frozen)}
    assert list_compute(program) == [
        [i for i in texts if i.split(".")[0] not in dropped] for texts in list_compute(trained)
    ]
    assert from_text(to_text(program)) == program
    assert (program.digest == trained.digest) == (frozen == 0)


def test_frozen_stages_save_time_memory_and_messages() -> None:
    program, trained = (compile(one_f_one_b, SHAPE, frozen_stages=n) for n in (2, 0))
    costs_of_ops, sizes = Costs(F=1, B=2), Sizes(activation=1.0, saved=10.0, model_states=100.0)
    # Two forwards precede 1F1B on two ranks.
    assert simulate(program, costs_of_ops).span == 2 + 8 * 3 + 3
    assert simulate(trained, costs_of_ops).span == 33
    assert peak_in_flight(program).tolist() == [0, 0, 2, 1]
    assert [
        int(footprint.dynamic_memory["saved"][0].max(initial=0))
        for footprint in compute_footprints(program, sizes)
    ] == [
        0,
        0,
        2,
        1,
    ]
    sends = [np.count_nonzero(stream.op == O.SendGrad) for stream in program.streams]
    assert sends == [0, 0, 0, 8]


def test_frozen_ranks_reduce_norm_and_step() -> None:
    program = compile(one_f_one_b, SHAPE, frozen_stages=2, clip_grad_norm=True)
    texts = [[str(i) for i in stream][-3:] for stream in program.streams]
    assert texts[0][1:] == ["reduce_norm", "step"] and "reduce_grads 0" not in texts[0]
    assert texts[2] == ["reduce_grads 2", "reduce_norm", "step"]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("frozen_stages", [1, 2, 3])
@pytest.mark.parametrize("schedule", [pipedream_2bw, one_f_one_b])
def test_several_updates_with_frozen_stages(schedule: Any, frozen_stages: int, clip: bool) -> None:
    """Frozen weights have one version, and a forward that uses them waits for no step."""
    shape = PipelineShape(4, 12, optimizer_steps=3, weight_delay=1)
    program = compile(schedule, shape, frozen_stages=frozen_stages, clip_grad_norm=clip)
    for model in MODELS:
        check(program, model)
        assert verdict(program, model).kind == "ok"
    assert count_peak_versions(program).tolist() == [
        1 if r < frozen_stages else 2 for r in range(4)
    ]
    footprints = compute_footprints(program, Sizes(version=1.0, model_states=1.0))
    versions = [footprint.static_memory["versions"][0] for footprint in footprints]
    assert versions[:frozen_stages] == [0] * frozen_stages
    for stream in program.streams:  # each step follows the forwards of its update
        steps = [k for k, i in enumerate(stream) if i.op in OPTIMIZER_STEP_OPS]
        for update, step in enumerate(steps):
            last = max(k for k, i in enumerate(stream) if i.op is O.Forward and i.mb // 4 == update)
            assert last < step


def test_trained_stages_without_weight_delay_need_flush() -> None:
    with pytest.raises(SchedirError, match="needs the weights"):
        compile(one_f_one_b, PipelineShape(4, 8, optimizer_steps=2), frozen_stages=1)
    compile(
        one_f_one_b, PipelineShape(4, 8, optimizer_steps=2), frozen_stages=3
    )  # only the last stage is trained


def forwards_first(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    """Return all forwards of a frozen stage, and then a trained stage's microbatches in turn."""
    return m * F[0] + m * (F[1] + B[1])


def test_frozen_forwards_do_not_wait_for_step() -> None:
    shape = PipelineShape(1, 4, 2, optimizer_steps=2)
    compile(forwards_first, shape, frozen_stages=1)
    with pytest.raises(SchedirError):
        compile(lambda r, P, m, v: m * F[0] + m * (F[1] + B[1] + B[0]), shape)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (0, 2, 3, 1), (3, 0, 1, 2)])
@pytest.mark.parametrize("frozen_stages", [1, 2])
def test_frozen_rank_steps_in_order_of_updates(order: tuple[int, ...], frozen_stages: int) -> None:
    """The stream has the steps in order, even if the forwards of the first update end last."""

    def permuted_forwards(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        if rank < frozen_stages:
            return sum((F.at(mb) for mb in order), 0 * F) + microbatches * B
        return microbatches * (F + B)

    program = compile(
        permuted_forwards,
        PipelineShape(3, 4, optimizer_steps=2, weight_delay=1),
        frozen_stages=frozen_stages,
    )
    for rank, stream in enumerate(program.streams):
        steps = [
            (position, i.mb) for position, i in enumerate(stream) if i.op in OPTIMIZER_STEP_OPS
        ]
        assert [update for _, update in steps] == [0, 1]
        early_microbatches = {
            i.mb for i in stream[steps[0][0] + 1 :] if i.op is O.Forward and i.mb < 2
        }
        assert not (early_microbatches and rank < frozen_stages)


@pytest.mark.parametrize("frozen", [-1, 4, 99, True, "2", 1.5])
def test_invalid_number_of_frozen_stages_is_refused(frozen: Any) -> None:
    with pytest.raises(ShapeError) as caught:
        compile(one_f_one_b, SHAPE, frozen_stages=frozen)
    assert caught.value.fields == ("frozen_stages",)
    if frozen in (4, 99):
        assert "forward_only" in caught.value.hint


def test_weight_tied_between_frozen_and_trained_stage_is_refused() -> None:
    with pytest.raises(ShapeError) as caught:
        compile(one_f_one_b, SHAPE, frozen_stages=1, tied_weights=True)
    assert caught.value.fields == ("tied_weights", "frozen_stages")
    program = compile(one_f_one_b, SHAPE, frozen_stages=2, tied_weights=[(0, 1), (2, 3)])
    reduced = [[i.stage for i in s if i.op is O.ReduceTied] for s in program.streams]
    assert reduced == [[], [], [2], [3]]  # if all copies are frozen, there is nothing to sum
    program = compile(one_f_one_b, SHAPE, frozen_stages=2, tied_weights=[(0, 1)])
    assert not [i for s in program.streams for i in s if i.op is O.ReduceTied]


# ---------------------------------------------------------------- drafts


def joined_backwards(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Join forwards of the second stage to backwards of the first, as their second part."""
    return (
        m * F[0]
        + F[1]
        + B[1]
        + overlapped_pair((m - 1) * B[0], (m - 1) * F[1])
        + (m - 1) * B[1]
        + B[0]
    )


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (schedules.dualpipe_v, PipelineShape(2, 8, placement="vee")),
        (joined_backwards, PipelineShape(1, 3, 2)),
    ],
)
def test_draft_with_frozen_stages_may_contain_their_backwards(
    schedule: Any, shape: PipelineShape
) -> None:
    """A forward that was joined to a dropped backward runs alone."""
    trained = expand_schedule(schedule, shape)
    assert any(stream.joined.any() for stream in trained.streams)
    with_backwards = check_draft(replace(trained, frozen_stages=shape.stages // 2))
    without_backwards = drop_frozen_backwards(with_backwards)
    assert check_draft(without_backwards) == without_backwards
    assert len(without_backwards) < len(with_backwards)
    assert (
        simulate(with_backwards).program
        == simulate(without_backwards).program
        == compile(trained, frozen_stages=shape.stages // 2)
    )
    pairs = [
        {s[k - 1].op, s[k].op}
        for s in without_backwards.streams
        for k in np.flatnonzero(s.joined).tolist()
    ]
    assert all(O.Forward in pair and len(pair) == 2 for pair in pairs)
    assert bool(pairs) == (schedule is not joined_backwards)


@settings(max_examples=60)
@given(st.data())
def test_greedy_schedule_omits_frozen_backwards(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    frozen, drawn_costs = data.draw(st.integers(0, shape.stages - 1)), data.draw(costs(shape))
    prefer = data.draw(st.sampled_from(["BF", "FB", "FIW", "IFW", "WIF"]))
    limits = [sum(s >= frozen for s in stages) for stages in shape.stages_on_rank]
    draft = greedy_schedule(shape, prefer, limits.__getitem__, drawn_costs, frozen_stages=frozen)
    program = compile(draft, costs=drawn_costs)
    assert program.frozen_stages == frozen and check_draft(draft) == drop_frozen_backwards(draft)
    check(program, "blocking_serial")
    assert (peak_in_flight(program) <= limits).all()


@pytest.mark.parametrize("frozen_stages", [1, 2, 3])
@pytest.mark.parametrize("priced", [Costs(F=1, B=2), Costs(F=(3, 1, 1, 1), B=2), Costs(send=0.5)])
def test_greedy_schedule_with_frozen_stages_is_fastest(frozen_stages: int, priced: Costs) -> None:
    limits = [4 - r for r in range(4)]
    with_frozen = greedy_schedule(
        SHAPE, "BF", limits.__getitem__, priced, frozen_stages=frozen_stages
    )
    without_frozen = greedy_schedule(SHAPE, "BF", limits.__getitem__, priced)
    spans = [
        simulate(compile(source, None if isinstance(source, Program) else SHAPE,
                         costs=priced, frozen_stages=frozen_stages), priced).span
        for source in (with_frozen, without_frozen, one_f_one_b)
    ]  # fmt: skip
    assert spans[0] == min(spans)


# ---------------------------------------------------------------- command line


def test_commands_accept_frozen_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--ranks", "4", "--microbatches", "8"]
    file = str(tmp_path / "frozen.sched")
    assert main(["print", "one_f_one_b", *shape, "-O", "frozen_stages=2", "-o", file]) == 0
    assert from_text(Path(file).read_text()) == compile(one_f_one_b, SHAPE, frozen_stages=2)
    assert main(["check", file]) == 0
    assert main(["explain", file, "--costs", "F=1,B=2"]) == 0
    assert main(["compare", file, "one_f_one_b", *shape, "-O", "frozen_stages=2"]) == 0
    assert main(["check", file, "-O", "frozen_stages=1"]) == 2


def test_compared_schedules_freeze_same_part_of_model(tmp_path: Path) -> None:
    """The schedules have different numbers of stages."""
    file = tmp_path / "frozen.sched"
    file.write_text(to_text(compile(one_f_one_b, SHAPE, frozen_stages=2)))
    specified = {"ranks": 4, "microbatches": 8, "frozen_stages": 2}
    for name in ("one_f_one_b", "interleaved", "dualpipe", "chimera", str(file)):
        program = Request(Source(name), specified, defaults={}, for_comparison=True).program
        assert 2 * program.frozen_stages == program.shape.stages
    uneven = {**specified, "frozen_stages": 1, "placement": (0, 1, 1, 2, 3)}
    with pytest.raises(ShapeError) as caught:
        _ = Request(Source("gpipe"), uneven, defaults={}, for_comparison=True).program
    assert "frozen_stages" in caught.value.fields
