"""Tests that pictures show the Timeline, in colours that can be distinguished."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Lane, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, build_spans
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, overlapped_pair
from schedir.viz import compare, gantt, save
from schedir.viz.layout import ChartRectangles
from schedir.viz.palette import (
    TONES,
    choose_shade,
    choose_text_color,
    lightness,
    luminance,
    mix_to_lightness,
    to_linear_light,
)
from tests.pure.test_pictures import simulate_schedule

ROOT = Path(__file__).resolve().parents[2]
LETTERS = (Opcode.Forward, Opcode.BackwardInput, Opcode.BackwardWeight, Opcode.Backward)


def split_backwards(r: int, P: int, m: int) -> RankSchedule:
    return m * F + m * (I + W)


def overlapped_pairs(r: int, P: int, m: int) -> RankSchedule:
    warmup = P - 1 - r
    return (warmup + 1) * F + (m - warmup - 1) * overlapped_pair(B, F) + (warmup + 1) * B


def as_measured(t: Timeline, seconds_per_unit: float = 1e-3) -> Timeline:
    """Return the same Timeline as if measured, in seconds and not from 0."""
    spans = t.spans.copy()
    spans["start"], spans["end"] = (
        spans["start"] * seconds_per_unit + 7,
        spans["end"] * seconds_per_unit + 7,
    )
    return Timeline(t.program, spans, "measured", "s")


def list_texts(figure: Figure, axes: int = 0) -> list[str]:
    return [t.get_text() for t in figure.axes[axes].texts]


def sum_areas(figure: Figure, axes: int = 0) -> list[float]:
    """Return the area of each collection's boxes: idle, empty lanes, compute, communication."""
    sums = []
    for collection in figure.axes[axes].collections:
        assert isinstance(collection, PolyCollection)
        corners = [path.vertices for path in collection.get_paths()]
        sums.append(sum(float(np.prod(np.ptp(c, axis=0))) for c in corners))
    return sums


# ---------------------------------------------------------------- drawn shapes


@pytest.mark.parametrize(
    "t",
    [
        simulate_schedule(),
        simulate_schedule(gpipe),
        simulate_schedule(overlapped_pairs),
        simulate_schedule(split_backwards),
    ],
)
def test_boxes_and_idle_time_fill_rows(t: Timeline) -> None:
    idle, _, busy, _ = sum_areas(gantt(t))
    assert idle == pytest.approx(t.idle.sum())
    assert busy == pytest.approx(t.busy.sum())


def test_rank_0_is_on_top_and_time_runs_right() -> None:
    axes = gantt(simulate_schedule()).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {r}" for r in range(4)]
    assert axes.yaxis_inverted() and not axes.xaxis_inverted()
    assert axes.get_xlim() == (0, 33)


def test_title_has_name_kind_bubble_and_span() -> None:
    axes = gantt(simulate_schedule()).axes[0]
    assert axes.get_title("left") == "one_f_one_b (predicted)"
    assert axes.get_title("right") == "bubble 27.3%, peak 4 activations, span 33"
    axes = gantt(as_measured(simulate_schedule())).axes[0]
    assert axes.get_title("left") == "one_f_one_b (measured)"
    assert axes.get_title("right") == "bubble 27.3%, peak 4 activations, span 33 ms"
    assert axes.get_xlabel() == "time in ms"


def test_boxes_have_letter_and_microbatch() -> None:
    assert sorted(list_texts(gantt(simulate_schedule(ranks=2, m=3)))) == sorted(
        [f"{letter}{mb}" for letter in "FB" for mb in range(3)] * 2
    )
    assert {t[0] for t in list_texts(gantt(simulate_schedule(split_backwards)))} == {"F", "I", "W"}


def test_stages_of_rank_have_different_shades() -> None:
    figure = gantt(simulate_schedule(interleaved, ranks=2, m=2, v=2))
    assert {t for t in list_texts(figure) if t[0] == "s"} == {"s0", "s1", "s2", "s3"}
    faces = figure.axes[0].collections[2].get_facecolor()
    assert len(np.unique(np.asarray(faces), axis=0)) == 4  # two shades of F and of B
    assert len(figure.legends[0].get_texts()) == 3


