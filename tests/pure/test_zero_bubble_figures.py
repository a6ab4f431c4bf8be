"""Tests of the search against the zero-bubble paper's automatic schedules, at equal memory."""

from __future__ import annotations

import pytest

from schedir import search_schedule
from tests.zero_bubble_figures import PRINTED, Row, read_rows

SMALL = [row for row in read_rows() if row.shape.ranks == 8]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row.model}-{row.shape.microbatches}")
def test_search_proves_zb_1p_shortest(row: Row) -> None:
    result = search_schedule(
        row.shape,
        row.costs,
        row.sizes,
        row.shape.ranks,
        objective="active_span",
        max_evaluations=500,
    )
    assert result.stop_reason == "proved" and result.gap_to_bound < 1e-9
    assert row.rate(result.span) == pytest.approx(row.rates["rate_ZB_1p"], abs=PRINTED / 2)


def test_search_with_twice_memory_matches_zb_2p() -> None:
    row = SMALL[0]  # in the other rows, seconds of search beat the paper
    result = search_schedule(
        row.shape,
        row.costs,
        row.sizes,
        2 * row.shape.ranks,
        objective="active_span",
        max_evaluations=2000,
    )
    assert row.rate(result.span) <= row.rates["rate_ZB_2p"] + PRINTED / 2
