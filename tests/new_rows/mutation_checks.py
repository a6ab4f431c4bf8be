"""Mutate programs that have new rows: the checker must accept exactly those that run.

    python mutation_checks.py TRIALS

It runs in a copy of the tree that has the rows. TRIALS is the number of programs of each mutation.
Programs without new rows are left out, because `test_mutants.py` has them.
"""

from __future__ import annotations

import sys
from collections import Counter

from schedir.errors import SchedirError
from tests.mutants import MUTATIONS, mutate, trial
from tests.new_rows import NEW


def has_new_rows(name: str, seed: int) -> bool:
    """Return whether the mutated program of a trial has new rows."""
    try:
        return bool(mutate(name, seed, mixed=True)[1].used_opcodes & NEW)
    except SchedirError:
        return False


if __name__ == "__main__":
    outcomes: Counter[str] = Counter()
    trials = [(name, seed) for name in MUTATIONS for seed in range(int(sys.argv[1]))]
    for name, seed in trials:
        if has_new_rows(name, seed):
            found = trial(name, seed)
            assert not found.disagreements, str(found)
            outcomes[found.outcome] += 1
    count = sum(outcomes.values())
    assert count > len(trials) / 6 and len(outcomes) >= 2, (len(trials), outcomes)
    print(f"{len(trials)} programs, {count} of them with new rows: {dict(outcomes)}")
