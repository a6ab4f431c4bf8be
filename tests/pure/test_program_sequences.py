"""Tests of sequences of programs that each rank runs one after the other."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from schedir import (
    PipelineShape,
    check_program_sequence,
    compile,
    save_timeline,
    schedules,
    simulate,
)
from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import lower
from schedir.errors import (
    ChannelMismatchError,
    DeadlockError,
    GroupError,
    ProgramSequenceError,
    SchedirError,
    UsageError,
)
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.testing import random_compute_program
from schedir.verify.check import check
from tests.commands import run_command, run_refused_command
from tests.edits import written
from tests.mutants import MUTATIONS, draw_ties, reordered
from tests.oracle_step_sequences import verdict

Runs = list[list[Program]]

TRAIN = compile(schedules.one_f_one_b, PipelineShape(3, 4), clip_grad_norm=True)
EVALUATE = compile(schedules.forward_only, PipelineShape(3, 4))
FORWARD_ORDER = compile(schedules.forward_only, PipelineShape(2, 1))
REVERSED_ORDER = from_text(
    "schedir 1\nprogram back\nranks 2  microbatches 1  stages_per_rank 1  placement 1,0\n"
    "rank 0\n  recv_act 1.0; F 1.0\nrank 1\n  F 0.0; send_act 0.0\n"
)


def check_refused(runs: Runs, progress_model: ProgressModel = "per_device") -> ProgramSequenceError:
    with pytest.raises(ProgramSequenceError) as caught:
        check_program_sequence(runs, progress_model)
    assert caught.value.progress_model == progress_model
    return caught.value


def list_sites(error: ProgramSequenceError) -> list[tuple[int, int, str]]:
    return [(site.rank, site.index, f"{site.instr}, {site.note}") for site in error.sites]


@pytest.mark.parametrize("progress_model", MODELS)
def test_same_steps_on_all_ranks_are_legal(progress_model: ProgressModel) -> None:
    check_program_sequence([[TRAIN, EVALUATE, TRAIN]] * 3, progress_model)
    check_program_sequence([[]] * 3, progress_model)


@pytest.mark.parametrize("progress_model", MODELS)
def test_message_of_different_step_is_refused(progress_model: ProgressModel) -> None:
    error = check_refused([[TRAIN, EVALUATE], [TRAIN, EVALUATE], [TRAIN, TRAIN]], progress_model)
    assert list_sites(error) == [
        (1, 3, "send_act 1.0, step 2, forward_only"),
        (2, 0, "recv_act 2.0, step 2, one_f_one_b"),
    ]


def test_message_without_partner_is_refused() -> None:
    error = check_refused([[TRAIN, EVALUATE], [TRAIN, EVALUATE], [TRAIN]])
    assert list_sites(error) == [(1, 3, "send_act 1.0, step 2, forward_only")]
    error = check_refused([[TRAIN], [TRAIN, EVALUATE], [TRAIN, EVALUATE]])
    assert list_sites(error) == [(1, 0, "recv_act 1.0, step 2, forward_only")]


def test_opposite_directions_deadlock_in_shared_queue() -> None:
    """No messages cross, but with one queue for both directions both ranks wait in their send."""
    runs = [[FORWARD_ORDER, REVERSED_ORDER], [REVERSED_ORDER, FORWARD_ORDER]]
    check_program_sequence(runs, "per_edge")
    for model in ("per_pair", "per_device", "blocking_serial"):
        assert list_sites(check_refused(runs, model)) == [
            (0, 1, "send_act 0.0, step 1, forward_only, waits"),
            (1, 1, "send_act 0.0, step 1, back, waits"),
        ]


def test_step_without_messages_keeps_queue_order() -> None:
    """The second step has no message between ranks 0 and 1, whose messages keep their queue."""
    forward_order, beside, backward_order = (
        compile(schedules.forward_only, PipelineShape(3, 1, placement=placement))
        for placement in ((0, 1, 2), (0, 2, 1), (2, 1, 0))
    )
    runs = [
        [forward_order, beside, backward_order],
        [backward_order, beside, forward_order],
        [backward_order, beside, forward_order],
    ]
    check_program_sequence(runs, "per_edge")
    assert verdict(runs, "per_edge", 0).kind == "ok"
    assert "wait" in check_refused(runs, "per_pair").fact
    assert verdict(runs, "per_pair", 0).kind == "hang"


def test_swapped_steps_deadlock_in_norm() -> None:
    """Messages of the two programs have opposite directions, but their norms use one group."""
    forward_program, reversed_program = (
        compile(schedules.gpipe, PipelineShape(2, 1, placement=placement), clip_grad_norm=True)
        for placement in ((0, 1), (1, 0))
    )
    runs = [[forward_program, reversed_program], [reversed_program, forward_program]]
    assert "wait" in check_refused(runs, "per_edge").fact
    assert verdict(runs, "per_edge", 0).kind == "hang"


def test_illegal_program_is_refused() -> None:
    illegal = from_text(
        "schedir 1\nprogram late\nranks 2  microbatches 1  stages_per_rank 1  placement loop\n"
        "rank 0\n  F 0.0; send_act 0.0\nrank 1\n  F 1.0; recv_act 1.0\n"
    )
    with pytest.raises(SchedirError, match=r"late: F 1\.0 needs"):
        check_program_sequence([[illegal], [illegal]])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="has 3 ranks"):
        check_program_sequence([[TRAIN], [TRAIN]])
    with pytest.raises(UsageError, match="must be a Program"):
        check_program_sequence([["train"]])  # type: ignore[list-item]
    for runs in (TRAIN, [TRAIN, EVALUATE], [], None, 3):
        with pytest.raises(UsageError, match="a list of programs for each rank"):
            check_program_sequence(runs)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model must be"):
        check_program_sequence([[TRAIN]] * 3, "tcp")  # type: ignore[arg-type]


# ---------------------------------------------------------------- command line


def test_command_output_matches_golden_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands have the output in `golden/steps.txt`."""
    monkeypatch.chdir(tmp_path)
    for program in (TRAIN, EVALUATE, FORWARD_ORDER, REVERSED_ORDER):
        name = {"one_f_one_b": "train", "forward_only": "evaluate"}.get(program.name, program.name)
        name = "there" if program is FORWARD_ORDER else name
        Path(f"{name}.sched").write_text(to_text(replace(program, name=name)))
    golden = (Path(__file__).parents[1] / "golden" / "steps.txt").read_text()
    output = ""
    for command in re.findall(r"^\$ schedir (.*)$", golden, re.MULTILINE):
        code = main(command.split())
        out, err = capsys.readouterr()
        assert code == (2 if err else 0)
        output += f"$ schedir {command}\n{out}{err}"
    assert output == golden


