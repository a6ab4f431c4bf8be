"""Matched: the messages that ranks have recorded, as the transfers of a program.

The messages of a rank in a process group are those transfers of its Stream that go that way, in
the order of the Stream, over and over, a step after the other.  So the n-th message of all is known
from n alone; the rest of the recording must agree, or it is not of this program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.errors import UsageError
from schedir.ir.ops import ROWS, SENDS, TRANSFERS, Lane
from schedir.ir.program import Program
from schedir.traces.flight_recorder import Dump, Group, Op
from schedir.traces.standing import Job

# Of these are shapes, votes and objects, and no activation.
_WHOLE: Final = {"int", "long", "byte", "char", "short", "bool"}


def _is_small_talk(op: Op) -> bool:
    """Whether a message is no activation: of whole numbers, or of one number, as torch sends before
    the first step to open its communicators."""
    return bool({*op.dtypes} & _WHOLE) or sum(map(prod, op.sizes)) <= 1


class _OtherTurn(Exception):
    """What is not as the Stream of a rank says, as a sentence."""


class _Way(NamedTuple):
    """Which way a transfer goes, as its rank sees it."""

    kind: str
    peer: int
    lane: Lane


@dataclass(frozen=True)
class Matched:
    """A copy of the program: which rank of the job runs which of its ranks, and how far each is.

    `step` is the step that all this is of, from 0, or None where the recordings cannot say which.
    `issued` and `ended` have an entry per instruction, by position, and are true of transfers.
    `left_out` messages are no transfers, but shapes, objects, or one number.  `apart` has, for each
    rank and process group, the transfers that it carries.  `names` has the position of each
    message, by the rank of the job and its number there.

    `loose` is not empty where a rank has another order than its Stream, and tells where.  Then
    its sends, and what it receives from each rank, go as the program says, and are named by that.
    """

    ranks: tuple[int, ...]
    step: int | None
    issued: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    dumped: tuple[bool, ...]
    left_out: int
    apart: tuple[NDArray[np.int32], ...]
    names: Mapping[tuple[int, int], int]
    loose: str = ""


def match(job: Job, program: Program) -> list[Matched]:
    """Each copy of the program that the job runs, as tensor- and data-parallel ranks have them.

    Raises UsageError where the recordings cannot be of this program.
    """
    graph = Graph.of(program)
    return [_match(job, graph, ranks) for ranks in _pipelines(job, program)]


def circles(job: Job) -> list[tuple[int, ...]]:
    """The ranks that exchange messages with each other, directly or not, ascending."""
    circle: dict[int, set[int]] = {}
    for rank, dump in job.dumps.items():
        for peer in {op.peer for op in dump.ops if op.is_message}:
            both = circle.get(rank, {rank}) | circle.get(peer, {peer})
            circle.update(dict.fromkeys(both, both))
    return sorted({tuple(sorted(one)) for one in circle.values()})


def _pipelines(job: Job, program: Program) -> list[tuple[int, ...]]:
    """The ranks that exchange messages, a copy each, in the order of the program's ranks.

    That is the order of a process group of just these ranks, if their messages go in one.
    """
    many, found = program.plan.ranks, circles(job)
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


def _match(job: Job, graph: Graph, ranks: tuple[int, ...]) -> Matched:
    program = graph.program
    runs: dict[int, list[_Run]] = {}
    left_out, loose = 0, ""
    steps: list[int] = []
    for own, rank in enumerate(ranks):
        if (dump := job.dumps.get(rank)) is not None:
            messages = [op for op in dump.ops if op.is_message and op.peer in ranks]
            kept = [op for op in messages if not _is_small_talk(op)]
            left_out += len(messages) - len(kept)
            of = _Rank(graph, own, ranks, dump)
            try:
                runs[own] = of.runs(kept, whole=True)
            except _OtherTurn as other:
                loose = loose or str(other)
                runs[own] = of.runs(kept, whole=False)
                of.check_causes(kept, runs[own])
            if not dump.lost and sum(len(run.turns) for run in runs[own]) < len(of.ways):
                steps.append(0)  # in a process group that it has not used yet
    known = all(run.first is not None for own in runs.values() for run in own)
    every = [run for own in runs.values() for run in own]
    step = min([*steps, *(run.step(known) for run in every)], default=0)
    names = {
        (ranks[own], number): at
        for own, each in runs.items()
        for run in each
        for number, _, at in run.named()
    }
    issued, ended = np.zeros((2, len(program)), bool)
    for run in every:
        run.mark(step, known, issued, ended)
    return Matched(
        ranks,
        step if known else None,
        issued,
        ended,
        tuple(rank in job.dumps for rank in ranks),
        left_out,
        tuple(run.turns for run in every),
        names,
        loose,
    )


@dataclass(frozen=True)
class _Run:
    """The messages of a rank in one process group, as turns of its transfers there.

    `turns` are the positions of these transfers in a step, `order` which of them each message is,
    and `first` how many came before the first that is recorded, None if nobody knows: then `phase`
    is where in a step it was.
    """

    turns: NDArray[np.int32]
    order: list[int]
    ops: list[Op]
    first: int | None
    phase: int

    def _begin(self, known: bool) -> int:
        """The number of the first message; counted from a step that is called 0, if not known."""
        if known and self.first is not None:
            return self.first
        return self.phase - self._next(self.phase) // len(self.turns) * len(self.turns)

    def named(self) -> Iterator[tuple[int, int, int]]:
        """The number of each message, its step, if that is known, and its position."""
        for at, op in zip(self.order, self.ops, strict=True):
            step, turn = divmod((self.first or self.phase) + at, len(self.turns))
            yield op.number, step, int(self.turns[turn])

    def _next(self, begin: int) -> int:
        """The number of the first message that has not ended."""
        open_ = [at for at, op in zip(self.order, self.ops, strict=True) if not op.ended]
        at = min(open_, default=len(self.ops))
        return begin + at

    def step(self, known: bool) -> int:
        """The step of the first message that has not ended, or of the next."""
        return self._next(self._begin(known)) // len(self.turns)

    def mark(
        self, step: int, known: bool, issued: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> None:
        """Note what is issued and what has ended of a step."""
        begin, many = self._begin(known), len(self.turns)
        before = min(max(begin - step * many, 0), many)  # older than what is kept
        issued[self.turns[:before]] = ended[self.turns[:before]] = True
        for at, op in zip(self.order, self.ops, strict=True):
            turn, place = divmod(begin + at, many)
            if turn == step:
                issued[self.turns[place]] = True
                ended[self.turns[place]] = op.ended


class _Rank:
    """A rank of the program, whose transfers a dump has recorded."""

    def __init__(self, graph: Graph, own: int, ranks: tuple[int, ...], dump: Dump) -> None:
        self.graph, self.dump = graph, dump
        self.own = {rank: k for k, rank in enumerate(ranks)}
        index = graph.index
        lo, hi = graph.program.offsets[own : own + 2].tolist()
        at = lo + np.flatnonzero(np.isin(index.op[lo:hi], TRANSFERS))
        peers = index.rank[graph.partner[at]].tolist()
        self.ways = {
            k: _Way("send" if ROWS[op].op in SENDS else "recv", peer, ROWS[op].lane)
            for k, op, peer in zip(at.tolist(), index.op[at].tolist(), peers, strict=True)
        }

    def runs(self, messages: list[Op], whole: bool) -> list[_Run]:
        """The messages by process group, each as turns of the transfers that go there.

        If not `whole`, these are all sends, and the receives from each rank.  Raises UsageError for
        messages that do not go so; `_OtherTurn` if they might, taken apart.

        Where a group each carries activations and gradients one way, the group that is used first
        is for what the Stream sends first.
        """
        carries: dict[tuple[str, int], list[Group]] = defaultdict(list)
        ops: dict[tuple[Group, str, int], list[Op]] = defaultdict(list)
        for op in messages:
            ops[op.group, *self._line(op.kind, self.own[op.peer], whole)].append(op)
            if op.group not in (groups := carries[op.kind, self.own[op.peer]]):
                groups.append(op.group)
        lanes: dict[tuple[str, int], list[Lane]] = defaultdict(list)
        turns: dict[tuple[Group, str, int], list[int]] = defaultdict(list)
        for at, (kind, peer, lane) in self.ways.items():
            if lane not in (known := lanes[kind, peer]):
                known.append(lane)
            groups = carries[kind, peer]
            which = known.index(lane) if len(groups) > 1 else 0
            if which < len(groups):
                turns[groups[which], *self._line(kind, peer, whole)].append(at)
        return [self._run(own, turns[key], whole) for key, own in ops.items()]

    @staticmethod
    def _line(kind: str, peer: int, whole: bool) -> tuple[str, int]:
        """In what line a message waits for its turn."""
        return ("", -1) if whole else (kind, peer if kind == "recv" else -1)

    def check_causes(self, messages: list[Op], runs: list[_Run]) -> None:
        """Raise UsageError for a receive that comes after a send of what was computed with it, or
        later, by the program."""
        index, many = self.graph.index, len(self.graph)
        needs = self.graph.needs
        turn = {number: (step, at) for run in runs for number, step, at in run.named()}
        computed = -1
        for number, op in enumerate(messages):
            if op.number not in turn:
                continue
            step, at = turn[op.number]
            if op.kind == "send":
                computed = max(computed, step * many + int(needs[:, at].max()))
                continue
            used = np.flatnonzero((needs == at).any(0))
            if used.size and step * many + int(used[0]) <= computed:
                named = f"message {number + 1} of rank {self.dump.rank} would be"
                raise self._of_another(f"{named} {index.locate(at)[2]}, too late for its use")

    def _run(self, ops: list[Op], turns: list[int], whole: bool) -> _Run:
        positions, many = np.array(turns, np.int32), len(turns)
        if self.dump.lost and ops[0].batch and ops[0].ended:
            # Of a batch a part may be lost, and nothing says in which order it was.
            ops = [op for op in ops if op.batch != ops[0].batch] or ops
        first = None
        if not self.dump.lost:
            first = 0
        elif whole and self._counts(ops[0].group):
            first = ops[0].logical - 1 - ops[0].collectives
        if first is not None:
            order, wrong = self._order(ops, turns, first)
            if wrong is None:
                return _Run(positions, order, ops, first, first % many)
            if not self.dump.lost:
                raise self._foreign(ops, turns, wrong, whole)
        fits = {
            k: order
            for k in range(many)
            for order, wrong in [self._order(ops, turns, k)]
            if wrong is None
        }
        if not fits:
            raise self._foreign(ops, turns, None, whole)
        if len(fits) > 1:
            name = self.graph.program.name
            raise UsageError(
                f"rank {self.dump.rank} has lost the first {self.dump.lost} entries of its buffer, "
                f"and what is left fits {len(fits)} places in a step of {name}",
                hint="a larger TORCH_FR_BUFFER_SIZE keeps more",
            )
        ((phase, order),) = fits.items()
        return _Run(positions, order, ops, None, phase)

    def _counts(self, group: Group) -> bool:
        """Whether the counters of a process group say how many transfers were before.

        They do if each message and each collective counts as one, and all messages are transfers.
        """
        ops = [op for op in self.dump.ops if op.group == group]
        steady = all(
            b.logical == a.logical + 1 and b.collectives == a.collectives + (not b.is_message)
            for a, b in pairwise(ops)
        )
        talk = any(_is_small_talk(op) for op in ops if op.is_message)
        return steady and not talk and ops[0].logical > ops[0].collectives

    def _order(self, ops: list[Op], turns: list[int], first: int) -> tuple[list[int], int | None]:
        """Which turn each message is, if the first is the given one, and the first that is none.

        What is issued as one may be recorded in any order.
        """
        order: list[int] = []
        at = 0
        while at < len(ops):
            end = at + 1
            while end < len(ops) and ops[at].batch and ops[end].batch == ops[at].batch:
                end += 1
            free = [*range(at, end)]
            for k in range(at, end):
                turn = next((t for t in free if self._fits(ops[k], turns, first + t)), None)
                if turn is None:
                    return order, k
                free.remove(turn)
                order.append(turn)
            at = end
        return order, None

    def _fits(self, op: Op, turns: list[int], turn: int) -> bool:
        return bool(turns) and self.ways[turns[turn % len(turns)]][:2] == (
            op.kind,
            self.own[op.peer],
        )

    def _foreign(
        self, ops: list[Op], turns: list[int], at: int | None, whole: bool
    ) -> UsageError | _OtherTurn:
        rank = self.dump.rank
        if at is None:
            fact = f"what rank {rank} has recorded in {ops[0].group} is nowhere in a step"
        elif turns:
            instr = self.graph.index.locate(turns[at % len(turns)])[2]
            fact = f"message {at + 1} of rank {rank} in {ops[at].group} is a {ops[at]}, not {instr}"
        else:
            fact = f"rank {rank} has a {ops[at]} in {ops[at].group}"
        return _OtherTurn(fact) if whole else self._of_another(fact)

    def _of_another(self, fact: str) -> UsageError:
        return UsageError(
            f"the dumps are not of {self.graph.program.name}: {fact}",
            hint="the program is to have the transfers that ran; "
            'torch writes its own by schedule._dump_csv(FILE, "compute_comms")',
            fields=["program"],
        )
