"""Mutation sample: change the code at many places, and see whether its tests notice.

    python -m tests.mutation_sample --tree . --write sample.json
    python -m tests.mutation_sample --tree . --read tests/golden/mutation_sample.json

A mutant is one small change of one expression or statement. Each is tried in a copy of the tree,
until one test fails or `SECONDS` are over. The test files that import the mutant's module run
first, then those that import an importer of the module, and so on. Of equally near files, those
with a similar name run first. A mutant is:

- killed, if a test fails that passes without the mutant,
- survived, if all tests of the nearest files pass, and no other test fails in time,
- without a verdict, if the time is over before all nearest files have run. On a busy machine this
  can happen to many mutants.

The order of all mutants follows from `SEED`: they are sorted by a hash of what they change.
Without `--read`, the first ones of each folder in `COUNTS` are tried. `--read` tries those of a
file again, so that two versions of the tests can be compared, and fails if a mutant was killed and
is not killed now. If the code of one was deleted, the next one takes its place. If code was only
rewritten, edit the file: the operator "replace" replaces an expression by any other.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from benchmarks.harness import print_header, print_row

COUNTS: Final = {"runtime": 12, "passes": 10, "verify": 10, "analysis": 10}
SEED: Final = 1
SECONDS: Final = 60
OUTCOMES: Final = ("killed", "survived", "no verdict")
_SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
}  # fmt: skip
_TEXT: Final = ast.JoinedStr | ast.Raise | ast.Assert  # what errors say is not changed


class Mutant(NamedTuple):
    """One change: where, of which kind, and the code before and after it.

    `symbol` is `module:function`, and `number` counts equal changes in one function.
    """

    symbol: str
    operator: str
    old: str
    new: str
    number: int

    @property
    def module(self) -> str:
        """The module that it changes."""
        return self.symbol.partition(":")[0]

    @property
    def rank(self) -> str:
        """Its place in the order of all mutants."""
        return sha256(f"{SEED} {json.dumps(self)}".encode()).hexdigest()


Made = tuple[Mutant, Callable[[], str]]  # a mutant, and what returns the source with it


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the changes of one node: the name of each, and what takes the node's place.

    >>> [(name, ast.unparse(new)) for name, new in changes_of(ast.parse("a < b").body[0].value)]
    [('swap', 'a <= b')]
    """
    new = copy.deepcopy(node)
    match node, new:
        case ast.Compare(ops=[op]), ast.Compare() if type(op) in _SWAPS:
            new.ops = [_SWAPS[type(op)]()]  # type: ignore[list-item]
            yield "swap", new
        case ((ast.BoolOp() | ast.BinOp()), (ast.BoolOp() | ast.BinOp())) if (
            type(node.op) in _SWAPS
        ):
            new.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
            yield "swap", new
        case ast.UnaryOp(op=ast.Not()), _:
            yield "drop not", node.operand
        case ast.Constant(value=bool(value)), _:
            yield "negate", ast.Constant(not value)
        case ast.Constant(value=int(value)), _:
            yield "add one", ast.Constant(value + 1)
        case ((ast.If() | ast.While() | ast.IfExp()), (ast.If() | ast.While() | ast.IfExp())):
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "negate test", new
        case ast.Expr(value=ast.Call()), _:
            yield "delete call", ast.Pass()


def in_place_of(tree: ast.Module, old: ast.AST, new: ast.AST) -> str:
    """Return the source of a tree in which `new` takes the place of `old`."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(copy_but(tree, old))))


def copy_but(tree: ast.Module, kept: ast.AST) -> ast.Module:
    """Copy a tree, all but one node of it."""
    return copy.deepcopy(tree, {id(kept): kept})


def mutants_of(module: str, source: str) -> Iterator[Made]:
    """Yield each mutant of a module, and a function that returns the whole source with it."""
    tree = ast.parse(source)
    seen: Counter[tuple[str, str, str, str]] = Counter()
    for symbol, node in nodes_of(tree):
        for operator, new in changes_of(node):
            first = [ast.unparse(each).partition("\n")[0] for each in (node, new)]
            key = (f"{module}:{symbol}", operator, first[0], first[1])
            yield Mutant(*key, seen[key]), partial(in_place_of, tree, node, new)
            seen[key] += 1


def nodes_of(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes in functions, each with the name of its function."""

    def within(node: ast.AST, symbol: str, inside: bool) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _TEXT):
                continue
            name, here = symbol, inside
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{symbol}.{child.name}".lstrip(".")
                here = inside or isinstance(child, ast.FunctionDef)
            elif inside:
                yield symbol, child
            yield from within(child, name, here)

    yield from within(tree, "", False)


