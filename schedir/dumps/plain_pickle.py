"""Plain pickles: numbers, text, lists, tuples and dicts, read by a loop that can do nothing else.

Python's own reader imports what a file names and calls what it likes, and makes room for as many
entries as a file claims to need.  Here an opcode is a few lines that make a plain value; there is
none that imports, calls, sets an attribute or asks for a persistent id, and nothing is made that
the file has not paid for with a byte.  The opcodes are those that torch's pickler and Python's
protocols 2 to 5 write for such values (`pickletools` describes them).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from schedir.errors import TraceError

MOST: Final = 2**23  # opcodes of a file: each makes one value at most


class _Sized(NamedTuple):
    """An opcode with an operand: the bytes of it, or of its length, and what it makes of it."""

    head: struct.Struct
    counts: bool  # whether the number is that of the bytes that follow
    make: Callable[[Any], Any]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _whole(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


_B, _H, _I, _Q = (struct.Struct(f"<{kind}") for kind in "BHIQ")
_VALUES: Final = {
    b"J"[0]: _Sized(struct.Struct("<i"), False, int),
    b"M"[0]: _Sized(_H, False, int),
    b"G"[0]: _Sized(struct.Struct(">d"), False, float),
    b"\x8a"[0]: _Sized(_B, True, _whole),
    b"X"[0]: _Sized(_I, True, _text),
    b"\x8c"[0]: _Sized(_B, True, _text),
    b"\x8d"[0]: _Sized(_Q, True, _text),
}
_MADE: Final[dict[int, Callable[[], Any]]] = {
    b"}"[0]: dict,
    b"]"[0]: list,
    b")"[0]: tuple,
    b"N"[0]: lambda: None,
    b"\x88"[0]: lambda: True,
    b"\x89"[0]: lambda: False,
}
_TUPLES: Final = {b"\x85"[0]: 1, b"\x86"[0]: 2, b"\x87"[0]: 3}
_PUTS: Final = {b"q"[0]: _B, b"r"[0]: _I}
_SKIPS: Final = {b"\x80"[0]: _B, b"\x95"[0]: _Q}  # which protocol, how long a frame
# What a foreign pickle most likely has, by what it would do.
_DOES: Final = {
    **dict.fromkeys(b"ci\x93", "imports what it names"),
    **dict.fromkeys(b"R\x81\x92o", "calls what it names"),
    **dict.fromkeys(b"b", "sets attributes"),
    **dict.fromkeys(b"PQ", "asks for objects from elsewhere"),
    **dict.fromkeys(b"\x82\x83\x84", "looks up a registered class"),
}


def loads(data: bytes, where: str = "") -> Any:
    """The value of a pickle that holds plain values only.

    Raises TraceError, of the file `where`, for one that is cut off, too large, or has more.

    >>> import pickle
    >>> loads(pickle.dumps({"entries": [(1, "a")], "ended": None}))
    {'entries': [(1, 'a')], 'ended': None}
    >>> try:
    ...     loads(b"cos\\nsystem\\n.")
    ... except TraceError as error:
    ...     print(error)
    byte 0 of the pickle imports what it names, and nothing of a dump is ever run
    """
    reader = _Reader(data)
    try:
        return reader.value()
    except _Wrong as wrong:
        raise TraceError(str(wrong), program=where) from None
    except (struct.error, IndexError, KeyError):
        fact = f"the pickle is cut off or damaged at byte {reader.at} of {len(data)}"
    except (UnicodeDecodeError, ValueError, TypeError):
        fact = f"the pickle is damaged at byte {reader.at} of {len(data)}"
    raise TraceError(fact, program=where)


class _Wrong(Exception):
    """What cannot be read, as a sentence."""


class _Reader:
    """The stack, the marks in it, and the memo; `at` is the byte that is read next."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        """What is left when the pickle says that it ends.

        What dumps have most of, values that come again, short text and numbers, is read first.
        """
        data, stack, memo = self.data, self.stack, self.memo
        push = stack.append
        for _ in range(MOST):
            at = self.at
            op = data[at]
            self.at = at + 1
            if op == 0x68:  # BINGET
                push(memo[data[at + 1]])
                self.at = at + 2
            elif op == 0x6A:  # LONG_BINGET
                push(memo[_I.unpack_from(data, at + 1)[0]])
                self.at = at + 5
            elif op == 0x4B:  # BININT1
                push(data[at + 1])
                self.at = at + 2
            elif op in _VALUES:
                push(self._operand(_VALUES[op]))
            elif op in _PUTS:
                memo[self._number(_PUTS[op])] = stack[-1]
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op in _MADE:
                stack.append(_MADE[op]())
            elif op == 0x28:  # MARK
                self.marks.append(len(stack))
            elif op in b"usea":
                self._fill(op)
            elif op in _TUPLES:
                self._tuple(len(stack) - _TUPLES[op])
            elif op == 0x74:  # TUPLE
                self._tuple(self.marks.pop())
            elif op in _SKIPS:
                self._number(_SKIPS[op])
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or self.marks:
                    raise IndexError
                return stack[0]
            else:
                does = _DOES.get(op, f"has the opcode {op:#04x}, which no plain value needs")
                raise _Wrong(
                    f"byte {self.at - 1} of the pickle {does}, and nothing of a dump is ever run"
                    if op in _DOES
                    else f"byte {self.at - 1} of the pickle {does}"
                )
        raise _Wrong(f"the pickle has more than {MOST} values, and no dump is so large")

    def _number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return number

    def _operand(self, sized: _Sized) -> Any:
        number = self._number(sized.head)
        if not sized.counts:
            return number
        if number > len(self.data) - self.at:
            raise IndexError
        raw = self.data[self.at : self.at + number]
        self.at += number
        return sized.make(raw)

    def _fill(self, op: int) -> None:
        """Put what lies above a list or a dict into it."""
        begin = self.marks.pop() if op in b"ue" else len(self.stack) - (2 if op == b"s"[0] else 1)
        if begin < 1 or begin < (self.marks[-1] if self.marks else 0):
            raise IndexError
        items, into = self.stack[begin:], self.stack[begin - 1]
        del self.stack[begin:]
        if op in b"ea":
            if type(into) is not list:
                raise TypeError
            into += items
            return
        if type(into) is not dict or len(items) % 2:
            raise TypeError
        if any(type(key) is not str for key in items[::2]):
            raise _Wrong(
                f"a dict that ends at byte {self.at} of the pickle has a key that is no text"
            )
        into.update(zip(items[::2], items[1::2], strict=True))

    def _tuple(self, begin: int) -> None:
        if begin < 0:
            raise IndexError
        items = tuple(self.stack[begin:])
        del self.stack[begin:]
        self.stack.append(items)
