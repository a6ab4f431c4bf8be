"""Tests that `compile` lists all its options as keywords, for editors and notebooks."""

from __future__ import annotations

from inspect import Parameter, signature

import schedir
from schedir.compiler.compile_options import STUB_PATH, make_stub
from schedir.ir.program import ATTRIBUTE_FIELDS
from schedir.passes.pass_registry import PASS_OPTIONS


def test_signature_lists_all_options() -> None:
    parameters = signature(schedir.compile).parameters
    assert Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}
    defined = {*PASS_OPTIONS, *(field.name for field in ATTRIBUTE_FIELDS)}
    assert defined <= {*parameters}
    assert parameters["recompute"].annotation == "Selection | None"
    assert parameters["zero"].annotation == "int | None"


def test_stub_file_is_current() -> None:
    text = make_stub(schedir.compile)
    assert STUB_PATH.read_text() == text, "python -m schedir.compiler.compile writes it"
    assert "    zero: int | None\n" in text and "    tp: " not in text
