"""Tests that a GPT on eight processes, with all three kinds of parallelism, equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import ALL
from tests.cpu import gloo_processes
from tests.cpu.three_d_parallelism import (
    WORLD,
    Case,
    find_faults,
    list_cases,
    merge_results,
    run_cases,
)

SHAPE = (2, 2, 2)
PLAIN_CASE = Case(*SHAPE, tied=True, clip=True)
FEW_CASES = [
    PLAIN_CASE._replace(sequence=True),
    PLAIN_CASE._replace(sequence=True, zero=3, schedule="zb_h1"),
    PLAIN_CASE._replace(sequence=True, zero=2, options=(("reduce_scatter_at", "each_backward"),)),
    PLAIN_CASE._replace(clip=False),
    PLAIN_CASE._replace(clip=False, sequence=True),
    Case(1, 4, 2, 0, sequence=True),
    Case(1, 4, 2, 1, sequence=True),
]


@pytest.fixture(scope="module")
def results() -> Any:
    return gloo_processes.run(
        run_cases, WORLD, list_cases() if ALL else FEW_CASES, limit=1800 if ALL else 300
    )


def test_eight_processes_equal_one_process(results: Any) -> None:
    """Losses, norms, gradients and weights are within 1e-6, and all copies of a weight are equal.

    Runs with ZeRO have the bits of runs without it.
    """
    faults = find_faults(results)
    assert faults.keys() >= {*FEW_CASES}
    assert not {case: found for case, found in faults.items() if found}


def test_two_sequence_parallel_ranks_have_bits_of_plain_tp(results: Any) -> None:
    """Results before the first update are compared: a sum of two terms has one order.

    Sums over tokens have other orders.
    """
    cases = [PLAIN_CASE._replace(clip=False, sequence=sequence) for sequence in (False, True)]
    plain, sequence_parallel = (
        merge_results([result[case] for result in results], case)[0] for case in cases
    )
    gradients = {name for name in plain if name.startswith("gradient")}
    over_tokens = {n for n in gradients if "norm." in n or n.endswith(("proj.bias", "down.bias"))}
    assert len(over_tokens) == 2 * (4 + 2) + 2
    equal_names = {
        name for name, value in plain.items() if torch.equal(value, sequence_parallel[name])
    }
    assert {"loss 0"} | (gradients - over_tokens) <= equal_names and not over_tokens <= equal_names
