"""The instructions: sets of them that the tables imply, and `Instr`, one decoded instruction.

The rows are in `instruction_table.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from schedir.ir.isa.instruction_table import FORMS as FORMS
from schedir.ir.isa.instruction_table import INSTRUCTIONS as INSTRUCTIONS
from schedir.ir.isa.instruction_table import LANES as LANES
from schedir.ir.isa.instruction_table import OPTIMIZER_STEP_SIZES as OPTIMIZER_STEP_SIZES
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

OPCODE_BY_TEXT: Final = {row.text: row.op for row in INSTRUCTIONS}


@cache
def find_producers(value: Value) -> tuple[Opcode, ...]:
    """Who makes a value: gives it without having needed it."""
    return tuple(row.op for row in INSTRUCTIONS if value in row.gives and value not in row.needs)


@cache
def find_consumers(value: Value) -> tuple[Opcode, ...]:
    """Who uses a value as it is: needs it, and does not give it on."""
    return tuple(row.op for row in INSTRUCTIONS if value in row.needs and value not in row.gives)


@cache
def find_modifiers(value: Value) -> tuple[Opcode, ...]:
    """The instructions that change a value in place (need and give it), in execution order.

    That is the order of the table. But changes of form come first. A stage removes the forms of a
    value that it takes in, in the reverse of the order in which the other side gave them.
    """
    found = [row for row in INSTRUCTIONS if value in row.gives and value in row.needs]
    way = 1 if VALUES[value].local_source is None else -1
    found.sort(key=lambda row: len(FORMS) if row.form is None else way * row.form)
    return tuple(row.op for row in found)


@cache
def find_form_changes(value: Value) -> tuple[Opcode, ...]:
    """The instructions that change the form of a value, in execution order."""
    return tuple(op for op in find_modifiers(value) if INSTRUCTIONS[op].form is not None)


@cache
def find_segment_collectives(sequence_parallel: bool) -> tuple[Opcode, ...]:
    """The collectives between the segments of a stage, for this value of `Program.sequence`."""
    when = ("always", "sequence_parallel") if sequence_parallel else ("always",)
    return tuple(row.op for row in INSTRUCTIONS if row.between_segments in when)


@cache
def find_change(op: Opcode, value: Value) -> Change | None:
    """How an instruction changes the state of a value, if it does."""
    return next((change for change in INSTRUCTIONS[op].changes if change.value is value), None)


# What crosses the boundary of a stage, in the order of `program.Slots`; and of that what crosses
# it in every program.
BOUNDARY_VALUES: Final = tuple(row.value for row in VALUES if row.peer is not None)
NEIGHBOR_VALUES: Final = tuple(
    token
    for token in BOUNDARY_VALUES
    if VALUES[token].peer in (PeerRule.NEXT, PeerRule.PREVIOUS) and not VALUES[token].is_optional
)
# Kinds of instructions, read off the table.
SEND_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.peer and row.needs)
RECV_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.peer and row.gives)
TRANSFER_OPS: Final = SEND_OPS + RECV_OPS
COLLECTIVE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.partner is row.op)
FORM_CHANGE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.form is not None)
# Of these, the ones between a whole value and a tensor-parallel rank's part of it.
TP_SPLIT_OPS: Final = tuple(
    op for op in FORM_CHANGE_OPS if FORMS[INSTRUCTIONS[op].form or 0].is_tp_split
)
# Collectives of the tensor-parallel group on a value that crosses between stages or segments.
BOUNDARY_COLLECTIVE_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS
    if row.ring is not None and row.ring.members == "tp" and row.scope is Scope.MICROBATCH
)  # fmt: skip
# Of these, the ones that undo a form: a value is whole behind it.
BOUNDARY_GATHER_OPS: Final = tuple(
    op for op in BOUNDARY_COLLECTIVE_OPS if INSTRUCTIONS[op].form is not None
)
COMPUTE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.is_compute)
# What computes, by what it makes of what: F; B and I, of which I leaves a tape; W, which takes it.
FORWARD_OPS: Final = find_producers(Value.ACT_OUT)
BACKWARD_OPS: Final = find_producers(Value.GRAD_OUT)  # W, which only adds to the weights, is none
BACKWARD_INPUT_OPS: Final = find_producers(Value.DEFERRED_WGRAD)
FULL_BACKWARD_OPS: Final = tuple(op for op in BACKWARD_OPS if op not in BACKWARD_INPUT_OPS)
BACKWARD_WEIGHT_OPS: Final = find_consumers(Value.DEFERRED_WGRAD)
OPTIMIZER_STEP_OPS: Final = find_producers(Value.PARAMS)
GRADS_CHECK_OPS: Final = find_producers(
    Value.GRADS_CHECKED
)  # what lets a next update add, ahead of the step
# Of what computes there is one each: whoever adds another must say which is meant where.
(FORWARD,), (BACKWARD,), (BACKWARD_INPUT,), (BACKWARD_WEIGHT,) = (
    FORWARD_OPS,
    FULL_BACKWARD_OPS,
    BACKWARD_INPUT_OPS,
    BACKWARD_WEIGHT_OPS,
)
(RECOMPUTE,) = (op for op in find_modifiers(Value.SAVED) if op in COMPUTE_OPS)
# What adds to a stage's sum of gradients; and by weights: those not split, and those that are.
GRAD_ADDING_OPS: Final = find_producers(Value.WGRAD)
GRAD_ADDING_OPS_BY_WEIGHT: Final = (
    tuple(op for op in GRAD_ADDING_OPS if Value.DEFERRED_WGRAD not in INSTRUCTIONS[op].needs),
    tuple(op for op in GRAD_ADDING_OPS if Value.DEFERRED_WGRAD not in INSTRUCTIONS[op].gives),
)
REDUCTION_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.lane is Lane.DP)
TRAINING_VALUES: Final = frozenset(row.value for row in VALUES if row.is_training_only)
# The instructions that work with a gradient that crosses between stages. A program without a
# backward has none.
BOUNDARY_GRAD_OPS: Final = tuple(
    row.op
    for row in INSTRUCTIONS
    if {*row.needs, *row.gives} & TRAINING_VALUES & {*BOUNDARY_VALUES}
)
TRAINED_STAGE_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS
    if row.scope is not _RANK and row.op not in FORWARD_OPS
    and TRAINING_VALUES & {*row.needs, *row.gives}
)  # fmt: skip

# Stages on one rank hand over directly: what one takes in is what the other put out.
LOCAL_HANDOVER: Final = {
    row.value: (row.local_source, row.peer)
    for row in VALUES
    if row.local_source is not None and row.peer is not None
}

# By value, what touches it off the compute lane: in a program without, compute's order says when.
OPS_OFF_COMPUTE_LANE: Final = {
    row.value: tuple(
        r.op for r in INSTRUCTIONS
        if row.value in {*r.needs, *r.gives, *r.frees} and r.lane is not Lane.COMPUTE
    )
    for row in VALUES
}  # fmt: skip
# The instructions that work with a value and do not run a stage.
NON_COMPUTE_USERS: Final = {
    row.value: frozenset(
        r.op for r in INSTRUCTIONS if row.value in {*r.needs, *r.gives} and not r.is_compute
    )
    for row in VALUES
}
# Values in slots whose number is a choice: what crosses boundaries, and, in a program with such
# instructions, what something off the compute lane makes, changes or frees.
SLOT_VALUES: Final = BOUNDARY_VALUES + tuple(
    row.value for row in VALUES
    if row.value not in BOUNDARY_VALUES and row.size and OPS_OFF_COMPUTE_LANE[row.value]
)  # fmt: skip
# Values that are held from the start of what makes them to the end of what frees them, where no
# number of slots is said.
NON_BOUNDARY_VALUES: Final = tuple(
    row.value for row in VALUES if row.size and row.value not in BOUNDARY_VALUES
)


@cache
def find_possible_givers(op: Opcode, value: Value) -> tuple[Opcode, ...]:
    """Who may have given `value` to `op`, the last in the chain first.

    An instruction that both needs and gives a value changes it in place (Gather): it comes
    between the maker and everybody else.  Several change it in the order of the table.
    """
    changed = find_modifiers(value)
    if op in changed:
        changed = changed[: changed.index(op)]
    return (*reversed(changed), *find_producers(value))


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
        row = INSTRUCTIONS[self.op]
        if row.scope is Scope.MICROBATCH:
            return f"{row.text} {self.stage}.{self.mb}"
        if row.scope is Scope.RANK:
            return row.text + f" {self.mb}" * (self.mb > 0)
        return f"{row.text} {self.stage}" + f".{self.mb}" * (self.mb > 0)
