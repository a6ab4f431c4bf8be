"""Pages that are generated are fresh, and what the README shows runs."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from docs.generate import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_fresh(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: python docs/generate.py"


ROOT = DOCS.parent
README = (ROOT / "README.md").read_text()
BLOCKS = [b.split("\n", 1) for b in README.split("```")[1::2]]


def test_readme_shows_the_example_as_it_is() -> None:
    shown = [body for kind, body in BLOCKS if kind == "python"]
    assert (ROOT / "examples" / "mine.py").read_text() in shown
    code = [line for line in shown[0].splitlines() if line.strip()]
    assert len(code) < 15


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, body in BLOCKS:
        if kind == "python":
            exec(compile(body, "README.md", "exec"), {})
    assert (tmp_path / "interleaved.png").stat().st_size > 10_000


def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedir.__main__ import main

    lines = [line.split() for _, body in BLOCKS for line in body.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["schedir"] and words[1] != "train"]
    assert {words[0] for words in commands} == {
        "print", "check", "simulate", "explain", "draw", "compare",
    }  # fmt: skip
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for words in commands:
        assert main(words) == 0, words


def test_a_real_run_is_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `explain` prints of the run that the page shows, and what `import` counted in it."""
    from schedir.__main__ import main

    monkeypatch.chdir(ROOT / "examples")
    imported, explained = re.findall(
        r"```text\n(.*?)```", (DOCS / "how-to" / "import-traces.md").read_text(), re.S
    )
    assert main(["explain", "traced.timeline"]) == 0
    assert capsys.readouterr().out == explained
    said = [
        re.search(r"[\d.]+% of 4 ranks x [\d.]+ s is idle", text) for text in (imported, explained)
    ]
    assert said[0] and said[1] and said[0][0] == said[1][0]


def test_readme_letters_are_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.__main__ import main

    monkeypatch.setenv("COLUMNS", "80")
    (shown,) = [body for _, body in BLOCKS if body.startswith("$ schedir draw")]
    command, _, chart = shown.partition("$ schedir ")[2].partition("\n")
    assert main(command.split()) == 0
    assert capsys.readouterr().out == chart


def test_readme_error_is_what_is_printed() -> None:
    """The one in the README is a golden text."""
    golden = (ROOT / "tests" / "golden" / "refused" / "deadlock.txt").read_text()
    assert golden.split("-" * 60 + "\n")[1] in [body for _, body in BLOCKS]


def test_links_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for link, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" in link:
                continue
            target = page.parent / link if link else page
            assert target.exists(), (page, link)
            assert not place or place in places(target.read_text()), (page, link, place)


def test_every_page_has_a_place_in_the_site() -> None:
    """In the tree of docs/conf.py, under one page; that the tree holds, sphinx says."""
    (tree,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((DOCS / "conf.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "TREE"
    ]
    below = [one for captions in tree.values() for pages in captions.values() for one in pages]
    named = [re.sub(r".*<(.*)>", r"\1", one).removeprefix("/") for one in below]
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(ROOT).with_suffix(""))
        times = sum(fnmatch(name, one) for one in named if name not in tree or "*" not in one)
        assert times == (name != "docs/index"), f"{name}: is {times} times in TREE of docs/conf.py"


def places(page: str) -> set[str]:
    """What links may name of a page: its headings, those of the same name with a number."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", code.sub("", page), re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [slugs[:k].count(slug) for k, slug in enumerate(slugs)]
    return {f"{slug}-{k}" if k else slug for slug, k in zip(slugs, before, strict=True)}


def test_files_that_pages_name_are_there() -> None:
    folders = ("schedir", "kernels", "viz", "tests", "examples", "docs", "benchmarks")
    files = [str(file) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for named in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text()):
            assert any(file.endswith(f"/{named}") for file in files), f"{page.name} names {named}"
