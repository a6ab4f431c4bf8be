"""Row types of the tables in `instruction_table.py`."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Value

TIERS: Final = ("device", "host", "disk")


class Scope(Enum):
    """The unit for which an instruction or a value exists once.

    The value of a member shows which numbers follow the instruction's name in the text of a
    program.  An instruction per STAGE or RANK exists once in each update.  The text also contains
    the number of the update if this number is not 0.  An instruction per OCCURRENCE exists any
    number of times for a stage.  The occurrences of such an instruction are numbered from 0.
    """

    MICROBATCH = "stage.mb"
    STAGE = "stage"
    RANK = ""
    OCCURRENCE = "stage.occurrence"


class ProducerRule(Enum):
    """The rule with which `schedir/ir/dataflow.py` finds the instruction that gives a value."""

    ONCE = (
        "the instruction that creates the value; instructions that change the value come after it, "
        "in the order of the instruction table"
    )
    ALL = "the last of all instructions that produce the value"
    VERSION = "the optimizer step that gives the weight version of the microbatch"
    LATEST = "the latest producer before the reader in the instruction list"
    LATEST_OR_START = (
        "the latest producer before the reader in the instruction list; without one, the value "
        "that exists at the start of the step"
    )


class PeerRule(Enum):
    """The rule that leads to the other stage of a message: a neighbour, or the end of a skip.

    `Program.neighbor_stages` returns the numbers of these stages.
    """

    NEXT = "the next stage"
    PREVIOUS = "the previous stage"
    SKIP_TO = "the stage that takes the skip"
    SKIP_FROM = "the stage that gives the skip"

    @property
    def opposite(self) -> PeerRule:
        """Return the rule that leads back from the other stage."""
        return _OPPOSITE[self]

    @property
    def is_downstream(self) -> bool:
        """Return whether the rule leads to a later stage."""
        return self in (PeerRule.NEXT, PeerRule.SKIP_TO)


_OPPOSITE: Final = {
    PeerRule.NEXT: PeerRule.PREVIOUS, PeerRule.PREVIOUS: PeerRule.NEXT,
    PeerRule.SKIP_TO: PeerRule.SKIP_FROM, PeerRule.SKIP_FROM: PeerRule.SKIP_TO,
}  # fmt: skip


class ValueRow(NamedTuple):
    """A row of the table of values.  Instructions give values to other instructions.

    Attributes:
        value: The kind of value.  Its number is the index of the row.
        scope: The unit for which there is one value: a microbatch of a stage, a stage, or a rank.
        producer_rule: The rule that finds the instruction that gives the value.
        phrase: The name of the value in messages: "the activation".
        size: The field of `Sizes` with the bytes of the value; "" if the bytes are not counted. For
            example, the bytes of PARAMS are not counted, because a stage has its weights all the
            time.
        peer: For a value that passes between stages, the rule that leads to the other stage.  The
            value exists only if there is such a stage.  `Sizes` lists its bytes under the earlier
            of the two stages.
        local_source: For an input that a stage gets from another stage, the kind of value that the
            other stage makes.  If both stages are on one rank, the two values are the same tensor.
        converted_from: Set if an instruction makes this value from another value and frees the
            other value: the kind of the other value, and the field of `Sizes` with the bytes of
            both values together.
        program_attribute: An attribute of programs.  The value exists only in programs in which the
            attribute has one of `attribute_values`.  If `attribute_values` is empty, the value
            exists in programs in which the attribute differs from its default.
        initial_tier: One of TIERS, for a value that exists from the start and that no instruction
            makes or frees.  If a program sets `program_attribute` to the name of a tier, the value
            starts on that tier.  Otherwise, it starts on `initial_tier`.  The value uses memory on
            its first tier all the time.  Each replica has a part of the value.
        attribute_values: See `program_attribute`.
        reserved_memory: Additional memory that the value has all the time: one of TIERS, and the
            field of `Sizes` with the bytes.  A replica has a part of this memory if it has a part
            of the optimizer state.
        is_training_only: True if the value exists only in programs that train, and only for stages
            that are not frozen.
        size_fallback: The field of `Sizes` that is used if `size` is not given.
        is_optional: True if the value exists only in some programs: those to which a pass added a
            non-compute instruction that uses the value. A program without such an instruction is
            complete.
    """

    value: Value
    scope: Scope
    producer_rule: ProducerRule
    phrase: str
    size: str = ""
    peer: PeerRule | None = None
    local_source: Value | None = None
    converted_from: tuple[Value, str] | None = None
    program_attribute: str = ""
    initial_tier: str = ""
    attribute_values: tuple[str, ...] = ()
    reserved_memory: tuple[str, str] | None = None
    is_training_only: bool = False
    size_fallback: str = ""
    is_optional: bool = False


class FormRow(NamedTuple):
    """A row of the table of forms.  A form is the representation of a value in a message.

    An instruction with a `form` converts an output of a stage to this form.  At the other stage,
    another instruction with the same `form` converts the input back.  If a value has several forms,
    they are added in the order of the table and removed in the reverse order.

    Attributes:
        form: The form.  Its number is the index of the row.
        doc: A value in this form, as a phrase for the documentation.
        is_tp_split: True if each rank of a tensor-parallel group has 1/t of the bytes.  Such a form
            needs tp > 1, and a boundary that is not sharded already.
        size: The field of `Sizes` with the bytes of a value in this form.  These bytes are at most
            the bytes without the form, and proportional to them.  If the field is "" or is not
            given, the form does not change the bytes.
    """

    form: Form
    doc: str
    is_tp_split: bool = False
    size: str = ""


class LaneRow(NamedTuple):
    """A row of the table of lanes, the in-order queues of a rank.

    Attributes:
        lane: The lane.  Its number is the index of the row.
        has_messages: True if the lane has messages between ranks.  Progress models divide such
            lanes into more queues, or merge them into one.
        host_action: The action of a blocking host, as on CPUs, for an instruction on the lane.  The
            host "runs" the instruction itself, "waits" for its inputs and then starts it, or
            "starts" it without waiting.
        doc: The contents of the lane, as a phrase for the documentation.
        idle_cause: The `IdleCause` of a rank that waits for an instruction on the lane.
        color: The colour of the lane in charts, as `#rrggbb`.
        label: The name of the lane in legends.
    """

    lane: Lane
    has_messages: bool
    host_action: Literal["runs", "waits", "starts"]
    doc: str
    idle_cause: str = "message"
    color: str = "#7a7a7a"
    label: str = ""


class Change(NamedTuple):
    """A change of the state of a value by an instruction that needs and gives the value.

    A state is one of TIERS, or a field of `Sizes` with the bytes of the value.  A new value is on
    the first of TIERS.  The size of a new value is the `before` of its first change of size.  An
    instruction that only reads the value needs it on the first of TIERS, with the `after` of the
    value's last change of size.  An instruction that reads the value in another state has a
    `Change` in which `before` and `after` are this state.  Such an instruction need not give the
    value.

    Attributes:
        value: The value.
        before: The state of the value when the instruction starts.
        after: The state of the value when the instruction ends.
    """

    value: Value
    before: str
    after: str


class CollectiveRing(NamedTuple):
    """The bytes that a collective sends around a ring of its members.

    Attributes:
        members: The tensor-parallel group ("tp"), the expert-parallel group ("ep"), the replicas
            ("dp"), or the ranks that have the stage ("stage_replicas").
        size: The field of `Sizes` with the bytes; "" for the bytes of the value that the
            instruction needs.
        rounds: Number of times that the bytes go around the ring: one for an all-gather, a
            reduce-scatter or an all-to-all, two for an all-reduce.
    """

    members: Literal["tp", "ep", "dp", "stage_replicas"]
    size: str = ""
    rounds: int = 1


class Traffic(NamedTuple):
    """The bytes that an instruction moves over a link.  Messages and collectives have no traffic.

    A `Cluster` divides the bytes by the speed of the link to get the instruction's cost.

    Attributes:
        link: The GPU's memory ("hbm"), the link to the host ("host"), the host's disk ("disk"), or
            the host's memory ("dram").
        sizes: The fields of `Sizes` with the bytes that are moved.  A field that is read and
            written is listed twice.  For an instruction per microbatch, these are sizes of values
            that it needs or gives.  The bytes of a value between stages are divided by tp if each
            tensor-parallel rank has a part of it.  With ZeRO, each replica moves 1/dp of weights,
            gradients and optimizer states.  If `sizes` is empty, the instruction moves the value
            whose form it changes: the full value, or one rank's part if the form splits it.
        moves_per_byte: Number of times that each byte is moved.
        is_always_sharded: True if each replica moves 1/dp of the bytes at every level of ZeRO, also
            at level 0.
        program_attribute: "checkpoint_snapshots" or "optimizer_placement", if all programs in which
            this attribute has one of `attribute_values` have the instruction.  A cluster requires
            the sizes for such a program.  If `program_attribute` is "", the instruction has no cost
            when the sizes are not given.
        attribute_values: The values of the attribute with which programs have the instruction.
    """

    link: Literal["hbm", "host", "disk", "dram"]
    sizes: tuple[str, ...] = ()
    moves_per_byte: float = 1
    is_always_sharded: bool = False
    program_attribute: str = ""
    attribute_values: tuple[object, ...] = ()


class Row(NamedTuple):
    """A row of the instruction table.

    Attributes:
        op: The opcode.  Its number is the index of the row.
        text: The name of the instruction in the text form.
        lane: The queue that executes the instruction.
        scope: The unit for which the instruction exists once.
        needs: Values that must exist before the instruction starts.
        gives: Values that exist when the instruction ends.  An instruction that only reads a value
            of a microbatch also gives the value.  So it runs before the instruction that frees the
            value.
        frees: Values that no instruction uses afterwards.
        doc: The effect of the instruction, as sentences for the documentation.
        cost: The field of `Costs` with the time of the instruction.
        peer: For a message, the rule that leads to the stage on the other side of the message.
        partner: For a message, the opcode of the instruction on the other side.  For a collective
            of pipeline ranks, the same opcode as `op`.
        group: For a collective of pipeline ranks, its members: all ranks ("model"), the ranks that
            have the stage ("stage_replicas"), or the ranks that share a tied weight
            ("tied_weights").  An instruction of the group "tied_weights" needs and gives the values
            of all stages of its rank that have a tied weight.
        host_sync: "always" if a blocking host first waits for all earlier instructions of the lane;
            "replicas" if the host waits only in programs with dp > 1.
        changes: The changes of the states of values that the instruction needs.
        ring: For a collective, the bytes that it moves.  A collective of the processes of one
            pipeline rank, for example of its replicas, has no `partner`: programs do not list these
            processes.
        needs_all_stages: True if the instruction needs the values of all stages of its rank, not
            only those of its own stage.
        host_sync_lanes: Lanes on which a blocking host waits for all earlier instructions.
        is_compute: True if the instruction runs the module of a stage.  A schedule places such
            instructions, and passes place all others.
        form: The form to which the instruction converts an output of its stage, or from which it
            converts an input of its stage.
        between_segments: For a tensor-parallel or expert-parallel collective between two segments
            of a stage: "always", or "sequence_parallel" if only programs with sequence parallelism
            have the instruction.
        idle_cause: The `IdleCause` of a rank that waits for the instruction; "" for the `IdleCause`
            of the lane.
        traffic: The bytes that the instruction moves over a link of the machine.  A `Cluster`
            computes the cost from `ring` or `traffic`.
        is_implicit_in_torch: True if torch's pipeline runtime, or a training loop around it, does
            this work without an instruction.  An export to torch leaves the instruction out.
    """

    op: Opcode
    text: str
    lane: Lane
    scope: Scope
    needs: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    doc: str = ""
    cost: str = ""
    peer: PeerRule | None = None
    partner: Opcode | None = None
    group: Literal["", "model", "stage_replicas", "tied_weights"] = ""
    host_sync: Literal["", "always", "replicas"] = ""
    changes: tuple[Change, ...] = ()
    ring: CollectiveRing | None = None
    needs_all_stages: bool = False
    host_sync_lanes: tuple[Lane, ...] = ()
    is_compute: bool = False
    form: Form | None = None
    between_segments: Literal["", "always", "sequence_parallel"] = ""
    idle_cause: str = ""
    traffic: Traffic | None = None
    is_implicit_in_torch: bool = False
