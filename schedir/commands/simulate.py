"""The command `simulate`: predict a run, with the time, memory and sent bytes of each rank."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.buffer_slots import message_sizes, whole_sizes
from schedir.commands.common.bound_report import bound_of_request, said_of
from schedir.commands.common.schedule_options import add_shape, add_source, request_of
from schedir.commands.common.timeline_facts import facts, filled_facts, said_of_costs
from schedir.errors import UsageError, format_bytes
from schedir.io.program_request import Request
from schedir.io.terminal import as_json, table
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import WHOLE
from schedir.ir.instruction_index import InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    ROWS,
    SENDS,
    CollectiveRing,
    Lane,
    Row,
    Value,
    between_segments,
)
from schedir.ir.program import Program

if TYPE_CHECKING:
    from schedir.predict.timeline import Timeline


# ---------------------------------------------------------------- bytes sent

# How many bytes each process sends in a step of a program.


def volume(program: Program, sizes: Sizes) -> dict[Lane, NDArray[np.float64]]:
    """Return the bytes that a process of each rank sends in a lowered program, by lane.

    The arrays have the shape (ranks,).

    An all-gather or a reduce-scatter of n bytes by a ring of g processes sends n (g-1)/g from each,
    and an all-reduce twice that (Patarasuk and Yuan 2009, section 3).  So of Psi bytes of weights,
    and as many of gradients, data parallelism sends 2 Psi, ZeRO-1 and 2 send 2 Psi, and ZeRO-3
    3 Psi where each stage has two turns, times (dp-1)/dp (arXiv 1910.02054, section 7).

    Norms are left out because they are a few bytes, and tied weights because their sizes are not
    known.  A residual stream that passes beside what pieces sum or gather counts as a part of it.

    >>> from schedir import PipelineShape, Sizes, compile, schedules
    >>> from schedir.ir.isa.instructions import Lane
    >>> sizes = Sizes(params=4e9, grads=4e9)
    >>> for zero in range(4):
    ...     one = {"unsharded_stages": 1} if zero == 3 else {}  # the last stage has one run
    ...     program = compile(schedules.looped_bfs, PipelineShape(1, 2, 4), dp=4, zero=zero, **one)
    ...     sent = volume(program, sizes).items()
    ...     print(zero, *(f"{lane.name} {each[0] / 1e9:g} GB" for lane, each in sent))
    0 DP 24 GB
    1 DP 12 GB PARAMS 12 GB
    2 DP 12 GB PARAMS 12 GB
    3 DP 12 GB PARAMS 21 GB
    """
    index, sent = InstructionIndex.of(program), dict[Lane, NDArray[np.float64]]()

    def add(at: Positions, size: NDArray[np.float64]) -> None:
        if len(at) and size.any():
            lane = ROWS[int(index.op[at[0]])].lane
            total = sent.setdefault(lane, np.zeros(program.shape.ranks))
            np.add.at(total, index.rank[at], size)

    for op in SENDS:
        at = index.where_all((op,))
        add(at, message_sizes(program, sizes, at))
    for row in ROWS:
        if row.ring is not None:
            at = index.where_all((row.op,))
            add(at, _around(program, row, row.ring, sizes, at))
    return dict(sorted(sent.items()))


def _around(
    program: Program, row: Row, ring: CollectiveRing, sizes: Sizes, at: Positions
) -> NDArray[np.float64]:
    """Return the bytes that each process sends in instructions of one kind, for each of them."""
    shape, (token,) = program.shape, row.needs
    members = {"tp": program.tp, "dp": program.dp, "holders": shape.rows}[ring.members]
    if ring.size:
        whole = sizes.of(ring.size, shape.stages)[InstructionIndex.of(program).stage[at]]
    else:
        whole = whole_sizes(program, token, sizes, at)
    if token is Value.GRAD and program.zero:  # gradients are sharded by then
        whole = whole / program.dp
    turns = ring.turns
    if program.sequence_parallel and row.op in between_segments(sequence=True):
        # Sizes contain all tokens and the rank's own ones.  A gather, or a sum that leaves each
        # rank its own tokens, goes around the ring once.
        turns, whole = 1, whole * members / (members + 1)
    return turns * whole * (members - 1) / members


# ---------------------------------------------------------------- the command

EXAMPLES = """\
  schedir simulate zb_v --ranks 4 --microbatches 8 --costs F=1,I=1,W=0.9,send=0.1
  schedir simulate one_f_one_b --sizes saved=1.2GB -O recompute=fit --memory-limit 4GB

