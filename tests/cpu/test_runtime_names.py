"""Tests of the names that `schedir.runtime` exports, after any earlier imports."""

import subprocess
import sys
from importlib import import_module

import pytest

import schedir.runtime


@pytest.mark.parametrize("name", schedir.runtime.__all__)
def test_a_name_is_what_its_own_module_calls_so(name: str) -> None:
    found = getattr(schedir.runtime, name)
    assert callable(found) and found.__name__ == name
    assert getattr(import_module(found.__module__), name) is found


def test_the_module_of_a_function_does_not_take_its_place() -> None:
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


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nccl'"):
        schedir.runtime.Nccl  # noqa: B018
    with pytest.raises(ImportError, match="has no attribute 'Gloo': it is now GlooTransport"):
        schedir.runtime.Gloo  # noqa: B018
