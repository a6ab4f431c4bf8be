"""Match the messages that ranks recorded with the transfers of a program.

In a process group, a rank executes the transfers of its Stream that use this group. The rank
executes these transfers in the order of the Stream, and repeats them in every step. So the number
of a message in its group determines its transfer. The direction and the peer of the message must be
those of the transfer. Otherwise the dump is not of this program.
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
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS, TRANSFER_OPS, Lane
from schedir.ir.program import Program

# Messages that contain shapes or Python objects have these dtypes. Activations never do.
_INTEGER_DTYPES: Final = {"int", "long", "byte", "char", "short", "bool"}


def is_control_message(op: RecordedOperation) -> bool:
    """Return whether a message is not a transfer of a program.

    A control message has an integer dtype, or at most one element. Before the first step, torch
    sends messages of one element to create communicators.

    Args:
        op: The message.
    """
    return bool({*op.dtypes} & _INTEGER_DTYPES) or sum(map(prod, op.sizes)) <= 1


@dataclass(frozen=True)
class MatchedProgram:
    """A copy of the program in a job, with the progress of its ranks in one step.

    A mask has one entry per instruction, by position, and is True only for transfers.

    Args:
        ranks: For each rank of the program, the rank of the job that runs it.
        step: The number of the step, from 0, or None if the dumps do not show it.
        issued_mask: The transfers that were issued.
        started_mask: The transfers that have started. Only some ranks record this.
        ended_mask: The transfers that have ended.
        has_dump: For each rank of the program, True if it has a dump.
        num_ignored: The number of messages that are not transfers. See `is_control_message`.
        transfers_per_group: For each rank and process group, the positions of the transfers in one
            step.
        position_of_message: (rank of the job, number of a message in its dump) -> position of the
            transfer.
        counter_ranks: The ranks of the job whose place in the step is known only from torch's
            counters. The place is wrong if an overwritten entry was a control message.
        order_mismatch: The first message of a rank that is not in the order of its Stream, as text.
            Empty if all messages are in this order. Even with a mismatch, the sends of a rank are
            in the order of its Stream. The receives from each single peer are also in this order.
    """

    ranks: tuple[int, ...]
    step: int | None
    issued_mask: NDArray[np.bool_]
    started_mask: NDArray[np.bool_]
    ended_mask: NDArray[np.bool_]
    has_dump: tuple[bool, ...]
    num_ignored: int
    transfers_per_group: tuple[NDArray[np.int32], ...]
    position_of_message: Mapping[tuple[int, int], int]
    counter_ranks: tuple[int, ...]
    order_mismatch: str = ""


def match_program(job: DistributedJob, program: Program) -> list[MatchedProgram]:
    """Find each copy of the program that the job runs, one per tensor- and data-parallel rank.

    Args:
        job: The dumps of the job.
        program: The program.

    Raises:
        UsageError: The dumps cannot be of this program, or have lost too many entries.
    """
    graph = Graph.from_program(program)
    return [_match_copy(job, graph, ranks) for ranks in _find_pipelines(job, program)]


def find_communicating_ranks(job: DistributedJob) -> list[tuple[int, ...]]:
    """Return the groups of ranks that exchange messages, directly or through other ranks.

    Args:
        job: The dumps of the job.

    Returns:
        The ranks of each group, in ascending order.
    """
    group_of_rank: dict[int, set[int]] = {}
    for rank, dump in job.dumps.items():
        for peer in {op.peer for op in dump.ops if op.is_message}:
            merged_group = group_of_rank.get(rank, {rank}) | group_of_rank.get(peer, {peer})
            group_of_rank.update(dict.fromkeys(merged_group, merged_group))
    return sorted({tuple(sorted(group)) for group in group_of_rank.values()})


def _find_pipelines(job: DistributedJob, program: Program) -> list[tuple[int, ...]]:
    """Return the ranks of each copy of the program, in the order of the program's ranks.

    If a process group has exactly the ranks of a copy, the result has the order of this group.
    Otherwise the ranks are in ascending order.
    """
    num_ranks, rank_groups = program.shape.ranks, find_communicating_ranks(job)
    if not rank_groups and num_ranks > 1:
        raise UsageError(
            "the dumps have no messages between ranks, only collectives",
            hint="leave out --program; NCCL records messages, but torch's Gloo does not",
        )
    used_groups = {op.group for dump in job.dumps.values() for op in dump.ops if op.is_message}
    groups = [g.ranks for g in sorted(used_groups) if g.has_ranks and len(g.ranks) == num_ranks]
    pipelines = []
    for ranks in rank_groups:
        matching_groups = [group for group in groups if {*ranks} <= {*group}]
        if not matching_groups and len(ranks) != num_ranks:
            raise UsageError(
                f"the dumps have messages between {len(ranks)} ranks ({_abbreviate_ranks(ranks)}), "
                f"but {program.name} is for {num_ranks} ranks",
                fields=["ranks"],
            )
        pipelines.append(matching_groups[0] if matching_groups else ranks)
    return [*dict.fromkeys(pipelines)]


def _abbreviate_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def _match_copy(job: DistributedJob, graph: Graph, ranks: tuple[int, ...]) -> MatchedProgram:
    carriers = _find_carriers(job, ranks)
    records = [
        _RecordedRank(graph, program_rank, ranks, job.dumps[rank], carriers)
        for program_rank, rank in enumerate(ranks)
        if rank in job.dumps
    ]
    sequences = [sequence for record in records for sequence in record.sequences]
    num_ignored = sum(record.num_ignored for record in records)
    if num_ignored and not sequences:
        raise UsageError(
            f"none of the {num_ignored} messages of ranks {_abbreviate_ranks(ranks)} can be a "
            "transfer of a program. Each has an integer dtype or at most one element. With "
            "such messages, torch sends shapes and Python objects, and creates communicators",
            hint="leave out --program",
        )
    has_known_steps = all(sequence.previous_steps is not None for sequence in sequences)
    steps = [(sequence.previous_steps or 0) + sequence.open_step for sequence in sequences]
    steps += [0 for record in records if record.has_unused_groups]
    step = min(steps, default=0)
    issued_mask, started_mask, ended_mask = np.zeros((3, len(graph)), bool)
    for sequence in sequences:
        sequence.mark_step(
            step - (sequence.previous_steps or 0) if has_known_steps else sequence.open_step,
            issued_mask,
            started_mask,
            ended_mask,
        )
    return MatchedProgram(
        ranks,
        step if has_known_steps else None,
        issued_mask,
        started_mask,
        ended_mask,
        tuple(rank in job.dumps for rank in ranks),
        num_ignored,
        tuple(sequence.transfers for sequence in sequences),
        {
            (record.dump.rank, number): position
            for record in records
            for number, (_, position) in record.position_of_message.items()
        },
        tuple(
            r.dump.rank
            for r in records
            if not all(sequence.is_unique_fit for sequence in r.sequences)
        ),
        next((record.order_mismatch for record in records if record.order_mismatch), ""),
    )


def _find_carriers(
    job: DistributedJob, ranks: tuple[int, ...]
) -> dict[tuple[int, int], list[RecordedGroup]]:
    """Return (sender, receiver) -> the process groups of their messages, in order of first use."""
    groups_by_ends: dict[tuple[int, int], dict[RecordedGroup, None]] = defaultdict(dict)
    for rank in ranks:
        for op in job.dumps[rank].ops if rank in job.dumps else ():
            if op.is_message and not is_control_message(op):
                ends = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
                groups_by_ends[ends][op.group] = None
    return defaultdict(list, {ends: [*groups] for ends, groups in groups_by_ends.items()})


@dataclass(frozen=True)
class TransferSequence:
    """The messages of a rank in one process group, matched with the transfers of the program.

    The numbers of transfers continue from one step to the next. If `transfers` has n positions,
    transfer number k has the position `transfers[k % n]`. Number 0 is the first transfer in the
    step of the first message.

    Args:
        transfers: The positions of the transfers of one step in this group.
        transfer_numbers: The transfer number of each message.
        ops: The messages.
        previous_steps: The number of complete steps before the first message, or None if it is
            unknown.
        previous_transfers: The number of transfers before the first message, in the same step.
        is_unique_fit: True if the messages match the program at only one place in a step. If they
            match at several places, torch's counters determine the place.
    """

    transfers: NDArray[np.int32]
    transfer_numbers: list[int]
    ops: list[RecordedOperation]
    previous_steps: int | None = 0
    previous_transfers: int = 0
    is_unique_fit: bool = True

    def list_positions(self) -> Iterator[tuple[int, int, int]]:
        """Yield each message's number in the dump, its step, and the position of its transfer.

        If `previous_steps` is None, steps are counted from 0 at the first message.
        """
        for number, op in zip(self.transfer_numbers, self.ops, strict=True):
            step, index = divmod(number, len(self.transfers))
            yield op.number, step + (self.previous_steps or 0), int(self.transfers[index])

    @property
    def open_step(self) -> int:
        """The step that contains the first of the messages that have not ended.

        Steps are counted from 0 at the first message. If all messages have ended, the result is the
        step of the next message.
        """
        open_numbers = [
            n for n, op in zip(self.transfer_numbers, self.ops, strict=True) if not op.is_done
        ]
        next_number = self.previous_transfers + len(self.ops)
        return min(open_numbers, default=next_number) // len(self.transfers)

    def mark_step(
        self,
        step: int,
        issued_mask: NDArray[np.bool_],
        started_mask: NDArray[np.bool_],
        ended_mask: NDArray[np.bool_],
    ) -> None:
        """Mark the transfers of a step that were issued, have started and have ended.

        Args:
            step: The step. Steps are counted from 0 at the first message.
            issued_mask: The mask of issued transfers, by position. It is changed in place.
            started_mask: The mask of started transfers.
            ended_mask: The mask of ended transfers.
        """
        # The entries of transfers before the first message were overwritten, so these transfers
        # have ended. In a step before step 0, all transfers have ended.
        overwritten = self.transfers[
            : self.previous_transfers if step == 0 else len(self.transfers) * (step < 0)
        ]
        issued_mask[overwritten] = started_mask[overwritten] = ended_mask[overwritten] = True
        for number, op in zip(self.transfer_numbers, self.ops, strict=True):
            transfer_step, index = divmod(number, len(self.transfers))
            if transfer_step == step:
                position = self.transfers[index]
                issued_mask[position] = True
                started_mask[position] = op.state != "issued"
                ended_mask[position] = op.is_done


class _StepMismatch(Exception):
    """The messages of a rank are in another order than its Stream.

    The text of the exception names the first message that is out of order.
    """


class _Direction(NamedTuple):
    """The direction of a transfer, as seen by its rank: `send` or `recv`, and the other rank."""

    kind: str
    peer: int


class _RecordedRank:
    """A rank of the program with its recorded messages.

    If `order_mismatch` is not empty, the messages of the rank have another order than its Stream.
    Then `sequences` has one entry for all sends of a group, and one entry for the receives from
    each rank.

    Args:
        graph: The graph of the program.
        program_rank: The rank of the program.
        ranks: For each rank of the program, the rank of the job that runs it.
        dump: The dump of the rank.
        carriers: (sender, receiver) -> the process groups of their messages.

    Attributes:
        position_of_message: The step and the position of each message, by its number in the dump.

    Raises:
        UsageError: The messages do not match the program, not even in the weaker order that
            `order_mismatch` describes.
    """

    def __init__(
        self,
        graph: Graph,
        program_rank: int,
        ranks: tuple[int, ...],
        dump: FlightRecorderDump,
        carriers: Mapping[tuple[int, int], list[RecordedGroup]],
    ) -> None:
        self.graph = graph
        self.ranks = ranks
        self.dump = dump
        self.carriers = carriers
        # True if the process group of the messages in some direction is unknown.
        self.has_ambiguous_group = False
        self.program_rank_of = {rank: k for k, rank in enumerate(ranks)}
        index = graph.index
        lo, hi = graph.program.offsets[program_rank : program_rank + 2].tolist()
        positions = lo + np.flatnonzero(np.isin(index.op[lo:hi], TRANSFER_OPS))
        peers = index.rank[graph.partner[positions]].tolist()
        self.directions = {
            k: _Direction("send" if op in SEND_OPS else "recv", peer)
            for k, op, peer in zip(
                positions.tolist(), index.op[positions].tolist(), peers, strict=True
            )
        }
        messages = [op for op in dump.ops if op.is_message and op.peer in ranks]
        self.messages = [op for op in messages if not is_control_message(op)]
        self.num_ignored = len(messages) - len(self.messages)
        self.order_mismatch = ""
        try:
            self.sequences = self._split_sequences()
        except _StepMismatch as mismatch:
            self.order_mismatch = str(mismatch)
            self.sequences = self._split_sequences()
        self.position_of_message = {
            number: (step, k)
            for sequence in self.sequences
            for number, step, k in sequence.list_positions()
        }
        if self.order_mismatch:
            self._require_causality()
        if not dump.num_lost:
            self._require_step_order()

    @property
    def has_unused_groups(self) -> bool:
        """Return whether the rank has not used all of its process groups yet.

        The result is False if entries were overwritten, because the groups of these entries are
        unknown.
        """
        num_used = sum(len(sequence.transfers) for sequence in self.sequences)
        return not self.dump.num_lost and num_used < len(self.directions)

    def _split_sequences(self) -> list[TransferSequence]:
        """Match the messages of each process group with the transfers that use it.

        Activations and gradients in the same direction may use two groups. Then the group that the
        rank uses first is matched with the lane that comes first in its Stream.
        """
        ops: dict[tuple[RecordedGroup, _Direction | None], list[RecordedOperation]] = defaultdict(
            list
        )
        for op in self.messages:
            ops[op.group, self._queue_of(self._direction_of(op))].append(op)
        lanes: dict[_Direction, list[Lane]] = defaultdict(list)
        transfers: dict[tuple[RecordedGroup, _Direction | None], list[int]] = defaultdict(list)
        for position, direction in self.directions.items():
            direction_lanes = lanes[direction]
            lane = INSTRUCTIONS[self.graph.index.op[position]].lane
            if lane not in direction_lanes:
                direction_lanes.append(lane)
            groups = self._find_groups(direction)
            group_number = direction_lanes.index(lane) if len(groups) > 1 else 0
            if group_number < len(groups):
                transfers[groups[group_number], self._queue_of(direction)].append(position)
        return [self._make_sequence(group_ops, transfers[key]) for key, group_ops in ops.items()]

    def _direction_of(self, op: RecordedOperation) -> _Direction:
        return _Direction(op.kind, self.program_rank_of[op.peer])

    def _queue_of(self, direction: _Direction) -> _Direction | None:
        """Return the key of a message's queue. The messages of a queue have the Stream's order.

        Without an `order_mismatch`, all messages of a process group are in one queue with the key
        None. With an `order_mismatch`, the receives from each peer are in one queue. All sends are
        then in one queue, and its key has the peer -1.
        """
        if not self.order_mismatch:
            return None
        return direction if direction.kind == "recv" else _Direction(direction.kind, -1)

    def _find_groups(self, direction: _Direction) -> list[RecordedGroup]:
        """Return the process groups of the messages in a direction, in order of first use.

        If no such message is recorded, but entries were overwritten, return a group that contains
        both ranks. If not exactly one group contains both ranks, set `has_ambiguous_group`.
        """
        rank, peer = self.dump.rank, self.ranks[direction.peer]
        groups = self.carriers[(rank, peer) if direction.kind == "send" else (peer, rank)]
        if groups or not self.dump.num_lost:
            return groups
        used_groups = {
            group for groups_of_ends in self.carriers.values() for group in groups_of_ends
        }
        shared_groups = [group for group in self.dump.groups if {rank, peer} <= {*group.ranks}]
        shared_groups = [
            group
            for group in shared_groups
            if group in used_groups or group.description != "default_pg"
        ]
        self.has_ambiguous_group |= len(shared_groups) != 1
        return shared_groups[:1]

    def _require_step_order(self) -> None:
        """Raise UsageError if a step begins before the previous step was fully issued.

        The messages of such a rank are not those of the program, or the rank has more messages than
        the program.
        """
        num_transfers = len(self.directions)
        for number, op in enumerate(self.messages):
            step, position = self.position_of_message[op.number]
            if step > number // num_transfers:
                instr = self.graph.index.locate(position)[2]
                raise self._make_program_error(
                    f"message {number + 1} of rank {self.dump.rank} would be {instr} of step "
                    f"{step}, counted from 0, before all {num_transfers} messages of the "
                    "previous step"
                )

    def _require_causality(self) -> None:
        """Raise UsageError if a receive comes after the compute that needs its data.

        A send proves that its rank has issued all compute up to the compute of the sent value.
        """
        index, num_instrs, needs = self.graph.index, len(self.graph), self.graph.needs
        last_computed = -1
        for number, op in enumerate(self.messages):
            if op.number not in self.position_of_message:
                continue
            step, position = self.position_of_message[op.number]
            if op.kind == "send":
                last_computed = max(
                    last_computed, step * num_instrs + int(needs[:, position].max())
                )
                continue
            users = np.flatnonzero((needs == position).any(0))
            if users.size and step * num_instrs + int(users[0]) <= last_computed:
                message_text = f"message {number + 1} of rank {self.dump.rank} would be"
                raise self._make_program_error(
                    f"{message_text} {index.locate(position)[2]}, after the compute that needs it"
                )

    def _make_sequence(
        self, ops: list[RecordedOperation], transfers: list[int]
    ) -> TransferSequence:
        positions = np.array(transfers, np.int32)
        num_transfers = len(transfers)
        num_lost = self.dump.num_lost
        if not num_lost:
            numbers = self._number_messages(ops, transfers, 0)
            if len(numbers) < len(ops):
                raise self._make_mismatch_error(ops, transfers, len(numbers))
            return TransferSequence(positions, numbers, ops)
        if ops[0].batch and ops[0].is_done:
            # A part of the first batch may be lost, and the order within a batch is not recorded.
            ops = [op for op in ops if op.batch != ops[0].batch] or ops
        rank, buffer_hint = self.dump.rank, "a larger TORCH_FR_BUFFER_SIZE keeps more entries"
        if not ops[0].is_done:
            raise UsageError(
                f"the flight recorder of rank {rank} has overwritten {num_lost} entries, and the "
                f"oldest remaining message in {ops[0].group} has not ended: the position of the "
                "rank may be overwritten",
                hint=f"leave out --program; {buffer_hint}",
            )
        fitting_places = self._find_fitting_places(ops, transfers)
        if not fitting_places:
            raise self._make_mismatch_error(ops, transfers, None)
        if not self.order_mismatch and self._has_usable_counters(ops[0].group):
            steps, place = divmod(
                ops[0].logical_number - 1 - ops[0].collective_number, num_transfers
            )
            if place in fitting_places:
                numbers = self._number_messages(ops, transfers, place)
                return TransferSequence(
                    positions, numbers, ops, steps, place, len(fitting_places) == 1
                )
        if len(fitting_places) > 1:
            raise UsageError(
                f"the flight recorder of rank {rank} has overwritten {num_lost} entries, and the "
                f"remaining messages match {len(fitting_places)} positions in a step of "
                f"{self.graph.program.name}",
                hint=buffer_hint,
            )
        return TransferSequence(
            positions,
            self._number_messages(ops, transfers, fitting_places[0]),
            ops,
            None,
            fitting_places[0],
        )

    def _find_fitting_places(self, ops: list[RecordedOperation], transfers: list[int]) -> list[int]:
        """Return the places of the first message with which all messages match.

        A place is an index in `transfers`. Places with the same sequence of directions are checked
        once. For example, if a group has only one direction, all places have the same sequence.
        """
        directions = [self.directions[position] for position in transfers]
        is_fitting: dict[tuple[_Direction, ...], bool] = {}
        sequences = [(*directions[place:], *directions[:place]) for place in range(len(transfers))]
        for place, sequence in enumerate(sequences):
            if sequence not in is_fitting:
                is_fitting[sequence] = len(self._number_messages(ops, transfers, place)) == len(ops)
        return [place for place, sequence in enumerate(sequences) if is_fitting[sequence]]

    @cached_property
    def _ops_by_group(self) -> dict[RecordedGroup, list[RecordedOperation]]:
        ops_by_group: dict[RecordedGroup, list[RecordedOperation]] = defaultdict(list)
        for op in self.dump.ops:
            ops_by_group[op.group].append(op)
        return ops_by_group

    def _has_usable_counters(self, group: RecordedGroup) -> bool:
        """Return whether the counters of a process group show the number of earlier transfers.

        They show this number if torch counts each operation exactly once, and if all messages are
        transfers.
        """
        ops = self._ops_by_group[group]
        is_steady = all(
            b.logical_number == a.logical_number + 1
            and b.collective_number == a.collective_number + (not b.is_message)
            for a, b in pairwise(ops)
        )
        has_control_messages = any(is_control_message(op) for op in ops if op.is_message)
        return (
            not self.has_ambiguous_group
            and is_steady
            and not has_control_messages
            and ops[0].logical_number > ops[0].collective_number
        )

    def _number_messages(
        self, ops: list[RecordedOperation], transfers: list[int], place: int
    ) -> list[int]:
        """Return the transfer numbers of messages, if the first message is at `transfers[place]`.

        The result ends before the first message that does not match. The messages of a batch may be
        recorded in any order.
        """
        numbers: list[int] = []
        free_numbers: dict[_Direction, deque[int]] = defaultdict(deque)
        for index, op in enumerate(ops):
            if index == 0 or not op.batch or op.batch != ops[index - 1].batch:
                free_numbers.clear()
                end = index + 1
                while op.batch and end < len(ops) and ops[end].batch == op.batch:
                    end += 1
                for transfer_number in range(place + index, place + end) if transfers else ():
                    free_numbers[
                        self.directions[transfers[transfer_number % len(transfers)]]
                    ].append(transfer_number)
            if not free_numbers[self._direction_of(op)]:
                break
            numbers.append(free_numbers[self._direction_of(op)].popleft())
        return numbers

    def _make_mismatch_error(
        self, ops: list[RecordedOperation], transfers: list[int], position: int | None
    ) -> UsageError | _StepMismatch:
        rank = self.dump.rank
        if position is None:
            fact = f"the messages of rank {rank} in {ops[0].group} match no position in a step"
        elif transfers:
            instr = self.graph.index.locate(transfers[position % len(transfers)])[2]
            fact = (
                f"message {position + 1} of rank {rank} in {ops[position].group} is a "
                f"{ops[position]}, not {instr}"
            )
        else:
            fact = (
                f"rank {rank} has a {ops[position]} in {ops[position].group}, but no transfer in "
                "the program"
            )
        return self._make_program_error(fact) if self.order_mismatch else _StepMismatch(fact)

    def _make_program_error(self, fact: str) -> UsageError:
        return UsageError(
            f"the dumps do not match {self.graph.program.name}: {fact}",
            hint="give the program with the transfers that ran; "
            'torch writes it with schedule._dump_csv(FILE, "compute_comms")',
            fields=["program"],
        )
