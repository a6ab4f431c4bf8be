"""Tests that two replicas of a program finish if one does, for all kinds of host waits.

The argument is in `docs/explanation/checker.md`. Here a machine runs the hosts of two replicas.
"""

from __future__ import annotations

import random

import pytest

from schedir.analysis.progress_models import MODELS
from schedir.errors import SchedirError
from schedir.verify.check import check
from tests.cases import ALL
from tests.mutants import FEW, MUTATIONS, any_legal
from tests.mutations_of_zero import ZERO_MUTATIONS
from tests.oracle_threads import verdict

MOVES = ("late_send", "early_receive", "swap_neighbors", "swap_pairs", *ZERO_MUTATIONS)


@pytest.mark.parametrize("seed", range(60 if ALL else 16))
def test_two_replicas_finish_if_check_accepts_program(seed: int) -> None:
    rng = random.Random(seed)
    program = any_legal(seed, zero=True, corpus=FEW)
    for name in rng.choices(MOVES, k=2):
        program = MUTATIONS[name](program, rng) or program
    for model in rng.sample(MODELS, 2):
        for blocks in (False, True):
            try:
                check(program, model, blocking_hosts=blocks)
                is_accepted = True
            except SchedirError:
                is_accepted = False
            for replicas in (1, 2):
                run = verdict(program, model, seed, blocking_hosts=blocks, replicas=replicas)
                assert (run.kind == "ok") is is_accepted, (model, blocks, replicas, run)
