"""Program: one immutable instruction list per rank.  Passes map a Program to a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property, partial
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ShapeError, describe
from schedir.ir.cost.sizes import EagerMessages
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL, is_sharded
from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    COMPUTE_OPS,
    GRAD_ADDING_OPS,
    GRAD_ADDING_OPS_BY_WEIGHT,
    INSTRUCTIONS,
    NON_COMPUTE_USERS,
    OPS_OFF_COMPUTE_LANE,
    TIERS,
    TRAINED_STAGE_OPS,
    TRAINING_VALUES,
    VALUES,
    Instr,
    Opcode,
    PeerRule,
    Value,
)
from schedir.ir.notebook_repr import render_html
from schedir.ir.pipeline import program_attributes
from schedir.ir.pipeline.field_schema import collect_fields
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.skip_connections import Skips, find_neighbor_stages
from schedir.ir.pipeline.slot_counts import HOST_SLOT_VALUES as HOST_SLOT_VALUES
from schedir.ir.pipeline.slot_counts import UNSHARED_SLOTS as UNSHARED_SLOTS
from schedir.ir.pipeline.slot_counts import SlotCounts as SlotCounts
from schedir.ir.pipeline.stage_segments import count_segments, merge_segments
from schedir.ir.pipeline.tied_weights import TiedStages
from schedir.ir.stream import ADDRESS_MASK as ADDRESS_MASK
from schedir.ir.stream import JOINED_BIT as JOINED_BIT
from schedir.ir.stream import OP_SHIFT as OP_SHIFT
from schedir.ir.stream import OPCODES as OPCODES
from schedir.ir.stream import STAGE_SHIFT as STAGE_SHIFT
from schedir.ir.stream import WORD_DTYPE as WORD_DTYPE
from schedir.ir.stream import Stream as Stream
from schedir.ir.stream import StreamSlices as StreamSlices
from schedir.ir.stream import Words as Words
from schedir.ir.stream import is_op as is_op
from schedir.ir.stream import pack as pack
from schedir.ir.stream import replace_opcode as replace_opcode
from schedir.ir.stream import unpack as unpack
from schedir.retired_names import raise_attribute_error

if TYPE_CHECKING:
    from typing import Self

MessageOrder = Mapping[Opcode, NDArray[np.int32]]

# The largest number of instructions of a program that caches derived objects.  The derived objects
# of a larger program would use too much memory.
_MAX_CACHED_INSTRUCTIONS: Final = 2**22
_T = TypeVar("_T")


class Proof(NamedTuple):
    """The conditions under which `check` has proven a program.

    See `schedir.check` for their meaning.

    Attributes:
        progress_model: Name of the progress model.
        blocking_hosts: True if hosts wait for the inputs of an instruction before they issue it.
        host_device_sync: True if a host may wait for its device at any launch.
        lazy_communicators: True if the ranks of a communicator wait for each other at its first
            use.
        eager_messages: The messages that do not wait for their receive; None if there are none.
    """

    progress_model: str
    blocking_hosts: bool = False
    host_device_sync: bool = False
    lazy_communicators: bool = False
    eager_messages: EagerMessages | None = None


@explain_wrong_calls("compile('one_f_one_b', ranks=4, microbatches=8)")
@dataclass(frozen=True)
class Program:
    """The shape of a pipeline, the attributes of its training, and one Stream per rank.

    Args:
        name: One printable line without "#" and without spaces at its ends.
        shape: The shape of the pipeline.
        streams: The instructions of each rank, in the order in which the rank issues them.
        tp: Size of the tensor-parallel groups that run each Stream.
        dp: Number of data-parallel replicas that run each Stream.
        tied_weights: One tuple for each tied weight, with the stages that have a copy of it,
            ascending: `((0, 3),)`.  True means that the first and the last stage share a weight.
        clip_grad_norm: True if gradients are clipped by their global norm.
        frozen_stages: Number of stages, counted from stage 0, that are not trained.  These stages
            have no backward, and no rank sends a gradient to them.  The first trained stage
            computes no gradient of its input.
        skips: The skip connections, each as (source stage, target stage): `((0, 5), (1, 4))`.
        norm_check: "before_step": an optimizer step that clips waits for the gradient norm.
            "after_step": the step runs before the norm is known, and does not clip.  If the norm
            then shows that gradients had to be clipped, the step is undone and repeated
            (post-validation, arXiv 2401.10241, section 4).
        zero: Level of ZeRO (arXiv 1910.02054), 0 to 3.  Each replica has a part of the optimizer's
            state from level 1 on, and a part of the gradients from level 2 on.  At level 3, each
            replica has a part of the weights, which Unshard gathers.
        reduce_scatter_at: When sharded gradients are reduced.  "update_end": once per update.
            "each_backward": after each sequence of consecutive backwards of a stage, so that
            unsharded gradients use no memory between these sequences.
        checkpoint_snapshots: True if the program can copy the weights and the optimizer state for
            a checkpoint during the next step, before the OptimizerStep of that step changes them.
        optimizer_placement: Memory tier of the optimizer's state between steps.  With "host", each
            update ends with ReloadState, StageOptimizerStep and OffloadState for each trained
            stage.  With "disk", ReadStateFromDisk comes before ReloadState, and WriteStateToDisk
            after OffloadState.  With "cpu_step", the state stays on the host, which runs the
            optimizer step.  Gradients are then copied to the host, and weights are copied back
            (ZeRO-Offload, arXiv 2101.06840).
        segment_boundaries: A letter for each boundary between two stages of the program, such as
            "fgfg-fgfg", if the stages of the program are segments of the model's stages.  See
            `schedir/ir/pipeline/stage_segments.py`.
        chunks_per_microbatch: Number of chunks into which each microbatch is divided.  Each chunk
            is a microbatch of the program.
        sequence_parallel: True if tensor-parallel ranks also split the tokens (arXiv 2205.05198).
            Each rank sends its part of a boundary. The ranks sum the gradients of weights that each
            rank has in full.
        ep: Size of the expert-parallel groups.  A group has `ep` consecutive data-parallel
            replicas, and each replica of the group has 1/ep of the experts.  The letters d and c of
            `segment_boundaries` need ep > 1.
        slots: The numbers of static buffers of each rank; empty if each value has a separate
            buffer.
        message_order: Opcode of a send -> array of the numbers of its messages.  The lowering
            numbers messages in the order in which it adds them.  The number of a message is at
            index `stage * microbatches + mb`.  The entry is -1 if there is no such message.  This
            order makes `check` faster, and `check` verifies the order.  A pass need not update
            `message_order`.

    Attributes:
        words: The instructions of all Streams, one Stream after the other.
        offsets: Index of the first instruction of each Stream in `words`, and the length of
            `words`; shape (ranks + 1,).
        proofs: The conditions under which `check` has proven the program.  A copy that
            `dataclasses.replace`, `copy` or `pickle` makes has no proofs.

    Raises:
        ShapeError: The name is not allowed, or `slots` are not valid numbers for each rank.  Or the
            value of an attribute is not allowed, or does not fit the shape or another attribute.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=4, microbatches=8))
        >>> program
        <program one_f_one_b: 4 ranks, 168 instructions>
        >>> program.is_draft, program.has_backward, program.reduces_in_microbatch_order
        (False, True, True)
        >>> print(*program.streams[3][:4], sep=", ")
        recv_act 3.0, F 3.0, recv_act 3.1, B 3.0
        >>> len(program.digest)
        64
    """

    name: str
    shape: PipelineShape
    streams: tuple[Stream, ...]
    _: KW_ONLY
    tp: int = field(default=1, metadata=program_attributes.TP)
    dp: int = field(default=1, metadata=program_attributes.DP)
    tied_weights: TiedStages = field(default=(), metadata=program_attributes.TIED_WEIGHTS)
    clip_grad_norm: bool = field(default=False, metadata=program_attributes.CLIP_GRAD_NORM)
    frozen_stages: int = field(default=0, metadata=program_attributes.FROZEN_STAGES)
    skips: Skips = field(default=(), metadata=program_attributes.SKIPS)
    norm_check: str = field(default="before_step", metadata=program_attributes.NORM_CHECK)
    zero: int = field(default=0, metadata=program_attributes.ZERO)
    reduce_scatter_at: str = field(
        default="update_end", metadata=program_attributes.REDUCE_SCATTER_AT
    )
    checkpoint_snapshots: bool = field(
        default=False, metadata=program_attributes.CHECKPOINT_SNAPSHOTS
    )
    optimizer_placement: str = field(
        default="device", metadata=program_attributes.OPTIMIZER_PLACEMENT
    )
    segment_boundaries: str = field(default="", metadata=program_attributes.SEGMENT_BOUNDARIES)
    chunks_per_microbatch: int = field(default=1, metadata=program_attributes.CHUNKS_PER_MICROBATCH)
    sequence_parallel: bool = field(default=False, metadata=program_attributes.SEQUENCE_PARALLEL)
    ep: int = field(default=1, metadata=program_attributes.EP)
    slots: tuple[SlotCounts, ...] = ()
    message_order: Mapping[Opcode, NDArray[np.int32]] = field(
        default_factory=dict, repr=False, compare=False
    )
    words: Words = field(init=False, repr=False, compare=False)
    offsets: Words = field(init=False, repr=False, compare=False)
    proofs: set[Proof] = field(init=False, default_factory=set, repr=False, compare=False)
    _cache: dict[object, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    if not TYPE_CHECKING:  # A type checker would allow any attribute.
        __getattr__ = raise_attribute_error

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name.isprintable() or "#" in name or not name.strip():
            raise ShapeError(
                f"name must be one printable line without '#', not {name!r}", fields=["name"]
            )
        if name != name.strip():
            raise ShapeError(f"name must not begin or end with a space: {name!r}", fields=["name"])
        # Default values of the shape become explicit, so that a schedule cannot replace them later.
        object.__setattr__(self, "shape", self.shape.resolve_defaults())
        for f in ATTRIBUTE_FIELDS:
            value = f.field_type.resolve(f.name, getattr(self, f.name), self.shape)
            object.__setattr__(self, f.name, value)
        attributes = {name: getattr(self, name) for name in program_attributes.COMPATIBILITY_FIELDS}
        program_attributes.require_compatible(self.shape, **attributes)
        try:
            slots = tuple(SlotCounts(*map(index, counts)) for counts in self.slots)
        except TypeError:
            raise ShapeError(
                f"slots must be four integers for each rank, not {describe(self.slots)}",
                hint="SlotCounts(act_in=2, act_out=1, grad_in=1, grad_out=1)",
                fields=["slots"],
            ) from None
        if slots and len(slots) != self.shape.ranks:
            raise ShapeError(
                f"slots has entries for {len(slots)} ranks, but the program has {self.shape.ranks}",
                fields=["slots"],
            )
        if any(not 0 <= count < 2**31 for counts in slots for count in counts.specified().values()):
            raise ShapeError(
                f"each number of slots must be from 0 to {2**31 - 1}", fields=["slots"]
            )
        object.__setattr__(self, "slots", slots)
        streams = StreamSlices.from_streams(self.streams)
        object.__setattr__(self, "streams", streams)
        object.__setattr__(self, "words", streams.words)
        object.__setattr__(self, "offsets", streams.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructor creates the copy. So one array has the words of all streams of the copy,
        # and `proofs` of the copy is empty.
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return partial(type(self), **arguments | {"streams": tuple(self.streams)}), ()

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        kind = "draft" if self.is_draft else "program"
        return f"<{kind} {self.name}: {self.shape.ranks} ranks, {len(self)} instructions>"

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def shares_slots(self) -> bool:
        """Return whether values that pass between stages share slots.

        If False, each of these values has a separate slot.
        """
        boundary_slots = SlotCounts._fields[: len(BOUNDARY_VALUES)]
        return any(not {*boundary_slots}.isdisjoint(slots.specified()) for slots in self.slots)

    @property
    def slots_per_rank(self) -> Sequence[SlotCounts]:
        """The numbers of static buffers of each rank; `SlotCounts.unspecified()` if not given."""
        return self.slots or [SlotCounts.unspecified()] * self.shape.ranks

    def with_slots(self, slots: Sequence[SlotCounts]) -> Self:
        """Return a copy of the program with the given numbers of slots.

        The new program keeps the cached index and flow of values, because these do not depend on
        slots.

        Args:
            slots: The numbers of static buffers of each rank.

        Raises:
            ShapeError: The numbers do not fit the program.
        """
        program = replace(self, slots=tuple(slots))
        shared_cache = {
            key: value for key, value in self._cache.items() if key in ("index", "flow")
        }
        program._cache.update(shared_cache)
        return program

    def with_slot_counts(self, slot_name: str, slot_counts: NDArray[np.int64]) -> Self:
        """Return a copy of the program with the given numbers of one kind of static buffers.

        Args:
            slot_name: The kind of buffers, as the name of a field of `SlotCounts`.
            slot_counts: The numbers, shape (ranks,).

        Raises:
            ShapeError: The numbers do not fit the program.
        """
        pairs = zip(self.slots_per_rank, slot_counts.tolist(), strict=True)
        return self.with_slots([slots._replace(**{slot_name: n}) for slots, n in pairs])

    def cached(self, key: object, make: Callable[[Self], _T]) -> _T:
        """Return an object that is derived from the program, and cache it.

        A program of more than 2^22 instructions caches nothing.  `make` gets a twin of the program,
        which has the same Streams, the same proofs and a copy of the cache.  So the cached object
        has no reference to the program, and no reference cycle keeps them in memory.
        Objects that `make` caches in the twin are also copied to the cache of the program.

        Args:
            key: The name of the object in the cache.
            make: A function that makes the object from a program.

        Returns:
            The cached object, or a new one from `make`.
        """
        if key in (cache := self._cache):
            result: _T = cache[key]
            return result
        twin = object.__new__(type(self))
        vars(twin).update(vars(self) | {"_cache": dict(cache), "_is_twin": True})
        value = make(twin)
        if "_is_twin" in vars(self) or len(self) <= _MAX_CACHED_INSTRUCTIONS:
            cache.update(twin._cache | {key: value})
        return value

    def clear_cache(self) -> None:
        """Drop all derived objects, to free memory.

        Call this for a program that you need only as the input of a pass.
        """
        self._cache.clear()

    def neighbor_stages(self, peer_rule: PeerRule) -> NDArray[np.int32]:
        """Return the stage to which a peer rule leads from each stage.

        Args:
            peer_rule: The rule, such as NEXT or PREVIOUS.

        Returns:
            The neighbour of each stage, shape (stages,); -1 for a stage without a neighbour.
        """
        return find_neighbor_stages(peer_rule, self.shape.stages, self.skips)

    def peer_stage(self, value: Value, stage: int) -> int:
        """Return the stage with which a stage exchanges a value.

        Args:
            value: A kind of value that passes between stages.
            stage: Number of the stage.

        Returns:
            The other stage, or -1 if there is none.  The result is also -1 if the value is for
            training only and the other stage is frozen.
        """
        peer_rule = VALUES[value].peer
        assert peer_rule is not None
        peer = int(self.neighbor_stages(peer_rule)[stage])
        return peer if peer >= (self.frozen_stages if value in TRAINING_VALUES else 0) else -1

    def peer_rank(self, instr: Instr) -> int:
        """Return the rank on the other side of a message.

        Args:
            instr: A send or a receive.
        """
        hop = INSTRUCTIONS[instr.op].peer
        assert hop is not None
        return int(self.shape.rank_of_stage(self.neighbor_stages(hop)[instr.stage], instr.mb))

    def uses_value(self, value: Value) -> bool:
        """Return whether the program can have values of a kind.

        A value that passes between stages exists only if a stage has a neighbour to exchange it
        with.  A value with a `ValueRow.program_attribute` exists only if this attribute is set.  An
        optional value exists only if an instruction uses it.

        Args:
            value: The kind of value, a member of `schedir.ir.isa.instructions.Value`.

        Example:
            >>> from schedir import compile
            >>> from schedir.ir.isa.instructions import Value
            >>> program = compile("gpipe", ranks=2, microbatches=4, clip_grad_norm=True)
            >>> program.uses_value(Value.NORM), program.uses_value(Value.SKIP_IN)
            (True, False)
        """
        if VALUES[value].is_optional and self.used_opcodes.isdisjoint(NON_COMPUTE_USERS[value]):
            return False
        peer_rule, attribute = VALUES[value].peer, VALUES[value].program_attribute
        if attribute:
            actual, required = getattr(self, attribute), VALUES[value].attribute_values
            return (
                actual in required if required else bool(actual != getattr(type(self), attribute))
            )
        return peer_rule is None or bool((self.neighbor_stages(peer_rule) >= 0).any())

    def initial_tier(self, value: Value) -> str:
        """Return the memory tier on which a value exists from the start.

        Args:
            value: The kind of value, a member of `schedir.ir.isa.instructions.Value`.

        Returns:
            "device", "host" or "disk", or "" if an instruction makes the value.

        Example:
            >>> from schedir import compile
            >>> from schedir.ir.isa.instructions import Value
            >>> program = compile("gpipe", ranks=2, microbatches=4, optimizer_placement="host")
            >>> program.initial_tier(Value.STATE), program.initial_tier(Value.SAVED)
            ('host', '')
        """
        row = VALUES[value]
        tier = getattr(self, row.program_attribute) if row.initial_tier else ""
        return tier if tier in TIERS else row.initial_tier

    def takes_memory(self, value: Value) -> bool:
        """Return whether each value of a kind uses memory while it exists.

        The result is False for weights and gradients whose memory a stage has all the time. With
        ZeRO, the result is True for the weights or gradients that are sharded over the replicas.

        Args:
            value: The kind of value, a member of `schedir.ir.isa.instructions.Value`.

        Example:
            >>> from schedir import compile
            >>> from schedir.ir.isa.instructions import Value
            >>> program = compile("gpipe", ranks=2, microbatches=4)
            >>> program.takes_memory(Value.SAVED), program.takes_memory(Value.WGRAD)
            (True, False)
        """
        size = VALUES[value].size
        is_unsharded = (
            size in SHARDED_FROM_LEVEL
            and not is_sharded(size, self.zero)
            and not VALUES[value].initial_tier
        )
        return self.uses_value(value) and size != "" and not is_unsharded

    def has_static_buffers(self, value: Value) -> bool:
        """Return whether `slots` can set the number of buffers for a kind of value.

        `slots` can set this number for values that pass between stages, and for values that an
        instruction on a lane other than compute uses.

        Args:
            value: The kind of value.
        """
        return value in BOUNDARY_VALUES or any(
            op in self.used_opcodes for op in OPS_OFF_COMPUTE_LANE[value]
        )

    @property
    def op(self) -> NDArray[np.uint8]:
        """Return the opcode of each instruction, one Stream after the other."""
        return np.asarray(self.words.view(WORD_DTYPE)["op"])

    @property
    def joined(self) -> NDArray[np.bool_]:
        """Return whether each instruction is issued together with the previous one."""
        return self.words.view(WORD_DTYPE)["joined"].astype(bool)

    @cached_property
    def used_opcodes(self) -> frozenset[int]:
        """Return the opcodes that occur in the program."""
        # bincount needs 8 bytes per instruction, so it counts 65536 instructions per call.
        parts = (self.op[begin : begin + 2**16] for begin in range(0, len(self), 2**16))
        return frozenset().union(*(np.flatnonzero(np.bincount(part)).tolist() for part in parts))

    @property
    def is_draft(self) -> bool:
        """Return whether the program has compute only: no transfers, reductions or steps yet."""
        return self.used_opcodes <= {*COMPUTE_OPS}

    @property
    def has_backward(self) -> bool:
        """Return whether the program has a backward. Otherwise, the program is an evaluation."""
        return not self.used_opcodes.isdisjoint(GRAD_ADDING_OPS)

    @property
    def segments_per_stage(self) -> tuple[int, ...]:
        """Return the number of segments of each stage of the model.

        Each segment is a stage of the program.
        """
        return count_segments(self.segment_boundaries, self.shape.stages)

    @cached_property
    def unsegmented_shape(self) -> PipelineShape:
        """Return the shape before stages are split into segments, and microbatches into chunks."""
        return merge_segments(self.shape, self.segment_boundaries, self.chunks_per_microbatch).shape

    def first_stage(self, op: int) -> int:
        """Return the first stage that can have instructions with an opcode.

        For opcodes that only trained stages have (`TRAINED_STAGE_OPS`), this is the first trained
        stage. Examples are backwards, messages with gradients, and reductions. For all other
        opcodes, it is stage 0.

        Args:
            op: The opcode.
        """
        return self.frozen_stages if op in TRAINED_STAGE_OPS else 0

    @property
    def trained_ties(self) -> TiedStages:
        """Return the entries of `tied_weights` whose stages are trained.

        An entry is left out if its first stage is frozen.
        """
        return tuple(stages for stages in self.tied_weights if stages[0] >= self.frozen_stages)

    @property
    def reduces_in_microbatch_order(self) -> bool:
        """Return whether each stage adds to every gradient in ascending microbatch order.

        The result is False if stages have replicas. Each replica first sums the gradients of its
        microbatches. So the sum over the replicas does not have the order of the microbatches.
        """
        if self.shape.placement_rows > 1:
            return False
        for stream in self.streams:
            for ops in GRAD_ADDING_OPS_BY_WEIGHT:
                positions = np.flatnonzero(is_op(stream.op, ops))
                positions = positions[np.argsort(stream.stage[positions], kind="stable")]
                is_same_stage = stream.stage[positions][1:] == stream.stage[positions][:-1]
                if (is_same_stage & (stream.mb[positions][1:] < stream.mb[positions][:-1])).any():
                    return False
        return True

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the shape, the attributes, the slots and the Streams.

        The name of the program is not included.
        """
        # Fields without a `digest` function are newer.  The digest contains them last, and only if
        # their value is not the default.  So the digests of older programs stay the same.
        older_items = [
            item
            for f in HEADER_FIELDS
            if f.digest
            for item in f.digest(f.get_value(self), self.shape)
        ]
        newer_items = [
            (f.name, f.get_value(self))
            for f in HEADER_FIELDS
            if not (f.digest or f.is_default(self))
        ]
        # The digest contains the text of `SlotCounts`, whose name was `Slots` in older versions.
        header = repr((*older_items, self.slots, *newer_items)).replace("SlotCounts(", "Slots(")
        sha = hashlib.sha256(header.encode())
        for s in self.streams:
            sha.update(len(s).to_bytes(8, "little"))
            sha.update(s.words.astype("<i8", copy=False).tobytes())
        return sha.hexdigest()


ATTRIBUTE_FIELDS: Final = collect_fields(Program, is_shape=False)
# All fields of a program except its instructions, in the order of the text form.
HEADER_FIELDS: Final = (*SHAPE_FIELDS, *ATTRIBUTE_FIELDS)