def all_mutants(tree: Path, folder: str) -> list[Made]:
    """Return the mutants of a folder of schedir, in their order."""
    found = [
        each
        for path in (tree / "schedir" / folder).rglob("*.py")
        for each in mutants_of(
            ".".join(path.relative_to(tree).with_suffix("").parts), path.read_text()
        )
    ]
    return sorted(found, key=lambda each: each[0].rank)


def replacement_of(tree: Path, mutant: Mutant) -> Made | None:
    """Return a mutant with the operator "replace", or None if the tree lacks its expression."""
    path = path_of(tree, mutant)
    module = ast.parse(path.read_text() if path.exists() else "")
    old, new = (ast.parse(text, mode="eval").body for text in (mutant.old, mutant.new))
    found = [
        node
        for symbol, node in nodes_of(module)
        if f"{mutant.module}:{symbol}" == mutant.symbol and ast.unparse(node) == ast.unparse(old)
    ]
    if mutant.number >= len(found):
        return None
    return mutant, partial(in_place_of, module, found[mutant.number], new)


def path_of(tree: Path, mutant: Mutant) -> Path:
    """Return the file that a mutant changes."""
    return tree.joinpath(*mutant.module.split(".")).with_suffix(".py")


def name_of(tree: Path, path: Path) -> str:
    """Return the name of a module."""
    return ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: Path, path: Path) -> set[str]:
    """Return the modules that a file may import, by `import a.b` or `from a import b`.

    A file that imports pkgutil may import all modules of its folder.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if "pkgutil" in found:
        found |= {name_of(tree, other) for other in path.parent.rglob("*.py")}
    return found


@cache
def importers(tree: Path, folder: str) -> dict[Path, set[str]]:
    """Return what each file of a folder imports."""
    return {path: imports_of(tree, path) for path in (tree / folder).rglob("*.py")}


def tests_of(tree: Path, mutant: Mutant) -> list[list[str]]:
    """Return the test files that import a mutant's module, then those that import its importers.

    Each further list imports the importers of the last one's modules. Lists may be empty.
    """
    tests = {
        path: imported
        for path, imported in importers(tree, "tests").items()
        if path.name.startswith("test_") and not {"gpu", "browser"} & {*path.parts}
    }
    modules, before, result = {mutant.module}, set[str](), list[list[str]]()
    while modules != before:
        found = [path for path, imported in tests.items() if imported & modules]
        found.sort(
            key=lambda path: (-similarity(path, mutant), "cpu" in path.parts, len(tests[path]))
        )
        result.append([str(path.relative_to(tree)) for path in found])
        tests = {path: imported for path, imported in tests.items() if path not in found}
        before = modules
        modules = modules | {
            name_of(tree, path)
            for path, imported in importers(tree, "schedir").items()
            if imported & modules
        }
    return result


def similarity(path: Path, mutant: Mutant) -> int:
    """Return how many words of a module and a function are in the name of a test file.

    Words are equal if their first five letters are. A word of the module's own name counts twice.
    """
    own = mutant.module.rpartition(".")[2]
    words, symbol, name = (
        {word[:5] for word in re.findall("[a-z]{3,}", text.lower())} - {"test"}
        for text in (own, f"{own} {mutant.symbol}", path.stem)
    )
    return len(words & name) + len(symbol & name)


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> tuple[int, str] | None:
    """Run tests in a tree until one fails.

    Returns:
        The exit code of pytest and its last lines; None if the time is over.
    """
    command = [sys.executable, "-m", "pytest", "-xq", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        ["nice", *command, *tests], cwd=tree, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        text = process.communicate(timeout=max(seconds, 0.0))[0]
    except subprocess.TimeoutExpired:
        return None
    finally:  # A test may have left processes.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, text


def outcome(tree: Path, mutant: Mutant, source: str) -> tuple[str, str]:
    """Run the tests of a mutant in a tree that may be changed.

    Returns:
        "killed", "survived" or "no verdict"; and the test that failed.
    """
    path, levels = path_of(tree, mutant), tests_of(tree, mutant)
    nearest = len(next(filter(None, levels), ()))
    files, begin, end = [file for level in levels for file in level], 0, time.monotonic() + SECONDS
    skipped: list[str] = []  # tests that fail without the mutant, too
    original, size = path.read_text(), 2
    while begin < len(files):
        path.write_text(source)
        try:
            tests = [*files[begin : begin + size], *skipped]
            result = run_tests(tree, tests, end - time.monotonic())
        finally:
            path.write_text(original)
        if result is None:
            break
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result[1], re.MULTILINE)
        if result[0] in (0, 5):  # 5: no tests
            begin, size = begin + size, min(16, 2 * size)
        elif failed is None:
            raise RuntimeError(f"pytest ended with {result[0]}: {result[1]}")
        elif (alone := run_tests(tree, [failed[1]], SECONDS)) is not None and alone[0] == 0:
            return "killed", failed[1]
        elif "::" in failed[1]:
            skipped += ["--deselect", failed[1]]
        else:  # a file that cannot be imported
            files.remove(failed[1])
    return "survived" if begin >= nearest else "no verdict", ""


def chosen(
    tree: Path, folder: str, count: int, wanted: Sequence[Mutant]
) -> tuple[list[Made], list[Mutant]]:
    """Return the mutants of a folder to try, and those of `wanted` without code."""
    mutants = all_mutants(tree, folder)
    sources = dict(mutants)
    sources |= filter(None, (replacement_of(tree, m) for m in wanted if m.operator == "replace"))
    kept = [(mutant, sources[mutant]) for mutant in wanted if mutant in sources]
    others = [each for each in mutants if each[0] not in wanted]
    return [*kept, *others][:count], [mutant for mutant in wanted if mutant not in sources]


def main() -> None:
    """Try the mutants of each folder, and print how many survived, and which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(), help="a checkout")
    parser.add_argument("--read", type=Path, help="a file of mutants to try again")
    parser.add_argument("--write", type=Path, help="a file for the mutants and their outcomes")
    args = parser.parse_args()
    rows = json.loads(args.read.read_text()) if args.read else []
    before = {Mutant(*row[:5]): row[5] for row in rows}
    results: dict[Mutant, tuple[str, str]] = {}
    without_code: list[Mutant] = []
    print_header("folder", "mutants", *OUTCOMES, "replaced")
    with TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        names = (".git", ".venv", "build", "__pycache__")
        shutil.copytree(args.tree, tree, symlinks=True, ignore=shutil.ignore_patterns(*names))
        for folder, count in COUNTS.items():
            wanted = [m for m in before if m.module.startswith(f"schedir.{folder}.")]
            number = len(wanted) if args.read else count
            mutants, replaced = chosen(tree, folder, number, wanted)
            found = {mutant: outcome(tree, mutant, source()) for mutant, source in mutants}
            counted = Counter(how for how, _ in found.values())
            print_row(folder, len(found), *(counted[how] for how in OUTCOMES), len(replaced))
            results |= found
            without_code += replaced
    for mutant, (how, test) in results.items():
        print(f"{how}: {mutant.symbol}: {mutant.operator}: {mutant.old} -> {mutant.new} {test}")
    for mutant in without_code:
        print(f"replaced: {mutant.symbol}: {mutant.operator}: {mutant.old} -> {mutant.new}")
    if args.write:
        rows = [[*mutant, *result] for mutant, result in results.items()]
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.write.write_text(f"[\n{lines}\n]\n")
    lost = [m for m, (how, _) in results.items() if how != "killed" and before.get(m) == "killed"]
    if lost:
        sys.exit(f"{len(lost)} mutants were killed before, and are not killed now")


if __name__ == "__main__":
    main()
