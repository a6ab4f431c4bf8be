"""Tests of the look of charts: titles, palettes, colours, the time axis, and narrow charts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from schedir.schedules.schedule_algebra import Schedule
from schedir.viz import bubble_vs_memory, compare, gantt
from schedir.viz.palette import (
    IDLE_COLOR,
    LIGHT_PALETTE,
    PALETTES,
    choose_box_color,
    format_hex,
    lightness,
    recolor,
)
from tests.commands import run_command, run_refused_command


def timeline(schedule: Schedule = one_f_one_b, m: int = 8, **cost: float) -> Timeline:
    costs = Costs(**cost)
    return simulate(compile(schedule, PipelineShape(4, m), costs=costs), costs)


def faces(figure: Figure) -> set[str]:
    """Return the colours of the boxes."""
    return {to_hex(face) for face in np.asarray(figure.axes[0].collections[2].get_facecolor())}


def test_a_column_keeps_the_numbers_of_microbatches() -> None:
    texts = [t.get_text() for t in gantt(timeline(), width="column").axes[0].texts]
    assert sorted(texts) == sorted(8 * [str(mb) for mb in range(8)])
    assert {t.get_text()[0] for t in gantt(timeline()).axes[0].texts} == {"F", "B"}


def test_titles() -> None:
    figure = compare([timeline(), timeline(gpipe)], titles=["mine", ""])
    titles = [(axes.get_title("left"), axes.get_title("right")) for axes in figure.axes]
    assert titles == [("mine", "bubble 27.3%, peak 4 activations, span 33"), ("", "")]
    assert gantt(timeline(), title="$x").axes[0].get_title("left") == "$x"
    with pytest.raises(UsageError, match="titles must have 2 titles, one per chart, not 1"):
        compare([timeline(), timeline()], titles=["one"])


@pytest.mark.parametrize("width", ["column", "page", 1.5, None], ids=str)
@pytest.mark.parametrize(
    "title",
    [None, "W" * 99, "i" * 400, "two\nlines", "説明" * 40],
    ids=("name", "wide", "long", "lines", "boxes"),
)
def test_what_stands_above_a_chart_does_not_overlap(width: Any, title: str | None) -> None:
    run = timeline(interleaved, m=16)
    axes = gantt(run, width=width, title=title).axes[0]
    figure = axes.figure
    figure.dpi = 200  # the resolution of saved files
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font lacks some letters
        boxes = [t.get_window_extent() for t in (axes._left_title, axes._right_title)]  # type: ignore[attr-defined]
    left, right = boxes
    assert left.x1 <= (right.x0 if axes.get_title("right") else figure.bbox.x1)
    assert left.height < 40  # pixels: one line


def test_a_title_comes_before_figures() -> None:
    told = "forward and backward, eight microbatches"
    axes = gantt(timeline(), width="column", title=told).axes[0]
    assert (axes.get_title("left"), axes.get_title("right")) == (told, "")
    axes = gantt(timeline(interleaved, m=16), width="column").axes[0]
    assert axes.get_title("left") == "interleaved" and "bubble" in axes.get_title("right")


def test_palettes_and_colours() -> None:
    for name, palette in PALETTES.items():
        ops = (Opcode.Forward, Opcode.Backward)
        assert faces(gantt(timeline(), palette=name)) == {
            format_hex(choose_box_color(op, 0, 1, palette)) for op in ops
        }
    for face in faces(gantt(timeline(zb_h1), palette="grey")):
        assert face[1:3] == face[3:5] == face[5:7]
    own = gantt(timeline(), colours={"F": "navy", "B": "#ff8800"})
    assert faces(own) == {"#000080", "#ff8800"}
    assert faces(gantt(timeline(), colours={"F": "white"})) == {
        "#ffffff", format_hex(choose_box_color(Opcode.Backward, 0, 1)),
    }  # fmt: skip
    shades = recolor(LIGHT_PALETTE, {"F": "#808080"})
    each = [lightness(choose_box_color(Opcode.Forward, k, 3, shades)) for k in range(3)]
    assert each[0] > each[1] > each[2]


def test_white_boxes_are_seen_on_paper() -> None:
    """White boxes have an outline, and so have their legend entries."""
    for fill, edge in (("white", IDLE_COLOR), ("#fdfdfd", IDLE_COLOR), ("skyblue", "white")):
        figure = gantt(timeline(), colours={"F": fill})
        boxes: Any = figure.axes[0].collections[2]
        pairs = zip(boxes.get_facecolor(), boxes.get_edgecolor(), strict=True)
        assert (to_hex(fill), to_hex(edge)) in {(to_hex(f), to_hex(e)) for f, e in pairs}
        first: Any = figure.legends[0].get_patches()[0]
        assert (to_hex(first.get_edgecolor()) == IDLE_COLOR) is (edge == IDLE_COLOR)


def test_the_bright_palette_is_told_apart_by_hue() -> None:
    seen = [np.array(choose_box_color(op, 0, 1, PALETTES["bright"])) for op in LIGHT_PALETTE.tones]
    apart = [float(np.abs(a - b).sum()) for k, a in enumerate(seen) for b in seen[:k]]
    assert min(apart) > 0.4


def test_the_time_axis() -> None:
    axes = gantt(timeline(), axis="microseconds", time=(10, 20)).axes[0]
    assert axes.get_xlabel() == "microseconds" and axes.get_xlim() == (10, 20)
    for text in axes.texts:  # no text is outside
        assert 10 <= text.get_position()[0] <= 20
    axes = gantt(timeline(), axis="none").axes[0]
    assert axes.get_xlabel() == "" and not axes.spines["bottom"].get_visible()


@pytest.mark.parametrize(
    "style",
    [
        {"palette": "blue"}, {"colours": {"F": "nocolour"}}, {"colours": {"Q": "red"}},
        {"time": (5, 5)}, {"time": (-1, 5)}, {"time": (99, 100)}, {"time": (0, np.inf)},
    ],
    ids=str,
)  # fmt: skip
def test_a_style_that_cannot_be(style: Any) -> None:
    with pytest.raises(UsageError):
        gantt(timeline(), **style)


def test_shares_of_a_tradeoff_are_what_they_stand_at() -> None:
    for m in (8, 16, 64):
        figure = bubble_vs_memory([timeline(m=m), timeline(zb_h1, m=m)])
        figure.canvas.draw()
        axes = figure.axes[0]
        for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
            assert float(label.get_text().rstrip("%")) == pytest.approx(100 * at, abs=1e-9)


def test_the_same_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "x.svg"
    look = [
        "--title",
        "mine",
        "--palette",
        "grey",
        "--colors",
        "F=#ff8800",
        "--axis-label",
        "in µs",
    ]
    run_command(capsys, "draw", "gpipe", *look, "--time-range", "3:9", "-o", str(file))
    text = file.read_text()
    assert ">mine</text>" in text and ">in µs</text>" in text and "#ff8800" in text
    run_command(capsys, "compare", "gpipe", "zb_h1", "--title=a", "--title=", "-o", str(file))
    assert ">a</text>" in file.read_text() and "zb_h1" not in file.read_text()
    for wrong, named in (
        ("--colors=F", "--colors"),
        ("--time-range=5", "--time-range"),
        ("--time-range=٣:9", "--time-range"),
        ("--time-range=9:3", "a time range is (begin, end) with "),
        ("--palette=x", "palette must be plain or grey or bright"),
    ):
        assert named in run_refused_command(capsys, "draw", "gpipe", wrong, "-o", "x.svg")
    for option in (
        "--title=x",
        "--palette=grey",
        "--colors=F=red",
        "--axis-label=x",
        "--time-range=1:2",
    ):
        name = option.split("=")[0]
        assert f"{name} applies to Gantt charts" in run_refused_command(
            capsys, "draw", "gpipe", option
        )
