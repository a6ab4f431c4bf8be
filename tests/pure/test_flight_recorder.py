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


def make_recorder(rank: int = 0) -> Recorder:
    """Return a recorder with single messages, a batch of messages, and a collective."""
    recorder_with_entries = Recorder(rank)
    recorder_with_entries.group("7", (4, 2, 0, 6))
    recorder_with_entries.group("0", range(8), "default_pg")
    recorder_with_entries.messages("7", [("send", 4)], ended=True)
    recorder_with_entries.messages("7", [("recv", 6), ("send", 2)], ended=True)
    recorder_with_entries.collective("0", "all_reduce", ended=True)
    recorder_with_entries.messages("7", [("recv", 4), ("send", 4)], ended=False)
    recorder_with_entries.messages("7", [("recv", 6)], ended=False)
    return recorder_with_entries


def test_dump_lists_recorded_operations(tmp_path: Path) -> None:
    make_recorder().save(tmp_path)
    dumps, skipped = read_dumps([str(tmp_path)])
    dump = dumps[0]
    assert (dump.rank, dump.num_lost, skipped) == (0, 0, [])
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


def test_json_dump_equals_pickle_without_source_lines(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    make_recorder().save(tmp_path)
    make_recorder().save(tmp_path / "json", as_json=True)
    (a,), (b,) = (read_dumps([str(p)])[0].values() for p in (tmp_path, tmp_path / "json"))
    assert [op._replace(source_line="") for op in a.ops] == [*b.ops]


def test_dump_counts_lost_entries(tmp_path: Path) -> None:
    make_recorder().save(tmp_path, last=3)
    (dump,) = read_dumps([str(tmp_path)])[0].values()
    # Only the last member of a batch remains, with the entry of the batch's state.
    assert dump.num_lost == 6
    assert [(str(op), bool(op.batch), op.sequence_number) for op in dump.ops] == [
        ("send to 4", True, 3), ("recv from 6", False, 4),
    ]  # fmt: skip


def test_dumps_from_folder_pattern_or_files(tmp_path: Path) -> None:
    for rank in (4, 0, 2):
        recorder_of = Recorder(rank)
        recorder_of.group("7", (4, 2, 0, 6))
        recorder_of.collective("7", "barrier", ended=True)
        recorder_of.save(tmp_path)
    (tmp_path / "stacks.txt").write_text("nothing")
    dumps, skipped = read_dumps([str(tmp_path)])
    assert [*dumps] == [0, 2, 4] and [Path(p).name for p in skipped] == ["stacks.txt"]
    by_pattern, _ = read_dumps([str(tmp_path / "nccl_trace_rank_*")])
    files = [str(tmp_path / f"nccl_trace_rank_{rank}") for rank in (4, 0)]
    assert [*by_pattern] == [0, 2, 4] and [*read_dumps(files)[0]] == [0, 4]
    os.rename(files[0], tmp_path / "renamed")
    with pytest.raises(UsageError):
        read_dumps([str(tmp_path / "renamed")])  # a barrier does not tell the rank


def test_rank_of_renamed_dump_is_read_from_messages(tmp_path: Path) -> None:
    path = make_recorder().save(tmp_path)
    os.rename(path, tmp_path / "renamed")
    assert [*read_dumps([str(tmp_path / "renamed")])[0]] == [0]
    os.rename(tmp_path / "renamed", tmp_path / "nccl_trace_rank_3")
    with pytest.raises(TraceError):
        read_dumps([str(tmp_path)])


def test_scheduled_gloo_entry_is_done(tmp_path: Path) -> None:
    recorder_of_gloo = Recorder(0, backend="gloo")
    recorder_of_gloo.group("0", (0, 1), "default_pg")
    recorder_of_gloo.collective("0", "all_reduce", ended=True)
    recorder_of_gloo.entries[0]["state"] = "scheduled"
    recorder_of_gloo.save(tmp_path)
    assert read_dumps([str(tmp_path)])[0][0].ops[0].is_done
    recorder_of_gloo.entries[0]["profiling_name"] = (
        "nccl:all_reduce"  # an all-reduce in this state has timed out
    )
    recorder_of_gloo.save(tmp_path)
    assert not read_dumps([str(tmp_path)])[0][0].ops[0].is_done


# ---------------------------------------------------------------- refusals


def _write_changed(**values: Any) -> Callable[[Path], None]:
    """Return a function that writes a dump with changed values.

    They are in the first entry, or in the dump itself if a name begins with `_`.
    """

    def write(path: Path) -> None:
        dump = make_recorder().dump()
        for key, value in values.items():
            (dump if key[0] == "_" else dump["entries"][0])[key.lstrip("_")] = value
        path.write_bytes(pickle.dumps(dump, 2))

    return write


def _write_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data), None)[1]


