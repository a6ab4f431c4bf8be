"""Read the dumps of torch's flight recorder, one file per rank.

The format is that of torch's `FlightRecorder.hpp`. Torch 2.13 writes version 2.10 of the format.
This module interprets it as `torch.distributed.flight_recorder` does. The field `entries` lists the
operations in the order in which the rank issued them. The field `pg_config` has the ranks of each
process group. Three properties of the format are not obvious:

- A batch has an entry per message. The state of these entries never changes. An entry `coalesced`
  follows them. It has the same sequence number, and the state of all messages of the batch.
- ProcessGroupGloo records collectives, but no messages. It marks an ended entry as retired, and
  does not change its state.
- A message names ranks of its process group, not of the job. This module converts them to ranks of
  the job.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from schedir.errors import TraceError, UsageError
from schedir.hang_diagnosis.safe_unpickler import loads
from schedir.io.files import expand_paths, open_regular_file, read_prefix

# The largest number of bytes of a dump, by format. The limit of JSON is lower, because values from
# JSON need more memory per byte of the file.
MAX_BYTES: Final = {"pickle": 2**27, "json": 2**25}
_PREFIX_BYTES: Final = 2**12  # bytes that are read to detect the format
MAX_ENTRIES: Final = 2**20
MAX_FILES: Final = 2**14
_RANK_SUFFIX: Final = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl|dump|bin))?$")
OperationState = Literal["issued", "started", "ended"]
_STATE_OF_NAME: Final[dict[str, OperationState]] = {
    "scheduled": "issued", "started": "started", "completed": "ended",
}  # fmt: skip
_MESSAGE_NAME: Final = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_RANK_LIST: Final = re.compile(r"\[[\d, ]*\]$")
_INTEGER_LIMIT: Final = 2**63
_MAX_NAME_LENGTH: Final = 2**12  # the most characters of a name


class RecordedGroup(NamedTuple):
    """A process group.

    Groups with the same name but different ranks are different groups.

    Attributes:
        name: The name.
        description: The purpose of the group, such as `default_pg`.
        ranks: The ranks of the job that are in the group.
        has_ranks: True if the dump has the ranks. Otherwise `_infer_group_ranks` sets `ranks`.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    has_ranks: bool = True

    def __hash__(self) -> int:
        # The hash of a group is computed for each entry, so a hash of all ranks would be slow.
        return hash((self.name, self.description, len(self.ranks)))

    def __str__(self) -> str:
        return (
            self.description if self.description not in ("", "undefined") else f"group {self.name}"
        )


class RecordedOperation(NamedTuple):
    """A message or a collective that a rank has recorded.

    Attributes:
        number: The number of the operation among all entries of the rank, from 0.
        group: The process group.
        kind: `send`, `recv`, or the name of a collective.
        peer: The rank of the job that is the other end of a message, or -1 for a collective.
        sequence_number: For a collective, torch's number of the collective. For a message, torch's
            number of the launch of the message; all messages of a batch have one launch. Both
            numbers count from 1 in each process group.
        logical_number: Torch's number of the operation among all messages and collectives of the
            process group, from 1.
        collective_number: The number of collectives in the process group so far, as torch counts
            them.
        batch: The same positive number for all operations of a batch, or 0 outside of a batch.
        state: `issued`, `started` or `ended`.
        sizes: The shape of each input tensor.
        dtypes: The dtype of each input tensor.
        created_time: The time when the operation was issued, in nanoseconds, or 0 if unknown.
        ended_time: The time when torch discovered the end, in nanoseconds, or 0 if unknown.
        source_line: The line of user code that issued the operation, as `file:line`, or empty.
    """

    number: int
    group: RecordedGroup
    kind: str
    peer: int
    sequence_number: int
    logical_number: int
    collective_number: int
    batch: int
    state: OperationState
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    created_time: int
    ended_time: int
    source_line: str

    @property
    def is_message(self) -> bool:
        """Return whether the operation is a message. Otherwise it is a collective."""
        return self.peer >= 0

    @property
    def is_done(self) -> bool:
        """Return whether the operation has ended."""
        return self.state == "ended"

    def __str__(self) -> str:
        if self.is_message:
            return f"{self.kind} {'to' if self.kind == 'send' else 'from'} {self.peer}"
        return f"{self.kind} {self.sequence_number} of {self.group}"

    @property
    def shape_text(self) -> str:
        """The dtypes and shapes of the inputs, as text for a report."""
        input_texts = [
            f"{dtype} {list(sizes)}"
            for dtype, sizes in zip(self.dtypes or ("",) * 99, self.sizes, strict=False)
        ]
        return ", ".join(input_texts[:3]) + ", ..." * (len(input_texts) > 3)


