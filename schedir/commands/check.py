"""The command `check`: check programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedir.commands.common import multi_program_check
from schedir.commands.common.schedule_options import (
    add_compile_options,
    add_source,
    make_request,
    parse_byte_option,
)
from schedir.errors import (
    ChannelMismatchError,
    DeadlockError,
    GroupError,
    SchedirError,
    format_bytes,
)
from schedir.io.files import require_suffix
from schedir.io.terminal_output import format_json, join_words

if TYPE_CHECKING:
    from schedir.analysis.progress_models import ProgressModel
    from schedir.io.program_request import Request
    from schedir.ir.program import Program

DEVICE_SYNC_TEXT = ", if hosts wait for their devices"
LAZY_COMMUNICATORS_TEXT = ", if each communicator is created at its first use"
_PROGRESS_ERRORS = (DeadlockError, GroupError, ChannelMismatchError)

EXAMPLES = """\
  schedir check interleaved --ranks 4 --microbatches 8
  schedir check mine.py:my_schedule -O tp=2 -O overlap --progress-model per_edge

The page docs/explanation/progress-models.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser, allows_several=True)
    multi_program_check.add_arguments(parser)
    parser.add_argument(
        "--blocking-hosts", action="store_true",
        help="assume that a host waits for the inputs of an instruction before it issues the "
        "instruction, as CPU hosts do",
    )  # fmt: skip
    parser.add_argument(
        "--host-device-sync", action="store_true",
        help="assume that a host may wait at any time until all instructions that it issued have "
        "ended, as the host of a GPU does if a step allocates memory",
    )  # fmt: skip
    parser.add_argument(
        "--lazy-communicators", action="store_true",
        help="assume that each communicator is created at its first use, and that the hosts of its "
        "ranks wait for each other to create it",
    )  # fmt: skip
    parser.add_argument(
        "--eager-limit", type=parse_byte_option, metavar="BYTES",
        help="assume that a message of at most BYTES, such as 512KB, is sent before its receive is "
        "posted; needs --sizes",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        dest="output",
        metavar="FILE.svg",
        help="if the program is refused, draw it, and mark the instructions that wait for each "
        "other",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return the progress models under which a program finishes.

    Args:
        args: The parsed options of `check`.

    Returns:
        A text, or JSON with `--json`. With several programs, the result of
        `multi_program_check.run`.

    Raises:
        UsageError: The options cannot be combined.
        SchedirError: The program is wrong, or does not finish under the requested progress model.
            The hint of the error names the models under which the program finishes.
    """
    from schedir.analysis.progress_models import MODELS

    if multi_program_check.has_several_programs(args):
        return multi_program_check.run(args)
    if args.output is not None:
        require_suffix(args.output, "the picture of a refused program", ".svg")
    request = make_request(args, args.source[0])
    program = _compile_or_draw(request, args.output)
    first = request.proven_progress_model
    other_models = [model for model in MODELS if args.progress_model is None and model != first]
    _check_or_draw(args, program, first, other_models)
    if args.output is not None:  # Not on standard output, which may be JSON.
        print(
            f"did not write {args.output}: the program is not refused; `schedir draw` draws it",
            file=sys.stderr,
        )
    check_options = _get_host_options(args) | _get_eager_options(args)
    models = sorted(
        [first, *_find_finishing_models(program, other_models, **check_options)],
        key=MODELS.index,
    )
    cpu_models = _find_models_on_cpus(args, program, models)
    if args.json:
        return _format_facts(args, program, models, cpu_models)
    failing_models = [model for model in other_models if model not in models]
    exceptions = f", but not under {join_words(failing_models)}" if failing_models else ""
    exceptions += _describe_assumptions(args, models, cpu_models)
    return _format_text(program, models, exceptions)


def _compile_or_draw(request: Request, output: str | None) -> Program:
    """Return the program of a request. If it is refused, draw its draft to `output`, and raise."""
    try:
        return request.program
    except SchedirError as error:
        if output is not None:
            _draw_refused_draft(request, error, output)
        raise


def _get_host_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `check` that define when hosts wait."""
    return {
        "blocking_hosts": args.blocking_hosts,
        "host_device_sync": args.host_device_sync,
        "lazy_communicators": args.lazy_communicators,
    }


def _get_eager_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `check` that define which messages are sent before their receive."""
    return {"eager_limit": args.eager_limit, "sizes": args.sizes}


def _check_or_draw(
    args: argparse.Namespace,
    program: Program,
    progress_model: ProgressModel,
    other_models: Sequence[ProgressModel],
) -> None:
    """Check a program. If the check fails, draw the program if requested, and raise with a hint.

    The hint names the models of `other_models` under which the program finishes.
    """
    from schedir.verify.check import check

    hosts, eager_options = _get_host_options(args), _get_eager_options(args)
    try:
        check(program, progress_model, **hosts, **eager_options)
    except SchedirError as error:
        if isinstance(error, _PROGRESS_ERRORS):
            finishing_models = _find_finishing_models(
                program, other_models, **hosts, **eager_options
            )
            hints = [f"it finishes under {join_words(finishing_models)}"] * bool(finishing_models)
            if isinstance(error, DeadlockError) and not args.lazy_communicators:
                hints += _describe_eager_limit(program, progress_model, error, hosts)
            error.hint = "; ".join(hints) or error.hint
        if args.output is not None:
            _draw_deadlock(program, error, args.output)
        raise


def _find_models_on_cpus(
    args: argparse.Namespace, program: Program, models: list[ProgressModel]
) -> list[ProgressModel]:
    """Return the models of `models` under which a program finishes on blocking hosts.

    If an option sets the behavior of the hosts, return `models`.
    """
    # `blocking_serial` has one queue for compute and transfers. A program that finishes under this
    # model also finishes on blocking hosts, so this case needs no further check.
    is_serial = "blocking_serial" in models and args.eager_limit is None
    if is_serial or any(_get_host_options(args).values()):
        return models
    return _find_finishing_models(program, models, blocking_hosts=True, **_get_eager_options(args))


def _format_facts(
    args: argparse.Namespace,
    program: Program,
    models: list[ProgressModel],
    cpu_models: list[ProgressModel],
) -> str:
    """Return the result of `check --json`."""
    from schedir.analysis.memory.unshard_counts import collect_sharding_facts

    facts = {"program": program.name, "digest": program.digest, "ranks": program.shape.ranks}
    facts["stages_per_rank"] = program.shape.stages_per_rank
    model_facts = {"progress_models": models}
    if not args.lazy_communicators:  # Blocking hosts are not checked with this option.
        model_facts["progress_models_with_blocking_hosts"] = cpu_models
    if args.host_device_sync:
        model_facts["progress_models_with_host_device_sync"] = models
    return format_json(
        facts | {"instructions": len(program)} | model_facts | collect_sharding_facts(program)
    )


def _describe_assumptions(
    args: argparse.Namespace, models: list[ProgressModel], cpu_models: list[ProgressModel]
) -> str:
    """Return the assumptions about messages and hosts under which `models` were found."""
    text = ""
    if args.eager_limit is not None:
        limit = format_bytes(args.eager_limit)
        text += f", if messages of at most {limit} do not wait for their receive"
    if args.lazy_communicators:
        text += LAZY_COMMUNICATORS_TEXT
    elif args.host_device_sync:
        text += DEVICE_SYNC_TEXT
    else:
        text += multi_program_check.describe_hosts(args.blocking_hosts, models, cpu_models)
    return text


def _format_text(program: Program, models: list[ProgressModel], exceptions: str) -> str:
    """Return the result of `check` as text."""
    from schedir.analysis.memory.unshard_counts import describe_sharding
    from schedir.predict.recompute_summary import describe_forwards

    shape = program.shape
    ranks = f"{shape.ranks} rank{'s' * (shape.ranks > 1)}"
    ranks += f" ({shape.stages_per_rank_text})" * (shape.stages_per_rank > 1)
    return (
        f"{program.name}: {len(program)} instructions on {ranks}"
        f"{'' if program.has_backward else ', which run forward only,'} are complete "
        f"and in order, and finish under {join_words(models)}{exceptions}\n"
        + (f"{parts}\n" if (parts := describe_sharding(program)) else "")
        + describe_forwards(program)
    )


def _describe_eager_limit(
    program: Program,
    progress_model: ProgressModel,
    error: DeadlockError,
    host_options: dict[str, bool],
) -> list[str]:
    """Return a list with a hint if eager messages would resolve the deadlock, else []."""
    from schedir.analysis.eager_limit import describe_eager_limit
    from schedir.ir.cost.sizes import Sizes

    if error.eager_limit is not None:
        return [describe_eager_limit(error.eager_limit)]
    if not _find_finishing_models(
        program, [progress_model], **host_options, eager_limit=1, sizes=Sizes(activation=1, skip=1)
    ):
        return []
    return ["it finishes if no message waits for its receive (--sizes computes the eager limit)"]


def _draw_deadlock(program: Program, error: SchedirError, output: str) -> None:
    """Write a picture of a refused program, with the instructions that the error names."""
    from schedir.io.files import atomic_write
    from schedir.viz.deadlock_diagram import draw_deadlock

    if not error.sites:
        error.add_note(f"did not write {output}: the error names no instruction to draw")
        return
    with atomic_write(output) as path:
        path.write_text(draw_deadlock(program, error), encoding="utf-8")
    error.add_note(f"wrote {output}")


def _draw_refused_draft(request: Request, error: SchedirError, output: str) -> None:
    """Write a picture of a draft in which `compile` found a deadlock before the lowering.

    For other errors, add a note to the error that no picture was written.
    """
    if isinstance(error, DeadlockError):
        draft = replace(request, draft=True).program
        if len(draft) == error.instruction_count:
            _draw_deadlock(draft, error, output)
            return
    error.add_note(f"did not write {output}: only ranks that wait for each other can be drawn")


def _find_finishing_models(
    program: Program, models: Sequence[ProgressModel], **check_options: Any
) -> list[ProgressModel]:
    """Return the models of `models` under which a program finishes."""
    from schedir.verify.check import check

    def finishes(progress_model: ProgressModel) -> bool:
        try:
            check(program, progress_model, **check_options)
        except _PROGRESS_ERRORS:
            return False
        return True

    return [model for model in models if finishes(model)]
