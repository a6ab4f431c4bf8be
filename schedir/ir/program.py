"""Program and Stream: the compiled lists.  Immutable; every pass maps a Program to a new one."""

from __future__ import annotations

import hashlib
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.errors import PlanError, said
from schedir.ir.fields import YES_OR_NO, Option, fields_of, itself, setting, whole_number
from schedir.ir.notebook import html
from schedir.ir.ops import (
    ADDS,
    ADDS_TO_WEIGHTS,
    BOUNDARY,
    COMPUTE,
    SLOTTED,
    Instr,
    Opcode,
)
from schedir.ir.plan import PLAN, Plan
from schedir.ir.ties import TIED, Tied, tied_stages

if TYPE_CHECKING:
    from typing import Self

Words = NDArray[np.int64]
Order = Mapping[Opcode, NDArray[np.int32]]

# An instruction in one word: joined (bit 56), op (48..55), stage (32..47), microbatch (0..31).
JOINED: Final = 1 << 56
OP, STAGE = 48, 32
_FIELDS = [("mb", "u4"), ("stage", "u2"), ("op", "u1"), ("joined", "u1")]
FIELDS: Final = np.dtype(_FIELDS if sys.byteorder == "little" else _FIELDS[::-1])
ADDRESS: Final = (1 << OP) - 1
OPS: Final = tuple(Opcode)

_LARGE: Final = 2**22  # instructions of a program with which nothing is kept that is made of it
_T = TypeVar("_T")


def pack(op: ArrayLike, stage: ArrayLike, mb: ArrayLike) -> Words:
    """Words of instructions given as equally long arrays (or numbers)."""
    o, s, m = (np.asarray(x, np.int64) for x in (op, stage, mb))
    return np.atleast_1d(o << OP | s << STAGE | m)


@cache
def _table(ops: tuple[int, ...]) -> NDArray[np.bool_]:
    table = np.zeros(256, bool)
    table[[*ops]] = True
    return table


def is_op(op: NDArray[Any], ops: tuple[int, ...]) -> NDArray[np.bool_]:
    """Whether each of an array of opcodes is one of `ops`."""
    return _table(ops)[op]


def unpack(word: int) -> Instr:
    """The instruction in a word, whether it is joined or not."""
    return Instr(OPS[word >> OP & 0xFF], word >> STAGE & 0xFFFF, word & 0xFFFFFFFF)


def _whole(parts: Sequence[Words]) -> Words:
    """All parts in one array: the one that they are cut from, if it is just that."""
    base = parts[0].base if parts else None
    if isinstance(base, np.ndarray) and base.dtype == np.int64 and base.ndim == 1:
        begins = base.ctypes.data + 8 * np.cumsum([0, *map(len, parts)])
        at = [part.ctypes.data for part in parts]
        if base.flags.c_contiguous and begins.tolist() == [*at, base.ctypes.data + base.nbytes]:
            return base
    return np.concatenate([np.empty(0, np.int64), *parts])


