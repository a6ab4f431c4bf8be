"""How sphinx makes the site of these pages: `make docs`.

Pages are Markdown that a code host shows as it is.  So the tree of pages is here, and not in them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

ROOT = Path(__file__).parents[1]

# Under each page, by caption, what follows it.  A page that is nowhere here is a warning, an error.
TREE: dict[str, dict[str, list[str]]] = {
    "docs/index": {
        "": ["Your first schedule </docs/tutorial>", "Gallery </docs/gallery>"],
        "What brings you here": [
            "/docs/inventing",
            "/docs/slow-run",
            "/docs/hanging-run",
            "/docs/training",
            "/docs/planner",
            "/docs/testing",
        ],
        "Look it up": [
            "Names of Python </docs/api>",
            "Instructions and models </docs/ir>",
            "Settings of a training run </docs/config>",
            "Words </docs/naming>",
        ],
        "Behind it": ["/docs/design", "/docs/results/README", "/CONTRIBUTING", "/CHANGELOG"],
    },
    "docs/gallery": {"": ["/docs/schedules", "/docs/pictures"]},
    "docs/inventing": {"": ["/docs/torch"]},
    "docs/slow-run": {
        "": [
            "/docs/real-runs",
            "/docs/instrument",
            "/docs/which-schedule",
            "/docs/search",
            "/docs/traces",
        ]
    },
    "docs/hanging-run": {"": ["/docs/where", "/docs/museum", "/docs/progress-models"]},
    "docs/training": {
        "": [
            "/docs/own-model",
            "/docs/models",
            "/docs/programs",
            "/docs/checkpoints",
            "/docs/memory",
            "/docs/zero",
            "/docs/offload",
            "/docs/parts",
            "/docs/windows",
            "/docs/splitting",
            "/docs/same-bits",
        ]
    },
    "docs/testing": {"": ["/docs/gradients"]},
    "docs/design": {"": ["/docs/decisions/README", "/kernels/README"]},
    "docs/decisions/README": {"": ["/docs/decisions/*"]},
    "docs/results/README": {"": ["/docs/results/*"]},
    "CONTRIBUTING": {"": ["/tests/README"]},
}

project = "schedir"
copyright = "the authors of schedir"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "kernels/*.md"]
exclude_patterns = [".*", "build", "schedir"]
nitpicky = True
highlight_language = "none"
myst_heading_anchors = 4  # of these levels, named as a code host names them

html_theme = "furo"
html_title = "schedir"
html_logo = html_favicon = "images/logo.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


SOURCES: dict[str, str] = {}  # the text of each file that pages link to


def add_tree(app: Sphinx, page: str, source: list[str]) -> None:
    """Say at the end of a page what is below it."""
    for caption, below in TREE.get(page, {}).items():
        lines = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        source[0] += "\n\n```{toctree}\n" + "\n".join([*lines, "", *below]) + "\n```\n"


def shown(app: Sphinx, page: str, target: str) -> str:
    """Where a link of a page to source leads: a page of the site that shows it, if it is text."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if (ROOT / path / "README.md").is_file():
        return app.builder.get_relative_uri(page, f"{path}/README")
    if (ROOT / path).is_dir():
        path += "/__init__.py"
    if not (ROOT / path).is_file() or Path(path).suffix == ".timeline":
        return ""
    SOURCES[path] = (ROOT / path).read_text()
    return app.builder.get_relative_uri(page, f"source/{path}")


def link_source(app: Sphinx, tree: nodes.document) -> None:
    """Links to files, which sphinx would offer for download, and to folders, unknown to it."""
    page = app.env.current_document.docname
    for node in [*tree.findall(download_reference), *tree.findall(pending_xref)]:
        target = node["reftarget"]
        if node.get("refdomain") == "doc" and target not in app.env.found_docs:
            target = posixpath.relpath(f"{target}.md", posixpath.dirname(page))
        if uri := shown(app, page, target):
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


def show_files(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """A page for each file that is linked to, and the way from the folder to the first page."""
    away = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
    yield "index", {"title": "schedir", "body": "", "metatags": away}, "page.html"
    assert isinstance(app.builder, StandaloneHTMLBuilder)
    for path, text in sorted(SOURCES.items()):
        language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "none")
        code = app.builder.highlighter.highlight_block(text, language)
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_tree)
    app.connect("doctree-read", link_source, priority=100)  # before downloads are collected
    app.connect("html-collect-pages", show_files)
