"""Tests that commands of a plain install work with only its packages, without torch."""

from __future__ import annotations

import re
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from schedir.extras import EXTRAS, MissingPackageError, require_package
from tests import plain_install

ROOT = Path(__file__).resolve().parents[2]


def list_with_dependencies(names: list[str]) -> Iterator[str]:
    """Yield packages and all their direct and indirect dependencies."""
    visited: set[str] = set()
    while names:
        name = names.pop()
        if name not in visited:
            visited.add(name)
            yield name
            requirements = map(Requirement, distribution(name).requires or ())
            names += [
                requirement.name
                for requirement in requirements
                if not requirement.marker or requirement.marker.evaluate()
            ]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the packages of a plain install, and return its Python."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in list_with_dependencies(
        [Requirement(requirement).name for requirement in project["dependencies"]]
    ):
        package = distribution(name)
        for top_level in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top_level).exists():
                (site / top_level).symlink_to(str(package.locate_file(top_level)))
    (site / "source.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def test_commands_without_torch_work_in_plain_install(python: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    plain_install.use(python, tmp_path / "empty", in_one_process=True)


def list_documented_imports() -> list[str]:
    """Return the import lines of schedir in the Python examples of all pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    line = r"^(?:from schedir[\w.]* import (?:\([^)]*\)|.*)|import schedir.*)$"
    lines = {
        import_line for page in pages for import_line in re.findall(line, page.read_text(), re.M)
    }
    return sorted(lines)


def test_documented_import_works_or_names_missing_package(python: Path) -> None:
    script = r"""
import sys
for line in sys.stdin.read().split("\0"):
    try:
        exec(line, {})
    except ImportError as error:
        if error.name not in ("torch", "hypothesis"):
            print(line, error)
"""
    lines = list_documented_imports()
    assert len(lines) > 20
    done = subprocess.run(
        [python, "-c", script], input="\0".join(lines), capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_public_names_are_listed_without_torch(python: Path) -> None:
    script = "import inspect, schedir; inspect.getmembers(schedir); help(schedir)"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    assert "NAME\n    schedir" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "needs torch, which is not installed"),
        ("raise ImportError('libcudart.so.12')", "torch cannot be imported: ImportError"),
        ("raise OSError('libcudart.so.12')", "torch cannot be imported: OSError"),
    ],
)
def test_broken_torch_is_reported_without_traceback(
    python: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    """The torch package is an empty folder, or lacks a library."""
    (tmp_path / "torch").mkdir()
    if content is not None:
        (tmp_path / "torch" / "__init__.py").write_text(content)
    command = [str(python), "-m", "schedir", "plan", "--measure", "-o", "here.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_low_package_version_is_refused() -> None:
    require_package("hypothesis", "this", min_version="6.0")
    with pytest.raises(MissingPackageError) as caught:
        require_package("hypothesis", "this", min_version="999.1")
    assert caught.value.name == "hypothesis" and "999.1 or later" in caught.value.fact


def test_min_versions_equal_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        needed = map(Requirement, project["optional-dependencies"][extra.name])
        (requirement,) = [
            candidate for candidate in needed if candidate.name == package.replace(".", "-")
        ]
        lowest = [
            candidate.version for candidate in requirement.specifier if candidate.operator == ">="
        ]
        assert lowest == ([extra.min_version] if extra.min_version else [])
