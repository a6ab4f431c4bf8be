"""Tests of charts on terminals, and inline in notebooks."""

import subprocess
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from schedir import save_timeline, viz
from schedir.__main__ import main
from schedir.compiler.compile import compile, lower
from schedir.errors import UsageError
from schedir.io.terminal_output import color_lines
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.schedules import dualpipe_v, interleaved, one_f_one_b
from schedir.testing import compute_programs
from schedir.viz.palette import choose_box_color, format_hex
from schedir.viz.terminal_chart import text_chart
from tests.pure.test_pictures import simulate_schedule
from tests.strategies import costs

STUCK = """schedir 1
program stuck
ranks 1  microbatches 1

rank 0
  B 0.0; F 0.0; reduce_grads 0; step
"""


# ---------------------------------------------------------------- on a terminal


def test_text_chart_of_small_run() -> None:
    assert color_lines(text_chart(simulate_schedule(ranks=2, m=3, B=2), 60)) == (
        "one_f_one_b, predicted: span 12, bubble 25.0%\n"
        "                                              idle  peak\n"
        "rank 0 F0 F1 ......B0--- F2 B1--- ...B2---   25.0%     2\n"
        "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ......  25.0%     1\n"
    )


def test_uneven_boxes_fill_width() -> None:
    first_row = color_lines(
        text_chart(simulate_schedule(ranks=2, m=3, B=2, send=0.1), 60)
    ).splitlines()[2]
    assert len(first_row) == 60


@given(compute_programs(), st.data(), st.integers(20, 200))
def test_lines_fit_terminal_width(draft: Program, data: st.DataObject, width: int) -> None:
    t = simulate(lower(draft), data.draw(costs(draft.shape)))
    lines = color_lines(text_chart(t, width)).splitlines()
    rows = [line for line in lines if line.startswith("rank ")]
    assert all(len(row) <= max(width, 32) for row in rows)
    assert len(rows) % t.ranks == 0 and len(lines) <= 70


def test_short_boxes_have_full_labels() -> None:
    run = simulate_schedule()
    for width in range(30, 140):
        chart = color_lines(text_chart(run, width))
        assert "main instruction" in chart or all(chart.count(f"F{k}") == 4 for k in range(8)), (
            width
        )


def test_long_run_is_wrapped_or_condensed() -> None:
    single = color_lines(text_chart(simulate_schedule(), 130))
    assert single.count("rank 0 ") == 1 and "B7" in single
    wrapped = color_lines(text_chart(simulate_schedule(), 60))
    assert wrapped.count("rank 0 ") == 3 and all(f"F{k}" in wrapped for k in range(8))
    condensed = color_lines(text_chart(simulate_schedule(ranks=16, m=200), 80))
    assert condensed.count("rank 0 ") == 1
    assert "main instruction" in condensed
    assert "F0" not in condensed
    assert "one of every 3 of the 100 ranks" in color_lines(
        text_chart(simulate_schedule(ranks=100, m=3), 80)
    )


def test_boxes_start_at_their_times() -> None:
    t = simulate_schedule(B=2)
    row = color_lines(text_chart(t, 33 * 4 + 7 + 13)).splitlines()[2]
    for s in t.spans[(t.spans["rank"] == 0) & (t.spans["end"] > t.spans["start"])]:
        column = 7 + 4 * int(s["start"])
        assert row[column : column + 2] == f"{'FB'[s['op']]}{s['mb']}"
    stages = color_lines(text_chart(simulate_schedule(interleaved, v=2), 300))
    assert "F0' " in stages or "F0'-" in stages
    pairs = simulate(compile(dualpipe_v, PipelineShape(4, 10, 2, "vee")))
    assert color_lines(text_chart(pairs, 300)).count("F9") >= 4


def test_run_without_time_has_chart() -> None:
    assert "rank 1" in color_lines(text_chart(simulate_schedule(ranks=2, m=2, F=0, I=0, W=0), 80))


def test_draw_without_file_prints_chart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "gpipe", "one_f_one_b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpipe, predicted: span 33") and "\none_f_one_b, predicted" in out
    assert "\x1b" not in out
    assert main(["draw", "gpipe", "--idle-map"]) == 2


def test_print_draws_on_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    program = compile(one_f_one_b, PipelineShape(4, 8))
    assert main(["print", "one_f_one_b"]) == 0
    text = capsys.readouterr().out
    assert from_text(text) == program and "idle" not in text
    Path("stuck.sched").write_text(STUCK)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["print", "one_f_one_b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(text) and "# one_f_one_b, predicted: span" in out and "\x1b" not in out
    assert from_text(out) == program
    # `print` also shows a program that cannot run.
    assert main(["print", "stuck.sched"]) == 0
    assert capsys.readouterr().out == to_text(from_text(STUCK))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["draw", "one_f_one_b"]) == 0
    assert "\x1b[" in capsys.readouterr().out


