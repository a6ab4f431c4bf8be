"""Find the instruction that each rank has reached, what it waits for, and which rank is late.

Transfers are seen, what is computed is not.  What has surely ended is all that an ended transfer
needs; what may have ended is what nothing unfinished keeps from it.  A rank stands at the first of
its instructions that is kept from starting, or that its host has not come to.  From there one goes
to what keeps it, on whatever rank that is, until one comes to a rank that nothing keeps, the cause,
or around a cycle, a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import SchedirError, UsageError
from schedir.hang_diagnosis.program_matching import MatchedProgram
from schedir.ir.instruction_index import NONE
from schedir.ir.isa.instructions import RECEIVES, SENDS, TRANSFERS
from schedir.ir.program import Program
from schedir.verify.check import check, complete

# Unless one is said: the usual one, and where the recordings contradict it, laxer ones.
_USUAL: Final = ("per_device", *reversed(MODELS[: MODELS.index("per_device")]))


class ChainEnd(Enum):
    """What a chain of waits ends at.

    A rank whose host has not come to a transfer; one of which there is no dump; sides of a message
    that is issued on both, whose ranks may still compute what they wait for; a message that is
    issued on both sides, and that nothing keeps from passing; a side whose other side has ended.
    """

    LATE = 0
    SILENT = 1
    BUSY = 2
    STUCK = 3
    ENDED = 4


class RankPosition(NamedTuple):
    """Where a rank of the program stands.

    `at` is the position of what it waits at, or of the next transfer that it has not issued where
    it is `late`; None if all its transfers have ended.  `between` are the instructions since its
    last transfer that is issued, which it may be computing.
    """

    rank: int
    at: int | None
    late: bool
    between: tuple[int, int]


class PendingTransfer(NamedTuple):
    """A transfer that has not ended, and what it needs, which has not ended either."""

    at: int
    needs: int


class StallReason(NamedTuple):
    """The end of a chain: transfers that nothing keeps, and that have not ended."""

    kind: ChainEnd
    at: tuple[int, ...]


class PositionedRanks:
    """The ranks of a copy of a program, placed by what has been matched."""

    def __init__(self, graph: Graph, matched: MatchedProgram) -> None:
        self.graph, self.matched = graph, matched
        self.rank = graph.index.rank
        self.transfer = graph.index.is_op(TRANSFERS)
        self.silent: NDArray[np.bool_] = ~np.array(matched.dumped)[self.rank]
        # Of ranks without a dump, the transfers have ended whose other side has.
        there = self.silent & (graph.partner != NONE)
        self.ended: NDArray[np.bool_] = matched.ended | (there & matched.ended[graph.partner])

    # ------------------------------------------------------------ what has ended, or may have

    @cached_property
    def _joined(self) -> list[bool]:
        return [*self.graph.index.joined.tolist(), False]

    def _group(self, at: int) -> list[int]:
        """What is issued as one with an instruction, itself among it."""
        first, end = at, at + 1
        while self._joined[first]:
            first -= 1
        while self._joined[end]:
            end += 1
        return [*range(first, end)]

    @cached_property
    def _meets(self) -> dict[int, list[int]]:
        """The members of the collective that an instruction is of, itself among them."""
        groups = [members.tolist() for members in self.graph.collective_groups]
        return {one: members for members in groups for one in members}

    def _before(self, at: int) -> set[int]:
        """What an instruction waits for on its own rank; a group for what any member does, and a
        collective for what all do, wherever they are."""
        found: set[int] = set()
        for member in self._meets.get(at, [at]):
            group = self._group(member)
            before = [*self.graph.waits[:, group].flat, *self.graph.queue_predecessor[group]]
            found |= {int(one) for one in before} - {*group}
        return found - {NONE, *self._meets.get(at, ())}

    def _kept(self, at: int) -> list[int]:
        """Of what an instruction waits for on its own rank, what cannot have ended."""
        return sorted(one for one in self._before(at) if not self.may[one])

    @cached_property
    def sure(self) -> NDArray[np.bool_]:
        """What has surely ended: all that stands before what has, and who sent what has come."""
        sure = self.ended.copy()
        left = np.flatnonzero(sure).tolist()
        receives = self.graph.index.is_op(RECEIVES)
        while left:
            at = left.pop()
            before = {*self.graph.needs[:, at].tolist(), *self._meets.get(at, ())}
            before |= {int(self.graph.queue_predecessor[at])} - {*self._group(at)}
            if receives[at]:
                before.update(self.graph.needs[:, self._other(at)].tolist())
            fresh = [one for one in before - {NONE} if not sure[one]]
            sure[fresh] = True
            left += fresh
        return sure

    @cached_property
    def may(self) -> NDArray[np.bool_]:
        """What may have ended: transfers that have, and all else that nothing else keeps."""
        may = self.sure & (~self.transfer | self.silent) | self.ended
        open_, found = np.flatnonzero(~self.transfer & ~may).tolist(), True
        before = {at: self._before(at) for at in open_}
        while found:
            found = False
            for at in open_:
                if not may[at] and all(may[one] for one in before[at]):
                    may[at] = found = True
        return may

    @property
    def contradicts(self) -> tuple[int, int] | None:
        """A transfer that has not ended, and one behind it in its queue that has, if any."""
        wrong = np.flatnonzero(self.sure & self.transfer & ~self.ended & ~self.silent)
        for at in wrong.tolist():
            behind = np.flatnonzero((self.graph.queue == self.graph.queue[at]) & self.ended)
            if (behind := behind[behind > at]).size:
                return at, int(behind[0])
        for turns in self.matched.apart:  # what has process groups of its own has queues of its own
            mine = self.transfer & (self.rank == self.rank[turns[0]]) & self.matched.issued
            others = np.setdiff1d(np.flatnonzero(mine), turns)
            both = others[np.isin(self.graph.queue[others], self.graph.queue[turns])]
            if both.size:
                return int(turns[0]), int(both[0])
        return None

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks whose dumps are older than others: what they have not issued has come elsewhere."""
        came = np.flatnonzero(self.graph.index.is_op(RECEIVES) & self.matched.ended)
        sends = self.graph.partner[came]
        unsaid = sends[~self.matched.issued[sends] & ~self.silent[sends]]
        return tuple(sorted({int(rank) for rank in self.rank[unsaid]}))

    # ------------------------------------------------------------ where ranks stand

    def place(self, rank: int) -> RankPosition:
        """Where a rank of the program stands."""
        lo, hi = self.graph.program.offsets[rank : rank + 2].tolist()
        transfers = [k for k in range(lo, hi) if self.transfer[k]]
        last = max((k for k in transfers if self.matched.issued[k]), default=lo - 1)
        for at in range(lo, hi):
            if self.matched.issued[at] if self.transfer[at] else self.may[at]:
                continue
            # What keeps a collective may be on other ranks, too: what is on this one comes first.
            kept = [one for one in self._before(at) if not self.may[one]]
            kept.sort(key=lambda one: bool(self.rank[one] != rank))
            if self.transfer[at] and not kept:
                return RankPosition(rank, at, True, (last + 1, at))
            return RankPosition(rank, self._transfer_before(kept), False, (at, at))
        open_ = [k for k in transfers if not self.ended[k]]
        stands = self._transfer_before(open_[:1]) if open_ else None
        return RankPosition(rank, stands, False, (last + 1, hi))

    def _transfer_before(self, kept: list[int]) -> int:
        """The transfer or collective that has not ended, first found going back.

        Of transfers it is the head of the queue.
        """
        seen: set[int] = set()
        while kept:
            at, *kept = kept
            ahead = self._kept(at)
            if self.transfer[at]:
                ahead = [one for one in ahead if self.transfer[one]]
                if not ahead or at in seen:
                    return at
                kept = ahead[:1]
            elif len(self._meets.get(at, ())) > 1:
                return at
            elif at not in seen:
                kept += ahead
            seen.add(at)
        raise AssertionError("nothing keeps what has not ended")

    # ------------------------------------------------------------ why

    def next(self, at: int) -> PendingTransfer | StallReason:
        """What a transfer that has not ended waits for: another one, or the end of the chain.

        A batch is over when all of it is, so one looks at all that is issued as one, on both sides.
        """
        if not self.transfer[at]:
            return PendingTransfer(at, self._transfer_before(self._kept(at)))
        seen, suspects = [at], dict[int, None]()
        for one in seen:  # which grows
            if (found := self._keeper(one)) is not None:
                return found if isinstance(found, StallReason) else PendingTransfer(at, found)
            other = self._other(one)
            if not self.ended[other]:
                sides = (one, other) if self.graph.index.op[one] in SENDS else (other, one)
                suspects |= dict.fromkeys(side for side in sides if self._is_suspect(side))
            around = dict.fromkeys([other, *self._group(one), *self._group(other)])
            seen += [n for n in around if n not in seen and not self.ended[n]]
        if suspects:
            return StallReason(ChainEnd.BUSY, (*suspects,))
        stuck = [n for n in sorted(seen) if not self.ended[n] and not self.ended[self._other(n)]]
        if stuck:
            return StallReason(ChainEnd.STUCK, tuple(sorted((stuck[0], self._other(stuck[0])))))
        return StallReason(ChainEnd.ENDED, (at,))

    def _other(self, at: int) -> int:
        return int(self.graph.partner[at])

    def _is_suspect(self, at: int) -> bool:
        """Whether a side of a message may not have started because of what its rank computes.

        A send needs its value; on a GPU either side waits for all kernels that were issued before.
        """
        lo = int(self.graph.program.offsets[int(self.rank[at])])
        before = ~self.transfer[lo:at] & ~self.sure[lo:at]
        # What the last step computed after its last transfer may not have ended, either.
        came = (self.transfer[lo:at] & self.ended[lo:at]).any()
        behind = before.any() or (self.matched.step != 0 and not came)
        return not self.matched.started[at] and bool(behind)

    def is_free(self, at: int) -> bool:
        """Whether nothing keeps what its rank computes before a transfer, in whatever order."""
        lo = int(self.graph.program.offsets[int(self.rank[at])])
        return bool((self.transfer[lo:at] | self.may[lo:at]).all())

    def _keeper(self, at: int) -> int | StallReason | None:
        """What keeps a transfer on its own rank: another one, or its host, which is elsewhere."""
        if self.silent[at]:
            return None if self.ended[self._other(at)] else StallReason(ChainEnd.SILENT, (at,))
        if own := self._kept(at):
            return self._transfer_before(own)
        if self.matched.issued[at]:
            return None
        place = self.place(int(self.rank[at]))
        return StallReason(ChainEnd.LATE, (at,)) if place.late or place.at is None else place.at

    def chain(self, at: int) -> tuple[list[PendingTransfer], StallReason | None]:
        """The waits from a transfer that has not ended to the cause; None for a circle."""
        links: list[PendingTransfer] = []
        while isinstance(found := self.next(at), PendingTransfer):
            links.append(found)
            at = found.needs
            if at in [link.at for link in links]:
                return links, None
        return links, found


