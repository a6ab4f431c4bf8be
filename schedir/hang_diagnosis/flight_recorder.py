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
from schedir.io.files import begin_of, named, opened

MOST_BYTES: Final = {"pickle": 2**27, "json": 2**25}  # of a file; JSON makes more of a byte
_FIRST: Final = 2**12  # bytes in which a dump begins
MOST_ENTRIES: Final = 2**20
MOST_FILES: Final = 2**14
_RANK: Final = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl|dump|bin))?$")
State = Literal["issued", "started", "ended"]
_STATES: Final[dict[str, State]] = {
    "scheduled": "issued", "started": "started", "completed": "ended",
}  # fmt: skip
_MESSAGE: Final = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_RANKS: Final = re.compile(r"\[[\d, ]*\]$")
_LARGEST: Final = 2**63
_LONGEST: Final = 2**12  # characters of a name: many entries may share one


class RecordedGroup(NamedTuple):
    """A process group: its name, what it was made for, and the ranks of the job that are in it.

    Two groups of one name may differ in their ranks: they are two.  `known` says that the dump has
    the ranks; where it has none, they are those of which a dump speaks of the group.
    """

    name: str
    about: str
    ranks: tuple[int, ...]
    known: bool = True

    def __hash__(self) -> int:
        return hash((self.name, self.about, len(self.ranks)))  # all ranks are many, for each entry

    def __str__(self) -> str:
        return self.about if self.about not in ("", "undefined") else f"group {self.name}"


class RecordedOperation(NamedTuple):
    """A message or a collective, as a rank has recorded it.

    `number` counts all that the rank has recorded, from 0.  `kind` is send, recv, or the name of a
    collective, and `peer` the other end of a message, -1 for a collective.  `nth` counts the
    collectives, or else the launches of messages, and `logical` all messages and collectives of
    the process group, each from 1.  `batch` is not 0 for what was issued as one.  Times are in
    nanoseconds, 0 where there is none.  `line` is where in a person's code it was issued.
    """

    number: int
    group: RecordedGroup
    kind: str
    peer: int
    nth: int
    logical: int
    collectives: int
    batch: int
    state: State
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    created: int
    over: int
    line: str

    @property
    def is_message(self) -> bool:
        """Whether it is a message, and no collective."""
        return self.peer >= 0

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state == "ended"

    def __str__(self) -> str:
        if self.is_message:
            return f"{self.kind} {'to' if self.kind == 'send' else 'from'} {self.peer}"
        return f"{self.kind} {self.nth} of {self.group}"

    @property
    def shape(self) -> str:
        """Sizes and dtypes, for people."""
        each = [
            f"{dtype} {list(sizes)}"
            for dtype, sizes in zip(self.dtypes or ("",) * 99, self.sizes, strict=False)
        ]
        return ", ".join(each[:3]) + ", ..." * (len(each) > 3)


@dataclass(frozen=True)
class FlightRecorderDump:
    """What one rank has recorded, in its order; `lost` of its entries were overwritten."""

    rank: int
    path: str
    ops: tuple[RecordedOperation, ...]
    groups: tuple[RecordedGroup, ...]
    lost: int

    @property
    def is_blind(self) -> bool:
        """Whether what the rank stands at may be among what is lost."""
        return bool(self.lost and self.ops and not self.ops[0].ended)

    @cached_property
    def ended(self) -> RecordedOperation | None:
        """The last operation that has ended."""
        return next((op for op in reversed(self.ops) if op.ended), None)

    @cached_property
    def begun(self) -> RecordedOperation | None:
        """The first operation that the rank has issued and that has not ended: it stands there."""
        return next((op for op in self.ops if not op.ended), None)

    @cached_property
    def last_time(self) -> int:
        """When this rank last issued or ended anything, 0 if it never did."""
        return max((max(op.created, op.over) for op in self.ops), default=0)

    @property
    def since(self) -> int:
        """When the rank issued the operation that it stands at, or else when it was last heard of,
        in nanoseconds."""
        return self.begun.created if self.begun else self.last_time


# ---------------------------------------------------------------- files


def read_dumps(places: Iterable[str]) -> tuple[dict[int, FlightRecorderDump], list[str]]:
    """Read the dumps in files, folders and patterns.

    Of a folder those files are read whose names end in a number, as torch names them.

    Returns:
        The dumps by rank, and the files of folders that are passed over.

    Raises:
        TraceError: A file is no dump.
        UsageError: There is no file, it cannot be read, or a rank has two.
    """
    paths, passed = _paths_of(places)
    found: dict[int, FlightRecorderDump] = {}
    for path in paths:  # one at a time: of what a file has, little is kept
        try:
            dump = _dump(path, _read(path))
        except TraceError as error:
            error.program = path
            raise
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} has two dumps: {found[dump.rank].path} and {path}",
                hint="give one run at a time, as JSON or as pickles",
            )
        found[dump.rank] = dump
    return _with_members(dict(sorted(found.items()))), passed


