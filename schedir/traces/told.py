"""Told: where the ranks of a job stand, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from schedir.errors import DeadlockError
from schedir.ir.index import NONE
from schedir.traces.flight_recorder import Dump, Op
from schedir.traces.placed import Cause, Kind, Place
from schedir.traces.standing import Job, Wait, Why
from schedir.traces.verdict import Verdict

_SHOWN = 16  # ranks, or copies of a program, that are told one by one


def job_lines(job: Job) -> list[str]:
    """Where each rank stands by its operations, who waits for whom, and the cause."""
    lines = [_heading(job)]
    shown = _shown(job)
    for rank in shown:
        lines.append(f"  rank {rank}  {_stands(job, rank)}")
    if len(job.dumps) > len(shown):
        lines.append(f"  ... and {len(job.dumps) - len(shown)} more ranks (--json has them all)")
    return lines + _lost(job.dumps.values()) + job_verdict(job)


def _heading(job: Job) -> str:
    many, there = len(job.ranks), len(job.dumps)
    if not job.missing:
        return f"{there} dump{'s' * (there != 1)}, of all ranks that they name"
    return f"{there} dumps of {many} ranks; there is none of rank {_list(job.missing)}"


def _shown(job: Job) -> list[int]:
    """The ranks that are told: first who is waited for or in the cycle, in the order of ranks."""
    if len(job.dumps) <= _SHOWN:
        return [*job.dumps]
    first = {*job.roots, *(wait.rank for wait in job.cycle), *(wait.rank for wait in job.unmet)}
    rest = [rank for rank in job.dumps if rank not in first]
    return sorted([*(first & {*job.dumps}), *rest][:_SHOWN])


def _stands(job: Job, rank: int) -> str:
    standing = job.standing[rank]
    if standing.begun is None:
        ended = standing.ended
        after = f"it last ended {ended}{_at(ended)}" if ended else "it has recorded nothing"
        return f"has nothing open; {after}{_ago(job, standing.since)}"
    waits = job.waits[rank]
    op = waits[0].op if waits else standing.begun
    whom = [_whom(job, [*some]) for _, some in groupby(waits, lambda w: (w.why, w.op))]
    said = "; ".join(whom) or "which ranks have a part in it, no dump says"
    return f"{op}{_nth(job.dumps[rank], op)}: {said}{_ago(job, op.created)}{_at(op)}"


def _nth(dump: Dump, op: Op) -> str:
    """The how many-th of its kind a message is, where that is known."""
    if not op.is_message or dump.lost:
        return ""
    way = (op.group, op.kind, op.peer)
    before = sum((o.group, o.kind, o.peer) == way for o in dump.ops if o.number < op.number)
    return f", after {before} in {op.group}"


def _whom(job: Job, waits: Sequence[Wait]) -> str:
    first = waits[0]
    ranks = f"rank{'s' * (len(waits) > 1)} {_list([wait.on for wait in waits])}"
    if first.why is Why.BEHIND:
        ahead = job.standing[first.on].begun
        return f"{ranks} {_has(waits)} issued its side, behind {ahead}"
    if first.why is Why.OTHER and first.part:
        return f"does not fit {ranks}: {_part(first.op)} here, {_part(first.part)} there"
    says = {
        Why.NO_DUMP: f"{ranks} {_has(waits)} left no dump",
        Why.NOT_ISSUED: f"{ranks} {_has(waits)} not issued its side",
        Why.THERE: f"{ranks} {_has(waits)} issued its side, too",
    }
    return says[first.why]


def _has(waits: Sequence[Wait]) -> str:
    return "has" if len(waits) == 1 else "have each"


def _part(op: Op) -> str:
    return op.shape if op.is_message else f"{op.kind} of {op.shape}"


def job_verdict(job: Job) -> list[str]:
    """The cause, as far as it can be told without a program."""
    lines = []
    if cycle := job.cycle:
        ranks = [wait.rank for wait in cycle]
        lines.append(f"ranks {_list(ranks)} wait for each other:")
        lines += [f"  rank {wait.rank}  {wait.op}: {_whom(job, [wait])}" for wait in cycle]
        if any(wait.why is Why.NOT_ISSUED for wait in cycle):
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
        if wait.why is Why.OTHER:
            lines.append(f"the cause: {wait.op} of rank {wait.rank} {_whom(job, [wait])}")
        elif not cycle:
            lines.append(
                f"{wait.op} of rank {wait.rank} is issued by all of its ranks and nothing stands "
                "before it: its value is not computed yet, or it does not pass, as where one side "
                "issues it in a batch, the other alone, and these have communicators of their own"
            )
    for rank in job.roots[:_SHOWN]:
        if rank in job.dumps and job.standing[rank].begun is None:
            lines.append(
                f"rank {rank} is the cause: others wait for it, and it waits for nobody here; it "
                f"computes, or is held up elsewhere, or its process is gone{_did(job.dumps[rank])}"
            )
        elif rank not in job.dumps:
            lines.append(
                f"rank {rank} is waited for, and has left no dump: its process may be gone"
            )
    if not lines:
        lines.append("nobody waits for anybody here: what keeps the job is outside of these dumps")
    return lines


def _once(waits: Iterable[Wait]) -> list[Wait]:
    """One wait of each operation: its other side says the same."""
    seen: set[object] = set()
    kept = []
    for wait in waits:
        key = (wait.op.group, frozenset((wait.rank, wait.on))) if wait.op.is_message else (
            wait.op.group, wait.op.nth)  # fmt: skip
        if key not in seen:
            seen.add(key)
            kept.append(wait)
    return kept[:_SHOWN]


def _did(dump: Dump) -> str:
    """What a rank has done, for who has no program."""
    done = Counter((op.kind, op.peer) for op in dump.ops if op.is_message)
    what = [
        f"{number} {kind}{'s' * (number > 1)} {'to' if kind == 'send' else 'from'} {peer}"
        for (kind, peer), number in done.most_common(6)
    ]
    return f" (after {', '.join(what)})" if what and not dump.lost else ""


def _ago(job: Job, when: int) -> str:
    """How long before the last sign of life of any rank."""
    newest = max((dump.last_time for dump in job.dumps.values()), default=0)
    seconds = (newest - when) / 1e9
    return f", {seconds:.3g} s before the newest entry" if when and seconds >= 0.001 else ""


def _at(op: Op | None) -> str:
    return f", at {op.line}" if op and op.line else ""


def _list(ranks: Sequence[int]) -> str:
    some = [*map(str, ranks[:8])] + [f"{len(ranks) - 8} more"] * (len(ranks) > 8)
    return " and ".join(filter(None, [", ".join(some[:-1]), some[-1]]))


def _lost(dumps: Iterable[Dump]) -> list[str]:
    lost = [dump.rank for dump in dumps if dump.lost]
    if not lost:
        return []
    return [
        f"the buffers of rank {_list(lost)} have lost their beginning: messages that have not "
        "ended are paired in their order (a larger TORCH_FR_BUFFER_SIZE keeps more)"
    ]


# ---------------------------------------------------------------- with a program


def program_lines(job: Job, verdicts: Sequence[Verdict]) -> list[str]:
    """Where each rank stands in a program, and whether this is a deadlock of it."""
    lines: list[str] = []
    stuck = [v for v in verdicts if v.circle or v.causes] or [*verdicts]
    for verdict in stuck[:_SHOWN]:
        lines += _copy(job, verdict)
    if len(verdicts) > len(stuck[:_SHOWN]):
        lines.append(f"... and {len(verdicts) - len(stuck[:_SHOWN])} more copies of the program")
    return lines


def _copy(job: Job, verdict: Verdict) -> list[str]:
    matched, graph = verdict.matched, verdict.placed.graph
    program = graph.program
    same = matched.ranks == tuple(range(len(matched.ranks)))
    of = "" if same else f" on ranks {_list(matched.ranks)}"
    if matched.step is None:
        step = "a step; which, the buffers do not say"
    else:
        step = f"after {matched.step} whole step{'s' * (matched.step != 1)}"
    lines = [f"{program.name}{of}, {step}, under {verdict.model}"]
    if matched.left_out:
        lines.append(
            f"  {matched.left_out} messages of whole numbers, shapes or objects, are left out"
        )
    lines += [f"  {_place(verdict, place)}" for place in verdict.places]
    silent = [r for r, there in zip(matched.ranks, matched.dumped, strict=True) if not there]
    if silent:
        lines.append(f"  there is no dump of rank {_list(silent)}")
    return lines + _program_verdict(job, verdict)


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
    for cause in verdict.causes:
        lines += _cause(job, verdict, cause)
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
    if verdict.if_blocked:
        lines.append("where hosts wait themselves it is one: schedir check --blocks says how")
    return lines


def _cause(job: Job, verdict: Verdict, cause: Cause) -> list[str]:
    names = [_name(verdict, at) for at in cause.at]
    owners = [int(verdict.placed.rank[at]) for at in cause.at]
    who = " or ".join(dict.fromkeys(_rank(verdict, rank) for rank in owners))
    what = " or ".join(" ".join(name) for name in names)
    if cause.kind is Kind.SILENT:
        return [f"{who} is waited for, at {what}, and has left no dump: its process may be gone"]
    if cause.kind is Kind.BUSY:
        return [
            f"{who} is the cause: {what} is issued on both sides, and nothing stands before it; "
            "its value has not been computed, or it does not pass"
        ]
    rank = verdict.matched.ranks[owners[0]]
    lines = [
        f"{who} is the cause: its host has not come to {what}; it computes, or is held up before "
        "it, or its process is gone"
    ]
    for wait in job.waits.get(rank, ()):
        if not wait.op.is_message:
            lines.append(f"  it is in {wait.op}, {_whom(job, [wait])}{_at(wait.op)}")
    return lines


def _rank(verdict: Verdict, own: int) -> str:
    rank = verdict.matched.ranks[own]
    return f"rank {own}" if rank == own else f"rank {own} ({rank} of the job)"


def _name(verdict: Verdict, at: int) -> tuple[str, str]:
    _, number, instr = verdict.placed.graph.index.locate(at)
    return f"#{number}", str(instr)
