"""Tests of the interactive page in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from schedir.compiler.compile import compile
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import gpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.viz import save_html
from schedir.viz.palette import choose_box_color, format_hex
from tests.browser.chromium import Chromium

COSTS = Costs(F=1, B=2, send=0.25)
PREDICTED = simulate(compile(one_f_one_b, PipelineShape(4, 8), costs=COSTS), COSTS)
ACCENT = (0xC8, 0x00, 0x5F)  # from page.css
GUTTER, HEAD = 96, 70  # from scene.js
Page = Callable[..., Chromium]


def scale_to_seconds(t: Timeline, factor: float = 1.5e-3) -> Timeline:
    """Return the same Timeline, as measured in seconds."""
    spans = t.spans.copy()
    spans["start"], spans["end"] = spans["start"] * factor + 3, spans["end"] * factor + 3
    return Timeline(t.program, spans, "measured", "s", t.progress_model)


@pytest.fixture
def page(chromium: Chromium, tmp_path: Path) -> Iterator[Page]:
    """Yield a function that opens the page of some timelines.

    At the end, check that the browser requested only the page and logged nothing.
    """

    def open_page(*runs: Timeline) -> Chromium:
        save_html(tmp_path / "x.html", *runs)
        chromium.prefer("light")
        chromium.open(tmp_path / "x.html")
        return chromium

    chromium.console_messages.clear()
    chromium.requested_urls.clear()
    yield open_page
    assert chromium.console_messages == []
    assert {*chromium.requested_urls} <= {(tmp_path / "x.html").as_uri()}


def get_text(browser: Chromium, name: str) -> str:
    """Return the visible text of an element, which is empty if it is hidden."""
    shown = f"((e) => e.checkVisibility() ? e.innerText : '')(document.getElementById('{name}'))"
    return str(browser.js(shown))


def locate_time(browser: Chromium, t: float, span: float) -> tuple[float, float]:
    """Return the point of a time on rank 0's row, when the whole run is in view."""
    left, top, width = browser.js(
        "(({x, y, width}) => [x, y, width])(document.getElementById('canvas')"
        ".getBoundingClientRect())"
    )
    x = GUTTER + (t / span + 0.005) / 1.02 * (width - GUTTER)
    return left + x, top + HEAD + 20


def count_pixels(browser: Chromium, colour: tuple[int, int, int]) -> int:
    """Return the number of pixels with nearly this colour."""
    screenshot = imread(BytesIO(browser.picture()))[..., :3] * 255
    return int((abs(screenshot - np.array(colour)) < 3).all(-1).sum())


def test_tooltip_shows_instruction_and_its_waits(page: Page) -> None:
    browser = page(PREDICTED)
    assert get_text(browser, "tip") == ""
    of_rank_0 = PREDICTED.spans[PREDICTED.spans["rank"] == 0]
    first_backward = of_rank_0[of_rank_0["op"] == 1][0]
    x, y = locate_time(browser, float(first_backward["start"]) + 1, PREDICTED.span)
    browser.mouse("mouseMoved", x, y)
    tip = get_text(browser, "tip")
    assert "B 0.0" in tip and "length\n2\n" in tip
    assert f"start\n{first_backward['start']:g}\n" in tip
    assert f"waited\n{first_backward['start'] - 4:g}, last for recv_grad 0.0" in tip
    assert "warmup: B 1.0 on rank 1" in tip and "message: recv_grad 0.0" in tip
    browser.mouse("mouseMoved", *locate_time(browser, 6, PREDICTED.span))
    tip = get_text(browser, "tip")
    assert "rank 0 is idle" in tip and "until\nB 0.0" in tip
    browser.mouse("mouseMoved", 5, 5)
    assert get_text(browser, "tip") == ""


