"""Tests that a GPT on eight processes, with all three kinds of parallelism, equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import ALL
from tests.cpu import gloo_processes
from tests.cpu.three_d_parallelism import WORLD, Case, cases, judged, merged, run

SHAPE = (2, 2, 2)
PLAIN_CASE = Case(*SHAPE, tied=True, clip=True)
FEW_CASES = [
    PLAIN_CASE,
    PLAIN_CASE._replace(zero=3),
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
    return gloo_processes.run(run, WORLD, cases() if ALL else FEW_CASES, limit=1800 if ALL else 300)


def test_eight_processes_equal_one_process(results: Any) -> None:
    """Losses, norms, gradients and weights are within 1e-6, and all holders of a weight agree.

    Runs with ZeRO have the bits of runs without it.
    """
    found = [*judged(results)]
    assert {one.case for one in found} >= {*FEW_CASES}
    assert not [one for one in found if not one.right]
    assert all({"loss", "weight"} <= one.off.keys() for one in found)


def test_two_sequence_parallel_ranks_have_bits_of_plain_tp(results: Any) -> None:
    """This holds until the first step, since a sum of two terms has one order.

    Sums over tokens have other orders.
    """
    whole, parts = (
        merged([own[case] for own in results], case)[0]
        for case in (PLAIN_CASE._replace(clip=False, sequence=cut) for cut in (False, True))
    )
    first = {name for name in whole if name.startswith("gradient")}
    over_tokens = {n for n in first if "norm." in n or n.endswith(("proj.bias", "down.bias"))}
    assert len(over_tokens) == 2 * (4 + 2) + 2
    same = {name for name, value in whole.items() if torch.equal(value, parts[name])}
    assert {"loss 0"} | (first - over_tokens) <= same and not over_tokens <= same
