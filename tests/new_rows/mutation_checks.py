"""Mutate programs that have new rows: the checker must accept exactly those that run.

    python mutation_checks.py STEP

It runs in a copy of the tree that has the rows, and tries each STEP-th mutation.
Programs without new rows are left out, because `test_mutants.py` has them.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Final

from schedir.errors import SchedirError
from tests.mutants import MUTATIONS, mutate, trial
from tests.new_rows import NEW

CORPUS: Final = 4  # number of legal programs of each kind that the mutations share


def has_new_rows(name: str, seed: int) -> bool:
    """Return whether the mutated program of a trial has new rows."""
    try:
        return bool(mutate(name, seed, mixed=True, corpus=CORPUS)[1].used_opcodes & NEW)
    except SchedirError:
        return False


if __name__ == "__main__":
    outcomes: Counter[str] = Counter()
    trials = [(name, seed) for seed, name in enumerate(MUTATIONS)][:: int(sys.argv[1])]
    for name, seed in trials:
        if has_new_rows(name, seed):
            found = trial(name, seed, corpus=CORPUS)
            assert not found.disagreements, str(found)
            outcomes[found.outcome] += 1
    count = sum(outcomes.values())
    assert count > len(trials) / 6 and len(outcomes) >= 2, (len(trials), outcomes)
    print(f"{len(trials)} programs, {count} of them with new rows: {dict(outcomes)}")
