"""The command `diagnose`: find where a job hangs, from its flight-recorder dumps or black boxes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from schedir.commands.common.schedule_options import SOURCE, add_shape, request_of
from schedir.errors import UsageError
from schedir.io.terminal import as_json

if TYPE_CHECKING:
    from schedir.hang_diagnosis.post_mortem import PostMortem
    from schedir.hang_diagnosis.rank_positions import ProgramVerdict
    from schedir.hang_diagnosis.wait_graph import DistributedJob
    from schedir.ir.program import Program

EXAMPLES = """\
  schedir diagnose dumps
  schedir diagnose dumps --program train.sched

The page docs/hanging-run.md has more.
"""


_ALONE = ("--json", "--no-code", "--max-instructions")  # options without --program


def arguments(parser: argparse.ArgumentParser) -> None:
    """Dumps, and the program that the job runs."""
    parser.add_argument(
        "dumps",
        metavar="DUMPS",
        nargs="+",
        help="dumps of torch's flight recorder, one for each rank: files, a folder, or a pattern; "
        "or the output folder of a run of schedir train, with its black boxes",
    )
    parser.add_argument("--program", metavar="SCHEDULE", help=f"what the job runs: {SOURCE}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """Who waits for whom, and which rank is the cause."""
    from schedir.hang_diagnosis import post_mortem
    from schedir.hang_diagnosis.flight_recorder import read_dumps
    from schedir.hang_diagnosis.hang_report import job_lines, named_lines, program_lines
    from schedir.hang_diagnosis.program_matching import match
    from schedir.hang_diagnosis.rank_positions import judge
    from schedir.hang_diagnosis.wait_graph import DistributedJob

    given = [word for word in args.typed[1:] if word.startswith("-") and word != "-"]
    if args.program is None and (
        extra := [word for word in given if word.partition("=")[0] not in _ALONE]
    ):
        raise UsageError(f"{extra[0]} needs --program", hint=f"--program SCHEDULE {extra[0]} ...")
    if len(args.dumps) == 1 and (run := post_mortem.read(args.dumps[0])) is not None:
        return _of_run(args, run)
    dumps, passed = read_dumps(args.dumps)
    job = DistributedJob(dumps)
    if args.program is None:
        verdicts, lines = [], job_lines(job)
    else:
        program = _program(args, job)
        copies = match(job, program)
        loose = any(matched.loose for matched in copies)
        verdicts = [] if loose else judge(program, copies, args.progress_model)
        lines = named_lines(job, program, copies) if loose else program_lines(job, verdicts)
    if args.json:
        return as_json(_facts(job, verdicts) | {"said": lines})
    if passed:
        lines.append(f"passed over {len(passed)} files whose names end in no rank")
    return "".join(f"{line}\n" for line in lines)


def _of_run(args: argparse.Namespace, run: PostMortem) -> str:
    """What black boxes say; the program is beside them."""
    if args.program is not None:
        raise UsageError(
            f"{run.folder} has the black boxes of a run, which have their program",
            hint="leave out --program",
            fields=["program"],
        )
    lines = [*run.lines()]
    if args.json:
        return as_json(run.facts() | {"said": lines})
    return "".join(f"{line}\n" for line in lines)


def _program(args: argparse.Namespace, job: DistributedJob) -> Program:
    """The program; a schedule is compiled for as many ranks as exchange messages."""
    from schedir.hang_diagnosis.program_matching import circles
    from schedir.io.source_loader import Source
    from schedir.ir.program import Program

    if args.ranks is None and not isinstance(Source(args.program).found, Program):
        args.ranks = max(map(len, circles(job)), default=None)
    return request_of(args, args.program).program


def _facts(job: DistributedJob, verdicts: list[ProgramVerdict]) -> dict[str, Any]:
    standing = [
        {
            "rank": rank,
            "file": one.path,
            "ended": one.ended and str(one.ended),
            "begun": one.begun and str(one.begun),
            "since_ns": one.since,
            "waits": [
                {"operation": str(wait.op), "rank": wait.on, "why": wait.why.name.lower()}
                for wait in job.waits[rank]
            ],
        }
        for rank, one in job.dumps.items()
    ]
    return {
        "standing": standing,
        "no_dump": [*job.missing],
        "cycle": [wait.rank for wait in job.cycle],
        "roots": [*job.roots],
        "copies": [_copy(verdict) for verdict in verdicts],
    }


def _copy(verdict: ProgramVerdict) -> dict[str, Any]:
    placed, matched = verdict.placed, verdict.matched
    locate = placed.graph.index.locate

    def at(position: int) -> dict[str, Any]:
        rank, index, instr = locate(position)
        return {"rank": matched.ranks[rank], "index": index, "instruction": str(instr)}

    return {
        "program": placed.graph.program.name,
        "model": verdict.model,
        "ranks": matched.ranks,
        "whole_steps_before": matched.step,
        "stands": [
            {"rank": matched.ranks[place.rank]} | (
                {"over": True} if place.at is None else at(place.at) | {"late": place.late}
            )
            for place in verdict.places
        ],
        "deadlock": verdict.is_deadlock,
        "circle": [at(link.at) for link in verdict.circle],
        "causes": [
            {"kind": cause.kind.name.lower(), "at": [at(k) for k in cause.at]}
            for cause in verdict.causes
        ],
    }  # fmt: skip
