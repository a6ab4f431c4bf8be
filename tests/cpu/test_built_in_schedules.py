"""Tests that built-in schedules train a GPT over Gloo with the bits of the reference."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, get_placement_mark
from tests.cases import each_value
from tests.cpu.test_gloo_executor import assert_reference_bits, step_on_gloo

M = 6


def newest_first(r: int, P: int, m: int) -> RankSchedule:
    """Return GPipe with backwards in descending order of microbatches; the first half is split."""
    descending = [(m - 1 - k, k < m // 2) for k in range(m)]
    backwards = sum((I.at(mb) if split else B.at(mb) for mb, split in descending), 0 * F)
    return m * F + backwards + sum((W.at(mb) for mb, split in descending if split), 0 * F)


def program_of(schedule: Any) -> Program:
    placement, fixed = get_placement_mark(schedule)
    v = fixed or (2 if "v" in signature(schedule).parameters else 1)
    shape = PipelineShape(2, M, v, placement or "loop")
    return compile(schedule, shape, tied_weights=True, progress_model="per_edge")


ZOO = {name: s for name, s in get_built_in_schedules().items() if name != "forward_only"}


OVER_GLOO = each_value(
    ("dualpipe_v", "interleaved_zb", "v_half", "wave", "zb_h2", "zb_v"), (False, True)
)


@pytest.mark.parametrize(("name", "overlap"), OVER_GLOO)
def test_built_in_schedules_over_gloo_equal_reference(name: str, overlap: bool) -> None:
    shape = program_of(ZOO[name]).shape
    assert_reference_bits(step_on_gloo(ZOO[name], shape, overlap=overlap), ZOO[name], shape)
