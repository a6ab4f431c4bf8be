"""Report in words where each rank of a job waits, and the cause of the hang.

`describe_job` needs only the dumps. `describe_program` also names the instruction of a program that
each rank has reached, and reports whether the program has a deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from schedir.errors import DeadlockError
from schedir.hang_diagnosis.flight_recorder import FlightRecorderDump, RecordedOperation
from schedir.hang_diagnosis.program_matching import MatchedProgram
from schedir.hang_diagnosis.rank_positions import (
    ChainEnd,
    ProgramVerdict,
    RankPosition,
    StallReason,
)
from schedir.hang_diagnosis.wait_graph import DistributedJob, PendingOperation, WaitReason
from schedir.io import terminal_output
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.program import Program

MAX_SHOWN = 16  # A report lists at most this number of ranks, waits or copies of a program.


def describe_job(job: DistributedJob) -> list[str]:
    """Report the likely cause of the hang, and then where each rank waits.

    Args:
        job: The dumps of the job.

    Returns:
        The lines of the report.
    """
    ranks_by_text: dict[str, list[int]] = {}  # One line describes all ranks at the same operation.
    for rank in job.dumps:
        ranks_by_text.setdefault(
            _describe_position(job, rank, len(job.dumps) > MAX_SHOWN), []
        ).append(rank)
    decisive_ranks = {*job.root_ranks, *(wait.rank for wait in (*job.cycle, *job.unmatched))}
    shown_texts = sorted(
        ranks_by_text, key=lambda text: decisive_ranks.isdisjoint(ranks_by_text[text])
    )[:MAX_SHOWN]
    lines = _describe_job_cause(job)
    dumps_text = f"{len(job.dumps)} dump{'s' * (len(job.dumps) != 1)}"
    if ranks := job.ranks_without_dump:
        verb = "has" if len(ranks) == 1 else "have"
        lines.append(f"{dumps_text} of {len(job.ranks)} ranks; {_name_ranks(ranks)} {verb} no dump")
    else:
        lines.append(f"{dumps_text}, of all ranks in their process groups")
    for text in sorted(shown_texts, key=lambda text: ranks_by_text[text]):
        lines.append(f"  {_name_ranks(ranks_by_text[text])}  {text}")
    if num_left := len(job.dumps) - sum(len(ranks_by_text[text]) for text in shown_texts):
        lines.append(f"  ... and {num_left} more ranks (--json has them all)")
    return [
        *lines,
        *_describe_lost_entries([*job.dumps.values()]),
        *_describe_old_dumps(job.old_dump_ranks),
    ]


def _describe_position(job: DistributedJob, rank: int, is_brief: bool) -> str:
    """Describe where a rank waits.

    If `is_brief`, omit times, so that similar ranks share a line.
    """
    dump, waits = job.dumps[rank], job.waits[rank]
    if dump.current_op is None:
        ended_text = "nothing is recorded"
        if dump.last_ended_op:
            ended_text = (
                f"the last that ended is {job.describe_operation(rank, dump.last_ended_op)}"
                f"{_describe_source_line(dump.last_ended_op)}"
            )
        return f"no pending operation; {ended_text}{_describe_age(job, dump.current_op_time)}"
    op = waits[0].op if waits else dump.current_op
    peer_texts = [
        _describe_peers(job, [*group]) for _, group in groupby(waits, lambda w: (w.reason, w.op))
    ]
    reasons = "; ".join(dict.fromkeys(peer_texts)) or "the dumps do not contain its ranks"
    count_text = ""
    # If entries are lost, the number of earlier messages is unknown.
    if op.is_message and not dump.num_lost:
        key = (op.group, op.kind, op.peer)
        count = sum((o.group, o.kind, o.peer) == key for o in dump.ops if o.number < op.number)
        count_text = f", after {count} of these in {op.group}"
    age_text = "" if is_brief else _describe_age(job, op.created_time)
    name = job.describe_operation(rank, op)
    return f"{name}{count_text}: {reasons}{age_text}{_describe_source_line(op)}"


def _describe_job_cause(job: DistributedJob) -> list[str]:
    """Describe the cause, as far as the dumps show it without a program."""
    lines = []
    if cycle := job.cycle:
        lines.append(f"ranks {_list_ranks([wait.rank for wait in cycle])} wait for each other:")
        lines += [
            f"  rank {wait.rank}  {job.describe_operation(wait.rank, wait.op)}: "
            f"{_describe_peers(job, [wait])}"
            for wait in cycle[:MAX_SHOWN]
        ]
        if any(wait.reason is WaitReason.NOT_ISSUED for wait in cycle):
            lines.append(
                "  a deadlock, if these ranks wait before they issue more; a rank that has posted "
                "a receive early may still compute (use --program to find out)"
            )
        else:
            lines.append(
                "  a deadlock, if the operations of a rank pass in the order of their issue, as on "
                "one communicator (use --program to find out)"
            )
    for wait in _deduplicate_waits(job.unmatched):
        name = f"{job.describe_operation(wait.rank, wait.op)} of rank {wait.rank}"
        if wait.reason is WaitReason.MISMATCH:
            is_unsure = job.old_dump_ranks or (wait.op.is_message and job.has_lost_entries(wait))
            peers_text = _describe_peers(job, [wait])
            lines.append(f"{'a possible' if is_unsure else 'the'} cause: {name} {peers_text}")
        elif not cycle:
            lines.append(
                f"{name} {_describe_issued_by_all(job, wait)}{_describe_mixed_batching(wait)}"
            )
    late_ranks = [r for r in job.root_ranks if r in job.dumps and job.dumps[r].current_op is None]
    if len(late_ranks) > MAX_SHOWN:
        lines.append(
            f"{len(late_ranks)} ranks have no pending operation, and others wait for them: ranks "
            f"{_list_ranks(late_ranks)}; each may be the cause"
        )
        late_ranks = []
    waits = [wait for rank_waits in job.waits.values() for wait in rank_waits]
    is_only_root = len(job.root_ranks) == 1 and not job.old_dump_ranks and not cycle
    for rank in late_ranks:
        is_sure = is_only_root and any(
            wait.awaited_rank == rank
            and not (wait.op.kind == "recv" and job.has_lost_entries(wait))
            for wait in waits
        )
        lines.append(
            f"rank {rank} {'is' if is_sure else 'may be'} the cause: others wait for it, and it "
            "has no pending operation; it computes, waits for something else, or its process is "
            f"gone{_describe_done(job.dumps[rank])}"
        )
    if missing_ranks := [rank for rank in job.root_ranks if rank not in job.dumps]:
        is_single = len(missing_ranks) == 1
        lines.append(
            f"other ranks wait for {_name_ranks(missing_ranks)}, and "
            f"{'it has' if is_single else 'they have'} no dump: "
            f"{'its process' if is_single else 'their processes'} may be gone"
        )
    return lines or ["no rank waits for another rank: the dumps do not show why the job hangs"]


def _describe_issued_by_all(job: DistributedJob, wait: PendingOperation) -> str:
    """Describe which devices have not started an operation that all ranks have issued."""
    op = wait.op
    ranks = sorted({op.peer, wait.rank} if op.is_message else {*op.group.ranks})
    sides = {rank: job.find_counterpart(wait.rank, op, rank) for rank in ranks if rank in job.dumps}
    ended_ranks = [rank for rank, side in sides.items() if side and side.is_done]
    started_ranks = [rank for rank, side in sides.items() if side and side.state == "started"]
    first_ranks = ended_ranks or started_ranks
    other_ranks = _list_ranks([rank for rank in sides if rank not in first_ranks])
    if ended_ranks:
        return (
            f"has ended on rank {_list_ranks(ended_ranks)}: rank {other_ranks} may be the cause, "
            f"because its device has not reached it; or the dump of rank {other_ranks} is older"
        )
    if started_ranks and other_ranks:
        return (
            f"is issued by all of its ranks, and has started on rank {_list_ranks(started_ranks)}: "
            f"rank {other_ranks} may be the cause, because its device has not reached it"
        )
    cause = "" if started_ranks else "its value is not computed yet, or "
    return f"is issued by all of its ranks, and no operation is before it: {cause}it does not pass"


def _deduplicate_waits(waits: Iterable[PendingOperation]) -> list[PendingOperation]:
    """Return one wait per operation. Waits of other ranks for the operation have the same cause."""
    wait_by_op: dict[object, PendingOperation] = {}
    for wait in waits:
        operation_key = (
            frozenset((wait.rank, wait.awaited_rank))
            if wait.op.is_message
            else wait.op.sequence_number
        )
        wait_by_op.setdefault((wait.op.group, operation_key), wait)
    return [*wait_by_op.values()][:MAX_SHOWN]


def _describe_mixed_batching(wait: PendingOperation) -> str:
    """Warn if only one side of a message is in a batch.

    The two sides may then use two different communicators.
    """
    side = wait.counterpart
    if side is None or not wait.op.is_message or bool(wait.op.batch) == bool(side.batch):
        return ""
    batched_rank, single_rank = (
        (wait.rank, wait.awaited_rank) if wait.op.batch else (wait.awaited_rank, wait.rank)
    )
    return (
        f"; rank {batched_rank} has issued it in a batch, and rank {single_rank} alone: if "
        "communicators are lazy, torch uses two of them for these, and the message never passes"
    )


def _describe_done(dump: FlightRecorderDump) -> str:
    """Return the number of messages that a rank has completed, by direction and peer, as text."""
    message_counts = Counter((op.kind, op.peer) for op in dump.ops if op.is_message)
    counts = [
        f"{number} {kind}{'s' * (number > 1)} {'to' if kind == 'send' else 'from'} {peer}"
        for (kind, peer), number in message_counts.most_common(6)
    ]
    return f" (after {', '.join(counts)})" if counts and not dump.num_lost else ""


def _describe_lost_entries(dumps: Sequence[FlightRecorderDump]) -> list[str]:
    lines = []
    if unknown_ranks := [dump.rank for dump in dumps if dump.may_have_lost_position]:
        lines.append(
            f"the oldest remaining entry of {_name_ranks(unknown_ranks)} has not ended: the "
            "operation at which the rank waits may be lost, too"
        )
    if lossy_ranks := [dump.rank for dump in dumps if dump.num_lost]:
        lines.append(
            f"the buffers of {_name_ranks(lossy_ranks)} have lost their first entries: messages "
            "that have not ended are paired in their order (a larger TORCH_FR_BUFFER_SIZE keeps "
            "more)"
        )
    return lines


# ---------------------------------------------------------------- text of both reports


def _list_ranks(ranks: Sequence[int]) -> str:
    names = [*map(str, ranks[:8])] + [f"{len(ranks) - 8} more"] * (len(ranks) > 8)
    return terminal_output.join_words(names)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_list_ranks(ranks)}"


def _describe_peers(job: DistributedJob, waits: Sequence[PendingOperation]) -> str:
    """Describe the ranks that an operation waits for. All waits must have the same reason."""
    wait = waits[0]
    ranks = _name_ranks([w.awaited_rank for w in waits])
    if wait.reason is WaitReason.MISMATCH and wait.counterpart:
        own_text, other_text = (
            op.shape_text if op.is_message else f"{op.kind} of {op.shape_text}"
            for op in (wait.op, wait.counterpart)
        )
        return f"does not match {ranks}: {own_text} here, {other_text} there"
    blocker = job.dumps[wait.awaited_rank].current_op if wait.reason is WaitReason.QUEUED else None
    blocker_text = f" {job.describe_operation(wait.awaited_rank, blocker)}" if blocker else ""
    verb = "has" if len(waits) == 1 else "have each"
    return f"{ranks} {verb} {wait.reason.value}{blocker_text}"


def _describe_age(job: DistributedJob, time: int) -> str:
    """Return, as text, the difference between a time and the time of the newest entry of all dumps.

    `time` is in nanoseconds.
    """
    newest = max((dump.last_time for dump in job.dumps.values()), default=0)
    seconds = (newest - time) / 1e9
    return f", {seconds:.3g} s before the newest entry" if time and seconds >= 0.001 else ""


def _describe_source_line(op: RecordedOperation) -> str:
    return f", at {op.source_line}" if op.source_line else ""


def _describe_old_dumps(ranks: Sequence[int]) -> list[str]:
    if not ranks:
        return []
    return [
        f"the dump of {_name_ranks(ranks)} is older than others, in which operations have ended "
        "that it has not issued: the rank has made progress since then"
    ]


# ---------------------------------------------------------------- with a program


def describe_named_job(
    job: DistributedJob, program: Program, copies: Sequence[MatchedProgram]
) -> list[str]:
    """Report where each rank waits, if the job's transfers have another order than the program's.

    The report names messages after instructions of the program. The messages between two ranks are
    numbered, and the number of a message determines its instruction. Deadlocks of the program are
    not reported.

    Args:
        job: The dumps of the job.
        program: The program.
        copies: The copies of the program in the job. At least one has an `order_mismatch`.

    Returns:
        The lines of the report.
    """
    index = InstructionIndex.from_program(program)
    names: dict[tuple[int, int], str] = {}
    for matched in copies:
        for key, position in matched.position_of_message.items():
            _, number, instr = index.locate(position)
            names[key] = f"#{number} {instr}"
    mismatch = next(matched.order_mismatch for matched in copies if matched.order_mismatch)
    return [
        f"{program.name} has its transfers in another order: {mismatch}; so messages are named by "
        "their numbers between two ranks, and deadlocks of the program are not reported",
        *describe_job(DistributedJob(job.dumps, names)),
    ]


def describe_program(job: DistributedJob, verdicts: Sequence[ProgramVerdict]) -> list[str]:
    """Report where each rank waits in a program, and whether the program has a deadlock.

    Args:
        job: The dumps of the job.
        verdicts: The verdict on each copy of the program.

    Returns:
        The lines of the report.
    """
    shown_verdicts = ([v for v in verdicts if v.cycle or v.causes] or verdicts)[:MAX_SHOWN]
    lines = [
        line for verdict in shown_verdicts for line in _ProgramCopyReport(job, verdict).to_lines()
    ]
    if num_left := len(verdicts) - len(shown_verdicts):
        lines.append(f"... and {num_left} more copies of the program")
    return lines


class _ProgramCopyReport:
    """The report of one copy of the program. Each pipeline of the job runs a copy.

    Args:
        job: The dumps of the job.
        verdict: The verdict on the copy.
    """

    def __init__(self, job: DistributedJob, verdict: ProgramVerdict) -> None:
        self.job = job
        self.verdict = verdict
        self.positioned = verdict.positioned
        self.matched = verdict.matched
        ranks = self.matched.ranks
        old_ranks = {ranks[program_rank] for program_rank in self.positioned.old_dump_ranks}
        self.old_dump_ranks = sorted({*job.old_dump_ranks} & {*ranks} | old_ranks)

    def name_rank(self, program_rank: int) -> str:
        """Name a rank of the program. Add the rank of the job if it has another number."""
        rank = self.matched.ranks[program_rank]
        return (
            f"rank {program_rank}"
            if rank == program_rank
            else f"rank {program_rank} ({rank} of the job)"
        )

    def name_owner(self, position: int) -> str:
        """Name the rank of an instruction."""
        return self.name_rank(int(self.positioned.rank_of[position]))

    def split_name(self, position: int) -> tuple[str, str]:
        """Return the number of an instruction on its rank, and the instruction, as text."""
        _, number, instr = self.positioned.graph.index.locate(position)
        return f"#{number}", str(instr)

    def name_instruction(self, position: int) -> str:
        return " ".join(self.split_name(position))

    def to_lines(self) -> list[str]:
        matched = self.matched
        is_same_order = matched.ranks == tuple(range(len(matched.ranks)))
        ranks_text = "" if is_same_order else f" on ranks {_list_ranks(matched.ranks)}"
        step = "in an unknown step"
        if matched.step is not None:
            step = f"after {matched.step} complete step{'s' * (matched.step != 1)}"
        program = self.positioned.graph.program.name
        lines = [
            f"{program}{ranks_text}, {step}, under {self.verdict.progress_model}",
            *self._describe_outcome(),
        ]
        lines.append("positions of its ranks:")
        if matched.num_ignored:
            lines.append(
                f"  {matched.num_ignored} messages are ignored: they are shapes or objects, not "
                "transfers"
            )
        if matched.counter_ranks:
            lines.append(
                f"  {_name_ranks(matched.counter_ranks)}: the position comes from counters, and is "
                "right if all lost entries of the buffer were transfers"
            )
        lines += [f"  {self._describe_position(position)}" for position in self.verdict.positions]
        lines += [f"  {line}" for line in _describe_old_dumps(self.old_dump_ranks)]
        silent_ranks = [
            r for r, has_dump in zip(matched.ranks, matched.has_dump, strict=True) if not has_dump
        ]
        return lines + [f"  there is no dump of {_name_ranks(silent_ranks)}"] * bool(silent_ranks)

    def _describe_position(self, rank_position: RankPosition) -> str:
        rank = self.name_rank(rank_position.rank)
        position = rank_position.position
        positioned = self.positioned
        if position is None:
            return f"{rank}  has ended all its transfers of this step"
        position_text = f"{rank} {self.name_instruction(position)} "
        if not positioned.is_transfer[position]:
            needed_position = positioned.follow_waits(position)[0][0].needed_position
            return (
                f"{position_text} waits for {self.name_owner(needed_position)}, which has not "
                f"reached {self.name_instruction(needed_position)}"
            )
        if not rank_position.is_late:
            return f"{position_text} {self._describe_need(position)}"
        open_instrs = [
            self.split_name(k)[1]
            for k in range(*rank_position.compute_range)
            if not positioned.surely_ended[k]
        ]
        if len(open_instrs) > 4:
            open_instrs[2:-1] = ["..."]
        open_text = f"; before it: {', '.join(open_instrs)}" if open_instrs else ""
        return f"{position_text} has not been issued, and waits for no other rank{open_text}"

    def _describe_need(self, position: int) -> str:
        """Describe the progress of the other side of a transfer that has not ended."""
        positioned = self.positioned
        other = int(positioned.graph.partner[position])
        number, instr = self.split_name(other)
        need_text = f"needs {instr} from {self.name_owner(other)}, which"
        if positioned.ended_mask[other]:
            return f"{need_text} has ended it"
        if positioned.has_no_dump[other]:
            return f"{need_text} has no dump"
        if not self.matched.issued_mask[other]:
            other_position = positioned.find_position(int(positioned.rank_of[other])).position
            location_text = (
                f", and the rank is at {self.split_name(other_position)[0]}"
                if other_position not in (None, other)
                else ""
            )
            return f"{need_text} has not reached it: it is {number} there{location_text}"
        predecessor = int(positioned.graph.queue_predecessor[other])
        predecessor_text = (
            f", after {self.name_instruction(predecessor)}"
            if predecessor != NO_POSITION and not positioned.possibly_ended[predecessor]
            else ""
        )
        return f"{need_text} has issued it as {number}{predecessor_text}"

    def _describe_outcome(self) -> list[str]:
        """Report a deadlock, or else the causes of the wait."""
        verdict = self.verdict
        if verdict.is_deadlock:
            lines = ["this is a deadlock of the program:"]
            if isinstance(verdict.check_error, DeadlockError):
                return lines + str(verdict.check_error).splitlines()
            return lines + [
                f"  {self.name_owner(position)} {self.name_instruction(position)} waits for "
                f"{self.name_instruction(needed_position)} of "
                f"{self.name_owner(needed_position)}"
                for position, needed_position in verdict.cycle
            ]
        if not verdict.causes:
            return ["no rank waits for a message of this step"]
        certainty = "is" if len(verdict.causes) == 1 and not self.old_dump_ranks else "may be"
        lines = [
            line for cause in verdict.causes for line in self._describe_cause(cause, certainty)
        ]
        if verdict.check_error is None:
            conclusion = (
                f"the program finishes under {verdict.progress_model}: this is a wait, not a "
                "deadlock of the program"
            )
        else:
            kind = type(verdict.check_error).__name__
            conclusion = (
                "this is not a deadlock yet, but `check` refuses the program under "
                f"{verdict.progress_model}: {kind}"
            )
        return [*lines, conclusion]

    def _describe_cause(self, cause: StallReason, certainty: str) -> list[str]:
        """Describe a cause. `certainty` is "is", or "may be" if other causes are possible."""
        owners = " or ".join(dict.fromkeys(map(self.name_owner, cause.positions)))
        ops = " or ".join(map(self.name_instruction, cause.positions))
        if cause.kind is ChainEnd.NO_DUMP:
            problem = f"has no dump, and others wait for it at {ops}: its process may be gone"
        elif cause.kind is ChainEnd.STUCK:
            sides = " and ".join(
                f"{self.name_instruction(k)} of {self.name_owner(k)}" for k in cause.positions
            )
            return [f"{sides} are issued, and wait for nothing else: the message does not pass"]
        elif cause.kind is ChainEnd.ENDED:
            problem = (
                f"may be the cause: the other side of {ops} has ended; its device has not reached "
                "its side, or its dump is older"
            )
        elif cause.kind is ChainEnd.NOT_ISSUED:
            problem = (
                f"{certainty} the cause: its host has not reached {ops}; it computes, waits for "
                "something else, or its process is gone"
            )
        elif len(cause.positions) == 1 and self.positioned.is_unblocked(cause.positions[0]):
            problem = (
                f"{certainty} the cause: {ops} is issued on both sides, and no operation is before "
                "it; its value has not been computed, or it does not pass"
            )
        else:
            problem = (
                f"may be the cause: {ops} is issued on both sides; instructions before it may "
                "still compute, or it does not pass (with TORCH_NCCL_ENABLE_TIMING=1, dumps show "
                "which side has started)"
            )
        lines = [f"{owners} {problem}"]
        if cause.kind is ChainEnd.NOT_ISSUED:
            rank = self.matched.ranks[int(self.positioned.rank_of[cause.positions[0]])]
            for wait in self.job.waits.get(rank, ()):
                if not wait.op.is_message:
                    lines.append(
                        f"  it waits in {wait.op}: "
                        f"{_describe_peers(self.job, [wait])}{_describe_source_line(wait.op)}"
                    )
        return lines
