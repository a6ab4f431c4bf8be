"""Activation offload: which activations are moved and when, the memory, and errors."""

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
from schedir.io import torch_csv
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
from tests.laws import ZOO, least, shape_of

SIZES = Sizes(saved=10, recompute_inputs=1)
COSTS = Costs(F=1, I=1, W=1, offload=1, reload=1, offload_to_disk=0.5, reload_from_disk=0.5)
TRAINED = {
    name: each for name, each in ZOO.items() if each is not get_built_in_schedules()["forward_only"]
}


def moved(program: Program, op: Opcode = Opcode.Offload) -> list[list[tuple[int, int]]]:
    """Return the (stage, microbatch) pairs that each rank moves, in its order."""
    return [[(i.stage, i.mb) for i in stream if i.op is op] for stream in program.streams]


def of(schedule: Any, P: int = 4, m: int = 8) -> PipelineShape:
    return shape_of(schedule, P, max(m, least(schedule, P)))


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("schedule", TRAINED.values(), ids=TRAINED)
def test_all_that_fits_on_the_lanes_costs_nothing(schedule: Any) -> None:
    shape, costs = of(schedule), Costs(F=1, I=1, W=1, send=0.125, offload=0.5, reload=0.5)
    plain = simulate(compile(schedule, shape, costs=costs), costs, sizes=SIZES)
    for how in ("all", "half"):
        program = compile(schedule, shape, costs=costs, offload=how, debug=True)
        assert from_text(to_text(program)) == program == check(program)
        run = simulate(program, costs, sizes=SIZES)
        assert run.span <= plain.span * (1 + 1e-9)
        assert (run.peak_memory <= plain.peak_memory).all()
        if how == "all":
            assert run.peak_memory.sum() < plain.peak_memory.sum()
        if how == "half":
            assert not any(mb % 2 for own in moved(program) for _, mb in own)


def test_memory_is_that_counted_by_hand() -> None:
    """With offload, two activations are on the device: one is moved while the next is computed."""
    how: list[dict[str, Any]] = [{}, {"offload": "all"}, {"offload": "half"}]
    runs = [
        simulate(compile(gpipe, PipelineShape(2, 8), costs=COSTS, **each), COSTS, sizes=SIZES)
        for each in how
    ]
    assert [run.span for run in runs] == [27, 27, 27]
    assert [run.peak_memory.tolist() for run in runs] == [[80, 80], [20, 30], [50, 60]]
    host = [max(curve.total) for curve in runs[1].memory_on("host")]
    assert host == [80, 70]


def test_what_comes_back_ends_as_late_as_it_may() -> None:
    """Each Reload ends before its B starts, and reloads have the order of microbatches."""
    program = compile(gpipe, PipelineShape(1, 4), costs=COSTS, offload="all")
    spans = simulate(program, COSTS).spans
    back = {s["mb"]: s["end"] for s in spans if s["op"] == Opcode.Reload}
    used = {s["mb"]: s["start"] for s in spans if s["op"] == Opcode.Backward}
    assert all(back[mb] <= used[mb] for mb in back)
    assert [int(s["mb"]) for s in spans if s["op"] == Opcode.Reload] == sorted(back)


def test_nothing_goes_that_is_needed_at_once() -> None:
    program = compile(one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload="all")
    assert [len(own) for own in moved(program)] == [8, 8, 8, 0]
    slow = Costs(F=1, B=2, offload=4, reload=4)
    program = compile(one_f_one_b, PipelineShape(4, 8), costs=slow, offload="all")
    assert [len(own) for own in moved(program)] == [8, 0, 0, 0] or moved(program)[2] == []
    with pytest.warns(
        UserWarning, match="offload selects 3.0, but moves no activation of this selection"
    ):
        which: Any = [2, (3, 0)]
        named = compile(one_f_one_b, PipelineShape(4, 8), costs=slow, offload=which)
    assert [len(own) for own in moved(named)] == [0, 0, 8, 0]


def test_spilled_goes_on_and_comes_back_through_the_host() -> None:
    program = compile(
        gpipe, PipelineShape(2, 8), costs=COSTS, offload="all", offload_to_disk="half", debug=True
    )
    assert moved(program, Opcode.OffloadToDisk) == moved(program, Opcode.ReloadFromDisk)
    assert {mb for own in moved(program, Opcode.OffloadToDisk) for _, mb in own} == {0, 2, 4, 6}
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(max(curve.total) for curve in run.memory_on("disk")) == 40
    assert all(curve.total[-1] == 0 for curve in run.memory_on("host"))


