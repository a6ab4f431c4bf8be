"""Flight recorder: the dumps of torch's ring buffer of messages and collectives, a file per rank.

The form is that of `FlightRecorder.hpp` (torch 2.13 writes its version 2.10), read as
`torch.distributed.flight_recorder` reads it: `entries` in the order in which the rank issued them,
and `pg_config`, who is in which process group.  Three things are not on the surface:

- What is issued as a batch has an entry for each message, which never changes its state, and then
  one called `coalesced`, with the same sequence number, whose state is that of all of them.
- ProcessGroupGloo records collectives, no messages, and never ends an entry: it retires it.
- A message names the ranks of its process group, not of the job; the ranks of the group say which.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from schedir.dumps.files import RANK, paths_of, plain, read
from schedir.errors import TraceError, UsageError

State = Literal["issued", "started", "ended"]
_STATES: Final[dict[str, State]] = {
    "scheduled": "issued", "started": "started", "completed": "ended",
}  # fmt: skip
_MESSAGE: Final = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_RANKS: Final = re.compile(r"\[[\d, ]*\]$")
_LARGEST: Final = 2**63
_LONGEST: Final = 2**12  # characters of a name: many entries may share one


class Group(NamedTuple):
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


class Op(NamedTuple):
    """A message or a collective, as a rank has recorded it.

    `number` counts all that the rank has recorded, from 0.  `kind` is send, recv, or the name of a
    collective, and `peer` the other end of a message, -1 for a collective.  `nth` counts the
    collectives, or else the launches of messages, and `logical` all messages and collectives of
    the process group, each from 1.  `batch` is not 0 for what was issued as one.  Times are in
    nanoseconds, 0 where there is none.  `line` is where in a person's code it was issued.
    """

    number: int
    group: Group
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
class Dump:
    """What one rank has recorded, in its order; `lost` of its entries were overwritten."""

    rank: int
    path: str
    ops: tuple[Op, ...]
    groups: tuple[Group, ...]
    lost: int

    @property
    def is_blind(self) -> bool:
        """Whether what the rank stands at may be among what is lost."""
        return bool(self.lost and self.ops and not self.ops[0].ended)

    @cached_property
    def last_time(self) -> int:
        """When this rank last issued or ended anything, 0 if it never did."""
        return max((max(op.created, op.over) for op in self.ops), default=0)


# ---------------------------------------------------------------- files


def read_dumps(places: Iterable[str]) -> tuple[dict[int, Dump], list[str]]:
    """The dumps in files, folders and patterns, by rank, and the files that were passed over.

    Raises TraceError for a file that is no dump, UsageError where there is none or a rank has two.
    """
    paths, passed = paths_of(places)
    found: dict[int, Dump] = {}
    for path in paths:  # one at a time: of what a file has, little is kept
        dump = _dump(path, read(path))
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} has two dumps: {found[dump.rank].path} and {path}",
                hint="give one run at a time, as JSON or as pickles",
            )
        found[dump.rank] = dump
    return _with_members(dict(sorted(found.items()))), passed


def _with_members(dumps: dict[int, Dump]) -> dict[int, Dump]:
    """The dumps, in which each group without ranks has those that speak of it."""
    used = {rank: {id(op.group): op.group for op in dump.ops} for rank, dump in dumps.items()}
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, groups in used.items():
        for group in groups.values():
            key = (group.name, group.about)
            members[key].update(dumps if group.about == "default_pg" else [rank])
    same: dict[Group, Group] = {}
    for rank, groups in used.items():
        whole = {
            of: group if group.known
            else group._replace(ranks=tuple(sorted(members[group.name, group.about])))
            for of, group in groups.items()
        }  # fmt: skip
        whole = {of: same.setdefault(group, group) for of, group in whole.items()}
        if any(whole[of] is not group for of, group in groups.items()):
            ops = tuple(op._replace(group=whole[id(op.group)]) for op in dumps[rank].ops)
            dumps[rank] = replace(dumps[rank], ops=ops)
    return dumps


def _rank_of(path: str, raw: dict[str, Any], config: dict[str, Group]) -> int:
    """The rank that a file is of: by its name, which its messages must not contradict."""
    own = Counter[int]()
    for entry in raw["entries"]:
        name, _ = _group_of(entry, path)
        found = _MESSAGE.search(_title(entry, path))
        if found and (group := config.get(name)) and int(found[2]) < len(group.ranks):
            own[group.ranks[int(found[2])]] += 1
    named = RANK.search(Path(path).name)
    if named is None and not own:
        raise UsageError(
            f"which rank {path} is of is not said",
            hint="the name ends in the rank, as nccl_trace_rank_0 does",
        )
    rank = int(named[1]) if named else own.most_common(1)[0][0]
    if own and {*own} != {rank}:
        other = next(r for r in own if r != rank)
        raise TraceError(
            f"the name says that this is rank {rank}, and it has messages of rank {other}",
            program=path,
        )
    return rank


# ---------------------------------------------------------------- entries


def _config(raw: dict[str, Any], path: str) -> dict[str, Group]:
    """The process groups of a dump that have ranks, by name."""
    config = raw.get("pg_config", {})
    if not isinstance(config, dict):
        raise TraceError("the process groups of the dump are no table", program=path)
    groups = {}
    read_before: dict[str, tuple[int, ...]] = {}
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if (
            not isinstance(ranks, str)
            or len(ranks) > 2**20
            or (ranks not in read_before and not _RANKS.match(ranks))
        ):
            raise TraceError(f"the process group {plain(name)} has no list of ranks", program=path)
        numbers = read_before.get(ranks)
        if numbers is None:
            numbers = tuple(int(n) for n in re.findall(r"\d+", ranks) if len(n) <= 6)
            read_before[ranks] = numbers
        if numbers:  # Gloo leaves an empty one, without a name
            groups[name] = Group(plain(name), plain(group.get("desc", "")), numbers)
    return groups


def _group_of(entry: dict[str, Any], path: str) -> tuple[str, str]:
    group = entry.get("process_group")
    if not isinstance(group, list | tuple) or [type(part) for part in group] != [str, str]:
        raise _lacks(entry, "process_group", path)
    return group[0], group[1]


def _title(entry: dict[str, Any], path: str) -> str:
    title = entry.get("profiling_name")
    if not isinstance(title, str) or len(title) > _LONGEST:
        raise _lacks(entry, "profiling_name", path)
    return title


def _state(entry: dict[str, Any], path: str) -> State:
    state = entry.get("state")
    if not isinstance(state, str) or state not in _STATES:
        raise _lacks(entry, "state", path)
    return _STATES[state]


def _number(entry: dict[str, Any], key: str, path: str) -> int:
    number = entry.get(key)
    if type(number) is not int or not -1 <= number < _LARGEST:
        raise _lacks(entry, key, path)
    return number


def _lacks(entry: dict[str, Any], key: str, path: str) -> TraceError:
    which = entry.get("record_id")
    where = f"entry {which}" if type(which) is int and which < _LARGEST else "an entry"
    return TraceError(f"{where} of the dump has no {key} that can be read", program=path)


def _dump(path: str, raw: dict[str, Any]) -> Dump:
    config = _config(raw, path)
    rank = _rank_of(path, raw, config)
    entries = sorted(raw["entries"], key=lambda entry: _number(entry, "record_id", path))
    ops: list[Op] = []
    others: dict[tuple[str, str], Group] = {}
    single: dict[Group, list[int]] = defaultdict(list)
    same: dict[object, Any] = {}
    for entry in entries:
        name, about = _group_of(entry, path)
        group = config.get(name) or others.get((name, about))
        if group is None:
            group = others[name, about] = Group(plain(name), plain(about), (), known=False)
        if _title(entry, path).partition(":")[2] == "coalesced":
            _settle(ops, single[group], entry, path)
        else:
            single[group].append(len(ops))
            op = _op(entry, rank, group, path)
            alike = (op.kind, op.sizes, op.dtypes, op.line)
            kind, sizes, dtypes, line = same.setdefault(alike, alike)
            ops.append(op._replace(kind=kind, sizes=sizes, dtypes=dtypes, line=line))
    lost = ops[0].number if ops else 0
    return Dump(rank, path, tuple(ops), tuple(config.values()), lost)


def _op(entry: dict[str, Any], rank: int, group: Group, path: str) -> Op:
    backend, _, title = _title(entry, path).partition(":")
    state = _state(entry, path)
    if backend == "gloo" and entry.get("retired") is True:
        state = "ended"
    kind, peer = plain(title), -1
    if found := _MESSAGE.match(title):
        kind, other = found[1], int(found[3])
        # Without its ranks a group is read as the job's own, which is what has ranks by itself.
        if group.known and other >= len(group.ranks):
            raise TraceError(
                f"a message of {group} is for its rank {other}, and it has {len(group.ranks)}",
                program=path,
            )
        peer = group.ranks[other] if group.known else other
    collectives = _number(entry, "collective_seq_id", path)
    return Op(
        number=_number(entry, "record_id", path),
        group=group,
        kind=kind,
        peer=peer,
        nth=_number(entry, "p2p_seq_id", path) if peer >= 0 else collectives,
        logical=_number(entry, "op_id", path),
        collectives=collectives,
        batch=0,
        state=state,
        sizes=_sizes(entry, path),
        dtypes=_dtypes(entry),
        created=_number(entry, "time_created_ns", path),
        over=_time(entry, "time_discovered_completed_ns"),
        line=_line(entry),
    )


def _settle(ops: list[Op], single: list[int], entry: dict[str, Any], path: str) -> None:
    """Give the members of a batch, which are the last of their group, the state of the whole.

    `single` are the places of what the group has issued since its last batch.
    """
    state = _state(entry, path)
    numbers = (_number(entry, "p2p_seq_id", path), _number(entry, "collective_seq_id", path))
    over = _time(entry, "time_discovered_completed_ns")
    number = _number(entry, "record_id", path)
    while single and ops[single[-1]].nth == numbers[not ops[single[-1]].is_message]:
        at = single.pop()
        ops[at] = ops[at]._replace(state=state, over=over, batch=number + 1)
    single.clear()


def _sizes(entry: dict[str, Any], path: str) -> tuple[tuple[int, ...], ...]:
    given = entry.get("input_sizes")
    if not isinstance(given, list | tuple) or not all(
        isinstance(sizes, list | tuple)
        and all(type(n) is int and 0 <= n < _LARGEST for n in sizes[:16])
        for sizes in given[:64]
    ):
        raise _lacks(entry, "input_sizes", path)
    return tuple(tuple(sizes[:16]) for sizes in given[:64])


def _dtypes(entry: dict[str, Any]) -> tuple[str, ...]:
    given = entry.get("input_dtypes", ())  # since version 2.1
    return tuple(plain(d).lower() for d in given[:64]) if isinstance(given, list | tuple) else ()


def _time(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    return value if type(value) is int and 0 <= value < _LARGEST else 0


def _line(entry: dict[str, Any]) -> str:
    """The innermost line outside of torch, as `file:line`, if the dump has stacks."""
    frames: Sequence[Any] = entry.get("frames") or ()
    if not isinstance(frames, list | tuple):
        return ""
    for frame in frames[:200]:
        if not isinstance(frame, dict):
            continue
        name, line = frame.get("filename"), frame.get("line")
        if not isinstance(name, str) or len(name) > _LONGEST:
            continue
        own = "/torch/" not in name and not name.startswith("<")
        if own and type(line) is int:
            return f"{plain(name)}:{min(line, 10**7)}"
    return ""
