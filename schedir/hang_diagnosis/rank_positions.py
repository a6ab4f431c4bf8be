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
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import RECV_OPS, SEND_OPS, TRANSFER_OPS
from schedir.ir.program import Program
from schedir.verify.check import build_complete_graph, check

# Unless one is said: the usual one, and where the recordings contradict it, laxer ones.
_DEFAULT_MODELS: Final = ("per_device", *reversed(MODELS[: MODELS.index("per_device")]))


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

    `position` is the position of what it waits at, or of the next transfer that it has not issued
    where it is `is_late`; None if all its transfers have ended.  `compute_range` are the
    instructions since its last transfer that is issued, which it may be computing.
    """

    rank: int
    position: int | None
    is_late: bool
    compute_range: tuple[int, int]


class PendingTransfer(NamedTuple):
    """A transfer that has not ended, and what it needs, which has not ended either."""

    position: int
    needed_position: int


class StallReason(NamedTuple):
    """The end of a chain: transfers that nothing keeps, and that have not ended."""

    kind: ChainEnd
    positions: tuple[int, ...]


class PositionedRanks:
    """The ranks of a copy of a program, placed by what has been matched."""

    def __init__(self, graph: Graph, matched: MatchedProgram) -> None:
        self.graph, self.matched = graph, matched
        self.rank_of = graph.index.rank
        self.is_transfer = graph.index.is_op(TRANSFER_OPS)
        self.has_no_dump: NDArray[np.bool_] = ~np.array(matched.has_dump)[self.rank_of]
        # Of ranks without a dump, the transfers have ended whose other side has.
        there = self.has_no_dump & (graph.partner != NO_POSITION)
        self.ended_mask: NDArray[np.bool_] = matched.ended_mask | (
            there & matched.ended_mask[graph.partner]
        )

    # ------------------------------------------------------------ what has ended, or may have

    @cached_property
    def _is_joined(self) -> list[bool]:
        return [*self.graph.index.joined.tolist(), False]

    def _list_group(self, position: int) -> list[int]:
        """What is issued as one with an instruction, itself among it."""
        first, end = position, position + 1
        while self._is_joined[first]:
            first -= 1
        while self._is_joined[end]:
            end += 1
        return [*range(first, end)]

    @cached_property
    def _collective_members(self) -> dict[int, list[int]]:
        """The members of the collective that an instruction is of, itself among them."""
        groups = [members.tolist() for members in self.graph.collective_groups]
        return {one: members for members in groups for one in members}

    def _list_predecessors(self, position: int) -> set[int]:
        """What an instruction waits for on its own rank; a group for what any member does, and a
        collective for what all do, wherever they are."""
        found: set[int] = set()
        for member in self._collective_members.get(position, [position]):
            group = self._list_group(member)
            before = [*self.graph.local_waits[:, group].flat, *self.graph.queue_predecessor[group]]
            found |= {int(one) for one in before} - {*group}
        return found - {NO_POSITION, *self._collective_members.get(position, ())}

    def _list_blockers(self, position: int) -> list[int]:
        """Of what an instruction waits for on its own rank, what cannot have ended."""
        return sorted(
            one for one in self._list_predecessors(position) if not self.possibly_ended[one]
        )

    @cached_property
    def surely_ended(self) -> NDArray[np.bool_]:
        """What has surely ended: all that stands before what has, and who sent what has come."""
        sure = self.ended_mask.copy()
        left = np.flatnonzero(sure).tolist()
        receives = self.graph.index.is_op(RECV_OPS)
        while left:
            at = left.pop()
            before = {*self.graph.needs[:, at].tolist(), *self._collective_members.get(at, ())}
            before |= {int(self.graph.queue_predecessor[at])} - {*self._list_group(at)}
            if receives[at]:
                before.update(self.graph.needs[:, self._partner_of(at)].tolist())
            fresh = [one for one in before - {NO_POSITION} if not sure[one]]
            sure[fresh] = True
            left += fresh
        return sure

    @cached_property
    def possibly_ended(self) -> NDArray[np.bool_]:
        """What may have ended: transfers that have, and all else that nothing else keeps."""
        may = self.surely_ended & (~self.is_transfer | self.has_no_dump) | self.ended_mask
        open_, found = np.flatnonzero(~self.is_transfer & ~may).tolist(), True
        before = {at: self._list_predecessors(at) for at in open_}
        while found:
            found = False
            for at in open_:
                if not may[at] and all(may[one] for one in before[at]):
                    may[at] = found = True
        return may

    @property
    def contradiction(self) -> tuple[int, int] | None:
        """A transfer that has not ended, and one behind it in its queue that has, if any."""
        wrong = np.flatnonzero(
            self.surely_ended & self.is_transfer & ~self.ended_mask & ~self.has_no_dump
        )
        for at in wrong.tolist():
            behind = np.flatnonzero((self.graph.queue == self.graph.queue[at]) & self.ended_mask)
            if (behind := behind[behind > at]).size:
                return at, int(behind[0])
        for turns in (
            self.matched.transfers_per_group
        ):  # what has process groups of its own has queues of its own
            mine = (
                self.is_transfer
                & (self.rank_of == self.rank_of[turns[0]])
                & self.matched.issued_mask
            )
            others = np.setdiff1d(np.flatnonzero(mine), turns)
            both = others[np.isin(self.graph.queue[others], self.graph.queue[turns])]
            if both.size:
                return int(turns[0]), int(both[0])
        return None

    @property
    def old_dump_ranks(self) -> tuple[int, ...]:
        """Ranks whose dumps are older than others: what they have not issued has come elsewhere."""
        came = np.flatnonzero(self.graph.index.is_op(RECV_OPS) & self.matched.ended_mask)
        sends = self.graph.partner[came]
        unsaid = sends[~self.matched.issued_mask[sends] & ~self.has_no_dump[sends]]
        return tuple(sorted({int(rank) for rank in self.rank_of[unsaid]}))

    # ------------------------------------------------------------ where ranks stand

    def find_position(self, rank: int) -> RankPosition:
        """Where a rank of the program stands."""
        lo, hi = self.graph.program.offsets[rank : rank + 2].tolist()
        transfers = [k for k in range(lo, hi) if self.is_transfer[k]]
        last = max((k for k in transfers if self.matched.issued_mask[k]), default=lo - 1)
        for at in range(lo, hi):
            if self.matched.issued_mask[at] if self.is_transfer[at] else self.possibly_ended[at]:
                continue
            # What keeps a collective may be on other ranks, too: what is on this one comes first.
            kept = [one for one in self._list_predecessors(at) if not self.possibly_ended[one]]
            kept.sort(key=lambda one: bool(self.rank_of[one] != rank))
            if self.is_transfer[at] and not kept:
                return RankPosition(rank, at, True, (last + 1, at))
            return RankPosition(rank, self._find_blocking_transfer(kept), False, (at, at))
        open_ = [k for k in transfers if not self.ended_mask[k]]
        stands = self._find_blocking_transfer(open_[:1]) if open_ else None
        return RankPosition(rank, stands, False, (last + 1, hi))

    def _find_blocking_transfer(self, blockers: list[int]) -> int:
        """The transfer or collective that has not ended, first found going back.

        Of transfers it is the head of the queue.
        """
        seen: set[int] = set()
        while blockers:
            at, *blockers = blockers
            ahead = self._list_blockers(at)
            if self.is_transfer[at]:
                ahead = [one for one in ahead if self.is_transfer[one]]
                if not ahead or at in seen:
                    return at
                blockers = ahead[:1]
            elif len(self._collective_members.get(at, ())) > 1:
                return at
            elif at not in seen:
                blockers += ahead
            seen.add(at)
        raise AssertionError("nothing keeps what has not ended")

    # ------------------------------------------------------------ why

    def find_next_wait(self, position: int) -> PendingTransfer | StallReason:
        """What a transfer that has not ended waits for: another one, or the end of the chain.

        A batch is over when all of it is, so one looks at all that is issued as one, on both sides.
        """
        if not self.is_transfer[position]:
            return PendingTransfer(
                position, self._find_blocking_transfer(self._list_blockers(position))
            )
        seen, suspects = [position], dict[int, None]()
        for one in seen:  # which grows
            if (found := self._find_blocker(one)) is not None:
                return found if isinstance(found, StallReason) else PendingTransfer(position, found)
            other = self._partner_of(one)
            if not self.ended_mask[other]:
                sides = (one, other) if self.graph.index.op[one] in SEND_OPS else (other, one)
                suspects |= dict.fromkeys(side for side in sides if self._is_suspect(side))
            around = dict.fromkeys([other, *self._list_group(one), *self._list_group(other)])
            seen += [n for n in around if n not in seen and not self.ended_mask[n]]
        if suspects:
            return StallReason(ChainEnd.BUSY, (*suspects,))
        stuck = [
            n
            for n in sorted(seen)
            if not self.ended_mask[n] and not self.ended_mask[self._partner_of(n)]
        ]
        if stuck:
            return StallReason(
                ChainEnd.STUCK, tuple(sorted((stuck[0], self._partner_of(stuck[0]))))
            )
        return StallReason(ChainEnd.ENDED, (position,))

    def _partner_of(self, position: int) -> int:
        return int(self.graph.partner[position])

    def _is_suspect(self, position: int) -> bool:
        """Whether a side of a message may not have started because of what its rank computes.

        A send needs its value; on a GPU either side waits for all kernels that were issued before.
        """
        lo = int(self.graph.program.offsets[int(self.rank_of[position])])
        before = ~self.is_transfer[lo:position] & ~self.surely_ended[lo:position]
        # What the last step computed after its last transfer may not have ended, either.
        came = (self.is_transfer[lo:position] & self.ended_mask[lo:position]).any()
        behind = before.any() or (self.matched.step != 0 and not came)
        return not self.matched.started_mask[position] and bool(behind)

    def is_unblocked(self, position: int) -> bool:
        """Whether nothing keeps what its rank computes before a transfer, in whatever order."""
        lo = int(self.graph.program.offsets[int(self.rank_of[position])])
        return bool((self.is_transfer[lo:position] | self.possibly_ended[lo:position]).all())

    def _find_blocker(self, position: int) -> int | StallReason | None:
        """What keeps a transfer on its own rank: another one, or its host, which is elsewhere."""
        if self.has_no_dump[position]:
            return (
                None
                if self.ended_mask[self._partner_of(position)]
                else StallReason(ChainEnd.SILENT, (position,))
            )
        if own := self._list_blockers(position):
            return self._find_blocking_transfer(own)
        if self.matched.issued_mask[position]:
            return None
        place = self.find_position(int(self.rank_of[position]))
        return (
            StallReason(ChainEnd.LATE, (position,))
            if place.is_late or place.position is None
            else place.position
        )

    def follow_waits(self, position: int) -> tuple[list[PendingTransfer], StallReason | None]:
        """The waits from a transfer that has not ended to the cause; None for a circle."""
        links: list[PendingTransfer] = []
        while isinstance(found := self.find_next_wait(position), PendingTransfer):
            links.append(found)
            position = found.needed_position
            if position in [link.position for link in links]:
                return links, None
        return links, found


@dataclass(frozen=True)
class ProgramVerdict:
    """What is said of a copy of a program under a progress model.

    `cycle` are transfers that wait for each other, each for the next; `causes` what others wait
    for and nothing keeps.  `check_error` is what `check` says of the program; of one that stands in
    a circle also what it says of it on hosts that block, if it says nothing else.
    """

    positioned: PositionedRanks
    check_error: SchedirError | None
    positions: tuple[RankPosition, ...]
    causes: tuple[StallReason, ...]
    cycle: tuple[PendingTransfer, ...]

    @property
    def matched(self) -> MatchedProgram:
        """What was recorded."""
        return self.positioned.matched

    @property
    def progress_model(self) -> ProgressModel:
        """The progress model."""
        return self.positioned.graph.progress_model

    @property
    def is_deadlock(self) -> bool:
        """Whether nothing that anybody does can set it going again."""
        return bool(self.cycle)


def diagnose_copies(
    program: Program, copies: Sequence[MatchedProgram], progress_model: ProgressModel | None = None
) -> list[ProgramVerdict]:
    """A verdict on each copy of a program, of which all messages go as the program says.

    Without a model it is `per_device`, or the strictest laxer one that is not contradicted.
    Raises UsageError for recordings that contradict the model, and another SchedirError for a
    program that is not complete.
    """
    return [_diagnose_copy(program, matched, progress_model) for matched in copies]


def _diagnose_copy(
    program: Program, matched: MatchedProgram, progress_model: ProgressModel | None
) -> ProgramVerdict:
    for one in (progress_model,) if progress_model else _DEFAULT_MODELS:
        placed = PositionedRanks(build_complete_graph(program, one), matched)
        wrong = placed.contradiction
        if wrong is None:
            return _make_verdict(placed)
    assert wrong is not None
    named = [placed.graph.index.locate(at) for at in wrong]
    first, later = (f"{instr} of rank {matched.ranks[rank]}" for rank, _, instr in named)
    raise UsageError(
        f"this did not run under {one}: {later} has not waited for {first}",
        fields=["progress_model"],
    )


def _make_verdict(positioned: PositionedRanks) -> ProgramVerdict:
    places = tuple(
        positioned.find_position(rank)
        for rank, there in enumerate(positioned.matched.has_dump)
        if there
    )
    causes: dict[StallReason, None] = {}
    circle: tuple[PendingTransfer, ...] = ()
    for place in places:
        # A rank that is late is a cause where others wait for it.
        if place.position is None or place.is_late:
            continue
        links, cause = positioned.follow_waits(place.position)
        if cause is not None:
            causes[cause] = None
        elif not circle:
            back = [link.position for link in links].index(links[-1].needed_position)
            circle = tuple(links[back:])
    refusals = (
        _find_check_error(positioned.graph, blocks) for blocks in (False, *[True] * bool(circle))
    )
    refusal = next((one for one in refusals if one is not None), None)
    return ProgramVerdict(positioned, refusal, places, tuple(causes), circle)


def _find_check_error(graph: Graph, blocking_hosts: bool) -> SchedirError | None:
    """What `check` says of a program, on hosts that block or not."""
    try:
        check(graph.program, graph.progress_model, blocking_hosts=blocking_hosts)
    except SchedirError as error:
        return error
    return None