def test_what_is_recomputed_moves_its_checkpoint() -> None:
    program = compile(
        gpipe, PipelineShape(2, 4), costs=COSTS, offload="all", recompute="all", debug=True
    )
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(run.memory_on("host")[0].total) <= 4 * 1
    order = [i.op.name for i in program.streams[0] if i.mb == 1 and i.op.name != "SendAct"]
    assert order[:4] == ["Forward", "Offload", "Reload", "Recompute"]


def test_moves_that_nobody_prices_are_planned_as_if_they_took_time() -> None:
    program = compile(gpipe, PipelineShape(1, 8), offload="all")
    assert program.slots[0].saved == 3
    late = simulate(program, Costs(F=1, B=2, offload=0.5, reload=0.5))
    assert late.span == simulate(compile(gpipe, PipelineShape(1, 8)), Costs(F=1, B=2)).span


# ---------------------------------------------------------------- limits


def test_a_limit_that_only_offload_holds() -> None:
    """Only offload together with recomputation meets a memory limit of 12.

    Plain 1F1B needs 40, recomputation 13 and offload 20.
    """
    shape = PipelineShape(4, 16)
    for limit, how in ((30, {}), (12, {"recompute": "all"}), (15, {"offload": "all"})):
        more: dict[str, Any] = how
        with pytest.raises(MemoryLimitError):
            compile(one_f_one_b, shape, costs=COSTS, sizes=SIZES, memory_limit=limit, **more)
    both: dict[str, Any] = {"recompute": "all", "offload": "all", "recompute_at": "late"}
    program = compile(one_f_one_b, shape, costs=COSTS, sizes=SIZES, memory_limit=12, **both)
    assert simulate(program, COSTS, sizes=SIZES).peak_memory.max() <= 12


def test_as_few_as_fit_and_no_longer() -> None:
    shape = PipelineShape(4, 16)
    plain = simulate(compile(one_f_one_b, shape, costs=COSTS), COSTS)
    number = []
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
        number.append(sum(map(len, moved(program))))
    assert number[0] == 0 < number[1] < number[2] <= 3 * 16


@pytest.mark.parametrize(("move", "limit"), [(1, 12), (2, 20), (4, 32)])
def test_with_both_the_step_is_as_short_as_with_either(move: int, limit: int) -> None:
    """A limit of 12 needs both. With other limits, both are at least as fast as one of them."""
    costs, shape = Costs(F=1, B=2, offload=move, reload=move), PipelineShape(4, 8)
    spans = []
    for how in ({"recompute": "fit"}, {"offload": "fit"}, {"recompute": "fit", "offload": "fit"}):
        more: dict[str, Any] = {"costs": costs, "sizes": SIZES, "memory_limit": limit, **how}
        try:
            spans.append(simulate(compile(one_f_one_b, shape, **more), costs).span)
        except MemoryLimitError:
            spans.append(np.inf)
    assert np.isfinite(spans[2]) and spans[2] <= min(spans[:2])
    assert (limit == 12) == np.isinf(spans[:2]).all()


@pytest.mark.parametrize(("schedule", "limit"), [(gpipe, 20), (one_f_one_b, 20)])
def test_no_choice_of_the_same_kind_is_much_better(schedule: Any, limit: int) -> None:
    """Compare "fit" with all subsets of offloads: it is at most 10 % longer than the best."""
    shape, costs = PipelineShape(2, 3), Costs(F=1, B=2, offload=1, reload=1)
    how: dict[str, Any] = {"costs": costs, "sizes": SIZES}
    there = [one for own in moved(compile(schedule, shape, **how, offload="all")) for one in own]
    best = np.inf
    for number in range(len(there) + 1):
        for some in combinations(there, number):
            try:
                one = compile(schedule, shape, **how, memory_limit=limit, offload=some or None)
            except MemoryLimitError:
                continue
            best = min(best, simulate(one, costs).span)
    found = compile(schedule, shape, **how, memory_limit=limit, offload="fit")
    assert best <= simulate(found, costs).span <= 1.1 * best


