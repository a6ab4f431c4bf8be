"""Tests that mypy refuses comparisons of containers of tensors in each marked line only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy.api import run

PLUGIN = Path(__file__).parents[1] / "tensor_comparisons.py"
CONFIG = f"[mypy]\nplugins = {PLUGIN}\nincremental = false\n"
STUB = """\
from typing import Any
class Tensor:
    def __eq__(self, other: Any) -> Tensor: ...  # type: ignore[override]
    def all(self) -> bool: ...
class Parameter(Tensor): ...
"""
HEAD = """\
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from torch._tensor import Parameter, Tensor
class Named(NamedTuple):
    x: Tensor
@dataclass
class Data:
    x: Tensor | None
class Plain:
    x: list[Tensor]
class Parameters:
    def __iter__(self) -> Iterator[Parameter]: raise StopIteration
p: Parameter
q: Tensor
many: list[Parameter]
maybe: list[Tensor] | None
nested: tuple[list[dict[str, Tensor]], ...]
pair: tuple[Tensor, int]
named: Named
data: Data
datas: list[Data]
plain: Plain
module: Parameters
iterator: Iterator[Parameter]
iterable: Iterable[Tensor]
sequence: Sequence[Tensor]
collection: Collection[Tensor]
waiting: deque[Tensor]
by_name: dict[str, Tensor]
by_key: dict[Parameter, int]
view: Mapping[str, Tensor]
members: set[Parameter]
names: list[str]
"""
BY_VALUE = [
    "many == [p]", "[p] != many", "maybe == [q]", "nested == nested", "pair == pair",
    "named == named", "data != data", "data in datas", "by_name == by_name", "view == view",
    "p in many", "p not in sequence", "p in iterator", "q in iterable", "q in collection",
    "p in module", "p in view.values()", "p in (q, p)", "p in [*by_name.values()]",
    "many.index(p)", "sequence.count(q)", "waiting.remove(q)", "many.remove(p)",
    "[one for one in many if one in sequence]", "len(many) == 1 and many == [p]",
]  # fmt: skip
BY_IDENTITY = [
    "p is q", "(p == q).all()", "any(p is one for one in many)", "p in by_key", "p in members",
    "members == {p}", "by_key == by_key", "by_name.keys() == view.keys()", "'a' in by_name",
    "p in by_key.keys()", "3 in by_key.values()", "plain == plain", "'a' in names",
    "names.index('a')", "[one is p for one in module]", "len(many) == len(sequence)",
]  # fmt: skip


def test_mypy_reports_tensor_comparisons_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*BY_VALUE, *BY_IDENTITY]
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").touch()
    (tmp_path / "torch" / "_tensor.pyi").write_text(STUB)
    (tmp_path / "code.py").write_text(HEAD + "".join(f"{line}\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    out, _, _ = run(["--config-file", "mypy.ini", "code.py"])
    errors = re.findall(r"^code.py:(\d+): error: .*\[(.+)\]$", out, re.MULTILINE)
    assert {kind for _, kind in errors} == {"tensor-comparison"}, out
    before = HEAD.count("\n") + 1
    assert sorted({int(number) - before for number, _ in errors}) == [*range(len(BY_VALUE))], out
