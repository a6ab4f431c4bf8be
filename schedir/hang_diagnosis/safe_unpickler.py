"""Load pickles of plain values without running code.

Plain values are numbers, text, None, lists, tuples and dicts. Python's unpickler imports and calls
any object that a file names. So `pickletools` first lists the opcodes. If an opcode is not needed
for plain values, the file is refused before it is unpickled. The allow-list has the opcodes that
torch's pickler and Python's protocols 2 to 5 write for plain values.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, ClassVar, Final

from schedir.errors import TraceError

MAX_OPCODES: Final = 2**23  # the most opcodes in a file; each creates at most one value
# fmt: off
_ALLOWED_OPCODES: Final = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM",
    "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
})
# fmt: on
# The effects of opcodes that pickles usually contain if their values are not plain.
_OPCODE_EFFECTS: Final = {
    **dict.fromkeys(("GLOBAL", "INST", "STACK_GLOBAL"), "imports an object"),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"), "calls a function"),
    "BUILD": "sets attributes",
    **dict.fromkeys(("PERSID", "BINPERSID"), "loads an external object"),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), "loads a registered class"),
}


def loads(data: bytes) -> Any:
    r"""Return the value of a pickle that contains plain values only.

    Args:
        data: The pickle.

    Raises:
        TraceError: The pickle is damaged, cut off or too large, or contains other values.

    Example:
        >>> loads(pickle.dumps({"entries": [(1, "a")], "ended": None}))
        {'entries': [(1, 'a')], 'ended': None}
        >>> try:
        ...     loads(b"cos\nsystem\n.")
        ... except TraceError as error:
        ...     print(error)
        byte 0 of the pickle imports an object, and schedir runs no code from a dump
    """
    file = io.BytesIO(data)
    try:
        _check_opcodes(file)
    except ValueError:  # `pickletools` cannot read a number, a text or an opcode.
        fact = f"the pickle is cut off or damaged at byte {file.tell()} of {len(data)}"
        raise TraceError(fact) from None
    try:
        return _SafeUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError):
        fact = f"the pickle of {len(data)} bytes is damaged"
        raise TraceError(fact) from None


def _check_opcodes(file: io.BytesIO) -> None:
    for count, (opcode, _, position) in enumerate(pickletools.genops(file)):
        if count >= MAX_OPCODES:
            raise TraceError(
                f"the pickle has more than {MAX_OPCODES} opcodes, the limit for a dump"
            )
        if opcode.name in _OPCODE_EFFECTS:
            effect = f"{_OPCODE_EFFECTS[opcode.name]}, and schedir runs no code from a dump"
            raise TraceError(f"byte {position} of the pickle {effect}")
        if opcode.name not in _ALLOWED_OPCODES:
            code = ord(opcode.code)
            raise TraceError(
                f"byte {position} of the pickle has the opcode {code:#04x}, which a dump does "
                "not need"
            )


class _SafeUnpickler(pickle._Unpickler):
    """The Python implementation of the standard unpickler, with restrictions.

    Its memo is a dict. The C implementation has an array as memo, whose length is the largest index
    in the file. So a small file could make that array fill the memory.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str, /) -> Any:
        raise TraceError(f"the pickle imports {name} of {module}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        """Set items of the dict on the stack.

        Keys must be text: Python crashes when it hashes a deeply nested tuple.
        """
        if any(type(key) is not str for key in items[::2]):
            raise TraceError("a dict of the pickle has a key that is not text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
