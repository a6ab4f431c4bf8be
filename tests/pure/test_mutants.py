"""Changed programs: the checker accepts those that run, under each model, and no others.

`benchmarks/mutants.py` does the same for as many as one likes.
"""

from __future__ import annotations

import os

import pytest

from tests.mutants import COMMUTING, HARMLESS, MUTATIONS, RARELY_WRONG, trial

TRIALS = 63  # of each mutation: some 3000 programs
SEED = int(os.environ.get("MUTANTS_SEED", "0"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_checker_equals_execution(name: str) -> None:
    """To repeat a trial: `print(tests.mutants.trial(name, seed))`."""
    trials = [trial(name, SEED + k) for k in range(TRIALS)]
    disagreements = [t for t in trials if t.disagreements]
    assert not disagreements, "\n".join(map(str, disagreements[:3]))
    rejected = [t.seed for t in trials if t.outcome == "rejected"]
    if name in HARMLESS:
        assert not rejected
    elif name not in RARELY_WRONG:
        assert rejected
    if name in COMMUTING:
        assert any(t.outcome == "equivalent" for t in trials)
