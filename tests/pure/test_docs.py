"""Tests that generated pages are current, and that the README shows the real output."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from docs.generate import PAGES
from docs.schedules_page import WHEN
from tests.cases import cases
from tests.tutorial import read_steps

DOCS = Path(__file__).parents[2] / "docs"


# A normal run omits the pages whose commands take long, and pictures that resemble others.
SLOW_PICTURES = (
    "plan-memory", "frontier", "which-schedule", "gathers", "experts-filled",
    "compared", "seq1f1b", "tradeoff", "parts-filled", "parts-whole", "offload", "bitpipe",
    "memory", "first",
)  # fmt: skip
TORCH_PAGES = {"reference/api.md"}  # tests/cpu/test_torch_pages.py makes them
SLOW_PAGES = {
    "how-to/plan-a-cluster.md",
    "images/plan-times.svg",
    "images/windows.svg",
    *(f"images/{name}.svg" for name in SLOW_PICTURES),
    *(f"images/schedules/{name}.svg" for name in WHEN if name not in ("gpipe", "zb_v")),
}


@pytest.mark.parametrize(
    "name",
    cases([name for name in PAGES if name not in SLOW_PAGES | TORCH_PAGES], sorted(SLOW_PAGES)),
)
def test_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: python docs/generate.py"


def test_each_picture_is_drawn_by_a_page() -> None:
    """The other pictures are those of the logo, of benchmarks, and of a measured run."""
    pictures = {str(path.relative_to(DOCS)) for path in DOCS.glob("images/**/*.svg")}
    others = {f"images/{name}.svg" for name in ("logo", "models", "planner-h100", "real-run")}
    assert pictures - PAGES.keys() == others
    assert PAGES.keys() >= SLOW_PAGES


ROOT = DOCS.parent
README = (ROOT / "README.md").read_text()
README_BLOCKS = [b.split("\n", 1) for b in README.split("```")[1::2]]


def test_readme_code_prints_documented_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code has at most ten lines, prints the output on the page, and writes its picture."""
    monkeypatch.chdir(tmp_path)
    (code,) = [body for kind, body in README_BLOCKS if kind == "python"]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert f"It prints `{capsys.readouterr().out.strip()}`." in README
    assert (tmp_path / "my_1f1b.png").stat().st_size > 10_000


def test_readme_commands_print_documented_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.__main__ import main

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    commands = [step for step in read_steps(README) if step.kind == "command"]
    assert [step.argv[0] for step in commands] == ["draw", "check"]
    for step in commands:
        assert main(step.argv) == (2 if "Error: " in step.prints else 0), step.text
        out, err = capsys.readouterr()
        assert out + err == step.prints, step.text


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_import_traces_page_matches_explain_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The idle share that the page shows as output of `import` is that of its recorded run."""
    from schedir.__main__ import main

    monkeypatch.chdir(ROOT / "examples")
    page = (DOCS / "how-to" / "import-traces.md").read_text()
    (imported,) = re.findall(r"```text\n(.*?)```", page, re.S)
    shown = re.search(r"[\d.]+% of 4 ranks x [\d.]+ s is idle", imported)
    assert main(["explain", "traced.timeline"]) == 0
    assert shown and shown[0] in capsys.readouterr().out


def test_links_have_existing_targets() -> None:
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" in link:
                continue
            target = page.parent / link if link else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in list_link_targets(target.read_text()), (
                page,
                link,
                anchor,
            )


def test_pages_are_listed_once_in_site_tree() -> None:
    """Each page is once in the tree of docs/conf.py. Sphinx checks the tree itself."""
    (tree,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((DOCS / "conf.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "TREE"
    ]
    entries = [
        entry for captions in tree.values() for pages in captions.values() for entry in pages
    ]
    patterns = [re.sub(r".*<(.*)>", r"\1", entry).removeprefix("/") for entry in entries]
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(ROOT).with_suffix(""))
        times = sum(
            fnmatch(name, entry) for entry in patterns if name not in tree or "*" not in entry
        )
        assert times == (name != "docs/index"), f"{name}: is {times} times in TREE of docs/conf.py"


def list_link_targets(page: str) -> set[str]:
    """Return the link targets of a page: its headings, with numbers for equal names, and ids."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", code.sub("", page), re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    counts_before = [slugs[:k].count(slug) for k, slug in enumerate(slugs)]
    numbered = {f"{slug}-{k}" if k else slug for slug, k in zip(slugs, counts_before, strict=True)}
    return numbered | {*re.findall(r'<a id="([^"]+)">', page)}


def test_news_fragments_have_changelog_types() -> None:
    """A fragment is one paragraph without a bullet, as changes/README.md describes."""
    towncrier = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    types = [kind["directory"] for kind in towncrier["type"]]
    assert (
        re.findall(r"^\| `(\w+)` \|", (ROOT / "changes" / "README.md").read_text(), re.M) == types
    )
    for fragment in set((ROOT / towncrier["directory"]).iterdir()) - {ROOT / "changes/README.md"}:
        assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(types)})\.md", fragment.name), fragment.name
        text = fragment.read_text().strip()
        assert text and "\n\n" not in text and text[:2] not in ("- ", "* "), fragment.name
    assert "<!-- towncrier release notes start -->" in (ROOT / towncrier["filename"]).read_text()


def test_python_files_named_in_pages_exist() -> None:
    folders = ("schedir", "kernels", "viz", "tests", "examples", "docs", "benchmarks")
    files = [str(file) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for named in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text()):
            assert any(file.endswith(f"/{named}") for file in files), f"{page.name} names {named}"
