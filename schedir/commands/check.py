"""The command `check`: check a program, or explain when an instruction starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from schedir.commands.common import check_sequence
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
    UsageError,
    format_bytes,
)
from schedir.io.terminal import format_json, format_table, join_words

if TYPE_CHECKING:
    from schedir.analysis.progress_models import ProgressModel
    from schedir.ir.program import Program

BLOCKING_HOSTS_TEXT = ", on hosts that block, as CPUs do"
DEVICE_SYNC_TEXT = ", where hosts wait for their whole device"
LAZY_COMMUNICATORS_TEXT = ", where each communicator is made at its first use"
_PROGRESS_ERRORS = (DeadlockError, GroupError, ChannelMismatchError)
_MAX_CHAIN_LINKS = 40  # links of a chain that are shown

EXAMPLES = """\
  schedir check interleaved --ranks 4 --microbatches 8
  schedir check mine.py:my_schedule -O tp=2 -O overlap --progress-model per_edge
  schedir check refused.sched -o deadlock.svg

The page docs/progress-models.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A source, or several as steps, and whose start to explain."""
    add_source(parser, allows_several=True)
    check_sequence.add_arguments(parser)
    parser.add_argument(
        "--explain-start",
        dest="why",
        metavar="RANK:INDEX",
        help="what decides when this one starts",
    )
    parser.add_argument(
        "--blocking-hosts",
        action="store_true",
        help="on hosts that wait themselves, as those of CPUs do",
    )
    parser.add_argument(
        "--host-device-sync",
        action="store_true",
        help="on hosts that wait for all they have issued, as for memory in a step on a GPU",
    )
    parser.add_argument(
        "--lazy-communicators",
        action="store_true",
        help="where each communicator is made at its first use, for which hosts meet",
    )
    parser.add_argument(
        "--eager-limit",
        type=parse_byte_option,
        metavar="BYTES",
        help="messages of at most so many bytes, by --sizes, wait for nobody, like 512KB",
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE.svg", help="a picture of where ranks stand, if refused"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Under which models a program finishes."""
    from schedir.analysis.memory.unshard_counts import collect_sharding_facts, describe_sharding
    from schedir.analysis.progress_models import MODELS
    from schedir.predict.recompute_summary import describe_forwards
    from schedir.verify.check import check

    if check_sequence.has_several_programs(args):
        return check_sequence.run(args)
    if args.why is not None:
        if args.host_device_sync:
            raise UsageError("--explain-start tells of hosts that do not wait for their device")
        if args.lazy_communicators or args.eager_limit is not None:
            option = "--lazy-communicators" if args.lazy_communicators else "--eager-limit"
            raise UsageError(
                f"--explain-start tells of predicted runs, for which there is no {option}"
            )
        return _explain_start(args)
    if args.output is not None and not args.output.endswith(".svg"):
        raise UsageError(f"a picture of where ranks stand ends in .svg: {args.output} does not")
    request = make_request(args, args.source[0])
    program, first = request.program, request.proven_progress_model
    others = [model for model in MODELS if args.progress_model is None and model != first]
    hosts = {
        "blocking_hosts": args.blocking_hosts,
        "host_device_sync": args.host_device_sync,
        "lazy_communicators": args.lazy_communicators,
    }
    how = {"eager_limit": args.eager_limit, "sizes": args.sizes}
    try:
        check(program, first, **hosts, **how)
    except SchedirError as error:
        if isinstance(error, _PROGRESS_ERRORS):
            fine = _find_finishing_models(program, others, **hosts, **how)
            hints = [f"it finishes under {join_words(fine)}"] * bool(fine)
            if isinstance(error, DeadlockError) and not args.lazy_communicators:
                hints += _describe_eager_limit(program, first, error, hosts)
            error.hint = "; ".join(hints) or error.hint
        if args.output is not None:
            _draw_deadlock(program, error, args.output)
        raise
    models = sorted(
        [first, *_find_finishing_models(program, others, **hosts, **how)], key=MODELS.index
    )
    # What finishes under `blocking_serial`, where a compute is a transfer's equal, finishes on such
    # hosts.
    known = any(hosts.values()) or ("blocking_serial" in models and args.eager_limit is None)
    on_cpus = (
        models if known else _find_finishing_models(program, models, blocking_hosts=True, **how)
    )
    if args.json:
        facts = {"program": program.name, "digest": program.digest, "ranks": program.shape.ranks}
        facts["stages_per_rank"] = program.shape.stages_per_rank
        models_said = {"models": models}
        if not args.lazy_communicators:  # hosts that meet to make communicators do not block
            models_said["models_where_hosts_block"] = on_cpus
        if args.host_device_sync:
            models_said["models_where_hosts_wait_for_their_device"] = models
        return format_json(
            facts | {"instructions": len(program)} | models_said | collect_sharding_facts(program)
        )
    fails = [model for model in others if model not in models]
    but = f", but not under {join_words(fails)}" if fails else ""
    if args.eager_limit is not None:
        but += f", where messages of at most {format_bytes(args.eager_limit)} wait for nobody"
    if args.lazy_communicators:
        but += LAZY_COMMUNICATORS_TEXT
    elif args.host_device_sync:
        but += DEVICE_SYNC_TEXT
    elif args.blocking_hosts:
        but += BLOCKING_HOSTS_TEXT
    elif on_cpus != models:
        only = f"only under {join_words(on_cpus)}" if on_cpus else "under none"
        but += f"; on hosts that block, as CPUs do, {only} (--blocking-hosts explains why)"
    shape = program.shape
    ranks = f"{shape.ranks} rank{'s' * (shape.ranks > 1)}"
    ranks += f" ({shape.stages_per_rank_text})" * (shape.stages_per_rank > 1)
    return (
        f"{program.name}: {len(program)} instructions on {ranks}"
        f"{'' if program.has_backward else ', which run forward only,'} are complete "
        f"and in order, and finish under {join_words(models)}{but}\n"
        + (f"{parts}\n" if (parts := describe_sharding(program)) else "")
        + describe_forwards(program)
    )


