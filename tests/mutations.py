"""Mutations of single instructions.  Most mutants are wrong, as the oracle decides."""

from __future__ import annotations

from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    FULL_BACKWARD_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    TP_SPLIT_OPS,
    Opcode,
    Scope,
)
from schedir.ir.program import ADDRESS_MASK, STAGE_SHIFT
from tests.edits import (
    Edit,
    at,
    bare,
    groups,
    mb,
    move,
    op,
    pull,
    push,
    stage,
    swap,
    whole,
    with_op,
    word,
)

O = Opcode
(B,), (I,), (W,) = FULL_BACKWARD_OPS, BACKWARD_INPUT_OPS, BACKWARD_WEIGHT_OPS
REDUCTIONS = (
    O.ReduceGrads, O.ReduceScatter, O.ReduceReplicatedStages, O.ReduceTied,
    O.ReduceSequenceParallelGrads, O.ReduceNorm,
)  # fmt: skip
ZERO_OPS = (O.Unshard, O.Reshard, O.ReduceScatter)
PER_MB = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.MICROBATCH)
TP_SCATTERS = {O.TPScatterAct: (O.TPGatherAct, +1), O.TPScatterGrad: (O.TPGatherGrad, -1)}

# ---------------------------------------------------------------- any instruction


@at()
def drop(e: Edit) -> object:
    return pull(e.own, e.at)


@at()
def duplicate(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)


@at()
def insert(e: Edit) -> None:
    """Insert any instruction, also one of a stage or microbatch that does not exist."""
    shape, o = e.program.shape, e.rng.choice([*Opcode])
    s, m = e.rng.randint(0, shape.stages), e.rng.randint(0, shape.microbatches)
    per = INSTRUCTIONS[o].scope
    push(e.own, e.at, word(o, 0 if per is Scope.RANK else s, m if per is Scope.MICROBATCH else 0))


@at()
def swap_neighbors(e: Edit) -> None:
    swap(e.own, max(e.at - 1, 0), e.at)


@at()
def swap_any(e: Edit) -> None:
    swap(e.own, e.at, e.rng.randrange(len(e.own)))


