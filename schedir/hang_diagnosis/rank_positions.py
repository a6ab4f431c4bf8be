"""Find the instruction that each rank has reached, why the rank waits, and which rank is late.

Dumps show transfers, but no computation. If a transfer has ended, all instructions that it needs
have surely ended. An instruction may have ended if it does not wait for an open transfer, that is,
a transfer that has not ended.

The position of a rank is the first instruction that cannot start yet, or that the host has not
issued. From this position, the analysis follows the chain of waits across ranks. If the chain ends
at a rank that does not wait for another rank, this rank is the cause of the hang. If the chain ends
in a cycle, the ranks are in a deadlock.
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

# The progress models to try, in this order. A weaker model is tried if the dumps contradict the
# stricter models before it.
_DEFAULT_MODELS: Final = ("per_device", *reversed(MODELS[: MODELS.index("per_device")]))


class ChainEnd(Enum):
    """The state in which a chain of waits ends.

    - NOT_ISSUED: The host of a rank has not issued a transfer.
    - NO_DUMP: A rank has no dump.
    - BUSY: Both sides of a message were issued, but computation may still delay one side.
    - STUCK: Both sides of a message were issued, and nothing delays the message.
    - ENDED: The other side of a message has ended.
    """

    NOT_ISSUED = 0
    NO_DUMP = 1
    BUSY = 2
    STUCK = 3
    ENDED = 4


class RankPosition(NamedTuple):
    """The position of a rank of the program.

    Attributes:
        rank: The rank.
        position: The position of the transfer or collective at which the rank waits. If `is_late`,
            the position of its next transfer. None if all its transfers have ended.
        is_late: True if the rank could issue its next transfer, but has not issued it.
        compute_range: The range of positions after the last issued transfer of the rank: its start,
            and its end (exclusive). The rank may be computing one of these instructions. The range
            is empty if the next instruction of the rank cannot start yet.
    """

    rank: int
    position: int | None
    is_late: bool
    compute_range: tuple[int, int]


class PendingTransfer(NamedTuple):
    """A transfer or collective that waits for another transfer or collective.

    Attributes:
        position: The position of the transfer or collective that waits.
        needed_position: The position of the transfer or collective for which it waits.
    """

    position: int
    needed_position: int


class StallReason(NamedTuple):
    """The end of a chain of waits.

    Attributes:
        kind: The state in which the chain ends.
        positions: The positions of the transfers at the end of the chain, which have not ended.
    """

    kind: ChainEnd
    positions: tuple[int, ...]


class PositionedRanks:
    """The ranks of a pipeline, which runs a copy of a program, with their positions.

    Args:
        graph: The graph of the program under a progress model.
        matched: The copy of the program.

    Attributes:
        rank_of: The rank of each instruction.
        is_transfer: For each instruction, True if it is a transfer.
        has_no_dump: For each instruction, True if its rank has no dump.
        ended_mask: For each instruction, True if it is a transfer that has ended.
    """

    def __init__(self, graph: Graph, matched: MatchedProgram) -> None:
        self.graph = graph
        self.matched = matched
        self.rank_of = graph.index.rank
        self.is_transfer = graph.index.is_op(TRANSFER_OPS)
        self.has_no_dump: NDArray[np.bool_] = ~np.array(matched.has_dump)[self.rank_of]
        # On a rank without a dump, a transfer has ended if its other side has ended.
        is_undumped_transfer = self.has_no_dump & (graph.partner != NO_POSITION)
        self.ended_mask: NDArray[np.bool_] = matched.ended_mask | (
            is_undumped_transfer & matched.ended_mask[graph.partner]
        )

    # ------------------------------------------------------------ ended instructions

    @cached_property
    def _is_joined(self) -> list[bool]:
        return [*self.graph.index.joined.tolist(), False]

    def _list_group(self, position: int) -> list[int]:
        """Return all instructions that are issued in the same group as an instruction."""
        first, end = position, position + 1
        while self._is_joined[first]:
            first -= 1
        while self._is_joined[end]:
            end += 1
        return [*range(first, end)]

    @cached_property
    def _collective_members(self) -> dict[int, list[int]]:
        """Position of an instruction -> the positions of all members of its collective."""
        groups = [members.tolist() for members in self.graph.collective_groups]
        return {member: members for members in groups for member in members}

    def _list_predecessors(self, position: int) -> set[int]:
        """Return the instructions that an instruction waits for, except its partner in a transfer.

        Instructions that are issued in a group wait for the predecessors of each member of the
        group. A collective waits for the predecessors of all its members, on all ranks.
        """
        predecessors: set[int] = set()
        for member in self._collective_members.get(position, [position]):
            group = self._list_group(member)
            group_predecessors = [
                *self.graph.local_waits[:, group].flat,
                *self.graph.queue_predecessor[group],
            ]
            predecessors |= {int(predecessor) for predecessor in group_predecessors} - {*group}
        return predecessors - {NO_POSITION, *self._collective_members.get(position, ())}

    def _list_blockers(self, position: int) -> list[int]:
        """Return those predecessors of an instruction that cannot have ended yet."""
        return sorted(
            predecessor
            for predecessor in self._list_predecessors(position)
            if not self.possibly_ended[predecessor]
        )

    @cached_property
    def surely_ended(self) -> NDArray[np.bool_]:
        """The instructions that have surely ended.

        These are the ended transfers, their predecessors in their queues, and all instructions that
        these transfers need. If a message was received, all instructions that its send needs have
        ended, too.
        """
        surely_ended = self.ended_mask.copy()
        pending = np.flatnonzero(surely_ended).tolist()
        is_receive = self.graph.index.is_op(RECV_OPS)
        while pending:
            position = pending.pop()
            predecessors = {
                *self.graph.needs[:, position].tolist(),
                *self._collective_members.get(position, ()),
            }
            queue_predecessor = int(self.graph.queue_predecessor[position])
            predecessors |= {queue_predecessor} - {*self._list_group(position)}
            if is_receive[position]:
                predecessors.update(self.graph.needs[:, self._partner_of(position)].tolist())
            new_positions = [
                predecessor
                for predecessor in predecessors - {NO_POSITION}
                if not surely_ended[predecessor]
            ]
            surely_ended[new_positions] = True
            pending += new_positions
        return surely_ended

    @cached_property
    def possibly_ended(self) -> NDArray[np.bool_]:
        """The instructions that may have ended.

        These are ended transfers, and all computation whose predecessors may all have ended.
        """
        possibly_ended = (
            self.surely_ended & (~self.is_transfer | self.has_no_dump) | self.ended_mask
        )
        open_positions = np.flatnonzero(~self.is_transfer & ~possibly_ended).tolist()
        predecessors_of = {
            position: self._list_predecessors(position) for position in open_positions
        }
        has_changed = True
        while has_changed:
            has_changed = False
            for position in open_positions:
                if not possibly_ended[position] and all(
                    possibly_ended[predecessor] for predecessor in predecessors_of[position]
                ):
                    possibly_ended[position] = has_changed = True
        return possibly_ended

    @property
    def contradiction(self) -> tuple[int, int] | None:
        """Two transfers whose recorded order contradicts the progress model, or None.

        Either the first transfer has not ended, but a later transfer in its queue has ended. Or the
        two transfers use different process groups, but the model puts them in one queue.
        """
        overtaken = np.flatnonzero(
            self.surely_ended & self.is_transfer & ~self.ended_mask & ~self.has_no_dump
        )
        for position in overtaken.tolist():
            ended_later = np.flatnonzero(
                (self.graph.queue == self.graph.queue[position]) & self.ended_mask
            )
            if (ended_later := ended_later[ended_later > position]).size:
                return position, int(ended_later[0])
        # In the job, transfers in different process groups are in different queues.
        for transfers in self.matched.transfers_per_group:
            is_issued_on_rank = (
                self.is_transfer
                & (self.rank_of == self.rank_of[transfers[0]])
                & self.matched.issued_mask
            )
            other_positions = np.setdiff1d(np.flatnonzero(is_issued_on_rank), transfers)
            same_queue = other_positions[
                np.isin(self.graph.queue[other_positions], self.graph.queue[transfers])
            ]
            if same_queue.size:
                return int(transfers[0]), int(same_queue[0])
        return None

    @property
    def old_dump_ranks(self) -> tuple[int, ...]:
        """The ranks whose dumps are older than others.

        Another rank has received a message whose send is not issued yet in such a dump.
        """
        receives = np.flatnonzero(self.graph.index.is_op(RECV_OPS) & self.matched.ended_mask)
        sends = self.graph.partner[receives]
        unissued_sends = sends[~self.matched.issued_mask[sends] & ~self.has_no_dump[sends]]
        return tuple(sorted({int(rank) for rank in self.rank_of[unissued_sends]}))

    # ------------------------------------------------------------ positions of ranks

    def find_position(self, rank: int) -> RankPosition:
        """Return the position of a rank of the program.

        Args:
            rank: The rank of the program.
        """
        lo, hi = self.graph.program.offsets[rank : rank + 2].tolist()
        transfers = [k for k in range(lo, hi) if self.is_transfer[k]]
        last_issued = max((k for k in transfers if self.matched.issued_mask[k]), default=lo - 1)
        for position in range(lo, hi):
            if (
                self.matched.issued_mask[position]
                if self.is_transfer[position]
                else self.possibly_ended[position]
            ):
                continue
            # The blockers of a collective may be on other ranks, too. Blockers on this rank come
            # first.
            blockers = [
                blocker
                for blocker in self._list_predecessors(position)
                if not self.possibly_ended[blocker]
            ]
            blockers.sort(key=lambda blocker: bool(self.rank_of[blocker] != rank))
            if self.is_transfer[position] and not blockers:
                return RankPosition(rank, position, True, (last_issued + 1, position))
            return RankPosition(
                rank, self._find_blocking_transfer(blockers), False, (position, position)
            )
        open_transfers = [k for k in transfers if not self.ended_mask[k]]
        blocking_position = (
            self._find_blocking_transfer(open_transfers[:1]) if open_transfers else None
        )
        return RankPosition(rank, blocking_position, False, (last_issued + 1, hi))

    def _find_blocking_transfer(self, blockers: list[int]) -> int:
        """Return the nearest open transfer or collective that is a blocker or delays a blocker.

        If this is a transfer that waits in a queue, return the first open transfer of the queue.
        """
        seen: set[int] = set()
        while blockers:
            position, *blockers = blockers
            next_blockers = self._list_blockers(position)
            if self.is_transfer[position]:
                next_blockers = [blocker for blocker in next_blockers if self.is_transfer[blocker]]
                if not next_blockers or position in seen:
                    return position
                blockers = next_blockers[:1]
            elif len(self._collective_members.get(position, ())) > 1:
                return position
            elif position not in seen:
                blockers += next_blockers
            seen.add(position)
        raise AssertionError(
            "found no transfer or collective that prevents the end of an instruction"
        )

    # ------------------------------------------------------------ waits

    def find_next_wait(self, position: int) -> PendingTransfer | StallReason:
        """Return the next wait of an open transfer, or the end of the chain of waits.

        A batch ends when all of its messages have ended. So the search covers all messages that are
        issued together, on both sides.

        Args:
            position: The position of a transfer or collective that has not ended.
        """
        if not self.is_transfer[position]:
            return PendingTransfer(
                position, self._find_blocking_transfer(self._list_blockers(position))
            )
        messages, suspects = [position], dict[int, None]()
        for message in messages:  # The loop appends to this list.
            if (blocker := self._find_blocker(message)) is not None:
                return (
                    blocker
                    if isinstance(blocker, StallReason)
                    else PendingTransfer(position, blocker)
                )
            partner = self._partner_of(message)
            if not self.ended_mask[partner]:
                sides = (
                    (message, partner)
                    if self.graph.index.op[message] in SEND_OPS
                    else (partner, message)
                )
                suspects |= dict.fromkeys(side for side in sides if self._is_suspect(side))
            neighbours = dict.fromkeys(
                [partner, *self._list_group(message), *self._list_group(partner)]
            )
            messages += [n for n in neighbours if n not in messages and not self.ended_mask[n]]
        if suspects:
            return StallReason(ChainEnd.BUSY, (*suspects,))
        stuck_messages = [
            n
            for n in sorted(messages)
            if not self.ended_mask[n] and not self.ended_mask[self._partner_of(n)]
        ]
        if stuck_messages:
            return StallReason(
                ChainEnd.STUCK,
                tuple(sorted((stuck_messages[0], self._partner_of(stuck_messages[0])))),
            )
        return StallReason(ChainEnd.ENDED, (position,))

    def _partner_of(self, position: int) -> int:
        return int(self.graph.partner[position])

    def _is_suspect(self, position: int) -> bool:
        """Return whether one side of a message may still wait for computation of its rank.

        A send needs its value. On a GPU, both sides wait for all kernels that were issued before.
        """
        lo = int(self.graph.program.offsets[int(self.rank_of[position])])
        is_open_compute = ~self.is_transfer[lo:position] & ~self.surely_ended[lo:position]
        # The computation after the last transfer of the previous step may not have ended, either.
        has_ended_transfer = (self.is_transfer[lo:position] & self.ended_mask[lo:position]).any()
        may_compute = is_open_compute.any() or (self.matched.step != 0 and not has_ended_transfer)
        return not self.matched.started_mask[position] and bool(may_compute)

    def is_unblocked(self, position: int) -> bool:
        """Return whether all computation before a transfer on its rank may have ended.

        Args:
            position: The position of the transfer.
        """
        lo = int(self.graph.program.offsets[int(self.rank_of[position])])
        return bool((self.is_transfer[lo:position] | self.possibly_ended[lo:position]).all())

    def _find_blocker(self, position: int) -> int | StallReason | None:
        """Return the transfer that a transfer waits for on its rank, or the end of the waits.

        Return None if nothing on its rank delays the transfer.
        """
        if self.has_no_dump[position]:
            return (
                None
                if self.ended_mask[self._partner_of(position)]
                else StallReason(ChainEnd.NO_DUMP, (position,))
            )
        if blockers := self._list_blockers(position):
            return self._find_blocking_transfer(blockers)
        if self.matched.issued_mask[position]:
            return None
        rank_position = self.find_position(int(self.rank_of[position]))
        return (
            StallReason(ChainEnd.NOT_ISSUED, (position,))
            if rank_position.is_late or rank_position.position is None
            else rank_position.position
        )

    def follow_waits(self, position: int) -> tuple[list[PendingTransfer], StallReason | None]:
        """Follow the waits from an open transfer to the cause.

        Args:
            position: The position of the transfer.

        Returns:
            The waits, and the cause. The cause is None if the waits form a cycle.
        """
        links: list[PendingTransfer] = []
        while isinstance(next_wait := self.find_next_wait(position), PendingTransfer):
            links.append(next_wait)
            position = next_wait.needed_position
            if position in [link.position for link in links]:
                return links, None
        return links, next_wait


@dataclass(frozen=True)
class ProgramVerdict:
    """The diagnosis of a copy of a program under a progress model.

    Args:
        positioned: The ranks with their positions.
        check_error: The error that `check` raises for the program. If there is a cycle, and `check`
            finds an error only with blocking hosts, it is this error. None if there is no error.
        positions: The position of each rank with a dump.
        causes: The ends of the chains of waits.
        cycle: The waits around a cycle of transfers. Each transfer waits for the next one. Empty
            without a cycle.
    """

    positioned: PositionedRanks
    check_error: SchedirError | None
    positions: tuple[RankPosition, ...]
    causes: tuple[StallReason, ...]
    cycle: tuple[PendingTransfer, ...]

    @property
    def matched(self) -> MatchedProgram:
        """The copy of the program."""
        return self.positioned.matched

    @property
    def progress_model(self) -> ProgressModel:
        """The progress model."""
        return self.positioned.graph.progress_model

    @property
    def is_deadlock(self) -> bool:
        """Return whether ranks wait for each other in a cycle, so that the job cannot continue."""
        return bool(self.cycle)


def diagnose_copies(
    program: Program, copies: Sequence[MatchedProgram], progress_model: ProgressModel | None = None
) -> list[ProgramVerdict]:
    """Diagnose each copy of a program. Each pipeline of a job runs one copy.

    Args:
        program: The program.
        copies: The copies of the program. The copies must not have an `order_mismatch`.
        progress_model: The progress model. By default `per_device`, or the strictest weaker model
            that the dumps do not contradict.

    Raises:
        UsageError: The dumps contradict the progress model.
        SchedirError: The program is not complete.
    """
    return [_diagnose_copy(program, matched, progress_model) for matched in copies]


def _diagnose_copy(
    program: Program, matched: MatchedProgram, progress_model: ProgressModel | None
) -> ProgramVerdict:
    for model in (progress_model,) if progress_model else _DEFAULT_MODELS:
        positioned = PositionedRanks(build_complete_graph(program, model), matched)
        contradiction = positioned.contradiction
        if contradiction is None:
            return _make_verdict(positioned)
    locations = [
        positioned.graph.index.locate(position) for position in sorted(contradiction or ())
    ]
    first, later = (f"{instr} of rank {matched.ranks[rank]}" for rank, _, instr in locations)
    raise UsageError(
        f"the dumps contradict the progress model {model}: in this model, {later} waits for "
        f"{first}, but in the job, {later} did not wait",
        fields=["progress_model"],
    )


def _make_verdict(positioned: PositionedRanks) -> ProgramVerdict:
    rank_positions = tuple(
        positioned.find_position(rank)
        for rank, has_dump in enumerate(positioned.matched.has_dump)
        if has_dump
    )
    causes: dict[StallReason, None] = {}
    cycle: tuple[PendingTransfer, ...] = ()
    for rank_position in rank_positions:
        # A late rank does not wait. If another rank waits for it, `follow_waits` returns the late
        # rank as the cause.
        if rank_position.position is None or rank_position.is_late:
            continue
        links, cause = positioned.follow_waits(rank_position.position)
        if cause is not None:
            causes[cause] = None
        elif not cycle:
            cycle_start = [link.position for link in links].index(links[-1].needed_position)
            cycle = tuple(links[cycle_start:])
    errors = (
        _find_check_error(positioned.graph, blocking_hosts)
        for blocking_hosts in (False, *[True] * bool(cycle))
    )
    check_error = next((error for error in errors if error is not None), None)
    return ProgramVerdict(positioned, check_error, rank_positions, tuple(causes), cycle)


def _find_check_error(graph: Graph, blocking_hosts: bool) -> SchedirError | None:
    """Return the error that `check` raises for a program, or None."""
    try:
        check(graph.program, graph.progress_model, blocking_hosts=blocking_hosts)
    except SchedirError as error:
        return error
    return None