# ---------------------------------------------------------------- in a notebook


def list_svg_elements(text: str) -> list[ElementTree.Element]:
    return list(
        ElementTree.fromstring(f"<div>{text}</div>").iter("{http://www.w3.org/2000/svg}svg")
    )


def test_notebook_shows_boxes() -> None:
    t = simulate_schedule(B=2)
    (picture,) = list_svg_elements(t._repr_html_())
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert texts.count("F0") == texts.count("B7") == 4 and texts.count("rank 3") == 1
    assert "bubble 27.3%" in t._repr_html_()
    pictured = t.program._repr_html_()
    assert len(list_svg_elements(pictured)) == 1 and "send_act" in pictured


def test_notebook_output_is_bounded() -> None:
    t = simulate_schedule(ranks=64, m=256)
    assert len(t._repr_html_()) < 100_000 and list_svg_elements(t._repr_html_())
    assert len(t.program._repr_html_()) < 150_000


def test_pixel_picture_has_colors_at_their_times() -> None:
    """In a pixel picture, rank 0 begins with forwards, and the last rank with idle time."""
    t = simulate_schedule(ranks=16, m=256, B=2)
    (picture,) = list_svg_elements(t._repr_html_())
    (image,) = [e for e in picture.iter() if e.tag.endswith("}image")]
    png = b64decode(image.attrib["href"].partition("base64,")[2])
    pixels = imread(BytesIO(png), format="png")
    rows, columns, _ = pixels.shape
    assert rows % 16 == 0 and columns > 400
    first_rank_pixels, last_rank_pixels = pixels[0], pixels[rows - rows // 16]
    forward = tuple(int(format_hex(choose_box_color(0, 0, 1))[k : k + 2], 16) for k in (1, 3, 5))
    assert (first_rank_pixels[0] * 255).tolist() == pytest.approx([*forward, 255], abs=2)
    assert last_rank_pixels[0, 3] == 0
    assert last_rank_pixels[-1, 3] == 0
    assert last_rank_pixels[columns // 2, 3] == 1


def test_any_program_has_notebook_output() -> None:
    stuck_program = from_text(STUCK)
    assert "B 0.0" in stuck_program._repr_html_()
    assert not list_svg_elements(stuck_program._repr_html_())
    hostile_program = Program(
        "<b>&", stuck_program.shape, compile(one_f_one_b, PipelineShape(1, 1)).streams
    )
    (picture,) = list_svg_elements(hostile_program._repr_html_())
    assert picture.find("{http://www.w3.org/2000/svg}title") is not None
    assert not [e for e in picture.iter() if e.tag.endswith("}b")]
    empty = from_text("schedir 1\nprogram none\nranks 1 microbatches 1\nrank 0\n")
    assert "none" in empty._repr_html_()
    assert list_svg_elements(simulate_schedule(ranks=1, m=1, F=0, I=0, W=0)._repr_html_())


def test_drawing_functions_refuse_wrong_types(tmp_path: Path) -> None:
    """`text_chart` is called twice: before and after its module is loaded."""
    program = compile(one_f_one_b, PipelineShape(2, 2))
    single_run_functions: list[Any] = [
        viz.gantt,
        viz.idle_map,
        viz.html,
        viz.text_chart,
        viz.text_chart,
    ]
    several_run_functions: list[Any] = [viz.compare, viz.bubble_vs_memory]
    for draw in single_run_functions:
        with pytest.raises(UsageError, match="timeline must be a Timeline, not <program"):
            draw(program)
        draw(simulate(program))
    for draw in several_run_functions:
        with pytest.raises(UsageError, match="must be a Sequence, not <predicted"):
            draw(simulate(program))
    with pytest.raises(UsageError, match="timeline must be a Timeline, not <program"):
        save_timeline(program, tmp_path / "x.timeline")  # type: ignore[arg-type]


def test_text_and_html_do_not_import_matplotlib() -> None:
    code = (
        "import sys, schedir\n"
        "from schedir import PipelineShape\n"
        "p = schedir.compile(schedir.schedules.gpipe, PipelineShape(ranks=2, microbatches=2))\n"
        "p._repr_html_(); schedir.viz.text_chart(schedir.simulate(p)); schedir.viz.html"
        "(schedir.simulate(p))\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