def test_times_have_enough_digits(page: Page) -> None:
    costs = Costs(F=10000.125, B=0.125)
    browser = page(simulate(compile(one_f_one_b, PipelineShape(1, 2), costs=costs), costs))
    browser.key("/")
    browser.type("B 0.1")
    browser.key("Enter")
    assert "start\n20000.375\nlength\n0.125" in get_text(browser, "selected")


def test_instructions_of_later_updates_show_update_number(page: Page) -> None:
    shape = PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)
    browser = page(simulate(compile(pipedream_2bw, shape), Costs(step=1)))
    browser.key("/")
    browser.type("step")
    names = []
    for _ in range(3):
        browser.key("Enter")
        names.append(get_text(browser, "selected").partition("\n")[0])
    assert [name.removesuffix("optimizer step").strip() for name in names] == [
        "step", "step 1", "step 2"
    ]  # fmt: skip


def test_zoom_and_pan_keep_time_under_pointer(page: Page) -> None:
    browser = page(PREDICTED)

    def name_at(t: float, offset: float = 0) -> str:
        x, y = locate_time(browser, t, PREDICTED.span)
        browser.mouse("mouseMoved", x + offset, y)
        return get_text(browser, "tip").partition("\n")[0].partition(" forward")[0]

    assert [name_at(1.5), name_at(1.5, 60)] == ["F 0.1", "F 0.3"]
    x, y = locate_time(browser, 1.5, PREDICTED.span)
    for _ in range(4):
        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-150)
    assert [name_at(1.5), name_at(1.5, 60)] == ["F 0.1", "F 0.1"]  # zoomed in at the pointer
    distance = 240.0
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + distance / 2, y, button="left", buttons=1)
    browser.mouse("mouseMoved", x + distance, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + distance, y, button="left", clickCount=1)
    assert name_at(1.5) == "F 0.0"
    assert get_text(browser, "selected").startswith("SELECTED")  # a drag chooses nothing
    browser.key("0")
    assert [name_at(1.5), name_at(1.5, 60)] == ["F 0.1", "F 0.3"]
    browser.key("w")
    assert name_at(1.5) != "F 0.1"
    browser.key("s")
    browser.js("document.getElementById('fit').click()")
    assert name_at(1.5) == "F 0.1"


def test_click_shows_critical_path_and_messages(page: Page) -> None:
    browser = page(PREDICTED)
    assert count_pixels(browser, ACCENT) == 0
    of_rank_0 = PREDICTED.spans[PREDICTED.spans["rank"] == 0]
    first_backward = of_rank_0[of_rank_0["op"] == 1][0]
    browser.click(*locate_time(browser, float(first_backward["start"]) + 1, PREDICTED.span))
    selected = get_text(browser, "selected")
    assert selected.startswith("B 0.0") and "receives from\nB 1.0, rank 1" in selected
    links = len(
        PREDICTED.critical_path_to(int(np.flatnonzero(PREDICTED.spans == first_backward)[0]))
    )
    assert f"{links} links" in selected and "on 4 ranks" in selected
    assert count_pixels(browser, ACCENT) > 500
    browser.js("document.querySelector('#selected .link').click()")
    assert get_text(browser, "selected").startswith("recv_grad 0.0")
    browser.key("Escape")
    assert get_text(browser, "selected").startswith("SELECTED")
    assert count_pixels(browser, ACCENT) == 0
    browser.key("p")
    assert count_pixels(browser, ACCENT) > 500


@pytest.mark.parametrize(
    ("query", "matches"),
    [("F 2.3", "1"), ("rank 1", "50"), ("send_act", "24"), ("BACKWARD stage 0", "8"),
     ("B .", "none"), ("mb 3", "20"), ("F rank 1", "8"), ("sendgrad 2.", "8"), ("zzz", "none"),
     ("rank", "none")],
)  # fmt: skip
def test_search_field_counts_matches(page: Page, query: str, matches: str) -> None:
    browser = page(PREDICTED)
    browser.key("/")
    browser.type(query)
    assert get_text(browser, "found") == matches
    if matches == "1":
        browser.key("Enter")
        assert get_text(browser, "found") == "1 of 1"
        assert get_text(browser, "selected").startswith("F 2.3")


