"""Mutations of ZeRO: Unshard, Reshard and ReduceScatter, which have occurrences per stage."""

from __future__ import annotations

from collections import Counter

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import ADDRESS_MASK
from tests.edits import MUTATIONS, Edit, at, mb, move, op, pull, push, stage, swap, with_op, word
from tests.mutations import REDUCTIONS, ZERO_OPS, B, I
from tests.oracle_sharding import READS

O = Opcode
_EARLIER_MUTATIONS = {*MUTATIONS}


def renumber_occurrences(own: list[int]) -> None:
    """Number the occurrences of each Unshard, Reshard and ReduceScatter from 0, in their order."""
    times: Counter[tuple[Opcode, int]] = Counter()
    for k, w in enumerate(own):
        if op(w) in ZERO_OPS:
            which = op(w), stage(w)
            own[k] = w - mb(w) + times[which]
            times[which] += 1


def find_in_stage(e: Edit, kind: Opcode) -> tuple[list[int], list[int]]:
    """Return the indices of an opcode of the current stage: before and after the current index."""
    own = [k for k in e.here(kind) if stage(e.own[k]) == stage(e.word)]
    return [k for k in own if k < e.at], [k for k in own if k > e.at]


def insert_pair(e: Edit, k: int, first: Opcode, then: Opcode) -> None:
    """Insert two instructions of the current stage before index k."""
    push(e.own, k, word(then, stage(e.word)))
    push(e.own, k, word(first, stage(e.word)))
    renumber_occurrences(e.own)


def renumber_in_most_mutants(e: Edit) -> None:
    """Renumber the occurrences in most mutants, because the checker finds wrong numbers first."""
    if e.rng.random() < 0.8:
        renumber_occurrences(e.own)


@at(*ZERO_OPS)
def drop_collective(e: Edit) -> None:
    pull(e.own, e.at)
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def duplicate_collective(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def swap_collectives(e: Edit) -> bool | None:
    others = [k for k in e.here(*ZERO_OPS) if k != e.at]
    if not others:
        return False
    swap(e.own, e.at, e.rng.choice(others))
    renumber_in_most_mutants(e)
    return None


@at(*ZERO_OPS)
def swap_collective_with_neighbor(e: Edit) -> None:
    swap(e.own, max(e.at - 1, 0), e.at)
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def move_collective(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def move_collective_near(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-4, -3, -2, -1, 2, 3, 4, 5]))
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def collective_after_step(e: Edit) -> None:
    move(e.own, e.at, len(e.own))
    renumber_in_most_mutants(e)


@at(O.OptimizerStep)
def step_before_collective(e: Edit) -> bool | None:
    collectives = e.here(*ZERO_OPS)
    if not collectives:
        return False
    move(e.own, e.at, e.rng.choice(collectives[-3:]))
    return None


@at(*ZERO_OPS)
def change_occurrence(e: Edit) -> None:
    e.put(e.word - mb(e.word) + e.rng.randint(0, mb(e.word) + 1))


@at(*ZERO_OPS)
def change_stage_of_collective(e: Edit) -> None:
    e.put(word(op(e.word), e.rng.choice(e.program.shape.stages_on_rank[e.rank]), mb(e.word)))
    renumber_in_most_mutants(e)


@at(*ZERO_OPS)
def change_collective(e: Edit) -> None:
    """Replace an Unshard, Reshard or ReduceScatter by another of the three."""
    e.put(with_op(e.word, e.rng.choice([o for o in ZERO_OPS if o is not op(e.word)])))
    renumber_in_most_mutants(e)


@at(*READS)
def use_after_reshard(e: Edit) -> bool | None:
    """Move an instruction that needs weights right after the next Reshard of its stage."""
    _, later = find_in_stage(e, O.Reshard)
    if not later:
        return False
    move(e.own, e.at, later[0] + 1)
    return None


@at(O.Reshard)
def unshard_once_less(e: Edit) -> bool | None:
    """Remove a Reshard and the next Unshard of its stage. This is legal if there are slots."""
    _, later = find_in_stage(e, O.Unshard)
    if not later:
        return False
    pull(e.own, later[0])
    pull(e.own, e.at)
    renumber_occurrences(e.own)
    return None


@at(O.Reshard)
def unshard_once_more(e: Edit) -> bool | None:
    """Insert a Reshard and an Unshard while the stage is unsharded."""
    since, _ = find_in_stage(e, O.Unshard)
    if not since:
        return False
    insert_pair(e, e.rng.randint(since[-1] + 1, e.at), O.Reshard, O.Unshard)
    return None


@at(O.Unshard)
def unshard_at_end(e: Edit) -> bool | None:
    """Insert an Unshard and a Reshard after the last use of the stage, perhaps after the step."""
    last = max(k for k in e.here(*ZERO_OPS) if stage(e.own[k]) == stage(e.word))
    insert_pair(e, e.rng.randint(last + 1, len(e.own)), O.Unshard, O.Reshard)
    return None


@at(O.ReduceScatter)
def reduce_once_less(e: Edit) -> bool | None:
    """Remove a ReduceScatter, so that the next one reduces more gradients."""
    _, later = find_in_stage(e, O.ReduceScatter)
    if not later:
        return False
    pull(e.own, e.at)
    renumber_occurrences(e.own)
    return None


@at(B, I, O.BackwardWeight)
def reduce_once_more(e: Edit) -> bool | None:
    """Insert a ReduceScatter after a backward."""
    if not e.program.zero:
        return False
    push(e.own, e.at + 1, word(O.ReduceScatter, stage(e.word)))
    renumber_occurrences(e.own)
    return None


@at(*[o for o in REDUCTIONS if o is not O.ReduceGrads], O.OptimizerStep)
def end_before_reduce_scatter(e: Edit) -> bool | None:
    """Move a reduction, the norm or the step before one of the last ReduceScatters."""
    last = [k for k in e.here(O.ReduceScatter) if k < e.at]
    if not last or op(e.word) is O.ReduceScatter:
        return False
    move(e.own, e.at, e.rng.choice(last[-3:]))
    return None


@at(O.ReduceScatter)
def reduce_without_scatter(e: Edit) -> None:
    """Replace a ReduceScatter by a ReduceGrads."""
    e.put(word(O.ReduceGrads, stage(e.word)))


@at(B, I)
def backward_after_reduce_scatter(e: Edit) -> bool | None:
    """Move a backward after the next ReduceScatter of its stage."""
    _, later = find_in_stage(e, O.ReduceScatter)
    if not later:
        return False
    for k in sorted(
        (
            k
            for k in e.here()
            if k > e.at and k < later[0] and e.own[k] & ADDRESS_MASK == e.word & ADDRESS_MASK
        ),
        reverse=True,
    ):  # the send of its gradient, and W
        move(e.own, k, later[0] + 1)
    move(e.own, e.at, later[0] + 1)
    return None


# The mutations that need a program with ZeRO.
ZERO_MUTATIONS = tuple(name for name in MUTATIONS if name not in _EARLIER_MUTATIONS)