@dataclass(frozen=True)
class FlightRecorderDump:
    """The operations that one rank has recorded.

    Args:
        rank: The rank.
        path: The file.
        ops: The operations, in the order in which the rank issued them.
        groups: The process groups for which the dump lists ranks.
        num_lost: The number of entries that were overwritten.
    """

    rank: int
    path: str
    ops: tuple[RecordedOperation, ...]
    groups: tuple[RecordedGroup, ...]
    num_lost: int

    @property
    def may_have_lost_position(self) -> bool:
        """Return whether the operation at which the rank waits may have been overwritten."""
        return bool(self.num_lost and self.ops and not self.ops[0].is_done)

    @cached_property
    def last_ended_op(self) -> RecordedOperation | None:
        """The last operation that has ended, or None."""
        return next((op for op in reversed(self.ops) if op.is_done), None)

    @cached_property
    def current_op(self) -> RecordedOperation | None:
        """The first operation that was issued and has not ended, or None. The rank waits for it."""
        return next((op for op in self.ops if not op.is_done), None)

    @cached_property
    def last_time(self) -> int:
        """The last time at which an operation was issued or ended, in nanoseconds.

        The result is 0 if no time is known.
        """
        return max((max(op.created_time, op.ended_time) for op in self.ops), default=0)

    @property
    def current_op_time(self) -> int:
        """The time at which `current_op` was issued, or else `last_time`, in nanoseconds."""
        return self.current_op.created_time if self.current_op else self.last_time


# ---------------------------------------------------------------- files


def read_dumps(sources: Iterable[str]) -> tuple[dict[int, FlightRecorderDump], list[str]]:
    """Read the dumps in files, directories and patterns.

    In a directory, a file is read only if its name ends in a rank, with or without a suffix such as
    `.json`. torch names dumps in this way.

    Args:
        sources: The files, directories and patterns.

    Returns:
        The dumps by rank, and the skipped files of directories.

    Raises:
        TraceError: A file is not a dump.
        UsageError: There is no file, a file cannot be read, the rank of a file is unknown, or a
            rank has two dumps.
    """
    paths, skipped = _find_paths(sources)
    dumps: dict[int, FlightRecorderDump] = {}
    for path in paths:  # Files are read one at a time. Only a small part of a file stays in memory.
        try:
            dump = _build_dump(path, _read_dump_file(path))
        except TraceError as error:
            error.program = path
            raise
        if dump.rank in dumps:
            raise UsageError(
                f"rank {dump.rank} has two dumps: {dumps[dump.rank].path} and {path}",
                hint="give only the dumps of one run, and only one of its two formats, JSON or "
                "pickle",
            )
        dumps[dump.rank] = dump
    return _infer_group_ranks(dict(sorted(dumps.items()))), skipped


