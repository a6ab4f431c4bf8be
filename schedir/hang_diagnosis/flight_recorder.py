"""Read the dumps of torch's flight recorder, one file per rank.

The form is that of `FlightRecorder.hpp` (torch 2.13 writes its version 2.10), read as
`torch.distributed.flight_recorder` reads it: `entries` in the order in which the rank issued them,
and `pg_config`, who is in which process group.  Three things are not on the surface:

- What is issued as a batch has an entry for each message, which never changes its state, and then
  one called `coalesced`, with the same sequence number, whose state is that of all of them.
- ProcessGroupGloo records collectives, no messages, and never ends an entry: it retires it.
- A message names the ranks of its process group, not of the job; the ranks of the group say which.
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

MAX_BYTES: Final = {"pickle": 2**27, "json": 2**25}  # of a file; JSON makes more of a byte
_PREFIX_BYTES: Final = 2**12  # bytes in which a dump begins
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
_MAX_NAME_LENGTH: Final = 2**12  # characters of a name: many entries may share one


class RecordedGroup(NamedTuple):
    """A process group: its name, what it was made for, and the ranks of the job that are in it.

    Two groups of one name may differ in their ranks: they are two.  `has_ranks` says that the dump
    has the ranks; where it has none, they are those of which a dump speaks of the group.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    has_ranks: bool = True

    def __hash__(self) -> int:
        return hash(
            (self.name, self.description, len(self.ranks))
        )  # all ranks are many, for each entry

    def __str__(self) -> str:
        return (
            self.description if self.description not in ("", "undefined") else f"group {self.name}"
        )


