"""Count the lines of code of each folder: `python -m tests.lines_of_code [ROOT]`.

Lines of statements count.  Docstrings, comments, blank lines and imports do not.
"""

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

PRODUCT = ("schedir", "kernels", "viz")
REST = ("tests", "benchmarks", "examples", "docs")
IMPORTS = ast.Import | ast.ImportFrom


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is only a string, like a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def code_lines(source: str) -> int:
    """Return the number of lines of code in a file.

    >>> code_lines('import os\\n\\n# why\\nx = [\\n    1,  # one\\n]\\n')
    3
    >>> code_lines('def f():\\n    "What it does."\\n    return "a"\\n')
    2
    """
    left_out: set[int] = set()
    text_lines: set[int] = set()  # they count, also if they are blank or begin with "#"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and (isinstance(node, IMPORTS) or is_text(node)):
            left_out.update(lines_of(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            text_lines.update(lines_of(node))
    lines = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if (text := line.strip()) and not text.startswith("#")
    }
    return len((lines | text_lines) - left_out)


def lines_of(node: ast.stmt | ast.expr) -> range:
    """Return the numbers of the lines of a node."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def folder_of(path: Path, root: Path) -> str:
    """Return the folder for which a file counts, such as `schedir/passes`, `schedir` or `viz`."""
    first, *rest = path.relative_to(root).parts
    return f"{first}/{rest[0]}" if first == "schedir" and len(rest) > 1 else first


def lines_by_folder(root: Path, tops: tuple[str, ...] = PRODUCT) -> Counter[str]:
    """Return the lines of code of each folder under these top-level folders."""
    found: Counter[str] = Counter()
    for top in tops:
        for path in (root / top).rglob("*.py"):  # does not follow symlinks
            found[folder_of(path, root)] += code_lines(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print a table: each folder of the product, the product, and the rest."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    product = lines_by_folder(root)
    for folder, lines in sorted(product.items()):
        print(f"{folder:<24} {lines:>7,}")
    print(f"{'product':<24} {product.total():>7,}")
    for top in REST:
        print(f"{top:<24} {lines_by_folder(root, (top,)).total():>7,}")


if __name__ == "__main__":
    main()
