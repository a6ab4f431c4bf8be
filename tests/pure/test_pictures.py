"""Tests of overlays, densities, trade-offs and maps of idle time in pictures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

from schedir.__main__ import main
from schedir.compiler.compile import compile, lower
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import SEND_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import compute_programs
from schedir.viz import bubble_vs_memory, compare, gantt, idle_map, save
from schedir.viz.figures.overlays import OVERLAYS, find_messages, find_phase_times
from schedir.viz.palette import ACCENT_COLOR
from schedir.viz.time_bins import compute_in_flight_curve, compute_memory_curve, compute_shares
from tests.strategies import costs

PAIRED = simulate(compile(dualpipe_v, PipelineShape(4, 10, 2, "vee")))


def simulate_schedule(
    schedule: Schedule = one_f_one_b, ranks: int = 4, m: int = 8, v: int = 1, **cost: float
) -> Timeline:
    priced = Costs(**cost)
    return simulate(compile(schedule, PipelineShape(ranks, m, v), costs=priced), priced)


# ---------------------------------------------------------------- densities


@given(compute_programs(), st.data(), st.integers(1, 40))
def test_density_shares_sum_to_busy_time(draft: Program, data: st.DataObject, columns: int) -> None:
    t = simulate(lower(draft), data.draw(costs(draft.shape)))
    kind = t.spans["op"].astype(np.int64)
    share = compute_shares(t, kind, len(Opcode), columns)
    assert share.shape == (t.ranks, columns, len(Opcode))
    assert (share >= 0).all() and (share.sum(-1) <= 1 + 1e-9).all()
    assert np.allclose(share.sum((1, 2)) * t.span / columns, t.busy)
    if t.span:
        rank, column = (
            data.draw(st.integers(0, t.ranks - 1)),
            data.draw(st.integers(0, columns - 1)),
        )
        lo, hi = t.span * column / columns, t.span * (column + 1) / columns
        for op in (Opcode.Forward, Opcode.Backward):
            spans = t.spans[(t.spans["rank"] == rank) & (t.spans["op"] == op)]
            inside = np.minimum(spans["end"], hi) - np.maximum(spans["start"], lo)
            assert share[rank, column, op] == pytest.approx(
                inside.clip(0).sum() / (hi - lo), abs=1e-9
            )


def test_overlapped_pair_shares_its_time() -> None:
    share = compute_shares(PAIRED, PAIRED.spans["op"].astype(np.int64), len(Opcode), 97)
    assert PAIRED.is_second_of_pair.any()
    assert np.allclose(share.sum((1, 2)) * PAIRED.span / 97, PAIRED.busy)


def test_small_boxes_become_density_images(tmp_path: Path) -> None:
    t = simulate_schedule(ranks=4, m=1024)
    figure = gantt(t, show=("lanes", "arrows", "path"))
    assert (figure.get_size_inches() < 15).all()
    images = figure.axes[0].images
    assert len(images) == 4
    for rank, image in enumerate(images):
        pixels = np.asarray(image.get_array())
        assert pixels[..., 3].mean() == pytest.approx(t.busy[rank] / t.span, abs=0.01)
    save(figure, tmp_path / "x.png")
    assert not gantt(simulate_schedule()).axes[0].images


# ---------------------------------------------------------------- overlays


def list_line_collections(figure: Figure) -> list[LineCollection]:
    return [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]


def test_unknown_overlay_or_width_is_refused() -> None:
    with pytest.raises(
        UsageError, match="lanes, arrows, path, in_flight, memory, phases, not 'colour'"
    ):
        gantt(simulate_schedule(), show="path, colour")
    with pytest.raises(UsageError, match="'column' or 'page'"):
        gantt(simulate_schedule(), width="poster")


@pytest.mark.parametrize(("width", "inches"), [("column", 3.35), ("page", 7.0)])
def test_figure_has_column_or_page_width(width: str, inches: float) -> None:
    for show in ((), tuple(OVERLAYS)):
        figure = compare([simulate_schedule(), simulate_schedule(gpipe)], width=width, show=show)
        assert figure.get_figwidth() == pytest.approx(inches)
        titles = [axes.get_title("left") for axes in figure.axes]
        assert [name.partition(" ")[0] for name in titles] == ["one_f_one_b", "gpipe"]


@pytest.mark.parametrize(
    "t",
    [
        simulate_schedule(send=0.2),
        simulate_schedule(interleaved, v=2),
        simulate_schedule(gpipe),
        simulate_schedule(zb_h1),
        PAIRED,
    ],
)
def test_every_message_has_one_arrow(t: Timeline) -> None:
    sends = int(np.isin(t.spans["op"], SEND_OPS).sum())
    pairs = find_messages(t)
    assert len(pairs) == sends > 0
    assert (t.spans["rank"][pairs[:, 0]] != t.spans["rank"][pairs[:, 1]]).all()
    assert (t.spans["mb"][pairs[:, 0]] == t.spans["mb"][pairs[:, 1]]).all()
    figure = gantt(t, show=("arrows",))
    (arrows,) = [c for c in figure.axes[0].collections if isinstance(c, Quiver)]
    assert sends == arrows.N
    assert not [c for c in gantt(t).axes[0].collections if isinstance(c, Quiver)]


def test_critical_path_is_outlined() -> None:
    t = simulate_schedule(B=2)
    figure = gantt(t, show=("path",))
    polygons = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    edges = [np.asarray(c.get_edgecolor()) for c in polygons]
    (outlined,) = [
        c
        for c, edge in zip(polygons, edges, strict=True)
        if len(edge) and to_hex(edge[0]) == ACCENT_COLOR
    ]
    work = t.critical_path[t.spans["end"][t.critical_path] > t.spans["start"][t.critical_path]]
    assert len(outlined.get_paths()) == len(work)
    assert sum(np.ptp(np.asarray(p.vertices)[:, 0]) for p in outlined.get_paths()) == t.span


def test_phase_times_of_warmup_and_cooldown() -> None:
    times = find_phase_times(simulate_schedule(B=2))
    assert times["warmup"][1].tolist() == [10, 8, 6, 4]
    assert times["cooldown"][0].tolist() == [22, 23, 24, 25]
    for lo, hi in times.values():
        assert (lo <= hi).all()
    warm, cool = (
        find_phase_times(simulate_schedule(gpipe))[name] for name in ("warmup", "cooldown")
    )
    assert (warm[1] <= cool[0]).all()
    assert (
        gantt(simulate_schedule(), show=("phases",)).legends[0].get_texts()[-1].get_text()
        == "cooldown"
    )


def test_curves_reach_peak_memory_and_in_flight() -> None:
    t = simulate_schedule(B=2)
    for rank, (times, counts) in enumerate(compute_in_flight_curve(t).steps):
        assert (np.diff(times) > 0).all() and counts.max() == t.peak_in_flight[rank]
    sized = replace(t, sizes=Sizes(saved=1e9, activation=1e8))
    assert compute_memory_curve(t).unit == "" and compute_memory_curve(sized).unit == "B"
    for (_, values), peak in zip(compute_memory_curve(sized).steps, sized.peak_memory, strict=True):
        assert values.max() == peak
    figure = gantt(sized, show=("in_flight", "memory"))
    assert len(list_line_collections(figure)) == 2 and "GB" in figure.axes[0].get_title("right")
    assert "GB" in bubble_vs_memory([sized]).axes[0].get_xlabel()
    (curves,) = list_line_collections(gantt(t, show=("in_flight",)))
    high = [np.ptp(np.asarray(path.vertices)[:, 1]) for path in curves.get_paths()]
    assert np.allclose(np.array(high) / high[0], t.peak_in_flight / t.peak_in_flight[0])


# ---------------------------------------------------------------- figures of runs


def test_bubble_vs_memory_has_point_per_run() -> None:
    runs = [
        simulate_schedule(gpipe),
        simulate_schedule(),
        simulate_schedule(zb_h1),
        simulate_schedule(interleaved, v=2, F=0.5, B=0.5),
    ]
    (axes,) = bubble_vs_memory(runs).axes
    points = np.asarray(axes.collections[0].get_offsets())
    assert points.tolist() == [[t.peak_activations, t.bubble] for t in runs]
    assert [t.peak_activations for t in runs] == [8, 4, 4, 5.5]
    assert {text.get_text() for text in axes.texts} == {t.program.name for t in runs}
    best = np.asarray(axes.lines[0].get_ydata())
    assert (np.diff(best) <= 0).all() and min(t.bubble for t in runs) in best
    with pytest.raises(UsageError):
        bubble_vs_memory([])
    bubble_vs_memory([simulate_schedule(ranks=1, m=1)] * 12)  # all in one spot


def test_idle_map_sums_to_idle_time(tmp_path: Path) -> None:
    t = simulate_schedule(send=0.25, reduce_grads=1)
    (axes,) = idle_map(t).axes
    cells = np.asarray(axes.images[0].get_array())
    assert np.allclose(cells[:-1, -1], t.idle / t.span)
    assert np.allclose(cells[:, :-1].sum(1), cells[:, -1])
    assert cells[-1, -1] == pytest.approx(t.bubble)
    cause_names = [label.get_text() for label in axes.get_xticklabels()]
    assert cause_names[0] == "warmup" and cause_names[-1] == "all" and "host" not in cause_names
    assert len(axes.texts) == cells.size
    big = idle_map(simulate_schedule(ranks=60, m=1))
    assert (big.get_size_inches() < 13).all()
    save(big, tmp_path / "x.png")
    save(idle_map(simulate_schedule(ranks=1, m=2)), tmp_path / "y.png")  # never idle


# ---------------------------------------------------------------- from the command line


def test_picture_options_of_draw_and_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    marks = ["--show", ",".join(OVERLAYS), "--width", "column"]
    for argv in (
        ["draw", "one_f_one_b", *marks],
        ["draw", "gpipe", "one_f_one_b", "--show", "none", "--width", "6.5"],
        ["draw", "gpipe", "--idle-map"],
        ["compare", "gpipe", "one_f_one_b", "--tradeoff"],
        ["compare", "gpipe", "one_f_one_b", "--show", "path"],
    ):
        assert main([*argv, "--microbatches", "4", "-o", "x.svg"]) == 0, argv
        Path("x.svg").unlink()
