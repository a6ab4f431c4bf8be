"""Tests of the names that `schedir.runtime` exports, after any earlier imports."""

import subprocess
import sys
from importlib import import_module

import pytest

import schedir.runtime


@pytest.mark.parametrize("name", schedir.runtime.__all__)
def test_exported_name_is_defined_in_its_module(name: str) -> None:
    exported = getattr(schedir.runtime, name)
    assert callable(exported) and exported.__name__ == name
    assert getattr(import_module(exported.__module__), name) is exported


def test_submodule_import_does_not_replace_function() -> None:
    code = """
import schedir.runtime.sequential_reference
import schedir.runtime.executor
from schedir.runtime.sequential_reference import run_sequential as own
from schedir.runtime import *
import schedir.runtime as runtime
assert run_sequential is own is runtime.run_sequential, run_sequential
assert set(runtime.__all__) <= {*dir(runtime)} & {*globals()}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_missing_name_is_reported() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nccl'"):
        schedir.runtime.Nccl  # noqa: B018
    with pytest.raises(ImportError, match="has no attribute 'Gloo': it is now GlooTransport"):
        schedir.runtime.Gloo  # noqa: B018