@dataclass(frozen=True)
class ProgramVerdict:
    """What is said of a copy of a program under a progress model.

    `circle` are transfers that wait for each other, each for the next; `causes` what others wait
    for and nothing keeps.  `refusal` is what `check` says of the program; of one that stands in a
    circle also what it says of it on hosts that block, if it says nothing else.
    """

    placed: PositionedRanks
    refusal: SchedirError | None
    places: tuple[RankPosition, ...]
    causes: tuple[StallReason, ...]
    circle: tuple[PendingTransfer, ...]

    @property
    def matched(self) -> MatchedProgram:
        """What was recorded."""
        return self.placed.matched

    @property
    def model(self) -> ProgressModel:
        """The progress model."""
        return self.placed.graph.progress_model

    @property
    def is_deadlock(self) -> bool:
        """Whether nothing that anybody does can set it going again."""
        return bool(self.circle)


def judge(
    program: Program, copies: Sequence[MatchedProgram], progress_model: ProgressModel | None = None
) -> list[ProgramVerdict]:
    """A verdict on each copy of a program, of which all messages go as the program says.

    Without a model it is `per_device`, or the strictest laxer one that is not contradicted.
    Raises UsageError for recordings that contradict the model, and another SchedirError for a
    program that is not complete.
    """
    return [_judge(program, matched, progress_model) for matched in copies]


