"""Stream: the instruction list of one rank, as an array of int64."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.ir.isa.instructions import Instr, Opcode

if TYPE_CHECKING:
    from typing import Self

Words = NDArray[np.int64]

# The bits of a packed instruction: joined (56), op (48..55), stage (32..47), microbatch (0..31).
# A joined instruction is issued together with the previous instruction.
JOINED_BIT: Final = 1 << 56
OP_SHIFT, STAGE_SHIFT = 48, 32
_WORD_FIELDS = [("mb", "u4"), ("stage", "u2"), ("op", "u1"), ("joined", "u1")]
WORD_DTYPE: Final = np.dtype(_WORD_FIELDS if sys.byteorder == "little" else _WORD_FIELDS[::-1])
# The bits of the stage and the microbatch, which identify an instruction of one opcode.
ADDRESS_MASK: Final = (1 << OP_SHIFT) - 1
OPCODES: Final = tuple(Opcode)


def pack(op: ArrayLike, stage: ArrayLike, mb: ArrayLike) -> Words:
    """Pack instructions into words.

    Args:
        op: The opcodes.  Each of the three arguments is a number or an array of shape
            (instructions,).
        stage: The stages.
        mb: The microbatches, updates or occurrences.

    Returns:
        The words, shape (instructions,).  No instruction is joined to the previous one.
    """
    o, s, m = (np.asarray(x, np.int64) for x in (op, stage, mb))
    return np.atleast_1d(o << OP_SHIFT | s << STAGE_SHIFT | m)


def replace_opcode(words: Words, op: Opcode) -> Words:
    """Return the same instructions with another opcode.

    Args:
        words: Packed instructions.
        op: The opcode of the result.

    Returns:
        The words, in the shape of `words`.  No instruction is joined to the previous one.
    """
    return words & ADDRESS_MASK | int(op) << OP_SHIFT


@cache
def _make_op_mask(ops: tuple[int, ...]) -> NDArray[np.bool_]:
    table = np.zeros(256, bool)
    table[[*ops]] = True
    return table


def is_op(op: NDArray[Any], ops: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask of the entries of `op` that are in `ops`.

    Args:
        op: Opcodes, in an array of any shape.
        ops: The opcodes to find.

    Returns:
        The mask, in the shape of `op`.
    """
    mask: NDArray[np.bool_] = _make_op_mask(ops)[op]
    return mask


def unpack(word: int) -> Instr:
    """Return the instruction in a packed word, without its joined bit.

    Args:
        word: The word.
    """
    return Instr(OPCODES[word >> OP_SHIFT & 0xFF], word >> STAGE_SHIFT & 0xFFFF, word & 0xFFFFFFFF)


class Stream(Sequence[Instr]):
    """The instruction list of one rank: a sequence of Instr, stored as int64 words.

    The constructor does not copy `words`, so do not change that array afterwards.

    Args:
        words: The packed instructions, shape (instructions,).

    Attributes:
        words: A read-only view of the packed instructions.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> stream = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2)).streams[1]
        >>> [str(instr) for instr in stream[:5]]
        ['recv_act 1.0', 'F 1.0', 'recv_act 1.1', 'F 1.1', 'B 1.0']
        >>> stream[1], stream.mb[:5]
        (Instr(op=<Opcode.Forward: 0>, stage=1, mb=0), array([0, 0, 1, 1, 0]))
    """

    __slots__ = ("words",)

    def __init__(self, words: Words) -> None:
        words = np.ascontiguousarray(words, np.int64).view()
        words.flags.writeable = False
        self.words: Words = words

    @classmethod
    def from_instructions(cls, instrs: Iterable[Instr]) -> Self:
        """Return a Stream of these instructions. No instruction is joined to another.

        Args:
            instrs: The instructions, in order.
        """
        table = np.array([tuple(i) for i in instrs], np.int64).reshape(-1, 3)
        return cls(pack(table[:, 0], table[:, 1], table[:, 2]))

    @property
    def op(self) -> Words:
        """Return the opcode of each instruction."""
        return self.words >> OP_SHIFT & 0xFF

    @property
    def stage(self) -> Words:
        """Return the stage of each instruction."""
        return self.words >> STAGE_SHIFT & 0xFFFF

    @property
    def mb(self) -> Words:
        """Return the microbatch of each instruction, or its update or occurrence."""
        return self.words & 0xFFFFFFFF

    @property
    def joined(self) -> NDArray[np.bool_]:
        """Return whether each instruction is issued together with the previous one."""
        return np.asarray(self.words & JOINED_BIT, bool)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without this method, pickle and copy would create a Stream with a writable array.
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
            yield Instr(OPCODES[op], stage, mb)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and np.array_equal(self.words, other.words)

    def __hash__(self) -> int:
        return hash(self.words.tobytes())

    def __repr__(self) -> str:
        return f"<Stream of {len(self)} instructions>"


class StreamSlices(tuple[Stream, ...]):
    """The Streams of all ranks, as slices of one array.

    Attributes:
        words: The instructions of all Streams, one Stream after the other.
        offsets: Index of the first instruction of each Stream in `words`, and the length of
            `words`; shape (ranks + 1,).
    """

    words: Words
    offsets: Words

    @classmethod
    def from_words(cls, words: Words, offsets: Words) -> Self:
        """Split an array of words into Streams.

        The method does not copy the array, and makes it read-only.

        Args:
            words: The instructions of all Streams.
            offsets: The first index of each Stream, and the length of `words`.
        """
        words.flags.writeable = False
        slices = cls(Stream(words[lo:hi]) for lo, hi in pairwise(offsets.tolist()))
        slices.words = words
        slices.offsets = offsets
        return slices

    @classmethod
    def from_streams(cls, streams: Iterable[Stream]) -> Self:
        """Join Streams in one array.

        Args:
            streams: The Streams.  A StreamSlices is returned unchanged.  The words of several other
                Streams are copied to one array.
        """
        if isinstance(streams, cls):
            return streams
        parts = [stream.words for stream in streams]
        words = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
        return cls.from_words(words, np.cumsum([0, *map(len, parts)]))
