"""Tests of programs with several updates: their drafts, counts, predictions and refusals."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints, count_peak_versions
from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.errors import (
    OrderError,
    ScheduleError,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.schedules import (
    gpipe,
    interleaved_zb,
    looped_dfs,
    one_f_one_b,
    pipedream_2bw,
    schedule_algebra,
    zb_h1,
    zb_h2,
)
from schedir.schedules.schedule_algebra import (
    RankSchedule,
    Schedule,
    overlapped_pair,
    with_weight_delay,
)
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import random_compute_program
from schedir.verify.check import check
from tests.commands import run_refused_command
from tests.laws import TRIPLES, simulate_schedule
from tests.oracle import Machine


def make_2bw_shape(P: int, n: int, updates: int) -> PipelineShape:
    return PipelineShape(P, n * updates, optimizer_steps=updates, weight_delay=1)


def make_pipedream_shape(P: int, m: int) -> PipelineShape:
    """Return a shape with an update per microbatch, where each stage uses its newest weights."""
    return PipelineShape(P, m, optimizer_steps=m, weight_delay=tuple(P - 1 - s for s in range(P)))


@pytest.mark.parametrize("P", [2, 3, 5])
def test_2bw_has_no_flush(P: int) -> None:
    for n, updates in ((P - 1, 4), (P, 2), (2 * P + 1, 3)):
        for F, I, W in TRIPLES:
            costs = Costs(F=F, I=I, W=W)
            timeline = simulate_schedule(pipedream_2bw, make_2bw_shape(P, n, updates), costs)
            assert timeline.idle.tolist() == [(P - 1) * (F + I + W)] * P
            assert timeline.peak_in_flight.tolist() == [min(P - r, n * updates) for r in range(P)]
            assert timeline.peak_weight_versions.tolist() == [2] * P


@pytest.mark.parametrize("P", [2, 4])
def test_pipedream_keeps_one_version_per_microbatch_in_flight(P: int) -> None:
    shape = make_pipedream_shape(P, 3 * P)
    timeline = simulate_schedule(one_f_one_b, shape, Costs(F=2, B=3))
    assert timeline.idle.tolist() == [(P - 1) * 5] * P
    assert timeline.peak_weight_versions.tolist() == timeline.peak_in_flight.tolist()
    assert timeline.peak_weight_versions.tolist() == [P - r for r in range(P)]


def test_memory_counts_weight_versions() -> None:
    sizes = Sizes(model_states=100.0, version=10.0, saved=1.0)
    for shape, copies in (
        (make_2bw_shape(3, 4, 3), [2, 2, 2]),
        (make_pipedream_shape(3, 6), [3, 2, 1]),
    ):
        for footprint, n in zip(
            compute_footprints(compile(one_f_one_b, shape), sizes), copies, strict=True
        ):
            assert footprint.static_memory["versions"] == (n, 10.0 * n)
    assert (
        "versions"
        not in compute_footprints(compile(gpipe, PipelineShape(2, 4)), sizes)[0].static_memory
    )
    (footprint,) = compute_footprints(
        compile(one_f_one_b, make_2bw_shape(1, 2, 2)), Sizes(params=10.0)
    )
    # By default a version is as large as the parameters.
    assert footprint.static_memory["versions"] == (
        2,
        20.0,
    )


def test_single_update_has_one_version() -> None:
    assert count_peak_versions(compile(gpipe, PipelineShape(3, 6))).tolist() == [1, 1, 1]


@pytest.mark.parametrize("P", [3, 4, 6])
def test_too_few_microbatches_per_update_are_refused(P: int) -> None:
    with pytest.raises(OrderError, match="needs the weights") as caught:
        compile(pipedream_2bw, make_2bw_shape(P, P - 2, 4))
    use, step = caught.value.sites
    assert (use.rank, str(use.instr)[:4], str(step.instr)[:4]) == (0, "F 0.", "step")
    with pytest.raises(OrderError, match="needs the weights"):
        # This schedule has neither a weight delay nor a flush.
        compile(one_f_one_b, PipelineShape(P, 4 * P, optimizer_steps=4))


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("updates", [2, 4, 8])
def test_hinted_weight_delay_is_minimal(schedule: Schedule, updates: int) -> None:
    with pytest.raises(OrderError) as caught:
        compile(schedule, PipelineShape(4, 8, optimizer_steps=updates))
    hinted_delays = {int(d) for d in re.findall(r"delay ?=? ?(\d+)", caught.value.hint)}
    (min_delay,) = hinted_delays
    compile(schedule, PipelineShape(4, 8, optimizer_steps=updates, weight_delay=min_delay))
    with pytest.raises(OrderError, match="needs the weights"):
        compile(schedule, PipelineShape(4, 8, optimizer_steps=updates, weight_delay=min_delay - 1))


@pytest.mark.parametrize("schedule", [zb_h1, zb_h2, interleaved_zb])
def test_input_gradient_before_step_is_refused(schedule: Schedule) -> None:
    """I adds the gradients of layers that are not split, and a rank has one sum of gradients.

    A weight delay does not change this.
    """
    for delay in (0, 3):
        with pytest.raises(OrderError) as caught:
            compile(schedule, PipelineShape(4, 16, 1, optimizer_steps=4, weight_delay=delay))
        early_site, late_site, step = caught.value.sites
        assert (str(early_site.instr), early_site.rank, str(step.instr)) == ("I 1.4", 1, "step")
        assert str(late_site.instr).startswith("W 1.")
        assert early_site.index < late_site.index < step.index
        assert "pipedream_2bw" in caught.value.hint


def test_weight_versions_of_microbatches() -> None:
    shape = make_2bw_shape(3, 2, 4)
    assert shape.weight_version(0, range(8)).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    shape = make_pipedream_shape(3, 5)
    table = [shape.weight_version(s, range(5)).tolist() for s in range(3)]
    assert table == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


PROGRAMS = [
    compile(pipedream_2bw, make_2bw_shape(3, 3, 3)),
    compile(pipedream_2bw, make_2bw_shape(2, 2, 3), clip_grad_norm=True, tied_weights=True),
    compile(one_f_one_b, make_pipedream_shape(3, 4)),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: str(p.shape.optimizer_steps))
def test_programs_with_several_updates_run(program: Program) -> None:
    for folded in (True, False):
        assert from_text(to_text(program, folded)) == program
    costs = Costs(step=0.5, reduce_grads=0.25, send=0.125)
    for model in MODELS:
        if program.clip_grad_norm and model == "blocking_serial":
            continue  # all ranks meet at each update
        machine = Machine(check(program, model), model, costs)
        assert machine.run()
        assert max(machine.ended.values()) == simulate(program, costs, progress_model=model).span
    steps = [i.mb for i in program.streams[0] if i.op is Opcode.OptimizerStep]
    assert steps == [*range(program.shape.optimizer_steps)]


def test_weight_delay_changes_digest() -> None:
    text = to_text(PROGRAMS[0])
    assert "optimizer_steps 3  weight_delay 1  #" in text
    longer_delay = from_text(text.replace("weight_delay 1 ", "weight_delay 2 "))
    assert check(longer_delay).digest != PROGRAMS[0].digest


def test_with_weight_delay_per_stage() -> None:
    @with_weight_delay([1, 0])
    def mine(r: int, P: int, m: int) -> RankSchedule:
        return gpipe(r, P, m)

    shape = PipelineShape(2, 4, optimizer_steps=2, weight_delay=(1, 0))
    assert expand_schedule(mine, shape).shape == shape
    expand_schedule(mine, PipelineShape(2, 4))  # it imposes nothing on a single update
    with pytest.raises(ScheduleError, match=r"needs weight_delay \(1, 0\), not 1"):
        expand_schedule(mine, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1))
    same = with_weight_delay((1, 1))(mine)
    expand_schedule(same, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1))


def test_equal_delays_have_one_spelling() -> None:
    for delay, text in ((2, "delay 2 "), ((2,), "delay 2 ")):
        shape = PipelineShape(1, 4, optimizer_steps=4, weight_delay=delay)
        assert shape == PipelineShape(1, 4, optimizer_steps=4, weight_delay=2)
        program = expand_schedule(
            pipedream_2bw, PipelineShape(1, 4, optimizer_steps=4, weight_delay=1)
        )
        rewritten = replace(program, shape=shape)
        assert text in to_text(rewritten) and from_text(to_text(rewritten)) == rewritten


def test_2bw_needs_weight_delay_1() -> None:
    with pytest.raises(ScheduleError, match="needs weight_delay 1, not 0"):
        expand_schedule(pipedream_2bw, PipelineShape(2, 8, optimizer_steps=4, weight_delay=0))
    assert (
        expand_schedule(pipedream_2bw, PipelineShape(2, 8)).streams
        == expand_schedule(one_f_one_b, PipelineShape(2, 8)).streams
    )


def test_optimizer_steps_on_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--ranks", "2", "--microbatches", "6", "-O", "optimizer_steps=3"]
    assert main(["print", "pipedream_2bw", *shape]) == 0
    program = from_text(capsys.readouterr().out)
    assert (program.shape.optimizer_steps, program.shape.weight_delay) == (3, 1)
    for delay, means in (("1", 1), ("1,0", (1, 0))):
        assert main(["print", "one_f_one_b", *shape, "-O", f"weight_delay={delay}"]) == 0
        assert from_text(capsys.readouterr().out).shape.weight_delay == means


def test_weight_delay_option_must_match_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.sched"
    path.write_text(to_text(compile(one_f_one_b, make_2bw_shape(2, 2, 3))))
    assert "-O weight_delay" in run_refused_command(
        capsys, "check", str(path), "-O", "weight_delay=2"
    )
    assert main(["check", str(path), "-O", "weight_delay=1"]) == 0


def test_step_is_between_two_updates() -> None:
    """Each step follows the sends of its last backward, and precedes the next compute."""
    for stream in compile(pipedream_2bw, make_2bw_shape(3, 4, 3)).streams:
        ops = [i.op for i in stream]
        for before, op in pairwise(ops):
            if op is Opcode.OptimizerStep:
                assert before in (Opcode.SendGrad, Opcode.ReduceGrads, Opcode.RecvAct)


SHARED = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    "told",
    [
        {"clip_grad_norm": True},
        {"tied_weights": True},
        {"clip_grad_norm": True, "tied_weights": True} | SHARED,
    ],
)
def test_collectives_at_update_end_do_not_deadlock(told: Any) -> None:
    """Rank 0 runs first forwards of the next update before rank 2 ends the previous update."""
    shape = PipelineShape(3, 6, 2, optimizer_steps=2, weight_delay=1)
    program = compile(looped_dfs, shape, **told)
    for model in MODELS:
        check(program, model, blocking_hosts=True)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_random_updates_end_without_deadlock(seed: int) -> None:
    """For any order of a draft, the collectives at the ends of its updates cannot deadlock."""
    rng = random.Random(seed)
    ranks, updates = rng.choice([2, 3, 4]), rng.choice([2, 3])
    stages = [*range(ranks), *rng.choices(range(ranks), k=rng.randint(0, 3))]
    rng.shuffle(stages)
    shape = PipelineShape(ranks, rng.randint(1, 3) * updates, placement=tuple(stages),
                         optimizer_steps=updates,
                weight_delay=rng.choice([0, 1, 1, 2]))  # fmt: skip
    drafted = random_compute_program(shape, rng, split=rng.choice([0.0, 0.5, 1.0]))
    costs = Costs(F=rng.choice([1, 2]), send=rng.choice([0, 1, 3]))
    try:
        compile(drafted, costs=costs)
    except OrderError:
        return event("needs weights that are not there")
    program = compile(
        drafted, costs=costs, clip_grad_norm=rng.random() < 0.5, tied_weights=rng.random() < 0.7
    )
    check(replace(program, message_order={}), "blocking_serial", blocking_hosts=True)


@pytest.mark.parametrize("told", [{}, {"clip_grad_norm": True}, {"tied_weights": True}])
def test_update_ends_after_overlapped_pair(told: Any) -> None:
    """The pair's backward ends one update, and its forward begins the next."""

    def paired(r: int, P: int, m: int) -> Iterator[RankSchedule]:
        yield (P - r) * schedule_algebra.F
        for _ in range(m - P + r):
            yield overlapped_pair(schedule_algebra.B, schedule_algebra.F)
        yield (P - r) * schedule_algebra.B

    for P, per_update in product((1, 2, 3), (2, 3, 4)):
        delay = -(-P // per_update)
        shape = PipelineShape(P, 3 * per_update, optimizer_steps=3, weight_delay=delay)
        program = compile(paired, shape, **told)
        assert program.joined.sum() == sum(shape.microbatches - P + r for r in range(P))
        check(program, "blocking_serial", blocking_hosts=True)