@at()
def move_anywhere(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(
    *PER_MB,
    O.ReduceGrads,
    O.ReduceReplicatedStages,
    O.ReduceTied,
    O.ReduceSequenceParallelGrads,
    *ZERO_OPS,
)
def change_stage(e: Edit) -> None:
    shape = e.program.shape
    new = e.rng.choice([*shape.stages_on_rank[e.rank], *range(shape.stages + 1)])
    e.put(e.word & ~(0xFFFF << STAGE_SHIFT) | new << STAGE_SHIFT)


@at(*PER_MB)
def change_mb(e: Edit) -> None:
    e.put(e.word - mb(e.word) + e.rng.randint(0, e.program.shape.microbatches))


@at()
def change_opcode(e: Edit) -> None:
    e.put(with_op(e.word, e.rng.choice([*Opcode])))


# ---------------------------------------------------------------- backward


@at(I)
def split_to_whole(e: Edit) -> None:
    """Replace an I by a B, but keep its W."""
    e.put(with_op(e.word, B))


@at(B)
def whole_to_split(e: Edit) -> None:
    """Replace a B by an I without a W."""
    e.put(with_op(e.word, I))


@at(I)
def fuse_backward(e: Edit) -> bool | None:
    """Replace an I and its W by a B.

    With a ReduceScatter after each backward, one of them would have nothing to reduce.
    """
    if e.program.reduce_scatter_at == "each_backward":
        return False
    late = [k for k in e.here(W) if bare(e.own[k]) == bare(with_op(e.word, W))]
    e.put(with_op(e.word, B))
    for k in late:
        pull(e.own, k)
    return None


@at(B)
def split_backward(e: Edit) -> bool | None:
    """Replace a B that is in no group by an I and a W."""
    if any(e.at in g for g in groups(e.own)):
        return False
    e.own[e.at : e.at + 1] = [with_op(e.word, I), with_op(e.word, W)]
    return None


@at(O.Forward)
def add_backward_of_frozen_stage(e: Edit) -> bool | None:
    """Insert a backward of a frozen stage somewhere after its forward."""
    if stage(e.word) >= e.program.frozen_stages:
        return False
    push(e.own, e.rng.randint(e.at + 1, len(e.own)), with_op(e.word, e.rng.choice([B, I, W])))
    return None


@at(B, I)
def drop_first_trained(e: Edit) -> bool | None:
    """Remove a backward of the first trained stage, as if the stage were frozen."""
    if stage(e.word) != e.program.frozen_stages:
        return False
    pull(e.own, e.at)
    return None


@at(W)
def drop_w(e: Edit) -> object:
    return pull(e.own, e.at)


@at(W)
def w_before_i(e: Edit) -> None:
    before = bare(with_op(e.word, I))
    move(e.own, e.at, next(k for k in e.here(I) if bare(e.own[k]) == before))


# ---------------------------------------------------------------- recomputation


@at(O.Recompute)
def drop_recompute(e: Edit) -> None:
    """Remove an R. The forward then keeps its activations."""
    pull(e.own, e.at)


@at(O.Recompute)
def duplicate_recompute(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)


@at(O.Recompute)
def move_recompute(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(O.Recompute)
def swap_recomputes(e: Edit) -> bool | None:
    """Swap two R."""
    others = [k for k in e.here(O.Recompute) if k != e.at]
    if not others:
        return False
    swap(e.own, e.at, e.rng.choice(others))
    return None


@at(O.Forward)
def add_recompute(e: Edit) -> None:
    """Insert an R of a forward anywhere, even if the forward already has one."""
    push(e.own, e.rng.randint(0, len(e.own)), with_op(e.word, O.Recompute))


# ---------------------------------------------------------------- transfers


@at(*RECV_OPS)
def swap_receives(e: Edit) -> bool | None:
    same = [k for k in e.here(op(e.word)) if k != e.at]
    if not same:
        return False
    swap(e.own, e.at, e.rng.choice(same))
    return None


@at(*RECV_OPS)
def early_receive(e: Edit) -> None:
    move(e.own, e.at, e.at - e.rng.randint(1, 4))


@at(*SEND_OPS)
def late_send(e: Edit) -> None:
    move(e.own, e.at, e.at + 1 + e.rng.randint(1, 4))


@at(*SEND_OPS)
def swap_pairs(e: Edit) -> bool | None:
    """Swap two sends, and swap their receives."""
    k = e.rng.choice(e.here(*SEND_OPS))
    one, two = e.partner(e.word), e.partner(e.own[k])
    if k == e.at or not one or not two or one[0] != two[0]:
        return False
    swap(e.own, e.at, k)
    swap(e.lists[one[0]], one[1], two[1])
    return None


@at(*SEND_OPS)
def drop_pair(e: Edit) -> None:
    """Remove a send and its receive."""
    if other := e.partner(pull(e.own, e.at)):
        pull(e.lists[other[0]], other[1])


@whole
def phantom_pair(e: Edit) -> bool | None:
    """Insert an unneeded send and its receive, each at the beginning or end of its Stream."""
    shape, send = e.program.shape, e.rng.choice(SEND_OPS)
    row, s, m = (
        INSTRUCTIONS[send],
        e.rng.randrange(shape.stages),
        e.rng.randrange(shape.microbatches),
    )
    assert row.partner is not None and row.peer is not None
    other = int(e.program.neighbor_stages(row.peer)[s])
    if other < 0:
        return False
    for there, o in ((s, send), (other, row.partner)):
        own = e.lists[int(shape.rank_of_stage(there, m))]
        push(own, e.rng.choice([0, len(own)]), word(o, there, m))
    return None


@at(*TP_SCATTERS)
def drop_sharded_pair(e: Edit) -> None:
    """Remove a scatter and its gather, so that the complete tensor is sent."""
    cut = pull(e.own, e.at)
    gather, hop = TP_SCATTERS[op(cut)]
    own = e.lists[int(e.program.shape.rank_of_stage(stage(cut) + hop, mb(cut)))]
    pull(own, [*map(bare, own)].index(word(gather, stage(cut) + hop, mb(cut))))


@at(*TP_SPLIT_OPS)
def drop_sharding(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*TP_SPLIT_OPS)
def move_sharding(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-4, -3, -2, -1, 2, 3, 4, 5]))


# ---------------------------------------------------------------- reductions and step


@at(*REDUCTIONS)
def reduce_early(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, e.at))


@at(*REDUCTIONS)
def reduce_never(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*REDUCTIONS)
def swap_reductions(e: Edit) -> None:
    swap(e.own, e.at, e.rng.choice(e.here(*REDUCTIONS, O.OptimizerStep)))


@at(O.ReduceSequenceParallelGrads)
def drop_sequence_parallel_sum(e: Edit) -> object:
    return pull(e.own, e.at)


@at(O.ReduceSequenceParallelGrads)
def duplicate_sequence_parallel_sum(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)


@at(O.ReduceSequenceParallelGrads)
def move_sequence_parallel_sum(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(O.OptimizerStep)
def step_early(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, e.at))


@at(O.OptimizerStep)
def step_late(e: Edit) -> None:
    move(e.own, e.at, e.at + 1 + e.rng.randint(1, 4))


@at(*REDUCTIONS, O.OptimizerStep)
def change_update(e: Edit) -> bool | None:
    updates = e.program.shape.optimizer_steps
    if updates == 1:
        return False
    e.put(e.word - mb(e.word) + e.rng.randint(0, updates))
    return None


@at(*BACKWARD_OPS)
def backward_before_step(e: Edit) -> bool | None:
    """Move a backward, and the earlier instructions of its microbatch, before the previous step."""
    steps = [k for k in e.here(O.OptimizerStep) if k < e.at]
    if not steps:
        return False
    address = e.word & ADDRESS_MASK
    for k in [k for k in e.here(*PER_MB) if steps[-1] < k <= e.at]:
        if e.own[k] & ADDRESS_MASK == address:
            move(e.own, k, steps[-1])
            steps[-1] += 1
    return None
