"""Tests that pictures of deadlocks show the same positions as the error."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.compiler.compile import compile
from schedir.errors import DeadlockError, GroupError, SchedirError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.schedules import gpipe
from schedir.verify.check import check
from schedir.viz.deadlock_diagram import draw_deadlock
from schedir.viz.palette import ACCENT_COLOR
from tests.commands import run_refused_command
from tests.museum.cases import Case, cases
from tests.mutants import CORPUS, mutate

SVG = "{http://www.w3.org/2000/svg}"
MOVES = ("swap_neighbors", "swap_any", "move_anywhere", "swap_receives", "late_send")


def draw_and_measure(program: Program, error: SchedirError) -> ElementTree.Element:
    picture = ElementTree.fromstring(draw_deadlock(program, error))
    picture_width, picture_height = (float(picture.get(side, "")) for side in ("width", "height"))
    for box in picture.iter(f"{SVG}rect"):
        if box.get("rx"):
            left, top, width = (float(box.get(name, "")) for name in ("x", "y", "width"))
            assert left >= 0 and left + width <= picture_width and 0 <= top <= picture_height
    for text in picture.iter(f"{SVG}text"):
        assert 0 < float(text.get("y", "")) < picture_height
    return picture


def read_texts_in_boxes(picture: ElementTree.Element, fill: str) -> list[str]:
    """Return the texts in the boxes of a colour, which are drawn directly after the boxes."""
    items = list(picture)
    return sorted(
        str(text.text).removeprefix("& ")
        for box, text in pairwise(items)
        if box.tag == f"{SVG}rect" and box.get("rx") and box.get("fill") == fill
    )


def count_arrows(picture: ElementTree.Element) -> int:
    return sum("marker-end" in path.attrib for path in picture.iter(f"{SVG}path"))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(MOVES))
def test_picture_of_deadlock_shows_cycle(seed: int, move: str) -> None:
    try:
        _, program = mutate(move, seed, corpus=CORPUS)
    except SchedirError:
        assume(False)
    try:
        check(program, "per_device")
    except DeadlockError as error:
        picture = draw_and_measure(program, error)
        assert read_texts_in_boxes(picture, ACCENT_COLOR) == sorted(
            str(wait.instr) for wait in error.cycle
        )
        waits = {(wait.rank, wait.index) for wait in error.cycle}
        needs = {(wait.needed_rank, wait.needed_index): wait.needed_instr for wait in error.cycle}
        needed_only = [str(instr) for place, instr in needs.items() if place not in waits]
        assert read_texts_in_boxes(picture, "#fbe3ee") == sorted(needed_only)
        assert count_arrows(picture) == len(error.cycle) - sum(
            (wait.rank, wait.index) == (wait.needed_rank, wait.needed_index) for wait in error.cycle
        )
        heads = {text.text for text in picture.iter(f"{SVG}text") if text.get("font-weight")}
        assert {f"rank {wait.rank}" for wait in error.cycle} <= heads
    except SchedirError as error:
        draw_and_measure(program, error)


@pytest.mark.parametrize(
    "case",
    [c for c in cases() if c.program and c.refusal("per_device")],
    ids=lambda case: case.name,
)
def test_museum_refusals_can_be_drawn(case: Case) -> None:
    error = case.refusal("per_device")
    assert error is not None
    picture = draw_and_measure(case.made(), error)
    if isinstance(error, GroupError) and len(error.sites) == 4:
        assert count_arrows(picture) == 2
    elif not isinstance(error, DeadlockError):
        assert read_texts_in_boxes(picture, ACCENT_COLOR) == sorted(
            str(site.instr) for site in error.sites
        )


def test_picture_shows_only_waiting_ranks() -> None:
    text = to_text(compile(gpipe, PipelineShape(12, 2)), folded=False)
    text_without_receive = text.replace("  recv_act 5.1\n", "")
    program = from_text(
        text_without_receive.replace("  recv_act 5.0\n", "  recv_act 5.1\n  recv_act 5.0\n")
    )
    with pytest.raises(DeadlockError) as caught:
        check(program)
    picture = draw_and_measure(program, caught.value)
    heads = [text.text for text in picture.iter(f"{SVG}text") if text.get("font-weight")]
    assert heads == ["rank 4", "rank 5"]


def test_check_writes_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = next(case for case in cases() if case.name == "receives_moved_late")
    Path("late.sched").write_text(case.program)
    assert "wrote x.svg" in run_refused_command(capsys, "check", "late.sched", "-o", "x.svg")
    error = case.refusal("per_device")
    assert error is not None
    assert Path("x.svg").read_text() == draw_deadlock(case.made(), error)
    assert ".svg" in run_refused_command(capsys, "check", "late.sched", "-o", "x.png")
    assert "-o" in run_refused_command(capsys, "check", "late.sched", "late.sched", "-o", "y.svg")
    assert main(["check", "late.sched", "--progress-model", "per_edge", "-o", "z.svg"]) == 0
    assert {path.name for path in Path().iterdir()} == {"late.sched", "x.svg"}
    assert "did not write z.svg: the program is not refused" in capsys.readouterr().err
    incomplete = to_text(case.made(), folded=False).replace("  F 3.1\n", "")
    Path("less.sched").write_text(incomplete)
    text = run_refused_command(capsys, "check", "less.sched", "-o", "z.svg")
    assert (
        "F 3.1 is missing" in text
        and "did not write z.svg: the error names no instruction" in text
        and not Path("z.svg").exists()
    )


def test_deadlock_of_draft_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from schedir import B, F\n\n\n"
        "def hangs(rank, ranks, microbatches):\n"
        "    return rank * F + (microbatches - rank) * (F + B) + rank * B\n\n\n"
        "def lacks(rank, ranks, microbatches):\n"
        "    return F + microbatches * B\n"
    )
    options = ["--ranks", "2", "--microbatches", "4"]
    assert "wrote x.svg" in run_refused_command(
        capsys, "check", "mine.py:hangs", *options, "-o", "x.svg"
    )
    text = Path("x.svg").read_text()
    assert "B 0.0" in text and "send" not in text
    text = run_refused_command(capsys, "check", "mine.py:lacks", *options, "-o", "y.svg")
    assert "did not write y.svg" in text and not Path("y.svg").exists()
