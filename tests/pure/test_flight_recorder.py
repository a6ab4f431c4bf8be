"""Tests of dumps of flight recorders in all forms, and of the errors for unreadable ones."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedir.errors import SchedirError, TraceError, UsageError
from schedir.hang_diagnosis import flight_recorder
from schedir.hang_diagnosis.flight_recorder import read_dumps
from tests.flight_recorder_dumps import Recorder

GOLDEN = Path(__file__).parents[1] / "golden"


def recorder(rank: int = 0) -> Recorder:
    """Return a recorder with single messages, a batch of messages, and a collective."""
    made = Recorder(rank)
    made.group("7", (4, 2, 0, 6))
    made.group("0", range(8), "default_pg")
    made.messages("7", [("send", 4)], ended=True)
    made.messages("7", [("recv", 6), ("send", 2)], ended=True)
    made.collective("0", "all_reduce", ended=True)
    made.messages("7", [("recv", 4), ("send", 4)], ended=False)
    made.messages("7", [("recv", 6)], ended=False)
    return made


def test_what_a_rank_has_recorded(tmp_path: Path) -> None:
    recorder().save(tmp_path)
    found, passed = read_dumps([str(tmp_path)])
    dump = found[0]
    assert (dump.rank, dump.num_lost, passed) == (0, 0, [])
    assert [str(op) for op in dump.ops] == [
        "send to 4", "recv from 6", "send to 2", "all_reduce 1 of default_pg",
        "recv from 4", "send to 4", "recv from 6",
    ]  # fmt: skip
    # A batch has the state of its last entry, whatever its members' states are.
    assert [op.is_done for op in dump.ops] == [True] * 4 + [False] * 3
    assert [bool(op.batch) for op in dump.ops] == [False, True, True, False, True, True, False]
    assert [op.sequence_number for op in dump.ops] == [1, 2, 2, 1, 3, 3, 4]
    assert dump.ops[0].group.ranks == (4, 2, 0, 6)
    assert dump.ops[0].shape_text == "float [2, 8]"
    assert dump.ops[0].source_line == "train.py:7"


def test_json_says_the_same_without_stacks(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    recorder().save(tmp_path)
    recorder().save(tmp_path / "json", as_json=True)
    (a,), (b,) = (read_dumps([str(p)])[0].values() for p in (tmp_path, tmp_path / "json"))
    assert [op._replace(source_line="") for op in a.ops] == [*b.ops]


def test_what_the_ring_has_lost(tmp_path: Path) -> None:
    recorder().save(tmp_path, last=3)
    (dump,) = read_dumps([str(tmp_path)])[0].values()
    # Only the last member of a batch remains, with the entry of the batch's state.
    assert dump.num_lost == 6
    assert [(str(op), bool(op.batch), op.sequence_number) for op in dump.ops] == [
        ("send to 4", True, 3), ("recv from 6", False, 4),
    ]  # fmt: skip


def test_folders_patterns_and_files_in_any_order(tmp_path: Path) -> None:
    for rank in (4, 0, 2):
        recorder_of = Recorder(rank)
        recorder_of.group("7", (4, 2, 0, 6))
        recorder_of.collective("7", "barrier", ended=True)
        recorder_of.save(tmp_path)
    (tmp_path / "stacks.txt").write_text("nothing")
    found, passed = read_dumps([str(tmp_path)])
    assert [*found] == [0, 2, 4] and [Path(p).name for p in passed] == ["stacks.txt"]
    by_pattern, _ = read_dumps([str(tmp_path / "nccl_trace_rank_*")])
    files = [str(tmp_path / f"nccl_trace_rank_{rank}") for rank in (4, 0)]
    assert [*by_pattern] == [0, 2, 4] and [*read_dumps(files)[0]] == [0, 4]
    os.rename(files[0], tmp_path / "renamed")
    with pytest.raises(UsageError):
        read_dumps([str(tmp_path / "renamed")])  # a barrier does not tell the rank


def test_messages_say_whose_a_dump_is(tmp_path: Path) -> None:
    path = recorder().save(tmp_path)
    os.rename(path, tmp_path / "renamed")
    assert [*read_dumps([str(tmp_path / "renamed")])[0]] == [0]
    os.rename(tmp_path / "renamed", tmp_path / "nccl_trace_rank_3")
    with pytest.raises(TraceError):
        read_dumps([str(tmp_path)])


def test_gloo_retires_what_has_ended(tmp_path: Path) -> None:
    made = Recorder(0, backend="gloo")
    made.group("0", (0, 1), "default_pg")
    made.collective("0", "all_reduce", ended=True)
    made.entries[0]["state"] = "scheduled"
    made.save(tmp_path)
    assert read_dumps([str(tmp_path)])[0][0].ops[0].is_done
    made.entries[0]["profiling_name"] = (
        "nccl:all_reduce"  # an all-reduce in this state has timed out
    )
    made.save(tmp_path)
    assert not read_dumps([str(tmp_path)])[0][0].ops[0].is_done


# ---------------------------------------------------------------- refusals


def _changed(**values: Any) -> Callable[[Path], None]:
    """Return a function that writes a dump with changed values.

    They are in the first entry, or in the dump itself if a name begins with `_`.
    """

    def write(path: Path) -> None:
        dump = recorder().dump()
        for key, value in values.items():
            (dump if key[0] == "_" else dump["entries"][0])[key.lstrip("_")] = value
        path.write_bytes(pickle.dumps(dump, 2))

    return write


def _bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data), None)[1]


WHOLE = pickle.dumps(recorder().dump(), 2)
TEXT = json.dumps(recorder().dump()).encode()
HOSTILE: dict[str, Callable[[Path], None]] = {
    "empty": _bytes(b""),
    "text": _bytes(b"rank 0 stands still\n"),
    "a pickle that runs a command": _bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."),
    "a pickle cut off": _bytes(WHOLE[:1000]),
    "a pickle of torch.save": _bytes(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n."),
    "a pickle that claims more than it has": _bytes(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."),
    "a pickle with numbers for keys": _bytes(pickle.dumps({0: 1}, 2)),
    "a pickle of another thing": _bytes(pickle.dumps([1, 2], 2)),
    "JSON cut off": _bytes(TEXT[:1000]),
    "JSON nested": _bytes(b'{"a":' + b"[" * 200000),
    "JSON of another thing": _bytes(b'{"traceEvents": []}'),
    "JSON in Latin-1": _bytes(TEXT.replace(b"train.py", b"tr\xe4in.py")),
    "too large": _bytes(b"{" + b" " * 2**25),
    "of an old version": _changed(_version="1.5"),
    "entries that are none": _changed(_entries=[1, 2]),
    "groups without ranks": _changed(_pg_config={"0": {"ranks": "every one"}}),
    "a state that is none": _changed(state="dreaming"),
    "a state that has parts": _changed(state=[]),
    "a name that is none": _changed(profiling_name=12),
    "a name without end": _changed(profiling_name="nccl:" + "e" * 10000),
    "no process group": _changed(process_group="7"),
    "a number that is none": _changed(p2p_seq_id="1"),
    "a number beyond all": _changed(record_id=2**70),
    "sizes in sizes": _changed(input_sizes=[[[1]]]),
    "a message to nobody": _changed(profiling_name="nccl:send 2->9"),
    "of another rank": _changed(profiling_name="nccl:send 3->1"),
    "a name for terminals": _changed(_version="2\x1b[2J", _pg_config={"\x1b[2J": 0}),
}


def said(name: str, tmp_path: Path) -> str:
    path = tmp_path / "nccl_trace_rank_0"
    HOSTILE[name](path)
    with pytest.raises(SchedirError) as caught:
        read_dumps([str(path)])
    return f"{type(caught.value).__name__}: {caught.value}".replace(f"{tmp_path}/", "")


SENTENCES = dict(
    part.split("\n", 1)
    for part in re.split(r"^== ", (GOLDEN / "dumps.txt").read_text(), flags=re.M)[1:]
)


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(name: str, tmp_path: Path) -> None:
    assert said(name, tmp_path) + "\n" == SENTENCES[name]


def test_every_sentence_is_of_a_dump() -> None:
    assert [*SENTENCES] == [*HOSTILE]


def test_text_that_is_none_is_not_looked_into(tmp_path: Path) -> None:
    """A list nested twice in itself sixty times is short as a pickle, but endless as text."""
    endless: list[Any] = []
    for _ in range(60):
        endless = [endless, endless]
    path = tmp_path / "nccl_trace_rank_0"
    _changed(input_dtypes=[endless])(path)
    (dump,) = read_dumps([str(path)])[0].values()
    assert dump.ops[0].dtypes == ("<list>",)
    _changed(state=endless)(path)
    with pytest.raises(TraceError):
        read_dumps([str(path)])


def test_two_dumps_of_a_rank(tmp_path: Path) -> None:
    recorder().save(tmp_path)
    recorder().save(tmp_path, as_json=True)
    with pytest.raises(UsageError):
        read_dumps([str(tmp_path)])


def test_what_is_not_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none", tmp_path / "*.json"):
        with pytest.raises(UsageError):
            read_dumps([str(place)])


def test_as_many_entries_as_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder().save(tmp_path)
    monkeypatch.setattr(flight_recorder, "MAX_ENTRIES", 5)
    with pytest.raises(TraceError):
        read_dumps([str(tmp_path)])
