"""The command `check`: check a program, or explain when an instruction starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from schedir.commands.common import check_sequence
from schedir.commands.common.schedule_options import add_shape, add_source, read_bytes, request_of
from schedir.errors import (
    ChannelMismatchError,
    DeadlockError,
    GroupError,
    SchedirError,
    UsageError,
    format_bytes,
)
from schedir.io.terminal import as_json, listed, table

if TYPE_CHECKING:
    from schedir.analysis.progress_models import ProgressModel
    from schedir.ir.program import Program

BLOCKS = ", on hosts that block, as CPUs do"
DEVICE_WAITS = ", where hosts wait for their whole device"
LAZY = ", where each communicator is made at its first use"
_REFUSED = (DeadlockError, GroupError, ChannelMismatchError)
_LONGEST = 40  # links of a chain that are shown

EXAMPLES = """\
  schedir check interleaved --ranks 4 --microbatches 8
  schedir check mine.py:my_schedule -O tp=2 -O overlap --progress-model per_edge
  schedir check refused.sched -o deadlock.svg

The page docs/progress-models.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source, or several as steps, and whose start to explain."""
    add_source(parser, several=True)
    check_sequence.arguments(parser)
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
        type=read_bytes,
        metavar="BYTES",
        help="messages of at most so many bytes, by --sizes, wait for nobody, like 512KB",
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE.svg", help="a picture of where ranks stand, if refused"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """Under which models a program finishes."""
    from schedir.analysis.memory.unshard_counts import facts_of_parts, in_parts
    from schedir.analysis.progress_models import MODELS
    from schedir.predict.recompute_summary import of_forwards
    from schedir.verify.check import check

    if check_sequence.several(args):
        return check_sequence.run(args)
    if args.why is not None:
        if args.host_device_sync:
            raise UsageError("--explain-start tells of hosts that do not wait for their device")
        if args.lazy_communicators or args.eager_limit is not None:
            option = "--lazy-communicators" if args.lazy_communicators else "--eager-limit"
            raise UsageError(
                f"--explain-start tells of predicted runs, for which there is no {option}"
            )
        return _why(args)
    if args.output is not None and not args.output.endswith(".svg"):
        raise UsageError(f"a picture of where ranks stand ends in .svg: {args.output} does not")
    request = request_of(args, args.source[0])
    program, first = request.program, request.proven_model
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
        if isinstance(error, _REFUSED):
            fine = _under(program, others, **hosts, **how)
            hints = [f"it finishes under {listed(fine)}"] * bool(fine)
            if isinstance(error, DeadlockError) and not args.lazy_communicators:
                hints += _eager_hints(program, first, error, hosts)
            error.hint = "; ".join(hints) or error.hint
        if args.output is not None:
            _draw(program, error, args.output)
        raise
    models = sorted([first, *_under(program, others, **hosts, **how)], key=MODELS.index)
    # What finishes under `blocking_serial`, where a compute is a transfer's equal, finishes on such
    # hosts.
    known = any(hosts.values()) or ("blocking_serial" in models and args.eager_limit is None)
    on_cpus = models if known else _under(program, models, blocking_hosts=True, **how)
    if args.json:
        facts = {"program": program.name, "digest": program.digest, "ranks": program.shape.ranks}
        facts["stages_per_rank"] = program.shape.stages_per_rank
        models_said = {"models": models}
        if not args.lazy_communicators:  # hosts that meet to make communicators do not block
            models_said["models_where_hosts_block"] = on_cpus
        if args.host_device_sync:
            models_said["models_where_hosts_wait_for_their_device"] = models
        return as_json(
            facts | {"instructions": len(program)} | models_said | facts_of_parts(program)
        )
    fails = [model for model in others if model not in models]
    but = f", but not under {listed(fails)}" if fails else ""
    if args.eager_limit is not None:
        but += f", where messages of at most {format_bytes(args.eager_limit)} wait for nobody"
    if args.lazy_communicators:
        but += LAZY
    elif args.host_device_sync:
        but += DEVICE_WAITS
    elif args.blocking_hosts:
        but += BLOCKS
    elif on_cpus != models:
        only = f"only under {listed(on_cpus)}" if on_cpus else "under none"
        but += f"; on hosts that block, as CPUs do, {only} (--blocking-hosts explains why)"
    shape = program.shape
    ranks = f"{shape.ranks} rank{'s' * (shape.ranks > 1)}"
    ranks += f" ({shape.held_by_a_rank})" * (shape.stages_per_rank > 1)
    return (
        f"{program.name}: {len(program)} instructions on {ranks}"
        f"{'' if program.trains else ', which run forward only,'} are complete "
        f"and in order, and finish under {listed(models)}{but}\n"
        + (f"{parts}\n" if (parts := in_parts(program)) else "")
        + of_forwards(program)
    )


def _why(args: argparse.Namespace) -> str:
    """The chain of instructions that decides when one starts."""
    timeline = request_of(args, args.source[0], blocking_hosts=args.blocking_hosts).timeline
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
    chain = timeline.path_to(int(offsets[int(rank)]) + int(index)).tolist()
    shown = []
    for position in chain:
        at = timeline.spans[position]
        number = position - int(offsets[at["rank"]])
        instr, start, end = timeline.of(int(at["rank"]), number)
        shown.append((int(at["rank"]), number, str(instr), start, end))
    if args.json:
        keys = ("rank", "index", "instruction", "start", "end")
        return as_json([dict(zip(keys, link, strict=True)) for link in shown])
    _, _, last, begin, _ = shown[-1]
    left = len(shown) - _LONGEST
    return (
        f"{timeline.program.name}: rank {rank} #{index} {last} starts at {begin:.6g} under "
        f"{timeline.progress_model}{BLOCKS * args.blocking_hosts}; what decides it, "
        "each link from the end of the "
        "one before\n"
        + (f"the last {_LONGEST} of {len(shown)} links\n" if left > 0 else "")
        + table(
            ["start", "end", "rank", "index", "instruction"],
            [[f"{s:.6g}", f"{e:.6g}", str(r), f"#{k}", i] for r, k, i, s, e in shown[-_LONGEST:]],
        )
    )


def _eager_hints(
    program: Program, progress_model: ProgressModel, error: DeadlockError, hosts: dict[str, bool]
) -> list[str]:
    """What is said of a program that hangs, but not where messages wait for nobody."""
    from schedir.analysis.eager_limit import finishes_where
    from schedir.ir.cost.sizes import Sizes

    if error.eager_limit is not None:
        return [finishes_where(error.eager_limit)]
    if not _under(program, [progress_model], **hosts, eager_limit=1, sizes=Sizes(activation=1)):
        return []
    return ["it finishes where no message waits for its receiver (--sizes says from which size on)"]


def _draw(program: Program, error: SchedirError, output: str) -> None:
    """Where the ranks of a refused program stand."""
    from schedir.io.files import atomic_write
    from schedir.viz.deadlock_diagram import standstill

    if not error.sites:
        error.add_note(f"wrote no {output}: what is missing stands nowhere")
        return
    with atomic_write(output) as path:
        path.write_text(standstill(program, error), encoding="utf-8")
    error.add_note(f"wrote {output}")


def _under(program: Program, models: Sequence[ProgressModel], **hosts: Any) -> list[ProgressModel]:
    """Those of some models under which a program finishes."""
    from schedir.verify.check import check

    def finishes(progress_model: ProgressModel) -> bool:
        try:
            check(program, progress_model, **hosts)
        except _REFUSED:
            return False
        return True

    return [model for model in models if finishes(model)]
