"""Changed programs that have new rows: the checker accepts those that run, and no others.

    python changed.py TRIALS

In a copy that has the rows; of each mutation so many programs.
"""

from __future__ import annotations

import sys
from collections import Counter

from schedir.ir.names import Opcode
from tests.mutants import MUTATIONS, trial

NEW = {op for op in Opcode if op >= Opcode["Stash"]}

if __name__ == "__main__":
    outcomes: Counter[str] = Counter()
    strange = 0
    for name in MUTATIONS:
        for seed in range(int(sys.argv[1])):
            found = trial(name, seed)
            assert not found.disagreements, str(found)
            outcomes[found.outcome] += 1
            strange += found.mutant is not None and bool(found.mutant.ops & NEW)
    assert strange > sum(outcomes.values()) / 6 and len(outcomes) >= 2, (strange, outcomes)
    print(f"{sum(outcomes.values())} programs, {strange} of them with new rows: {dict(outcomes)}")
