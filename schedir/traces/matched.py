"""Matched: the messages that ranks have recorded, as the transfers of a program.

The messages of a rank in a process group are those transfers of its Stream that go that way, in
the order of the Stream, over and over, a step after the other.  So the n-th message of all is known
from n alone; the rest of the recording must agree, or it is not of this program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.errors import UsageError
from schedir.ir.ops import ROWS, SENDS, TRANSFERS, Lane
from schedir.ir.program import Program
from schedir.traces.flight_recorder import Dump, Group, Op
from schedir.traces.standing import Job

# Of these are shapes and objects, and no activation.
_WHOLE: Final = {"int", "long", "byte", "char", "short", "bool"}


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
    `left_out` messages are of whole numbers, and so shapes or objects, and no transfers.  `apart`
    has, for each rank and process group, the transfers that it carries.
    """

    ranks: tuple[int, ...]
    step: int | None
    issued: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    dumped: tuple[bool, ...]
    left_out: int
    apart: tuple[NDArray[np.int32], ...]


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
    left_out = 0
    for own, rank in enumerate(ranks):
        if (dump := job.dumps.get(rank)) is not None:
            messages = [op for op in dump.ops if op.is_message and op.peer in ranks]
            kept = [op for op in messages if not {*op.dtypes} & _WHOLE]
            left_out += len(messages) - len(kept)
            whole = len(kept) == len(messages)
            runs[own] = _Rank(graph, own, ranks, dump, whole).runs(kept)
    known = all(run.first is not None for of in runs.values() for run in of)
    step = min((run.step(known) for of in runs.values() for run in of), default=0)
    issued, ended = np.zeros((2, len(program)), bool)
    for of in runs.values():
        for run in of:
            run.mark(step, known, issued, ended)
    return Matched(
        ranks,
        step if known else None,
        issued,
        ended,
        tuple(rank in job.dumps for rank in ranks),
        left_out,
        tuple(run.turns for of in runs.values() for run in of),
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
    """A rank of the program, whose transfers a dump has recorded.

    `whole` says that the dump has no other messages, so that its counts are those of transfers.
    """

    def __init__(
        self, graph: Graph, own: int, ranks: tuple[int, ...], dump: Dump, whole: bool
    ) -> None:
        self.graph, self.dump, self.whole = graph, dump, whole
        self.own = {rank: k for k, rank in enumerate(ranks)}
        index = graph.index
        lo, hi = graph.program.offsets[own : own + 2].tolist()
        at = lo + np.flatnonzero(np.isin(index.op[lo:hi], TRANSFERS))
        peers = index.rank[graph.partner[at]].tolist()
        self.ways = {
            k: _Way("send" if ROWS[op].op in SENDS else "recv", peer, ROWS[op].lane)
            for k, op, peer in zip(at.tolist(), index.op[at].tolist(), peers, strict=True)
        }

    def runs(self, messages: list[Op]) -> list[_Run]:
        """The messages by process group, each as turns of the transfers that go there.

        Where a group each carries activations and gradients one way, the group that is used first
        is for what the Stream sends first.
        """
        carries: dict[tuple[str, int], list[Group]] = defaultdict(list)
        ops: dict[Group, list[Op]] = defaultdict(list)
        for op in messages:
            ops[op.group].append(op)
            if op.group not in (groups := carries[op.kind, self.own[op.peer]]):
                groups.append(op.group)
        lanes: dict[tuple[str, int], list[Lane]] = defaultdict(list)
        turns: dict[Group, list[int]] = defaultdict(list)
        for at, (kind, peer, lane) in self.ways.items():
            if lane not in (known := lanes[kind, peer]):
                known.append(lane)
            groups = carries[kind, peer]
            which = known.index(lane) if len(groups) > 1 else 0
            if which < len(groups):
                turns[groups[which]].append(at)
        return [self._run(own, turns[group]) for group, own in ops.items()]

    def _run(self, ops: list[Op], turns: list[int]) -> _Run:
        positions, many = np.array(turns, np.int32), len(turns)
        if self.dump.lost and ops[0].batch and ops[0].ended:
            # Of a batch a part may be lost, and nothing says in which order it was.
            ops = [op for op in ops if op.batch != ops[0].batch] or ops
        first = None
        if not self.dump.lost:
            first = 0
        elif self.whole and ops[0].logical > ops[0].collectives:
            first = ops[0].logical - 1 - ops[0].collectives
        if first is not None:
            order, wrong = self._order(ops, turns, first)
            if wrong is None:
                return _Run(positions, order, ops, first, first % many)
            if not self.dump.lost:
                raise self._foreign(ops, turns, wrong)
        fits = {
            k: order
            for k in range(many)
            for order, wrong in [self._order(ops, turns, k)]
            if wrong is None
        }
        if not fits:
            raise self._foreign(ops, turns, None)
        if len(fits) > 1:
            name = self.graph.program.name
            raise UsageError(
                f"rank {self.dump.rank} has lost the first {self.dump.lost} entries of its buffer, "
                f"and what is left fits {len(fits)} places in a step of {name}",
                hint="a larger TORCH_FR_BUFFER_SIZE keeps more",
            )
        ((phase, order),) = fits.items()
        return _Run(positions, order, ops, None, phase)

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

    def _foreign(self, ops: list[Op], turns: list[int], at: int | None) -> UsageError:
        name, rank = self.graph.program.name, self.dump.rank
        if at is None:
            fact = f"what rank {rank} has recorded in {ops[0].group} is nowhere in a step"
        elif turns:
            instr = self.graph.index.locate(turns[at % len(turns)])[2]
            fact = f"message {at + 1} of rank {rank} in {ops[at].group} is a {ops[at]}, not {instr}"
        else:
            fact = f"rank {rank} has a {ops[at]} in {ops[at].group}"
        return UsageError(
            f"the dumps are not of {name}: {fact}",
            hint="the program is to have the transfers that ran; "
            'torch writes its own by schedule._dump_csv(FILE, "compute_comms")',
            fields=["program"],
        )
