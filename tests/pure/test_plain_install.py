"""The commands of a plain install work in an environment that has its packages and no torch."""

from __future__ import annotations

import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from schedir.extras import MissingPackageError, require
from tests import plain_install

ROOT = Path(__file__).resolve().parents[2]


def with_dependencies(names: list[str]) -> Iterator[str]:
    """Packages, and all packages that these need in turn."""
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            yield name
            needs = map(Requirement, distribution(name).requires or ())
            names += [each.name for each in needs if not each.marker or each.marker.evaluate()]


def environment(folder: Path) -> Path:
    """Make an environment of the packages that a plain install brings; return its python."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in with_dependencies([Requirement(each).name for each in project["dependencies"]]):
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(str(package.locate_file(part)))
    (site / "source.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def test_all_commands_that_need_no_torch_work_without_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    plain_install.use(environment(tmp_path / "environment"), tmp_path / "empty")


def test_a_version_that_is_too_low_is_refused() -> None:
    require("hypothesis", "this", lowest="6.0")
    with pytest.raises(MissingPackageError) as caught:
        require("hypothesis", "this", lowest="999.1")
    assert caught.value.name == "hypothesis" and "999.1 or later" in caught.value.fact
