"""Mutations of groups, Streams, the shape, the header and the text of a program.

`edit_text` raises ParseError if the edited text is not a program.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

from schedir.ir.isa.instructions import COMPUTE_OPS, SEND_OPS, TRANSFER_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import JOINED_BIT, Program
from schedir.ir.text_format import from_text, to_text
from tests.edits import (
    MUTATIONS,
    Edit,
    at,
    bare,
    groups,
    mb,
    move,
    op,
    pull,
    push,
    swap,
    whole,
    word,
)
from tests.mutations import PER_MB
from tests.oracle_threads import Machine

O = Opcode
F = O.Forward

# ---------------------------------------------------------------- groups


@whole
def ungroup(e: Edit) -> bool | None:
    return _ungroup(e, *Opcode)


@whole
def ungroup_computes(e: Edit) -> bool | None:
    """Ungroup two computes that run as a pair."""
    return _ungroup(e, *COMPUTE_OPS)


def _ungroup(e: Edit, *ops: Opcode) -> bool | None:
    joined = [(r, k) for r, k in e.places(*ops) if e.lists[r][k] & JOINED_BIT]
    if not joined:
        return False
    r, k = e.rng.choice(joined)
    e.lists[r][k] = bare(e.lists[r][k])
    return None


@whole
def reorder_group(e: Edit) -> bool | None:
    found = [(own, g) for own in e.lists for g in groups(own)]
    if not found:
        return False
    own, group = e.rng.choice(found)
    swap(own, *e.rng.sample(group, 2))
    return None


@at()
def join_any(e: Edit) -> None:
    e.own[e.at] |= JOINED_BIT


@at(*COMPUTE_OPS)
def join_computes(e: Edit) -> bool | None:
    return _join(e, *COMPUTE_OPS)


@at(*TRANSFER_OPS)
def join_transfers(e: Edit) -> bool | None:
    """Group two adjacent transfers of a rank, but not their other sides."""
    return _join(e, *TRANSFER_OPS)


def _join(e: Edit, *ops: Opcode) -> bool | None:
    if not e.at or op(e.own[e.at - 1]) not in ops:
        return False
    e.own[e.at] |= JOINED_BIT
    return None


@whole
def join_both_sides(e: Edit) -> bool | None:
    """Group two adjacent transfers whose partners are adjacent, and group the partners."""
    met = {p: e.partner(e.lists[p[0]][p[1]]) for p in e.places(*TRANSFER_OPS)}
    found = []
    for (r, k), two in met.items():
        one = met.get((r, k - 1))
        if one and two and one[0] == two[0] and abs(one[1] - two[1]) == 1:
            found.append(((r, k), max(one, two)))
    if not found:
        return False
    for r, k in e.rng.choice(found):
        e.lists[r][k] |= JOINED_BIT
    return None


@at(*TRANSFER_OPS)
def join_next_transfer(e: Edit) -> bool | None:
    """Move a transfer into a group with the next transfer of its rank."""
    later = [k for k in e.here(*TRANSFER_OPS) if k > e.at]
    if not later:
        return False
    move(e.own, e.at, later[0])
    e.own[later[0]] |= JOINED_BIT
    return None


@at(*SEND_OPS)
def cross_in_groups(e: Edit) -> bool | None:
    """Group two messages between the same ranks on both ranks, perhaps in opposite orders.

    The earlier send is moved to the later one, and the later receive to the earlier one.
    """
    later = [k for k in e.here(*SEND_OPS) if k > e.at]
    one, two = (e.partner(e.own[k]) for k in (e.at, later[0] if later else e.at))
    if not one or not two or one[0] != two[0] or one == two:
        return False
    move(e.own, e.at, later[0])
    e.own[later[0]] |= JOINED_BIT
    other, (first, second) = e.lists[one[0]], sorted((one[1], two[1]))
    move(other, second, first + 1)
    other[first + 1] |= JOINED_BIT
    if e.rng.random() < 0.5:
        swap(other, first, first + 1)
    return None


# ---------------------------------------------------------------- ranks, shape, header, text


@whole
def cross_streams(e: Edit) -> None:
    j, k = (e.rng.randrange(len(e.lists)) for _ in range(2))
    e.lists[j], e.lists[k] = e.lists[k], e.lists[j]


@at()
def cross_instruction(e: Edit) -> None:
    """Move an instruction to a random rank."""
    own = e.rng.choice(e.lists)
    push(own, e.rng.randint(0, len(own)), pull(e.own, e.at))


@whole
def drop_stream(e: Edit) -> object:
    return len(e.lists) > 1 and e.lists.pop(e.rng.randrange(len(e.lists)))


@whole
def change_placement(e: Edit) -> None:
    """Change the rank of a stage in the placement."""
    place = e.program.shape.first_rank_per_stage.tolist()
    place[e.rng.randrange(len(place))] = e.rng.randrange(e.program.shape.ranks)
    e.program = replace(e.program, shape=e.program.shape.with_stage_ranks(tuple(place)))


@whole
def list_placement(e: Edit) -> bool | None:
    """Replace a placement without stage replicas by an equal list of ranks."""
    shape = e.program.shape
    if shape.placement_rows > 1:
        return False
    place = tuple(shape.first_rank_per_stage.tolist())
    e.program = replace(e.program, shape=shape.with_stage_ranks(place))
    return None


@whole
def change_shape(e: Edit) -> None:
    number = e.rng.choice(["ranks", "microbatches", "stages_per_rank"])
    _replace_shape(e, **{number: getattr(e.program.shape, number) + e.rng.choice([-1, 1])})


def _replace_shape(e: Edit, **changes: Any) -> None:
    shape = e.program.shape
    values = {n: changes.get(n, getattr(shape, n)) for n in shape.__dataclass_fields__}
    e.program = replace(e.program, shape=PipelineShape(**values))


@whole
def change_traits(e: Edit) -> None:
    trait = e.rng.choice(
        [
            "tp",
            "dp",
            "tied_weights",
            "clip_grad_norm",
            "frozen_stages",
            "zero",
            "reduce_scatter_at",
            "sequence_parallel",
        ]
    )
    old = getattr(e.program, trait)
    new: Any = not old if trait in ("tied_weights", "clip_grad_norm", "sequence_parallel") else old
    if trait == "reduce_scatter_at":
        new = "update_end" if old == "each_backward" else "each_backward"
    elif trait in ("tp", "dp"):
        new = 3 - old
    elif trait == "zero":
        new = (old + e.rng.randint(1, 3)) % 4
    elif trait == "frozen_stages":
        new = abs(old + e.rng.choice([-1, 1]))
    e.program = replace(e.program, **{trait: new})


TEXT_EDITS = [
    (r"\d", "0"), (r"\d", "1"), (r"\d", "2"), (r"\d\+", "0"), (r"\+", "-"), ("; ", " & "),
    (" & ", "; "), ("act", "grad"), ("send", "recv"), ("B ", "I "), ("yes", "no"), ("no", "yes"),
]  # fmt: skip


def edit_text(program: Program, rng: random.Random) -> Program | None:
    """Remove, repeat or swap lines of the text, or make a typing error in a line."""
    text = to_text(program, folded=rng.random() < 0.5)
    begin = text.index("\nrank 0") + 1 if rng.random() < 0.8 else 0
    lines = text[begin:].splitlines(keepends=True)
    j, k = (rng.randrange(len(lines)) for _ in range(2))
    match rng.randrange(4):
        case 0:
            del lines[k]
        case 1:
            lines.insert(j, lines[k])
        case 2:
            lines[j], lines[k] = lines[k], lines[j]
        case _:
            old, new = rng.choice(TEXT_EDITS)
            found = [*re.finditer(old, lines[k])]
            if not found:
                return None
            lo, hi = rng.choice(found).span()
            lines[k] = lines[k][:lo] + new + lines[k][hi:]
    return from_text(text[:begin] + "".join(lines))


MUTATIONS["edit_text"] = edit_text

# ---------------------------------------------------------------- mutants that stay legal


@whole
def rename(e: Edit) -> None:
    e.program = replace(e.program, name="another")


@whole
def renumber(e: Edit) -> None:
    """Permute the microbatches of each update, or of each row of stage replicas, on all ranks."""
    shape = e.program.shape
    updates = range(0, shape.microbatches + 1, shape.microbatches_per_update)
    parts = pairwise(shape.microbatch_row_offsets if shape.placement_rows > 1 else updates)
    to = [k for lo, hi in parts for k in e.rng.sample(range(lo, hi), hi - lo)]
    for r, k in e.places(*PER_MB):
        w = e.lists[r][k]
        e.lists[r][k] = w - mb(w) + to[mb(w)]


@whole
def run_order(e: Edit) -> bool | None:
    """Order each Stream as its instructions end in a run under `per_edge`."""
    machine = Machine(e.program, "per_edge", e.rng.randrange(2**32))
    if machine.run().kind != "ok":
        return False
    for own, host in zip(e.lists, machine.hosts, strict=True):
        entries = sorted(host.entries, key=lambda entry: entry.ended)
        own[:] = [
            word(*i) | (JOINED_BIT if k else 0) for x in entries for k, i in enumerate(x.group)
        ]
    return None


# Forwards, and the communication between them.
EVALUATION_OPS = (
    F, O.SendAct, O.RecvAct, O.TPScatterAct, O.TPGatherAct, O.TPReduceAct, O.Dispatch, O.Combine,
    O.SendSkip, O.RecvSkip, O.Unshard, O.Reshard,
)  # fmt: skip


@whole
def evaluate(e: Edit) -> None:
    """Keep only forwards and the communication between them."""
    for own in e.lists:
        for k in reversed(range(len(own))):
            if op(own[k]) not in EVALUATION_OPS:
                pull(own, k)
