"""Tests that `check` accepts exactly the mutated programs that finish, under each model.

`benchmarks/mutants.py` does the same for any number of programs.
"""

from __future__ import annotations

import os

import pytest

from schedir.analysis.progress_models import MODELS
from tests.cases import ALL
from tests.mutants import COMMUTING, CORPUS, HARMLESS, MUTATIONS, RARELY_WRONG, trial
from tests.mutations_of_activation_offload import ACTIVATION_OFFLOAD_MUTATIONS
from tests.mutations_of_optimizer_offload import OPTIMIZER_OFFLOAD_MUTATIONS
from tests.mutations_of_segments import SEGMENT_MUTATIONS
from tests.mutations_of_zero import ZERO_MUTATIONS

# Per mutation. A normal run tries about 1,700 programs, with two of each mutation under each model.
TRIALS = 63 if ALL else 12
SEED = int(os.environ.get("MUTANTS_SEED", "0"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_check_accepts_exactly_mutants_that_finish(name: str) -> None:
    """Call `print(tests.mutants.trial(name, seed, corpus=CORPUS))` to repeat a trial.

    A normal run judges each mutant under one model. Some mutations use a program for more mutants.
    """
    share = TRIALS // 3 if name in ZERO_MUTATIONS else 4
    has_single_model = not ALL or name in (
        *ZERO_MUTATIONS,
        *ACTIVATION_OFFLOAD_MUTATIONS,
        *OPTIMIZER_OFFLOAD_MUTATIONS,
        *SEGMENT_MUTATIONS,
    )
    models = [[model] if has_single_model else MODELS for model in MODELS]
    seeds = range(SEED, SEED + TRIALS)
    trials = [trial(name, seed, models[seed % len(MODELS)], share, CORPUS) for seed in seeds]
    disagreements = [t for t in trials if t.disagreements]
    assert not disagreements, "\n".join(map(str, disagreements[:3]))
    rejected = [t.seed for t in trials if t.outcome == "rejected"]
    if name in HARMLESS:
        assert not rejected
    elif name not in RARELY_WRONG:
        assert rejected
    if name in COMMUTING:
        assert any(t.outcome == "equivalent" for t in trials)
