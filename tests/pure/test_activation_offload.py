"""Tests of activation offload: the selection and order of transfers, memory and errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, OrderError, ShapeError, SlotError, UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, add_tolerance
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.schedules import forward_only, get_built_in_schedules, gpipe, interleaved, one_f_one_b
from schedir.verify.check import check
from tests.cases import ALL, cases
from tests.laws import ZOO, find_min_microbatches, make_shape

SIZES = Sizes(saved=10, recompute_inputs=1)
COSTS = Costs(F=1, I=1, W=1, offload=1, reload=1, offload_to_disk=0.5, reload_from_disk=0.5)
TRAINED_SCHEDULES = {
    name: schedule
    for name, schedule in ZOO.items()
    if schedule is not get_built_in_schedules()["forward_only"]
}


def list_moves(program: Program, op: Opcode = Opcode.Offload) -> list[list[tuple[int, int]]]:
    """Return the (stage, microbatch) pairs that each rank offloads or reloads, in order."""
    return [[(i.stage, i.mb) for i in stream if i.op is op] for stream in program.streams]


def build_shape(schedule: Any, P: int = 4, m: int = 8) -> PipelineShape:
    return make_shape(schedule, P, max(m, find_min_microbatches(schedule, P)))


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("schedule", TRAINED_SCHEDULES.values(), ids=TRAINED_SCHEDULES)
def test_offload_within_free_lane_time_keeps_span(schedule: Any) -> None:
    shape, costs = build_shape(schedule), Costs(F=1, I=1, W=1, send=0.125, offload=0.5, reload=0.5)
    plain = simulate(compile(schedule, shape, costs=costs), costs, sizes=SIZES)
    for selection in ("all", "half"):
        program = compile(schedule, shape, costs=costs, offload=selection, debug=True)
        assert from_text(to_text(program)) == program == check(program)
        run = simulate(program, costs, sizes=SIZES)
        assert run.span <= plain.span * (1 + 1e-9)
        assert (run.peak_memory <= plain.peak_memory).all()
        if selection == "all":
            assert run.peak_memory.sum() < plain.peak_memory.sum()
        if selection == "half":
            assert not any(mb % 2 for pairs in list_moves(program) for _, mb in pairs)


def test_gpipe_offload_memory_matches_hand_count() -> None:
    """Two activations are on the device: a forward computes one while the other is offloaded."""
    options: list[dict[str, Any]] = [{}, {"offload": "all"}, {"offload": "half"}]
    runs = [
        simulate(compile(gpipe, PipelineShape(2, 8), costs=COSTS, **option), COSTS, sizes=SIZES)
        for option in options
    ]
    assert [run.span for run in runs] == [27, 27, 27]
    assert [run.peak_memory.tolist() for run in runs] == [[80, 80], [20, 30], [50, 60]]
    host = [max(curve.total) for curve in runs[1].memory_on("host")]
    assert host == [80, 70]


def test_offload_skips_activations_needed_soon() -> None:
    program = compile(one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload="all")
    assert [len(pairs) for pairs in list_moves(program)] == [8, 8, 8, 0]
    slow = Costs(F=1, B=2, offload=4, reload=4)
    program = compile(one_f_one_b, PipelineShape(4, 8), costs=slow, offload="all")
    counts = [len(pairs) for pairs in list_moves(program)]
    assert counts == [8, 0, 0, 0] or counts[2] == 0
    with pytest.warns(
        UserWarning, match="offload selects 3.0, but moves no activation of this selection"
    ):
        selection: Any = [2, (3, 0)]
        named = compile(one_f_one_b, PipelineShape(4, 8), costs=slow, offload=selection)
    assert [len(pairs) for pairs in list_moves(named)] == [0, 0, 8, 0]


def test_disk_offload_passes_through_host() -> None:
    program = compile(
        gpipe, PipelineShape(2, 8), costs=COSTS, offload="all", offload_to_disk="half", debug=True
    )
    assert list_moves(program, Opcode.OffloadToDisk) == list_moves(program, Opcode.ReloadFromDisk)
    disk_moves = list_moves(program, Opcode.OffloadToDisk)
    assert {mb for pairs in disk_moves for _, mb in pairs} == {0, 2, 4, 6}
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(max(curve.total) for curve in run.memory_on("disk")) == 40
    assert all(curve.total[-1] == 0 for curve in run.memory_on("host"))


def test_recomputed_microbatch_offloads_only_its_inputs() -> None:
    program = compile(
        gpipe, PipelineShape(2, 4), costs=COSTS, offload="all", recompute="all", debug=True
    )
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(run.memory_on("host")[0].total) <= 4 * 1
    order = [i.op.name for i in program.streams[0] if i.mb == 1 and i.op.name != "SendAct"]
    assert order[:4] == ["Forward", "Offload", "Reload", "Recompute"]


def test_offload_without_costs_is_planned_with_nonzero_costs() -> None:
    program = compile(gpipe, PipelineShape(1, 8), offload="all")
    assert program.slots[0].saved == 3
    timeline = simulate(program, Costs(F=1, B=2, offload=0.5, reload=0.5))
    assert timeline.span == simulate(compile(gpipe, PipelineShape(1, 8)), Costs(F=1, B=2)).span


# ---------------------------------------------------------------- limits


def test_memory_limit_needs_offload_and_recomputation() -> None:
    """Only offload together with recomputation meets a memory limit of 12.

    Plain 1F1B needs 40, recomputation 13 and offload 20.
    """
    shape = PipelineShape(4, 16)
    for limit, single_option in ((30, {}), (12, {"recompute": "all"}), (15, {"offload": "all"})):
        options: dict[str, Any] = single_option
        with pytest.raises(MemoryLimitError):
            compile(one_f_one_b, shape, costs=COSTS, sizes=SIZES, memory_limit=limit, **options)
    both_options: dict[str, Any] = {"recompute": "all", "offload": "all", "recompute_at": "late"}
    program = compile(one_f_one_b, shape, costs=COSTS, sizes=SIZES, memory_limit=12, **both_options)
    assert simulate(program, COSTS, sizes=SIZES).peak_memory.max() <= 12


def test_offload_fit_moves_more_under_smaller_limit_at_same_span() -> None:
    shape = PipelineShape(4, 16)
    plain = simulate(compile(one_f_one_b, shape, costs=COSTS), COSTS)
    numbers_of_moves = []
    for limit in (40, 30, 20):
        program = compile(
            one_f_one_b,
            shape,
            costs=COSTS,
            offload="fit",
            sizes=SIZES,
            memory_limit=limit,
            debug=True,
        )
        run = simulate(program, COSTS, sizes=SIZES)
        assert run.span == plain.span and run.peak_memory.max() <= limit
        numbers_of_moves.append(sum(map(len, list_moves(program))))
    assert numbers_of_moves[0] == 0 < numbers_of_moves[1] < numbers_of_moves[2] <= 3 * 16


@pytest.mark.parametrize(("move", "limit"), cases([(1, 12), (4, 32)], [(2, 20)]))
def test_recompute_and_offload_fit_is_no_slower_than_one_of_them(move: int, limit: int) -> None:
    """A limit of 12 needs both. With another limit, both together are no slower than one."""
    costs, shape = Costs(F=1, B=2, offload=move, reload=move), PipelineShape(4, 8 if ALL else 5)
    spans = []
    for fit_options in (
        {"recompute": "fit"},
        {"offload": "fit"},
        {"recompute": "fit", "offload": "fit"},
    ):
        options: dict[str, Any] = {"costs": costs, "sizes": SIZES, "memory_limit": limit}
        options |= fit_options
        try:
            spans.append(simulate(compile(one_f_one_b, shape, **options), costs).span)
        except MemoryLimitError:
            spans.append(np.inf)
    assert np.isfinite(spans[2]) and spans[2] <= min(spans[:2])
    assert (limit == 12) == np.isinf(spans[:2]).all()


@pytest.mark.parametrize(("schedule", "limit"), cases([(one_f_one_b, 20)], [(gpipe, 20)]))
def test_offload_fit_is_within_ten_percent_of_best_subset(schedule: Any, limit: int) -> None:
    """Compare "fit" with all subsets of offloads: it is at most 10 % longer than the best."""
    shape, costs = PipelineShape(2, 3), Costs(F=1, B=2, offload=1, reload=1)
    options: dict[str, Any] = {"costs": costs, "sizes": SIZES}
    all_pairs = [
        pair
        for pairs in list_moves(compile(schedule, shape, **options, offload="all"))
        for pair in pairs
    ]
    best = np.inf
    for number in range(len(all_pairs) + 1):
        for subset in combinations(all_pairs, number):
            try:
                program = compile(
                    schedule, shape, **options, memory_limit=limit, offload=subset or None
                )
            except MemoryLimitError:
                continue
            best = min(best, simulate(program, costs).span)
    fitted = compile(schedule, shape, **options, memory_limit=limit, offload="fit")
    assert best <= simulate(fitted, costs).span <= 1.1 * best


# ---------------------------------------------------------------- costs


NODE = Cluster(1, 2, flops=1e12, memory=80e9, hbm_bandwidth=1e12, nvlink_bandwidth=1e11,
    network_bandwidth=1e10, host_bandwidth=1e10,
               disk_bandwidth=1e9, latency=1e-3)  # fmt: skip


def test_cluster_computes_offload_costs_from_bytes() -> None:
    sizes = Sizes(activation=1e6, saved=(1e9, 2e9), params=1, grads=1, recompute_inputs=1e8)
    specified = Costs(F=0.1, B=0.2)
    filled = NODE.fill_costs(
        PipelineShape(2, 4), sizes, specified, offload=True, offload_to_disk=True
    )
    assert filled.offload == filled.reload == (0.101, 0.201)
    assert filled.offload_to_disk == filled.reload_from_disk == (1.001, 2.001)
    recomputed_costs = NODE.fill_costs(
        PipelineShape(2, 2), sizes, specified, offload=True, recomputed=[(0, 1)]
    )
    assert recomputed_costs.offload == ((0.101, 0.011), (0.201, 0.201))
    assert recomputed_costs.offload_to_disk is None
    with_offload_cost = NODE.fill_costs(
        PipelineShape(2, 4), sizes, replace(specified, offload=3.0), offload=True
    )
    assert with_offload_cost.offload == 3.0 and with_offload_cost.reload == (0.101, 0.201)
    with pytest.raises(UsageError, match="from sizes that are missing: saved"):
        NODE.fill_costs(PipelineShape(2, 4), replace(sizes, saved=0.0), specified, offload=True)
    with pytest.raises(UsageError, match="disk_bandwidth is missing"):
        replace(NODE, disk_bandwidth=None).fill_costs(
            PipelineShape(2, 4), sizes, specified, offload=True, offload_to_disk=True
        )
    with pytest.raises(UsageError, match="host"):
        replace(NODE, host_bandwidth=0)


def test_simulate_lists_missing_offload_costs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["simulate", "gpipe", "--ranks", "2", "--microbatches", "8", "--sizes", "saved=10"]
    assert main([*shape, "-O", "offload=all"]) == 0
    assert "without a cost, and so free: offload, reload; give --costs " in capsys.readouterr().out
    fits = [
        "-O",
        "offload=fit",
        "--memory-limit",
        "40",
        "-O",
        "offload_to_disk=fit",
        "-O",
        "host_memory_limit=40",
    ]
    costs = "F=1,B=2,offload=1,reload=1,offload_to_disk=0.5,reload_from_disk=0.5"
    assert main([*shape, *fits, "--costs", costs]) == 0
    assert "without a cost" not in capsys.readouterr().out


SHAPES = st.tuples(
    st.sampled_from(sorted(TRAINED_SCHEDULES)),
    st.just(2) | st.just(4),
    st.sampled_from([4, 8] if ALL else [4]),
)
TIMES = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0])


@settings(max_examples=8, deadline=None)
@given(SHAPES, st.floats(0.2, 0.9), st.floats(0.3, 1.0), st.data())
def test_memory_limits_hold_at_any_costs(
    counts: tuple[str, int, int], part: float, away: float, data: st.DataObject
) -> None:
    """A compiled program keeps the limits of all tiers, whatever its instructions cost."""
    schedule = TRAINED_SCHEDULES[counts[0]]
    shape = build_shape(schedule, *counts[1:])
    limit = part * max(map(float, compute_peaks(compile(schedule, shape), "device")))
    options: dict[str, Any] = {
        "offload": "fit",
        "offload_to_disk": "fit",
        "memory_limit": limit,
        "sizes": SIZES,
    }
    try:
        program = compile(schedule, shape, costs=COSTS, **options, host_memory_limit=1e9)
        host = away * max(compute_peaks(program, "host"))
        program = compile(schedule, shape, costs=COSTS, **options, host_memory_limit=host)
    except MemoryLimitError:
        return
    assert from_text(to_text(program)) == program
    for _ in range(3):
        names = ("F", "I", "W", "send", "offload", "reload", "offload_to_disk", "reload_from_disk")
        costs = Costs(**{name: data.draw(TIMES, label=name) for name in names})
        run = simulate(program, costs, sizes=SIZES)
        assert run.peak_memory.max() <= add_tolerance(limit)
        assert all(max(curve.total) <= add_tolerance(host) for curve in run.memory_on("host"))


def compute_peaks(program: Program, tier: str) -> list[float]:
    return [
        float(footprint.total_bytes.max())
        for footprint in compute_footprints(program, SIZES, tier, worst_case=True)
    ]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"offload": "fit"}, "needs sizes and memory_limit"),
        ({"offload": "fit", "sizes": SIZES}, "needs memory_limit"),
        (
            {"offload": "all", "offload_to_disk": "fit", "sizes": SIZES},
            "needs host_memory_limit",
        ),
        ({"offload": "all", "host_memory_limit": 20}, "host_memory_limit needs sizes"),
        ({"offload_to_disk": "all"}, "but offload is not set"),
        ({"offload": "all", "host_memory_limit": "much", "sizes": SIZES}, "number of bytes"),
        ({"offload": "all", "host_memory_limit": -1, "sizes": SIZES}, "number of bytes"),
        *(
            ({"offload": wrong}, "offload must be")
            for wrong in (4, "some", [1.5], [True], [(0, 1.5)], b"all")
        ),
        ({"offload": [4]}, "offload selects stage 4, but the last stage is 3"),
        ({"offload": [(0, 8)]}, "offload selects microbatch 8, but the last microbatch is 7"),
        ({"offload": [0], "frozen_stages": 1}, "offload selects stage 0, which is frozen"),
    ],
)
def test_invalid_offload_options_are_refused(how: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compile(one_f_one_b, PipelineShape(4, 8), **how)


def test_host_memory_limit_error_names_rank() -> None:
    with pytest.raises(MemoryLimitError, match="rank 0 needs 40 B on the host") as caught:
        compile(
            one_f_one_b,
            PipelineShape(4, 8),
            costs=COSTS,
            offload="all",
            sizes=SIZES,
            host_memory_limit=5,
        )
    assert caught.value.tier == "host" and caught.value.live_values[0][0] == "saved"
    assert "offload_to_disk" in caught.value.hint


def test_too_few_saved_or_host_slots_are_refused() -> None:
    program = compile(gpipe, PipelineShape(2, 8), offload="all", sizes=SIZES, host_memory_limit=80)
    for name in ("saved", "host"):
        slots = tuple(counts._replace(**{name: 1}) for counts in program.slots)
        with pytest.raises(SlotError, match=f"rank . has 1 {name} slot, but .* needs one more"):
            check(replace(program, slots=slots))


def test_offload_without_backward_is_refused() -> None:
    with pytest.raises(ShapeError, match="no backward"):
        compile(forward_only, PipelineShape(2, 4), offload="all")


def test_infer_options_restores_offload_options() -> None:
    from schedir.compiler.relower import extract_compute, infer_options

    program = compile(
        interleaved, PipelineShape(2, 4, 2), costs=COSTS, offload="half", offload_to_disk=[0]
    )
    recompiled = compile(
        extract_compute(program), costs=COSTS, **infer_options(program, "per_device")
    )
    assert list_moves(recompiled) == list_moves(program)
    assert list_moves(recompiled, Opcode.ReloadFromDisk) == list_moves(
        program, Opcode.ReloadFromDisk
    )
    assert np.array_equal(recompiled.slots, program.slots)


def test_order_error_is_same_with_and_without_offload() -> None:
    """A program that cannot finish is refused with the same error with and without offload."""
    for shape in (PipelineShape(4, 8, optimizer_steps=2), PipelineShape(2, 4, optimizer_steps=2)):
        texts = []
        for options in (
            {},
            {"offload": "all"},
            {"offload": "fit", "memory_limit": 30, "sizes": SIZES},
        ):
            with pytest.raises(OrderError) as caught:
                compile(one_f_one_b, shape, costs=COSTS, **options)
            texts.append(str(caught.value))
        assert texts[0] == texts[1] == texts[2]


def test_equivalent_offload_options_compile_equally() -> None:
    options: dict[str, Any] = {"costs": COSTS, "sizes": SIZES, "memory_limit": 30}
    from_number = compile(one_f_one_b, PipelineShape(4, 8), **options, offload="fit")
    from_text = compile(
        one_f_one_b, PipelineShape(4, 8), **(options | {"memory_limit": "30B"}), offload="fit"
    )
    assert from_text == from_number
    from_iterators = compile(
        one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload=iter([0]), offload_to_disk=iter([0])
    )
    assert from_iterators == compile(
        one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload=[0], offload_to_disk=[0]
    )
    assert len(list_moves(from_iterators, Opcode.OffloadToDisk)[0]) == 8


@pytest.mark.parametrize("most", [1.0, 1e290])
def test_offload_with_zero_or_huge_costs_compiles(most: float) -> None:
    """Offload works with computes and moves that take no time, or all the time."""
    for costs in (Costs(F=1, B=(0, 0), offload=1, reload=(0, most)), Costs(offload=most, reload=1)):
        program = compile(gpipe, PipelineShape(2, 4), costs=costs, offload=[0, 1])
        assert sum(map(len, list_moves(program))) == 8
        assert simulate(program, costs).span >= 4
