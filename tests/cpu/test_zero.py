"""ZeRO: levels 1 to 3 leave the bits of plain data parallelism, in parts."""

from __future__ import annotations

import pytest

from benchmarks.zero_bits import cases, differing

NAMES = ("one_f_one_b dp2",)


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_bits_of_plain_replicas(name: str) -> None:
    assert not differing(cases()[name])
