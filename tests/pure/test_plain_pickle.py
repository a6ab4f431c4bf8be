"""Tests that pickles of plain values are read, and that no pickle runs code."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import TraceError
from schedir.hang_diagnosis import safe_unpickler
from schedir.hang_diagnosis.safe_unpickler import loads

PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)  # fmt: skip


@given(PLAIN_VALUES, st.integers(2, 5))
def test_plain_values_round_trip(value: Any, protocol: int) -> None:
    pair = [value, value]  # the second comes from the memo
    read = loads(pickle.dumps(pair, protocol))
    assert read == pair and repr(read) == repr(pair)


class _CallsFunction:
    """An object whose pickle calls a function when Python reads it."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


class _HasState:
    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_with_call_runs_no_code(protocol: int, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    runs = pickle.dumps({"entries": [_CallsFunction(os.mkdir, str(folder))]}, protocol)
    with pytest.raises(TraceError):
        loads(runs)
    assert not folder.exists()
    pickle.loads(runs)
    assert folder.exists()  # Python itself runs the call


MALICIOUS = {
    "global": b"\x80\x02cos\nsystem\nq\x00.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "reduce": b"\x80\x02(X\x01\x00\x00\x00aR.",
    "inst": b"\x80\x02(ios\nsystem\n.",
    "obj": b"\x80\x02(]o.",
    "newobj": b"\x80\x02])\x81.",
    "newobj with keywords": b"\x80\x04])}\x92.",
    "build": b"\x80\x02]}b.",
    "extension": b"\x80\x02\x82\x01.",
    "extension of four bytes": b"\x80\x02\x84\x01\x00\x00\x00.",
    "persistent id": b"\x80\x02Pabc\n.",
    "persistent id from the stack": b"\x80\x02]Q.",
    "next buffer": b"\x80\x05\x97.",
    "text opcode": b"\x80\x02I12\n.",
    "dup": b"\x80\x02]2.",
    "pop": b"\x80\x02]0.",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_malicious_opcode_is_refused(name: str) -> None:
    with pytest.raises(TraceError):
        loads(MALICIOUS[name])


def test_claimed_length_allocates_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = struct.pack("<Q", 2**62)
    for claims in (b"X\xff\xff\xff\xff", b"\x8d" + huge, b"\x8a\xff"):
        with pytest.raises(TraceError):
            loads(b"\x80\x04" + claims + b"ab.")
    # An entry of the memo with a large number is one entry.
    assert loads(b"\x80\x02]r\xff\xff\xff\x7f0."[:-2] + b".") == []
    assert loads(b"\x80\x04\x95" + huge + b"N.") is None
    monkeypatch.setattr(safe_unpickler, "MAX_OPCODES", 1000)
    with pytest.raises(TraceError):
        loads(b"\x80\x02(" + b"]" * 1000 + b"t.")


def test_recursive_and_deep_lists_load_without_recursion() -> None:
    read = loads(b"\x80\x02]q\x00h\x00a.")
    assert read[0] is read
    deep = loads(b"\x80\x02" + b"]" * 20000 + b"a" * 19999 + b".")
    for _ in range(19999):
        (deep,) = deep
    assert deep == []


PICKLE = pickle.dumps(
    {"entries": [{"name": "x" * 300, "sizes": [(1, 2)], "t": 1.5, "n": 2**40}] * 2}, 4
)


def test_truncated_pickle_is_refused() -> None:
    for end in range(len(PICKLE)):
        with pytest.raises(TraceError):
            loads(PICKLE[:end])


@given(st.data())
def test_damaged_pickle_is_refused_or_plain(data: st.DataObject) -> None:
    raw = bytearray(PICKLE)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = loads(bytes(raw))
    except TraceError:
        return
    assert type(read) in (dict, list, tuple, str, int, float, bool, type(None))


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_plain(raw: bytes) -> None:
    try:
        read = loads(b"\x80\x04" + raw)
    except TraceError:
        return
    assert type(read) in (dict, list, tuple, str, int, float, bool, type(None))


def test_deeply_nested_tuple_keys_are_refused() -> None:
    for end in (b"Ns", b"\x85Ns", b"(Nu"):
        with pytest.raises(TraceError):
            loads(b"\x80\x02})" + b"\x85" * 200_000 + end + b".")