def _find_paths(sources: Iterable[str]) -> tuple[list[str], list[str]]:
    paths: dict[str, None] = {}
    skipped: list[str] = []

    def in_folder(folder: Path) -> list[Path]:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        dumps = [file for file in files if _RANK_SUFFIX.search(file.name)]
        skipped.extend(str(file) for file in files if file not in {*dumps})
        if not dumps:
            raise UsageError(
                f"{folder} has no file whose name ends in a rank, such as nccl_trace_rank_0",
                hint="give the folder of the dumps; if this is the folder of a run of schedir "
                "train, the run ended without an error and left no black boxes",
            )
        return dumps

    for source in sources:
        if not (source_paths := expand_paths(source, in_folder)):
            raise UsageError(f"cannot read {source}: no such file")
        paths |= dict.fromkeys(map(str, source_paths))
    if len(paths) > MAX_FILES:
        raise UsageError(f"{len(paths)} dumps are too many: schedir reads at most {MAX_FILES}")
    return [*paths], skipped


def _read_dump_file(path: str) -> dict[str, Any]:
    """Read a file as plain values. Check its version, and that its entries are dicts."""
    with open_regular_file(path) as file:
        data = read_prefix(file, _PREFIX_BYTES)
        if not data:
            raise TraceError("the file is empty")
        file_format = "pickle" if data[:1] == b"\x80" else "json"
        if file_format == "json" and data.lstrip()[:1] != b"{":
            raise TraceError(
                "this is not a flight recorder dump: it is neither JSON nor a pickle",
                hint="give the files that TORCH_FR_DUMP_TEMP_FILE names, one for each rank; "
                "docs/how-to/find-a-hang.md shows how to record them",
            )
        max_bytes = MAX_BYTES[file_format]
        is_too_large = os.fstat(file.fileno()).st_size > max_bytes
        if (
            is_too_large
            or len(data := data + read_prefix(file, max_bytes + 1 - len(data))) > max_bytes
        ):
            raise TraceError(
                f"the dump has more than {max_bytes >> 20} MiB, the limit for {file_format}",
                hint="set a smaller TORCH_FR_BUFFER_SIZE, to record fewer entries",
            )
    raw = loads(data) if file_format == "pickle" else _load_json(data)
    if not isinstance(raw, dict) or not isinstance(raw.get("version"), str):
        raise TraceError("this is not a flight recorder dump: it has no version")
    if raw["version"].partition(".")[0] != "2":
        raise TraceError(
            f"the dump has version {_clean_text(raw['version'])}, but schedir reads only version 2"
        )
    entries = raw.setdefault("entries", [])  # Torch omits an empty list.
    if not isinstance(entries, list | tuple) or not all(isinstance(e, dict) for e in entries):
        raise TraceError("the entries of the dump are not a list of dictionaries")
    if len(entries) > MAX_ENTRIES:
        raise TraceError(f"the dump has more than {MAX_ENTRIES} entries, the limit")
    return raw


def _load_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise TraceError("the JSON is nested too deeply for a dump") from None
    # ValueError includes UnicodeDecodeError, and the error for an integer of too many digits.
    except ValueError as error:
        byte_position = getattr(error, "pos", getattr(error, "start", 0))
        fact = f"the JSON is cut off or damaged at byte {byte_position} of {len(data)}"
        raise TraceError(fact) from None


def _clean_text(text: object) -> str:
    """Return a name from a file as printable text. For other values, return only their type."""
    return _replace_unprintable(text[:200] if isinstance(text, str) else f"<{type(text).__name__}>")


