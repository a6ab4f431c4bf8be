"""Mutations of optimizer offload: moves of optimizer state, steps per stage, and host steps."""

from __future__ import annotations

import random
from dataclasses import replace

from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    count_min_slots,
    find_host_values,
    number_groups,
)
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import TIERS, Opcode, Value
from schedir.ir.program import STAGE_SHIFT, Program
from schedir.passes.memory.optimizer_states import insert_host_steps, insert_state_offload
from tests.edits import (
    MUTATIONS,
    Edit,
    at,
    mb,
    move,
    move_to_other_rank,
    op,
    pull,
    push,
    set_slot_counts,
    stage,
    swap,
    swap_with_other,
    whole,
    with_op,
)
from tests.oracle_optimizer_offload import NEXT

O = Opcode
_EARLIER_MUTATIONS = {*MUTATIONS}
STATE_OPS = (*NEXT, O.CheckGradsFinite)
REDUCTIONS = (
    O.ReduceGrads, O.ReduceScatter, O.ReduceReplicatedStages, O.ReduceTied,
    O.ReduceSequenceParallelGrads, O.ReduceNorm,
    O.Reshard, O.Snapshot,
)  # fmt: skip


def offload_optimizer(program: Program, rng: random.Random) -> Program:
    """Return a program with its optimizer state on the host or the disk, or with host steps.

    Some of the programs limit the buffers for states on the device or the host.
    """
    e = Edit.of(
        replace(program, optimizer_placement=rng.choice(["host", "disk", "cpu_step", "cpu_step"])),
        rng,
    )
    ends = [own.pop() for own in e.lists]
    device_slots, host_slots = (rng.choice([None, 1, 2, 3]) for _ in range(2))
    steps_on_host = e.program.optimizer_placement == "cpu_step"
    e = Edit.of(
        insert_host_steps(e.result())
        if steps_on_host
        else insert_state_offload(e.result(), device_slots, host_slots),
        rng,
    )
    for own, end in zip(e.lists, ends, strict=True):
        own.append(end)
    program = e.result()
    if steps_on_host:
        return program
    least = count_min_slots(program)[:, SLOT_KINDS.index(Value.STATE)]
    if rng.random() < 0.6:
        program = set_slot_counts(program, "state", (least + rng.choice([0, 0, 1])).tolist())
    if rng.random() < 0.6 and program.optimizer_placement == "disk":
        few = find_host_values(program, "state_host").count_peak(
            number_groups(InstructionIndex.from_program(program))
        )
        program = set_slot_counts(program, "state_host", (few + rng.choice([0, 0, 1])).tolist())
    return program


@at(*STATE_OPS)
def drop_state_move(e: Edit) -> None:
    pull(e.own, e.at)


@at(*STATE_OPS)
def duplicate_state_move(e: Edit) -> None:
    push(e.own, e.rng.randint(e.at, len(e.own)), e.word)


@at(*STATE_OPS)
def swap_state_moves(e: Edit) -> bool | None:
    return swap_with_other(e, *NEXT)


@at(*STATE_OPS)
def swap_state_move_with_neighbor(e: Edit) -> None:
    swap(e.own, e.at - 1, e.at)


@at(*STATE_OPS)
def put_state_move_anywhere(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(*STATE_OPS)
def put_state_move_near(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-4, -3, -2, -1, 2, 3, 4, 5]))


@at(*STATE_OPS)
def change_state_move(e: Edit) -> None:
    e.put(with_op(e.word, e.rng.choice([o for o in NEXT if o is not op(e.word)])))


@at(*STATE_OPS)
def change_stage_of_state_move(e: Edit) -> bool | None:
    others = [s for s in range(e.program.shape.stages + 1) if s != stage(e.word)]
    e.put(e.word & ~(0xFFFF << STAGE_SHIFT) | e.rng.choice(others) << STAGE_SHIFT)
    return None


@at(*STATE_OPS)
def change_update_of_state_move(e: Edit) -> None:
    e.put(e.word + 1)


@at(*STATE_OPS)
def state_move_on_other_rank(e: Edit) -> bool | None:
    return move_to_other_rank(e)


@at(*STATE_OPS)
def end_before_state_move(e: Edit) -> None:
    """Move the end of an update before an instruction of its optimizer offload."""
    move(e.own, e.rng.choice(e.here(O.OptimizerStep)), e.at)


@at(O.OptimizerStep, O.CheckGradsFinite)
def move_update_end(e: Edit) -> None:
    """Move the end of an update, or the release of its gradients, by a few instructions."""
    move(e.own, e.at, e.at + e.rng.choice([-6, -4, -3, -2, -1, 2, 3, 4, 6, 8]))


