"""Mutation sample: change the code at many places, and see whether its tests notice.

    python -m tests.mutation_sample --tree . --write sample.json
    python -m tests.mutation_sample --tree . --read sample.json

A mutant is one small change of one expression or statement.  Each is tried in a copy of the tree,
with the test files that import its module, at low priority, until one test fails or `SECONDS` are
over.  If no test file imports the module, the test files count that import one of its importers.  A
mutant has survived if all these tests pass.  On a busy machine many mutants end without a verdict.

The order of all mutants follows from `SEED`: they are sorted by a hash of what they change.
Without `--read`, the first ones of each folder in `COUNTS` are tried.  `--read` tries those of a
file again, so that two versions of the tests can be compared.  If the code of one was deleted, the
next one takes its place.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from benchmarks.harness import print_header, print_row

COUNTS: Final = {"runtime": 30, "passes": 25, "verify": 25, "analysis": 25}
SEED: Final = 1
SECONDS: Final = 60
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


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file may import, by `import a.b` or `from a import b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def importers(tree: Path, folder: str) -> dict[Path, set[str]]:
    """Return what each file of a folder imports."""
    return {path: imports_of(path) for path in (tree / folder).rglob("*.py")}


def tests_of(tree: Path, module: str) -> list[str]:
    """Return the test files that import a module, or one that imports it, the shortest first."""
    modules, before = {module}, set[str]()
    while modules != before:
        found = [
            path
            for path, imported in importers(tree, "tests").items()
            if path.name.startswith("test_") and not {"gpu", "browser"} & {*path.parts}
            if imported & modules
        ]
        if found:
            found.sort(key=lambda path: path.stat().st_size)
            return [str(path.relative_to(tree)) for path in found]
        before = modules
        modules = modules | {
            ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")
            for path, imported in importers(tree, "schedir").items()
            if imported & modules
        }
    return []


def outcome(tree: Path, mutant: Mutant, source: str) -> str:
    """Run the tests of a mutant in a tree that may be changed.

    Returns "killed", "survived", "no verdict" or "no tests".
    """
    path = tree.joinpath(*mutant.module.split(".")).with_suffix(".py")
    if not (files := tests_of(tree, mutant.module)):
        return "no tests"
    before = path.read_text()
    path.write_text(source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            ["nice", "-n", "19", *command], cwd=tree, env=environment, timeout=SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no verdict"
    finally:
        path.write_text(before)
    return "killed" if done.returncode else "survived"


def chosen(mutants: Sequence[Made], count: int, wanted: Sequence[Mutant]) -> tuple[list[Made], int]:
    """Return the mutants to try, and how many of the `wanted` ones are gone and were replaced."""
    sources = dict(mutants)
    kept = [(mutant, sources[mutant]) for mutant in wanted if mutant in sources]
    others = [each for each in mutants if each[0] not in wanted]
    return [*kept, *others][:count], len(wanted) - len(kept)


def main() -> None:
    """Try the mutants of each folder, and print how many survived, and which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(), help="a checkout")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants, from 0 to 1")
    parser.add_argument("--read", type=Path, help="a file of mutants to try again")
    parser.add_argument("--write", type=Path, help="a file for the mutants and their outcomes")
    args = parser.parse_args()
    rows = json.loads(args.read.read_text()) if args.read else []
    wanted = [Mutant(*row[:5]) for row in rows]
    results: list[tuple[Mutant, str]] = []
    print_header("folder", "mutants", "killed", "survived", "no verdict", "no tests", "replaced")
    with TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        names = (".git", ".venv", "build", "__pycache__")
        shutil.copytree(args.tree, tree, symlinks=True, ignore=shutil.ignore_patterns(*names))
        for folder, count in COUNTS.items():
            own = [m for m in wanted if m.module.startswith(f"schedir.{folder}.")]
            number = round(args.share * count)
            mutants, replaced = chosen(all_mutants(tree, folder), number, own[:number])
            found = [(mutant, outcome(tree, mutant, source())) for mutant, source in mutants]
            counted = Counter(how for _, how in found)
            cells = (counted[how] for how in ("killed", "survived", "no verdict", "no tests"))
            print_row(folder, len(found), *cells, replaced)
            results += found
    for mutant, how in results:
        if how != "killed":
            print(f"{how}: {mutant.symbol}: {mutant.operator}: {mutant.old} -> {mutant.new}")
    if args.write:
        args.write.write_text(json.dumps([[*m, how] for m, how in results], indent=0) + "\n")


if __name__ == "__main__":
    main()