def test_keyboard_selects_and_toggles(page: Page) -> None:
    browser = page(PREDICTED)
    browser.js("document.getElementById('canvas').focus()")
    browser.key("ArrowRight")
    assert get_text(browser, "selected").startswith("F 0.0")
    browser.key("ArrowRight")
    assert get_text(browser, "selected").startswith("F 0.1")
    browser.key("ArrowDown")
    assert get_text(browser, "selected").startswith("send_act 0.1")
    for name, key in (("messages", "m"), ("curves", "c"), ("path", "p")):
        before = browser.js(f"document.getElementById('{name}').ariaPressed")
        browser.key(key)
        assert browser.js(f"document.getElementById('{name}').ariaPressed") != before
    browser.key("?")
    assert browser.js("document.getElementById('keys').open")
    browser.js("document.getElementById('keys').close()")


RECORD_TEXTS = """
const proto = CanvasRenderingContext2D.prototype, draw = proto.fillText;
window.texts = [];
proto.fillText = function (text, x, y, most = Infinity) {
  const { width, actualBoundingBoxAscent: up, actualBoundingBoxDescent: down } =
    this.measureText(text);
  const wide = Math.min(width, most), left = x - { left: 0, center: wide / 2, right: wide }[
    this.textAlign];
  window.texts.push([text, left, y - up, left + wide, y + down]);
  draw.call(this, text, x, y, most);
};
0
"""


@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("names", [["one_f_one_b"], ["one_f_one_b", "zb_h1"]])
def test_row_labels_do_not_overlap(page: Page, ranks: int, names: list[str]) -> None:
    programs = [compile(name, ranks=ranks, microbatches=8, costs=COSTS) for name in names]
    browser = page(*(simulate(program, COSTS, sizes=Sizes(saved=1e9)) for program in programs))
    if browser.js("document.getElementById('curves').ariaPressed") == "false":
        browser.key("c")
    browser.js(RECORD_TEXTS)
    browser.key("0")
    texts = browser.js("window.texts")
    labels = [t for t in texts if t[0] and t[3] <= GUTTER and t[4] > HEAD]
    shown = [text for text, *_ in labels]
    assert [f"rank {rank}" for rank in range(ranks)] == [t for t in shown if t[:4] == "rank"]
    if len(names) == 2:
        assert all(shown.count(name) == ranks for name in names)
    overlaps = [
        (a[0], b[0])
        for a, b in combinations(labels, 2)
        if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] - 1 and b[2] < a[4] - 1
    ]
    assert overlaps == []


def test_light_and_dark_theme(page: Page) -> None:
    browser = page(PREDICTED)
    light, dark = (0xFF, 0xFF, 0xFF), (0x12, 0x15, 0x1B)  # from page.css
    assert count_pixels(browser, light) > 100_000 > count_pixels(browser, dark)
    browser.prefer("dark")
    assert count_pixels(browser, dark) > 100_000 > count_pixels(browser, light)
    browser.key("t")
    assert count_pixels(browser, light) > 100_000


def test_two_timelines_can_be_switched(page: Page) -> None:
    browser = page(PREDICTED, scale_to_seconds(PREDICTED))
    names = browser.js("[...document.querySelectorAll('#runs button')].map((b) => b.innerText)")
    assert names == ["predicted", "measured", "both"]
    shown = []
    for _ in range(3):
        browser.key("v")
        shown.append(get_text(browser, "facts"))
    assert [s.count("bubble") for s in shown] == [1, 1, 2]
    assert "ms" not in shown[0] and "ms" in shown[1]
    browser.key("v")
    browser.key("v")
    browser.mouse("mouseMoved", *locate_time(browser, 1.5, PREDICTED.span))
    assert "F 0.1" in get_text(browser, "tip")
    assert "predicted\n1, 1 long" in get_text(browser, "tip")


