"""Turns: the messages that a rank has recorded, as turns of the transfers of its Stream."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.dumps.flight_recorder import Dump, Group, Op
from schedir.errors import UsageError
from schedir.ir.ops import ROWS, SENDS, TRANSFERS, Lane

# Of these are shapes, votes and objects, and no activation.
_WHOLE: Final = {"int", "long", "byte", "char", "short", "bool"}


def is_small_talk(op: Op) -> bool:
    """Whether a message is no activation: of whole numbers, or of one number, as torch sends before
    the first step to open its communicators."""
    return bool({*op.dtypes} & _WHOLE) or sum(map(prod, op.sizes)) <= 1


class OtherTurn(Exception):
    """What is not as the Stream of a rank says, as a sentence."""


class _Way(NamedTuple):
    """Which way a transfer goes, as its rank sees it."""

    kind: str
    peer: int
    lane: Lane


@dataclass(frozen=True)
class Run:
    """The messages of a rank in one process group, as turns of its transfers there.

    `turns` are the positions of these transfers in a step, `order` which of them each message is,
    and `first` how many came before the first that is recorded, None if nobody knows.  `phase` is
    where in a step it was; what is recorded fits there alone, or else the counters say so.
    """

    turns: NDArray[np.int32]
    order: list[int]
    ops: list[Op]
    first: int | None
    phase: int
    fits: bool = True

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
        self,
        step: int,
        known: bool,
        issued: NDArray[np.bool_],
        started: NDArray[np.bool_],
        ended: NDArray[np.bool_],
    ) -> None:
        """Note what is issued, what has started and what has ended of a step."""
        begin, many = self._begin(known), len(self.turns)
        before = min(max(begin - step * many, 0), many)  # older than what is kept
        older = self.turns[:before]
        issued[older] = started[older] = ended[older] = True
        for at, op in zip(self.order, self.ops, strict=True):
            turn, place = divmod(begin + at, many)
            if turn == step:
                issued[self.turns[place]] = True
                started[self.turns[place]] = op.state != "issued"
                ended[self.turns[place]] = op.ended


class Recorded:
    """A rank of the program, whose transfers a dump has recorded."""

    def __init__(
        self,
        graph: Graph,
        own: int,
        ranks: tuple[int, ...],
        dump: Dump,
        carriers: dict[tuple[int, int], list[Group]],
    ) -> None:
        self.graph, self.ranks, self.dump, self.carriers = graph, ranks, dump, carriers
        self.unsure = False  # whether a way is in a process group that nobody can tell
        self.own = {rank: k for k, rank in enumerate(ranks)}
        index = graph.index
        lo, hi = graph.program.offsets[own : own + 2].tolist()
        at = lo + np.flatnonzero(np.isin(index.op[lo:hi], TRANSFERS))
        peers = index.rank[graph.partner[at]].tolist()
        self.ways = {
            k: _Way("send" if ROWS[op].op in SENDS else "recv", peer, ROWS[op].lane)
            for k, op, peer in zip(at.tolist(), index.op[at].tolist(), peers, strict=True)
        }

    def runs(self, messages: list[Op], whole: bool) -> list[Run]:
        """The messages by process group, each as turns of the transfers that go there.

        If not `whole`, these are all sends, and the receives from each rank.  Raises UsageError for
        messages that do not go so; `OtherTurn` if they might, taken apart.

        Where a group each carries activations and gradients one way, the group that is used first
        is for what the Stream sends first.
        """
        ops: dict[tuple[Group, str, int], list[Op]] = defaultdict(list)
        for op in messages:
            ops[op.group, *self._line(op.kind, self.own[op.peer], whole)].append(op)
        lanes: dict[tuple[str, int], list[Lane]] = defaultdict(list)
        turns: dict[tuple[Group, str, int], list[int]] = defaultdict(list)
        for at, (kind, peer, lane) in self.ways.items():
            if lane not in (known := lanes[kind, peer]):
                known.append(lane)
            groups = self._groups(kind, peer)
            which = known.index(lane) if len(groups) > 1 else 0
            if which < len(groups):
                turns[groups[which], *self._line(kind, peer, whole)].append(at)
        return [self._run(own, turns[key], whole) for key, own in ops.items()]

    def _groups(self, kind: str, peer: int) -> list[Group]:
        """The process groups that carry one way, the first to be used first.

        Where both ends have lost what went there, the only group that both are in.
        """
        rank, there = self.dump.rank, self.ranks[peer]
        groups = self.carriers[(rank, there) if kind == "send" else (there, rank)]
        if groups or not self.dump.lost:
            return groups
        used = {group for one in self.carriers.values() for group in one}
        both = [group for group in self.dump.groups if {rank, there} <= {*group.ranks}]
        both = [group for group in both if group in used or group.about != "default_pg"]
        self.unsure |= len(both) != 1
        return both[:1]

    @staticmethod
    def _line(kind: str, peer: int, whole: bool) -> tuple[str, int]:
        """In what line a message waits for its turn."""
        return ("", -1) if whole else (kind, peer if kind == "recv" else -1)

    def check_steps(self, messages: list[Op], runs: list[Run]) -> None:
        """Raise UsageError for a message of a step before which a rank has not issued all of the
        last one, by the program: the rank has other messages than that, or more of them."""
        if self.dump.lost:
            return
        many = len(self.ways)
        turn = {number: (step, at) for run in runs for number, step, at in run.named()}
        for number, op in enumerate(messages):
            step, at = turn[op.number]
            if step > number // many:
                instr = self.graph.index.locate(at)[2]
                raise self._of_another(
                    f"message {number + 1} of rank {self.dump.rank} would be {instr} of step "
                    f"{step}, counted from 0, before all {many} messages of the step before"
                )

    def check_causes(self, messages: list[Op], runs: list[Run]) -> None:
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

    def _run(self, ops: list[Op], turns: list[int], whole: bool) -> Run:
        positions, many = np.array(turns, np.int32), len(turns)
        if self.dump.lost and ops[0].batch and ops[0].ended:
            # Of a batch a part may be lost, and nothing says in which order it was.
            ops = [op for op in ops if op.batch != ops[0].batch] or ops
        if not self.dump.lost:
            order, wrong = self._order(ops, turns, 0)
            if wrong is not None:
                raise self._foreign(ops, turns, wrong, whole)
            return Run(positions, order, ops, 0, 0)
        if not ops[0].ended:
            raise UsageError(
                f"rank {self.dump.rank} has lost the first {self.dump.lost} entries of its buffer, "
                f"and the oldest message that is left in {ops[0].group} has not ended: where it "
                "stands may be lost, too",
                hint="leave out --program; a larger TORCH_FR_BUFFER_SIZE keeps more",
            )
        fits = self._places(ops, turns)
        if not fits:
            raise self._foreign(ops, turns, None, whole)
        first = None
        if whole and self._counts(ops[0].group):
            first = ops[0].logical - 1 - ops[0].collectives
        if first is not None and first % many in fits:
            order, _ = self._order(ops, turns, first % many)
            return Run(positions, order, ops, first, first % many, len(fits) == 1)
        if len(fits) > 1:
            name = self.graph.program.name
            raise UsageError(
                f"rank {self.dump.rank} has lost the first {self.dump.lost} entries of its buffer, "
                f"and what is left fits {len(fits)} places in a step of {name}",
                hint="a larger TORCH_FR_BUFFER_SIZE keeps more",
            )
        (phase,) = fits
        order, _ = self._order(ops, turns, phase)
        return Run(positions, order, ops, None, phase)

    @cached_property
    def _by_group(self) -> dict[Group, list[Op]]:
        found: dict[Group, list[Op]] = defaultdict(list)
        for op in self.dump.ops:
            found[op.group].append(op)
        return found

    def _counts(self, group: Group) -> bool:
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

    def _places(self, ops: list[Op], turns: list[int]) -> list[int]:
        """The places in a step at which the first message may be, so that all others fit.

        All places are looked at together, message by message.  After a whole step what comes again
        fits where it did before, so that the time is that of a step squared, at most.
        """
        many = len(turns)
        ways = {way: k for k, way in enumerate(dict.fromkeys(self.ways[at][:2] for at in turns))}
        theirs = np.array([ways[self.ways[at][:2]] for at in turns], np.int64)
        own = [ways.get((op.kind, self.own[op.peer]), -1) for op in ops]
        twice = np.tile(theirs, 2)
        before = [np.append(0, np.cumsum(twice == way)) for way in ways.values()]
        left, single = np.arange(many), 0
        for at, end in self._batches(ops):
            if end - at > many or -1 in own[at:end]:
                return []
            if end - at > 1:  # what is issued as one may be recorded in any order
                begin, single = (left + at) % many, end
                for way, sums in enumerate(before):
                    same = sums[begin + end - at] - sums[begin] == own[at:end].count(way)
                    begin, left = begin[same], left[same]
            elif at - many < single or own[at] != own[at - many]:
                left = left[theirs[(left + at) % many] == own[at]]
            if not left.size:
                return []
        return [int(place) for place in left]

    @staticmethod
    def _batches(ops: list[Op]) -> Iterator[tuple[int, int]]:
        """Where each batch begins and ends; one alone is a batch, too."""
        begin = 0
        for at in range(1, len(ops) + 1):
            if at == len(ops) or not ops[at].batch or ops[at].batch != ops[begin].batch:
                yield begin, at
                begin = at

    def _order(self, ops: list[Op], turns: list[int], first: int) -> tuple[list[int], int | None]:
        """Which turn each message is, if the first is the given one, and the first that is none.

        What is issued as one may be recorded in any order.
        """
        order: list[int] = []
        for at, end in self._batches(ops):
            free: dict[tuple[str, int], deque[int]] = defaultdict(deque)
            for turn in range(at, end):
                if turns:
                    free[self.ways[turns[(first + turn) % len(turns)]][:2]].append(turn)
            for k in range(at, end):
                way = (ops[k].kind, self.own[ops[k].peer])
                if not free[way]:
                    return order, k
                order.append(free[way].popleft())
        return order, None

    def _foreign(
        self, ops: list[Op], turns: list[int], at: int | None, whole: bool
    ) -> UsageError | OtherTurn:
        rank = self.dump.rank
        if at is None:
            fact = f"what rank {rank} has recorded in {ops[0].group} is nowhere in a step"
        elif turns:
            instr = self.graph.index.locate(turns[at % len(turns)])[2]
            fact = f"message {at + 1} of rank {rank} in {ops[at].group} is a {ops[at]}, not {instr}"
        else:
            fact = f"rank {rank} has a {ops[at]} in {ops[at].group}"
        return OtherTurn(fact) if whole else self._of_another(fact)

    def _of_another(self, fact: str) -> UsageError:
        return UsageError(
            f"the dumps are not of {self.graph.program.name}: {fact}",
            hint="the program is to have the transfers that ran; "
            'torch writes its own by schedule._dump_csv(FILE, "compute_comms")',
            fields=["program"],
        )