def _paths_of(places: Iterable[str]) -> tuple[list[str], list[str]]:
    paths: dict[str, None] = {}
    passed: list[str] = []

    def in_folder(folder: Path) -> list[Path]:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        dumps = [file for file in files if _RANK.search(file.name)]
        passed.extend(str(file) for file in files if file not in {*dumps})
        if not dumps:
            raise UsageError(
                f"{folder} has no file whose name ends in a rank, such as nccl_trace_rank_0"
            )
        return dumps

    for place in places:
        if not (own := named(place, in_folder)):
            raise UsageError(f"there is no file {place}")
        paths |= dict.fromkeys(map(str, own))
    if len(paths) > MOST_FILES:
        raise UsageError(f"{len(paths)} files are too many: at most {MOST_FILES} ranks are read")
    return [*paths], passed


def _read(path: str) -> dict[str, Any]:
    """Read a file as plain values: a dump of a version that is known, whose entries are tables."""
    with opened(path) as file:
        data = begin_of(file, _FIRST)
        if not data:
            raise TraceError("the file is empty")
        form = "pickle" if data[:1] == b"\x80" else "json"
        if form == "json" and data.lstrip()[:1] != b"{":
            raise TraceError("this is no dump of a flight recorder, which is JSON or a pickle")
        most = MOST_BYTES[form]
        large = os.fstat(file.fileno()).st_size > most
        if large or len(data := data + begin_of(file, most + 1 - len(data))) > most:
            raise TraceError(
                f"a dump of more than {most >> 20} MiB of {form} is not read",
                hint="a smaller TORCH_FR_BUFFER_SIZE keeps fewer entries",
            )
    raw = loads(data) if form == "pickle" else _json(data)
    if not isinstance(raw, dict) or not isinstance(raw.get("version"), str):
        raise TraceError("this is no dump of a flight recorder: it has no version")
    if raw["version"].partition(".")[0] != "2":
        raise TraceError(f"the dump is of version {_plain(raw['version'])}, and 2 is what is read")
    entries = raw.setdefault("entries", [])  # left out where it would be empty
    if not isinstance(entries, list | tuple) or not all(isinstance(e, dict) for e in entries):
        raise TraceError("the entries of the dump are no list of entries")
    if len(entries) > MOST_ENTRIES:
        raise TraceError(f"the dump has more than {MOST_ENTRIES} entries")
    return raw


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise TraceError("the JSON is nested too deeply for a dump") from None
    except ValueError as error:  # of bytes that are no UTF-8, and of thousands of digits, too
        at = getattr(error, "pos", getattr(error, "start", 0))
        fact = f"the JSON is cut off or damaged at byte {at} of {len(data)}"
        raise TraceError(fact) from None


def _plain(text: object) -> str:
    """A name out of a file, fit for a terminal; of what is no text nothing is looked at."""
    return _printable(text[:200] if isinstance(text, str) else f"<{type(text).__name__}>")


@lru_cache(2**12)
def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _with_members(dumps: dict[int, FlightRecorderDump]) -> dict[int, FlightRecorderDump]:
    """The dumps, in which each group without ranks has those that speak of it."""
    members: dict[RecordedGroup, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for group in {op.group for op in dump.ops if not op.group.known}:
            members[group].update(dumps if group.about == "default_pg" else [rank])
    whole = {group: group._replace(ranks=tuple(sorted(some))) for group, some in members.items()}
    for rank, dump in dumps.items():
        if not all(op.group.known for op in dump.ops):
            ops = (op._replace(group=whole.get(op.group, op.group)) for op in dump.ops)
            dumps[rank] = replace(dump, ops=tuple(ops))
    return dumps


def _rank_of(path: str, entries: Sequence[dict[str, Any]], config: dict[str, RecordedGroup]) -> int:
    """The rank that a file is of: by its name, which its messages must not contradict."""
    own = Counter[int]()
    for entry in entries:
        found = _MESSAGE.search(entry["profiling_name"])
        group = config.get(entry["process_group"][0])
        if found and group and int(found[2]) < len(group.ranks):
            own[group.ranks[int(found[2])]] += 1
    of_name = _RANK.search(Path(path).name)
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
    return type(value) is int and -1 <= value < _LARGEST


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(sizes, list | tuple)
        and all(type(n) is int and 0 <= n < _LARGEST for n in sizes[:16])
        for sizes in value[:64]
    )


# What an entry must have, and what it may look like.
_FIELDS: Final[dict[str, Callable[[Any], bool]]] = {
    "record_id": _is_number,
    "process_group": lambda v: isinstance(v, list | tuple) and [*map(type, v)] == [str, str],
    "profiling_name": lambda v: isinstance(v, str) and len(v) <= _LONGEST,
    "state": lambda v: isinstance(v, str) and v in _STATES,
    "collective_seq_id": _is_number,
    "p2p_seq_id": _is_number,
    "op_id": _is_number,
    "input_sizes": _are_sizes,
    "time_created_ns": _is_number,
}