@at(O.OptimizerStep, O.CheckGradsFinite)
def delay_update_end(e: Edit) -> None:
    """Move the end of an update later, together with its copies of weights or its host steps."""
    along = O.ReloadWeights if op(e.word) is O.OptimizerStep else O.HostOptimizerStep
    own = [k for k in e.here(along, op(e.word)) if mb(e.own[k]) == mb(e.word)]
    words = [pull(e.own, k) for k in reversed(own)]
    to = min(own[-1] - len(own) + 1 + e.rng.choice([1, 2, 3, 4, 6, 8, 12]), len(e.own))
    for w in words:
        push(e.own, to, w)


@at(O.Forward, O.Backward, O.BackwardInput, O.BackwardWeight)
def compute_past_update_end(e: Edit) -> bool | None:
    """Move a compute past the nearest end of an update."""
    ends = e.here(O.OptimizerStep, O.CheckGradsFinite, O.HostOptimizerStep)
    if e.program.shape.optimizer_steps == 1 or not ends:
        return False
    at = min(ends, key=lambda k: (abs(k - e.at), k))
    move(e.own, e.at, at if at < e.at else at + 1)
    return None


@at(*REDUCTIONS)
def reduce_after_state_move(e: Edit) -> bool | None:
    """Move a reduction after an instruction of the optimizer offload that may need it."""
    later = [k for k in e.here(*NEXT) if k > e.at]
    if not later:
        return False
    move(e.own, e.at, e.rng.choice(later) + 1)
    return None


@at(O.Backward, O.BackwardInput, O.BackwardWeight, O.Forward)
def compute_after_state_move(e: Edit) -> bool | None:
    later = [k for k in e.here(*NEXT) if k > e.at]
    if not later or mb(e.word) < e.program.shape.microbatches - 1:
        return False
    move(e.own, e.at, e.rng.choice(later) + 1)
    return None


@at(O.ReloadState, O.OffloadGrads)
def reload_early(e: Edit) -> None:
    """Move a load of state, or a copy of a gradient, right after a reduction of its stage."""
    mine = [k for k in e.here(*REDUCTIONS) if k < e.at and stage(e.own[k]) == stage(e.word)]
    move(e.own, e.at, e.rng.choice(mine) + 1 if mine else 0)


@whole
def change_optimizer_placement(e: Edit) -> None:
    """Change `optimizer_placement` without changing instructions."""
    places = [where for where in (*TIERS, "cpu_step") if where != e.program.optimizer_placement]
    e.program = replace(e.program, optimizer_placement=e.rng.choice(places))


@whole
def toggle_disk(e: Edit) -> bool | None:
    """Add a read and a write on the disk for the state of a stage, or remove them."""
    for own in e.lists:
        for k in [k for k, w in enumerate(own) if op(w) is O.StageOptimizerStep]:
            if e.rng.random() < 0.5:
                before, after = (
                    with_op(own[k], o) for o in (O.ReadStateFromDisk, O.WriteStateToDisk)
                )
                steps_on_host = [k for k, w in enumerate(own) if w in (before, after)]
                if steps_on_host:
                    for at in reversed(steps_on_host):
                        pull(own, at)
                else:
                    load, store = (with_op(own[k], o) for o in (O.ReloadState, O.OffloadState))
                    push(own, own.index(store) + 1, after)
                    push(own, own.index(load), before)
                return None
    return False


@whole
def change_stepping_device(e: Edit) -> bool | None:
    """Step a stage on the host instead of the device, or the other way around."""
    chains = (
        (O.ReloadState, O.StageOptimizerStep, O.OffloadState),
        (O.OffloadGrads, O.HostOptimizerStep, O.ReloadWeights),
    )
    for own in e.lists:
        for one in [w for w in own if op(w) in (O.StageOptimizerStep, O.HostOptimizerStep)]:
            if e.rng.random() < 0.5:
                old, new = chains if op(one) is O.StageOptimizerStep else chains[::-1]
                for k, w in enumerate(own):
                    if op(w) in old and stage(w) == stage(one):
                        own[k] = with_op(w, new[old.index(op(w))])
                return None
    return False


@whole
def host_step_before_gradients(e: Edit) -> bool | None:
    """Move the copy of a stage's gradient after the host step of another stage."""
    for own in e.lists:
        goes = [k for k, w in enumerate(own) if op(w) is O.OffloadGrads]
        steps = [k for k, w in enumerate(own) if op(w) is O.HostOptimizerStep]
        if len(goes) > 1 and e.rng.random() < 0.5:
            one = e.rng.choice(goes)
            others = [k for k in steps if stage(own[k]) != stage(own[one])]
            if not others:
                return False
            move(own, one, e.rng.choice(others))
            return None
    return False


@whole
def change_state_slots(e: Edit) -> None:
    """Set the number of buffers for states of each rank to any number, on the device or host."""
    counts = [e.rng.randint(0, sum(op(w) is O.ReloadState for w in own)) for own in e.lists]
    e.program = set_slot_counts(e.program, e.rng.choice(["state", "state_host"]), counts)


# The mutations that need a program with optimizer offload.
OPTIMIZER_OFFLOAD_MUTATIONS = tuple(name for name in MUTATIONS if name not in _EARLIER_MUTATIONS)
