"""Tests of the museum: `check` refuses each real failure with the error in its file."""

from __future__ import annotations

import re
import shlex

import pytest

from docs.museum_page import find_refusal, format_command, format_first_line
from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS
from schedir.errors import DeadlockError
from schedir.ir.text_format import from_text
from schedir.verify.check import check
from tests.museum.cases import HERE, Case, cases, verdict
from tests.oracle_replicas import verdict as of_replicas
from tests.oracle_step_sequences import verdict as in_turn
from tests.oracle_threads import verdict as ran

CASES = cases()
DESCRIBED = [case for case in CASES if case.is_said]


@pytest.mark.parametrize("case", DESCRIBED, ids=lambda case: case.name)
def test_museum_cases_have_expected_errors(case: Case) -> None:
    assert {model: verdict(case.refusal(model)) for model in MODELS} == {
        model: case.expected(model) for model in MODELS
    }


@pytest.mark.parametrize(
    "case", [c for c in DESCRIBED if not (c.runs or c.replicas)], ids=lambda case: case.name
)
def test_museum_cases_with_lazy_communicators(case: Case) -> None:
    free = [model for model in MODELS if not case.expected(model)]
    errors = {model: verdict(case.refusal(model, lazy_communicators=True)) for model in free}
    assert errors == {model: case.lazy.get(model, []) for model in free}


@pytest.mark.parametrize("case", [c for c in CASES if c.activation], ids=lambda case: case.name)
def test_eager_messages_let_case_finish(case: Case) -> None:
    """The case finishes only if messages of this size are eager."""
    for model in MODELS:
        assert case.refusal(model, eager_limit=case.activation) is None
        large = case.refusal(model, eager_limit=case.activation - 1)
        assert verdict(large) == case.expected(model)
        assert not isinstance(large, DeadlockError) or large.eager_limit == case.activation


@pytest.mark.parametrize("case", [c for c in CASES if c.corrected], ids=lambda case: case.name)
def test_corrected_programs_pass_check(case: Case) -> None:
    for model in MODELS:
        check(from_text(case.corrected), model)


@pytest.mark.parametrize("case", DESCRIBED, ids=lambda case: case.name)
def test_commands_of_page_report_expected_errors(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    refusal = find_refusal(case)
    assert main(shlex.split(format_command(case))[1:]) == (2 if refusal else 0)
    if refusal:
        assert capsys.readouterr().err.splitlines()[0] == format_first_line(refusal[1])


def test_every_program_file_belongs_to_case() -> None:
    names = {name for case in CASES for row in [*case.runs, case.replicas] for name in row}
    names |= {case.name for case in CASES if case.program}
    names |= {f"{case.name}.corrected" for case in CASES if case.corrected}
    assert {path.name.removesuffix(".sched") for path in HERE.glob("*.sched")} == names


# The machine has unlimited memory.
NOT_EXECUTED = ("the_fullest_rank", "one_place_for_gradients")
EXECUTED = [case for case in DESCRIBED if case.name not in NOT_EXECUTED]


@pytest.mark.parametrize("case", EXECUTED, ids=lambda case: case.name)
def test_execution_agrees(case: Case) -> None:
    """If `check` refuses a case, its execution without `check` hangs or fails."""
    for model in MODELS:
        if case.replicas:
            kind = of_replicas(case.of_replicas(), model, 0).kind
        else:
            kind = (in_turn(case.ran(), model, 0) if case.runs else ran(case.made(), model)).kind
        assert (kind == "ok") == (not case.expected(model)), (model, kind)
        if "DeadlockError" in case.expected(model):
            assert kind == "hang"


def test_museum_files_are_complete() -> None:
    assert len(DESCRIBED) >= 20
    titles = [case.title for case in CASES]
    assert len({*titles}) == len(titles)
    for case in CASES:
        assert case.seen and (case.sources or case.here)
        assert not case.here or (HERE.parents[1] / case.here).is_file()
        ways = (case.program, case.make, case.runs, case.replicas)
        assert sum(map(bool, ways)) <= 1, case.name
        assert bool(case.make) == bool(case.arguments), case.name
        assert case.missing or (case.is_said and case.follows), case.name
        for source in case.sources:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source), source
        if not case.refused:  # the file of an accepted case states a reason
            assert case.missing or case.unconfirmed, case.name