# ---------------------------------------------------------------- costs


NODE = Cluster(1, 2, flops=1e12, memory=80e9, hbm_bandwidth=1e12, nvlink_bandwidth=1e11,
    network_bandwidth=1e10, host_bandwidth=1e10,
               disk_bandwidth=1e9, latency=1e-3)  # fmt: skip


def test_a_cluster_prices_moves_by_their_bytes() -> None:
    sizes = Sizes(activation=1e6, saved=(1e9, 2e9), params=1, grads=1, recompute_inputs=1e8)
    told = Costs(F=0.1, B=0.2)
    found = NODE.fill_costs(PipelineShape(2, 4), sizes, told, offload=True, offload_to_disk=True)
    assert found.offload == found.reload == (0.101, 0.201)
    assert found.offload_to_disk == found.reload_from_disk == (1.001, 2.001)
    again = NODE.fill_costs(PipelineShape(2, 2), sizes, told, offload=True, recomputed=[(0, 1)])
    assert again.offload == ((0.101, 0.011), (0.201, 0.201)) and again.offload_to_disk is None
    own = NODE.fill_costs(PipelineShape(2, 4), sizes, replace(told, offload=3.0), offload=True)
    assert own.offload == 3.0 and own.reload == (0.101, 0.201)
    with pytest.raises(UsageError, match="from sizes that are missing: saved"):
        NODE.fill_costs(PipelineShape(2, 4), replace(sizes, saved=0.0), told, offload=True)
    with pytest.raises(UsageError, match="disk_bandwidth is missing"):
        replace(NODE, disk_bandwidth=None).fill_costs(
            PipelineShape(2, 4), sizes, told, offload=True, offload_to_disk=True
        )
    with pytest.raises(UsageError, match="host"):
        replace(NODE, host_bandwidth=0)


def test_the_command_says_what_is_free(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main([*shape, "-O", "offload=all", "-O", "host_memory_limit=30"]) == 2
    assert "rank 0 needs 80 B on the host" in capsys.readouterr().err
    assert main([*shape, "-O", "offload=all", "-O", "host_memory_limit=none"]) == 2


SHAPES = st.tuples(
    st.sampled_from(sorted(TRAINED)), st.just(2) | st.just(4), st.just(4) | st.just(8)
)
TIMES = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0])


@settings(max_examples=8, deadline=None)
@given(SHAPES, st.floats(0.2, 0.9), st.floats(0.3, 1.0), st.data())
def test_limits_hold_whatever_takes_how_long(
    counts: tuple[str, int, int], part: float, away: float, data: st.DataObject
) -> None:
    """Programs keep the limits of all tiers at any costs, or the compilation is refused."""
    schedule = TRAINED[counts[0]]
    shape = of(schedule, *counts[1:])
    limit = part * max(map(float, peaks(compile(schedule, shape), "device")))
    how: dict[str, Any] = {
        "offload": "fit",
        "offload_to_disk": "fit",
        "memory_limit": limit,
        "sizes": SIZES,
    }
    try:
        program = compile(schedule, shape, costs=COSTS, **how, host_memory_limit=1e9)
        host = away * max(peaks(program, "host"))
        program = compile(schedule, shape, costs=COSTS, **how, host_memory_limit=host)
    except MemoryLimitError:
        return
    assert from_text(to_text(program)) == program
    for _ in range(3):
        names = ("F", "I", "W", "send", "offload", "reload", "offload_to_disk", "reload_from_disk")
        costs = Costs(**{name: data.draw(TIMES, label=name) for name in names})
        run = simulate(program, costs, sizes=SIZES)
        assert run.peak_memory.max() <= add_tolerance(limit)
        assert all(max(curve.total) <= add_tolerance(host) for curve in run.memory_on("host"))


