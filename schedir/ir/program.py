"""Program: one immutable instruction list per rank.  Passes map a Program to a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import PlanError, describe
from schedir.ir.cost.sizes import EagerMessages
from schedir.ir.cost.zero_states import CUT_FROM, is_cut
from schedir.ir.isa.instructions import (
    ADDS,
    ADDS_TO_WEIGHTS,
    BOUNDARY,
    COMPUTE,
    OF_TRAINED,
    OFF_COMPUTE,
    ROWS,
    TIERS,
    TOKENS,
    TRAINING_VALUES,
    USERS,
    Instr,
    Opcode,
    PeerRule,
    Token,
)
from schedir.ir.notebook_repr import html
from schedir.ir.pipeline import program_attributes
from schedir.ir.pipeline.field_schema import fields_of
from schedir.ir.pipeline.pipeline_shape import PLAN, PipelineShape
from schedir.ir.pipeline.skip_connections import Skips, beside
from schedir.ir.pipeline.slot_counts import ON_HOST as ON_HOST
from schedir.ir.pipeline.slot_counts import OWN as OWN
from schedir.ir.pipeline.slot_counts import SlotCounts as SlotCounts
from schedir.ir.pipeline.stage_segments import pieces_in, whole_of
from schedir.ir.pipeline.tied_weights import Tied
from schedir.ir.stream import ADDRESS as ADDRESS
from schedir.ir.stream import FIELDS as FIELDS
from schedir.ir.stream import JOINED as JOINED
from schedir.ir.stream import OP as OP
from schedir.ir.stream import OPS as OPS
from schedir.ir.stream import STAGE as STAGE
from schedir.ir.stream import Stream as Stream
from schedir.ir.stream import StreamSlices as StreamSlices
from schedir.ir.stream import Words as Words
from schedir.ir.stream import is_op as is_op
from schedir.ir.stream import pack as pack
from schedir.ir.stream import unpack as unpack

if TYPE_CHECKING:
    from typing import Self

Order = Mapping[Opcode, NDArray[np.int32]]

_LARGE: Final = 2**22  # instructions of a program with which nothing is kept that is made of it
_T = TypeVar("_T")


class Proof(NamedTuple):
    """That a program ends: under which progress model, on hosts that block or not, whether they may
    wait for their device or meet to make communicators, and which messages wait for nobody, as
    `check` says."""

    model: str
    blocks: bool = False
    device_waits: bool = False
    lazy: bool = False
    eager: EagerMessages | None = None


@dataclass(frozen=True)
class Program:
    """A plan and one Stream per rank.

    `tp` and `dp` are the sizes of the tensor- and data-parallel groups that run each Stream;
    `tied` has, for each set of stages that hold copies of the same weights, these stages,
    ascending: `((0, 3),)`; True stands for first and last stage.  `clip` says that gradients are
    clipped by their global norm.  `frozen` is how many of the first stages are not trained: they
    have no backward, no gradient crosses to them, and stage `frozen` is the first that is trained;
    it has no gradient of its input, as stage 0 has none of a program without.  `skips` has the
    stages, from and to, between which a value beside the activation passes: `((0, 3), (1, 2))`.
    `validate` says whether a step that clips waits for the norm ("before"), or is made as if
    nothing had to be clipped, and is validated "after": then it waits for no other rank.
    `zero` is the level of ZeRO (arXiv 1910.02054), 0 to 3: of what replicas hold a part each of.
    From 1 on that is the optimizer's state, from 2 on gradients, and at 3 the weights, too; these
    are gathered by Unshard.  `reduce` says of gradients in parts whether they are reduced once, at
    the "end", or each "turn", so that no whole one is held between runs of backwards.
    `snapshots` says that what a step changes can be copied while its forwards run, to be saved.
    `states` is where the optimizer's state lies between steps: on the "device", or on the "host".
    Then each update ends with a load, a step and a store of each own stage that is trained; on the
    "disk" with a fetch before the load, and a spill behind the store.  With "cpu" it lies on the
    host and stays there: each stage's gradient is copied to the host, which steps the stage itself,
    and its weights come back (ZeRO-Offload, arXiv 2101.06840).
    `meets` has a letter for each boundary between two stages, where any of them are pieces of one
    (`schedir/ir/pipeline/stage_segments.py`): "fgfg-fgfg".  `chunked` is how many of the
    microbatches are chunks of one.  So `pieces` and `whole` tell what somebody has cut. `sequence`
    says that tensor-parallel ranks share the sequence, too (arXiv 2205.05198): each has sent its
    part, and what each has of gradients of weights that all hold whole is summed. `slots` has one
    entry per rank; where it is empty, each value has a slot of its own.

    `order` numbers the messages as the lowering places them: for each kind of send a number by
    stage*microbatches + mb, -1 where there is none.  It is no part of what the program says, and
    nobody trusts it: `check` looks whether it holds, which is faster than to find an order.  So a
    pass need not keep it up.

    `proofs` says for which progress models and hosts `check` has proven the program.  A program
    that is made of it, as by `dataclasses.replace`, `copy` or `pickle`, has none.

    `words` are all Streams, one behind the other, and `offsets` says where each begins, with
    one more entry than there are ranks.

    >>> from schedir import PipelineShape, compile, schedules
    >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=4, microbatches=8))
    >>> program
    <program one_f_one_b: 4 ranks, 168 instructions>
    >>> program.is_draft, program.trains, program.ascending
    (False, True, True)
    >>> print(*program.streams[3][:4], sep=", ")
    recv_act 3.0, F 3.0, recv_act 3.1, B 3.0
    >>> len(program.digest)
    64
    """

    name: str
    plan: PipelineShape
    streams: tuple[Stream, ...]
    tp: int = field(default=1, metadata=program_attributes.TP)
    dp: int = field(default=1, metadata=program_attributes.DP)
    tied: Tied = field(default=(), metadata=program_attributes.TIED)
    clip: bool = field(default=False, metadata=program_attributes.CLIP)
    frozen: int = field(default=0, metadata=program_attributes.FROZEN)
    skips: Skips = field(default=(), metadata=program_attributes.SKIPS)
    validate: str = field(default="before", metadata=program_attributes.VALIDATE)
    zero: int = field(default=0, metadata=program_attributes.ZERO)
    reduce: str = field(default="end", metadata=program_attributes.REDUCE)
    snapshots: bool = field(default=False, metadata=program_attributes.SNAPSHOTS)
    states: str = field(default="device", metadata=program_attributes.STATES)
    meets: str = field(default="", metadata=program_attributes.MEETS)
    chunked: int = field(default=1, metadata=program_attributes.CHUNKED)
    sequence: bool = field(default=False, metadata=program_attributes.SEQUENCE)
    slots: tuple[SlotCounts, ...] = ()
    order: Mapping[Opcode, NDArray[np.int32]] = field(
        default_factory=dict, repr=False, compare=False
    )
    words: Words = field(init=False, repr=False, compare=False)
    offsets: Words = field(init=False, repr=False, compare=False)
    proofs: set[Proof] = field(init=False, default_factory=set, repr=False, compare=False)
    _derived: dict[object, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name.isprintable() or "#" in name or not name.strip():
            raise PlanError(
                f"a program's name is one printable line without '#', not {name!r}", fields=["name"]
            )
        if name != name.strip():
            raise PlanError(
                f"a program's name has no space around it: {name!r} has", fields=["name"]
            )
        for f in TRAITS:
            value = f.kind.settle(f.name, getattr(self, f.name), self.plan)
            object.__setattr__(self, f.name, value)
        told = {name: getattr(self, name) for name in program_attributes.TOGETHER}
        program_attributes.require_together(self.plan, **told)
        try:
            slots = tuple(SlotCounts(*map(index, counts)) for counts in self.slots)
        except TypeError:
            raise PlanError(
                f"slots are four whole numbers for each rank, not {describe(self.slots)}",
                hint="Slots(act_in=2, act_out=1, grad_in=1, grad_out=1)",
                fields=["slots"],
            ) from None
        if slots and len(slots) != self.plan.ranks:
            raise PlanError(
                f"slots are given for {len(slots)} of {self.plan.ranks} ranks", fields=["slots"]
            )
        if any(not 0 <= count < 2**31 for counts in slots for count in counts.said().values()):
            raise PlanError("the number of slots is a whole number from 0 on", fields=["slots"])
        object.__setattr__(self, "slots", slots)
        streams = StreamSlices.of(self.streams)
        object.__setattr__(self, "streams", streams)
        object.__setattr__(self, "words", streams.words)
        object.__setattr__(self, "offsets", streams.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what is pickled, is made anew: all words in one array, and nothing proven yet.
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return type(self), (*(given | {"streams": tuple(self.streams)}).values(),)

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        kind = "draft" if self.is_draft else "program"
        return f"<{kind} {self.name}: {self.plan.ranks} ranks, {len(self)} instructions>"

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def shares_slots(self) -> bool:
        """Whether values that cross boundaries share slots: else each has one of its own."""
        across = SlotCounts._fields[: len(BOUNDARY)]
        return any(not {*across}.isdisjoint(slots.said()) for slots in self.slots)

    def with_slots(self, slots: Sequence[SlotCounts]) -> Self:
        """The same Streams with other numbers of slots: who gives what stays known."""
        made = replace(self, slots=tuple(slots))
        kept = {what: it for what, it in self._derived.items() if what in ("index", "flow")}
        made._derived.update(kept)
        return made

    def derived(self, what: object, make: Callable[[Self], _T]) -> _T:
        """What is made of the program once, and then kept with it, if it is not too large.

        It is made of a twin, which has the same Streams and proofs, and what is derived so far.  So
        the program holds it, and it does not hold the program: both go when nobody uses them.
        What is derived of the twin meanwhile stays with the twin, and is kept, too.
        """
        if what in (known := self._derived):
            found: _T = known[what]
            return found
        twin = object.__new__(type(self))
        vars(twin).update(vars(self) | {"_derived": dict(known), "_is_twin": True})
        made = make(twin)
        if "_is_twin" in vars(self) or len(self) <= _LARGE:
            known.update(twin._derived | {what: made})
        return made

    def forget(self) -> None:
        """Let go of what is derived: of a program that only another one is made of."""
        self._derived.clear()

    def beside(self, hop: PeerRule) -> NDArray[np.int32]:
        """The stage that is a hop from each, shape (stages,); -1 where there is none."""
        return beside(hop, self.plan.stages, self.skips)

    def other(self, token: Token, stage: int) -> int:
        """The stage that gives a stage a value, or takes it from it; -1 where there is none."""
        across = TOKENS[token].across
        assert across is not None
        other = int(self.beside(across)[stage])
        return other if other >= (self.frozen if token in TRAINING_VALUES else 0) else -1

    def peer(self, i: Instr) -> int:
        """The rank at the other side of a message."""
        hop = ROWS[i.op].hop
        assert hop is not None
        return int(self.plan.rank_at(self.beside(hop)[i.stage], i.mb))

    def has(self, token: Token) -> bool:
        """Return whether the program can have values of this kind.

        A boundary value needs a stage on its other side, a value of a trait needs the trait, and
        an optional value needs an instruction that uses it.
        """
        if TOKENS[token].optional and self.ops.isdisjoint(USERS[token]):
            return False
        across, trait = TOKENS[token].across, TOKENS[token].trait
        if trait:
            said, only = getattr(self, trait), TOKENS[token].only
            return said in only if only else bool(said != getattr(type(self), trait))
        return across is None or bool((self.beside(across) >= 0).any())

    def lies(self, token: Token) -> str:
        """On which of TIERS a value lies from the start on; "" if it is made."""
        row = TOKENS[token]
        said = getattr(self, row.trait) if row.lies else ""
        return said if said in TIERS else row.lies

    def holds(self, token: Token) -> bool:
        """Whether values of this kind take memory of their own.

        What is whole all the time does not: weights and gradients, up to the level of ZeRO from
        which on replicas have parts of them.
        """
        size = TOKENS[token].size
        whole = size in CUT_FROM and not is_cut(size, self.zero) and not TOKENS[token].lies
        return self.has(token) and size != "" and not whole

    def in_slots(self, token: Token) -> bool:
        """Whether how many slots a kind has is a choice here: of what crosses boundaries, and of
        what is touched off the compute lane."""
        return token in BOUNDARY or any(op in self.ops for op in OFF_COMPUTE[token])

    @property
    def op(self) -> NDArray[np.uint8]:
        """The opcode of each instruction, one rank behind the other."""
        return np.asarray(self.words.view(FIELDS)["op"])

    @property
    def joined(self) -> NDArray[np.bool_]:
        """Whether each instruction is issued together with the one before it."""
        return self.words.view(FIELDS)["joined"].astype(bool)

    @cached_property
    def ops(self) -> frozenset[int]:
        """The opcodes that there are."""
        # Some at a time: bincount makes eight bytes of each.
        parts = (self.op[at : at + 2**16] for at in range(0, len(self), 2**16))
        return frozenset().union(*(np.flatnonzero(np.bincount(part)).tolist() for part in parts))

    @property
    def is_draft(self) -> bool:
        """Whether there is compute only: no transfers, reductions or steps yet."""
        return self.ops <= {*COMPUTE}

    @property
    def trains(self) -> bool:
        """Whether there is any backward; a program without one evaluates."""
        return not self.ops.isdisjoint(ADDS)

    @property
    def pieces(self) -> tuple[int, ...]:
        """In how many pieces each whole stage is: these are stages of the program."""
        return pieces_in(self.meets, self.plan.stages)

    @cached_property
    def whole(self) -> PipelineShape:
        """The plan of the stages and the microbatches of which its own are pieces and chunks."""
        return whole_of(self.plan, self.meets, self.chunked).plan

    def first_of(self, op: int) -> int:
        """The first stage that an instruction can be of: of backwards, of messages with gradients
        and of what reduces them, the first that is trained."""
        return self.frozen if op in OF_TRAINED else 0

    @property
    def summed(self) -> Tied:
        """Of what is `tied` what is trained, and so summed: not copies that are all frozen."""
        return tuple(stages for stages in self.tied if stages[0] >= self.frozen)

    @property
    def ascending(self) -> bool:
        """Whether each stage adds to every gradient in ascending microbatch order.

        Several holders of a stage have a sum each, and to add these is another order.
        """
        if self.plan.rows > 1:
            return False
        for s in self.streams:
            for ops in ADDS_TO_WEIGHTS:
                at = np.flatnonzero(is_op(s.op, ops))
                at = at[np.argsort(s.stage[at], kind="stable")]
                same = s.stage[at][1:] == s.stage[at][:-1]
                if (same & (s.mb[at][1:] < s.mb[at][:-1])).any():
                    return False
        return True

    @cached_property
    def digest(self) -> str:
        """sha256 of all that decides how the program runs; its name does not."""
        # What came later stands behind, and only where it is of use: other digests stay.
        first = [item for f in HEADER if f.digest for item in f.digest(f.of(self), self.plan)]
        later = [(f.name, f.of(self)) for f in HEADER if not (f.digest or f.is_default(self))]
        sha = hashlib.sha256(repr((*first, self.slots, *later)).encode())
        for s in self.streams:
            sha.update(len(s).to_bytes(8, "little"))
            sha.update(s.words.astype("<i8", copy=False).tobytes())
        return sha.hexdigest()


TRAITS: Final = fields_of(Program, of_plan=False)
HEADER: Final = (*PLAN, *TRAITS)  # all that is said of a program beside its instructions
