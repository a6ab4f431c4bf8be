"""Told with a program: at which instruction each rank stands, and whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedir.dumps.matched import Matched
from schedir.dumps.placed import Cause, Kind, Place
from schedir.dumps.standing import Job
from schedir.dumps.told import SHOWN, behind_lines, job_lines, line_of, listed, whom
from schedir.dumps.verdict import Verdict
from schedir.errors import DeadlockError
from schedir.ir.index import NONE, Index
from schedir.ir.program import Program


def program_lines(job: Job, verdicts: Sequence[Verdict]) -> list[str]:
    """Where each rank stands in a program, and whether this is a deadlock of it."""
    lines: list[str] = []
    stuck = [v for v in verdicts if v.circle or v.causes] or [*verdicts]
    for verdict in stuck[:SHOWN]:
        lines += _copy(job, verdict)
    if len(verdicts) > len(stuck[:SHOWN]):
        lines.append(f"... and {len(verdicts) - len(stuck[:SHOWN])} more copies of the program")
    return lines


def named_lines(job: Job, program: Program, copies: Sequence[Matched]) -> list[str]:
    """Where each rank stands, by the names that a program of another order gives its messages."""
    index = Index.of(program)
    names: dict[tuple[int, int], str] = {}
    for matched in copies:
        for key, at in matched.names.items():
            _, number, instr = index.locate(at)
            names[key] = f"#{number} {instr}"
    why = next(matched.loose for matched in copies if matched.loose)
    return [
        f"{program.name} has its transfers in another order: {why}; so messages have the names "
        "that their numbers between two ranks give, and of its deadlocks nothing is said",
        *job_lines(replace(job, names=names)),
    ]


def _copy(job: Job, verdict: Verdict) -> list[str]:
    matched, graph = verdict.matched, verdict.placed.graph
    program = graph.program
    same = matched.ranks == tuple(range(len(matched.ranks)))
    of = "" if same else f" on ranks {listed(matched.ranks)}"
    if matched.step is None:
        step = "a step; which, the buffers do not say"
    else:
        step = f"after {matched.step} whole step{'s' * (matched.step != 1)}"
    lines = [f"{program.name}{of}, {step}, under {verdict.model}"]
    lines += _program_verdict(job, verdict)
    lines.append("where its ranks stand:")
    if matched.left_out:
        lines.append(
            f"  {matched.left_out} messages are left out: shapes or objects, and no transfers"
        )
    if matched.counted:
        lines.append(
            f"  of rank {listed(matched.counted)} only counters tell the place in the step, which "
            "holds if all that the buffer has lost were transfers"
        )
    lines += [f"  {_place(verdict, place)}" for place in verdict.places]
    lines += [f"  {line}" for line in behind_lines(_behind(job, verdict))]
    silent = [r for r, there in zip(matched.ranks, matched.dumped, strict=True) if not there]
    if silent:
        lines.append(f"  there is no dump of rank {listed(silent)}")
    return lines


def _behind(job: Job, verdict: Verdict) -> list[int]:
    """The ranks of the job of this copy whose dumps are older than others."""
    ranks = verdict.matched.ranks
    return sorted({*job.behind} & {*ranks} | {ranks[own] for own in verdict.placed.behind})


def _place(verdict: Verdict, place: Place) -> str:
    rank = _rank(verdict, place.rank)
    if place.at is None:
        return f"{rank}  has ended all its transfers of this step"
    number, instr = _name(verdict, place.at)
    if not verdict.placed.transfer[place.at]:
        links, _ = verdict.placed.chain(place.at)
        needs = " ".join(_name(verdict, links[0].needs))
        there = _rank(verdict, int(verdict.placed.rank[links[0].needs]))
        return f"{rank} {number} {instr}  meets others, and {there} stands before {needs}"
    if place.late:
        before = _since(verdict, place)
        return f"{rank} {number} {instr}  has not been issued, and nothing keeps it{before}"
    return f"{rank} {number} {instr}  {_needs(verdict, place.at)}"


def _needs(verdict: Verdict, at: int) -> str:
    """What a transfer that has not ended needs of the other side."""
    placed = verdict.placed
    other = int(placed.graph.partner[at])
    there = int(placed.rank[other])
    number, instr = _name(verdict, other)
    needs = f"needs {instr} from {_rank(verdict, there)}, which"
    if placed.ended[other]:
        return f"{needs} has ended it"
    if placed.silent[other]:
        return f"{needs} has left no dump"
    if not verdict.matched.issued[other]:
        place = placed.place(there)
        stands = (
            f", and stands at {_name(verdict, place.at)[0]}"
            if place.at not in (None, other)
            else ""
        )
        return f"{needs} has not come to it: it is {number} there{stands}"
    before = int(placed.graph.queue_predecessor[other])
    if before != NONE and not placed.ended[other] and not placed.may[before]:
        return f"{needs} has issued it as {number}, behind {' '.join(_name(verdict, before))}"
    return f"{needs} has issued it as {number}"


def _since(verdict: Verdict, place: Place) -> str:
    """What a rank may be computing."""
    lo, hi = place.between
    sure = verdict.placed.sure
    between = [str(_name(verdict, k)[1]) for k in range(lo, hi) if not sure[k]]
    if not between:
        return ""
    shown = between if len(between) <= 4 else [*between[:2], "...", between[-1]]
    return f"; before it: {', '.join(shown)}"


def _program_verdict(job: Job, verdict: Verdict) -> list[str]:
    lines: list[str] = []
    if verdict.is_deadlock:
        lines.append("this is a deadlock of the program:")
        if isinstance(verdict.refusal, DeadlockError):
            return lines + str(verdict.refusal).splitlines()
        for link in verdict.circle:
            at, needs = _name(verdict, link.at), _name(verdict, link.needs)
            ranks = [_rank(verdict, int(verdict.placed.rank[k])) for k in (link.at, link.needs)]
            lines.append(f"  {ranks[0]} {' '.join(at)} waits for {' '.join(needs)} of {ranks[1]}")
        return lines
    alone = len(verdict.causes) == 1 and not _behind(job, verdict)
    for cause in verdict.causes:
        lines += _cause(job, verdict, cause, "is" if alone else "may be")
    if not lines:
        return ["nobody waits for a message of this step"]
    if verdict.refusal is not None:
        kind = type(verdict.refusal).__name__
        lines.append(
            f"this is not yet it, but check refuses the program under {verdict.model}: {kind}"
        )
    else:
        lines.append(
            f"the program finishes under {verdict.model}: this is no deadlock of it, but a wait"
        )
    return lines


def _cause(job: Job, verdict: Verdict, cause: Cause, whether: str) -> list[str]:
    """What is said of a cause: `whether` it is that, or one of several that may be."""
    names = [_name(verdict, at) for at in cause.at]
    owners = [int(verdict.placed.rank[at]) for at in cause.at]
    who = " or ".join(dict.fromkeys(_rank(verdict, rank) for rank in owners))
    what = " or ".join(" ".join(name) for name in names)
    if cause.kind is Kind.SILENT:
        return [f"{who} is waited for, at {what}, and has left no dump: its process may be gone"]
    if cause.kind is Kind.BUSY and len(names) == 1 and verdict.placed.is_free(cause.at[0]):
        return [
            f"{who} {whether} the cause: {what} is issued on both sides, and nothing stands before "
            "it; its value has not been computed, or it does not pass"
        ]
    if cause.kind is Kind.BUSY:
        return [
            f"{who} may be the cause: {what} is issued, and so is the other side, and what stands "
            "before it may still be computed; or it does not pass (with TORCH_NCCL_ENABLE_TIMING=1 "
            "dumps tell which side has started)"
        ]
    if cause.kind is Kind.STUCK:
        both = " and ".join(
            f"{' '.join(name)} of {_rank(verdict, own)}"
            for name, own in zip(names, owners, strict=True)
        )
        return [f"{both} are issued, and nothing keeps them: the message does not pass"]
    if cause.kind is Kind.ENDED:
        return [
            f"{who} may be the cause: the other side of {what} has ended; its device has not come "
            "to it, or its dump is the older one"
        ]
    rank = verdict.matched.ranks[owners[0]]
    lines = [
        f"{who} {whether} the cause: its host has not come to {what}; it computes, or is held up "
        "before it, or its process is gone"
    ]
    for wait in job.waits.get(rank, ()):
        if not wait.op.is_message:
            lines.append(f"  it is in {wait.op}, {whom(job, [wait])}{line_of(wait.op)}")
    return lines


def _rank(verdict: Verdict, own: int) -> str:
    rank = verdict.matched.ranks[own]
    return f"rank {own}" if rank == own else f"rank {own} ({rank} of the job)"


def _name(verdict: Verdict, at: int) -> tuple[str, str]:
    _, number, instr = verdict.placed.graph.index.locate(at)
    return f"#{number}", str(instr)
