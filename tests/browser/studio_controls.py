"""Functions that read and operate the studio in a browser, for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.browser.chromium import Chromium

Opener = Callable[..., Chromium]  # The fixture `studio`: a function that opens a studio.
# The number of answers of the studio that the page has drawn.
ANSWERED = "+(document.documentElement?.dataset.answered || 0)"


def get_text(browser: Chromium, name: str) -> str:
    shown = f"((e) => e.checkVisibility() ? e.innerText : '')(document.getElementById('{name}'))"
    return re.sub("[\u2000-\u200a]+", " ", str(browser.js(shown)))


def get_value(browser: Chromium, name: str) -> str:
    return str(browser.js(f"document.getElementById('{name}').value"))


def wait_for_answer(browser: Chromium, act: Callable[[], object]) -> None:
    """Run `act`, and wait until the studio's answer to it is drawn."""
    before = browser.js(ANSWERED)
    act()
    browser.until(lambda: bool(browser.js(f"{ANSWERED} > {before}")))


def enter(browser: Chromium, name: str, entered: str) -> None:
    """Type a text into a control, in place of its present text."""
    element, command = f"document.getElementById('{name}')", "document.execCommand"
    browser.js(f"{element}.focus(); {element}.select()")
    typed = f"{command}('insertText', false, {json.dumps(entered)}) || {command}('delete')"
    wait_for_answer(browser, lambda: browser.js(typed))
    browser.js("document.activeElement.blur()")


def choose(browser: Chromium, name: str, chosen: str) -> None:
    """Choose an entry of a list."""
    chosen, element = json.dumps(chosen), f"document.getElementById('{name}')"
    events = "".join(f"{element}.dispatchEvent(new Event('{e}'));" for e in ("input", "change"))
    wait_for_answer(browser, lambda: browser.js(f"{element}.value = {chosen}; {events} 0"))


def run_code(browser: Chromium, code: str) -> None:
    """Type code into the editor, and run it."""
    type_code(browser, code)
    wait_for_answer(browser, lambda: press(browser, "run-code"))


def type_code(browser: Chromium, code: str) -> None:
    browser.js("document.getElementById('editor').focus()")
    browser.js(
        "document.getElementById('editor').select();"
        f"document.execCommand('insertText', false, {json.dumps(code)})"
    )


def press(browser: Chromium, name: str) -> None:
    left, top = browser.js(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
        f"(document.getElementById('{name}').getBoundingClientRect())"
    )
    browser.click(left, top)


def locate_time(browser: Chromium, t: float, rank: int = 0) -> tuple[float, float]:
    """Return the point of a time on the row of a rank, when the complete run is in view."""
    left, top, width = browser.js(
        "(({x, y, width}) => [x, y, width])(document.getElementById('canvas')"
        ".getBoundingClientRect())"
    )
    span = float(re.search(r"span\s+([\d.]+)", get_text(browser, "facts")).group(1))  # type: ignore[union-attr]
    rank_height = 128 if rank else 0  # height of a rank, with its messages and curves
    return left + 96 + (t / span + 0.005) / 1.02 * (width - 96), top + 70 + 25 + rank * rank_height


def drag(browser: Chromium, start: tuple[float, float], end: tuple[float, float]) -> None:
    browser.mouse("mouseMoved", *start)
    browser.mouse("mousePressed", *start, button="left", clickCount=1)
    for part in (0.5, 1):
        x = start[0] + part * (end[0] - start[0])
        browser.mouse("mouseMoved", x, end[1], button="left", buttons=1)
    browser.mouse("mouseReleased", *end, button="left", clickCount=1)
