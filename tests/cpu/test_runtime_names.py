"""Tests of the names that `schedir.runtime` exports, after any earlier imports."""

from importlib import import_module
from pathlib import Path

import pytest

import schedir.runtime
from tests.cpu.train_command import run_script


@pytest.mark.parametrize("name", schedir.runtime.__all__)
def test_exported_name_is_defined_in_its_module(name: str) -> None:
    exported = getattr(schedir.runtime, name)
    assert callable(exported) and exported.__name__ == name
    assert getattr(import_module(exported.__module__), name) is exported


def test_submodule_import_does_not_replace_function(tmp_path: Path) -> None:
    """The process is a fork. It loads schedir again in this order."""
    script = tmp_path / "imports.py"
    script.write_text("""
import sys

folder = sys.modules["schedir"].__path__[0]
sys.path.append(folder.removesuffix("schedir"))
for name in [name for name in sys.modules if name.partition(".")[0] == "schedir"]:
    del sys.modules[name]

import schedir.runtime.sequential_reference
import schedir.runtime.executor
from schedir.runtime.sequential_reference import run_sequential as own
from schedir.runtime import *
import schedir.runtime as runtime
assert run_sequential is own is runtime.run_sequential, run_sequential
assert set(runtime.__all__) <= {*dir(runtime)} & {*globals()}
""")
    assert run_script(script, 1, tmp_path / "run") == ""


def test_missing_name_is_reported() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nccl'"):
        schedir.runtime.Nccl  # noqa: B018
    with pytest.raises(ImportError, match="has no attribute 'Gloo': it is now GlooTransport"):
        schedir.runtime.Gloo  # noqa: B018
