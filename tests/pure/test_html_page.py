"""Tests of the interactive page as text: one file, no network access, and escaped names."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode, b64encode
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.compiler.compile import compile, lower
from schedir.errors import ShapeError, UsageError
from schedir.io.timeline_file import save_timeline
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.bubble_causes import idleness
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, build_spans
from schedir.schedules import dualpipe_v, gpipe, one_f_one_b
from schedir.testing import compute_programs
from schedir.viz import html, save_html
from tests.strategies import costs


def simulate_1f1b(ranks: int = 4, m: int = 8, **cost: float) -> Timeline:
    given_costs = Costs(**cost)
    return simulate(compile(one_f_one_b, PipelineShape(ranks, m), costs=given_costs), given_costs)


def perturb_times(t: Timeline, seed: int = 0) -> Timeline:
    """Return the same Timeline in seconds, with all durations different."""
    spans = t.spans.copy()
    delays = np.random.default_rng(seed).random(len(t)).cumsum() * 1e-6
    spans["start"], spans["end"] = spans["start"] + delays, spans["end"] + delays
    return Timeline(t.program, spans, "measured", "s")


class PageParser(HTMLParser):
    """A parser that collects the elements of a page and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open, data))

    def all(self, tag: str) -> list[str]:
        return [text for tag_of_text, text in self.texts if tag_of_text == tag]