def test_labels_that_do_not_fit_are_omitted() -> None:
    assert list_texts(gantt(simulate_schedule(ranks=4, m=200))) == []
    assert list_texts(gantt(simulate_schedule(), width=1.0)) == []


def test_overlapped_pair_is_one_split_box() -> None:
    sheet = ChartRectangles(simulate_schedule(overlapped_pairs))
    high = sheet.bottom - sheet.top
    halves = np.flatnonzero((abs(high - 0.5) < 0.01) & (sheet.op <= Opcode.Backward))
    assert len(halves) == 2 * sum(int(s.joined.sum()) for s in sheet.timeline.program.streams) > 0
    first_halves, second_halves = halves[::2], halves[1::2]
    assert np.allclose(sheet.bottom[first_halves], sheet.top[second_halves])
    assert (sheet.left[first_halves] == sheet.left[second_halves]).all()


def test_only_lanes_that_take_time_are_drawn() -> None:
    assert ChartRectangles(simulate_schedule()).lanes == []
    assert ChartRectangles(simulate_schedule(send=0.1)).lanes == [Lane.ACT, Lane.GRAD]
    assert ChartRectangles(simulate_schedule(reduce_grads=1)).lanes == [Lane.DP]
    legend = gantt(simulate_schedule(send=0.1, reduce_grads=1, step=1)).legends[0]
    assert [t.get_text() for t in legend.get_texts()] == [
        "F forward", "B backward", "optimizer step", "idle",
        "activations in, out", "gradients in, out", "reductions",
    ]  # fmt: skip


def test_receives_and_sends_of_lane_do_not_overlap() -> None:
    costs = Costs(send=0.5)
    program = compile(one_f_one_b, PipelineShape(4, 8), costs=costs, progress_model="per_edge")
    sheet = ChartRectangles(simulate(program, costs, progress_model="per_edge"))
    talk = sheet.transfer_indices[
        np.lexsort((sheet.left[sheet.transfer_indices], sheet.top[sheet.transfer_indices]))
    ]
    for a, b in pairwise(talk.tolist()):
        assert sheet.top[a] != sheet.top[b] or sheet.right[a] <= sheet.left[b] + 1e-9


def test_boxes_stay_in_their_row() -> None:
    sheet = ChartRectangles(simulate_schedule(send=0.1, reduce_grads=1, step=1))
    row = sheet.timeline.spans["rank"]
    assert (sheet.top >= row * sheet.pitch).all()
    assert (sheet.bottom < (row + 1) * sheet.pitch).all()
    assert sheet.bottom.max() <= sheet.height


def test_program_without_time_or_instructions_is_drawn(tmp_path: Path) -> None:
    without_time = simulate_schedule(F=0, I=0, W=0)
    empty: Program = from_text("schedir 1\nprogram none\nranks 1 microbatches 1\nrank 0\n")
    no_times = np.empty(0)
    for k, t in enumerate([without_time, Timeline(empty, build_spans(empty, no_times, no_times))]):
        save(gantt(t), tmp_path / f"{k}.png")


def test_picture_size_is_bounded() -> None:
    figure = gantt(simulate_schedule(ranks=64, m=8))
    assert (figure.get_size_inches() <= 28).all()
    assert len(figure.axes[0].get_yticks()) == 64
    ticks = gantt(simulate_schedule(ranks=150, m=1)).axes[0].get_yticks()
    assert len(ticks) < 150  # every other rank is named, so that names do not overlap


def test_any_name_can_be_a_title(tmp_path: Path) -> None:
    text = "schedir 1\nprogram $\\bad${}_^%流水\nranks 1 microbatches 1\nrank 0\n F 0.0\n"
    figure = gantt(simulate(from_text(text)))
    assert "$\\bad${}_^%流水" in figure.axes[0].get_title("left")
    save(figure, tmp_path / "x.png")  # the font may lack some letters
    long_name = simulate(from_text(text.replace("$\\bad${}_^%流水", "n" * 300)))
    assert len(gantt(long_name).axes[0].get_title("left")) < 80


# ---------------------------------------------------------------- several runs in one picture


def test_compare_shares_time_axis() -> None:
    figure = compare([simulate_schedule(), simulate_schedule(m=16), simulate_schedule(gpipe)])
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 57)}
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "time in units of cost"]
    assert not figure.texts


