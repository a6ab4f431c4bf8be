"""Check several programs that the ranks run one after another."""

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
from schedir.io.terminal_output import format_json, join_words

if TYPE_CHECKING:
    from schedir.analysis.progress_models import ProgressModel
    from schedir.ir.program import Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option `--rank-programs`, for ranks that run different programs.

    Args:
        parser: The parser of `check`.
    """
    parser.add_argument(
        "--rank-programs", action="append", metavar="RANK:STEPS", default=[],
        help="with several programs, one per step: the programs that rank RANK runs instead, such "
        "as 1:train.sched+train.sched",
    )  # fmt: skip


def has_several_programs(args: argparse.Namespace) -> bool:
    """Return whether the user gives several programs.

    Args:
        args: The parsed options of `check`.
    """
    return len(args.source) > 1 or bool(args.rank_programs)


def run(args: argparse.Namespace) -> str:
    """Return the progress models under which the ranks finish all programs.

    Args:
        args: The parsed options of `check`.

    Returns:
        A text, or JSON with `--json`.

    Raises:
        UsageError: An option does not apply to several programs, or `--rank-programs` is invalid.
        SchedirError: A program is wrong, or the programs do not finish under the requested progress
            model. The hint of the error names other models under which they finish, if any.
    """
    from schedir.analysis.progress_models import MODELS

    for option, name in (
        ("explain_start", "--explain-start"),
        ("blocking_hosts", "--blocking-hosts"),
        ("host_device_sync", "--host-device-sync"),
        ("lazy_communicators", "--lazy-communicators"),
        ("eager_limit", "--eager-limit"),
        ("output", "-o"),
    ):
        if (value := getattr(args, option)) is not None and value is not False:
            raise UsageError(f"{name} cannot be combined with several programs")
    runs, proven_models = _load_rank_programs(args)
    first_model = proven_models.pop() if len(proven_models) == 1 else "per_device"
    other_models = [
        model for model in MODELS if args.progress_model is None and model != first_model
    ]
    if error := _find_sequence_error(runs, first_model):
        finishing_models = [
            model for model in other_models if _find_sequence_error(runs, model) is None
        ]
        if finishing_models and isinstance(
            error, ProgramSequenceError | DeadlockError | GroupError | ChannelMismatchError
        ):
            error.hint = f"they finish under {join_words(finishing_models)}"
        raise error
    models = [model for model in MODELS if model == first_model or model in other_models]
    models = [model for model in models if _find_sequence_error(runs, model) is None]
    program_names = [[program.name for program in row] for row in runs]
    if args.json:
        return format_json({"rank_programs": program_names, "progress_models": models})
    is_uniform = all(row == program_names[0] for row in program_names)
    steps = ", ".join(program_names[0]) if is_uniform else "; ".join(
        f"rank {rank}: {', '.join(row) or 'nothing'}" for rank, row in enumerate(program_names)
    )  # fmt: skip
    failing_models = [model for model in other_models if model not in models]
    exceptions = f", but not under {join_words(failing_models)}" if failing_models else ""
    return (
        f"{steps}\neach program is complete and in order, and {len(runs)} ranks that run them one "
        f"after another finish under {join_words(models)}{exceptions}\n"
    )


def _load_rank_programs(args: argparse.Namespace) -> tuple[list[list[Program]], set[ProgressModel]]:
    """Return the programs of each rank, and the progress models under which they were checked."""
    programs: dict[str, Program] = {}
    proven_models: set[ProgressModel] = set()

    def load_program(source: str) -> Program:
        if source not in programs:
            request = make_request(args, source)
            programs[source] = request.program
            proven_models.add(request.proven_progress_model)
        return programs[source]

    steps = [load_program(source) for source in args.source]
    rank_programs = [steps] * steps[0].shape.ranks
    for entry in args.rank_programs:
        rank, colon, sources = entry.partition(":")
        if not colon or not (rank.isascii() and rank.isdecimal()) or len(rank) > 9:
            raise UsageError(
                f"--rank-programs must be RANK:STEPS, such as 1:{args.source[0]}, not {entry!r}"
            )
        if int(rank) >= len(rank_programs):
            raise UsageError(
                f"--rank-programs: there is no rank {rank}, the ranks are 0 to "
                f"{len(rank_programs) - 1}"
            )
        if rank_programs[int(rank)] is not steps:
            raise UsageError(
                f"--rank-programs is given twice for rank {int(rank)}",
                hint=f"--rank-programs {int(rank)}:{'+'.join(args.source)} joins programs with +",
            )
        rank_programs[int(rank)] = [load_program(source) for source in sources.split("+") if source]
    return rank_programs, proven_models


def _find_sequence_error(
    rank_programs: Sequence[Sequence[Program]], progress_model: ProgressModel
) -> SchedirError | None:
    from schedir.verify.program_sequence import check_program_sequence

    try:
        check_program_sequence(rank_programs, progress_model)
    except SchedirError as error:
        return error
    return None
