"""Tests of the style of charts: titles, palettes, colours, time axis and narrow charts."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from schedir.errors import UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.schedules import gpipe, interleaved, zb_h1
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
from tests.commands import run_command
from tests.pure.test_pictures import simulate_schedule


@cache
def read_box_colours(figure: Figure) -> set[str]:
    """Return the colours of the boxes."""
    return {to_hex(face) for face in np.asarray(figure.axes[0].collections[2].get_facecolor())}


def test_column_chart_keeps_microbatch_numbers() -> None:
    texts = [t.get_text() for t in gantt(simulate_schedule(), width="column").axes[0].texts]
    assert sorted(texts) == sorted(8 * [str(mb) for mb in range(8)])
    assert {t.get_text()[0] for t in gantt(simulate_schedule()).axes[0].texts} == {"F", "B"}


def test_titles_of_compared_charts() -> None:
    figure = compare([simulate_schedule(), simulate_schedule(gpipe)], titles=["mine", ""])
    titles = [(axes.get_title("left"), axes.get_title("right")) for axes in figure.axes]
    assert titles == [("mine", "bubble 27.3%, peak 4 activations, span 33"), ("", "")]
    assert gantt(simulate_schedule(), title="$x").axes[0].get_title("left") == "$x"
    with pytest.raises(UsageError, match="titles must have 2 titles, one per chart, not 1"):
        compare([simulate_schedule(), simulate_schedule()], titles=["one"])


@pytest.mark.parametrize("width", ["column", "page", 1.5, None], ids=str)
@pytest.mark.parametrize(
    "title",
    [None, "W" * 99, "i" * 400, "two\nlines", "説明" * 40],
    ids=("name", "wide", "long", "lines", "boxes"),
)
def test_chart_titles_do_not_overlap(width: Any, title: str | None) -> None:
    run = simulate_schedule(interleaved, m=4)
    axes = gantt(run, width=width, title=title).axes[0]
    figure = axes.figure
    figure.dpi = 200  # the resolution of saved files
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font lacks some letters
        boxes = [t.get_window_extent() for t in (axes._left_title, axes._right_title)]  # type: ignore[attr-defined]
    left, right = boxes
    assert left.x1 <= (right.x0 if axes.get_title("right") else figure.bbox.x1)
    assert left.height < 40  # pixels: one line


def test_long_title_replaces_measures() -> None:
    title = "forward and backward, eight microbatches"
    axes = gantt(simulate_schedule(), width="column", title=title).axes[0]
    assert (axes.get_title("left"), axes.get_title("right")) == (title, "")
    axes = gantt(simulate_schedule(interleaved, m=16), width="column").axes[0]
    assert axes.get_title("left") == "interleaved" and "bubble" in axes.get_title("right")


def test_palettes_and_colours_set_box_colours() -> None:
    for name, palette in PALETTES.items():
        ops = (Opcode.Forward, Opcode.Backward)
        assert read_box_colours(gantt(simulate_schedule(), palette=name)) == {
            format_hex(choose_box_color(op, 0, 1, palette)) for op in ops
        }
    for face in read_box_colours(gantt(simulate_schedule(zb_h1), palette="grey")):
        assert face[1:3] == face[3:5] == face[5:7]
    figure = gantt(simulate_schedule(), colors={"F": "navy", "B": "#ff8800"})
    assert read_box_colours(figure) == {"#000080", "#ff8800"}
    assert read_box_colours(gantt(simulate_schedule(), colors={"F": "white"})) == {
        "#ffffff", format_hex(choose_box_color(Opcode.Backward, 0, 1)),
    }  # fmt: skip
    shades = recolor(LIGHT_PALETTE, {"F": "#808080"})
    lightnesses = [lightness(choose_box_color(Opcode.Forward, k, 3, shades)) for k in range(3)]
    assert lightnesses[0] > lightnesses[1] > lightnesses[2]


def test_white_boxes_have_outline() -> None:
    """White boxes have an outline, and so have their legend entries."""
    for fill, edge in (("white", IDLE_COLOR), ("#fdfdfd", IDLE_COLOR), ("skyblue", "white")):
        figure = gantt(simulate_schedule(), colors={"F": fill})
        boxes: Any = figure.axes[0].collections[2]
        pairs = zip(boxes.get_facecolor(), boxes.get_edgecolor(), strict=True)
        assert (to_hex(fill), to_hex(edge)) in {(to_hex(f), to_hex(e)) for f, e in pairs}
        first: Any = figure.legends[0].get_patches()[0]
        assert (to_hex(first.get_edgecolor()) == IDLE_COLOR) is (edge == IDLE_COLOR)


def test_bright_palette_colours_differ() -> None:
    colours = [
        np.array(choose_box_color(op, 0, 1, PALETTES["bright"])) for op in LIGHT_PALETTE.tones
    ]
    distances = [float(np.abs(a - b).sum()) for k, a in enumerate(colours) for b in colours[:k]]
    assert min(distances) > 0.4


def test_time_axis_label_and_limits() -> None:
    axes = gantt(simulate_schedule(), axis_label="microseconds", time_range=(10, 20)).axes[0]
    assert axes.get_xlabel() == "microseconds" and axes.get_xlim() == (10, 20)
    for text in axes.texts:  # all texts are inside the time range
        assert 10 <= text.get_position()[0] <= 20
    axes = gantt(simulate_schedule(), axis_label="none").axes[0]
    assert axes.get_xlabel() == "" and not axes.spines["bottom"].get_visible()


@pytest.mark.parametrize(
    "style",
    [
        {"palette": "blue"}, {"colors": {"F": "nocolour"}}, {"colors": {"Q": "red"}},
        {"time_range": (5, 5)}, {"time_range": (-1, 5)}, {"time_range": (99, 100)},
        {"time_range": (0, np.inf)}, {"palet": "grey"}, {"colours": {"F": "navy"}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_style_is_refused(style: Any) -> None:
    with pytest.raises(UsageError):
        gantt(simulate_schedule(), **style)


def test_tick_labels_of_bubble_axis_match_their_positions() -> None:
    for m in (8, 16, 64):
        figure = bubble_vs_memory([simulate_schedule(m=m), simulate_schedule(zb_h1, m=m)])
        figure.canvas.draw()
        axes = figure.axes[0]
        for position, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
            assert float(label.get_text().rstrip("%")) == pytest.approx(100 * position, abs=1e-9)


def test_style_options_of_draw_and_compare(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "x.svg"
    options = [
        "--title",
        "mine",
        "--palette",
        "grey",
        "--colors",
        "F=#ff8800",
        "--axis-label",
        "in µs",
    ]
    run_command(capsys, "draw", "gpipe", *options, "--time-range", "3:9", "-o", str(file))
    text = file.read_text()
    assert ">mine</text>" in text and ">in µs</text>" in text and "#ff8800" in text
    run_command(capsys, "compare", "gpipe", "zb_h1", "--title=a", "--title=", "-o", str(file))
    assert ">a</text>" in file.read_text() and "zb_h1" not in file.read_text()
