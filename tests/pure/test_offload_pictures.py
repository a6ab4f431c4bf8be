"""Tests of pictures of offload: lanes to the host and its disk, and the memory of each tier."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from schedir import Costs, PipelineShape, Sizes, Timeline, check, compile, schedules, simulate, viz
from schedir.errors import UsageError
from schedir.io import perfetto
from schedir.ir.isa.instructions import LANES, Lane, Opcode
from schedir.viz.layout import CURVE_HEIGHT
from schedir.viz.palette import DARK_PALETTE, PALETTES, choose_box_color, format_hex, lightness
from tests.offload_programs import offload_everything

COSTS = Costs(
    F=1, B=2, send=0.1, offload=0.5, reload=0.5, offload_to_disk=0.6, reload_from_disk=0.6
)
COPY_OPS = (Opcode.Offload, Opcode.Reload, Opcode.OffloadToDisk, Opcode.ReloadFromDisk)


@cache
def simulate_offloaded(*, spilled: bool = False, ranks: int = 4) -> Timeline:
    program = compile(schedules.one_f_one_b, PipelineShape(ranks, 8))
    return simulate(
        check(offload_everything(program, spilled=spilled)),
        COSTS,
        sizes=Sizes(activation=1e6, saved=1e7),
    )


@pytest.mark.parametrize("name", [*PALETTES, "night"])
def test_copies_have_distinct_colors_in_every_palette(name: str) -> None:
    palette = DARK_PALETTE if name == "night" else PALETTES[name]
    light = {op: lightness(format_hex(choose_box_color(op, 0, 1, palette))) for op in COPY_OPS}
    assert len({*light.values()}) == len(COPY_OPS)
    out, reload, spill, fetch = (light[op] for op in COPY_OPS)
    assert min(abs(out - reload), abs(spill - fetch), abs(out - spill)) > 10, light
    assert fetch > spill  # loads are paler


@pytest.mark.parametrize("spilled", [False, True])
def test_chart_has_copy_lanes_and_curve_per_tier(spilled: bool) -> None:
    figure = viz.gantt(simulate_offloaded(spilled=spilled), show="lanes,in_flight,memory")
    axes = figure.axes[0]
    texts = [t.get_text() for t in axes.texts]
    for name in ("d2h", "h2d", *["disk"] * spilled):
        assert texts.count(name) == 4
    tiers = [t.partition("\n") for t in texts if "≤" in t]
    curve_names = ["in flight", "memory", "host", *["disk"] * spilled]
    assert sorted(name for name, _, _ in tiers) == sorted(4 * curve_names)
    for tier in curve_names[2:]:
        peaks = [
            f"≤ {c.total.max() / 1e6:g} MB"
            for c in simulate_offloaded(spilled=spilled).memory_on(tier)
        ]
        assert [label for name, _, label in tiers if name == tier] == peaks
    # Curves are in the row of their rank, which is high enough for all.
    sheet = axes.get_ylim()[0] / 4
    tops = [t.xy[1] for t in axes.texts if t.get_text().startswith(f"{curve_names[-1]}\n")]  # type: ignore[attr-defined]
    assert (np.diff(tops) == pytest.approx(np.diff(tops)[0])) and tops[0] < sheet
    (legend,) = figure.legends
    labels = [t.get_text() for t in legend.get_texts()]
    disk_labels = ["copies to the host", "copies from the host", *["disk in, out"] * spilled]
    assert labels[-len(disk_labels) :] == disk_labels
    legend_end = max(t.get_window_extent().x1 for t in legend.get_texts())
    assert legend_end < figure.bbox.x1


def test_memory_limits_are_lines_on_their_tier() -> None:
    def list_dashed_heights(**limits: float) -> list[float]:
        axes = viz.gantt(simulate_offloaded(), show="memory", memory_limits=limits).axes[0]
        lines = [c for c in axes.collections if getattr(c, "get_linestyle", list)()[0][1]]
        return [float(c.get_segments()[0][0][1]) for c in lines if hasattr(c, "get_segments")]

    assert list_dashed_heights() == []
    assert len(list_dashed_heights(device=8e7)) == len(list_dashed_heights(host=3e7)) == 4
    heights = list_dashed_heights(device=1e8, host=1e8)
    assert len(heights) == 8 and len({round(y, 6) for y in heights}) == 8
    # Limits use the scale of the curve: at its peak of 10 MB, half as high, or at the top.
    low, peak, above = (np.array(list_dashed_heights(host=size)) for size in (5e6, 1e7, 2e7))
    assert low - peak == pytest.approx(CURVE_HEIGHT / 2) and above == pytest.approx(peak)
    (legend,) = viz.gantt(
        simulate_offloaded(), show="memory", memory_limits={"device": 1e8}
    ).legends
    assert "memory limit" in [t.get_text() for t in legend.get_texts()]
    for wrong in ({"gpu": 1}, {"host": -1}, {"device": "5GB"}, 5):
        with pytest.raises(UsageError):
            viz.gantt(simulate_offloaded(), show="memory", memory_limits=wrong)  # type: ignore[arg-type]


def test_chart_without_offload_has_no_host_lane_or_curve() -> None:
    plain = simulate(
        compile(schedules.one_f_one_b, PipelineShape(4, 8)), COSTS, sizes=Sizes(saved=1)
    )
    axes = viz.gantt(plain, show="lanes,memory").axes[0]
    assert not {"d2h", "h2d", "disk", "host\n≤ 0 B"} & {t.get_text() for t in axes.texts}
    bare = simulate(simulate_offloaded().program, COSTS)  # without sizes no bytes are known
    assert not any("host" in t.get_text() for t in viz.gantt(bare, show="memory").axes[0].texts)


def test_text_chart_counts_activations_on_host_and_disk() -> None:
    lines = [
        "".join(t for t, _ in line)
        for line in viz.text_chart(simulate_offloaded(spilled=True), 300)
    ]
    assert lines[1].split() == ["idle", "peak", "host", "disk"]
    for rank, line in enumerate(lines[2:]):
        held = [f"{4 - rank}"]
        for tier in ("host", "disk"):
            held.append(
                f"{max(simulate_offloaded(spilled=True).memory_on(tier)[rank].total) / 1e7:.0f}"
            )
        assert line.split()[-3:] == held
    assert max(map(len, lines)) <= 300
    narrow = [
        "".join(t for t, _ in line) for line in viz.text_chart(simulate_offloaded(spilled=True), 70)
    ]
    assert max(map(len, narrow)) <= 70


def test_html_page_has_all_lanes_and_tiers() -> None:
    text = viz.html(simulate_offloaded(spilled=True))
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["lanes"]) == len(LANES) and data["lanes"][Lane.DISK] == "disk"
    curves = [curve["name"] for curve in data["runs"][0]["curves"]]
    assert curves == ["in flight", "memory", "host", "disk"]
    for name in curves[1:]:  # each name has a colour in both themes
        assert text.count(f"--{name}: #") == 2 and f'"{name}"' in text
    assert "peak on host" in text and "and 20 MB on its host, and 40 MB on its disk" in text


def test_perfetto_trace_counts_bytes_on_each_tier() -> None:
    events = json.loads(perfetto.to_json(simulate_offloaded(spilled=True)))["traceEvents"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"d2h", "h2d", "disk"} <= threads
    slices = {e["name"].split()[0] for e in events if e["ph"] == "X"}
    assert {"offload", "reload", "offload_to_disk", "reload_from_disk"} <= slices
    for tier, name in ("device", "bytes"), ("host", "bytes on host"), ("disk", "bytes on disk"):
        for rank, curve in enumerate(simulate_offloaded(spilled=True).memory_on(tier)):
            counters = [e for e in events if e["name"] == name and e["pid"] == rank]
            assert max(sum(e["args"].values()) for e in counters) == curve.total.max()
