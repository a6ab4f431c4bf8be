"""The command `simulate`: predict a run, with the time, memory and sent bytes of each rank."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.buffer_slots import compute_full_sizes, compute_message_sizes
from schedir.commands.common.bound_report import describe_run_bound, find_lower_bound
from schedir.commands.common.least_memory import describe_request_memory
from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.commands.common.timeline_facts import (
    collect_cost_facts,
    collect_timeline_facts,
    describe_costs,
)
from schedir.errors import format_bytes
from schedir.io.files import require_suffix
from schedir.io.program_request import Request
from schedir.io.terminal_output import format_json, format_table
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import UNSHARDED_LABELS
from schedir.ir.instruction_index import InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    SEND_OPS,
    CollectiveRing,
    Lane,
    Row,
    Value,
    find_segment_collectives,
)
from schedir.ir.program import Program

if TYPE_CHECKING:
    from schedir.predict.timeline import Timeline

# A time is a rounding error if it is a smaller share of the span than this number.
_ROUNDING_ERROR: Final = 1e-12


# ---------------------------------------------------------------- bytes sent


def count_sent_bytes(program: Program, sizes: Sizes) -> dict[Lane, NDArray[np.float64]]:
    """Return the bytes that a process of each rank sends in a step, by lane.

    In a ring of g processes, each process sends n (g-1)/g bytes for an all-gather or a
    reduce-scatter of n bytes. For an all-reduce, each process sends twice as many bytes (Patarasuk
    and Yuan 2009, section 3). With Psi bytes of weights and Psi bytes of gradients, data
    parallelism therefore sends 2 Psi (dp-1)/dp bytes. ZeRO-1 and ZeRO-2 send as many bytes as data
    parallelism. ZeRO-3 sends 3 Psi (dp-1)/dp bytes if each stage is gathered for its forwards and
    again for its backwards (arXiv 1910.02054, section 7).

    Collectives of gradient norms are left out because they send only a few bytes. Tied weights are
    left out because their sizes are not known. A residual stream between segments counts as a part
    of the tensor that is reduced or gathered.

    Args:
        program: A lowered program.
        sizes: The sizes of each stage, in bytes.

    Returns:
        Lane -> bytes, as arrays of shape (ranks,). Lanes without bytes are left out.

    References:
        Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations". Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054).

    Example:
        >>> from schedir import PipelineShape, Sizes, compile, schedules
        >>> from schedir.ir.isa.instructions import Lane
        >>> shape, sizes = PipelineShape(1, 2, 4), Sizes(params=4e9, grads=4e9)
        >>> for zero in range(4):
        ...     one = {"unsharded_stages": 1} if zero == 3 else {}  # stage 3: one gather
        ...     program = compile(schedules.looped_bfs, shape, dp=4, zero=zero, **one)
        ...     sent = count_sent_bytes(program, sizes).items()
        ...     print(zero, *(f"{lane.name} {each[0] / 1e9:g} GB" for lane, each in sent))
        0 DP 24 GB
        1 DP 12 GB PARAMS 12 GB
        2 DP 12 GB PARAMS 12 GB
        3 DP 12 GB PARAMS 21 GB
    """
    index = InstructionIndex.from_program(program)
    sent_bytes = dict[Lane, NDArray[np.float64]]()

    def add(positions: Positions, size: NDArray[np.float64]) -> None:
        if len(positions) and size.any():
            lane = INSTRUCTIONS[int(index.op[positions[0]])].lane
            total = sent_bytes.setdefault(lane, np.zeros(program.shape.ranks))
            np.add.at(total, index.rank[positions], size)

    for op in SEND_OPS:
        at = index.find_all_positions((op,))
        add(at, compute_message_sizes(program, sizes, at))
    for row in INSTRUCTIONS:
        if row.ring is not None:
            at = index.find_all_positions((row.op,))
            add(at, _count_ring_bytes(program, row, row.ring, sizes, at))
    return dict(sorted(sent_bytes.items()))


def _count_ring_bytes(
    program: Program, row: Row, ring: CollectiveRing, sizes: Sizes, positions: Positions
) -> NDArray[np.float64]:
    """Return the bytes that a process sends in each of the instructions at `positions`.

    `row` describes the opcode of all these instructions.
    """
    shape, (token,) = program.shape, row.needs
    members = {
        "tp": program.tp,
        "ep": program.ep,
        "dp": program.dp,
        "stage_replicas": shape.placement_rows,
    }[ring.members]
    size = "routed" if ring.members == "ep" and np.any(np.array(sizes.routed)) else ring.size
    if size:
        full_bytes = sizes.for_stages(size, shape.stages)[
            InstructionIndex.from_program(program).stage[positions]
        ]
    else:
        full_bytes = compute_full_sizes(program, token, sizes, positions)
    if token is Value.GRAD and program.zero:  # The gradients are already sharded.
        full_bytes = full_bytes / program.dp
    rounds = ring.rounds
    if program.sequence_parallel and row.op in find_segment_collectives(sequence_parallel=True):
        # The size includes all tokens, and includes the tokens of the rank twice. The second copy
        # of these tokens is not sent. An all-gather or a reduce-scatter goes around the ring once.
        rounds, full_bytes = 1, full_bytes * members / (members + 1)
    return rounds * full_bytes * (members - 1) / members


# ---------------------------------------------------------------- the command

EXAMPLES = """\
  schedir simulate zb_v --ranks 4 --microbatches 8 --costs F=1,I=1,W=0.9,send=0.1
  schedir simulate one_f_one_b --sizes saved=1.2GB -O recompute=fit --memory-limit 4GB