def _check(entry: dict[str, Any]) -> None:
    for key, fits in _FIELDS.items():
        if not fits(entry.get(key)):
            which = entry.get("record_id")
            where = f"entry {which}" if type(which) is int and which < _LARGEST else "an entry"
            raise TraceError(f"{where} of the dump has no {key} that can be read")


def _config(config: object) -> dict[str, RecordedGroup]:
    """The process groups of a dump that have ranks, by name."""
    if not isinstance(config, dict):
        raise TraceError("the process groups of the dump are no table")
    groups = {}
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        numbers = _numbers(ranks) if isinstance(ranks, str) and len(ranks) <= 2**20 else None
        if numbers is None:
            raise TraceError(f"the process group {_plain(name)} has no list of ranks")
        if numbers:  # Gloo leaves an empty one, without a name
            groups[name] = RecordedGroup(_plain(name), _plain(group.get("desc", "")), numbers)
    return groups


@lru_cache(64)  # many groups of many dumps have the same ranks
def _numbers(text: str) -> tuple[int, ...] | None:
    if not _RANKS.match(text):
        return None
    return tuple(int(n) for n in re.findall(r"\d+", text) if len(n) <= 6)


def _dump(path: str, raw: dict[str, Any]) -> FlightRecorderDump:
    config = _config(raw.get("pg_config", {}))
    for entry in raw["entries"]:
        _check(entry)
    entries = sorted(raw["entries"], key=lambda entry: int(entry["record_id"]))
    rank = _rank_of(path, entries, config)
    ops: list[RecordedOperation] = []
    single: dict[RecordedGroup, list[int]] = defaultdict(list)
    same: dict[object, Any] = {}
    for entry in entries:
        name, about = entry["process_group"]
        group = config.get(name) or RecordedGroup(_plain(name), _plain(about), (), known=False)
        if entry["profiling_name"].partition(":")[2] == "coalesced":
            _settle(ops, single[group], entry)
        else:
            single[group].append(len(ops))
            op = _op(entry, group)
            alike = (op.kind, op.sizes, op.dtypes, op.line)
            kind, sizes, dtypes, line = same.setdefault(alike, alike)
            ops.append(op._replace(kind=kind, sizes=sizes, dtypes=dtypes, line=line))
    lost = ops[0].number if ops else 0
    return FlightRecorderDump(rank, path, tuple(ops), tuple(config.values()), lost)


def _op(entry: dict[str, Any], group: RecordedGroup) -> RecordedOperation:
    backend, _, title = entry["profiling_name"].partition(":")
    state = _STATES[entry["state"]]
    if backend == "gloo" and entry.get("retired") is True:
        state = "ended"
    kind, peer = _plain(title), -1
    if found := _MESSAGE.match(title):
        kind, other = found[1], int(found[3])
        # Without its ranks a group is read as the job's own, which is what has ranks by itself.
        if group.known and other >= len(group.ranks):
            raise TraceError(
                f"a message of {group} is for its rank {other}, and it has {len(group.ranks)}"
            )
        peer = group.ranks[other] if group.known else other
    dtypes = entry.get("input_dtypes")  # since version 2.1
    dtypes = dtypes[:64] if isinstance(dtypes, list | tuple) else ()
    return RecordedOperation(
        number=entry["record_id"],
        group=group,
        kind=kind,
        peer=peer,
        nth=entry["p2p_seq_id" if peer >= 0 else "collective_seq_id"],
        logical=entry["op_id"],
        collectives=entry["collective_seq_id"],
        batch=0,
        state=state,
        sizes=tuple(tuple(sizes[:16]) for sizes in entry["input_sizes"][:64]),
        dtypes=tuple(_plain(dtype).lower() for dtype in dtypes),
        created=entry["time_created_ns"],
        over=_time_over(entry),
        line=_line(entry),
    )


def _settle(ops: list[RecordedOperation], single: list[int], entry: dict[str, Any]) -> None:
    """Give the members of a batch, which are the last of their group, the state of the whole.

    `single` are the places of what the group has issued since its last batch.
    """
    state, over, batch = _STATES[entry["state"]], _time_over(entry), entry["record_id"] + 1
    numbers = entry["collective_seq_id"], entry["p2p_seq_id"]
    while single and ops[single[-1]].nth == numbers[ops[single[-1]].is_message]:
        at = single.pop()
        ops[at] = ops[at]._replace(state=state, over=over, batch=batch)
    single.clear()


def _time_over(entry: dict[str, Any]) -> int:
    value = entry.get("time_discovered_completed_ns")
    return value if type(value) is int and 0 <= value < _LARGEST else 0


def _line(entry: dict[str, Any]) -> str:
    """The innermost line outside of torch, as `file:line`, if the dump has stacks."""
    frames: Sequence[Any] = entry.get("frames") or ()
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if not isinstance(frame, dict):
            continue
        name, line = frame.get("filename"), frame.get("line")
        if not isinstance(name, str) or len(name) > _LONGEST or type(line) is not int:
            continue
        if "/torch/" not in name and not name.startswith("<"):
            return f"{_plain(name)}:{min(line, 10**7)}"
    return ""