def test_tooltip_has_times_of_both_programs(page: Page) -> None:
    """The instruction has another position in each program."""
    other = simulate(compile(gpipe, PREDICTED.program.shape, costs=COSTS), COSTS)
    browser = page(PREDICTED, other)
    for _ in range(2):
        browser.key("v")
    of_rank_0 = other.spans[other.spans["rank"] == 0]
    first_backward = of_rank_0[of_rank_0["op"] == 1][0]
    browser.mouse(
        "mouseMoved", *locate_time(browser, float(first_backward["start"]) + 1, other.span)
    )
    tip = get_text(browser, "tip").splitlines()
    assert tip[1] == "backward"
    spans = PREDICTED.spans[(PREDICTED.spans["rank"] == 0) & (PREDICTED.spans["op"] == 1)]
    start = float(spans["start"][spans["mb"] == int(tip[tip.index("microbatch") + 1])][0])
    assert tip[tip.index("one_f_one_b") + 1].startswith(f"{start:g}, 2 long")


def test_program_name_is_not_executed(page: Page) -> None:
    name = "</script><script>document.title='bad'</script><img src=x onerror=alert(1)>"
    t = PREDICTED
    named = Program(name, t.program.shape, t.program.streams)
    browser = page(Timeline(named, t.spans), scale_to_seconds(Timeline(named, t.spans)))
    assert get_text(browser, "facts")
    assert browser.js("document.querySelector('h1').textContent") == name
    assert browser.js("document.title") == name and not browser.js("document.images.length")


def test_page_blocks_other_scripts_and_requests(page: Page) -> None:
    browser = page(PREDICTED)
    browser.js(
        "(() => { const bad = document.createElement('script'); bad.textContent = 'hurt = 1';"
        " document.body.append(bad); })()"
    )
    assert browser.js("typeof hurt") == "undefined"
    request = "fetch('http://127.0.0.1:9/').then(() => 'went', () => 'held')"
    assert browser.js(request) == "held"
    assert len(browser.console_messages) >= 2 and all(
        "Content Security Policy" in s for s in browser.console_messages[:2]
    )
    browser.console_messages.clear()
    browser.requested_urls.clear()


@pytest.mark.parametrize("kind", ["stages", "large", "none"])
def test_page_opens_for_staged_large_and_empty_runs(page: Page, kind: str) -> None:
    if kind == "stages":
        t = simulate(
            compile(interleaved, PipelineShape(4, 8, 2), tp=2, dp=2), Costs(reduce_grads=1)
        )
    elif kind == "large":
        t = simulate(compile(one_f_one_b, PipelineShape(16, 1100), costs=COSTS), COSTS)
        assert len(t) > 100_000
    else:
        t = simulate(compile(one_f_one_b, PipelineShape(1, 1)), Costs(F=0, I=0, W=0))
    browser = page(t)
    for key in ("m", "p", "c", "w", "ArrowRight", "ArrowDown", "Enter"):
        browser.key(key)


def test_recompute_is_hatched(page: Page) -> None:
    """R has the hue of F with diagonal lines, so its colour alternates along a row of pixels."""
    run = simulate(compile(one_f_one_b, PipelineShape(2, 4), recompute="all"))
    browser = page(run)
    row = np.array(
        browser.js("""((canvas) => [...canvas.getContext("2d")
            .getImageData(0, 86, canvas.width, 1).data])(document.getElementById("canvas"))""")
    ).reshape(-1, 4)[:, :3]
    changes = []
    for op in (Opcode.Forward, Opcode.Recompute):
        fill = format_hex(choose_box_color(op, 0, 1))
        has_fill = (row == [int(fill[digit : digit + 2], 16) for digit in (1, 3, 5)]).all(1)
        changes.append(int((has_fill[1:] != has_fill[:-1]).sum()))
    assert 0 < changes[0] <= 2 * 4  # the two sides of each box
    assert changes[1] > 4 * 4
