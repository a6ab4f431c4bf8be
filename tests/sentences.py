"""Count the sentences that are hard to read: `python -m tests.sentences [--list AREA]`.

A sentence counts if it has more than 30 words, if it begins with a word such as "What" and is no
question, or if it has a word that the style avoids because it makes things speak or stay nameless.
Titles, labels, code and tables are no sentences.  The check fails if the share of an area is above
its budget.  A budget is only ever lowered.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS: Final = 30
OPENINGS: Final = frozenset(["what", "who", "whether", "of", "how", "that"])
# Words that make things speak, know or look, or that stand in for the name of an actor.
AVOIDED: Final = re.compile(
    r"\b(nobody|somebody|whoever|anew|told|tells|said|says|knows|lies|stands|holder|holders|beside|"
    r"whole|held|piece|pieces|room|tape|meets|asks|let go|lets go|of which|that which|by itself|"
    r"so many)\b"
)
# The largest share of hard sentences, by area, in percent.
BUDGET: Final = {"docstrings": 0.2, "comments": 0.5, "messages": 0.2, "pages": 0.3}
PRODUCT: Final = ("schedir", "kernels", "viz")
_SENTENCE_GAP = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(0-9])")
_CODE = re.compile(r"`[^`]*`|\(https?:[^)]*\)|https?:\S+|\"[^\"]*\"")
_SECTION = re.compile(
    r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|References|Note|Notes):$"
)
_ENTRY = re.compile(r"^\*{0,2}[\w., `\[\]*]{1,60}?: ")


class Sentence(NamedTuple):
    """A sentence, the file that has it, and the line where its text begins."""

    file: str
    line: int
    text: str


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph: they end with a period, and have three words or more."""
    for part in _SENTENCE_GAP.split(" ".join(text.split())):
        if len(part.split()) >= 3 and part.rstrip(')"*_').endswith((".", "!", "?", ":")):
            yield part


def docstring_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the entries of a docstring, without examples and section titles."""
    paragraph: list[str] = []
    in_example = False
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith((">>>", "...")):
            in_example = True
        elif _SECTION.match(stripped):
            in_example = stripped.startswith("Example")
        elif not stripped:
            in_example = False
        begins_entry = bool(_ENTRY.match(stripped)) or stripped.startswith(("- ", "* "))
        if not stripped or in_example or _SECTION.match(stripped) or begins_entry:
            if paragraph:
                yield " ".join(paragraph)
            paragraph = []
        if stripped and not in_example and not _SECTION.match(stripped):
            paragraph.append(_ENTRY.sub("", stripped) if begins_entry else stripped)


def is_hard(sentence: str) -> bool:
    """Return whether a sentence is long, begins vaguely, or has a word that the style avoids."""
    plain = _CODE.sub("x", sentence)
    words = plain.split()
    opening = words[0].strip("(*_\"'").lower()
    vague = opening in OPENINGS and not plain.rstrip('"*_)').endswith("?")
    return len(words) > MAX_WORDS or vague or bool(AVOIDED.search(plain.lower()))


def modules() -> list[Path]:
    """Return the modules of the product."""
    found = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if path.parent.name != "__pycache__"]


def docstrings() -> Iterator[Sentence]:
    """Yield the sentences of the docstrings of the product."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                line = getattr(node, "lineno", 1)
                for paragraph in docstring_paragraphs(ast.get_docstring(node) or ""):
                    for text in split_sentences(paragraph):
                        yield Sentence(str(path.relative_to(ROOT)), line, text)


def comments() -> Iterator[Sentence]:
    """Yield the sentences of the comments of the product; lines that follow each other are one."""
    for path in modules():
        block: list[str] = []
        begin = last = 0
        tokens = tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
        found = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
        for line, text in [*found, (sys.maxsize, "")]:
            if line != last + 1 and block:
                for sentence in split_sentences(" ".join(block)):
                    yield Sentence(str(path.relative_to(ROOT)), begin, sentence)
                block = []
            if not block:
                begin = line
            if not text.startswith(("# type:", "# noqa", "# fmt:", "# SPDX")):
                block.append(text.lstrip("# "))
            last = line


def messages() -> Iterator[Sentence]:
    """Yield the sentences of errors, warnings and help that have four words or more."""
    for path in modules():
        tree = ast.parse(path.read_bytes())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            name = call.func.id if isinstance(call.func, ast.Name) else name
            if name.endswith(("Error", "warn", "refuse")):
                texts = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "hint")]
            else:
                texts = [k.value for k in call.keywords if k.arg in ("help", "hint", "doc")]
            for text in texts:
                if isinstance(text, ast.Constant | ast.JoinedStr):
                    plain = re.sub(r"^f?['\"]|['\"]$", "", ast.unparse(text))
                    plain = re.sub(r"\{[^{}]*\}", "x", plain)
                    for part in _SENTENCE_GAP.split(plain):
                        if len(part.split()) >= 4:
                            yield Sentence(str(path.relative_to(ROOT)), text.lineno, part)


def pages() -> Iterator[Sentence]:
    """Yield the sentences of the pages, without code, tables and titles."""
    folders = sorted(ROOT.glob("*/README.md"))
    for path in (*sorted(ROOT.glob("*.md")), *folders, *sorted((ROOT / "docs").rglob("*.md"))):
        name = str(path.relative_to(ROOT))
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.M | re.S)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] |\d+\. )", text):
            if not paragraph.lstrip().startswith(("|", "#", "<", "!", "$")):
                for sentence in split_sentences(paragraph.lstrip("-* ")):
                    yield Sentence(name, 0, sentence)


AREAS: Final = {
    "docstrings": docstrings, "comments": comments, "messages": messages, "pages": pages,
}  # fmt: skip


def main() -> int:
    """Print a table of all areas, or the hard sentences of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=AREAS, help="print the hard sentences of this area")
    area = parser.parse_args().list
    if area:
        for sentence in AREAS[area]():
            if is_hard(sentence.text):
                print(f"{sentence.file}:{sentence.line}: {sentence.text}")
        return 0
    failed = False
    for name, sentences in AREAS.items():
        found = [is_hard(sentence.text) for sentence in sentences()]
        share = 100 * sum(found) / max(len(found), 1)
        failed |= share > BUDGET[name]
        print(f"{name:<12}{len(found):>7} sentences, {sum(found):>5} hard: {share:5.2f} %"
              f", budget {BUDGET[name]:g} %")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