def test_compare_of_different_units_notes_scaling() -> None:
    predicted, real = simulate_schedule(), as_measured(simulate_schedule(send=0.5))
    figure = compare([predicted, real])
    axis_ends = [axes.get_xlim()[1] for axes in figure.axes]
    assert axis_ends[0] / predicted.busy.mean() == pytest.approx(axis_ends[1] / real.busy.mean())
    assert axis_ends[1] == pytest.approx(real.span)
    assert "scaled" in figure.texts[0].get_text()
    assert [axes.get_xlabel() for axes in figure.axes] == ["time in units of cost", "time in ms"]


def test_compare_needs_a_timeline() -> None:
    with pytest.raises(UsageError):
        compare([])


# ---------------------------------------------------------------- colours

# Colours as dichromats see them, in linear light (Machado, Oliveira and Fernandes 2009, severity
# 1).
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
               (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
               (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_letters_differ_in_grey(stages: int) -> None:
    bands = [[lightness(choose_shade(op, k, stages)) for k in range(stages)] for op in LETTERS]
    assert all(min(a) > max(b) + 7 for a, b in pairwise(bands))


def test_forward_is_light_and_backward_dark() -> None:
    assert lightness(choose_shade(Opcode.Forward, 0, 1)) > 80
    assert lightness(choose_shade(Opcode.Backward, 0, 1)) < 30


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("stages", [1, 2, 8])
def test_letters_differ_for_color_blindness(kind: str, stages: int) -> None:
    def perceive_lightness(op: Opcode, k: int) -> float:
        light = np.clip(
            np.asarray(BLIND[kind]) @ to_linear_light(choose_shade(op, k, stages)), 0, 1
        )
        return float(116 * np.cbrt(light @ (0.2126, 0.7152, 0.0722)) - 16)

    bands = [[perceive_lightness(op, k) for k in range(stages)] for op in LETTERS]
    assert all(min(a) > max(b) + 5 for a, b in pairwise(bands))


@pytest.mark.parametrize("stages", [2, 4])
def test_shades_of_letter_differ(stages: int) -> None:
    for op in TONES:
        shades = [lightness(choose_shade(op, k, stages)) for k in range(stages)]
        assert all(a > b + 2 for a, b in pairwise(shades))


def test_mix_reaches_requested_lightness() -> None:
    for l_star in (9, 30, 60, 95):
        assert lightness(mix_to_lightness("#f0a63c", l_star)) == pytest.approx(l_star)


def test_text_contrasts_with_every_box() -> None:
    for op in TONES:
        for k in range(8):
            box = choose_shade(op, k, 8)
            pair = sorted(
                [luminance(box) + 0.05, 0.05 if choose_text_color(box) == "black" else 1.05]
            )
            assert pair[1] / pair[0] >= 4.5


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "begins"), [("x.png", b"\x89PNG"), ("x.SVG", b"<?xml"), ("x.pdf", b"%PDF")]
)
def test_save_by_suffix(tmp_path: Path, name: str, begins: bytes) -> None:
    for _ in range(2):  # the second time replaces the file
        save(gantt(simulate_schedule(ranks=2, m=2)), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [f.name for f in tmp_path.iterdir()] == [name]


def test_saved_text_is_text_and_files_are_reproducible(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.pdf", "b.pdf"):
        save(gantt(simulate_schedule(ranks=2, m=2)), tmp_path / name)
    assert ">one_f_one_b (predicted)</text>" in (tmp_path / "a.svg").read_text()
    assert b"/FontFile2" in (tmp_path / "a.pdf").read_bytes()
    for suffix in ("svg", "pdf"):
        a, b = (tmp_path / f"{name}.{suffix}" for name in "ab")
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("name", ["x.gif", "x", ".png", "no/such/folder/x.png", "folder.png"])
def test_wrong_picture_path_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=name):
        save(gantt(simulate_schedule(ranks=2, m=2)), tmp_path / name)
    assert [f.name for f in tmp_path.iterdir()] == ["folder.png"]


def test_matplotlib_is_imported_with_first_picture() -> None:
    code = (
        "import sys, schedir.viz; assert 'matplotlib' not in sys.modules\n"
        "schedir.viz.gantt; assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