PICKLE = pickle.dumps(make_recorder().dump(), 2)
JSON_TEXT = json.dumps(make_recorder().dump()).encode()
INVALID_DUMPS: dict[str, Callable[[Path], None]] = {
    "empty": _write_bytes(b""),
    "text": _write_bytes(b"rank 0 stands still\n"),
    "a pickle that runs a command": _write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."),
    "a pickle cut off": _write_bytes(PICKLE[:1000]),
    "a pickle of torch.save": _write_bytes(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n."),
    "a pickle that claims more than it has": _write_bytes(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."),
    "a pickle with numbers for keys": _write_bytes(pickle.dumps({0: 1}, 2)),
    "a pickle of another thing": _write_bytes(pickle.dumps([1, 2], 2)),
    "JSON cut off": _write_bytes(JSON_TEXT[:1000]),
    "JSON nested": _write_bytes(b'{"a":' + b"[" * 200000),
    "JSON of another thing": _write_bytes(b'{"traceEvents": []}'),
    "JSON in Latin-1": _write_bytes(JSON_TEXT.replace(b"train.py", b"tr\xe4in.py")),
    "too large": _write_bytes(b"{" + b" " * 2**25),
    "of an old version": _write_changed(_version="1.5"),
    "entries that are none": _write_changed(_entries=[1, 2]),
    "groups without ranks": _write_changed(_pg_config={"0": {"ranks": "every one"}}),
    "a state that is none": _write_changed(state="dreaming"),
    "a state that has parts": _write_changed(state=[]),
    "a name that is none": _write_changed(profiling_name=12),
    "a name without end": _write_changed(profiling_name="nccl:" + "e" * 10000),
    "no process group": _write_changed(process_group="7"),
    "a number that is none": _write_changed(p2p_seq_id="1"),
    "a number beyond all": _write_changed(record_id=2**70),
    "sizes in sizes": _write_changed(input_sizes=[[[1]]]),
    "a message to a missing rank": _write_changed(profiling_name="nccl:send 2->9"),
    "of another rank": _write_changed(profiling_name="nccl:send 3->1"),
    "a name for terminals": _write_changed(_version="2\x1b[2J", _pg_config={"\x1b[2J": 0}),
}


def read_error_text(name: str, tmp_path: Path) -> str:
    path = tmp_path / "nccl_trace_rank_0"
    INVALID_DUMPS[name](path)
    with pytest.raises(SchedirError) as caught:
        read_dumps([str(path)])
    return f"{type(caught.value).__name__}: {caught.value}".replace(f"{tmp_path}/", "")


MESSAGES = dict(
    part.split("\n", 1)
    for part in re.split(r"^== ", (GOLDEN / "dumps.txt").read_text(), flags=re.M)[1:]
)


@pytest.mark.parametrize("name", INVALID_DUMPS)
def test_invalid_dump_is_refused(name: str, tmp_path: Path) -> None:
    assert read_error_text(name, tmp_path) + "\n" == MESSAGES[name]


def test_golden_messages_match_invalid_dumps() -> None:
    assert [*MESSAGES] == [*INVALID_DUMPS]


def test_nested_values_are_not_expanded(tmp_path: Path) -> None:
    """Sixty levels of a list that contains the next list twice: a short pickle, a huge text."""
    endless: list[Any] = []
    for _ in range(60):
        endless = [endless, endless]
    path = tmp_path / "nccl_trace_rank_0"
    _write_changed(input_dtypes=[endless])(path)
    (dump,) = read_dumps([str(path)])[0].values()
    assert dump.ops[0].dtypes == ("<list>",)
    _write_changed(state=endless)(path)
    with pytest.raises(TraceError):
        read_dumps([str(path)])


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    make_recorder().save(tmp_path)
    make_recorder().save(tmp_path, as_json=True)
    with pytest.raises(UsageError):
        read_dumps([str(tmp_path)])


def test_missing_dumps_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "*.json"):
        with pytest.raises(UsageError):
            read_dumps([str(path)])


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_recorder().save(tmp_path)
    monkeypatch.setattr(flight_recorder, "MAX_ENTRIES", 5)
    with pytest.raises(TraceError):
        read_dumps([str(tmp_path)])
