"""Tests of expert parallelism: the all-to-alls of a program, their costs, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.expert_parallel import combined_1f1b
from schedir import (
    Cluster,
    Costs,
    PipelineShape,
    Program,
    Sizes,
    check,
    compile,
    from_text,
    schedules,
    simulate,
    to_text,
)
from schedir.compiler.compile import check_memory
from schedir.errors import (
    MemoryLimitError,
    SchedirError,
    ShapeError,
    UsageError,
)
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.isa.instructions import BACKWARD_OPS, EP_COLLECTIVE_OPS, Opcode
from schedir.predict.bubble_causes import IdleCause, idleness
from tests.mutants import built_in_schedules

EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "stage_segments": "dc"}
ALL_TO_ALL = Costs(F=1, B=2, I=1, W=1, dispatch=0.7, combine=0.5)


def compute_exposed_time(program: Program, costs: Costs) -> float:
    """Return the time in which ranks wait for all-to-alls, summed over ranks."""
    idle = idleness(simulate(program, costs))
    waits = idle[idle["cause"] == IdleCause.ALL_TO_ALL]
    return float((waits["end"] - waits["start"]).sum())


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(built_in_schedules()),
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    letters=st.sampled_from(["dc", "dcdc", "d.c", ".dc."]),
)
def test_boundary_letters_give_all_to_alls(
    schedule: Any, ranks: int, microbatches: int, letters: str
) -> None:
    options = EXPERTS | {"stage_segments": letters}
    try:
        program = compile(schedule, ranks=ranks, microbatches=microbatches, **options)
    except SchedirError:
        return  # the schedule has no program of this shape
    check(program, "per_direction")
    has_backward = any(op in BACKWARD_OPS for op in program.used_opcodes)
    for letter, forward_op, backward_op in (
        ("d", Opcode.Dispatch, Opcode.DispatchGrad),
        ("c", Opcode.Combine, Opcode.CombineGrad),
    ):
        count = program.segment_boundaries.count(letter) * program.shape.microbatches
        assert int((program.op == forward_op).sum()) == count
        assert int((program.op == backward_op).sum()) == count * has_backward
    assert from_text(to_text(program)) == program


def test_single_rank_waits_once_per_all_to_all() -> None:
    program = compile(schedules.gpipe, ranks=1, microbatches=1, **EXPERTS)
    timeline = simulate(program, ALL_TO_ALL)
    # A forward is F dispatch F combine F, and a backward is B combine_grad B dispatch_grad B.
    assert timeline.span == pytest.approx(3 * 1 + 0.7 + 0.5 + 3 * 2 + 0.7 + 0.5)
    assert compute_exposed_time(program, ALL_TO_ALL) == pytest.approx(2.4)


def test_other_microbatches_hide_all_to_alls() -> None:
    shape: dict[str, Any] = {"ranks": 4, "microbatches": 16}
    exposed = compile("eager_1f1b", **shape, **EXPERTS)
    filled = compile(
        "eager_1f1b", **shape, **EXPERTS, fill_collective_waits="all", costs=ALL_TO_ALL
    )
    combined = compile(combined_1f1b, **shape, **EXPERTS)
    assert compute_exposed_time(filled, ALL_TO_ALL) < 0.3 * compute_exposed_time(
        exposed, ALL_TO_ALL
    )
    assert compute_exposed_time(combined, ALL_TO_ALL) < 0.4 * compute_exposed_time(
        exposed, ALL_TO_ALL
    )
    assert simulate(combined, ALL_TO_ALL).span < simulate(exposed, ALL_TO_ALL).span


def test_no_all_to_alls_without_expert_parallelism() -> None:
    program = compile(schedules.gpipe, ranks=2, microbatches=2, stage_segments="dc")
    assert program.segment_boundaries == "..-.." and program.ep == 1
    assert program.used_opcodes.isdisjoint(EP_COLLECTIVE_OPS)
    with_tp = compile(
        schedules.gpipe, ranks=1, microbatches=2, tp=2, dp=2, ep=2, stage_segments="fgdc"
    )
    assert with_tp.segment_boundaries == "fgdc"
    assert {Opcode.TPReduceAct, Opcode.Combine} <= with_tp.used_opcodes


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"ep": 1}, {"segment_boundaries", "ep"}),
        ({"ep": 3}, {"ep", "dp"}),
        ({"segment_boundaries": "d.-.."}, {"segment_boundaries"}),
        ({"segment_boundaries": "cd-dc"}, {"segment_boundaries"}),
        ({"segment_boundaries": ".d-c."}, {"segment_boundaries"}),
        ({"ep": 0}, {"ep"}),
    ],
)
def test_invalid_ep_or_segment_boundaries_are_refused(
    change: dict[str, Any], fields: set[str]
) -> None:
    program = compile(schedules.gpipe, ranks=2, microbatches=2, **EXPERTS)
    with pytest.raises(ShapeError) as caught:
        replace(program, **change)
    assert {*caught.value.fields} == fields


def test_peak_memory_includes_routed_rows_and_expert_buffer() -> None:
    program = compile(schedules.one_f_one_b, ranks=2, microbatches=4, **EXPERTS)
    rows = Sizes(activation=2, saved=10, routed=3, expert_buffer=5)
    by_hand = Sizes(activation=(10, 10, 2, 10, 10, 2), saved=10)
    peaks = [simulate(program, sizes=sizes).peak_memory.tolist() for sizes in (rows, by_hand)]
    assert peaks[0] == peaks[1]
    limit = max(peaks[0]) - 1
    with pytest.raises(MemoryLimitError):
        check_memory(program, rows, limit)
    check_memory(program, replace(rows, routed=0, expert_buffer=0), limit)


@pytest.mark.parametrize(("ranks", "bandwidth"), [(4, 25e9), (2, 300e9)])
def test_cluster_computes_all_to_all_costs_from_link(ranks: int, bandwidth: float) -> None:
    """With 4 ranks, the two replicas of a group are on two nodes. With 2 ranks, they are on one."""
    cluster = Cluster(
        nodes=2, gpus_per_node=4, flops=312e12, memory=80e9, hbm_bandwidth=2e12,
        nvlink_bandwidth=300e9, network_bandwidth=25e9, latency=1e-5,
    )  # fmt: skip
    sizes = Sizes(activation=1e6, params=1e9, grads=1e9, optimizer=4e9, routed=32e6)
    shape, costs = PipelineShape(ranks, 4), Costs(F=0.01, B=0.02)
    filled = cluster.fill_costs(shape, sizes, costs, dp=8 // ranks, ep=2)
    assert filled.dispatch == filled.combine == pytest.approx(1e-5 + 16e6 / bandwidth)
    specified = {"ranks": ranks, "microbatches": 4, "dp": 8 // ranks, "ep": 2}
    request = Request(
        Source("one_f_one_b"), specified, {}, costs, cluster, sizes,
        compile_options={"stage_segments": "dc"},
    )  # fmt: skip
    assert request.program_costs.dispatch == filled.dispatch
    assert compute_exposed_time(request.program, request.program_costs) > 0
    for change in ({"stage_segments": "fgdc", "tp": 2}, {"microbatch_chunks": 2}):
        options = {k: v for k, v in change.items() if k != "tp"}
        tp = {"tp": 2, "dp": 4 // ranks * 2} if "tp" in change else {}
        other = replace(request, compile_options=options, specified=specified | tp)
        with pytest.raises(UsageError, match="--cluster cannot compute"):
            _ = other.timeline