The page docs/reference/file-formats.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    parser.add_argument(
        "-o", dest="output", metavar="FILE.timeline", help="write the run to this file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return a table with a row per rank, and the totals.

    Args:
        args: The parsed options of `simulate`.

    Returns:
        A text, or JSON with `--json`.

    Raises:
        UsageError: The file has the wrong suffix, or the options do not apply to a run.
    """
    from schedir.analysis.memory.unshard_counts import collect_sharding_facts, describe_sharding
    from schedir.io.timeline_file import TIMELINE_SUFFIX, save_timeline
    from schedir.predict.recompute_summary import describe_forwards

    if args.output is not None:
        require_suffix(args.output, "the file of a run", TIMELINE_SUFFIX)
    request = make_request(args, args.source)
    timeline = request.timeline
    if args.output is not None:
        save_timeline(timeline, args.output)
    columns: dict[str, list[Any]] = {
        "busy": timeline.busy.tolist(),
        "idle": timeline.idle.tolist(),
        "idle_in_active_span": timeline.idle_in_active_span.tolist(),
        "peak_in_flight": timeline.peak_in_flight.tolist(),
    }
    if timeline.sizes is not None:
        columns["peak_memory"] = timeline.peak_memory.tolist()
        columns |= {
            f"peak_on_{tier}": peak for tier, peak in _find_lower_tier_peaks(timeline).items()
        }
        columns |= {
            name.replace(" ", "_"): values for name, values in _list_static_memory(timeline).items()
        }
    slots = _count_slots(request)
    sent_bytes = _count_lane_bytes(timeline)
    bound = find_lower_bound(request)
    if args.json:
        found = (
            collect_timeline_facts(timeline, bound) | columns | collect_cost_facts(request) | slots
        )
        of_lanes = (
            {"sent_bytes": {name: values.tolist() for name, values in sent_bytes.items()}}
            if sent_bytes
            else {}
        )
        return format_json(found | of_lanes | collect_sharding_facts(timeline.program))
    for name in [*columns][4:]:
        columns[name] = [format_bytes(size) for size in columns[name]]
    unit = timeline.unit and f" {timeline.unit}"
    bound_lines = [describe_run_bound(timeline, bound), describe_request_memory(request, bound)]
    rows = enumerate(zip(*columns.values(), strict=True))
    return (
        f"{timeline.program.name}, {timeline.caption}\n"
        + format_table(
            ["rank", *(name.replace("_", " ") for name in columns)],
            [[str(rank), *(_format_cell(x, timeline.span) for x in row)] for rank, row in rows],
        )
        + f"span {timeline.span:.6g}{unit}, bubble {timeline.bubble:.1%} of ranks x span, "
        f"{timeline.bubble_over_ideal:.1%} of the busy time\n"
        + "".join(f"{line}\n" for line in filter(None, bound_lines))
        + _describe_sent_bytes(timeline, sent_bytes)
        + describe_costs([request])
        + _describe_slots(timeline, slots)
        + (f"{parts}\n" if (parts := describe_sharding(timeline.program)) else "")
        + describe_forwards(timeline.program)
        + _suggest_buffer_sharing(request)
    )


def _format_cell(value: float | str, span: float) -> str:
    """Return a cell of the table. A time that is only a rounding error of the span is 0."""
    if isinstance(value, str):
        return value
    return f"{value if abs(value) > _ROUNDING_ERROR * span else 0:.6g}"


def _find_lower_tier_peaks(timeline: Timeline) -> dict[str, list[float]]:
    """Return tier -> peak bytes of each rank, for the host and the disk if they are used."""
    from schedir.analysis.memory.footprint import find_used_tiers

    return {
        tier: [float(curve.total.max(initial=0.0)) for curve in timeline.memory_on(tier)]
        for tier in find_used_tiers(timeline.program)[1:]
    }


def _count_lane_bytes(timeline: Timeline) -> dict[str, NDArray[np.float64]]:
    """Return lane -> bytes that a process of each rank sends, or {} if there are no sizes."""
    if timeline.sizes is None or timeline.program.is_draft:
        return {}
    bytes_by_lane = count_sent_bytes(timeline.program, timeline.sizes)
    return {lane.name.lower(): lane_bytes for lane, lane_bytes in bytes_by_lane.items()}


def _describe_sent_bytes(timeline: Timeline, bytes_by_lane: dict[str, NDArray[np.float64]]) -> str:
    """Return a line with the largest number of bytes that a process sends in each lane."""
    if not bytes_by_lane:
        return ""
    tied = " (without tied weights)" if timeline.program.tied_weights else ""
    lane_texts = ", ".join(
        f"{name} {format_bytes(float(size.max()))}" for name, size in bytes_by_lane.items()
    )
    return f"bytes that a process sends, at most: {lane_texts}{tied}\n"


def _list_static_memory(timeline: Timeline) -> dict[str, list[float]]:
    """Return name -> bytes of each rank, for static memory and the unsharded values of ZeRO."""
    parts = {name: values.tolist() for name, values in timeline.static_memory.items()}
    for name in UNSHARDED_LABELS.values() if parts else ():
        peaks = [
            float(curve.by_kind[name].max()) for curve in timeline.memory if name in curve.by_kind
        ]
        parts |= {name: peaks} if any(peaks) else {}
    return parts


def _count_slots(request: Request) -> dict[str, Any]:
    """Return the slots of each rank, and the span without slot sharing, for JSON.

    The result is {} if values do not share slots.
    """
    from schedir.passes.memory.buffer_sharing import remove_slot_sharing
    from schedir.predict.simulate import simulate

    timeline = request.timeline
    program = timeline.program
    if not program.shares_slots:
        return {}
    slots = [counts.specified() for counts in program.slots]
    if (
        request.source_timeline is not None and request.specified_costs is None
    ):  # The costs of the run are not known.
        return {"slots": slots}
    unshared = simulate(
        remove_slot_sharing(program),
        request.specified_costs,
        progress_model=timeline.progress_model,
        blocking_hosts=timeline.blocking_hosts,
    )
    return {"slots": slots, "span_without_buffer_sharing": unshared.span}


def _suggest_buffer_sharing(request: Request) -> str:
    """Return a line with the peak memory that shared slots would give.

    The line is "" without sizes, for a program from a file, if values already share slots, or if
    sharing would not reduce the peak.
    """
    from schedir.passes.memory.buffer_sharing import share_slots
    from schedir.predict.simulate import simulate

    timeline = request.timeline
    program, sizes = timeline.program, timeline.sizes
    if (
        sizes is None
        or program.shares_slots
        or isinstance(request.source.schedule_or_program, Program)
    ):
        return ""
    shared = share_slots(
        program, "latency_preserving", request.specified_costs, timeline.progress_model
    )
    peak = simulate(
        shared, request.specified_costs, progress_model=timeline.progress_model, sizes=sizes
    ).peak_memory.max()
    if peak >= timeline.peak_memory.max():
        return ""
    return (
        "each value has its own slot; with -O buffer_sharing=latency_preserving, no rank uses more "
        f"than {format_bytes(peak)}\n"
    )


def _describe_slots(timeline: Timeline, slot_facts: dict[str, Any]) -> str:
    if not slot_facts:
        return ""
    max_counts: dict[str, int] = {}
    for counts in slot_facts["slots"]:
        max_counts |= {
            kind: max(number, max_counts.get(kind, 0)) for kind, number in counts.items()
        }
    text = "slots, at most: " + ", ".join(f"{kind} {n}" for kind, n in max_counts.items())
    unshared_span = slot_facts.get("span_without_buffer_sharing")
    if unshared_span:
        saving = 1 - unshared_span / timeline.span
        text += f"; with its own slot for each value, the span would be {unshared_span:.6g}"
        text += f", {saving:.1%} less" if saving > 1e-9 else ", the same"
    return f"{text}\n"
