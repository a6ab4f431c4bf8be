"""Tests that values arrive unchanged in other processes, and that other bytes are refused."""

from __future__ import annotations

import ast
import pickle
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import InstructionSite, ModelError
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.runtime.boundaries.boundary import Boundary
from schedir.transports import json_collectives
from schedir.transports.json_collectives import decode_value, encode_value, gather
from tests.cpu.gloo_processes import RankError, run

KINDS = [Instr, Opcode, InstructionSite, TiedWeights, Boundary]
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text()
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
RECORDS = st.builds(Instr, st.sampled_from(Opcode), st.integers(0, 9), st.integers(0, 9))
VALUES = st.recursive(
    NUMBERS | TYPES | RECORDS,
    lambda inside: st.lists(inside) | st.lists(inside).map(tuple)
    | st.dictionaries(st.integers() | st.text(), inside),
    max_leaves=20,
)  # fmt: skip


@given(VALUES)
def test_values_round_trip(value: object) -> None:
    decoded = decode_value(encode_value(value, KINDS), "process 0", KINDS)
    assert decoded == value and repr(decoded) == repr(value)


def test_records_round_trip() -> None:
    records = [
        Boundary((2, 3), torch.float16),
        InstructionSite(1, 2, "F 0.0"),
        TiedWeights((((0, "a"), (1, "b")),)),
    ]
    assert decode_value(encode_value(records, KINDS), "process 0", KINDS) == records


class _ExecOnLoad:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of a peer ran')",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_ExecOnLoad()), pickle.dumps((1, 2)), b"", b"{", b"[" * 10**5, b"\xff",
        b"9" * 5000,
        b'{"record": ["Popen", ["true"]]}', b'{"record": ["Instr", 1]}', b'{"dtype": "load"}',
        b'{"dtype": "hub"}', b'{"dict": [[[], 1]]}', b'{"tuple": 1}', b'{"other": []}', b"{}",
        b'{"record": {}}', b'{"tuple": [], "dict": []}', b'{"record": ["Opcode", 999]}',
    ],
)  # fmt: skip
def test_undecodable_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="process 3 sent data that schedir cannot decode"):
        decode_value(data, "process 3", KINDS)


@given(st.binary() | VALUES.map(lambda value: encode_value(value, KINDS)[::-1]))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    with suppress(ModelError):
        decode_value(data, "process 3", KINDS)


def test_unsupported_values_are_not_encoded() -> None:
    for value in (_ExecOnLoad(), Opcode.Forward, {1: object()}):
        with pytest.raises(TypeError):
            encode_value(value)


def _exchange(process: int, what: str) -> None:
    if what == "values":
        assert gather((process, "x" * 1000 * process)) == [(0, ""), (1, "x" * 1000)]
        assert json_collectives.broadcast({process: torch.int64} if process else None, 1) == {
            1: torch.int64
        }
    elif what == "pickle":  # like a peer of another version, or a foreign process
        gathered = json_collectives.gather_bytes(
            pickle.dumps(_ExecOnLoad()) if process else encode_value(1)
        )
        for k, data in enumerate(gathered):
            decode_value(data, f"process {k}")
    else:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        if process:
            dist.all_gather(sizes, torch.tensor([2**40]))
        else:
            gather(1)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("values", ""),
        ("pickle", "process 1 sent data that schedir cannot decode"),
        ("size", "1099511627776 by"),
    ],
)
def test_exchange_returns_values_or_refuses_bad_data(what: str, expected: str) -> None:
    if not expected:
        run(_exchange, 2, what)
        return
    with pytest.raises(RankError, match=expected):
        run(partial(_exchange), 2, what)


UNPICKLES = {"loads", "load", "all_gather_object", "broadcast_object_list", "gather_object",
             "scatter_object_list", "send_object_list", "recv_object_list"}  # fmt: skip
ALLOWED = {
    "transports/local_processes.py": "a pipe between a parent and the children that it has made",
    "testing/gradient_assertion.py": "whether what children are given can be pickled",
    "checkpoints/dcp_storage.py": "one tensor of a checkpoint, which torch reads with weights_only",
    "megatron/forward_backward_func.py": "losses, which torch reads with weights_only",
}


def test_no_module_unpickles_foreign_data() -> None:
    """Exceptions are messages between a parent and its children, and `weights_only` loads."""
    root, unpickling = Path(json_collectives.__file__).parents[1], dict[str, Any]()
    may_unpickle = re.compile(rf"\b({'|'.join(UNPICKLES)})\b")
    for path in root.rglob("*.py"):
        text = path.read_text()
        if not may_unpickle.search(text):
            continue
        tree = ast.parse(text)
        named = {
            n.attr
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute)
            if isinstance(n.value, ast.Name)
            and n.value.id in ("pickle", "dist", "torch", "marshal", "distributed")
        }
        named |= {
            a.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            if n.module in ("pickle", "marshal", "torch.distributed")
            for a in n.names
        }
        if named & UNPICKLES:
            unpickling[str(path.relative_to(root))] = named & UNPICKLES
    assert unpickling.keys() <= ALLOWED.keys()
    for name in ("checkpoints/dcp_storage.py", "megatron/forward_backward_func.py"):
        text = (root / name).read_text()
        assert text.count("torch.load(") == text.count("weights_only=True") == 1