def peaks(program: Program, tier: str) -> list[float]:
    return [
        float(own.total_bytes.max())
        for own in compute_footprints(program, SIZES, tier, worst_case=True)
    ]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"offload": 4}, UsageError, "offload must be"),
        ({"offload": "some"}, UsageError, "offload must be"),
        ({"offload": [4]}, UsageError, "offload selects stage 4, but the last stage is 3"),
        (
            {"offload": [(0, 8)]},
            UsageError,
            "offload selects microbatch 8, but the last microbatch is 7",
        ),
        (
            {"offload": [0], "frozen_stages": 1},
            UsageError,
            "offload selects stage 0, which is frozen",
        ),
    ],
)
def test_what_says_nothing_is_refused(how: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compile(one_f_one_b, PipelineShape(4, 8), **how)


@pytest.mark.parametrize(
    ("how", "says"),
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
    ],
)
def test_who_chooses_is_told_by_what(how: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compile(one_f_one_b, PipelineShape(4, 8), **how)


def test_what_the_host_cannot_hold_is_refused_by_rank() -> None:
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


def test_slots_of_which_too_few_are_said_are_refused() -> None:
    program = compile(gpipe, PipelineShape(2, 8), offload="all", sizes=SIZES, host_memory_limit=80)
    for name in ("saved", "host"):
        slots = tuple(own._replace(**{name: 1}) for own in program.slots)
        with pytest.raises(SlotError, match=f"rank . has 1 {name} slot, but .* needs one more"):
            check(replace(program, slots=slots))


def test_forwards_alone_save_nothing() -> None:
    with pytest.raises(ShapeError, match="no backward"):
        compile(forward_only, PipelineShape(2, 4), offload="all")


def test_a_program_says_what_it_was_lowered_with() -> None:
    from schedir.compiler.relower import extract_compute, infer_options

    program = compile(
        interleaved, PipelineShape(2, 4, 2), costs=COSTS, offload="half", offload_to_disk=[0]
    )
    again = compile(extract_compute(program), costs=COSTS, **infer_options(program, "per_device"))
    assert moved(again) == moved(program)
    assert moved(again, Opcode.ReloadFromDisk) == moved(program, Opcode.ReloadFromDisk)
    assert np.array_equal(again.slots, program.slots)


def test_what_cannot_finish_is_refused_as_without() -> None:
    """A program that cannot finish is refused with the same error with and without offload."""
    for shape in (PipelineShape(4, 8, optimizer_steps=2), PipelineShape(2, 4, optimizer_steps=2)):
        texts = []
        for how in ({}, {"offload": "all"}, {"offload": "fit", "memory_limit": 30, "sizes": SIZES}):
            with pytest.raises(OrderError) as caught:
                compile(one_f_one_b, shape, costs=COSTS, **how)
            texts.append(str(caught.value))
        assert texts[0] == texts[1] == texts[2]


def test_what_is_said_in_other_forms_is_the_same() -> None:
    shape: dict[str, Any] = {"costs": COSTS, "sizes": SIZES, "memory_limit": 30}
    told = compile(one_f_one_b, PipelineShape(4, 8), **shape, offload="fit")
    text = compile(
        one_f_one_b, PipelineShape(4, 8), **(shape | {"memory_limit": "30B"}), offload="fit"
    )
    assert text == told
    once = compile(
        one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload=iter([0]), offload_to_disk=iter([0])
    )
    assert once == compile(
        one_f_one_b, PipelineShape(4, 8), costs=COSTS, offload=[0], offload_to_disk=[0]
    )
    assert len(moved(once, Opcode.OffloadToDisk)[0]) == 8
    wrong: list[Any] = [[1.5], [True], [(0, 1.5)], b"all"]
    for which in wrong:
        with pytest.raises(UsageError, match="offload must be"):
            compile(one_f_one_b, PipelineShape(4, 8), offload=which)


def test_torch_has_no_moves() -> None:
    """Refuse the export to torch's CSV format, which has no offload."""
    program = compile(one_f_one_b, PipelineShape(2, 4), costs=COSTS, offload="all")
    for form in torch_csv.CSV_FORMATS:
        with pytest.raises(UsageError, match="the program offloads activations"):
            torch_csv.to_csv(program, form)


@pytest.mark.parametrize("most", [1.0, 1e290])
def test_what_takes_no_time_and_what_takes_all(most: float) -> None:
    """Offload works with computes and moves that take no time, or all the time."""
    for costs in (Costs(F=1, B=(0, 0), offload=1, reload=(0, most)), Costs(offload=most, reload=1)):
        program = compile(gpipe, PipelineShape(2, 4), costs=costs, offload=[0, 1])
        assert sum(map(len, moved(program))) == 8
        assert simulate(program, costs).span >= 4