def _explain_start(args: argparse.Namespace) -> str:
    """The chain of instructions that decides when one starts."""
    timeline = make_request(args, args.source[0], blocking_hosts=args.blocking_hosts).timeline
    rank, _, index = args.why.partition(":")
    streams = timeline.program.streams
    if not all(part.isascii() and part.isdecimal() for part in (rank, index)):
        raise UsageError(f"--explain-start takes RANK:INDEX, not {args.why!r}")
    if len(rank) > 9 or int(rank) >= len(streams):
        raise UsageError(
            f"--explain-start: there is no rank {rank}: they are 0 to {len(streams) - 1}"
        )
    if len(index) > 9 or int(index) >= len(streams[int(rank)]):
        most = len(streams[int(rank)]) - 1
        raise UsageError(
            f"--explain-start: rank {rank} has no #{index}: its Stream ends at #{most}"
        )
    offsets = timeline.program.offsets
    chain = timeline.critical_path_to(int(offsets[int(rank)]) + int(index)).tolist()
    shown = []
    for position in chain:
        at = timeline.spans[position]
        number = position - int(offsets[at["rank"]])
        instr, start, end = timeline.instruction_at(int(at["rank"]), number)
        shown.append((int(at["rank"]), number, str(instr), start, end))
    if args.json:
        keys = ("rank", "index", "instruction", "start", "end")
        return format_json([dict(zip(keys, link, strict=True)) for link in shown])
    _, _, last, begin, _ = shown[-1]
    left = len(shown) - _MAX_CHAIN_LINKS
    return (
        f"{timeline.program.name}: rank {rank} #{index} {last} starts at {begin:.6g} under "
        f"{timeline.progress_model}{BLOCKING_HOSTS_TEXT * args.blocking_hosts}; what decides it, "
        "each link from the end of the "
        "one before\n"
        + (f"the last {_MAX_CHAIN_LINKS} of {len(shown)} links\n" if left > 0 else "")
        + format_table(
            ["start", "end", "rank", "index", "instruction"],
            [
                [f"{s:.6g}", f"{e:.6g}", str(r), f"#{k}", i]
                for r, k, i, s, e in shown[-_MAX_CHAIN_LINKS:]
            ],
        )
    )


def _describe_eager_limit(
    program: Program,
    progress_model: ProgressModel,
    error: DeadlockError,
    host_options: dict[str, bool],
) -> list[str]:
    """What is said of a program that hangs, but not where messages wait for nobody."""
    from schedir.analysis.eager_limit import describe_eager_limit
    from schedir.ir.cost.sizes import Sizes

    if error.eager_limit is not None:
        return [describe_eager_limit(error.eager_limit)]
    if not _find_finishing_models(
        program, [progress_model], **host_options, eager_limit=1, sizes=Sizes(activation=1)
    ):
        return []
    return ["it finishes where no message waits for its receiver (--sizes says from which size on)"]


def _draw_deadlock(program: Program, error: SchedirError, output: str) -> None:
    """Where the ranks of a refused program stand."""
    from schedir.io.files import atomic_write
    from schedir.viz.deadlock_diagram import draw_deadlock

    if not error.sites:
        error.add_note(f"wrote no {output}: what is missing stands nowhere")
        return
    with atomic_write(output) as path:
        path.write_text(draw_deadlock(program, error), encoding="utf-8")
    error.add_note(f"wrote {output}")


def _find_finishing_models(
    program: Program, models: Sequence[ProgressModel], **check_options: Any
) -> list[ProgressModel]:
    """Those of some models under which a program finishes."""
    from schedir.verify.check import check

    def finishes(progress_model: ProgressModel) -> bool:
        try:
            check(program, progress_model, **check_options)
        except _PROGRESS_ERRORS:
            return False
        return True

    return [model for model in models if finishes(model)]
