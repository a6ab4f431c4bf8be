"""Groups of instructions and values that follow from the tables, and the class `Instr`.

The rows of the tables are in `instruction_table.py`.
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

OPCODE_BY_TEXT: Final = {row.text: row.op for row in INSTRUCTIONS}


@cache
def find_producers(value: Value) -> tuple[Opcode, ...]:
    """Return the instructions that make a value: they give it and do not need it.

    Args:
        value: The kind of value.

    Returns:
        The opcodes, in the order of the table.
    """
    return tuple(row.op for row in INSTRUCTIONS if value in row.gives and value not in row.needs)


@cache
def find_consumers(value: Value) -> tuple[Opcode, ...]:
    """Return the instructions that need a value and do not give it.

    Args:
        value: The kind of value.

    Returns:
        The opcodes, in the order of the table.
    """
    return tuple(row.op for row in INSTRUCTIONS if value in row.needs and value not in row.gives)


@cache
def find_modifiers(value: Value) -> tuple[Opcode, ...]:
    """Return the instructions that change a value in place, in execution order.

    Such an instruction needs and gives the value. Changes of form come first, then other changes in
    the order of the table. The receiving stage removes forms in the reverse of the order in which
    the sending stage added them.

    Args:
        value: The kind of value.
    """
    rows = [row for row in INSTRUCTIONS if value in row.gives and value in row.needs]
    direction = 1 if VALUES[value].local_source is None else -1
    rows.sort(key=lambda row: len(FORMS) if row.form is None else direction * row.form)
    return tuple(row.op for row in rows)


@cache
def find_form_changes(value: Value) -> tuple[Opcode, ...]:
    """Return the instructions that change the form of a value, in execution order.

    Args:
        value: The kind of value.
    """
    return tuple(op for op in find_modifiers(value) if INSTRUCTIONS[op].form is not None)


@cache
def find_segment_collectives(sequence_parallel: bool) -> tuple[Opcode, ...]:
    """Return the collectives between the segments of a stage.

    Args:
        sequence_parallel: The value of `Program.sequence_parallel`.
    """
    conditions = ("always", "sequence_parallel") if sequence_parallel else ("always",)
    return tuple(row.op for row in INSTRUCTIONS if row.between_segments in conditions)


@cache
def find_change(op: Opcode, value: Value) -> Change | None:
    """Return the `Change` that an instruction makes to the state of a value, or None.

    Args:
        op: The opcode of the instruction.
        value: The kind of value.
    """
    return next((change for change in INSTRUCTIONS[op].changes if change.value is value), None)


# Values that pass between stages, in the order of `SlotCounts`.  Values in NEIGHBOR_VALUES pass
# between neighbouring stages, in every program.
BOUNDARY_VALUES: Final = tuple(row.value for row in VALUES if row.peer is not None)
NEIGHBOR_VALUES: Final = tuple(
    kind
    for kind in BOUNDARY_VALUES
    if VALUES[kind].peer in (PeerRule.NEXT, PeerRule.PREVIOUS) and not VALUES[kind].is_optional
)
# Kinds of instructions, derived from the table.
SEND_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.peer and row.needs)
RECV_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.peer and row.gives)
TRANSFER_OPS: Final = SEND_OPS + RECV_OPS
COLLECTIVE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.partner is row.op)
FORM_CHANGE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.form is not None)
# Changes between a full value and a tensor-parallel rank's part of it.
TP_SPLIT_OPS: Final = tuple(
    op for op in FORM_CHANGE_OPS if FORMS[INSTRUCTIONS[op].form or 0].is_tp_split
)
# Collectives of the tensor-parallel group on a value that passes between stages or segments.
BOUNDARY_COLLECTIVE_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS
    if row.ring is not None and row.ring.members == "tp" and row.scope is Scope.MICROBATCH
)  # fmt: skip
# Instructions that remove a form: after such an instruction, each rank has the full value.
BOUNDARY_GATHER_OPS: Final = tuple(
    op for op in BOUNDARY_COLLECTIVE_OPS if INSTRUCTIONS[op].form is not None
)
# All-to-alls of the expert-parallel group, between segments.
EP_COLLECTIVE_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if row.ring is not None and row.ring.members == "ep"
)
COMPUTE_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.is_compute)
# Compute instructions, by the values that they make.  B and I make the gradient of the input.  I
# also keeps deferred weight gradients, and W uses them.
FORWARD_OPS: Final = find_producers(Value.ACT_OUT)
BACKWARD_OPS: Final = find_producers(Value.GRAD_OUT)  # without W
BACKWARD_INPUT_OPS: Final = find_producers(Value.DEFERRED_WGRAD)
FULL_BACKWARD_OPS: Final = tuple(op for op in BACKWARD_OPS if op not in BACKWARD_INPUT_OPS)
BACKWARD_WEIGHT_OPS: Final = find_consumers(Value.DEFERRED_WGRAD)
OPTIMIZER_STEP_OPS: Final = find_producers(Value.PARAMS)
# After these instructions, the next update may add to the gradients, even if the optimizer step of
# this update has not run.
GRADS_CHECK_OPS: Final = find_producers(Value.GRADS_CHECKED)
# There is one compute instruction of each kind.  If you add a second one, this unpacking fails.
# Then decide for each use of the constant whether the use includes the new instruction.
(FORWARD,), (BACKWARD,), (BACKWARD_INPUT,), (BACKWARD_WEIGHT,) = (
    FORWARD_OPS,
    FULL_BACKWARD_OPS,
    BACKWARD_INPUT_OPS,
    BACKWARD_WEIGHT_OPS,
)
(RECOMPUTE,) = (op for op in find_modifiers(Value.SAVED) if op in COMPUTE_OPS)
# Instructions that add to a stage's sum of gradients.  GRAD_ADDING_OPS_BY_WEIGHT has two groups:
# the instructions for weights whose gradient is never deferred, and those for all other weights.
GRAD_ADDING_OPS: Final = find_producers(Value.WGRAD)
GRAD_ADDING_OPS_BY_WEIGHT: Final = (
    tuple(op for op in GRAD_ADDING_OPS if Value.DEFERRED_WGRAD not in INSTRUCTIONS[op].needs),
    tuple(op for op in GRAD_ADDING_OPS if Value.DEFERRED_WGRAD not in INSTRUCTIONS[op].gives),
)
REDUCTION_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.lane is Lane.DP)
TRAINING_VALUES: Final = frozenset(row.value for row in VALUES if row.is_training_only)
# Instructions that use a gradient between stages.  A program without a backward has none of them.
BOUNDARY_GRAD_OPS: Final = tuple(
    row.op
    for row in INSTRUCTIONS
    if {*row.needs, *row.gives} & TRAINING_VALUES & {*BOUNDARY_VALUES}
)
# Instructions that only trained stages have.
TRAINED_STAGE_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS
    if row.scope is not Scope.RANK and row.op not in FORWARD_OPS
    and TRAINING_VALUES & {*row.needs, *row.gives}
)  # fmt: skip

# Kind of an input from another stage -> (kind of that stage's output, rule that finds that stage).
# Two stages on one rank exchange no messages: the input and the output are the same tensor.
LOCAL_HANDOVER: Final = {
    row.value: (row.local_source, row.peer)
    for row in VALUES
    if row.local_source is not None and row.peer is not None
}

# Kind of value -> the instructions that use it on lanes other than compute.  In a program without
# such instructions, only the order of the compute lane decides when a slot is free.
OPS_OFF_COMPUTE_LANE: Final = {
    value.value: tuple(
        row.op for row in INSTRUCTIONS
        if value.value in {*row.needs, *row.gives, *row.frees} and row.lane is not Lane.COMPUTE
    )
    for value in VALUES
}  # fmt: skip
# Kind of value -> the instructions that need or give it and do not run a stage.
NON_COMPUTE_USERS: Final = {
    value.value: frozenset(
        row.op
        for row in INSTRUCTIONS
        if value.value in {*row.needs, *row.gives} and not row.is_compute
    )
    for value in VALUES
}
# Values whose number of slots can be chosen: values that pass between stages, and values that an
# instruction on a lane other than compute makes, changes or frees.
SLOT_VALUES: Final = BOUNDARY_VALUES + tuple(
    row.value for row in VALUES
    if row.value not in BOUNDARY_VALUES and row.size and OPS_OFF_COMPUTE_LANE[row.value]
)  # fmt: skip
# Values with a size that do not pass between stages.  If no number of slots is given, such a value
# uses memory from the start of the instruction that makes the value to the end of the instruction
# that frees it.
NON_BOUNDARY_VALUES: Final = tuple(
    row.value for row in VALUES if row.size and row.value not in BOUNDARY_VALUES
)


@cache
def find_possible_givers(op: Opcode, value: Value) -> tuple[Opcode, ...]:
    """Return the instructions that can give a value to an instruction, the latest one first.

    An instruction that needs and gives the value, such as TPGatherAct, changes it in place.  Such
    an instruction runs after the producer of the value and before all other readers.  Several such
    instructions run in the order of `find_modifiers`.

    Args:
        op: The opcode of the instruction that needs the value.
        value: The kind of value.
    """
    modifiers = find_modifiers(value)
    if op in modifiers:
        modifiers = modifiers[: modifiers.index(op)]
    return (*reversed(modifiers), *find_producers(value))


@cache
def is_tp_split(op: Opcode, value: Value) -> bool:
    """Return whether an instruction uses or makes only a tensor-parallel rank's part of a value.

    With tp > 1, the sender has an instruction that splits the value, and the receiver has an
    instruction that gathers it. Between these two instructions, each rank has only its part.

    Args:
        op: The opcode of an instruction that needs or gives the value.
        value: The kind of value.
    """
    changes = {*find_modifiers(value)} & {*TP_SPLIT_OPS}
    if not changes:
        return False
    is_producer = op in find_producers(value)
    is_after_change = not is_producer and not changes.isdisjoint(find_possible_givers(op, value))
    is_received = VALUES[value].local_source is not None
    return not is_after_change if is_received else is_after_change


class Instr(NamedTuple):
    """One decoded instruction.

    A Stream stores packed words, and creates these objects only for access.

    Attributes:
        op: The opcode.
        stage: Number of the stage, over all ranks; 0 for an instruction per rank.
        mb: Number of the microbatch.  For an instruction that is not per microbatch, this is the
            number of the update or of the occurrence.

    Example:
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
