"""Report in words where the ranks of a job are, and what holds them up.

`job_lines` needs the dumps alone.  `program_lines` says at which instruction of a program each rank
stands, and whether that is a deadlock of the program.
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
from schedir.io import terminal
from schedir.ir.instruction_index import NONE, InstructionIndex
from schedir.ir.program import Program

SHOWN = 16  # ranks, or copies of a program, that are told one by one


def job_lines(job: DistributedJob) -> list[str]:
    """The cause, as far as it is known, then where each rank stands by its operations."""
    stands: dict[str, list[int]] = {}  # many ranks at the same operation are one line
    for rank in job.dumps:
        stands.setdefault(_stands(job, rank, len(job.dumps) > SHOWN), []).append(rank)
    first = {*job.roots, *(wait.rank for wait in (*job.cycle, *job.unmet))}
    shown = sorted(stands, key=lambda text: first.isdisjoint(stands[text]))[:SHOWN]
    lines = _job_verdict(job)
    there = f"{len(job.dumps)} dump{'s' * (len(job.dumps) != 1)}"
    if job.missing:
        of = f"of {len(job.ranks)} ranks; there is none of rank {_listed(job.missing)}"
        lines.append(f"{there} {of}")
    else:
        lines.append(f"{there}, of all ranks that they name")
    for text in sorted(shown, key=lambda text: stands[text]):
        lines.append(f"  {_ranks(stands[text])}  {text}")
    if left := len(job.dumps) - sum(len(stands[text]) for text in shown):
        lines.append(f"  ... and {left} more ranks (--json has them all)")
    return [*lines, *_lost([*job.dumps.values()]), *_behind_lines(job.behind)]


def _stands(job: DistributedJob, rank: int, briefly: bool) -> str:
    """Where a rank stands; `briefly` without times, so that many ranks are told alike."""
    dump, waits = job.dumps[rank], job.waits[rank]
    if dump.begun is None:
        after = "nothing is recorded"
        if dump.ended:
            after = f"last ended {job.say(rank, dump.ended)}{_line_of(dump.ended)}"
        return f"nothing open; {after}{_ago(job, dump.since)}"
    op = waits[0].op if waits else dump.begun
    others = [_whom(job, [*some]) for _, some in groupby(waits, lambda w: (w.why, w.op))]
    said = "; ".join(dict.fromkeys(others)) or "which ranks have a part in it, no dump says"
    before = ""
    if op.is_message and not dump.lost:  # else nobody knows how many there were
        way = (op.group, op.kind, op.peer)
        count = sum((o.group, o.kind, o.peer) == way for o in dump.ops if o.number < op.number)
        before = f", after {count} in {op.group}"
    ago = "" if briefly else _ago(job, op.created)
    return f"{job.say(rank, op)}{before}: {said}{ago}{_line_of(op)}"


def _job_verdict(job: DistributedJob) -> list[str]:
    """The cause, as far as it can be told without a program."""
    lines = []
    if cycle := job.cycle:
        lines.append(f"ranks {_listed([wait.rank for wait in cycle])} wait for each other:")
        lines += [
            f"  rank {wait.rank}  {job.say(wait.rank, wait.op)}: {_whom(job, [wait])}"
            for wait in cycle[:SHOWN]
        ]
        if any(wait.why is WaitReason.NOT_ISSUED for wait in cycle):
            lines.append(
                "  a deadlock, if each waits there before it issues more; one that has posted a "
                "receive early may still compute (--program tells)"
            )
        else:
            lines.append(
                "  a deadlock, if what a rank issues passes in that order, as on one communicator "
                "(--program tells)"
            )
    for wait in _once(job.unmet):
        name = f"{job.say(wait.rank, wait.op)} of rank {wait.rank}"
        if wait.why is WaitReason.OTHER:
            unsure = job.behind or (wait.op.is_message and job.lost(wait))
            lines.append(f"{'it may be' if unsure else 'the cause:'} {name} {_whom(job, [wait])}")
        elif not cycle:
            lines.append(f"{name} {_all_there(job, wait)}{_apart(wait)}")
    late = [r for r in job.roots if r in job.dumps and job.dumps[r].begun is None]
    if len(late) > SHOWN:
        lines.append(
            f"{len(late)} ranks wait for nobody here, and others wait for them: ranks "
            f"{_listed(late)}; each may be the cause"
        )
        late = []
    waits = [wait for own in job.waits.values() for wait in own]
    alone = len(job.roots) == 1 and not job.behind and not cycle
    for rank in late:
        sure = alone and any(
            wait.on == rank and not (wait.op.kind == "recv" and job.lost(wait)) for wait in waits
        )
        lines.append(
            f"rank {rank} {'is' if sure else 'may be'} the cause: others wait for it, and it "
            "waits for nobody here; it computes, or is held up elsewhere, or its process is "
            f"gone{_did(job.dumps[rank])}"
        )
    if gone := [rank for rank in job.roots if rank not in job.dumps]:
        one = len(gone) == 1
        lines.append(
            f"{_ranks(gone)} {'is' if one else 'are'} waited for, and {'has' if one else 'have'} "
            f"left no dump: {'its process' if one else 'their processes'} may be gone"
        )
    return lines or ["nobody waits for anybody here: what keeps the job is outside of these dumps"]


def _all_there(job: DistributedJob, wait: PendingOperation) -> str:
    """Of what all of its ranks have issued, which of them have not come to it on their devices."""
    op = wait.op
    ranks = sorted({op.peer, wait.rank} if op.is_message else {*op.group.ranks})
    parts = {rank: job.part(wait.rank, op, rank) for rank in ranks if rank in job.dumps}
    over = [rank for rank, part in parts.items() if part and part.ended]
    began = [rank for rank, part in parts.items() if part and part.state == "started"]
    left = _listed([rank for rank in parts if rank not in (over or began)])
    if over:
        return (
            f"has ended on rank {_listed(over)}: rank {left} may be the cause, whose device "
            "has not come to it; or its dump is the older one"
        )
    if began and left:
        return (
            f"is issued by all of its ranks, and has started on rank {_listed(began)}: rank "
            f"{left} may be the cause, whose device has not come to it"
        )
    why = "it does not pass" if began else "its value is not computed yet, or it does not pass"
    return f"is issued by all of its ranks and nothing stands before it: {why}"


def _once(waits: Iterable[PendingOperation]) -> list[PendingOperation]:
    """One wait of each operation: its other side says the same."""
    kept: dict[object, PendingOperation] = {}
    for wait in waits:
        which = frozenset((wait.rank, wait.on)) if wait.op.is_message else wait.op.nth
        kept.setdefault((wait.op.group, which), wait)
    return [*kept.values()][:SHOWN]


def _apart(wait: PendingOperation) -> str:
    """That the two sides of a message may have gone by two communicators, and never meet."""
    part = wait.part
    if part is None or not wait.op.is_message or bool(wait.op.batch) == bool(part.batch):
        return ""
    batched, alone = (wait.rank, wait.on) if wait.op.batch else (wait.on, wait.rank)
    return (
        f"; rank {batched} has issued it in a batch and rank {alone} alone: torch has two "
        "communicators for these where they are made at first use, and then it never passes"
    )


def _did(dump: FlightRecorderDump) -> str:
    """What a rank has done, for who has no program."""
    done = Counter((op.kind, op.peer) for op in dump.ops if op.is_message)
    what = [
        f"{number} {kind}{'s' * (number > 1)} {'to' if kind == 'send' else 'from'} {peer}"
        for (kind, peer), number in done.most_common(6)
    ]
    return f" (after {', '.join(what)})" if what and not dump.lost else ""


def _lost(dumps: Sequence[FlightRecorderDump]) -> list[str]:
    lines = []
    if blind := [dump.rank for dump in dumps if dump.is_blind]:
        lines.append(
            f"the oldest entry that is left of rank {_listed(blind)} has not ended: where it "
            "stands may be lost, too"
        )
    if lost := [dump.rank for dump in dumps if dump.lost]:
        lines.append(
            f"the buffers of rank {_listed(lost)} have lost their beginning: messages that have "
            "not ended are paired in their order (a larger TORCH_FR_BUFFER_SIZE keeps more)"
        )
    return lines


# ---------------------------------------------------------------- words of both


def _listed(ranks: Sequence[int]) -> str:
    some = [*map(str, ranks[:8])] + [f"{len(ranks) - 8} more"] * (len(ranks) > 8)
    return terminal.listed(some)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _whom(job: DistributedJob, waits: Sequence[PendingOperation]) -> str:
    """What the ranks do that an operation waits for, which is the same of all."""
    first = waits[0]
    ranks = _ranks([wait.on for wait in waits])
    if first.why is WaitReason.OTHER and first.part:
        here, there = (
            op.shape if op.is_message else f"{op.kind} of {op.shape}"
            for op in (first.op, first.part)
        )
        return f"does not fit {ranks}: {here} here, {there} there"
    ahead = job.dumps[first.on].begun if first.why is WaitReason.BEHIND else None
    behind = f" {job.say(first.on, ahead)}" if ahead else ""
    return f"{ranks} {'has' if len(waits) == 1 else 'have each'} {first.why.value}{behind}"


def _ago(job: DistributedJob, when: int) -> str:
    """How long before the last sign of life of any rank."""
    newest = max((dump.last_time for dump in job.dumps.values()), default=0)
    seconds = (newest - when) / 1e9
    return f", {seconds:.3g} s before the newest entry" if when and seconds >= 0.001 else ""


def _line_of(op: RecordedOperation) -> str:
    return f", at {op.line}" if op.line else ""


def _behind_lines(ranks: Sequence[int]) -> list[str]:
    """That dumps are of different moments."""
    if not ranks:
        return []
    return [
        f"the dump of rank {_listed(ranks)} is older than others, in which has ended what it has "
        "not issued: it has gone on since, and what is said of it was so then"
    ]


# ---------------------------------------------------------------- with a program


def named_lines(
    job: DistributedJob, program: Program, copies: Sequence[MatchedProgram]
) -> list[str]:
    """Where each rank stands, by the names that a program of another order gives its messages."""
    index = InstructionIndex.of(program)
    names: dict[tuple[int, int], str] = {}
    for matched in copies:
        for key, at in matched.names.items():
            _, number, instr = index.locate(at)
            names[key] = f"#{number} {instr}"
    why = next(matched.loose for matched in copies if matched.loose)
    return [
        f"{program.name} has its transfers in another order: {why}; so messages have the names "
        "that their numbers between two ranks give, and of its deadlocks nothing is said",
        *job_lines(DistributedJob(job.dumps, names)),
    ]


def program_lines(job: DistributedJob, verdicts: Sequence[ProgramVerdict]) -> list[str]:
    """Where each rank stands in a program, and whether this is a deadlock of it."""
    shown = ([v for v in verdicts if v.circle or v.causes] or verdicts)[:SHOWN]
    lines = [line for verdict in shown for line in _ProgramCopyReport(job, verdict).lines()]
    if left := len(verdicts) - len(shown):
        lines.append(f"... and {left} more copies of the program")
    return lines


class _ProgramCopyReport:
    """The report of one copy of the program."""

    def __init__(self, job: DistributedJob, verdict: ProgramVerdict) -> None:
        self.job, self.verdict = job, verdict
        self.placed, self.matched = verdict.placed, verdict.matched
        ranks = self.matched.ranks
        behind = {ranks[own] for own in self.placed.behind}
        self.behind = sorted({*job.behind} & {*ranks} | behind)

    def rank(self, own: int) -> str:
        """A rank of the program, and which of the job it is."""
        rank = self.matched.ranks[own]
        return f"rank {own}" if rank == own else f"rank {own} ({rank} of the job)"

    def owner(self, at: int) -> str:
        """The rank of an instruction."""
        return self.rank(int(self.placed.rank[at]))

    def names(self, at: int) -> tuple[str, str]:
        """The number of an instruction on its rank, and the instruction."""
        _, number, instr = self.placed.graph.index.locate(at)
        return f"#{number}", str(instr)

    def name(self, at: int) -> str:
        return " ".join(self.names(at))

    def lines(self) -> list[str]:
        matched = self.matched
        same = matched.ranks == tuple(range(len(matched.ranks)))
        of = "" if same else f" on ranks {_listed(matched.ranks)}"
        step = "a step; which, the buffers do not say"
        if matched.step is not None:
            step = f"after {matched.step} whole step{'s' * (matched.step != 1)}"
        program = self.placed.graph.program.name
        lines = [f"{program}{of}, {step}, under {self.verdict.model}", *self._outcome()]
        lines.append("where its ranks stand:")
        if matched.left_out:
            lines.append(
                f"  {matched.left_out} messages are left out: shapes or objects, and no transfers"
            )
        if matched.counted:
            lines.append(
                f"  of rank {_listed(matched.counted)} only counters tell the place in the step, "
                "which holds if all that the buffer has lost were transfers"
            )
        lines += [f"  {self._stands(place)}" for place in self.verdict.places]
        lines += [f"  {line}" for line in _behind_lines(self.behind)]
        silent = [r for r, there in zip(matched.ranks, matched.dumped, strict=True) if not there]
        return lines + [f"  there is no dump of rank {_listed(silent)}"] * bool(silent)

    def _stands(self, place: RankPosition) -> str:
        rank, at, placed = self.rank(place.rank), place.at, self.placed
        if at is None:
            return f"{rank}  has ended all its transfers of this step"
        stands = f"{rank} {self.name(at)} "
        if not placed.transfer[at]:
            needs = placed.chain(at)[0][0].needs
            return (
                f"{stands} meets others, and {self.owner(needs)} stands before {self.name(needs)}"
            )
        if not place.late:
            return f"{stands} {self._needs(at)}"
        between = [self.names(k)[1] for k in range(*place.between) if not placed.sure[k]]
        if len(between) > 4:
            between[2:-1] = ["..."]
        before = f"; before it: {', '.join(between)}" if between else ""
        return f"{stands} has not been issued, and nothing keeps it{before}"

    def _needs(self, at: int) -> str:
        """What a transfer that has not ended needs of the other side."""
        placed = self.placed
        other = int(placed.graph.partner[at])
        number, instr = self.names(other)
        needs = f"needs {instr} from {self.owner(other)}, which"
        if placed.ended[other]:
            return f"{needs} has ended it"
        if placed.silent[other]:
            return f"{needs} has left no dump"
        if not self.matched.issued[other]:
            stands = placed.place(int(placed.rank[other])).at
            there = (
                f", and stands at {self.names(stands)[0]}" if stands not in (None, other) else ""
            )
            return f"{needs} has not come to it: it is {number} there{there}"
        before = int(placed.graph.queue_predecessor[other])
        behind = (
            f", behind {self.name(before)}" if before != NONE and not placed.may[before] else ""
        )
        return f"{needs} has issued it as {number}{behind}"

    def _outcome(self) -> list[str]:
        """Whether it is a deadlock, and else the causes."""
        verdict = self.verdict
        if verdict.is_deadlock:
            lines = ["this is a deadlock of the program:"]
            if isinstance(verdict.refusal, DeadlockError):
                return lines + str(verdict.refusal).splitlines()
            return lines + [
                f"  {self.owner(at)} {self.name(at)} waits for {self.name(needs)} of "
                f"{self.owner(needs)}"
                for at, needs in verdict.circle
            ]
        if not verdict.causes:
            return ["nobody waits for a message of this step"]
        whether = "is" if len(verdict.causes) == 1 and not self.behind else "may be"
        lines = [line for cause in verdict.causes for line in self._cause(cause, whether)]
        if verdict.refusal is None:
            end = (
                f"the program finishes under {verdict.model}: this is no deadlock of it, but a wait"
            )
        else:
            kind = type(verdict.refusal).__name__
            end = f"this is not yet it, but check refuses the program under {verdict.model}: {kind}"
        return [*lines, end]

    def _cause(self, cause: StallReason, whether: str) -> list[str]:
        """What is said of a cause: `whether` it is that, or one of several that may be."""
        who = " or ".join(dict.fromkeys(map(self.owner, cause.at)))
        what = " or ".join(map(self.name, cause.at))
        if cause.kind is ChainEnd.SILENT:
            said = f"is waited for, at {what}, and has left no dump: its process may be gone"
        elif cause.kind is ChainEnd.STUCK:
            both = " and ".join(f"{self.name(at)} of {self.owner(at)}" for at in cause.at)
            return [f"{both} are issued, and nothing keeps them: the message does not pass"]
        elif cause.kind is ChainEnd.ENDED:
            said = (
                f"may be the cause: the other side of {what} has ended; its device has not come "
                "to it, or its dump is the older one"
            )
        elif cause.kind is ChainEnd.LATE:
            said = (
                f"{whether} the cause: its host has not come to {what}; it computes, or is held up "
                "before it, or its process is gone"
            )
        elif len(cause.at) == 1 and self.placed.is_free(cause.at[0]):
            said = (
                f"{whether} the cause: {what} is issued on both sides, and nothing stands before "
                "it; its value has not been computed, or it does not pass"
            )
        else:
            said = (
                f"may be the cause: {what} is issued, and so is the other side, and what stands "
                "before it may still be computed; or it does not pass (with "
                "TORCH_NCCL_ENABLE_TIMING=1 dumps tell which side has started)"
            )
        lines = [f"{who} {said}"]
        if cause.kind is ChainEnd.LATE:
            rank = self.matched.ranks[int(self.placed.rank[cause.at[0]])]
            for wait in self.job.waits.get(rank, ()):
                if not wait.op.is_message:
                    lines.append(
                        f"  it is in {wait.op}, {_whom(self.job, [wait])}{_line_of(wait.op)}"
                    )
        return lines