class Stream(Sequence[Instr]):
    """The instruction list of one rank: a sequence of Instr outside, int64 words inside.

    `joined[i]` says that instruction i is issued together with the one before it.  The words are
    taken over as they are, not copied: whoever has made them does not write to them afterwards.

    >>> from schedir import Plan, compile, schedules
    >>> stream = compile(schedules.gpipe, Plan(ranks=2, microbatches=2)).streams[1]
    >>> [str(instr) for instr in stream[:5]]
    ['recv_act 1.0', 'F 1.0', 'recv_act 1.1', 'F 1.1', 'B 1.0']
    >>> stream[1], stream.mb[:5]
    (Instr(op=<Opcode.Forward: 0>, stage=1, mb=0), array([0, 0, 1, 1, 0]))
    """

    __slots__ = ("words",)

    def __init__(self, words: Words) -> None:
        words = np.ascontiguousarray(words, np.int64).view()
        words.flags.writeable = False
        self.words = words

    @classmethod
    def of(cls, instrs: Iterable[Instr]) -> Self:
        """A Stream of the given instructions, none of them joined."""
        table = np.array([tuple(i) for i in instrs], np.int64).reshape(-1, 3)
        return cls(pack(table[:, 0], table[:, 1], table[:, 2]))

    @property
    def op(self) -> Words:
        """The opcode of each instruction."""
        return self.words >> OP & 0xFF

    @property
    def stage(self) -> Words:
        """The stage of each instruction."""
        return self.words >> STAGE & 0xFFFF

    @property
    def mb(self) -> Words:
        """The microbatch of each instruction."""
        return self.words & 0xFFFFFFFF

    @property
    def joined(self) -> NDArray[np.bool_]:
        """Whether each instruction is issued together with the one before it."""
        return np.asarray(self.words & JOINED, bool)

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays are pickled and copied as writable ones, and Streams are not.
        return type(self), (self.words,)

    def __len__(self) -> int:
        return len(self.words)

    @overload
    def __getitem__(self, i: int) -> Instr: ...
    @overload
    def __getitem__(self, i: slice) -> Stream: ...
    def __getitem__(self, i: int | slice) -> Instr | Stream:
        if isinstance(i, slice):
            return Stream(self.words[i])
        return unpack(int(self.words[i]))

    def __iter__(self) -> Iterator[Instr]:
        for op, stage, mb in zip(
            self.op.tolist(), self.stage.tolist(), self.mb.tolist(), strict=True
        ):
            yield Instr(OPS[op], stage, mb)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and np.array_equal(self.words, other.words)

    def __hash__(self) -> int:
        return hash(self.words.tobytes())

    def __repr__(self) -> str:
        return f"<Stream of {len(self)} instructions>"


OWN: Final = 2**31  # of slots: each value has its own, where nobody says how many there are

if TYPE_CHECKING:

    class _Slots(NamedTuple):
        act_in: int
        act_out: int
        grad_in: int
        grad_out: int
else:
    _KINDS = [kind.name.lower() for kind in SLOTTED]
    _Slots = namedtuple("_Slots", _KINDS, defaults=[OWN] * (len(SLOTTED) - len(BOUNDARY)))


class Slots(_Slots):
    """How many static slots a rank has for what is taken in and put out, in activations and
    in gradients (`schedir/analysis/slots.py` says who lives in which)."""

    __slots__ = ()

    @classmethod
    def unsaid(cls) -> Self:
        """Nothing said of any kind."""
        return cls(**dict.fromkeys(cls._fields, OWN))

    def said(self) -> dict[str, int]:
        """The numbers that are said, by kind."""
        return {kind: number for kind, number in self._asdict().items() if number != OWN}

    def __repr__(self) -> str:
        return f"Slots({', '.join(f'{kind}={number}' for kind, number in self.said().items())})"


def _digest_of_ties(tied: Tied, plan: Plan) -> tuple[object, ...]:
    """First and last stage are one case, however many stages there are."""
    ends = {tied_stages(True, plan): True, (): False}  # one stage is tied to nothing
    return (ends.get(tied, tied),)


# How the traits of a program are said.
_TP = setting(whole_number(1, 65535), "tensor-parallel ranks (1)", always=True, digest=itself)
_DP = setting(whole_number(1, 65535), "data-parallel replicas (1)", always=True, digest=itself)
_TIED = setting(
    TIED,
    "stages that share weights",
    options=[
        Option("tied", "", "a tied embedding"),
        Option("ties", "STAGES", "stages that share weights: 0=2,1=3"),
    ],
    always=True,
    digest=_digest_of_ties,
    in_config=False,  # it is the model's there
)
_CLIP = setting(
    YES_OR_NO,
    "clipped gradients",
    always=True,
    digest=itself,
    in_config=False,  # it is the norm's there
)


