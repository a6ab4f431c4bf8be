"""Tests of the number of gathers, against `_add_unshard_reshard` of torch's pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    RESHARD,
    UNSHARD,
    _Action,
    _add_unshard_reshard,
)

from schedir.analysis.memory.unshard_counts import count_unshards
from schedir.compiler.compile import compile
from schedir.io.torch_csv import format_cells
from schedir.ir.isa.instructions import BACKWARD_WEIGHT, INSTRUCTIONS
from schedir.ir.program import Program
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs
from schedir.torch_pipelining.fsdp_stages import insert_unshards, require_unsharded
from tests.cases import ALL, cases
from tests.laws import LOOPED, ZOO, find_min_microbatches, make_shape


def actions(program: Program, rank: int) -> list[Any]:
    """Return the compute of a rank of a draft as actions of torch. A pair is one action."""
    torch_actions: list[Any] = []
    for instr, joined in zip(program.streams[rank], program.streams[rank].joined, strict=True):
        one = _Action.from_str(f"{instr.stage}{INSTRUCTIONS[instr.op].text}{instr.mb}")
        torch_actions.append(
            _Action(-1, OVERLAP_F_B, None, (torch_actions.pop(), one)) if joined else one
        )
    return torch_actions


def residency(listed: list[Any]) -> tuple[int, int]:
    """Return how often a list gathers a stage, and the maximum of gathered stages."""
    kinds = np.array([str(action.computation_type) for action in listed])
    num_gathered = np.cumsum((kinds == str(UNSHARD)).astype(int) - (kinds == str(RESHARD)))
    return int((kinds == str(UNSHARD)).sum()), int(num_gathered.max())


def assert_no_more_than_torch(
    program: Program, most: int, prefetches: Sequence[int] = (0, 1)
) -> None:
    """Assert that no rank gathers more often than torch does with as many gathered stages.

    `prefetches` are the values of `unshard_prefetch`.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    for rank, stages in enumerate(program.shape.stages_on_rank):
        order = actions(program, rank)
        for active in range(1, min(most, len(stages)) + 1):
            torch_count, num_gathered = residency(_add_unshard_reshard(order, active))
            for ahead in prefetches:
                if (num_gathered, ahead) not in counts:
                    lowered = compile(
                        program, dp=2, zero=3, unsharded_stages=num_gathered, unshard_prefetch=ahead
                    )
                    counts[num_gathered, ahead] = count_unshards(lowered).unshards
                place = (rank, active, num_gathered)
                assert counts[num_gathered, ahead][rank] <= torch_count, place
            assert residency(insert_unshards(order, active))[0] <= torch_count


@pytest.mark.parametrize("name", ZOO)
def test_schedules_gather_no_more_often_than_torch(name: str) -> None:
    schedule = ZOO[name]
    stages_per_rank = (2, 4) if schedule in LOOPED and ALL else (2,)
    for ranks, v in [(2, 3), *((4, v) for v in stages_per_rank)]:
        if schedule not in LOOPED and v > 2:
            continue
        for microbatches in cases([4], [8]):
            if microbatches >= find_min_microbatches(schedule, ranks):
                shape = make_shape(schedule, ranks, microbatches, v)
                assert_no_more_than_torch(expand_schedule(schedule, shape), 4)


@given(
    compute_programs(stages_per_rank=4).filter(lambda d: d.shape.placement_rows == 1),
    st.integers(1, 3),
)
@settings(max_examples=30)
def test_exported_program_unshards_stages_that_torch_needs(program: Program, active: int) -> None:
    """torch's W and REDUCE_GRAD need a gathered stage, while ours do not."""
    active = min(active, max(map(len, program.shape.stages_on_rank)))
    lowered = compile(program, dp=2, zero=3, unsharded_stages=active)
    for row in format_cells(lowered, "torch-2.13"):
        require_unsharded([*map(_Action.from_str, row)], active)


@given(compute_programs(ranks=2, microbatches=4, stages_per_rank=4))
@settings(max_examples=30)
def test_random_drafts_gather_no_more_often_than_torch(program: Program) -> None:
    """Drafts with W are compared without prefetch.

    torch also keeps stages gathered for W, which needs no weights in schedir.
    So torch may gather less far ahead.
    """
    assert_no_more_than_torch(
        program, 3, (0,) if BACKWARD_WEIGHT in program.used_opcodes else (0, 1)
    )
