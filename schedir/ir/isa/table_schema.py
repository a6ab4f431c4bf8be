"""Row types of the tables in `instructions.py`."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Token

TIERS: Final = ("device", "host", "disk")


class Scope(Enum):
    """What an instruction exists once for, which is also how its text is addressed.

    STAGE and RANK once in each update, whose number follows in the text if it is not 0; TURN as
    often as a program likes, and the k-th time for its stage has the number k there.
    """

    MICROBATCH = "stage.mb"
    STAGE = "stage"
    RANK = ""
    TURN = "stage.turn"


class ProducerRule(Enum):
    """How the giver of a value is found (`schedir/ir/dataflow.py`)."""

    ONCE = "made once for its address, and changed in the order of the table"
    ALL = "collected from all that give it: the last of them"
    VERSION = "of the update whose weights the microbatch uses"
    AGAIN = "made again and again: by the nearest giver that stands earlier in the Stream"
    SINCE = "there from the start, and since the nearest giver that stands earlier in the Stream"


class PeerRule(Enum):
    """Where the other side of a message is, from a stage: a neighbour, or the end of a skip.

    `Program.beside` has the stages, by number.
    """

    NEXT = "the next stage"
    PREVIOUS = "the previous stage"
    SKIP_TO = "the stage that takes the skip"
    SKIP_FROM = "the stage that gives the skip"

    @property
    def back(self) -> PeerRule:
        """The way back."""
        return _BACK[self]

    @property
    def ahead(self) -> bool:
        """Whether it leads to a later stage."""
        return self in (PeerRule.NEXT, PeerRule.SKIP_TO)


_BACK: Final = {
    PeerRule.NEXT: PeerRule.PREVIOUS, PeerRule.PREVIOUS: PeerRule.NEXT,
    PeerRule.SKIP_TO: PeerRule.SKIP_FROM, PeerRule.SKIP_FROM: PeerRule.SKIP_TO,
}  # fmt: skip


class TokenRow(NamedTuple):
    """A row of the table of values.

    `per` is what there is one value of, `words` what a person calls it, `found` who gives it.
    `size` is the field of Sizes that says how many bytes it takes, "" if nobody counts them; one of
    what a stage holds all the time takes none of its own, but where replicas hold parts of that.
    `across` is set for what one stage puts out and another takes in: where the other one is.  There
    is such a value where there is that stage; its size is told for the earlier of the two.
    `handed` is of what is taken in: on one rank it is this value of the other stage.
    `made_of` says that an instruction makes it of another value that it frees, and which field of
    Sizes tells the bytes of both.  `trait` names a trait of programs: only in those that have
    another than its default there are such values; or, with `only`, one of these.
    `lies` is one of TIERS: the value is there from the start, on that one, or on the one that a
    program says by `trait`, and nobody makes or frees it; there it has its room all the time.  Of
    what replicas hold parts of it is the own.
    `room` is of what has memory of its own all the time, whoever fills it, beside what the device
    holds: one of TIERS, and the field of Sizes that tells the bytes; of them a replica has a part
    where it has one of the optimizer's state.
    `like` is the field of Sizes that is used if `size` is not given.
    A program has an `optional` value only if a pass has added an instruction that uses it and does
    not run a stage. A program without such an instruction is complete.
    `training` values exist only where the program trains, and only for stages that are not frozen.
    """

    token: Token
    per: Scope
    found: ProducerRule
    words: str
    size: str = ""
    across: PeerRule | None = None
    handed: Token | None = None
    made_of: tuple[Token, str] | None = None
    trait: str = ""
    lies: str = ""
    only: tuple[str, ...] = ()
    room: tuple[str, str] | None = None
    training: bool = False
    like: str = ""
    optional: bool = False


class FormRow(NamedTuple):
    """A row of the table of forms, in which values cross between stages.

    An instruction with a `form` gives it to a value that a stage puts out, or takes it from a value
    that a stage takes in. A value can have several forms. It gets them in the order of the table
    and loses them in the reverse order.

    Attributes:
        form: The number of the form.
        doc: What a value in this form is.
        split: Whether each rank of a tensor-parallel group has 1/t of the bytes. Such a form needs
            tp > 1, and a boundary that is not sharded already.
        size: The field of `Sizes` with the bytes of a value in this form: at most as many as
            without the form, and in proportion to them. Without this column, or where the size is
            not given, they are as many.
    """

    form: Form
    doc: str
    split: bool = False
    size: str = ""


class LaneRow(NamedTuple):
    """A row of the table of lanes.

    Progress models cut what is on the `wire` finer, or make one queue of it.  `host` says what a
    host that blocks, as on CPUs, does with what is on the lane: it "runs" it itself; or it "waits"
    for what it needs, and then starts it; or it "starts" it, and goes on.  `idle` names the
    `Cause` for which a rank is idle while it waits for something on the lane.  Charts draw the lane
    in `colour`, and legends call it `label`.
    """

    lane: Lane
    wire: bool
    host: Literal["runs", "waits", "starts"]
    doc: str
    idle: str = "message"
    colour: str = "#7a7a7a"
    label: str = ""


class Change(NamedTuple):
    """How an instruction that needs and gives a value changes it.

    From one state to another, which are two of TIERS, or two fields of Sizes: then the value takes
    that many bytes before and after.  Who made it leaves it as the first change wants it, and in
    the first of TIERS; whoever only reads it wants it there, and as the last change leaves it.
    What reads it in another state says so by a change from that state to itself, and need not give
    it.
    """

    token: Token
    before: str
    after: str


class CollectiveRing(NamedTuple):
    """Whom a collective goes around, and how often: once if it gathers, or leaves each a part of
    the sum, and twice if all get the sum.

    Its members are those of the tensor-parallel group ("tp"), replicas ("dp") or the holders of the
    stage ("holders").  `size` is the field of Sizes that tells what of a stage it is of; without,
    it is of the value that it needs.
    """

    members: Literal["tp", "dp", "holders"]
    size: str = ""
    turns: int = 1


class Traffic(NamedTuple):
    """The bytes that an instruction moves over a link, if it is no message and no collective.

    A `Cluster` divides the bytes by the speed of the link for the instruction's cost.

    Attributes:
        link: The GPU's memory, the link to the host, the host's disk, or the host's memory.
        sizes: The fields of `Sizes` whose bytes are moved, of a stage. A field that is read and
            written is there twice. Without any, the bytes are those of the value whose form the
            instruction changes: of all of it, or of the rank's part if the form splits it.
        times: How often each byte is moved.
        always_shared: Whether each replica moves 1/dp of the bytes at every level of ZeRO, also at
            level 0.
        trait: "snapshots" or "states", if the instruction is in all programs with some values of
            this trait. Without a trait, a cluster that does not know the sizes prices nothing.
        only: These values of the trait.
    """

    link: Literal["hbm", "host", "disk", "dram"]
    sizes: tuple[str, ...] = ()
    times: float = 1
    always_shared: bool = False
    trait: str = ""
    only: tuple[object, ...] = ()


class Row(NamedTuple):
    """A row of the instruction table.

    `needs` must have been given before the instruction starts, `gives` is there when it ends,
    `frees` is of no use to anybody afterwards. A row that only reads a microbatch's value also
    gives it. So the row runs before the one that frees the value.  `hop` is set for transfers:
    where the stage of the message's other side is.  `meets` is set for what has partners on other
    ranks, and `group` says who they are: all ranks of the pipeline ("model"), the holders of the
    stage ("holders"), or those that share tied weights ("tied"), whose values it needs and gives at
    once.  `cost` is the field of Costs that prices it.  `drains` says that a host that blocks waits
    for what stands before it on its lane: "always", or where there are "replicas".  `ring` says of
    a collective how many bytes it sends.  `of_all` says that of what is collected it needs what
    there is of all stages of its rank, not of its own alone.  `waits` are lanes of which a host
    that blocks waits for all that stands before it. A row that `computes` runs a stage's module:
    schedules place it, and each other one is placed by a pass.  `form` is the form that it gives to
    a value that its stage puts out, or takes from a value that its stage takes in.
    `between_segments` is set for collectives of the tensor-parallel group that sum or gather what
    one segment of a stage passes to the next: "always", or only in programs with "sequence yes". A
    `Cluster` makes the cost of the row from `ring` or `traffic`.  `idle` is that of its lane,
    unless it names another `Cause`.  `in_torch` is set where torch's runtime, or the training loop
    around it, does the same: an export to torch leaves the row out.
    """

    op: Opcode
    text: str
    lane: Lane
    per: Scope
    needs: tuple[Token, ...]
    gives: tuple[Token, ...]
    frees: tuple[Token, ...]
    doc: str
    cost: str = ""
    hop: PeerRule | None = None
    meets: Opcode | None = None
    group: Literal["", "model", "holders", "tied"] = ""
    drains: Literal["", "always", "replicas"] = ""
    changes: tuple[Change, ...] = ()
    ring: CollectiveRing | None = None
    of_all: bool = False
    waits: tuple[Lane, ...] = ()
    computes: bool = False
    form: Form | None = None
    between_segments: Literal["", "always", "sequence"] = ""
    idle: str = ""
    traffic: Traffic | None = None
    in_torch: bool = False