def read_data(text: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert match
    return json.loads(match[1])


def read_column(run: Any, name: str) -> np.ndarray:
    kind, offset, count = run["columns"][name]
    packed = zlib.decompress(b64decode(run["packedColumns"]))
    return np.frombuffer(packed, f"<{kind}", count, offset)


def test_page_makes_no_requests_and_runs_only_its_scripts() -> None:
    text = html(simulate_1f1b())
    page = PageParser(text)
    (policy,) = [a["content"] for t, a in page.tags if "Content-Security-Policy" in a.values()]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    script, style = page.all("script")[-1], page.all("style")[0]
    for kind, source in (("script", script), ("style", style)):
        digest = b64encode(sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "http" not in policy
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "action", "style", "onclick", "onload"} & {*attributes}, tag
        assert not (attributes.get("href") or "data:").partition("data:")[0]
    assert "fetch(" not in script and "import(" not in script and "innerHTML" not in script
    assert "<b>" not in script and "eval(" not in script


def test_equal_timelines_give_equal_pages(tmp_path: Path) -> None:
    assert html(simulate_1f1b()) == html(simulate_1f1b())
    save_html(tmp_path / "x.html", simulate_1f1b())
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == html(simulate_1f1b())
    with pytest.raises(UsageError, match=r"no/x\.html"):
        save_html(tmp_path / "no" / "x.html", simulate_1f1b())


SCRIPT = "</script><script>alert(1)</script>"
MARKUP = [SCRIPT, "<!--", "<img src=x onerror=a>", "]]>", "&amp;", '"']


@cache
def make_plain_page(twice: bool) -> str:
    t = simulate_1f1b(2, 2)
    return html(t, perturb_times(t) if twice else None)


@given(
    st.lists(st.sampled_from(MARKUP) | st.text(max_size=8), min_size=1, max_size=4).map("".join),
    st.booleans(),
)
def test_program_name_is_escaped(name: str, twice: bool) -> None:
    t = simulate_1f1b(2, 2)
    try:
        named = Program(name, t.program.shape, t.program.streams)
    except ShapeError:
        return  # no program has this name
    run = Timeline(named, t.spans)
    text = html(run, perturb_times(run) if twice else None)
    plain = make_plain_page(twice)
    named_page, plain_page = PageParser(text), PageParser(plain)
    assert [tag for tag, _ in named_page.tags] == [tag for tag, _ in plain_page.tags]
    assert named_page.all("script")[-1] == plain_page.all("script")[-1]
    assert text.count("<!--") == 0 and text.count("</script") == plain.count("</script")
    shown = re.findall(r"<h1>(.*?)</h1>", text, re.S)
    assert [unescape(h) for h in shown] == [name.replace("\0", "\0")]
    assert name in unescape(text)


@given(compute_programs(), st.data())
def test_page_data_equals_timeline(draft: Program, data: st.DataObject) -> None:
    t = simulate(lower(draft), data.draw(costs(draft.shape)))
    run = read_data(html(t))["runs"][0]
    spans, n = t.spans, np.arange(len(t))
    assert (read_column(run, "op") == spans["op"]).all()
    assert (read_column(run, "stage") == spans["stage"]).all()
    assert (np.cumsum(read_column(run, "mb")) == spans["mb"]).all()
    ticks = np.cumsum(read_column(run, "start"), dtype="u4").astype(float)
    slack = 1e-6 * (t.span or 1)
    assert np.allclose(ticks * run["tick"], spans["start"], atol=slack)
    ends = (ticks + read_column(run, "length")) * run["tick"]
    assert np.allclose(ends, spans["end"], atol=slack)
    for name, expected in (("criticalPredecessor", t.critical_predecessor),
                       ("partner", t.graph.partner), ("need0", t.graph.needs[0]),
                       ("need1", t.graph.needs[1])):  # fmt: skip
        distances = read_column(run, name)
        assert (np.where(distances == 0, -1, n + distances) == expected).all(), name
    idle = idleness(t)
    assert (read_column(run, "gapAwaited") == idle["awaited_span"]).all()
    bounds = run["gapOffsets"]
    for rank in range(t.ranks):
        assert (idle["rank"][bounds[rank] : bounds[rank + 1]] == rank).all()


def test_curves_have_distinct_times() -> None:
    t = simulate_1f1b(2, 4, B=2)
    run = read_data(html(t))["runs"][0]
    (curve,) = run["curves"]
    for rank in range(2):
        lo, hi = curve["offsets"][rank : rank + 2]
        times = np.cumsum(read_column(run, "times0")[lo:hi], dtype="u4") * run["tick"]
        values = read_column(run, "values0")[lo:hi]
        assert (np.diff(times) > 0).all()
        assert values.max() == t.peak_in_flight[rank] and values[-1] == 0


def test_sizes_add_memory_curve() -> None:
    t = replace(simulate_1f1b(2, 4, B=2), sizes=Sizes(saved=1e9))
    run = read_data(html(t))["runs"][0]
    assert [(c["name"], c["unit"]) for c in run["curves"]] == [("in flight", ""), ("memory", "B")]
    lo, hi = run["curves"][1]["offsets"][:2]
    assert read_column(run, "values1")[lo:hi].max() == pytest.approx(t.peak_memory[0])
    text = html(t)
    assert text.count("<td>2 GB</td>") == 1 and "No rank uses more than 2 GB." in text
    assert "peak memory" in text and "peak memory" not in html(replace(t, sizes=None))


def test_overlapped_pair_is_two_halves() -> None:
    p = compile(dualpipe_v, PipelineShape(4, 12, 2, "vee"))
    half = read_column(read_data(html(simulate(p)))["runs"][0], "half")
    second = np.concatenate([s.joined for s in p.streams]) & (p.words >> 48 & 0xFF <= 3)
    assert second.any() and ((half == 2) == second).all() and ((half == 1)[:-1] == second[1:]).all()


def test_two_timelines_share_axis_and_have_labels() -> None:
    predicted, real = simulate_1f1b(), perturb_times(simulate_1f1b(send=0.5))
    first_run, second_run = read_data(html(predicted, real))["runs"]
    assert (first_run["label"], second_run["label"]) == ("predicted", "measured")
    assert first_run["scale"] == 1
    assert second_run["scale"] * real.busy.mean() == pytest.approx(predicted.busy.mean())
    other = simulate(compile(gpipe, PipelineShape(4, 8)))
    labels = [run["label"] for run in read_data(html(predicted, other))["runs"]]
    assert labels == ["one_f_one_b", "gpipe"]
    assert [r["label"] for r in read_data(html(other, other))["runs"]] == ["first", "second"]
    with pytest.raises(UsageError, match="one run has 4 ranks and the other 2"):
        html(predicted, simulate_1f1b(2, 2))


def test_page_text_describes_timeline() -> None:
    page = PageParser(html(simulate_1f1b(B=2)))
    text = " ".join(page.all("p"))
    assert "one_f_one_b, predicted: 4 ranks, 4 stages, 8 microbatches" in text
    assert "idle 27.3% of the time, the same on each rank" in text
    assert "Rank 0 has the most in flight, 4." in text
    assert len([tag for tag, a in page.tags if tag == "th" and a.get("scope") == "row"]) == 4


def test_100_000_spans_take_less_than_4_MB() -> None:
    t = perturb_times(simulate_1f1b(16, 1100, send=0.1), seed=1)
    assert len(t) > 100_000
    assert len(html(t).encode()) < 4_000_000


def test_empty_timelines_have_pages() -> None:
    html(simulate_1f1b(2, 2, F=0, I=0, W=0))
    from schedir.ir.text_format import from_text

    empty = from_text("schedir 1\nprogram none\nranks 1 microbatches 1\nrank 0\n")
    none = np.empty(0)
    data = read_data(html(Timeline(empty, build_spans(empty, none, none))))
    assert data["runs"][0]["count"] == 0


def test_instructions_have_colours() -> None:
    fills = read_data(html(simulate_1f1b()))["fills"]
    for theme in ("light", "dark"):
        assert len(fills[theme]) == len(Opcode)
        for colours in fills[theme]:
            assert all(re.fullmatch(r"#[0-9a-f]{6}", fill) for fill, _ in colours)


def test_draw_writes_html_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "gpipe", "-o", "x.HTML"]) == 0
    assert len(read_data(Path("x.HTML").read_text())["runs"]) == 1
    assert main(["draw", "gpipe", "one_f_one_b", "-o", "two.html"]) == 0
    assert len(read_data(Path("two.html").read_text())["runs"]) == 2
    # A measured run is shown with the prediction from its mean times.
    save_timeline(perturb_times(simulate_1f1b()), "real.timeline")
    assert main(["draw", "real.timeline", "-o", "x.html"]) == 0
    runs = read_data(Path("x.html").read_text())["runs"]
    assert [(r["label"], r["unit"]) for r in runs] == [("predicted", "s"), ("measured", "s")]
    assert main(["draw", "gpipe", "gpipe", "gpipe", "-o", "y.html"]) == 2
    assert not Path("y.html").exists()


def test_prediction_beside_measured_run_has_blocking_hosts(tmp_path: Path) -> None:
    """A blocking host, as on CPUs, reaches slow messages late. The prediction includes this."""
    slow_send = Costs(send=3)
    program = compile(gpipe, PipelineShape(2, 4), progress_model="per_edge")
    spans = [
        simulate(program, slow_send, progress_model="per_edge", blocking_hosts=blocks).span
        for blocks in (False, True)
    ]
    run = simulate(program, slow_send, progress_model="per_edge", blocking_hosts=True)
    save_timeline(replace(run, kind="measured"), tmp_path / "run.timeline")
    file = tmp_path / "x.html"
    assert main(["draw", str(tmp_path / "run.timeline"), "-o", str(file)]) == 0
    shown_spans = [
        float(span) for span in re.findall(r"instructions in ([\d.]+)", file.read_text())
    ]
    assert spans == [30, 39] and shown_spans == [39, 39]
