"""Tests of the rules of the source tree: layers, packages, file sizes and imports."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lines_of_code import code_lines

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "schedir"

# The packages of schedir by layer, the lowest first.  A package is a folder or a file in schedir/.
# It imports from lower layers only.  Files inside a package import each other, but never in a
# cycle.  `__init__` is the public API and `__main__` the command line: they may import everything,
# and nothing imports them.
LAYERS = (
    {"errors", "other_libraries"},
    {"extras", "retired_names"},
    {"call_errors"},
    {"ir"},
    {"schedules", "analysis"},
    {"passes"},
    {"verify"},
    {"compiler"},
    {"predict"},
    {"io"},
    {"planner", "schedule_search", "viz", "traces", "hang_diagnosis"},
    {"data"},
    {"kernels", "transports"},
    {"runtime"},
    {"tensor_parallel", "testing", "instrumentation", "torch_pipelining", "megatron"},
    {"models"},
    {"checkpoints"},
    {"training"},
    {"commands"},
    {"schedule_algebra", "__init__", "__main__"},
)
# Leaf packages use the core below them.  Except for `ALLOWED`, no leaf imports another one, and
# only the packages of `USERS_OF_LEAVES` import a leaf.
LEAVES = {"planner", "schedule_search", "viz", "traces", "hang_diagnosis"}
USERS_OF_LEAVES = {
    "commands", "training", "torch_pipelining", "instrumentation", "testing", "schedule_algebra",
    "__init__", "__main__",
}  # fmt: skip
# (importer, imported): imports that are allowed within one layer, with the reason.
ALLOWED = {
    ("__main__", "__init__"): "the version",
    ("planner", "schedule_search"): "it searches for a shorter schedule of a shape",
    ("viz", "planner"): "it draws plans",
    ("viz", "schedule_search"): "it draws frontiers",
}
LARGE_PACKAGES = ("torch", "triton", "matplotlib", "networkx", "numba", "ortools")

LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
LOWEST_TORCH_LAYER = LAYER_OF["kernels"]


def python_files(*folders: str) -> list[Path]:
    """Return each file under these folders once, since Path.rglob does not follow symlinks."""
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a module: kernels/x.py is schedir.kernels.x.

    A package has the name of its folder.

    >>> module_name(ROOT / "viz" / "gantt.py"), module_name(SOURCE / "passes" / "__init__.py")
    ('schedir.viz.gantt', 'schedir.passes')
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "schedir" else ("schedir", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(f): f for f in python_files("schedir", "kernels", "viz")}


def list_imports(nodes: Iterable[ast.AST], package: str = "") -> Iterator[str]:
    """Yield every dotted name that nodes import. Relative ones start at `package`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            # `from a import b` may name the module a.b; an attribute falls back to a.
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and has_import_in_name(node.func):
            # `import_module("schedir.x")` is an import too. Of an f-string, its first part counts.
            for text in ast.walk(node):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield from re.findall(r"^schedir(?:\.\w+)+", text.value)


