"""Row types of the tables in `instruction_table.py`."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Value

TIERS: Final = ("device", "host", "disk")


class Scope(Enum):
    """What an instruction exists once for, which is also how its text is addressed.

    STAGE and RANK: once in each update.  The number of the update follows in the text if it is not
    0.  OCCURRENCE: any number of times for a stage.  The k-th time has the number k.
    """

    MICROBATCH = "stage.mb"
    STAGE = "stage"
    RANK = ""
    OCCURRENCE = "stage.occurrence"


class ProducerRule(Enum):
    """Which instruction gives a value to one that needs it (`schedir/ir/dataflow.py`)."""

    ONCE = (
        "the one that makes it; those that change it follow in the order of the instruction table"
    )
    ALL = "the last of all that produce it"
    VERSION = "the optimizer step whose weights the microbatch uses"
    LATEST = "the latest one before it in the instruction list"
    LATEST_OR_START = "the latest one before it in the instruction list; it exists at the start"


class PeerRule(Enum):
    """Where the other side of a message is: a neighbouring stage, or the other end of a skip.

    `Program.beside` has the stages, by number.
    """

    NEXT = "the next stage"
    PREVIOUS = "the previous stage"
    SKIP_TO = "the stage that takes the skip"
    SKIP_FROM = "the stage that gives the skip"

    @property
    def opposite(self) -> PeerRule:
        """The rule of the other side."""
        return _OPPOSITE[self]

    @property
    def is_downstream(self) -> bool:
        """Whether it leads to a later stage."""
        return self in (PeerRule.NEXT, PeerRule.SKIP_TO)


_OPPOSITE: Final = {
    PeerRule.NEXT: PeerRule.PREVIOUS, PeerRule.PREVIOUS: PeerRule.NEXT,
    PeerRule.SKIP_TO: PeerRule.SKIP_FROM, PeerRule.SKIP_FROM: PeerRule.SKIP_TO,
}  # fmt: skip


class ValueRow(NamedTuple):
    """A row of the table of values, which are what instructions hand to each other.

    Attributes:
        value: The number of the value.
        scope: What there is one value of: a microbatch of a stage, a stage, or a rank.
        producer_rule: Which instruction gives the value to one that needs it.
        phrase: The value in messages: "the activation".
        size: The field of `Sizes` with its bytes; empty if it is not counted.  A value that a stage
            has all the time, such as its weights, takes no memory of its own, unless replicas have
            parts of it.
        peer: For a value that passes between stages, where the other stage is.  Such a value exists
            where that stage does.  Its size is given for the earlier of the two stages.
        local_source: For a value that a stage takes in, the value of the other stage that it is
            where both stages are on one rank.
        converted_from: A value that an instruction frees to make this one, and the field of `Sizes`
            with the bytes of both together.
        program_attribute: An attribute of programs: the value exists only in programs in which it
        is not
            the default or, with `attribute_values`, is one of these.
        initial_tier: One of TIERS, for a value that exists from the start and that no instruction
            makes or frees: it is on that tier, or on the one that the program's `program_attribute`
            names, and has memory there all the time.  Each replica has its part of it.
        attribute_values: See `program_attribute`.
        reserved_memory: For a value with memory of its own all the time, beside what the device
        holds: one
            of TIERS, and the field of `Sizes` with the bytes.  A replica has a part of it where it
            has a part of the optimizer's state.
        is_training_only: Whether the value exists only in programs that train, and only for stages
        that are
            not frozen.
        size_fallback: The field of `Sizes` that is used if `size` is not given.
        is_optional: Whether the value exists only if a pass has added an instruction that uses it
        and
            does not run a stage.  A program without such an instruction is complete.
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
    """A row of the table of forms, in which values cross between stages.

    An instruction with a `form` gives it to a value that a stage puts out, or takes it from a value
    that a stage takes in. A value can have several forms. It gets them in the order of the table
    and loses them in the reverse order.

    Attributes:
        form: The number of the form.
        doc: What a value in this form is.
        is_tp_split: Whether each rank of a tensor-parallel group has 1/t of the bytes. Such a form
        needs
            tp > 1, and a boundary that is not sharded already.
        size: The field of `Sizes` with the bytes of a value in this form: at most as many as
            without the form, and in proportion to them. Without this column, or where the size is
            not given, they are as many.
    """

    form: Form
    doc: str
    is_tp_split: bool = False
    size: str = ""


