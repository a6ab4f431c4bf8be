"""Tests that the site from `make docs` is complete, and is readable on a phone and a desktop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium
from tests.cases import cases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, and build the site if necessary."""
    if site_folder := os.environ.get("SCHEDIR_SITE"):
        return Path(shutil.copytree(ROOT / site_folder, tmp_path_factory.mktemp("made") / "site"))
    recipe = r"^\t\$\(BIN\)/sphinx-build (.*) \. build/site$"
    (flags,) = re.findall(recipe, (ROOT / "Makefile").read_text(), re.M)
    folder = tmp_path_factory.mktemp("site")
    completed = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags.split(), ".", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return folder


def test_pages_load_fully_and_fit_width(chromium: Chromium, site: Path) -> None:
    """Pages have no broken images, fit the width, and request nothing from other hosts.

    Each page is loaded once, in the narrow window. The wide window shows the same page again.
    A normal run loads every third page, and every sixth page of decisions and results, because most
    pages have equal elements.
    """
    (site / "index.html").unlink(missing_ok=True)  # it redirects to the first page
    studio = site / "docs/reference/studio/index.html"  # the gallery embeds this page
    always = [studio, site / "source" / "schedir" / "ir" / "program.py.html"]
    records = sorted([*site.glob("docs/decisions/*.html"), *site.glob("docs/results/*.html")])
    html_pages = {page for page in site.rglob("*.html") if "source" not in page.parts}
    others = sorted(html_pages - {*records, studio})
    pages = [*always, *cases(others[::3], others), *cases(records[::6], records)]
    assert len(pages) > 20 and all(page.is_file() for page in pages)
    for page in pages:
        chromium.console_messages.clear()
        chromium.requested_urls.clear()
        set_width(chromium, WIDTHS[0])
        chromium.call("Page.navigate", url=page.as_uri())
        chromium.until(lambda: chromium.js("document.readyState") == "complete")
        name = page.relative_to(site)
        broken = "[...document.images].filter((one) => !one.naturalWidth).map((one) => one.src)"
        for width in WIDTHS:
            set_width(chromium, width)
            chromium.frame()
            assert chromium.js("window.innerWidth") == width, name
            assert chromium.js(broken) == [], name
            assert chromium.js("document.documentElement.scrollWidth") <= width, (name, width)
        assert chromium.console_messages == [], name
        assert all(url.startswith(("file:", "data:")) for url in chromium.requested_urls), name


WIDTHS = (360, 1280)  # pixels, of a phone and of a desktop


def set_width(chromium: Chromium, width: int) -> None:
    """Give the window the width of a phone or of a desktop."""
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
