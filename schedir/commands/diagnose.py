"""The command `diagnose`: find the cause of a hang in flight recorder dumps or black boxes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from schedir.commands.common.schedule_options import SOURCE_HELP, add_compile_options, make_request
from schedir.errors import UsageError
from schedir.io.terminal_output import format_json

if TYPE_CHECKING:
    from schedir.hang_diagnosis.post_mortem import PostMortem
    from schedir.hang_diagnosis.rank_positions import ProgramVerdict
    from schedir.hang_diagnosis.wait_graph import DistributedJob
    from schedir.ir.program import Program

EXAMPLES = """\
  schedir diagnose dumps
  schedir diagnose dumps --program train.sched

The page docs/how-to/find-a-hang.md has more.
"""


# Options that do not need --program.
_STANDALONE_OPTIONS = ("--json", "--no-code", "--max-instructions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `diagnose`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "dumps", metavar="DUMPS", nargs="+",
        help="dumps of torch's flight recorder, one for each rank: files, a folder, or a pattern; "
        "or the output folder of a run of schedir train, which contains black boxes",
    )  # fmt: skip
    parser.add_argument(
        "--program", metavar="SCHEDULE", help=f"the program of the job: {SOURCE_HELP}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return the instructions for which ranks wait, and the rank that caused the hang.

    Args:
        args: The parsed options of `diagnose`.

    Raises:
        UsageError: An option needs `--program`, or the black boxes already contain a program.
    """
    from schedir.hang_diagnosis import post_mortem
    from schedir.hang_diagnosis.flight_recorder import read_dumps
    from schedir.hang_diagnosis.hang_report import (
        describe_job,
        describe_named_job,
        describe_program,
    )
    from schedir.hang_diagnosis.program_matching import match_program
    from schedir.hang_diagnosis.rank_positions import diagnose_copies
    from schedir.hang_diagnosis.wait_graph import DistributedJob

    option_words = [word for word in args.command_words[1:] if word.startswith("-") and word != "-"]
    if args.program is None and (
        extra_options := [
            word for word in option_words if word.partition("=")[0] not in _STANDALONE_OPTIONS
        ]
    ):
        raise UsageError(
            f"{extra_options[0]} needs --program", hint=f"--program SCHEDULE {extra_options[0]} ..."
        )
    if len(args.dumps) == 1:
        black_boxes = post_mortem.read_post_mortem(args.dumps[0])
        if black_boxes is not None:
            return _diagnose_run(args, black_boxes)
    dumps, skipped_files = read_dumps(args.dumps)
    job = DistributedJob(dumps)
    if args.program is None:
        verdicts, lines = [], describe_job(job)
    else:
        program = _load_program(args, job)
        copies = match_program(job, program)
        has_order_mismatch = any(matched.order_mismatch for matched in copies)
        verdicts = (
            [] if has_order_mismatch else diagnose_copies(program, copies, args.progress_model)
        )
        lines = (
            describe_named_job(job, program, copies)
            if has_order_mismatch
            else describe_program(job, verdicts)
        )
    if args.json:
        return format_json(_collect_facts(job, verdicts) | {"report": lines})
    if skipped_files:
        lines.append(f"skipped files whose names do not end in a rank: {len(skipped_files)}")
    return "".join(f"{line}\n" for line in lines)


def _diagnose_run(args: argparse.Namespace, post_mortem: PostMortem) -> str:
    """Return the diagnosis of a run with black boxes, which contain the program."""
    if args.program is not None:
        raise UsageError(
            f"--program is not needed: the black boxes in {post_mortem.directory} already contain "
            "the program",
            hint="leave out --program",
            fields=["program"],
        )
    lines = [*post_mortem.to_lines()]
    if args.json:
        return format_json(post_mortem.to_dict() | {"report": lines})
    return "".join(f"{line}\n" for line in lines)


def _load_program(args: argparse.Namespace, job: DistributedJob) -> Program:
    """Return the program of `--program`.

    If `--program` names a schedule and `--ranks` is not given, the schedule is compiled for the
    number of ranks that exchange messages.
    """
    from schedir.hang_diagnosis.program_matching import find_communicating_ranks
    from schedir.io.source_loader import Source
    from schedir.ir.program import Program

    if args.ranks is None and not isinstance(Source(args.program).schedule_or_program, Program):
        args.ranks = max(map(len, find_communicating_ranks(job)), default=None)
    return make_request(args, args.program).program


def _collect_facts(job: DistributedJob, verdicts: list[ProgramVerdict]) -> dict[str, Any]:
    dumps = [
        {
            "rank": rank,
            "file": dump.path,
            "last_ended_operation": dump.last_ended_op and str(dump.last_ended_op),
            "current_operation": dump.current_op and str(dump.current_op),
            "current_operation_time_ns": dump.current_op_time,
            "waits": [
                {
                    "operation": str(wait.op),
                    "awaited_rank": wait.awaited_rank,
                    "reason": wait.reason.name.lower(),
                }
                for wait in job.waits[rank]
            ],
        }
        for rank, dump in job.dumps.items()
    ]
    return {
        "dumps": dumps,
        "ranks_without_dump": [*job.ranks_without_dump],
        "cycle": [wait.rank for wait in job.cycle],
        "root_ranks": [*job.root_ranks],
        "copies": [_collect_copy_facts(verdict) for verdict in verdicts],
    }


def _collect_copy_facts(verdict: ProgramVerdict) -> dict[str, Any]:
    positioned, matched = verdict.positioned, verdict.matched
    locate = positioned.graph.index.locate

    def at(position: int) -> dict[str, Any]:
        rank, index, instr = locate(position)
        return {"rank": matched.ranks[rank], "index": index, "instruction": str(instr)}

    return {
        "program": positioned.graph.program.name,
        "progress_model": verdict.progress_model,
        "ranks": matched.ranks,
        "step": matched.step,
        "positions": [
            {"rank": matched.ranks[rank_position.rank]} | (
                {"has_ended": True}
                if rank_position.position is None
                else at(rank_position.position) | {"is_late": rank_position.is_late}
            )
            for rank_position in verdict.positions
        ],
        "is_deadlock": verdict.is_deadlock,
        "cycle": [at(link.position) for link in verdict.cycle],
        "causes": [
            {"kind": cause.kind.name.lower(), "instructions": [at(k) for k in cause.positions]}
            for cause in verdict.causes
        ],
    }  # fmt: skip