@lru_cache(2**12)
def _replace_unprintable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _infer_group_ranks(dumps: dict[int, FlightRecorderDump]) -> dict[int, FlightRecorderDump]:
    """Set the ranks of each group without ranks to the ranks whose dumps mention the group.

    The default group gets the ranks of all dumps.
    """
    members: dict[RecordedGroup, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for group in {op.group for op in dump.ops if not op.group.has_ranks}:
            members[group].update(dumps if group.description == "default_pg" else [rank])
    groups_with_ranks = {
        group: group._replace(ranks=tuple(sorted(group_ranks)))
        for group, group_ranks in members.items()
    }
    for rank, dump in dumps.items():
        if not all(op.group.has_ranks for op in dump.ops):
            ops = (op._replace(group=groups_with_ranks.get(op.group, op.group)) for op in dump.ops)
            dumps[rank] = replace(dump, ops=tuple(ops))
    return dumps


def _infer_rank(
    path: str, entries: Sequence[dict[str, Any]], config: dict[str, RecordedGroup]
) -> int:
    """Return the rank of a dump from its file name, or else from its messages.

    If the name and the messages give ranks, these must be equal.
    """
    message_counts = Counter[int]()
    for entry in entries:
        message = _MESSAGE_NAME.search(entry["profiling_name"])
        group = config.get(entry["process_group"][0])
        if message and group and int(message[2]) < len(group.ranks):
            message_counts[group.ranks[int(message[2])]] += 1
    match = _RANK_SUFFIX.search(Path(path).name)
    if match is None and not message_counts:
        raise UsageError(
            f"the rank of {path} is unknown: its name does not end in a rank",
            hint="rename the file, so that its name ends in its rank, such as nccl_trace_rank_0",
        )
    rank = int(match[1]) if match else message_counts.most_common(1)[0][0]
    if other_ranks := [r for r in message_counts if r != rank]:
        raise TraceError(
            f"the file name ends in rank {rank}, but the dump has messages of rank {other_ranks[0]}"
        )
    return rank


# ---------------------------------------------------------------- entries


def _is_number(value: Any) -> bool:
    return type(value) is int and -1 <= value < _INTEGER_LIMIT


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(sizes, list | tuple)
        and all(type(n) is int and 0 <= n < _INTEGER_LIMIT for n in sizes[:16])
        for sizes in value[:64]
    )


# Required field of an entry -> a function that returns whether a value of the field is valid.
_FIELD_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "record_id": _is_number,
    "process_group": lambda v: isinstance(v, list | tuple) and [*map(type, v)] == [str, str],
    "profiling_name": lambda v: isinstance(v, str) and len(v) <= _MAX_NAME_LENGTH,
    "state": lambda v: isinstance(v, str) and v in _STATE_OF_NAME,
    "collective_seq_id": _is_number,
    "p2p_seq_id": _is_number,
    "op_id": _is_number,
    "input_sizes": _are_sizes,
    "time_created_ns": _is_number,
}


def _require_fields(entry: dict[str, Any]) -> None:
    for key, is_valid in _FIELD_CHECKS.items():
        if not is_valid(entry.get(key)):
            record_id = entry.get("record_id")
            entry_name = (
                f"entry {record_id}"
                if type(record_id) is int and record_id < _INTEGER_LIMIT
                else "an entry"
            )
            raise TraceError(f"{entry_name} of the dump has no valid {key}")


def _parse_groups(config: object) -> dict[str, RecordedGroup]:
    """Return, by name, the process groups for which the dump lists ranks."""
    if not isinstance(config, dict):
        raise TraceError("the process groups of the dump are not a dictionary")
    groups = {}
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        numbers = _parse_ranks(ranks) if isinstance(ranks, str) and len(ranks) <= 2**20 else None
        if numbers is None:
            raise TraceError(f"the process group {_clean_text(name)} has no list of ranks")
        if numbers:  # Gloo writes an empty group without a name, which is not used.
            groups[name] = RecordedGroup(
                _clean_text(name), _clean_text(group.get("desc", "")), numbers
            )
    return groups


@lru_cache(64)  # Many groups of many dumps have the same ranks.
def _parse_ranks(text: str) -> tuple[int, ...] | None:
    if not _RANK_LIST.match(text):
        return None
    return tuple(int(n) for n in re.findall(r"\d+", text) if len(n) <= 6)


