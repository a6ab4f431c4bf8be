"""Match the messages that ranks recorded with the transfers of a program.

The messages of a rank in a process group are those transfers of its Stream that go that way, in
the order of the Stream, over and over, a step after the other.  So the n-th message of all is known
from n alone; the rest of the recording must agree, or it is not of this program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.errors import UsageError
from schedir.hang_diagnosis.flight_recorder import (
    FlightRecorderDump,
    RecordedGroup,
    RecordedOperation,
)
from schedir.hang_diagnosis.wait_graph import DistributedJob
from schedir.ir.isa.instructions import ROWS, SENDS, TRANSFERS, Lane
from schedir.ir.program import Program

# Of these are shapes, votes and objects, and no activation.
_WHOLE: Final = {"int", "long", "byte", "char", "short", "bool"}


def is_small_talk(op: RecordedOperation) -> bool:
    """Whether a message is no activation: of whole numbers, or of one number, as torch sends before
    the first step to open its communicators."""
    return bool({*op.dtypes} & _WHOLE) or sum(map(prod, op.sizes)) <= 1


@dataclass(frozen=True)
class MatchedProgram:
    """A copy of the program: which rank of the job runs which of its ranks, and how far each is.

    `step` is the step that all this is of, from 0, or None where the recordings cannot say which.
    `issued`, `started` and `ended` have an entry per instruction, by position, and are true of
    transfers; what has started is known only where ranks record it.
    `left_out` messages are no transfers, but shapes, objects, or one number.  `apart` has, for each
    rank and process group, the transfers that it carries.  `names` has the position of each
    message, by the rank of the job and its number there.  Of the ranks in `counted` only counters
    tell the place in the step, which other messages, lost by now, would have moved.

    `loose` is not empty where a rank has another order than its Stream, and tells where.  Then
    its sends, and what it receives from each rank, go as the program says, and are named by that.
    """

    ranks: tuple[int, ...]
    step: int | None
    issued: NDArray[np.bool_]
    started: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    dumped: tuple[bool, ...]
    left_out: int
    apart: tuple[NDArray[np.int32], ...]
    names: Mapping[tuple[int, int], int]
    counted: tuple[int, ...]
    loose: str = ""


def match(job: DistributedJob, program: Program) -> list[MatchedProgram]:
    """Each copy of the program that the job runs, as tensor- and data-parallel ranks have them.

    Raises UsageError where the recordings cannot be of this program.
    """
    graph = Graph.of(program)
    return [_match(job, graph, ranks) for ranks in _pipelines(job, program)]


def circles(job: DistributedJob) -> list[tuple[int, ...]]:
    """The ranks that exchange messages with each other, directly or not, ascending."""
    circle: dict[int, set[int]] = {}
    for rank, dump in job.dumps.items():
        for peer in {op.peer for op in dump.ops if op.is_message}:
            both = circle.get(rank, {rank}) | circle.get(peer, {peer})
            circle.update(dict.fromkeys(both, both))
    return sorted({tuple(sorted(one)) for one in circle.values()})


def _pipelines(job: DistributedJob, program: Program) -> list[tuple[int, ...]]:
    """The ranks that exchange messages, a copy each, in the order of the program's ranks.

    That is the order of a process group of just these ranks, if their messages go in one.
    """
    many, found = program.shape.ranks, circles(job)
    if not found and many > 1:
        raise UsageError(
            "no message between ranks is recorded, only collectives",
            hint="leave out --program; torch's Gloo records no messages, NCCL does",
        )
    used = {op.group for dump in job.dumps.values() for op in dump.ops if op.is_message}
    whole = [g.ranks for g in sorted(used) if g.known and len(g.ranks) == many]
    copies = []
    for ranks in found:
        around = [own for own in whole if {*ranks} <= {*own}]
        if not around and len(ranks) != many:
            raise UsageError(
                f"messages go between {len(ranks)} ranks ({_some(ranks)}), and {program.name} is "
                f"for {many}",
                fields=["ranks"],
            )
        copies.append(around[0] if around else ranks)
    return [*dict.fromkeys(copies)]


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def _match(job: DistributedJob, graph: Graph, ranks: tuple[int, ...]) -> MatchedProgram:
    carriers = _carriers(job, ranks)
    records = [
        _RecordedRank(graph, own, ranks, job.dumps[rank], carriers)
        for own, rank in enumerate(ranks)
        if rank in job.dumps
    ]
    runs = [run for record in records for run in record.runs]
    left_out = sum(record.left_out for record in records)
    if left_out and not runs:
        raise UsageError(
            f"all {left_out} messages of ranks {_some(ranks)} are of whole numbers, or of one "
            "number, as torch sends shapes and objects: none is a transfer",
            hint="leave out --program",
        )
    known = all(run.steps is not None for run in runs)
    steps = [(run.steps or 0) + run.open_step for run in runs]
    steps += [0 for record in records if record.has_unused_groups]
    step = min(steps, default=0)
    issued, started, ended = np.zeros((3, len(graph)), bool)
    for run in runs:
        run.mark(step - (run.steps or 0) if known else run.open_step, issued, started, ended)
    return MatchedProgram(
        ranks,
        step if known else None,
        issued,
        started,
        ended,
        tuple(rank in job.dumps for rank in ranks),
        left_out,
        tuple(run.turns for run in runs),
        {
            (record.dump.rank, number): at
            for record in records
            for number, (_, at) in record.turn.items()
        },
        tuple(r.dump.rank for r in records if not all(run.fits for run in r.runs)),
        next((record.loose for record in records if record.loose), ""),
    )


def _carriers(
    job: DistributedJob, ranks: tuple[int, ...]
) -> dict[tuple[int, int], list[RecordedGroup]]:
    """From whom to whom, the process groups that carry messages, the first to be used first."""
    found: dict[tuple[int, int], dict[RecordedGroup, None]] = defaultdict(dict)
    for rank in ranks:
        for op in job.dumps[rank].ops if rank in job.dumps else ():
            if op.is_message and not is_small_talk(op):
                ends = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
                found[ends][op.group] = None
    return defaultdict(list, {ends: [*groups] for ends, groups in found.items()})


@dataclass(frozen=True)
class TransferSequence:
    """The messages of a rank in one process group, as turns of its transfers there.

    `turns` are the positions of these transfers in a step.  `numbers` has the turn of each message,
    counted on from step to step, from the step of the first one on; `steps` is how many whole steps
    were before that one, None if nobody knows, and `before` how many turns of it.  What is recorded
    fits there alone, or else the counters say so.
    """

    turns: NDArray[np.int32]
    numbers: list[int]
    ops: list[RecordedOperation]
    steps: int | None = 0
    before: int = 0
    fits: bool = True

    def named(self) -> Iterator[tuple[int, int, int]]:
        """The number of each message, its step, if that is known, and its position."""
        for number, op in zip(self.numbers, self.ops, strict=True):
            step, turn = divmod(number, len(self.turns))
            yield op.number, step + (self.steps or 0), int(self.turns[turn])

    @property
    def open_step(self) -> int:
        """The step, from that of the first message on, of the first one that has not ended, or of
        the next."""
        open_ = [n for n, op in zip(self.numbers, self.ops, strict=True) if not op.ended]
        return min(open_, default=self.before + len(self.ops)) // len(self.turns)

    def mark(
        self,
        step: int,
        issued: NDArray[np.bool_],
        started: NDArray[np.bool_],
        ended: NDArray[np.bool_],
    ) -> None:
        """Note what is issued, what has started and what has ended of a step, counted from that of
        the first message on."""
        # Older than what is kept: all of a step that was before, or the beginning of the first.
        older = self.turns[: self.before if step == 0 else len(self.turns) * (step < 0)]
        issued[older] = started[older] = ended[older] = True
        for number, op in zip(self.numbers, self.ops, strict=True):
            of, turn = divmod(number, len(self.turns))
            if of == step:
                at = self.turns[turn]
                issued[at], started[at], ended[at] = True, op.state != "issued", op.ended


class _StepMismatch(Exception):
    """What is not as the Stream of a rank says, as a sentence."""


class _Direction(NamedTuple):
    """Which way a transfer goes, as its rank sees it."""

    kind: str
    peer: int


class _RecordedRank:
    """A rank of the program, whose transfers a dump has recorded.

    `turn` has the step and the position of each message, by its number in the dump.  `loose` says
    where the rank has another order than its Stream; then `runs` are all sends, and the receives
    from each rank.  Raises UsageError for messages that do not go so, either.
    """

    def __init__(
        self,
        graph: Graph,
        own: int,
        ranks: tuple[int, ...],
        dump: FlightRecorderDump,
        carriers: Mapping[tuple[int, int], list[RecordedGroup]],
    ) -> None:
        self.graph, self.ranks, self.dump, self.carriers = graph, ranks, dump, carriers
        self.unsure = False  # whether a way is in a process group that nobody can tell
        self.own = {rank: k for k, rank in enumerate(ranks)}
        index = graph.index
        lo, hi = graph.program.offsets[own : own + 2].tolist()
        at = lo + np.flatnonzero(np.isin(index.op[lo:hi], TRANSFERS))
        peers = index.rank[graph.partner[at]].tolist()
        self.ways = {
            k: _Direction("send" if op in SENDS else "recv", peer)
            for k, op, peer in zip(at.tolist(), index.op[at].tolist(), peers, strict=True)
        }
        messages = [op for op in dump.ops if op.is_message and op.peer in ranks]
        self.messages = [op for op in messages if not is_small_talk(op)]
        self.left_out = len(messages) - len(self.messages)
        self.loose = ""
        try:
            self.runs = self._runs()
        except _StepMismatch as other:
            self.loose = str(other)
            self.runs = self._runs()
        self.turn = {number: (step, k) for run in self.runs for number, step, k in run.named()}
        if self.loose:
            self._check_causes()
        if not dump.lost:
            self._check_steps()

    @property
    def has_unused_groups(self) -> bool:
        """Whether the rank has not used all of its process groups yet."""
        used = sum(len(run.turns) for run in self.runs)
        return not self.dump.lost and used < len(self.ways)

    def _runs(self) -> list[TransferSequence]:
        """The messages by process group, each as turns of the transfers that go there.

        Where a group each carries activations and gradients one way, the group that is used first
        is for what the Stream sends first.
        """
        ops: dict[tuple[RecordedGroup, _Direction | None], list[RecordedOperation]] = defaultdict(
            list
        )
        for op in self.messages:
            ops[op.group, self._line(self._way(op))].append(op)
        lanes: dict[_Direction, list[Lane]] = defaultdict(list)
        turns: dict[tuple[RecordedGroup, _Direction | None], list[int]] = defaultdict(list)
        for at, way in self.ways.items():
            known, lane = lanes[way], ROWS[self.graph.index.op[at]].lane
            if lane not in known:
                known.append(lane)
            groups = self._groups(way)
            which = known.index(lane) if len(groups) > 1 else 0
            if which < len(groups):
                turns[groups[which], self._line(way)].append(at)
        return [self._run(own, turns[key]) for key, own in ops.items()]

    def _way(self, op: RecordedOperation) -> _Direction:
        return _Direction(op.kind, self.own[op.peer])

    def _line(self, way: _Direction) -> _Direction | None:
        """In what line a message waits for its turn."""
        if not self.loose:
            return None
        return way if way.kind == "recv" else _Direction(way.kind, -1)

    def _groups(self, way: _Direction) -> list[RecordedGroup]:
        """The process groups that carry one way, the first to be used first.

        Where both ends have lost what went there, the only group that both are in.
        """
        rank, there = self.dump.rank, self.ranks[way.peer]
        groups = self.carriers[(rank, there) if way.kind == "send" else (there, rank)]
        if groups or not self.dump.lost:
            return groups
        used = {group for one in self.carriers.values() for group in one}
        both = [group for group in self.dump.groups if {rank, there} <= {*group.ranks}]
        both = [group for group in both if group in used or group.about != "default_pg"]
        self.unsure |= len(both) != 1
        return both[:1]

    def _check_steps(self) -> None:
        """Raise UsageError for a message of a step before which a rank has not issued all of the
        last one, by the program: the rank has other messages than that, or more of them."""
        many = len(self.ways)
        for number, op in enumerate(self.messages):
            step, at = self.turn[op.number]
            if step > number // many:
                instr = self.graph.index.locate(at)[2]
                raise self._of_another(
                    f"message {number + 1} of rank {self.dump.rank} would be {instr} of step "
                    f"{step}, counted from 0, before all {many} messages of the step before"
                )

    def _check_causes(self) -> None:
        """Raise UsageError for a receive that comes after a send of what was computed with it, or
        later, by the program."""
        index, many, needs = self.graph.index, len(self.graph), self.graph.needs
        computed = -1
        for number, op in enumerate(self.messages):
            if op.number not in self.turn:
                continue
            step, at = self.turn[op.number]
            if op.kind == "send":
                computed = max(computed, step * many + int(needs[:, at].max()))
                continue
            used = np.flatnonzero((needs == at).any(0))
            if used.size and step * many + int(used[0]) <= computed:
                named = f"message {number + 1} of rank {self.dump.rank} would be"
                raise self._of_another(f"{named} {index.locate(at)[2]}, too late for its use")

    def _run(self, ops: list[RecordedOperation], turns: list[int]) -> TransferSequence:
        positions, many, lost = np.array(turns, np.int32), len(turns), self.dump.lost
        if not lost:
            numbers = self._numbers(ops, turns, 0)
            if len(numbers) < len(ops):
                raise self._foreign(ops, turns, len(numbers))
            return TransferSequence(positions, numbers, ops)
        if ops[0].batch and ops[0].ended:
            # Of a batch a part may be lost, and nothing says in which order it was.
            ops = [op for op in ops if op.batch != ops[0].batch] or ops
        rank, larger = self.dump.rank, "a larger TORCH_FR_BUFFER_SIZE keeps more"
        if not ops[0].ended:
            raise UsageError(
                f"rank {rank} has lost the first {lost} entries of its buffer, and the oldest "
                f"message that is left in {ops[0].group} has not ended: where it stands may be "
                "lost, too",
                hint=f"leave out --program; {larger}",
            )
        fits = self._places(ops, turns)
        if not fits:
            raise self._foreign(ops, turns, None)
        if not self.loose and self._counts(ops[0].group):
            steps, place = divmod(ops[0].logical - 1 - ops[0].collectives, many)
            if place in fits:
                numbers = self._numbers(ops, turns, place)
                return TransferSequence(positions, numbers, ops, steps, place, len(fits) == 1)
        if len(fits) > 1:
            raise UsageError(
                f"rank {rank} has lost the first {lost} entries of its buffer, and what is left "
                f"fits {len(fits)} places in a step of {self.graph.program.name}",
                hint=larger,
            )
        return TransferSequence(positions, self._numbers(ops, turns, fits[0]), ops, None, fits[0])

    def _places(self, ops: list[RecordedOperation], turns: list[int]) -> list[int]:
        """The places in a step at which the first message may be, so that all others fit.

        Places from which transfers go the same ways are asked about once, as there may be many:
        all of a process group that carries one way.
        """
        ways = [self.ways[at] for at in turns]
        fits: dict[tuple[_Direction, ...], bool] = {}
        followed = [(*ways[place:], *ways[:place]) for place in range(len(turns))]
        for place, follow in enumerate(followed):
            if follow not in fits:
                fits[follow] = len(self._numbers(ops, turns, place)) == len(ops)
        return [place for place, follow in enumerate(followed) if fits[follow]]

    @cached_property
    def _by_group(self) -> dict[RecordedGroup, list[RecordedOperation]]:
        found: dict[RecordedGroup, list[RecordedOperation]] = defaultdict(list)
        for op in self.dump.ops:
            found[op.group].append(op)
        return found

    def _counts(self, group: RecordedGroup) -> bool:
        """Whether the counters of a process group say how many transfers were before.

        They do if each message and each collective counts as one, and all messages are transfers.
        """
        ops = self._by_group[group]
        steady = all(
            b.logical == a.logical + 1 and b.collectives == a.collectives + (not b.is_message)
            for a, b in pairwise(ops)
        )
        talk = any(is_small_talk(op) for op in ops if op.is_message)
        return not self.unsure and steady and not talk and ops[0].logical > ops[0].collectives

    def _numbers(self, ops: list[RecordedOperation], turns: list[int], place: int) -> list[int]:
        """Which turn each message is, if the first of all is at a place in the step; they end
        before the first one that is none.

        What is issued as one may be recorded in any order.
        """
        numbers: list[int] = []
        free: dict[_Direction, deque[int]] = defaultdict(deque)
        for at, op in enumerate(ops):
            if at == 0 or not op.batch or op.batch != ops[at - 1].batch:
                free.clear()
                end = at + 1
                while op.batch and end < len(ops) and ops[end].batch == op.batch:
                    end += 1
                for turn in range(place + at, place + end) if turns else ():
                    free[self.ways[turns[turn % len(turns)]]].append(turn)
            if not free[self._way(op)]:
                break
            numbers.append(free[self._way(op)].popleft())
        return numbers

    def _foreign(
        self, ops: list[RecordedOperation], turns: list[int], at: int | None
    ) -> UsageError | _StepMismatch:
        rank = self.dump.rank
        if at is None:
            fact = f"what rank {rank} has recorded in {ops[0].group} is nowhere in a step"
        elif turns:
            instr = self.graph.index.locate(turns[at % len(turns)])[2]
            fact = f"message {at + 1} of rank {rank} in {ops[at].group} is a {ops[at]}, not {instr}"
        else:
            fact = f"rank {rank} has a {ops[at]} in {ops[at].group}"
        return self._of_another(fact) if self.loose else _StepMismatch(fact)

    def _of_another(self, fact: str) -> UsageError:
        return UsageError(
            f"the dumps are not of {self.graph.program.name}: {fact}",
            hint="the program is to have the transfers that ran; "
            'torch writes its own by schedule._dump_csv(FILE, "compute_comms")',
            fields=["program"],
        )
