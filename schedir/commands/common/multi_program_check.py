"""Check several programs: those that ranks run one after another, or those of replicas."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
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
    """Add the options `--rank-programs` and `--replicas`, for ranks with different programs.

    Args:
        parser: The parser of `check`.
    """
    parser.add_argument(
        "--rank-programs", action="append", metavar="RANK:STEPS", default=[],
        help="the programs that rank RANK runs, one per step and joined by +, such as "
        "1:train.sched+train.sched; by default, a rank runs all given programs in order",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", action="store_true",
        help="each SCHEDULE is the program of one data-parallel replica. Check that all replicas "
        "run their collectives in one order, and that no ranks wait in a cycle. If hosts wait at "
        "each all-to-all of experts, as with torch, add --blocking-hosts",
    )  # fmt: skip


def has_several_programs(args: argparse.Namespace) -> bool:
    """Return whether the user gives several programs, or the option `--replicas`.

    Args:
        args: The parsed options of `check`.
    """
    return len(args.source) > 1 or bool(args.rank_programs) or args.replicas


def run(args: argparse.Namespace) -> str:
    """Return the progress models under which the ranks or replicas finish all programs.

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
        ("blocking_hosts", "--blocking-hosts"),
        ("host_device_sync", "--host-device-sync"),
        ("lazy_communicators", "--lazy-communicators"),
        ("eager_limit", "--eager-limit"),
        ("output", "-o"),
    ):
        if option == "blocking_hosts" and args.replicas:
            continue
        if (value := getattr(args, option)) is not None and value is not False:
            other = "--replicas" if args.replicas else "several programs"
            raise UsageError(f"{name} cannot be combined with {other}")
    if args.replicas and args.rank_programs:
        raise UsageError("--replicas cannot be combined with --rank-programs")
    find_error = partial(
        _find_error, has_replicas=args.replicas, blocking_hosts=args.blocking_hosts
    )
    runs, proven_models = _load_rank_programs(args)
    first = proven_models.pop() if len(proven_models) == 1 else "per_device"
    other_models = [model for model in MODELS if args.progress_model is None and model != first]
    if error := find_error(runs, first):
        finishing_models = [model for model in other_models if find_error(runs, model) is None]
        if finishing_models and isinstance(
            error, ProgramSequenceError | DeadlockError | GroupError | ChannelMismatchError
        ):
            error.hint = f"they finish under {join_words(finishing_models)}"
        raise error
    models = [model for model in MODELS if model == first or model in other_models]
    models = [model for model in models if find_error(runs, model) is None]
    cpu_models = _find_cpu_models(args, runs[0], models) if args.replicas else models
    names = [[program.name for program in row] for row in runs]
    if args.json:
        facts = {"rank_programs": names, "progress_models": models}
        if args.replicas:
            facts = {"replica_programs": names[0], "progress_models": models}
            facts["progress_models_with_blocking_hosts"] = cpu_models
        return format_json(facts)
    subject = f"{len(runs)} ranks that run them one after another finish"
    if args.replicas:
        count = len(names[0])
        subject = f"{count} replicas finish" if count > 1 else "1 replica finishes"
    fails = [model for model in other_models if model not in models]
    exceptions = f", but not under {join_words(fails)}" if fails else ""
    exceptions += describe_hosts(args.blocking_hosts, models, cpu_models)
    return (
        f"{_describe_rank_programs(names)}\neach program is complete and in order, and {subject} "
        f"under {join_words(models)}{exceptions}\n"
    )


def describe_hosts(
    blocking_hosts: bool, models: list[ProgressModel], cpu_models: list[ProgressModel]
) -> str:
    """Return the assumption about hosts under which programs finish, or "" if there is none.

    Args:
        blocking_hosts: True if the programs were checked with blocking hosts only.
        models: The progress models under which the programs finish.
        cpu_models: The models of `models` under which the programs also finish on blocking hosts.
    """
    if blocking_hosts:
        return ", if hosts block, as CPU hosts do"
    if cpu_models == models:
        return ""
    only = f"only under {join_words(cpu_models)}" if cpu_models else "under none"
    return f"; if hosts block, as CPU hosts do, {only} (--blocking-hosts explains why)"


def _find_cpu_models(
    args: argparse.Namespace, programs: list[Program], models: list[ProgressModel]
) -> list[ProgressModel]:
    """Return the models of `models` under which replicas finish on blocking hosts."""
    # Replicas that finish under `blocking_serial` also finish on blocking hosts: under this model,
    # each instruction waits for all earlier instructions of its rank.
    if args.blocking_hosts or "blocking_serial" in models:
        return models
    return [
        model
        for model in models
        if _find_error([programs], model, has_replicas=True, blocking_hosts=True) is None
    ]


def _describe_rank_programs(names: list[list[str]]) -> str:
    """Return the names of the programs of each rank, or only once if all ranks have the same."""
    if all(row == names[0] for row in names):
        return ", ".join(names[0])
    return "; ".join(
        f"rank {rank}: {', '.join(row) or 'nothing'}" for rank, row in enumerate(names)
    )


def _load_rank_programs(args: argparse.Namespace) -> tuple[list[list[Program]], set[ProgressModel]]:
    """Return the programs of each rank, and the progress models under which to check them."""
    programs: dict[str, Program] = {}
    proven_models: set[ProgressModel] = set()

    def program(source: str) -> Program:
        if source not in programs:
            request = make_request(args, source)
            programs[source] = request.program
            proven_models.add(request.proven_progress_model)
        return programs[source]

    steps = [program(source) for source in args.source]
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
        rank_programs[int(rank)] = [program(source) for source in sources.split("+") if source]
    return rank_programs, proven_models


def _find_error(
    rank_programs: Sequence[Sequence[Program]],
    progress_model: ProgressModel,
    *,
    has_replicas: bool,
    blocking_hosts: bool,
) -> SchedirError | None:
    """Return the error of the programs of each rank, or of the programs of replicas."""
    from schedir.verify.program_sequence import check_program_sequence
    from schedir.verify.replicas import check_replicas

    try:
        if has_replicas:
            check_replicas(rank_programs[0], progress_model, blocking_hosts=blocking_hosts)
        else:
            check_program_sequence(rank_programs, progress_model)
    except SchedirError as error:
        return error
    return None
