"""Tests of pictures of unshards: their lane, and bands for stages while they are unsharded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, Timeline, compile, schedules, simulate, viz
from schedir.io import perfetto
from schedir.ir.isa.instructions import COMPUTE_OPS, Lane, Opcode
from schedir.viz.time_bins import find_unsharded_intervals

ZOO = {
    "one_f_one_b": PipelineShape(3, 6), "interleaved": PipelineShape(2, 4, 3),
    "looped_bfs": PipelineShape(1, 4, 4),
    "zb_h1": PipelineShape(3, 6), "dualpipe": PipelineShape(2, 4, placement="mirror"),
}  # fmt: skip
CASES = st.tuples(st.sampled_from(sorted(ZOO)), st.integers(1, 3))
COST = st.sampled_from([0.0, 0.25, 1.0, 3.0])


def simulate_zero(name: str, zero: int = 3, active: int | None = None, **costs: float) -> Timeline:
    options: dict[str, Any] = {} if active is None or zero < 3 else {"unsharded_stages": active}
    program = compile(getattr(schedules, name), ZOO[name], dp=2, zero=zero, **options)
    return simulate(program, Costs(F=1, B=2, **costs))


@given(CASES, COST, COST)
def test_computes_are_inside_unsharded_band(
    case: tuple[str, int], unshard: float, reduce: float
) -> None:
    name, active = case
    shape = ZOO[name]
    min_active = 2 if shape.placement_rows > 1 else 1  # a pair may be of two stages
    active = max(min_active, min(active, len(shape.stages_on_rank[0])))
    run = simulate_zero(name, 3, active, unshard=unshard, reduce_scatter=reduce)
    bands, spans = find_unsharded_intervals(run), run.spans
    assert bands.row_count <= active
    for s in spans[np.isin(spans["op"], COMPUTE_OPS) & (spans["op"] != Opcode.BackwardWeight)]:
        is_of_stage = (bands.rank == s["rank"]) & (bands.stage == s["stage"])
        inside = (bands.start <= s["start"]) & (bands.end >= s["end"])
        assert (is_of_stage & inside).sum() == 1
    for rank in range(run.ranks):
        for row in range(bands.row_count):
            is_of_stage = (bands.rank == rank) & (bands.row == row)
            order = np.argsort(bands.start[is_of_stage])
            assert (bands.start[is_of_stage][order][1:] >= bands.end[is_of_stage][order][:-1]).all()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_always_unsharded_weights_have_no_band(zero: int) -> None:
    run = simulate_zero("looped_bfs", zero, unshard=1)
    assert find_unsharded_intervals(run).row_count == 0
    texts = {t.get_text() for t in viz.gantt(run).axes[0].texts}
    assert "unsharded" not in texts and ("params" in texts) == (zero > 0)


@pytest.mark.parametrize("palette", ["plain", "grey", "bright"])
def test_chart_and_legend_name_lane_and_band(palette: str) -> None:
    figure = viz.gantt(simulate_zero("looped_bfs", active=2, unshard=1), palette=palette)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert texts.count("params") == texts.count("unsharded") == 1
    assert [t for t in texts if t in {"s0", "s1", "s2", "s3"}][-6:] != []
    (legend,) = figure.legends
    legend_names = [t.get_text() for t in legend.get_texts()]
    assert legend_names[-2:] == ["gathers of weights", "unsharded weights"]


def test_chart_without_lanes_has_no_bands() -> None:
    """Without lanes, a picture has no bands, and its rows are lower."""
    run = simulate_zero("looped_bfs", active=2, unshard=1)
    low, high = (viz.gantt(run, show=s).axes[0].get_ylim()[0] for s in ("", "lanes"))
    assert low < high
    assert not any(t.get_text() == "unsharded" for t in viz.gantt(run, show="").axes[0].texts)


def test_html_page_has_bands() -> None:
    run = simulate_zero("interleaved", active=2, unshard=0.5)
    text = viz.html(run)
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    (page_run,) = data["runs"]
    assert page_run["bandRows"] == 2 and len(data["unshardedStages"]["light"]) == 3
    assert page_run["columns"]["bandRank"][2] == len(find_unsharded_intervals(run).rank)
    assert data["unshardedStages"]["name"] == "unsharded weights"
    assert data["lanes"][Lane.PARAMS] == "params"


def test_perfetto_trace_has_lane_and_counts_stages() -> None:
    events = json.loads(perfetto.to_json(simulate_zero("looped_bfs", active=2, unshard=1)))[
        "traceEvents"
    ]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "params" in threads
    counts = [e["args"]["stages"] for e in events if e["name"] == "unsharded weights"]
    assert max(counts) == 2 and counts[-1] == 0