class LaneRow(NamedTuple):
    """A row of the table of lanes, the in-order queues of a rank.

    Attributes:
        lane: The number of the lane.
        has_messages: Whether it has the messages between ranks.  Progress models divide such lanes
        into
            more queues, or merge them into one.
        host_action: What a blocking host, as on CPUs, does with an instruction on the lane: it
        "runs" the
            instruction itself; it "waits" for what the instruction needs and then starts it; or it
            "starts" it at once.
        doc: What the lane has.
        idle_cause: The `IdleCause` of a rank that waits for an instruction on the lane.
        color: Its colour in charts.
        label: Its name in legends.
    """

    lane: Lane
    has_messages: bool
    host_action: Literal["runs", "waits", "starts"]
    doc: str
    idle_cause: str = "message"
    color: str = "#7a7a7a"
    label: str = ""


class Change(NamedTuple):
    """How an instruction that needs and gives a value changes the state of the value.

    A state is one of TIERS, or a field of `Sizes`; then the value has that many bytes.  The
    instruction that makes a value leaves it in the first state of its changes, and on the first of
    TIERS.  An instruction that only reads the value needs it there and in its last state.  One that
    reads it in another state has a change from that state to itself, and need not give the value.

    Attributes:
        value: The value.
        before: Its state when the instruction starts.
        after: Its state when the instruction ends.
    """

    value: Value
    before: str
    after: str


class CollectiveRing(NamedTuple):
    """The bytes that a collective sends around a ring of its members.

    Attributes:
        members: The tensor-parallel group ("tp"), the replicas ("dp"), or the ranks that have the
            stage ("stage_replicas").
        size: The field of `Sizes` with the bytes; empty for the bytes of the value that the
            instruction needs.
        rounds: How often the bytes go around: once for an all-gather or a reduce-scatter, twice for
            an all-reduce.
    """

    members: Literal["tp", "dp", "stage_replicas"]
    size: str = ""
    rounds: int = 1


class Traffic(NamedTuple):
    """The bytes that an instruction moves over a link, if it is no message and no collective.

    A `Cluster` divides the bytes by the speed of the link for the instruction's cost.

    Attributes:
        link: The GPU's memory, the link to the host, the host's disk, or the host's memory.
        sizes: The fields of `Sizes` whose bytes are moved, of a stage. A field that is read and
            written is there twice. Without any, the bytes are those of the value whose form the
            instruction changes: of all of it, or of the rank's part if the form splits it.
        moves_per_byte: How often each byte is moved.
        is_always_sharded: Whether each replica moves 1/dp of the bytes at every level of ZeRO, also
        at
            level 0.
        program_attribute: "checkpoint_snapshots" or "optimizer_placement", if the instruction is in
        all
            programs with some values of this attribute.  Without it, a cluster that does not know
            the sizes prices nothing.
        attribute_values: These values of the attribute.
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
        op: The number of the instruction.
        text: Its name in the text of a program.
        lane: The queue that executes it.
        scope: What there is one such instruction of.
        needs: Values that must exist before it starts.
        gives: Values that exist when it ends.  A row that only reads a value of a microbatch gives
            it, too, so that it runs before the instruction that frees the value.
        frees: Values that no instruction uses afterwards.
        doc: What it does.
        cost: The field of `Costs` with its time.
        peer: For a message, where the stage on its other side is.
        partner: The instruction on other ranks that it meets; that of a collective is itself.
        group: The ranks of a collective: all pipeline ranks ("model"), those that have the stage
            ("stage_replicas"), or those that share a tied weight ("tied_weights"), whose values it
            needs and gives together.
        host_sync: Whether a blocking host waits for all that is before it on its lane: "always",
            or where there are "replicas".
        changes: How it changes values that it needs and gives.
        ring: For a collective, its bytes.
        needs_all_stages: Whether it needs the values of all stages of its rank, not of its own
            stage alone.
        host_sync_lanes: Lanes on which a blocking host waits for all that is before it.
        is_compute: Whether it runs the module of a stage.  A schedule places such instructions, and
            passes place all others.
        form: The form that it gives to a value that its stage puts out, or removes from a value
            that its stage takes in.
        between_segments: Set for a tensor-parallel collective between two segments of a stage:
            "always", or only in programs with "sequence_parallel".
        idle_cause: The `IdleCause` of a rank that waits for it, if it is not that of the lane.
        traffic: The bytes that it moves over a link of the machine.  A `Cluster` computes the cost
            from `ring` or `traffic`.
        is_implicit_in_torch: Whether torch's runtime, or the training loop around it, does the
        same.  An export
            to torch leaves the instruction out.
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