@dataclass(frozen=True)
class Program:
    """A plan and one Stream per rank.

    `tp` and `dp` are the sizes of the tensor- and data-parallel groups that run each Stream;
    `tied` has, for each set of stages that hold copies of the same weights, these stages,
    ascending: `((0, 3),)`; True stands for first and last stage.  `clip` says that gradients are
    clipped by their global norm.  `slots` has one entry per rank; where it is
    empty, each value has a slot of its own.

    `order` numbers the messages as the lowering places them: for each kind of send a number by
    stage*microbatches + mb, -1 where there is none.  It is no part of what the program says, and
    nobody trusts it: `check` looks whether it holds, which is faster than to find an order.  So a
    pass need not keep it up.

    `proofs` says for which progress models, and whether for hosts that block, `check` has proven
    the program.  A program that is made of it, as by `dataclasses.replace`, `copy` or `pickle`, has
    none.

    `words` are all Streams, one behind the other, and `offsets` says where each begins, with
    one more entry than there are ranks.

    >>> from schedir import Plan, compile, schedules
    >>> program = compile(schedules.one_f_one_b, Plan(ranks=4, microbatches=8))
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
    plan: Plan
    streams: tuple[Stream, ...]
    tp: int = field(default=1, metadata=_TP)
    dp: int = field(default=1, metadata=_DP)
    tied: Tied = field(default=(), metadata=_TIED)
    clip: bool = field(default=False, metadata=_CLIP)
    slots: tuple[Slots, ...] = ()
    order: Mapping[Opcode, NDArray[np.int32]] = field(
        default_factory=dict, repr=False, compare=False
    )
    words: Words = field(init=False, repr=False, compare=False)
    offsets: Words = field(init=False, repr=False, compare=False)
    proofs: set[tuple[str, bool]] = field(
        init=False, default_factory=set, repr=False, compare=False
    )
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
        try:
            slots = tuple(Slots(*map(index, counts)) for counts in self.slots)
        except TypeError:
            raise PlanError(
                f"slots are four whole numbers for each rank, not {said(self.slots)}",
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
        # One array holds all words, and the Streams are views of it: nothing is there twice.
        words = _whole([s.words for s in self.streams])
        offsets = np.cumsum([0, *map(len, self.streams)])
        words.flags.writeable = False
        views = (Stream(words[lo:hi]) for lo, hi in pairwise(offsets.tolist()))
        object.__setattr__(self, "streams", tuple(views))
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "offsets", offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what is pickled, is made anew: all words in one array, and nothing proven yet.
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        kind = "draft" if self.is_draft else "program"
        return f"<{kind} {self.name}: {self.plan.ranks} ranks, {len(self)} instructions>"

    def _repr_html_(self) -> str:
        return html(self)

    def with_slots(self, slots: Sequence[Slots]) -> Self:
        """The same Streams with other numbers of slots: who gives what stays known."""
        made = replace(self, slots=tuple(slots))
        kept = {what: it for what, it in self._derived.items() if what in ("index", "flow")}
        made._derived.update(kept)
        return made

    def derived(self, what: object, make: Callable[[], _T]) -> _T:
        """What is made of the program once, and then kept with it, if it is not too large."""
        if what not in self._derived:
            made = make()
            if len(self) > _LARGE:
                return made
            self._derived[what] = made
        found: _T = self._derived[what]
        return found

    @property
    def op(self) -> NDArray[np.uint8]:
        """The opcode of each instruction, one rank behind the other."""
        return np.asarray(self.words.view(FIELDS)["op"])

    @property
    def joined(self) -> NDArray[np.bool_]:
        """Whether each instruction is issued together with the one before it."""
        return np.asarray(self.words & JOINED, bool)

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
    def ascending(self) -> bool:
        """Whether each stage adds to every gradient in ascending microbatch order.

        Two holders of a stage have two sums, and to add these is another order.
        """
        if self.plan.two_way:
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
        first = [item for f in HEADER if f.digest for item in f.digest(f.of(self), self.plan)]
        later = [(f.name, f.of(self)) for f in HEADER if not (f.digest or f.is_default(self))]
        sha = hashlib.sha256(repr((*first, self.slots, *later)).encode())
        for s in self.streams:
            sha.update(len(s).to_bytes(8, "little"))
            sha.update(s.words.astype("<i8", copy=False).tobytes())
        return sha.hexdigest()


TRAITS: Final = fields_of(Program, of_plan=False)
HEADER: Final = (*PLAN, *TRAITS)  # all that is said of a program beside its instructions
