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

from schedir.errors import ShapeError, describe
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
    TRAINING_VALUES,
    USERS,
    VALUES,
    Instr,
    Opcode,
    PeerRule,
    Value,
)
from schedir.ir.notebook_repr import html
from schedir.ir.pipeline import program_attributes
from schedir.ir.pipeline.field_schema import fields_of
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
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

    progress_model: str
    blocking_hosts: bool = False
    host_device_sync: bool = False
    lazy_communicators: bool = False
    eager_messages: EagerMessages | None = None


@dataclass(frozen=True)
class Program:
    """The shape of a pipeline, the attributes of its training, and one Stream per rank.

    Args:
        name: One printable line.
        shape: The shape of the pipeline.
        streams: The instructions of each rank, in the order in which the rank issues them.
        tp: Size of the tensor-parallel groups that run each Stream.
        dp: Number of data-parallel replicas that run each Stream.
        tied_weights: For each weight that several stages have a copy of, these stages, ascending:
            `((0, 3),)`.  True means the first and the last stage.
        clip_grad_norm: Whether gradients are clipped by their global norm.
        frozen_stages: Number of first stages that are not trained.  They have no backward, and no
            gradient is sent to them.  Stage `frozen_stages` has no gradient of its input.
        skips: The stages, from and to, between which a second value passes: `((0, 3), (1, 2))`.
        norm_check: "before_step": an optimizer step that clips waits for the gradient norm.
            "after_step": the step is made as if nothing was clipped, and is undone and made again
            if the norm shows otherwise (post-validation, arXiv 2401.10241, section 4).
        zero: Level of ZeRO (arXiv 1910.02054), 0 to 3.  From 1 on each replica has a part of the
            optimizer's state, from 2 on of the gradients, and at 3 of the weights, which Unshard
            gathers.
        reduce_scatter_at: When gradients in parts are reduced: once, at the "update_end", or at
            "each_backward", so that no full gradient is held between runs of backwards.
        checkpoint_snapshots: Whether what a step changes can be copied while its forwards run, for
            a checkpoint.
        optimizer_placement: Where the optimizer's state is between steps.  On the "device"; on the
            "host", and each update ends with a load, a step and a store of each trained stage; on
            the "disk", with a read before the load and a write after the store.  With "cpu_step"
            it stays on the host, which steps the stage: gradients are copied to the host, and
            weights come back (ZeRO-Offload, arXiv 2101.06840).
        segment_boundaries: A letter for each boundary between two stages, where stages of the
            program are segments of a stage: "fgfg-fgfg".  See
            `schedir/ir/pipeline/stage_segments.py`.
        chunks_per_microbatch: How many of the program's microbatches are chunks of one.
        sequence_parallel: Whether tensor-parallel ranks also split the tokens (arXiv 2205.05198).
            Each sends its part, and gradients of weights that all ranks have are summed.
        slots: The numbers of static buffers of each rank; empty where each value has its own.
        order: The numbers of messages in the order of the lowering, for each kind of send by
            stage * microbatches + mb, -1 where there is none.  It is a hint that makes `check`
            faster, and `check` verifies it.  A pass need not update it.

    Attributes:
        words: The instructions of all Streams, one Stream after the other.
        offsets: Where each Stream begins in `words`; one more entry than there are ranks.
        proofs: The progress models and kinds of hosts for which `check` has proven the program.  A
            copy made by `dataclasses.replace`, `copy` or `pickle` has none.

    Example:
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
    shape: PipelineShape
    streams: tuple[Stream, ...]
    tp: int = field(default=1, metadata=program_attributes.TP)
    dp: int = field(default=1, metadata=program_attributes.DP)
    tied_weights: Tied = field(default=(), metadata=program_attributes.TIED)
    clip_grad_norm: bool = field(default=False, metadata=program_attributes.CLIP)
    frozen_stages: int = field(default=0, metadata=program_attributes.FROZEN)
    skips: Skips = field(default=(), metadata=program_attributes.SKIPS)
    norm_check: str = field(default="before_step", metadata=program_attributes.VALIDATE)
    zero: int = field(default=0, metadata=program_attributes.ZERO)
    reduce_scatter_at: str = field(default="update_end", metadata=program_attributes.REDUCE)
    checkpoint_snapshots: bool = field(default=False, metadata=program_attributes.SNAPSHOTS)
    optimizer_placement: str = field(default="device", metadata=program_attributes.STATES)
    segment_boundaries: str = field(default="", metadata=program_attributes.MEETS)
    chunks_per_microbatch: int = field(default=1, metadata=program_attributes.CHUNKED)
    sequence_parallel: bool = field(default=False, metadata=program_attributes.SEQUENCE)
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
            raise ShapeError(
                f"a program's name is one printable line without '#', not {name!r}", fields=["name"]
            )
        if name != name.strip():
            raise ShapeError(
                f"a program's name has no space around it: {name!r} has", fields=["name"]
            )
        # A schedule that is expanded on the shape of a program keeps to that shape.
        object.__setattr__(self, "shape", self.shape.resolved())
        for f in TRAITS:
            value = f.kind.settle(f.name, getattr(self, f.name), self.shape)
            object.__setattr__(self, f.name, value)
        told = {name: getattr(self, name) for name in program_attributes.TOGETHER}
        program_attributes.require_together(self.shape, **told)
        try:
            slots = tuple(SlotCounts(*map(index, counts)) for counts in self.slots)
        except TypeError:
            raise ShapeError(
                f"slots are four whole numbers for each rank, not {describe(self.slots)}",
                hint="SlotCounts(act_in=2, act_out=1, grad_in=1, grad_out=1)",
                fields=["slots"],
            ) from None
        if slots and len(slots) != self.shape.ranks:
            raise ShapeError(
                f"slots are given for {len(slots)} of {self.shape.ranks} ranks", fields=["slots"]
            )
        if any(not 0 <= count < 2**31 for counts in slots for count in counts.said().values()):
            raise ShapeError("the number of slots is a whole number from 0 on", fields=["slots"])
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
        return f"<{kind} {self.name}: {self.shape.ranks} ranks, {len(self)} instructions>"

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
        return beside(hop, self.shape.stages, self.skips)

    def other(self, token: Value, stage: int) -> int:
        """The stage that gives a stage a value, or takes it from it; -1 where there is none."""
        across = VALUES[token].peer
        assert across is not None
        other = int(self.beside(across)[stage])
        return other if other >= (self.frozen_stages if token in TRAINING_VALUES else 0) else -1

    def peer(self, i: Instr) -> int:
        """The rank at the other side of a message."""
        hop = ROWS[i.op].peer
        assert hop is not None
        return int(self.shape.rank_at(self.beside(hop)[i.stage], i.mb))

    def has(self, token: Value) -> bool:
        """Return whether the program can have values of this kind.

        A boundary value needs a stage on its other side, a value of a trait needs the trait, and
        an optional value needs an instruction that uses it.
        """
        if VALUES[token].optional and self.ops.isdisjoint(USERS[token]):
            return False
        across, trait = VALUES[token].peer, VALUES[token].attribute
        if trait:
            said, only = getattr(self, trait), VALUES[token].attribute_values
            return said in only if only else bool(said != getattr(type(self), trait))
        return across is None or bool((self.beside(across) >= 0).any())

    def lies(self, token: Value) -> str:
        """On which of TIERS a value lies from the start on; "" if it is made."""
        row = VALUES[token]
        said = getattr(self, row.attribute) if row.initial_tier else ""
        return said if said in TIERS else row.initial_tier

    def holds(self, token: Value) -> bool:
        """Whether values of this kind take memory of their own.

        What is whole all the time does not: weights and gradients, up to the level of ZeRO from
        which on replicas have parts of them.
        """
        size = VALUES[token].size
        whole = size in CUT_FROM and not is_cut(size, self.zero) and not VALUES[token].initial_tier
        return self.has(token) and size != "" and not whole

    def in_slots(self, token: Value) -> bool:
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
        return pieces_in(self.segment_boundaries, self.shape.stages)

    @cached_property
    def whole(self) -> PipelineShape:
        """The shape of the stages and the microbatches of which its own are pieces and chunks."""
        return whole_of(self.shape, self.segment_boundaries, self.chunks_per_microbatch).shape

    def first_of(self, op: int) -> int:
        """The first stage that an instruction can be of: of backwards, of messages with gradients
        and of what reduces them, the first that is trained."""
        return self.frozen_stages if op in OF_TRAINED else 0

    @property
    def summed(self) -> Tied:
        """Of what is `tied` what is trained, and so summed: not copies that are all frozen."""
        return tuple(stages for stages in self.tied_weights if stages[0] >= self.frozen_stages)

    @property
    def ascending(self) -> bool:
        """Whether each stage adds to every gradient in ascending microbatch order.

        Several holders of a stage have a sum each, and to add these is another order.
        """
        if self.shape.rows > 1:
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
        first = [item for f in HEADER if f.digest for item in f.digest(f.of(self), self.shape)]
        later = [(f.name, f.of(self)) for f in HEADER if not (f.digest or f.is_default(self))]
        sha = hashlib.sha256(repr((*first, self.slots, *later)).encode())
        for s in self.streams:
            sha.update(len(s).to_bytes(8, "little"))
            sha.update(s.words.astype("<i8", copy=False).tobytes())
        return sha.hexdigest()


TRAITS: Final = fields_of(Program, of_plan=False)
HEADER: Final = (*SHAPE_FIELDS, *TRAITS)  # all that is said of a program beside its instructions
