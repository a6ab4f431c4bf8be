"""The instructions: sets of them that the tables imply, and `Instr`, one decoded instruction.

The rows are in `instruction_table.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from schedir.ir.isa.instruction_table import FORMS as FORMS
from schedir.ir.isa.instruction_table import LANES as LANES
from schedir.ir.isa.instruction_table import ROWS as ROWS
from schedir.ir.isa.instruction_table import STEPPED as STEPPED
from schedir.ir.isa.instruction_table import VALUES as VALUES
from schedir.ir.isa.opcodes import Form as Form
from schedir.ir.isa.opcodes import Lane as Lane
from schedir.ir.isa.opcodes import Opcode as Opcode
from schedir.ir.isa.opcodes import Value as Value
from schedir.ir.isa.table_schema import TIERS as TIERS
from schedir.ir.isa.table_schema import Change as Change
from schedir.ir.isa.table_schema import CollectiveRing as CollectiveRing
from schedir.ir.isa.table_schema import FormRow as FormRow
from schedir.ir.isa.table_schema import LaneRow as LaneRow
from schedir.ir.isa.table_schema import PeerRule as PeerRule
from schedir.ir.isa.table_schema import ProducerRule as ProducerRule
from schedir.ir.isa.table_schema import Row as Row
from schedir.ir.isa.table_schema import Scope as Scope
from schedir.ir.isa.table_schema import Traffic as Traffic
from schedir.ir.isa.table_schema import ValueRow as ValueRow

_RANK = Scope.RANK

BY_TEXT: Final = {row.text: row.op for row in ROWS}


@cache
def producers(token: Value) -> tuple[Opcode, ...]:
    """Who makes a value: gives it without having needed it."""
    return tuple(row.op for row in ROWS if token in row.gives and token not in row.needs)


@cache
def consumers(token: Value) -> tuple[Opcode, ...]:
    """Who uses a value as it is: needs it, and does not give it on."""
    return tuple(row.op for row in ROWS if token in row.needs and token not in row.gives)


@cache
def changes(token: Value) -> tuple[Opcode, ...]:
    """The instructions that change a value in place (need and give it), in execution order.

    That is the order of the table. But changes of form come first. A stage removes the forms of a
    value that it takes in, in the reverse of the order in which the other side gave them.
    """
    found = [row for row in ROWS if token in row.gives and token in row.needs]
    way = 1 if VALUES[token].local_source is None else -1
    found.sort(key=lambda row: len(FORMS) if row.form is None else way * row.form)
    return tuple(row.op for row in found)


@cache
def form_changes(token: Value) -> tuple[Opcode, ...]:
    """The instructions that change the form of a value, in execution order."""
    return tuple(op for op in changes(token) if ROWS[op].form is not None)


@cache
def between_segments(sequence: bool) -> tuple[Opcode, ...]:
    """The collectives between the segments of a stage, for this value of `Program.sequence`."""
    when = ("always", "sequence_parallel") if sequence else ("always",)
    return tuple(row.op for row in ROWS if row.between_segments in when)


@cache
def change_of(op: Opcode, token: Value) -> Change | None:
    """How an instruction changes the state of a value, if it does."""
    return next((change for change in ROWS[op].changes if change.value is token), None)


# What crosses the boundary of a stage, in the order of `program.Slots`; and of that what crosses
# it in every program.
BOUNDARY: Final = tuple(row.value for row in VALUES if row.peer is not None)
BETWEEN_NEIGHBOURS: Final = tuple(
    token
    for token in BOUNDARY
    if VALUES[token].peer in (PeerRule.NEXT, PeerRule.PREVIOUS) and not VALUES[token].optional
)
# Kinds of instructions, read off the table.
SENDS: Final = tuple(row.op for row in ROWS if row.peer and row.needs)
RECEIVES: Final = tuple(row.op for row in ROWS if row.peer and row.gives)
TRANSFERS: Final = SENDS + RECEIVES
COLLECTIVES: Final = tuple(row.op for row in ROWS if row.partner is row.op)
FORM_CHANGES: Final = tuple(row.op for row in ROWS if row.form is not None)
# Of these, the ones between a whole value and a tensor-parallel rank's part of it.
SPLIT_CHANGES: Final = tuple(op for op in FORM_CHANGES if FORMS[ROWS[op].form or 0].split)
# Collectives of the tensor-parallel group on a value that crosses between stages or segments.
BOUNDARY_COLLECTIVES: Final = tuple(
    row.op for row in ROWS
    if row.ring is not None and row.ring.members == "tp" and row.per is Scope.MICROBATCH
)  # fmt: skip
# Of these, the ones that undo a form: a value is whole behind it.
GATHERS: Final = tuple(op for op in BOUNDARY_COLLECTIVES if ROWS[op].form is not None)
COMPUTE: Final = tuple(row.op for row in ROWS if row.computes)
# What computes, by what it makes of what: F; B and I, of which I leaves a tape; W, which takes it.
FORWARDS: Final = producers(Value.ACT_OUT)
BACKWARDS: Final = producers(Value.GRAD_OUT)  # W, which only adds to the weights, is none
SPLITS: Final = producers(Value.DEFERRED_WGRAD)
WHOLES: Final = tuple(op for op in BACKWARDS if op not in SPLITS)
LATE: Final = consumers(Value.DEFERRED_WGRAD)
STEPS: Final = producers(Value.PARAMS)
RELEASES: Final = producers(Value.GRADS_CHECKED)  # what lets a next update add, ahead of the step
# Of what computes there is one each: whoever adds another must say which is meant where.
(FORWARD,), (BACKWARD,), (BACKWARD_INPUT,), (BACKWARD_WEIGHT,) = FORWARDS, WHOLES, SPLITS, LATE
(RECOMPUTE,) = (op for op in changes(Value.SAVED) if op in COMPUTE)
# What adds to a stage's sum of gradients; and by weights: those not split, and those that are.
ADDS: Final = producers(Value.WGRAD)
ADDS_TO_WEIGHTS: Final = (
    tuple(op for op in ADDS if Value.DEFERRED_WGRAD not in ROWS[op].needs),
    tuple(op for op in ADDS if Value.DEFERRED_WGRAD not in ROWS[op].gives),
)
REDUCES: Final = tuple(row.op for row in ROWS if row.lane is Lane.DP)
TRAINING_VALUES: Final = frozenset(row.value for row in VALUES if row.training)
# The instructions that work with a gradient that crosses between stages. A program without a
# backward has none.
OF_GRADIENTS: Final = tuple(
    row.op for row in ROWS if {*row.needs, *row.gives} & TRAINING_VALUES & {*BOUNDARY}
)
OF_TRAINED: Final = tuple(
    row.op for row in ROWS
    if row.per is not _RANK and row.op not in FORWARDS
    and TRAINING_VALUES & {*row.needs, *row.gives}
)  # fmt: skip

# Stages on one rank hand over directly: what one takes in is what the other put out.
LOCAL_HANDOVER: Final = {
    row.value: (row.local_source, row.peer)
    for row in VALUES
    if row.local_source is not None and row.peer is not None
}

# By value, what touches it off the compute lane: in a program without, compute's order says when.
OFF_COMPUTE: Final = {
    row.value: tuple(
        r.op for r in ROWS
        if row.value in {*r.needs, *r.gives, *r.frees} and r.lane is not Lane.COMPUTE
    )
    for row in VALUES
}  # fmt: skip
# The instructions that work with a value and do not run a stage.
USERS: Final = {
    row.value: frozenset(r.op for r in ROWS if row.value in {*r.needs, *r.gives} and not r.computes)
    for row in VALUES
}
# Values in slots whose number is a choice: what crosses boundaries, and, in a program with such
# instructions, what something off the compute lane makes, changes or frees.
SLOTTED: Final = BOUNDARY + tuple(
    row.value for row in VALUES
    if row.value not in BOUNDARY and row.size and OFF_COMPUTE[row.value]
)  # fmt: skip
# Values that are held from the start of what makes them to the end of what frees them, where no
# number of slots is said.
KEPT: Final = tuple(row.value for row in VALUES if row.size and row.value not in BOUNDARY)


@cache
def chain(op: Opcode, token: Value) -> tuple[Opcode, ...]:
    """Who may have given `token` to `op`, the last in the chain first.

    An instruction that both needs and gives a value changes it in place (Gather): it comes
    between the maker and everybody else.  Several change it in the order of the table.
    """
    changed = changes(token)
    if op in changed:
        changed = changed[: changed.index(op)]
    return (*reversed(changed), *producers(token))


class Instr(NamedTuple):
    """One instruction, decoded: a view, never stored in bulk.

    `stage` is 0 where the row is not addressed by it, and `mb` is the update, or the turn, where a
    row is not addressed by microbatch.

    >>> from schedir import Instr, Opcode
    >>> forward = Instr(Opcode.Forward, stage=2, mb=5)
    >>> str(forward), forward.stage
    ('F 2.5', 2)
    """

    op: Opcode
    stage: int
    mb: int

    def __str__(self) -> str:
        row = ROWS[self.op]
        if row.per is Scope.MICROBATCH:
            return f"{row.text} {self.stage}.{self.mb}"
        if row.per is Scope.RANK:
            return row.text + f" {self.mb}" * (self.mb > 0)
        return f"{row.text} {self.stage}" + f".{self.mb}" * (self.mb > 0)