def test_runs_are_checked_under_their_progress_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = written(
        "F 0.0; send_act 0.0; F 0.1; send_act 0.1; recv_act 2.0; F 2.0; send_act 2.0; recv_act 2.1;"
        "F 2.1; send_act 2.1",
        "recv_act 1.0; F 1.0; send_act 1.0; recv_act 1.1; F 1.1; send_act 1.1; recv_act 3.0; F 3.0;"
        "recv_act 3.1; F 3.1",
        microbatches=2, header="stages_per_rank 2",
    )  # fmt: skip
    Path("late.sched").write_text(to_text(program))
    save_timeline(simulate(program, progress_model="per_edge"), "late.timeline")
    assert "hint: they finish under per_edge" in run_refused_command(
        capsys, "check", "late.sched", "late.sched"
    )
    steps = ("late.timeline", "late.timeline")
    assert "finish under per_edge, but not under per_pair" in run_command(capsys, "check", *steps)
    assert "DeadlockError" in run_refused_command(
        capsys, "check", *steps, "--progress-model", "per_device"
    )


# ---------------------------------------------------------------- comparison with execution


def random_program(shape: PipelineShape, rng: random.Random) -> Program:
    """Return a random program on a shape's ranks that is legal at least under `per_edge`."""
    stages = rng.randint(1, 2)
    placement = tuple(rng.sample([*range(shape.ranks)] * stages, shape.ranks * stages))
    shape = replace(shape, microbatches=rng.randint(1, 3), placement=placement)
    draft = random_compute_program(shape, rng, split=rng.choice([0, 1]))
    program = lower(
        replace(draft, clip_grad_norm=rng.random() < 0.5, tied_weights=draw_ties(shape, rng))
    )
    if rng.random() < 0.5:
        program = MUTATIONS["evaluate"](program, rng) or program
    return reordered(program, rng) if rng.random() < 0.7 else program


def change_steps(steps: list[Program], rng: random.Random) -> list[Program]:
    """Return the steps of a rank with two of them swapped, or one of them missing."""
    steps = [*steps]
    index = rng.randrange(len(steps))
    if len(steps) > 1 and rng.random() < 0.8:
        other_index = rng.randrange(len(steps))
        steps[index], steps[other_index] = steps[other_index], steps[index]
    else:
        del steps[index]
    return steps


def is_legal(programs: list[Program], progress_model: ProgressModel) -> bool:
    try:
        for program in programs:
            check(program, progress_model)
    except (DeadlockError, GroupError, ChannelMismatchError):
        return False
    return True


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.booleans())
def test_checker_agrees_with_execution(seed: int, alike: bool) -> None:
    rng = random.Random(seed)
    shape = PipelineShape(rng.choice([2, 2, 3]), 2)
    programs = [random_program(shape, rng) for _ in range(rng.randint(1, 2))]
    steps = [rng.choice(programs) for _ in range(rng.randint(1, 4))]
    runs = [[*steps] for _ in range(shape.ranks)]
    if not alike:
        for rank in rng.sample(range(shape.ranks), rng.randint(1, shape.ranks)):
            runs[rank] = change_steps(steps, rng)
        assume(any(runs))
    for model in MODELS:
        if not is_legal(programs, model):
            continue
        outcome = verdict(runs, model, rng.randrange(2**32))
        try:
            check_program_sequence(runs, model)
        except ProgramSequenceError as error:
            event("they wait" if "across" in error.fact else "they cross")
            assert not alike and outcome.kind != "ok", error
        else:
            event("alike" if alike else "unlike, and right")
            assert outcome.kind == "ok", outcome