def _build_dump(path: str, raw: dict[str, Any]) -> FlightRecorderDump:
    config = _parse_groups(raw.get("pg_config", {}))
    for entry in raw["entries"]:
        _require_fields(entry)
    entries = sorted(raw["entries"], key=lambda entry: int(entry["record_id"]))
    rank = _infer_rank(path, entries, config)
    ops: list[RecordedOperation] = []
    batch_members: dict[RecordedGroup, list[int]] = defaultdict(list)
    shared_values: dict[object, Any] = {}
    for entry in entries:
        name, description = entry["process_group"]
        group = config.get(name) or RecordedGroup(
            _clean_text(name), _clean_text(description), (), has_ranks=False
        )
        if entry["profiling_name"].partition(":")[2] == "coalesced":
            _end_batch(ops, batch_members[group], entry)
        else:
            batch_members[group].append(len(ops))
            op = _build_operation(entry, group)
            values = (op.kind, op.sizes, op.dtypes, op.source_line)
            kind, sizes, dtypes, line = shared_values.setdefault(values, values)
            ops.append(op._replace(kind=kind, sizes=sizes, dtypes=dtypes, source_line=line))
    num_lost = ops[0].number if ops else 0
    return FlightRecorderDump(rank, path, tuple(ops), tuple(config.values()), num_lost)


def _build_operation(entry: dict[str, Any], group: RecordedGroup) -> RecordedOperation:
    backend, _, title = entry["profiling_name"].partition(":")
    state = _STATE_OF_NAME[entry["state"]]
    if backend == "gloo" and entry.get("retired") is True:
        state = "ended"
    kind, peer = _clean_text(title), -1
    if match := _MESSAGE_NAME.match(title):
        kind, group_rank = match[1], int(match[3])
        # If the ranks of a group are unknown, the numbers in its messages are used as ranks of the
        # job.
        if group.has_ranks and group_rank >= len(group.ranks):
            raise TraceError(
                f"a message of {group} is for rank {group_rank} of this group, but the group has "
                f"only {len(group.ranks)} ranks"
            )
        peer = group.ranks[group_rank] if group.has_ranks else group_rank
    dtypes = entry.get("input_dtypes")  # This field exists since version 2.1 of the format.
    dtypes = dtypes[:64] if isinstance(dtypes, list | tuple) else ()
    return RecordedOperation(
        number=entry["record_id"],
        group=group,
        kind=kind,
        peer=peer,
        sequence_number=entry["p2p_seq_id" if peer >= 0 else "collective_seq_id"],
        logical_number=entry["op_id"],
        collective_number=entry["collective_seq_id"],
        batch=0,
        state=state,
        sizes=tuple(tuple(sizes[:16]) for sizes in entry["input_sizes"][:64]),
        dtypes=tuple(_clean_text(dtype).lower() for dtype in dtypes),
        created_time=entry["time_created_ns"],
        ended_time=_read_ended_time(entry),
        source_line=_find_source_line(entry),
    )


def _end_batch(ops: list[RecordedOperation], members: list[int], entry: dict[str, Any]) -> None:
    """Set the state and the end of all operations of a batch to those of `entry`, its last entry.

    The operations are the last ones before `entry` in their process group. The list `members` has
    the indices of all operations since the group's previous batch. The function clears this list.
    """
    state = _STATE_OF_NAME[entry["state"]]
    ended_time = _read_ended_time(entry)
    batch = entry["record_id"] + 1
    numbers = entry["collective_seq_id"], entry["p2p_seq_id"]
    while members and ops[members[-1]].sequence_number == numbers[ops[members[-1]].is_message]:
        index = members.pop()
        ops[index] = ops[index]._replace(state=state, ended_time=ended_time, batch=batch)
    members.clear()


def _read_ended_time(entry: dict[str, Any]) -> int:
    value = entry.get("time_discovered_completed_ns")
    return value if type(value) is int and 0 <= value < _INTEGER_LIMIT else 0


def _find_source_line(entry: dict[str, Any]) -> str:
    """Return the innermost line outside of torch as `file:line`, or "" if there is none."""
    frames: Sequence[Any] = entry.get("frames") or ()
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if not isinstance(frame, dict):
            continue
        name = frame.get("filename")
        line = frame.get("line")
        if not isinstance(name, str) or len(name) > _MAX_NAME_LENGTH or type(line) is not int:
            continue
        if "/torch/" not in name and not name.startswith("<"):
            return f"{_clean_text(name)}:{min(line, 10**7)}"
    return ""
