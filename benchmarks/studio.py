"""Measure the time from a change of a studio's slider to the new picture, in a real browser.

    python benchmarks/studio.py [--changes N]

For each size, a headless Chromium opens a studio on this machine. The script moves two sliders N
times each: the cost of a backward, and the number of microbatches. It begins the next move when the
browser has painted the picture. A time is from the event of the slider until the browser has
painted the new picture, on the clock of the browser. "answer" is the processor time of the Python
process for a change: compile, check, simulate, bound and JSON. The browser needs further processor
time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from threading import Thread
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse, print_header, print_row, report_missing
from schedir.commands.studio import DEFAULTS, load_compiled_loops
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.server import StudioServer
from schedir.commands.studio.state import StudioState
from tests.browser.chromium import Chromium, found

# Ranks and microbatches of `one_f_one_b` with about 100, 1,000 and 5,000 instructions.
SIZES = ((4, 5), (8, 23), (8, 113))
WARM_UP_CHANGES = 3  # changes before the measurement, in which the browser compiles its scripts
# Moves a slider by one step, back and forth, and returns milliseconds until each picture.
MEASURE = """
(async (name, changes) => {
  const slider = document.getElementById(`slider-${name}`), times = [], first = +slider.value;
  for (let n = 0; n < changes; n++) {
    const painted = new Promise((done) => {
      const seen = new MutationObserver(() => {
        seen.disconnect();
        requestAnimationFrame(() => setTimeout(() => done(performance.now())));
      });
      seen.observe(document.documentElement, { attributeFilter: ["data-answered"] });
    });
    const begin = performance.now();
    slider.value = n % 2 ? first : first + +slider.step;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    times.push(await painted - begin);
  }
  return times;
})"""


@contextmanager
def open_studio(path: str, ranks: int, microbatches: int) -> Iterator[Chromium]:
    """Open a studio in a browser, and yield the browser."""
    options = DEFAULTS | {"ranks": str(ranks), "microbatches": str(microbatches)}
    studio = Studio()
    load_compiled_loops(studio)
    server = StudioServer(studio, StudioState(options=options).to_json())
    Thread(target=server.serve_forever, daemon=True).start()
    with Chromium(path, 1280, 800) as browser:
        browser.call("Page.navigate", url=server.url)
        browser.until(lambda: bool(browser.js("document.documentElement?.dataset.answered > 0")))
        yield browser
    server.shutdown()
    server.server_close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--changes", type=int, default=100, help="number of changes of each slider (100)"
    )
    args = parse(parser, argv, changes=4)
    path = found()
    if path is None:
        return report_missing("needs Chromium: apt-get install chromium", args.smoke)
    print_header(
        "instructions", "slider", "changes", "median, ms", "95th percentile, ms", "answer, ms"
    )
    for ranks, microbatches in SIZES[: 1 if args.smoke else None]:
        with open_studio(path, ranks, microbatches) as browser:
            instructions = browser.js("document.getElementById('summary').innerText").split(", ")[4]
            for slider, label in (("B", "cost of B"), ("microbatches", "microbatches")):
                begin, changes = process_time(), args.changes + WARM_UP_CHANGES
                times = browser.js(f"{MEASURE}('{slider}', {changes})")[WARM_UP_CHANGES:]
                answer = 1000 * (process_time() - begin) / changes
                figures = median(times), quantiles(times, n=20)[-1], answer
                count = instructions.split()[0]
                print_row(count, label, len(times), *(f"{time:.0f}" for time in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
