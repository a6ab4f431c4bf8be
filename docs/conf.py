"""Configure the site that sphinx builds from these pages with `make docs`.

Pages are plain Markdown, which a code host can show.  So this file lists the tree of pages.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs import api_page  # noqa: E402

# Page -> caption -> the pages below it.  Sphinx warns about a page that is not in this tree.  The
# warning counts as an error.
TREE: dict[str, dict[str, list[str]]] = {
    "docs/index": {
        "Tutorials": [
            "/docs/tutorials/first-schedule",
            "/docs/tutorials/train-a-model",
            "/docs/tutorials/read-a-trace",
        ],
        "How-to guides": [
            "/docs/how-to/write-a-schedule",
            "/docs/how-to/design-in-the-browser",
            "/docs/how-to/choose-a-schedule",
            "/docs/how-to/search-for-a-schedule",
            "/docs/how-to/test-a-schedule",
            "/docs/how-to/draw-pictures",
            "/docs/how-to/run-in-torch",
            "/docs/how-to/run-in-megatron",
            "/docs/how-to/train-from-a-configuration",
            "/docs/how-to/train-your-own-model",
            "/docs/how-to/cut-a-hugging-face-model",
            "/docs/how-to/run-several-programs",
            "/docs/how-to/save-and-resume",
            "/docs/how-to/compare-gradients",
            "/docs/how-to/plan-a-cluster",
            "/docs/how-to/fit-in-memory",
            "/docs/how-to/shard-with-zero",
            "/docs/how-to/offload-to-the-host",
            "/docs/how-to/split-a-stage-into-segments",
            "/docs/how-to/hide-expert-parallelism",
            "/docs/how-to/speed-up-a-run",
            "/docs/how-to/import-traces",
            "/docs/how-to/instrument-a-trainer",
            "/docs/how-to/find-a-hang",
        ],
        "Reference": [
            "Command line </docs/reference/command-line>",
            "Python API </docs/reference/api>",
            "Errors </docs/reference/errors>",
            "Configuration </docs/reference/configuration>",
            "Schedules </docs/reference/schedules>",
            "Instructions </docs/reference/instructions>",
            "File formats </docs/reference/file-formats>",
            "Planner </docs/reference/planner>",
            "Models </docs/reference/models>",
            "Gallery </docs/reference/gallery>",
            "Museum of hangs </docs/reference/museum>",
            "Glossary </docs/reference/glossary>",
        ],
        "Explanation": [
            "/docs/explanation/design",
            "/docs/explanation/checker",
            "/docs/explanation/progress-models",
            "/docs/explanation/lower-bounds",
            "/docs/explanation/memory-accounting",
            "/docs/explanation/same-bits",
            "/docs/explanation/split-backward",
            "/docs/explanation/windowed-attention",
            "/docs/decisions/README",
            "/docs/results/README",
        ],
        "Project": ["/CONTRIBUTING", "/tests/README", "/kernels/README", "/CHANGELOG"],
    },
    "docs/decisions/README": {"": ["/docs/decisions/*"]},
    "docs/results/README": {"": ["/docs/results/*"]},
}

project = "schedir"
copyright = "the authors of schedir"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "kernels/*.md"]
exclude_patterns = [".*", "build", "schedir"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # some types in signatures are not public
highlight_language = "none"
myst_heading_anchors = 4  # levels of headings that get anchors, as on a code host

default_role = "code"  # docstrings put names between single backquotes
add_module_names = False  # names are as users write them after `schedir.`
toc_object_entries = False  # the headings of docs/reference/api.md are enough
maximum_signature_line_length = 88
autodoc_default_options = {"member-order": "bysource"}
napoleon_use_ivar = True  # autodoc describes the attributes themselves
autodoc_preserve_defaults = False  # `compile` lists options that its source does not
autodoc_type_aliases = {name: name for name in ("ArrayLike", "PerStage", "Placement", "Which")}

html_theme = "furo"
html_title = "schedir"
html_logo = html_favicon = "images/logo.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


SOURCES: dict[str, str] = {}  # the text of each file that pages link to


def expand_names(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the list of public names in docs/reference/api.md by directives of autodoc."""
    if page == "docs/reference/api":
        source[0] = api_page.SITE()


