"""Changed programs that have new rows: the checker accepts those that run, and no others.

    python changed.py TRIALS

In a copy that has the rows; of each mutation so many programs, of which those without new rows are
those of `test_mutants.py`, and are not judged here.
"""

from __future__ import annotations

import sys
from collections import Counter

from schedir.errors import SchedirError
from tests.mutants import MUTATIONS, mutate, trial
from tests.new_rows import NEW


def new(name: str, seed: int) -> bool:
    """Whether the changed program of a trial has new rows."""
    try:
        return bool(mutate(name, seed, mixed=True)[1].used_opcodes & NEW)
    except SchedirError:
        return False


if __name__ == "__main__":
    outcomes: Counter[str] = Counter()
    trials = [(name, seed) for name in MUTATIONS for seed in range(int(sys.argv[1]))]
    for name, seed in trials:
        if new(name, seed):
            found = trial(name, seed)
            assert not found.disagreements, str(found)
            outcomes[found.outcome] += 1
    judged = sum(outcomes.values())
    assert judged > len(trials) / 6 and len(outcomes) >= 2, (len(trials), outcomes)
    print(f"{len(trials)} programs, {judged} of them with new rows: {dict(outcomes)}")
