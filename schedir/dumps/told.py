"""Told: where the ranks of a job stand, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from schedir.dumps.flight_recorder import Dump, Op
from schedir.dumps.standing import Job, Wait, Why
from schedir.io import terminal

SHOWN = 16  # ranks, or copies of a program, that are told one by one


def job_lines(job: Job) -> list[str]:
    """The cause, as far as it is known, then where each rank stands by its operations."""
    shown = _shown(job)
    many = len(job.dumps) > len(shown)
    said: dict[str, list[int]] = {}
    for rank in job.dumps if many else shown:
        said.setdefault(_stands(job, rank, many), []).append(rank)
    # Who is waited for is told first, and many ranks at the same operation are one line.
    order = sorted(said, key=lambda text: not {*said[text]} & {*shown})[:SHOWN]
    lines = [f"  {_ranks(said[text])}  {text}" for text in sorted(order, key=lambda t: said[t])]
    if left := len(job.dumps) - sum(len(said[text]) for text in order):
        lines.append(f"  ... and {left} more ranks (--json has them all)")
    about = _lost([*job.dumps.values()]) + behind_lines(job.behind)
    return [*job_verdict(job), _heading(job), *lines, *about]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _heading(job: Job) -> str:
    many, there = len(job.ranks), len(job.dumps)
    dumps = f"{there} dump{'s' * (there != 1)}"
    if not job.missing:
        return f"{dumps}, of all ranks that they name"
    return f"{dumps} of {many} ranks; there is none of rank {listed(job.missing)}"


def _shown(job: Job) -> list[int]:
    """The ranks that are told: first who is waited for or in the cycle, in the order of ranks."""
    if len(job.dumps) <= SHOWN:
        return [*job.dumps]
    first = {*job.roots, *(wait.rank for wait in job.cycle), *(wait.rank for wait in job.unmet)}
    rest = [rank for rank in job.dumps if rank not in first]
    return sorted([*(first & {*job.dumps}), *rest][:SHOWN])


def _stands(job: Job, rank: int, briefly: bool) -> str:
    """Where a rank stands; `briefly` without times, so that many ranks are told alike."""
    standing = job.standing[rank]
    if standing.begun is None:
        ended = standing.ended
        after = (
            f"last ended {job.say(rank, ended)}{line_of(ended)}" if ended else "nothing is recorded"
        )
        return f"nothing open; {after}{_ago(job, standing.since)}"
    waits = job.waits[rank]
    op = waits[0].op if waits else standing.begun
    others = [whom(job, [*some]) for _, some in groupby(waits, lambda w: (w.why, w.op))]
    said = "; ".join(dict.fromkeys(others)) or "which ranks have a part in it, no dump says"
    name = f"{job.say(rank, op)}{_nth(job.dumps[rank], op)}"
    ago = "" if briefly else _ago(job, op.created)
    return f"{name}: {said}{ago}{line_of(op)}"


def _nth(dump: Dump, op: Op) -> str:
    """The how many-th of its kind a message is, where that is known."""
    if not op.is_message or dump.lost:
        return ""
    way = (op.group, op.kind, op.peer)
    before = sum((o.group, o.kind, o.peer) == way for o in dump.ops if o.number < op.number)
    return f", after {before} in {op.group}"


def whom(job: Job, waits: Sequence[Wait]) -> str:
    first = waits[0]
    ranks = f"rank{'s' * (len(waits) > 1)} {listed([wait.on for wait in waits])}"
    if first.why is Why.BEHIND:
        ahead = job.standing[first.on].begun
        behind = job.say(first.on, ahead) if ahead else ""
        return f"{ranks} {_has(waits)} issued its side, behind {behind}"
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
        lines.append(f"ranks {listed(ranks)} wait for each other:")
        lines += [
            f"  rank {wait.rank}  {job.say(wait.rank, wait.op)}: {whom(job, [wait])}"
            for wait in cycle[:SHOWN]
        ]
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
        name = f"{job.say(wait.rank, wait.op)} of rank {wait.rank}"
        if wait.why is Why.OTHER:
            unsure = job.behind or (wait.op.is_message and job.lost(wait))
            lines.append(f"{'it may be' if unsure else 'the cause:'} {name} {whom(job, [wait])}")
        elif not cycle:
            lines.append(f"{name} {_all_there(job, wait)}{_apart(wait)}")
    late = [r for r in job.roots if r in job.dumps and job.standing[r].begun is None]
    whether = "is" if len(job.roots) == 1 and not job.behind and not cycle else "may be"
    if len(late) > SHOWN:
        lines.append(
            f"{len(late)} ranks wait for nobody here, and others wait for them: ranks "
            f"{listed(late)}; each may be the cause"
        )
        late = []
    for rank in job.roots:
        if rank in late:
            sure = whether == "is" and any(
                wait.on == rank and not (wait.op.kind == "recv" and job.lost(wait))
                for waits in job.waits.values() for wait in waits
            )  # fmt: skip
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
    if not lines:
        lines.append("nobody waits for anybody here: what keeps the job is outside of these dumps")
    return lines


def _all_there(job: Job, wait: Wait) -> str:
    """Of what all of its ranks have issued, which of them have not come to it on their devices."""
    op = wait.op
    ranks = sorted({op.peer, wait.rank} if op.is_message else {*op.group.ranks})
    parts = {rank: job.part(wait, rank) for rank in ranks if rank in job.dumps}
    over = [rank for rank, part in parts.items() if part and part.ended]
    began = [rank for rank, part in parts.items() if part and part.state == "started"]
    if over:
        left = [rank for rank in parts if rank not in over]
        return (
            f"has ended on rank {listed(over)}: rank {listed(left)} may be the cause, whose device "
            "has not come to it; or its dump is the older one"
        )
    left = [rank for rank in parts if rank not in began]
    if began and left:
        return (
            f"is issued by all of its ranks, and has started on rank {listed(began)}: rank "
            f"{listed(left)} may be the cause, whose device has not come to it"
        )
    return (
        "is issued by all of its ranks and nothing stands before it: "
        + ("it does not pass" if began else "its value is not computed yet, or it does not pass")
    )  # fmt: skip


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
    return kept[:SHOWN]


def _apart(wait: Wait) -> str:
    """That the two sides of a message may have gone by two communicators, and never meet."""
    part = wait.part
    if part is None or not wait.op.is_message or bool(wait.op.batch) == bool(part.batch):
        return ""
    batched, alone = (wait.rank, wait.on) if wait.op.batch else (wait.on, wait.rank)
    return (
        f"; rank {batched} has issued it in a batch and rank {alone} alone: torch has two "
        "communicators for these where they are made at first use, and then it never passes"
    )


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


def line_of(op: Op | None) -> str:
    return f", at {op.line}" if op and op.line else ""


def listed(ranks: Sequence[int]) -> str:
    some = [*map(str, ranks[:8])] + [f"{len(ranks) - 8} more"] * (len(ranks) > 8)
    return terminal.listed(some)


def behind_lines(ranks: Sequence[int]) -> list[str]:
    """That dumps are of different moments."""
    if not ranks:
        return []
    return [
        f"the dump of rank {listed(ranks)} is older than others, in which has ended what it has "
        "not issued: it has gone on since, and what is said of it was so then"
    ]


def _lost(dumps: Sequence[Dump]) -> list[str]:
    lost = [dump.rank for dump in dumps if dump.lost]
    if not lost:
        return []
    lines = []
    if blind := [dump.rank for dump in dumps if dump.is_blind]:
        lines.append(
            f"the oldest entry that is left of rank {listed(blind)} has not ended: where it stands "
            "may be lost, too"
        )
    lines.append(
        f"the buffers of rank {listed(lost)} have lost their beginning: messages that have not "
        "ended are paired in their order (a larger TORCH_FR_BUFFER_SIZE keeps more)"
    )
    return lines