The page docs/traces.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the source of the program, and the output."""
    add_source(parser)
    parser.add_argument("-o", dest="output", metavar="FILE.timeline", help="write the run there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """Return a table with a row per rank, and the totals."""
    from schedir.analysis.memory.unshard_counts import facts_of_parts, in_parts
    from schedir.io.timeline_file import SUFFIX, save_timeline
    from schedir.predict.recompute_summary import of_forwards

    if args.output is not None and not args.output.endswith(SUFFIX):
        raise UsageError(f"a run's file ends in {SUFFIX}: {args.output} does not")
    request = request_of(args, args.source)
    timeline = request.timeline
    if args.output is not None:
        save_timeline(timeline, args.output)
    columns: dict[str, list[Any]] = {
        "busy": timeline.busy.tolist(),
        "idle": timeline.idle.tolist(),
        "idle_in_own_span": timeline.idle_in_own_span.tolist(),
        "peak_in_flight": timeline.peak_in_flight.tolist(),
    }
    if timeline.sizes is not None:
        columns["peak_memory"] = timeline.peak_memory.tolist()
        columns |= {f"peak_on_{tier}": most for tier, most in _below(timeline).items()}
        columns |= {name.replace(" ", "_"): each for name, each in _parts(timeline).items()}
    slots, sent = _slots(request), _sent(timeline)
    bound = bound_of_request(request)
    if args.json:
        found = facts(timeline, bound) | columns | filled_facts(request) | slots
        of_lanes = {"sent": {name: each.tolist() for name, each in sent.items()}} if sent else {}
        return as_json(found | of_lanes | facts_of_parts(timeline.program))
    for name in [*columns][4:]:
        columns[name] = [format_bytes(size) for size in columns[name]]
    unit = timeline.unit and f" {timeline.unit}"
    rows = enumerate(zip(*columns.values(), strict=True))
    return (
        f"{timeline.program.name}, {timeline.caption}\n"
        + table(
            ["rank", *(name.replace("_", " ") for name in columns)],
            [
                [str(rank), *(x if isinstance(x, str) else f"{x:.6g}" for x in row)]
                for rank, row in rows
            ],
        )
        + f"span {timeline.span:.6g}{unit}, bubble {timeline.bubble:.1%} of ranks x span, "
        f"{timeline.bubble_over_ideal:.1%} of the busy time\n"
        + "".join(f"{line}\n" for line in filter(None, [said_of(timeline, bound)]))
        + _said_sent(timeline, sent)
        + said_of_costs([request])
        + _said(timeline, slots)
        + (f"{parts}\n" if (parts := in_parts(timeline.program)) else "")
        + of_forwards(timeline.program)
        + _with_fewer(request)
    )


def _below(timeline: Timeline) -> dict[str, list[float]]:
    """Return the peak bytes of each rank on the host and on its disk, if a program uses these."""
    from schedir.analysis.memory.footprint import tiers_of

    return {
        tier: [float(curve.held.max(initial=0.0)) for curve in timeline.memory_on(tier)]
        for tier in tiers_of(timeline.program)[1:]
    }


def _sent(timeline: Timeline) -> dict[str, NDArray[np.float64]]:
    """Return the bytes that a process of each rank sends in a step, by lane; {} without sizes."""
    if timeline.sizes is None or timeline.program.is_draft:
        return {}
    found = volume(timeline.program, timeline.sizes)
    return {lane.name.lower(): each for lane, each in found.items()}


def _said_sent(timeline: Timeline, sent: dict[str, NDArray[np.float64]]) -> str:
    """Return in words the most bytes that a process sends in each lane."""
    if not sent:
        return ""
    tied = " (without tied weights)" if timeline.program.tied_weights else ""
    each = ", ".join(f"{name} {format_bytes(float(size.max()))}" for name, size in sent.items())
    return f"a process sends, at most: {each}{tied}\n"


def _parts(timeline: Timeline) -> dict[str, list[float]]:
    """Return each rank's bytes at rest, and the peak of what ZeRO gathers beside them."""
    parts = {name: each.tolist() for name, each in timeline.at_rest.items()}
    for name in WHOLE.values() if parts else ():
        whole = [float(curve.kinds[name].max()) for curve in timeline.memory if name in curve.kinds]
        parts |= {name: whole} if any(whole) else {}
    return parts


def _slots(request: Request) -> dict[str, Any]:
    """Return how many slots each rank shares, and the span if each value had a slot of its own."""
    from schedir.passes.memory.buffer_sharing import unshared
    from schedir.predict.simulate import simulate

    timeline = request.timeline
    program = timeline.program
    if not program.shares_slots:
        return {}
    slots = [counts.said() for counts in program.slots]
    if request.run is not None and request.given is None:  # the costs of the run are not known
        return {"slots": slots}
    own = simulate(
        unshared(program),
        request.given,
        progress_model=timeline.progress_model,
        blocking_hosts=timeline.blocking_hosts,
    )
    return {"slots": slots, "span_with_own_slots": own.span}


def _with_fewer(request: Request) -> str:
    """Return a line with the peak memory if values shared slots.

    It is empty if they share slots already, or if that would not help.
    """
    from schedir.passes.memory.buffer_sharing import share_slots
    from schedir.predict.simulate import simulate

    timeline = request.timeline
    program, sizes = timeline.program, timeline.sizes
    if sizes is None or program.shares_slots or isinstance(request.source.found, Program):
        return ""
    few = share_slots(program, "latency_preserving", request.given, timeline.progress_model)
    most = simulate(
        few, request.given, progress_model=timeline.progress_model, sizes=sizes
    ).peak_memory.max()
    if most >= timeline.peak_memory.max():
        return ""
    return (
        "each value has a slot of its own; with -O "
        "buffer_sharing=latency_preserving no rank holds more than "
        f"{format_bytes(most)}\n"
    )


def _said(timeline: Timeline, slots: dict[str, Any]) -> str:
    if not slots:
        return ""
    most: dict[str, int] = {}
    for counts in slots["slots"]:
        most |= {kind: max(number, most.get(kind, 0)) for kind, number in counts.items()}
    text = "slots, at most: " + ", ".join(f"{kind} {n}" for kind, n in most.items())
    own = slots.get("span_with_own_slots")
    if own:
        less = 1 - own / timeline.span
        text += f"; with one for each value the span would be {own:.6g}"
        text += f", {less:.1%} less" if less > 1e-9 else ", the same"
    return f"{text}\n"