def _judge(
    program: Program, matched: MatchedProgram, progress_model: ProgressModel | None
) -> ProgramVerdict:
    for one in (progress_model,) if progress_model else _USUAL:
        placed = PositionedRanks(complete(program, one), matched)
        wrong = placed.contradicts
        if wrong is None:
            return _verdict(placed)
    assert wrong is not None
    named = [placed.graph.index.locate(at) for at in wrong]
    first, later = (f"{instr} of rank {matched.ranks[rank]}" for rank, _, instr in named)
    raise UsageError(
        f"this did not run under {one}: {later} has not waited for {first}",
        fields=["progress_model"],
    )


def _verdict(placed: PositionedRanks) -> ProgramVerdict:
    places = tuple(placed.place(rank) for rank, there in enumerate(placed.matched.dumped) if there)
    causes: dict[StallReason, None] = {}
    circle: tuple[PendingTransfer, ...] = ()
    for place in places:
        # A rank that is late is a cause where others wait for it.
        if place.at is None or place.late:
            continue
        links, cause = placed.chain(place.at)
        if cause is not None:
            causes[cause] = None
        elif not circle:
            back = [link.at for link in links].index(links[-1].needs)
            circle = tuple(links[back:])
    refusals = (_refusal(placed.graph, blocks) for blocks in (False, *[True] * bool(circle)))
    refusal = next((one for one in refusals if one is not None), None)
    return ProgramVerdict(placed, refusal, places, tuple(causes), circle)


def _refusal(graph: Graph, blocking_hosts: bool) -> SchedirError | None:
    """What `check` says of a program, on hosts that block or not."""
    try:
        check(graph.program, graph.progress_model, blocking_hosts=blocking_hosts)
    except SchedirError as error:
        return error
    return None
