"""Tests of the studio in a real browser: controls, code, edits, causes of idle time, addresses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.commands.studio import DEFAULTS
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.state import StudioState
from schedir.commands.studio.studio_page import export_page
from schedir.compiler.compile import compile
from schedir.compiler.relower import extract_compute
from schedir.io.source_loader import Source
from schedir.io.timeline_file import save_timeline
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from tests.browser.chromium import Chromium
from tests.browser.studio_controls import (
    ANSWERED,
    Opener,
    choose,
    drag,
    enter,
    get_text,
    get_value,
    locate_time,
    press,
    run_code,
    type_code,
    wait_for_answer,
)
from tests.pure.test_studio import BACKWARD_FIRST, CODE, HANG

CUT_TEXTS = """(() => {
  const pen = document.createElement("canvas").getContext("2d");
  const isCut = (element) => {
    const { font, paddingLeft, paddingRight } = getComputedStyle(element);
    pen.font = font;
    const wide = pen.measureText(element.placeholder ?? element.innerText).width;
    return wide > element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) + 1;
  };
  return [...document.querySelectorAll("[placeholder], .control label")]
    .filter((e) => e.checkVisibility() && isCut(e)).map((e) => e.placeholder || e.innerText);
})()"""


def test_controls_change_the_timeline(studio: Opener) -> None:
    browser = studio()
    assert "span 34.6" in get_text(browser, "facts")
    assert "This is one_f_one_b" in get_text(browser, "verdict")
    choose(browser, "control-schedule", "zb_h1")
    assert browser.js("document.querySelector('h1').innerText") == "zb_h1"
    assert "This is zb_h1" in get_text(browser, "verdict")
    slider = "document.getElementById('slider-microbatches')"
    browser.js(f"{slider}.focus()")
    wait_for_answer(browser, lambda: browser.key("ArrowRight"))
    assert get_value(browser, "control-microbatches") == "9"
    assert "9 microbatches" in get_text(browser, "summary")
    enter(browser, "control-ranks", "2")
    assert "2 ranks" in get_text(browser, "summary")
    assert browser.js("document.querySelectorAll('#tables tbody tr').length") == 2
    enter(browser, "control-factors", "1:3")
    assert "F=1:3,B=2:6" in json.loads(browser.js("decodeURIComponent(location.hash.slice(1))"))[
        "options"]["costs"]  # fmt: skip
    enter(browser, "control-factors", "1:2:3")
    assert "3 numbers for 2 stages" in get_text(browser, "problem")
    assert browser.js("document.getElementById('control-factors').ariaInvalid") == "true"
    enter(browser, "control-factors", "")
    assert get_text(browser, "problem") == ""
    enter(browser, "control-memory_limit", "1GB")
    assert "needs 2 GB, but the limit is 1 GB" in get_text(browser, "problem")
    assert "offload=fit moves them to the host" in get_text(browser, "problem")
    enter(browser, "control-memory_limit", "")
    enter(browser, "control-recompute", "fit")
    assert "rank limit 40GB" in get_text(browser, "problem")
    enter(browser, "control-recompute", "all")
    assert "R recompute" in get_text(browser, "legend")
    enter(browser, "control-dp", "2")
    choose(browser, "control-zero", "3")
    assert "unshard" in get_text(browser, "legend")
    choose(browser, "control-progress_model", "per_edge")
    assert "progress model per_edge" in get_text(browser, "verdict")
    press(browser, "undo")
    browser.until(lambda: "progress model per_device" in get_text(browser, "verdict"))
    press(browser, "redo")
    browser.until(lambda: "progress model per_edge" in get_text(browser, "verdict"))


def test_wrong_value_marks_its_control(studio: Opener) -> None:
    browser = studio()
    marked = "[...document.querySelectorAll('[aria-invalid=true]')].map((e) => e.id.slice(8))"
    for name, wrong, valid in (
        ("F", "x", "1"), ("saved", "1XB", "1GB"), ("more", "none=1", ""), ("more", "tp=x", ""),
        ("memory_limit", "1GB", ""), ("other_costs", "R=x", ""), ("other_costs", "(=1", ""),
        ("other_sizes", "params=x", ""), ("offload", "x", ""), ("dp", "x", ""),
    ):  # fmt: skip
        enter(browser, f"control-{name}", wrong)
        assert get_text(browser, "problem") and name in browser.js(marked), (name, wrong)
        assert name == "other_costs" or browser.js(marked) == [name]
        enter(browser, f"control-{name}", valid)
        assert get_text(browser, "problem") == "" and browser.js(marked) == []
    enter(browser, "control-factors", "1:z")
    assert "F must be a number" in get_text(browser, "problem")
    assert "factors" in browser.js(marked)


def test_code_runs_and_errors_have_lines(studio: Opener) -> None:
    browser = studio()
    press(browser, "code-tab")
    assert "def mine(" in get_value(browser, "editor")
    type_code(browser, " ")
    press(browser, "run-code")
    assert "The editor is empty" in get_text(browser, "code-message")

    def write(code: str) -> None:
        run_code(browser, code)

    write(CODE.replace("rank, microbatches)", "rnk, microbatches)"))
    assert get_text(browser, "code-message").startswith("Line 5: ")
    assert browser.js("document.querySelector('.editor pre b').innerText") == "5"
    write(CODE)
    assert "This is one_f_one_b" in get_text(browser, "verdict")
    assert get_text(browser, "problem") == ""
    assert get_value(browser, "control-ranks") == "4"
    write(BACKWARD_FIRST)
    picture = "decodeURIComponent(document.querySelector('#problem img').src)"
    assert "F 0.0 gives only later" in get_text(browser, "problem")
    assert ">B 0.0<" in browser.js(picture) and ">F 0.0<" in browser.js(picture)
    write(HANG)
    assert "2 ranks wait for each other" in get_text(browser, "problem")
    assert browser.js(picture).count("marker-end") == 2
    endless = "def f(r, p, m):\n    while True: pass"
    type_code(browser, endless)
    assert "2 ranks wait for each other" in get_text(browser, "problem")  # typing runs nothing
    assert browser.js("document.getElementById('code-from-timeline').disabled")
    before = browser.js(ANSWERED)
    press(browser, "run-code")
    browser.until(lambda: "running…" in get_text(browser, "verdict"))
    assert browser.js("document.getElementById('run-code').disabled")
    assert get_text(browser, "problem") == "" and browser.js(ANSWERED) == before
    browser.until(lambda: bool(browser.js(f"{ANSWERED} > {before}")))
    assert "did not finish within 3 s" in get_text(browser, "code-message")
    write(CODE)
    press(browser, "controls-tab")
    enter(browser, "control-ranks", "3")
    assert "mine, predicted: 3 ranks" in get_text(browser, "summary")
    wait_for_answer(browser, lambda: press(browser, "undo"))
    assert "mine, predicted: 4 ranks" in get_text(browser, "summary")
    press(browser, "code-tab")
    wait_for_answer(browser, lambda: press(browser, "undo"))
    assert get_value(browser, "editor") == endless
    assert "press Run" in get_text(browser, "code-message")


def test_no_code_option_disables_code(studio: Opener) -> None:
    browser = studio(code=False)
    press(browser, "code-tab")
    assert browser.js("document.getElementById('editor').disabled")
    fact = browser.js(
        "fetch('/', {method: 'POST', headers: {'X-Studio-Token': new URLSearchParams("
        "location.search).get('token')}, body: JSON.stringify({state: {code: 'x = 1'}})})"
        ".then((r) => r.json()).then((a) => a.error.fact)"
    )
    assert "--no-code" in fact


def test_instruction_drag_is_applied_refused_and_undone(studio: Opener) -> None:
    browser = studio()
    wait_for_answer(
        browser, lambda: drag(browser, locate_time(browser, 13.3), locate_time(browser, 8))
    )
    assert "until compute #4 of rank 0, which is F 0.4 instead of B 0.0" in get_text(
        browser, "verdict"
    )
    assert "peak in flight 5" in get_text(browser, "facts")
    assert browser.js("document.querySelector('h1').textContent") == "one_f_one_b, edited"
    assert "Click an instruction" in get_text(
        browser, "selected"
    )  # a selection would fade most of the timeline
    assert browser.js("document.getElementById('control-ranks').disabled")
    wait_for_answer(
        browser, lambda: drag(browser, locate_time(browser, 12), locate_time(browser, 0.2))
    )
    assert "Not moved: B 0.0 needs the saved activations" in get_text(browser, "problem")
    assert "peak in flight 5" in get_text(browser, "facts")
    enter(browser, "control-B", "3")
    assert "peak in flight 5" in get_text(browser, "facts")
    wait_for_answer(browser, lambda: press(browser, "undo"))
    wait_for_answer(browser, lambda: press(browser, "undo"))
    assert "This is one_f_one_b." in get_text(browser, "verdict")
    assert not browser.js("document.getElementById('control-ranks').disabled")


def test_finger_moves_no_instruction(studio: Opener) -> None:
    browser = studio()
    x, y = locate_time(browser, 13.3)
    for kind, points in (
        ("touchStart", [{"x": x, "y": y}]),
        ("touchMove", [{"x": x - 60, "y": y}]),
        ("touchMove", [{"x": x - 120, "y": y}]),
        ("touchEnd", []),
    ):
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    enter(browser, "control-B", "3")
    assert "This is one_f_one_b." in get_text(browser, "verdict")


def test_keyboard_moves_instruction_and_explains_idle_time(studio: Opener) -> None:
    browser = studio()
    browser.js("document.getElementById('canvas').focus()")
    browser.key("ArrowRight")
    assert get_text(browser, "selected").startswith("F 0.0")
    assert "in flight\n1 while it runs" in get_text(browser, "selected")
    wait_for_answer(browser, lambda: browser.key("]"))
    browser.until(lambda: get_text(browser, "selected").startswith("F 0.0"))
    assert "which is F 0.1 instead of F 0.0" in get_text(browser, "verdict")
    assert "start\n1\n" in get_text(browser, "selected")
    wait_for_answer(browser, lambda: browser.key("["))
    browser.until(lambda: "This is one_f_one_b." in get_text(browser, "verdict"))
    browser.key("b")
    selected = get_text(browser, "selected")
    assert selected.startswith("rank 3 is idle") or selected.startswith("rank 0 is idle")
    browser.until(
        lambda: (
            "CHANGES, WITH THE TIME PER MICROBATCH THAT EACH SAVES" in get_text(browser, "selected")
        )
    )
    browser.key("b")
    assert get_text(browser, "selected") != selected


def test_idle_time_shows_cause_chain_and_changes(studio: Opener) -> None:
    browser = studio()
    browser.click(*locate_time(browser, 7))
    browser.until(lambda: "10% LESS OF A COST" in get_text(browser, "selected"))
    selected = get_text(browser, "selected")
    assert selected.startswith("rank 0 is idle") and "warmup: B 1.0 on rank 1" in selected
    assert "waits for\nB 1.0, rank 1" in selected and "B of stage 3\nidle 6.6 → 6.4" in selected
    assert "zb_v" in selected.partition("CHANGES, WITH THE TIME PER MICROBATCH THAT EACH SAVES")[2]
    buttons = "[...document.querySelectorAll('#selected button')]"
    change = f"{buttons}.find((e) => e.innerText.startsWith('zb_v'))"
    wait_for_answer(browser, lambda: browser.js(f"{change}.click()"))
    assert get_value(browser, "control-schedule") == "zb_v"
    assert "span 27 " in get_text(browser, "facts")
    assert get_value(browser, "control-F") == "0.5"
    assert get_value(browser, "control-saved") == "0.5GB"
    wait_for_answer(browser, lambda: press(browser, "undo"))
    assert get_value(browser, "control-schedule") == "one_f_one_b"


def test_comparison_explains_only_the_first_run(studio: Opener) -> None:
    browser = studio()
    choose(browser, "control-other", "interleaved")
    browser.js("document.getElementById('canvas').focus()")
    explained = []
    for _ in range(2):
        browser.key("v")  # shows the first run alone, then the second run alone
        browser.key("b")
        browser.until(lambda: "is idle" in get_text(browser, "selected"))
        selected = get_text(browser, "selected")
        explained.append(any(word in selected for word in ("Computing", "CHANGES", "No change")))
    assert explained == [True, False]
    browser.key("v")  # shows both runs
    wait_for_answer(
        browser, lambda: drag(browser, locate_time(browser, 13.3), locate_time(browser, 8))
    )
    assert "which is F 0.4 instead of B 0.0" in get_text(browser, "verdict")
    browser.js("[...document.querySelectorAll('#verdict button')].at(-1).click()")
    assert get_text(browser, "selected").startswith("F 0.4")


def test_studio_opens_program_and_measured_run(studio: Opener, tmp_path: Path) -> None:
    program = compile("zb_h1", ranks=2, microbatches=4)
    browser = studio(StudioState(program=to_text(program), options=DEFAULTS))
    assert "This is zb_h1" in get_text(browser, "verdict")
    assert browser.js("document.getElementById('control-zero').disabled")
    run = simulate(program)
    spans = run.spans.copy()
    spans["start"], spans["end"] = spans["start"] * 1e-3, spans["end"] * 1e-3
    save_timeline(Timeline(program, spans, "measured", "s"), tmp_path / "x.timeline")
    browser = studio(StudioState(run=True), run=Source(str(tmp_path / "x.timeline")))
    names = browser.js("[...document.querySelectorAll('#runs button')].map((b) => b.innerText)")
    assert names == ["predicted", "measured", "both"] and "ms" in get_text(browser, "facts")
    choose(browser, "control-schedule", "gpipe")
    assert "This is gpipe" in get_text(browser, "verdict")


def test_names_and_code_are_escaped(studio: Opener) -> None:
    name = "<img src=x onerror=alert(1)>"
    program = extract_compute(compile("gpipe", ranks=2, microbatches=2))
    named = to_text(program).replace("program gpipe", "program a&lt;b")
    browser = studio(StudioState(program=named, options=DEFAULTS))
    assert browser.js("document.querySelector('h1').textContent") == "a&lt;b"
    enter(browser, "control-more", f"{name}=1")
    enter(browser, "control-other_costs", name)
    assert name.split()[0] in get_text(browser, "problem")
    press(browser, "code-tab")
    run_code(browser, f"raise ValueError({name!r})")
    assert name in get_text(browser, "code-message") and browser.js("document.images.length") == 0


def test_address_restores_state_without_running_code(studio: Opener) -> None:
    state = {"schedule": "zb_v", "options": {"ranks": "2", "microbatches": "5"}}
    browser = studio(address=f"#{json.dumps(state)}")
    browser.until(lambda: "This is zb_v" in get_text(browser, "verdict"))
    assert get_value(browser, "control-microbatches") == "5"
    browser = studio(address=f"#{json.dumps(state | {'code': CODE})}")
    browser.until(lambda: "press Run" in get_text(browser, "code-message"))
    assert "This is zb_v" in get_text(browser, "verdict") and get_value(browser, "editor") == CODE
    wait_for_answer(browser, lambda: press(browser, "run-code"))
    assert "mine, predicted: 2 ranks" in get_text(browser, "summary")


@pytest.mark.parametrize(
    "address",
    ["{", "null", "[]", "5", '{"options": null}', '{"options": []}', '{"options": {"costs": 5}}',
     '{"options": {"sizes": {}}}', '{"options": {}, "code": 5}'],
)  # fmt: skip
def test_address_without_valid_state_is_reported(studio: Opener, address: str) -> None:
    browser = studio(address=f"#{address}")
    browser.until(lambda: "no valid state" in get_text(browser, "problem"))
    assert "This is one_f_one_b" in get_text(browser, "verdict")
    enter(browser, "control-ranks", "2")
    assert get_text(browser, "problem") == "" and "2 ranks" in get_text(browser, "summary")


def test_two_schedules_have_linked_cursors(studio: Opener) -> None:
    browser = studio()
    canvas = "document.getElementById('canvas').toDataURL()"
    browser.mouse("mouseMoved", 10, 10)
    canvas_before = browser.js(canvas)
    choose(browser, "control-other", "zb_h1")
    names = browser.js("[...document.querySelectorAll('#runs button')].map((b) => b.innerText)")
    assert names == ["one_f_one_b", "zb_h1", "both"]
    assert "Compared with zb_h1: span +" in get_text(browser, "verdict")
    picture_before = browser.picture()
    browser.mouse("mouseMoved", *locate_time(browser, 0.5))
    assert browser.picture() != picture_before and "zb_h1\n0, 1 long" in get_text(browser, "tip")
    choose(browser, "control-other", "forward_only")
    choose(browser, "control-other", "")
    assert get_text(browser, "runs") == ""
    browser.frame()
    assert browser.js(canvas) == canvas_before  # the cursor of the comparison is gone


def test_schedule_is_exported_and_copied(studio: Opener) -> None:
    browser = studio()
    browser.js(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; });"
        " return '#'; }; 0"
    )
    menus = "document.querySelectorAll('.actions select')"
    for menu, entry, holds in (
        (1, "command", "copied.startsWith('schedir draw one_f_one_b --ranks 4')"),
        (1, "python", "copied.includes(\"schedir.compile('one_f_one_b', ranks=4\")"),
        (1, "link", "copied.startsWith('http://127.0.0.1')"),
        (0, "sched", "saved.startsWith('schedir 1\\nprogram one_f_one_b')"),
        (0, "python", "saved.includes('def one_f_one_b(rank, ranks, microbatches)')"),
        (0, "csv", "saved.startsWith('0F0,0F1')"),
    ):
        browser.js(
            f"window.copied = window.saved = ''; {menus}[{menu}].value = '{entry}';"
            f"{menus}[{menu}].dispatchEvent(new Event('change')); 0"
        )
        browser.until(lambda holds=holds: bool(browser.js(holds)))  # type: ignore[misc]


def test_challenge_is_solved(studio: Opener) -> None:
    browser = studio()
    press(browser, "challenges-tab")
    wait_for_answer(browser, lambda: press(browser, "challenge-zero-bubble"))
    assert "Not yet: the span is 33, the goal is 27." in get_text(browser, "challenge-status")
    press(browser, "controls-tab")
    choose(browser, "control-schedule", "zb_h1")
    press(browser, "challenges-tab")
    assert "your schedule is optimal" in get_text(browser, "challenge-status")
    assert get_text(browser, "challenge-zero-bubble").startswith("\u2713")
    wait_for_answer(browser, lambda: press(browser, "challenge-a-hang"))
    assert "2 ranks wait" in get_text(browser, "problem")
    assert "warmup = min(rank" in get_value(browser, "editor")
    assert get_text(browser, "facts") == ""  # the timeline of the previous challenge is gone
    press(browser, "code-tab")
    run_code(browser, CODE)
    press(browser, "challenges-tab")
    assert "Solved: the span is 33" in get_text(browser, "challenge-status")
    wait_for_answer(browser, lambda: press(browser, "challenge-a-hang"))
    wait_for_answer(browser, lambda: press(browser, "leave-challenge"))
    assert browser.js("document.getElementById('challenge-status')") is None
    assert get_text(browser, "problem") == get_value(browser, "control-memory_limit") == ""
    assert "span 34.6" in get_text(browser, "facts") and "mine" in get_value(browser, "editor")
    browser.js("window.loadedBefore = 1")
    browser.call("Page.reload")
    browser.until(lambda: bool(browser.js(f"!window.loadedBefore && {ANSWERED} > 0")))
    press(browser, "challenges-tab")
    assert get_text(browser, "challenge-zero-bubble").startswith("\u2713")


def test_exported_page_works_without_server(chromium: Chromium, tmp_path: Path) -> None:
    export_page(Studio(), StudioState(options=DEFAULTS), str(tmp_path))
    chromium.console_messages.clear()
    chromium.requested_urls.clear()
    chromium.call("Page.navigate", url=(tmp_path / "index.html").as_uri())
    chromium.until(lambda: bool(chromium.js(f"{ANSWERED} > 0")))
    choose(chromium, "control-schedule", "zb_v")
    assert "This is zb_v" in get_text(chromium, "verdict")
    assert chromium.js("document.getElementById('control-ranks').disabled")
    wait_for_answer(
        chromium, lambda: drag(chromium, locate_time(chromium, 0.5), locate_time(chromium, 3))
    )
    assert "precomputed timelines" in get_text(chromium, "problem")
    chromium.key("b")
    chromium.until(lambda: "precomputed" in get_text(chromium, "selected"))
    size = {"height": 860, "deviceScaleFactor": 1, "mobile": False}
    chromium.call("Emulation.setDeviceMetricsOverride", width=390, **size)  # a phone
    outside = "[...document.querySelectorAll('*')].filter((e) => e.checkVisibility()"
    assert chromium.js(f"{outside} && e.getBoundingClientRect().right > 391).length") == 0
    chromium.call("Emulation.setDeviceMetricsOverride", width=1400, **size)
    assert (
        all(url.startswith("file:") for url in chromium.requested_urls)
        and chromium.console_messages == []
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1920])
def test_controls_have_names_and_keys_and_fit_width(
    studio: Opener, scheme: str, width: int
) -> None:
    browser = studio(scheme=scheme)
    size = {"height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", width=width, **size)
    for tab in ("controls", "code", "challenges"):
        press(browser, f"{tab}-tab")
        controls = (
            "[...document.querySelectorAll('button, input, select, textarea, canvas')]"
            ".filter((e) => e.checkVisibility())"
        )
        nameless = (
            f"{controls}.filter((e) => e.tabIndex < 0 && e.role !== 'tab' || !(e.ariaLabel "
            "|| e.labels?.length || e.innerText || e.title)).map((e) => e.outerHTML)"
        )
        assert browser.js(nameless) == []
        outside = f"{controls}.filter((e) => e.getBoundingClientRect().right > {width}).length"
        assert browser.js(outside) == 0
        assert browser.js(CUT_TEXTS) == []
    browser.call("Emulation.setDeviceMetricsOverride", width=1400, **size | {"height": 860})


def test_stopped_server_is_reported(studio: Opener) -> None:
    browser = studio()
    rejected = "Promise.reject(new Error('gone'))"
    for ranks, response in (
        ("3", rejected),
        ("5", f"Promise.resolve({{ ok: true, json: () => {rejected} }})"),
    ):
        browser.js(f"fetch = () => {response}; document.getElementById('problem').hidden = true; 0")
        enter(browser, "control-ranks", ranks)
        assert "The studio has stopped" in get_text(browser, "problem")


def test_interrupted_command_leaves_no_process(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "schedir", "studio", "zb_h1", "--no-browser"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    line = started.stdout.readline()
    assert re.match(r"studio: http://127\.0\.0\.1:\d+/\?token=.{20,}", line)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(10) == 130
    started.stdout.close()
    assert children and not [child for child in children if Path(f"/proc/{child}").exists()]