def list_top_level_imports(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {target.split(".")[0] for target in list_imports(ast.walk(ast.parse(path.read_bytes())))}


def has_import_in_name(function: ast.expr) -> bool:
    nodes = [*ast.walk(function)]
    names = [n.id for n in nodes if isinstance(n, ast.Name)]
    names += [n.attr for n in nodes if isinstance(n, ast.Attribute)]
    return any("import" in name for name in names)


class ModuleNames(NamedTuple):
    """Names in a module: those that it imports, that it defines, and the variables that it sets.

    `members` are the names of functions, and of methods and annotated fields of classes.
    """

    imports: frozenset[str]
    top_level_classes: list[str]
    members: set[str]
    variables: Counter[str]


@cache
def read_module(path: Path) -> ModuleNames:
    tree = ast.parse(path.read_bytes())
    nodes = [*ast.walk(tree)]
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    body = [*tree.body, *(each for owner in classes for each in owner.body)]
    members = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    fields = [each for owner in classes for each in owner.body if isinstance(each, ast.AnnAssign)]
    members |= {node.target.id for node in fields if isinstance(node.target, ast.Name)}
    variables = (
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    top_level_classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    imports = frozenset(list_imports(nodes, package))
    return ModuleNames(imports, top_level_classes, members, Counter(variables))


def module_imports(name: str) -> frozenset[str]:
    return read_module(MODULES[name]).imports


def package_of(name: str) -> str:
    """Return the package of a name: schedir.passes.communication.transfers is in passes.

    schedir itself and its attributes are in __init__.
    """
    second = [*name.split("."), ""][1]
    return second if second in LAYER_OF or f"schedir.{second}" in MODULES else "__init__"


def select_schedir_names(names: frozenset[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "schedir"}


def test_module_list_has_core_modules() -> None:
    assert {"schedir.ir.isa.instructions", "schedir.ir.program"} <= MODULES.keys()


def test_packages_have_layers() -> None:
    assert {package_of(name) for name in MODULES} <= LAYER_OF.keys()


def test_imports_are_from_lower_layers() -> None:
    violations = []
    for name in MODULES:
        importer = package_of(name)
        for target in select_schedir_names(module_imports(name)):
            imported = package_of(target)
            is_inside = importer == imported != "__init__"
            if not (
                is_inside
                or LAYER_OF[imported] < LAYER_OF[importer]
                or (importer, imported) in ALLOWED
            ):
                violations.append(f"{name} imports {target}")
    assert not violations


def test_only_allowed_packages_import_leaves() -> None:
    """The core and the runtime work without pictures, planner, search, traces and diagnosis."""
    pairs = {
        (package_of(name), package_of(target))
        for name in MODULES
        for target in select_schedir_names(module_imports(name))
        if package_of(target) in LEAVES and package_of(name) not in LEAVES
    }
    assert {importer for importer, _ in pairs} <= USERS_OF_LEAVES
    assert {imported for importer, imported in pairs if importer == "runtime"} <= {"hang_diagnosis"}


def test_only_public_api_imports_testing() -> None:
    users = {
        package_of(name)
        for name in MODULES
        if any(package_of(t) == "testing" for t in select_schedir_names(module_imports(name)))
    }
    assert users <= {"testing", "__init__"}


def test_module_imports_have_no_cycle() -> None:
    def resolve(target: str) -> str:
        return target if target in MODULES else target.rpartition(".")[0]

    TopologicalSorter(
        {
            name: {resolve(t) for t in select_schedir_names(module_imports(name))} - {name}
            for name in MODULES
        }
    ).prepare()


def may_import(name: str, root: str) -> bool:
    """Return whether a module may import one of the packages in `LARGE_PACKAGES`."""
    return {
        "torch": LAYER_OF[package_of(name)] >= LOWEST_TORCH_LAYER,
        "matplotlib": package_of(name) == "viz",
        "numba": name == "schedir.analysis.numba_jit",
        "ortools": name == "schedir.schedule_search.cp_sat",
        "triton": name.endswith("_triton"),
    }.get(root, True)


def test_large_packages_are_imported_only_where_allowed() -> None:
    imported = [
        (name, root) for name in MODULES for root in {t.split(".")[0] for t in module_imports(name)}
    ]
    assert not [pair for pair in imported if not may_import(*pair)]


def test_pure_tests_do_not_import_torch() -> None:
    pattern = rb"from torch\b|import.*\btorch\b"
    files = [f for f in python_files("tests/pure") if re.search(pattern, f.read_bytes())]
    assert not [f.name for f in files if "torch" in list_top_level_imports(f)]


PYTHON_FILES = python_files("schedir", "kernels", "viz", "tests", "examples", "docs")


def test_top_level_modules_are_listed() -> None:
    files = {f.stem for f in SOURCE.glob("*.py")}
    assert files == {
        "__init__",
        "__main__",
        "call_errors",
        "errors",
        "extras",
        "other_libraries",
        "retired_names",
        "schedule_algebra",
    }


# The files that name instructions, with the number of names and the reason. All other files read
# the table of instructions, so they support new instructions.
TABLE = (
    "schedir.ir.isa.instructions",
    "schedir.ir.isa.instruction_table",
    "schedir.ir.isa.table_validation",
)
ALLOWED_OPCODE_NAMES = {
    "schedir.io.torch_csv": (12, "torch has a word for each of these, and no others"),
    "schedir.viz.palette": (22, "each has a colour and a name that people know; others get grey"),
    "schedir.megatron.schedule_compilation": (4, "Megatron sends shapes with activations only"),
    "schedir.verify.replicas": (1, "a host waits for the token counts only at a dispatch"),
}
# Files with 400 lines of code or more, with the reason.
LONG_FILES = {
    "schedir/ir/isa/instruction_table.py": "it is data",
    "benchmarks/planner.py": "it prints several tables",
    "benchmarks/search.py": "it prints several tables",
    "benchmarks/zero.py": "it prints several tables",
}


def count_opcode_names(path: Path) -> int:
    """Return how often a file names an instruction, as `Opcode.Forward` or by an alias."""
    if b"Opcode" not in (source := path.read_bytes()):
        return 0
    tree = ast.parse(source)
    other = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        if node.value.id == "Opcode"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"Opcode", *other}
        and node.attr[0].isupper()
        for node in ast.walk(tree)
    )


def test_opcodes_are_named_only_in_allowed_files() -> None:
    counted = {
        name: count_opcode_names(path)
        for name, path in MODULES.items()
        if name not in TABLE and package_of(name) != "passes" and not name.endswith("_handlers")
    }
    assert {name: n for name, n in counted.items() if n} == {
        k: n for k, (n, _) in ALLOWED_OPCODE_NAMES.items()
    }


def test_files_are_shorter_than_400_lines() -> None:
    files = PYTHON_FILES + python_files("benchmarks")
    long_files = [
        str(file.relative_to(ROOT))
        for file in files
        if (text := file.read_text()).count("\n") >= 400 and code_lines(text) >= 400
    ]
    assert sorted(long_files) == sorted(LONG_FILES)


def test_files_have_no_merge_markers() -> None:
    texts = [*PYTHON_FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not [f for f in texts if re.search(r"^(<{7}|>{7}) ", f.read_text(), re.M)]


def test_kernels_and_viz_are_not_imported_as_top_level() -> None:
    pattern = rb"from (kernels|viz)\b|import.*\b(kernels|viz)\b"
    files = [f for f in PYTHON_FILES if re.search(pattern, f.read_bytes())]
    assert not [f for f in files if {"kernels", "viz"} & list_top_level_imports(f)]


def test_configured_packages_match_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapped = setuptools["package-dir"]
    folders = {module_name(file.with_name("__init__.py")) for file in MODULES.values()}
    assert set(setuptools["packages"]) == folders
    for package, folder in mapped.items():
        link = SOURCE / package.removeprefix("schedir.")
        assert link.is_symlink() and link.resolve() == ROOT / folder
    assert {name for name in folders if (ROOT / name.replace(".", "/")).is_symlink()} == set(mapped)
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    "code",
    [
        "import schedir",
        """
import schedir
program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(ranks=4,
                                                                               microbatches=8))
schedir.simulate(schedir.check(program, progress_model="per_device"), schedir.Costs())
assert schedir.from_text(schedir.to_text(program)) == program
""",
        """
from schedir.training.config.settings_table import list_settings
from schedir.training.config.train_config import TrainConfig
list_settings()
assert TrainConfig(device="cuda", transport="nccl_grouped").progress_model == "per_device"
""",
        """
import runpy, sys
sys.argv = ["schedir", "--help"]
try:
    runpy.run_module("schedir", run_name="__main__")
except SystemExit as end:
    assert end.code in (0, None), end.code
""",
    ],
    ids=["import", "api", "settings", "help"],
)
def test_common_code_loads_no_large_packages(code: str) -> None:
    report = (
        f"{code}\nimport sys\nprint('loaded:', *(m for m in {LARGE_PACKAGES} if m in sys.modules))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1].split() == ["loaded:"]
