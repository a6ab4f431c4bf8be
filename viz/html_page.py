"""Build the interactive page: one self-contained HTML file.

The page consists of the files in `page/`. The page contains the runs as packed columns of numbers.
The page of the studio and the notebook widget draw timelines with the same files.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

from schedir.io.files import atomic_write
from schedir.predict.timeline import Timeline
from schedir.viz.page_data import describe_runs, describe_texts

_SCRIPTS: Final = ("data.js", "relations.js", "scene.js", "paint.js", "words.js", "main.js")
_FUNCTION: Final = '(root, DATA) => {{\n"use strict";\n{}}}'
_WIDGET_SCRIPT: Final = """\
const show = {function};
function render({{ model, el }}) {{
  const host = el.appendChild(document.createElement("div"));
  const root = host.attachShadow({{ mode: "open" }});
  root.innerHTML = {body};
  show(root, JSON.parse(model.get("data")));
}}
export default {{ render }};
"""


def html(timeline: Timeline, other: Timeline | None = None) -> str:
    """Return the HTML page of a run, or of two runs between which a user can switch.

    The page opens offline and loads nothing from the network. Its Content-Security-Policy allows
    no style and no script except its own, by their hashes. Equal runs give equal pages.

    Args:
        timeline: The run.
        other: A second run with as many ranks. If the units of the two runs differ, the second run
            is scaled so that the mean busy time of a rank is the same in both runs, as in
            `compare`.

    Returns:
        The text of the HTML file.

    Raises:
        UsageError: The two runs have different numbers of ranks.

    Example:
        >>> import schedir
        >>> run = schedir.simulate(schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(2, 4)))
        >>> schedir.viz.html(run).splitlines()[0]
        '<!doctype html>'
    """
    runs = [timeline] if other is None else [timeline, other]
    return build_page(describe_runs(runs), **describe_texts(runs))


def build_page(
    data: Mapping[str, Any],
    *,
    title: str,
    summary: str = "",
    tables: Sequence[Mapping[str, Any]] = (),
    script: str = "",
    style: str = "",
    policy: str = "",
) -> str:
    """Return the HTML page that shows the data of one or two runs.

    Args:
        data: The result of `describe_runs`, and further keys for `script`.
        title: The title, as plain text.
        summary: The run in words, as plain text.
        tables: The tables, as `describe_texts` returns them.
        script: A script that runs in the scope of the page's own scripts.
        style: A style sheet for the elements that `script` adds.
        policy: Further directives of the Content-Security-Policy, each after a semicolon.

    Returns:
        The text of the HTML file.
    """
    style = read_page_file("page.css") + style
    script = (
        f"({_FUNCTION.format(_read_scripts() + script)})"
        '(document, JSON.parse(document.getElementById("data").textContent));\n'
    )
    policy = (
        f"default-src 'none'; script-src '{_hash_source(script)}'; style-src "
        f"'{_hash_source(style)}'; img-src data:; base-uri 'none'; form-action 'none'{policy}"
    )
    body = Template(read_page_file("timeline.html")).substitute(
        title=escape(title),
        summary=escape(summary),
        tables="".join(map(_format_table, tables)),
    )
    return Template(read_page_file("page.html")).substitute(
        policy=policy,
        title=escape(title),
        style=style,
        body=body,
        data=dump_json(data),
        script=script,
    )


def build_widget_script() -> str:
    """Return the ES module that shows a run in a notebook, for `anywidget`."""
    style = f"<style>{read_page_file('page.css')}</style>"
    body = Template(read_page_file("timeline.html")).substitute(title="", summary="", tables="")
    return _WIDGET_SCRIPT.format(
        function=_FUNCTION.format(_read_scripts()), body=dump_json(style + body)
    )


def read_page_file(name: str) -> str:
    """Return the text of a file of the folder `page`.

    Args:
        name: The name of the file.
    """
    return (files("schedir.viz") / "page" / name).read_text(encoding="utf-8")


def _read_scripts() -> str:
    return "\n".join(map(read_page_file, _SCRIPTS))


def save_html(path: str | Path, timeline: Timeline, other: Timeline | None = None) -> None:
    """Write the page of `html` to a file, completely or not at all.

    Args:
        path: The file.
        timeline: The run.
        other: A second run, as for `html`.

    Raises:
        UsageError: The file cannot be written, or the runs have different numbers of ranks.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import schedir
        >>> run = schedir.simulate(schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(2, 4)))
        >>> with TemporaryDirectory() as folder:
        ...     schedir.viz.save_html(f"{folder}/gpipe.html", run)
        ...     print(*[path.name for path in Path(folder).iterdir()])
        gpipe.html
    """
    text = html(timeline, other)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def dump_json(data: object) -> str:
    """Return data as JSON without `<`, so that no string in it can end the script element.

    Args:
        data: The data.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _format_table(table: Mapping[str, Any]) -> str:
    headings = "".join(f'<th scope="col">{escape(name)}</th>' for name in table["headings"])
    rows = "".join(
        f'<tr><th scope="row">{rank}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for rank, *cells in table["rows"]
    )
    return (
        f"<table><caption>{escape(table['caption'])}</caption>"
        f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _hash_source(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
