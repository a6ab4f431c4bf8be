"""Check several programs that ranks run one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedir.commands.common.schedule_options import make_request
from schedir.errors import (
    ChannelMismatchError,
    DeadlockError,
    GroupError,
    ProgramSequenceError,
    SchedirError,
    UsageError,
)
from schedir.io.terminal import format_json, join_words

if TYPE_CHECKING:
    from schedir.analysis.progress_models import ProgressModel
    from schedir.ir.program import Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What single ranks run instead."""
    parser.add_argument(
        "--rank-programs",
        dest="on",
        action="append",
        metavar="RANK:STEPS",
        default=[],
        help="where several programs are one step each: what a rank runs instead of all of them, "
        "as 1:train.sched+train.sched",
    )


def has_several_programs(args: argparse.Namespace) -> bool:
    """Whether it is steps that are asked for."""
    return len(args.source) > 1 or bool(args.on)


def run(args: argparse.Namespace) -> str:
    """Under which models ranks come to the end of their steps."""
    from schedir.analysis.progress_models import MODELS

    for option, name in (
        ("why", "--explain-start"),
        ("blocking_hosts", "--blocking-hosts"),
        ("host_device_sync", "--host-device-sync"),
        ("lazy_communicators", "--lazy-communicators"),
        ("eager_limit", "--eager-limit"),
        ("output", "-o"),
    ):
        if (said := getattr(args, option)) is not None and said is not False:
            raise UsageError(f"{name} goes with one program, not with steps")
    runs, own = _load_rank_programs(args)
    first = own.pop() if len(own) == 1 else "per_device"
    others = [model for model in MODELS if args.progress_model is None and model != first]
    if error := _find_sequence_error(runs, first):
        fine = [model for model in others if _find_sequence_error(runs, model) is None]
        if fine and isinstance(
            error, ProgramSequenceError | DeadlockError | GroupError | ChannelMismatchError
        ):
            error.hint = f"they finish under {join_words(fine)}"
        raise error
    models = [model for model in MODELS if model == first or model in others]
    models = [model for model in models if _find_sequence_error(runs, model) is None]
    named = [[program.name for program in row] for row in runs]
    if args.json:
        return format_json({"steps": named, "models": models})
    alike = all(row == named[0] for row in named)
    steps = ", ".join(named[0]) if alike else "; ".join(
        f"rank {rank}: {', '.join(row) or 'nothing'}" for rank, row in enumerate(named)
    )  # fmt: skip
    fails = [model for model in others if model not in models]
    but = f", but not under {join_words(fails)}" if fails else ""
    return (
        f"{steps}\neach is complete and in order, and one after the other {len(runs)} ranks "
        f"finish them under {join_words(models)}{but}\n"
    )


def _load_rank_programs(args: argparse.Namespace) -> tuple[list[list[Program]], set[ProgressModel]]:
    """What each rank runs, and the models under which the programs are checked alone."""
    known: dict[str, Program] = {}
    own: set[ProgressModel] = set()

    def program(source: str) -> Program:
        if source not in known:
            request = make_request(args, source)
            known[source] = request.program
            own.add(request.proven_progress_model)
        return known[source]

    steps = [program(source) for source in args.source]
    runs = [steps] * steps[0].shape.ranks
    for each in args.on:
        rank, colon, sources = each.partition(":")
        if not colon or not (rank.isascii() and rank.isdecimal()) or len(rank) > 9:
            raise UsageError(
                f"--rank-programs takes RANK:STEPS, as 1:{args.source[0]}, not {each!r}"
            )
        if int(rank) >= len(runs):
            raise UsageError(
                f"--rank-programs: there is no rank {rank}: they are 0 to {len(runs) - 1}"
            )
        if runs[int(rank)] is not steps:
            raise UsageError(
                f"--rank-programs has rank {int(rank)} twice",
                hint=f"--rank-programs {int(rank)}:{'+'.join(args.source)} for one after the other",
            )
        runs[int(rank)] = [program(source) for source in sources.split("+") if source]
    return runs, own


def _find_sequence_error(
    rank_programs: Sequence[Sequence[Program]], progress_model: ProgressModel
) -> SchedirError | None:
    from schedir.verify.program_sequence import check_program_sequence

    try:
        check_program_sequence(rank_programs, progress_model)
    except SchedirError as error:
        return error
    return None
