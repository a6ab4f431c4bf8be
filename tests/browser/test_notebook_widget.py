"""Tests of the notebook widget in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schedir.compiler.compile import compile
from schedir.extras import MissingPackageError
from schedir.predict.simulate import simulate
from schedir.viz.html_page import build_widget_script, dump_json
from schedir.viz.page_data import describe_runs, describe_texts
from tests.browser.chromium import Chromium


def test_notebook_widget_shows_timeline(chromium: Chromium, tmp_path: Path) -> None:
    run = simulate(compile("gpipe", ranks=2, microbatches=2))
    data = describe_runs([run]) | describe_texts([run])
    script = build_widget_script().replace("export default { render };", "")
    call = f"const model = {{ get: () => {json.dumps(dump_json(data))} }};\n" + (
        "for (const el of document.querySelectorAll('div')) render({ model, el });"
    )
    page = tmp_path / "cell.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><div></div><div></div>"
        f"<script type=module>{script}{call}</script>",
        encoding="utf-8",
    )
    chromium.console_messages.clear()
    chromium.call("Page.navigate", url=page.as_uri())
    roots = "[...document.querySelectorAll('div > div')].map((host) => host.shadowRoot)"
    ready = f"{roots}.filter((root) => root.host.dataset.ready).length"
    chromium.until(lambda: bool(chromium.js(f"{ready} === 2")))
    dark = f"{roots}.map((root) => root.host.classList.contains('dark'))"
    assert chromium.js(dark) == [False, False]
    for is_light in (False, True):  # JupyterLab sets this attribute for its theme.
        chromium.js(f"document.body.dataset.jpThemeLight = {json.dumps(is_light)}")
        chromium.frame()
        assert chromium.js(dark) == [not is_light] * 2
    words = f"{roots}.map((root) => root.querySelector('#facts').innerText)"
    assert (
        all("bubble" in shown for shown in chromium.js(words)) and chromium.console_messages == []
    )


def test_widget_has_title_or_hints_at_anywidget() -> None:
    from schedir import viz

    run = simulate(compile("gpipe", ranks=2, microbatches=2))
    try:
        shown: Any = viz.widget(run)
    except MissingPackageError as error:
        assert "schedir[notebook]" in error.hint
    else:
        assert json.loads(shown.data)["title"] == "gpipe"