TYPE_REPLACEMENTS = {  # pattern in signatures of autodoc -> replacement
    r"<factory>": "...",  # `<factory>` is not a Python expression
    r"float \| tuple\[float, \.\.\.\] \| tuple\[tuple\[float, \.\.\.\], \.\.\.\]": "PerStage",
    r"TypeAliasForwardRef\('(\w+)'\)": r"\1",
    r"~numpy\.ndarray\[tuple\[.*?\], ~numpy\.dtype\[~numpy\.(\w+)\]\]": r"NDArray[\1]",
}


def shorten_types(
    app: Sphinx, what: str, name: str, obj: object, options: object, *texts: str | None
) -> tuple[str | None, ...]:
    """Write the types of a signature as the source writes them."""
    for pattern, replacement in TYPE_REPLACEMENTS.items():
        texts = tuple(text and re.sub(pattern, replacement, text) for text in texts)
    return texts


def keep_first_line(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Restore the first line of a property with a colon. napoleon parses it as `type: text`."""
    for k, line in enumerate(lines):
        if what in ("attribute", "data", "property") and line.startswith(":type: "):
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            del lines[k:]
            return


def add_tree(app: Sphinx, page: str, source: list[str]) -> None:
    """Add a hidden table of contents with the pages below a page."""
    for caption, child_pages in TREE.get(page, {}).items():
        lines = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        source[0] += "\n\n```{toctree}\n" + "\n".join([*lines, "", *child_pages]) + "\n```\n"


def find_source_uri(app: Sphinx, page: str, target: str) -> str:
    """Return the URI of the site's page for a linked source file, or an empty string."""
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
    """Replace links to source files and folders by links to their pages on the site."""
    page = app.env.current_document.docname
    for node in [*tree.findall(download_reference), *tree.findall(pending_xref)]:
        target = node["reftarget"]
        if node.get("refdomain") == "doc" and target not in app.env.found_docs:
            target = posixpath.relpath(f"{target}.md", posixpath.dirname(page))
        if uri := find_source_uri(app, page, target):
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


SOURCE_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title} - schedir</title>
<link rel="stylesheet" href="{root}/_static/pygments.css">
<p><a href="{root}/docs/index.html">schedir</a></p>
<h1 style="overflow-wrap: anywhere">{title}</h1>
<div style="overflow-x: auto">{code}</div>
</html>
"""


def show_files(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """Write a page for each source file in `SOURCES`, and yield a redirect to the first page.

    The pages of source files have no sidebar, which would take a third of the time of the build.
    """
    redirect = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
    yield "index", {"title": "schedir", "body": "", "metatags": redirect}, "page.html"
    assert isinstance(app.builder, StandaloneHTMLBuilder)
    for path, text in sorted(SOURCES.items()):
        language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "none")
        code = app.builder.highlighter.highlight_block(text, language)
        page = Path(app.outdir, f"source/{path}.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        root = posixpath.relpath(".", f"source/{posixpath.dirname(path)}")
        page.write_text(SOURCE_PAGE.format(title=path, root=root, code=code))


def export_studio(app: Sphinx, exception: Exception | None) -> None:
    """Write the page of `schedir studio` with all built-in schedules, which the gallery embeds."""
    if exception is None and isinstance(app.builder, StandaloneHTMLBuilder):
        folder = Path(app.outdir, "docs/reference/studio")
        command = [sys.executable, "-m", "schedir", "studio", "--export", str(folder)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def setup(app: Sphinx) -> None:
    app.connect("source-read", expand_names, priority=400)  # before the tree is added
    app.connect("source-read", add_tree)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("autodoc-process-docstring", keep_first_line, priority=600)  # after napoleon
    app.connect("doctree-read", link_source, priority=100)  # before downloads are collected
    app.connect("html-collect-pages", show_files)
    app.connect("build-finished", export_studio)