class RecordedOperation(NamedTuple):
    """A message or a collective, as a rank has recorded it.

    `number` counts all that the rank has recorded, from 0.  `kind` is send, recv, or the name of a
    collective, and `peer` the other end of a message, -1 for a collective.  `sequence_number`
    counts the collectives, or else the launches of messages, and `logical_number` all messages and
    collectives of the process group, each from 1.  `batch` is not 0 for what was issued as one.
    Times are in nanoseconds, 0 where there is none.  `source_line` is where in a person's code it
    was issued.
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
        """Whether it is a message, and no collective."""
        return self.peer >= 0

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.state == "ended"

    def __str__(self) -> str:
        if self.is_message:
            return f"{self.kind} {'to' if self.kind == 'send' else 'from'} {self.peer}"
        return f"{self.kind} {self.sequence_number} of {self.group}"

    @property
    def shape_text(self) -> str:
        """Sizes and dtypes, for people."""
        each = [
            f"{dtype} {list(sizes)}"
            for dtype, sizes in zip(self.dtypes or ("",) * 99, self.sizes, strict=False)
        ]
        return ", ".join(each[:3]) + ", ..." * (len(each) > 3)


@dataclass(frozen=True)
class FlightRecorderDump:
    """What one rank has recorded, in its order; `num_lost` of its entries were overwritten."""

    rank: int
    path: str
    ops: tuple[RecordedOperation, ...]
    groups: tuple[RecordedGroup, ...]
    num_lost: int

    @property
    def may_have_lost_position(self) -> bool:
        """Whether what the rank stands at may be among what is lost."""
        return bool(self.num_lost and self.ops and not self.ops[0].is_done)

    @cached_property
    def last_done(self) -> RecordedOperation | None:
        """The last operation that has ended."""
        return next((op for op in reversed(self.ops) if op.is_done), None)

    @cached_property
    def current_op(self) -> RecordedOperation | None:
        """The first operation that the rank has issued and that has not ended: it stands there."""
        return next((op for op in self.ops if not op.is_done), None)

    @cached_property
    def last_time(self) -> int:
        """When this rank last issued or ended anything, 0 if it never did."""
        return max((max(op.created_time, op.ended_time) for op in self.ops), default=0)

    @property
    def current_since(self) -> int:
        """When the rank issued the operation that it stands at, or else when it was last heard of,
        in nanoseconds."""
        return self.current_op.created_time if self.current_op else self.last_time


# ---------------------------------------------------------------- files


def read_dumps(sources: Iterable[str]) -> tuple[dict[int, FlightRecorderDump], list[str]]:
    """Read the dumps in files, folders and patterns.

    Of a folder those files are read whose names end in a number, as torch names them.

    Returns:
        The dumps by rank, and the files of folders that are passed over.

    Raises:
        TraceError: A file is no dump.
        UsageError: There is no file, it cannot be read, or a rank has two.
    """
    paths, passed = _find_paths(sources)
    found: dict[int, FlightRecorderDump] = {}
    for path in paths:  # one at a time: of what a file has, little is kept
        try:
            dump = _build_dump(path, _read_dump_file(path))
        except TraceError as error:
            error.program = path
            raise
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} has two dumps: {found[dump.rank].path} and {path}",
                hint="give one run at a time, as JSON or as pickles",
            )
        found[dump.rank] = dump
    return _infer_group_ranks(dict(sorted(found.items()))), passed


def _find_paths(sources: Iterable[str]) -> tuple[list[str], list[str]]:
    paths: dict[str, None] = {}
    passed: list[str] = []

    def in_folder(folder: Path) -> list[Path]:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        dumps = [file for file in files if _RANK_SUFFIX.search(file.name)]
        passed.extend(str(file) for file in files if file not in {*dumps})
        if not dumps:
            raise UsageError(
                f"{folder} has no file whose name ends in a rank, such as nccl_trace_rank_0"
            )
        return dumps

    for place in sources:
        if not (own := expand_paths(place, in_folder)):
            raise UsageError(f"there is no file {place}")
        paths |= dict.fromkeys(map(str, own))
    if len(paths) > MAX_FILES:
        raise UsageError(f"{len(paths)} files are too many: at most {MAX_FILES} ranks are read")
    return [*paths], passed


def _read_dump_file(path: str) -> dict[str, Any]:
    """Read a file as plain values: a dump of a version that is known, whose entries are tables."""
    with open_regular_file(path) as file:
        data = read_prefix(file, _PREFIX_BYTES)
        if not data:
            raise TraceError("the file is empty")
        form = "pickle" if data[:1] == b"\x80" else "json"
        if form == "json" and data.lstrip()[:1] != b"{":
            raise TraceError("this is no dump of a flight recorder, which is JSON or a pickle")
        most = MAX_BYTES[form]
        large = os.fstat(file.fileno()).st_size > most
        if large or len(data := data + read_prefix(file, most + 1 - len(data))) > most:
            raise TraceError(
                f"a dump of more than {most >> 20} MiB of {form} is not read",
                hint="a smaller TORCH_FR_BUFFER_SIZE keeps fewer entries",
            )
    raw = loads(data) if form == "pickle" else _load_json(data)
    if not isinstance(raw, dict) or not isinstance(raw.get("version"), str):
        raise TraceError("this is no dump of a flight recorder: it has no version")
    if raw["version"].partition(".")[0] != "2":
        raise TraceError(
            f"the dump is of version {_clean_text(raw['version'])}, and 2 is what is read"
        )
    entries = raw.setdefault("entries", [])  # left out where it would be empty
    if not isinstance(entries, list | tuple) or not all(isinstance(e, dict) for e in entries):
        raise TraceError("the entries of the dump are no list of entries")
    if len(entries) > MAX_ENTRIES:
        raise TraceError(f"the dump has more than {MAX_ENTRIES} entries")
    return raw


def _load_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise TraceError("the JSON is nested too deeply for a dump") from None
    except ValueError as error:  # of bytes that are no UTF-8, and of thousands of digits, too
        at = getattr(error, "pos", getattr(error, "start", 0))
        fact = f"the JSON is cut off or damaged at byte {at} of {len(data)}"
        raise TraceError(fact) from None


def _clean_text(text: object) -> str:
    """A name out of a file, fit for a terminal; of what is no text nothing is looked at."""
    return _replace_unprintable(text[:200] if isinstance(text, str) else f"<{type(text).__name__}>")


@lru_cache(2**12)
def _replace_unprintable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _infer_group_ranks(dumps: dict[int, FlightRecorderDump]) -> dict[int, FlightRecorderDump]:
    """The dumps, in which each group without ranks has those that speak of it."""
    members: dict[RecordedGroup, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for group in {op.group for op in dump.ops if not op.group.has_ranks}:
            members[group].update(dumps if group.description == "default_pg" else [rank])
    whole = {group: group._replace(ranks=tuple(sorted(some))) for group, some in members.items()}
    for rank, dump in dumps.items():
        if not all(op.group.has_ranks for op in dump.ops):
            ops = (op._replace(group=whole.get(op.group, op.group)) for op in dump.ops)
            dumps[rank] = replace(dump, ops=tuple(ops))
    return dumps


def _infer_rank(
    path: str, entries: Sequence[dict[str, Any]], config: dict[str, RecordedGroup]
) -> int:
    """The rank that a file is of: by its name, which its messages must not contradict."""
    own = Counter[int]()
    for entry in entries:
        found = _MESSAGE_NAME.search(entry["profiling_name"])
        group = config.get(entry["process_group"][0])
        if found and group and int(found[2]) < len(group.ranks):
            own[group.ranks[int(found[2])]] += 1
    of_name = _RANK_SUFFIX.search(Path(path).name)
    if of_name is None and not own:
        raise UsageError(
            f"which rank {path} is of is not said",
            hint="the name ends in the rank, as nccl_trace_rank_0 does",
        )
    rank = int(of_name[1]) if of_name else own.most_common(1)[0][0]
    if others := [other for other in own if other != rank]:
        raise TraceError(
            f"the name says that this is rank {rank}, and it has messages of rank {others[0]}"
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


# What an entry must have, and what it may look like.
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
    for key, fits in _FIELD_CHECKS.items():
        if not fits(entry.get(key)):
            which = entry.get("record_id")
            where = (
                f"entry {which}" if type(which) is int and which < _INTEGER_LIMIT else "an entry"
            )
            raise TraceError(f"{where} of the dump has no {key} that can be read")


def _parse_groups(config: object) -> dict[str, RecordedGroup]:
    """The process groups of a dump that have ranks, by name."""
    if not isinstance(config, dict):
        raise TraceError("the process groups of the dump are no table")
    groups = {}
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        numbers = _parse_ranks(ranks) if isinstance(ranks, str) and len(ranks) <= 2**20 else None
        if numbers is None:
            raise TraceError(f"the process group {_clean_text(name)} has no list of ranks")
        if numbers:  # Gloo leaves an empty one, without a name
            groups[name] = RecordedGroup(
                _clean_text(name), _clean_text(group.get("desc", "")), numbers
            )
    return groups


@lru_cache(64)  # many groups of many dumps have the same ranks
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
    single: dict[RecordedGroup, list[int]] = defaultdict(list)
    same: dict[object, Any] = {}
    for entry in entries:
        name, about = entry["process_group"]
        group = config.get(name) or RecordedGroup(
            _clean_text(name), _clean_text(about), (), has_ranks=False
        )
        if entry["profiling_name"].partition(":")[2] == "coalesced":
            _end_batch(ops, single[group], entry)
        else:
            single[group].append(len(ops))
            op = _build_operation(entry, group)
            alike = (op.kind, op.sizes, op.dtypes, op.source_line)
            kind, sizes, dtypes, line = same.setdefault(alike, alike)
            ops.append(op._replace(kind=kind, sizes=sizes, dtypes=dtypes, source_line=line))
    lost = ops[0].number if ops else 0
    return FlightRecorderDump(rank, path, tuple(ops), tuple(config.values()), lost)


def _build_operation(entry: dict[str, Any], group: RecordedGroup) -> RecordedOperation:
    backend, _, title = entry["profiling_name"].partition(":")
    state = _STATE_OF_NAME[entry["state"]]
    if backend == "gloo" and entry.get("retired") is True:
        state = "ended"
    kind, peer = _clean_text(title), -1
    if found := _MESSAGE_NAME.match(title):
        kind, other = found[1], int(found[3])
        # Without its ranks a group is read as the job's own, which is what has ranks by itself.
        if group.has_ranks and other >= len(group.ranks):
            raise TraceError(
                f"a message of {group} is for its rank {other}, and it has {len(group.ranks)}"
            )
        peer = group.ranks[other] if group.has_ranks else other
    dtypes = entry.get("input_dtypes")  # since version 2.1
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
    """Give the members of a batch, which are the last of their group, the state of the whole.

    `members` are the places of what the group has issued since its last batch.
    """
    state, over, batch = (
        _STATE_OF_NAME[entry["state"]],
        _read_ended_time(entry),
        entry["record_id"] + 1,
    )
    numbers = entry["collective_seq_id"], entry["p2p_seq_id"]
    while members and ops[members[-1]].sequence_number == numbers[ops[members[-1]].is_message]:
        at = members.pop()
        ops[at] = ops[at]._replace(state=state, ended_time=over, batch=batch)
    members.clear()


def _read_ended_time(entry: dict[str, Any]) -> int:
    value = entry.get("time_discovered_completed_ns")
    return value if type(value) is int and 0 <= value < _INTEGER_LIMIT else 0


def _find_source_line(entry: dict[str, Any]) -> str:
    """The innermost line outside of torch, as `file:line`, if the dump has stacks."""
    frames: Sequence[Any] = entry.get("frames") or ()
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if not isinstance(frame, dict):
            continue
        name, line = frame.get("filename"), frame.get("line")
        if not isinstance(name, str) or len(name) > _MAX_NAME_LENGTH or type(line) is not int:
            continue
        if "/torch/" not in name and not name.startswith("<"):
            return f"{_clean_text(name)}:{min(line, 10**7)}"
    return ""
