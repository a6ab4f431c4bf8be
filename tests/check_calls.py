"""Record how often programs are checked, to test that each program is checked only once."""

from __future__ import annotations

from importlib import import_module

import pytest

from schedir.analysis.dependency_graph import Graph
from schedir.ir.program import Program


def record_checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list to which each check of a program adds an entry from now on.

    An entry is ("complete", name) for a check of completeness, and ("proof", name) for a proof
    under one progress model that the program finishes."""
    seen: list[tuple[str, str]] = []

    def complete(program: Program, *, is_draft: bool) -> object:
        seen.extend([] if is_draft else [("complete", program.name)])
        return real_complete(program, is_draft=is_draft)

    def prove(graph: Graph, *more: object) -> object:
        if graph.proof not in graph.program.proofs:
            seen.append(("proof", graph.program.name))
        return real_prove(graph, *more)

    check = import_module("schedir.verify.check")
    real_complete, real_prove = check.require_complete, check.prove
    monkeypatch.setattr(check, "require_complete", complete)
    for module in (check, import_module("schedir.predict.simulate")):
        monkeypatch.setattr(module, "prove", prove)
    return seen
