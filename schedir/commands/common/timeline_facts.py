"""Collect facts of a run that several commands print."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS, OPTIMIZER_STEP_OPS, Lane
from schedir.predict.calibrate import format_costs, round_costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

# Names of the costs of collectives over replicas, for the weights and gradients of a stage.
REPLICA_COSTS: Final = [row.cost for row in INSTRUCTIONS if row.ring and row.ring.members == "dp"]

_HOST_LANES: Final = (Lane.D2H, Lane.H2D, Lane.DISK, Lane.HOST)


def collect_timeline_facts(timeline: Timeline, bound: LowerBound | None = None) -> dict[str, Any]:
    """Return facts of a run for JSON.

    Args:
        timeline: The run.
        bound: The lower bound on the span, or None if it is not known.
    """
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "stages_per_rank": timeline.program.shape.stages_per_rank,
        "causality_warning": timeline.causality_warning,
        "unit": timeline.unit,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bound": bound and bound.value,
        "gap_to_bound": bound and max(timeline.span / bound.value - 1, 0.0),
    }


def suggest_page(source: str) -> str:
    """Return a clause with the command that draws a run next to its simulation.

    Args:
        source: The file of the run.
    """
    page = shlex.quote(f"{source.rpartition('.')[0]}.html")
    return f"schedir draw {shlex.quote(source)} -o {page} shows where they differ"


def describe_costs(requests: Sequence[Request]) -> str:
    """Return lines about the costs of runs.

    The lines list the costs that were computed from a cluster, the costs that no program uses, and
    copies without a cost. One line warns if segment boundaries have the size of stage boundaries.
    Another line warns if `--sizes` has weights but no gradients or no optimizer state.

    Args:
        requests: For each run, the source and the options of its program.
    """
    lines = [
        *_describe_unused_costs(requests),
        *_describe_free_moves(requests),
        *_describe_segment_sizes(requests),
        *_describe_missing_sizes(requests),
    ]
    return _describe_cluster_costs(requests) + "".join(f"{line}\n" for line in lines)


def find_unpriced_moves(request: Request) -> list[str]:
    """Return the names of costs that the moves of a program need but the user did not give.

    Moves are copies to the host or the disk, copies back, and computation on the host.

    Args:
        request: The request of the run.

    Returns:
        The names, sorted. Empty for a run from a file, which contains the times.
    """
    ops = request.timeline.program.used_opcodes
    costs = {
        row.cost
        for row in INSTRUCTIONS
        if row.op in ops and row.cost != "snapshot" and row.lane in _HOST_LANES
    }
    costs_of_run = request.prediction_costs
    return [] if costs_of_run is None else sorted(costs - costs_of_run.specified.keys())


def _describe_free_moves(requests: Sequence[Request]) -> Iterator[str]:
    names = sorted({name for request in requests if request.cluster is None
                    for name in find_unpriced_moves(request)})  # fmt: skip
    if names:
        example = ",".join(f"{name}=0.5" for name in names)
        yield (
            f"without a cost, and so free: {', '.join(names)}; give --costs {example}, or a "
            "--cluster with the bandwidths of its host"
        )


def _uses_boundary_sizes(request: Request) -> bool:
    """Return whether segment boundaries have the size of stage boundaries in this prediction."""
    has_sizes = (
        request.for_comparison and request.sizes is not None and np.any(request.sizes.activation)
    )
    return bool(has_sizes) and max(request.timeline.program.segments_per_stage) > 1


def _describe_segment_sizes(requests: Sequence[Request]) -> Iterator[str]:
    if any(map(_uses_boundary_sizes, requests)):
        yield (
            "boundaries between segments count with the size of those between stages; a residual "
            "stream, or all tokens of a sequence that ranks share, need more memory: simulate "
            "--sizes accepts a size for each segment"
        )


def _describe_missing_sizes(requests: Sequence[Request]) -> Iterator[str]:
    sizes = requests[0].sizes if requests else None
    if sizes is None or not np.any(sizes.params):
        return
    if not any(request.timeline.program.has_backward for request in requests):
        return
    missing = [name for name in ("grads", "optimizer") if not np.any(getattr(sizes, name))]
    if missing:
        yield (
            f"--sizes has no {' and no '.join(missing)}, and a missing size counts as 0 bytes; "
            "give the missing sizes, or model_states, the sum of params, grads and optimizer"
        )


def find_unused_costs(requests: Iterable[Request]) -> list[str]:
    """Return the costs of collectives over replicas that the user gave but no program uses.

    The ZeRO level of a program determines which of these collectives it has. Other unused costs,
    such as I, are not reported: the same costs apply to several schedules, and some schedules do
    not need all of them.

    Args:
        requests: For each run, the source and the options of its program.
    """
    given_costs, used_costs = set[str](), set[str]()
    for request in requests:
        program = request.timeline.program
        if program.dp > 1 and not program.used_opcodes.isdisjoint(OPTIMIZER_STEP_OPS):
            given_costs |= {
                name for name, cost in (request.costs or Costs()).specified.items() if np.any(cost)
            }
        used_costs |= {INSTRUCTIONS[op].cost for op in program.used_opcodes}
    return [name for name in REPLICA_COSTS if name in given_costs - used_costs]


def _describe_unused_costs(requests: Sequence[Request]) -> Iterator[str]:
    if names := find_unused_costs(requests):
        levels = sorted({request.timeline.program.zero for request in requests})
        used_costs = {
            INSTRUCTIONS[op].cost
            for request in requests
            for op in request.timeline.program.used_opcodes
        }
        used_names = " and ".join(name for name in REPLICA_COSTS if name in used_costs)
        yield (
            f"the cost of {' and '.join(names)} is not used: with zero "
            f"{' and '.join(map(str, levels))}, programs use {used_names}"
        )


def _describe_cluster_costs(requests: Iterable[Request]) -> str:
    """Return a line for each distinct set of costs that were computed from clusters."""
    lines = dict[str, None]()
    for request in requests:
        if request.cluster is None:
            continue
        costs = {
            name: cost
            for name, cost in round_costs(request.cluster_costs).specified.items()
            if cost
        }
        text, ops = format_costs(Costs(**costs)), request.program.used_opcodes
        priced = {
            row.cost for row in INSTRUCTIONS if row.op in ops and row.lane is not Lane.COMPUTE
        }
        if missing := sorted(priced - request.stage_costs.specified.keys() - {""}):
            text += f"; without a cost, and so free: {', '.join(missing)}"
        shape = request.program.shape
        of_stage = (
            f", for one of the {shape.stages_per_rank} stages of a rank"
            if shape.stages_per_rank > 1
            else ""
        )
        lines[f"costs from the cluster, in seconds{of_stage}: {text}\n"] = None
    return "".join(lines)


def collect_cost_facts(request: Request) -> dict[str, Any]:
    """Return the facts of `describe_costs` for one run, for JSON.

    Args:
        request: The request of the run.

    Returns:
        The facts. Facts that do not apply are left out.
    """
    facts: dict[str, Any] = (
        {} if request.cluster is None else {"cluster_costs": request.cluster_costs.specified}
    )
    facts |= {"unpriced_moves": names} if (names := find_unpriced_moves(request)) else {}
    if _uses_boundary_sizes(request):
        facts["segment_boundary_sizes"] = "as between stages"
    return facts | ({"unused_costs": names} if (names := find_unused_costs([request])) else {})
