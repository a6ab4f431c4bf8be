"""States on the disk: each stage's is fetched, loaded, stepped, stored and spilled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Cluster, Costs, PipelineShape, Program, Sizes
from schedir.analysis.memory.footprint import held
from schedir.analysis.progress_models import MODELS
from schedir.errors import CompletenessError, MemoryLimitError, OrderError, SlotError, UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.predict.bubble_causes import IdleCause, by_cause, idleness
from schedir.schedules import interleaved, looped_bfs
from schedir.testing import shapes
from schedir.testing.strategies import random_compute_program
from schedir.training.config.run_config import MemoryConfig

OF_DISK = (Opcode.FetchState, Opcode.SpillState)
ROWS = (*OF_DISK, Opcode.LoadState, Opcode.StepStage, Opcode.StoreState)
PLAN = PipelineShape(2, 4, 3)


def lowered(schedule: Any = interleaved, plan: PipelineShape = PLAN, **how: Any) -> Program:
    return schedir.compile(schedule, plan, states="disk", **how)


def names(program: Program, rank: int) -> list[str]:
    return [str(i) for i in program.streams[rank] if i.op in ROWS]


def test_fetches_stand_ahead_by_the_rooms() -> None:
    assert names(lowered(), 1) == [
        "fetch_state 5", "load_state 5", "fetch_state 3", "load_state 3", "fetch_state 1",
        "step_stage 5", "store_state 5", "spill_state 5", "step_stage 3", "store_state 3",
        "spill_state 3", "load_state 1", "step_stage 1", "store_state 1", "spill_state 1",
    ]  # fmt: skip
    alone = names(lowered(state_slots=1, state_rooms=1), 1)
    order = ("fetch_state", "load_state", "step_stage", "store_state", "spill_state")
    assert alone == [f"{what} {s}" for s in (5, 3, 1) for what in order]
    for rooms in (1, 2, 3):
        (said,) = lowered(looped_bfs, PipelineShape(1, 2, 4), state_rooms=rooms).slots
        assert said.said() == {"state": 2, "state_host": rooms}
        few = lowered(looped_bfs, PipelineShape(1, 2, 4), state_rooms=rooms, slots="fewest").slots[
            0
        ]
        assert few.state_host == rooms


def test_few_stages_pass_through_as_many_rooms_as_told() -> None:
    """Also where all of a rank's are loaded before any is stored: by hand, of two stages the second
    read need not wait for a load, nor the second store for a write."""
    costs = Costs(F=1, B=2, load_state=0.8, step_stage=0.1, store_state=0.8,
                  fetch_state=2, spill_state=2)  # fmt: skip
    for stages in (1, 2, 3, 4):
        for slots in (1, 2, 3):
            for rooms in (1, 2, 3):
                program = lowered(
                    looped_bfs, PipelineShape(1, 2, stages), state_slots=slots, state_rooms=rooms
                )
                assert program.slots[0].state_host == min(stages, rooms)
    two = [lowered(looped_bfs, PipelineShape(1, 2, 2), state_rooms=rooms) for rooms in (1, 2)]
    spans = [schedir.simulate(program, costs).span for program in two]
    ends = 12 + 0.1 + 0.8  # of the first store: forwards and backwards hide what comes before
    assert spans[1] == pytest.approx(ends + 2 + 2)
    assert spans[0] == pytest.approx(12 + 0.8 + 0.8 + 2 + 0.8 + 2)  # behind the last load


def test_a_chart_tells_tiers_of_what_forwards_saved() -> None:
    """States are none of it: beside them it would say that nothing lies there."""
    (*_, head, _, _) = schedir.viz.text_chart(schedir.simulate(lowered()))
    assert "held" in head[0][0] and "host" not in head[0][0] and "disk" not in head[0][0]
    moved = schedir.compile(interleaved, PLAN, states="disk", offload=[0])
    (*_, head, _, _) = schedir.viz.text_chart(schedir.simulate(moved))
    assert "host" in head[0][0] and "disk" not in head[0][0]


@given(shapes(), st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_any_draft_has_them_once_and_is_legal(
    plan: PipelineShape, seed: int, slots: int, rooms: int, zero: int
) -> None:
    draft = random_compute_program(plan, random.Random(seed))
    how: dict[str, Any] = {"clip": True, "zero": zero, "dp": 2, "tied": plan.stages > 1}
    program = lowered(draft, plan, state_slots=slots, state_rooms=rooms, **how)
    for model in MODELS:
        schedir.check(program, model, blocks=True)
    assert schedir.from_text(schedir.to_text(program)) == program
    for op in ROWS:
        assert np.count_nonzero(program.op == op) == plan.holders.size
    host = schedir.compile(draft, plan, states="host", state_slots=slots, **how)
    assert (program.words[~np.isin(program.op, OF_DISK)] == host.words).all()
    assert program.digest != host.digest
    again = lowered(draft, plan, state_slots=slots, state_rooms=rooms, **how)
    assert again == program


# ---------------------------------------------------------------- what is refused


def moved(text: str, what: str, before: str) -> Program:
    """An instruction's line of rank 1 taken out, and put before another one's, or nowhere."""
    first, text = text.split("rank 1", 1)
    assert text.count(f"  {what}\n") == 1, what
    text = text.replace(f"  {what}\n", "")
    if before:
        assert text.count(f"  {before}\n") == 1, before
        text = text.replace(f"  {before}\n", f"  {what}\n  {before}\n")
    return schedir.from_text(f"{first}rank 1{text}")


@pytest.mark.parametrize(
    ("what", "before", "error", "says"),
    [
        ("load_state 5", "fetch_state 5", OrderError, "fetch_state 5 gives only later"),
        ("spill_state 5", "store_state 5", OrderError, "gives only later"),
        ("step", "spill_state 1", OrderError, "spill_state 1 gives only later"),
        ("fetch_state 3", "load_state 5", SlotError, "1 state_host slot, and fetch_state 3"),
        ("fetch_state 3", "", CompletenessError, "fetch_state 3"),
        ("spill_state 3", "", CompletenessError, "spill_state 3"),
    ],
)
def test_a_wrong_order_is_refused(what: str, before: str, error: Any, says: str) -> None:
    rooms = 1 if error is SlotError else 2
    text = schedir.to_text(lowered(clip=True, state_rooms=rooms), folded=False)
    with pytest.raises(error, match=says):
        schedir.check(moved(text, what, before), blocks=True)


def test_what_does_not_go_together_is_refused() -> None:
    text = schedir.to_text(lowered(), folded=False)
    with pytest.raises((CompletenessError, OrderError)):
        schedir.check(schedir.from_text(text.replace("states disk\n", "states host\n")))
    with pytest.raises(UsageError, match="state_rooms is 2, and the optimizer's states lie on the"):
        schedir.compile(interleaved, PLAN, states="host", state_rooms=2)
    with pytest.raises(UsageError, match="stay on the device"):
        schedir.compile(interleaved, PLAN, state_rooms=2)
    with pytest.raises(UsageError, match="optimizer of a stage lies on the disk"):
        held(lowered(), Sizes(weights=10))
    with pytest.raises(UsageError, match="there is no folder for it"):
        MemoryConfig(states="disk")  # type: ignore[call-arg]
    MemoryConfig(states="disk", folder="/nvme")  # type: ignore[call-arg]


# ---------------------------------------------------------------- bytes and time


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("rooms", [1, 2, 3])
def test_bytes_are_told_by_tier(zero: int, rooms: int) -> None:
    """On the disk all of the state all the time; on the host and the device only what is on its
    way, as many as there is room for."""
    bytes_of = (8, 16, 24, 32, 40, 48)
    sizes = Sizes(optimizer=bytes_of, params=2, grads=2)
    program = lowered(dp=2, zero=zero, state_rooms=rooms)
    costs = Costs(F=1, B=1, load_state=2, step_stage=3, store_state=2, fetch_state=4, spill_state=5)
    run = schedir.simulate(program, costs, sizes=sizes)
    part = 2 if zero else 1
    for rank, curve in enumerate(run.memory_on("disk")):
        assert (curve.held == sum(bytes_of[rank::2]) / part).all()
    for rank, curve in enumerate(run.memory_on("host")):
        each = sorted((size / part for size in bytes_of[rank::2]), reverse=True)
        assert curve.held.max() <= sum(each[:rooms])
        assert curve.held.max() >= each[0] and curve.held[-1] == 0
    for curve in run.memory:
        assert curve.kinds["state"][0] == curve.kinds["state"][-1] == 0 < curve.kinds["state"].max()
    limit = max(float(own.bytes.max()) for own in held(program, sizes, "host", late=True))
    lowered(dp=2, zero=zero, state_rooms=rooms, sizes=sizes, host_limit=limit)
    with pytest.raises(MemoryLimitError, match="on the host"):
        lowered(dp=2, zero=zero, state_rooms=rooms, sizes=sizes, host_limit=limit - 1)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(0, 9), min_size=6, max_size=6),
    shapes(),
)
def test_no_tier_ever_holds_more_than_it_may(
    slots: int, rooms: int, seed: int, times: Sequence[float], plan: PipelineShape
) -> None:
    draft = random_compute_program(plan, random.Random(seed))
    program = lowered(draft, plan, state_slots=slots, state_rooms=rooms, dp=2)
    names = ("fetch_state", "load_state", "step_stage", "store_state", "spill_state", "send")
    costs = Costs(F=1, B=2, **dict(zip(names, times, strict=True)))
    sizes = Sizes(saved=7, optimizer=tuple(range(1, plan.stages + 1)), params=1, grads=1)
    run = schedir.simulate(program, costs, sizes=sizes)
    for tier in ("device", "host", "disk"):
        most = [float(own.bytes.max()) for own in held(program, sizes, tier, late=True)]
        seen = [curve.held.max() for curve in run.memory_on(tier)]
        assert (np.array(seen) <= np.array(most) + 1e-9).all()


def pipeline(order: Sequence[str], slots: int, rooms: int, times: dict[str, float]) -> float:
    """When the last of some turns has ended: each waits for its lane, for the turn of its stage
    before it, and for who has left what it takes, of so many places on the device and the host."""
    lanes = {"fetch": "disk", "load": "h2d", "step": "compute", "store": "d2h", "spill": "disk"}
    free, done = dict[str, float](), dict[str, float]()
    left = {"device": [0.0] * slots, "host": [0.0] * rooms}
    for turn in order:
        what, stage = turn.removesuffix("\n").replace("_state", "").replace("_stage", "").split()
        takes = {"fetch": "host", "load": "device", "store": "host"}.get(what)
        leaves = {"load": "host", "store": "device", "spill": "host"}.get(what)
        start = max(free.get(lanes[what], 0.0), done.get(stage, 0.0))
        if takes is not None:
            start = max(start, left[takes].pop(0))
        end = free[lanes[what]] = done[stage] = start + times[what]
        if leaves is not None:
            left[leaves].append(end)
    return max(done.values())


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("rooms", [1, 2, 3])
@pytest.mark.parametrize(
    "times", [(1, 1, 1, 1, 1), (4, 1, 0.5, 1, 5), (1, 3, 1, 2, 1), (2, 0, 0, 0, 3)]
)
def test_a_step_is_a_pipeline_of_four_lanes(slots: int, rooms: int, times: Any) -> None:
    program = lowered(looped_bfs, PipelineShape(1, 2, 5), state_slots=slots, state_rooms=rooms)
    each = dict(zip(("fetch", "load", "step", "store", "spill"), times, strict=True))
    words = {name + ("_stage" if name == "step" else "_state"): t for name, t in each.items()}
    span = schedir.simulate(program, Costs(F=0, B=0, **words)).span
    assert span == pytest.approx(pipeline(names(program, 0), slots, rooms, each))
    assert span >= 5 * (each["fetch"] + each["spill"])  # the disk's lane is one
    if slots == rooms == 1:
        assert span == pytest.approx(5 * sum(times))
    if each["fetch"] > 3 and rooms > 1 and slots > 1:  # and waits for no more than one stage
        assert span <= 5 * (4 + 5) + 1 + 0.5 + 1


def test_a_cluster_and_explain_tell_what_the_disk_takes() -> None:
    node = Cluster(
        nodes=1, gpus_per_node=2, flops=312e12, memory=80e9, hbm=2e12, nvlink=300e9, network=25e9,
        latency=0.0, host=10e9, disk=2e9,
    )  # fmt: skip
    sizes = Sizes(activation=1e6, params=1e9, grads=1e9, optimizer=6e9)
    costs = node.costs(PLAN, sizes, Costs(F=0.01, B=0.02), states="disk")
    assert (costs.load_state, costs.fetch_state, costs.spill_state) == (0.6, 3.0, 3.0)
    run = schedir.simulate(lowered(), costs)
    table = by_cause(idleness(run), run.ranks)
    assert table[:, IdleCause.DISK].sum() > 2 * 3.0  # on two ranks
