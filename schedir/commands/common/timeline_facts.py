"""Report facts of a run that several commands print."""

from __future__ import annotations

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

# Costs of what replicas do together with a stage's weights and gradients.
REPLICA_COSTS: Final = [row.cost for row in INSTRUCTIONS if row.ring and row.ring.members == "dp"]

_HOST_LANES: Final = (Lane.D2H, Lane.H2D, Lane.DISK, Lane.HOST)


def collect_timeline_facts(timeline: Timeline, bound: LowerBound | None = None) -> dict[str, Any]:
    """What is said of a run as a whole, with the bound on its span where one is known."""
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "stages_per_rank": timeline.program.shape.stages_per_rank,
        "doubt": timeline.causality_warning,
        "unit": timeline.unit,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bound": bound and bound.value,
        "gap": bound and max(timeline.span / bound.value - 1, 0.0),
    }


def describe_costs(requests: Sequence[Request]) -> str:
    """What is to be known of the costs: what clusters filled, and what is told and never read."""
    lines = [
        *_describe_unused_costs(requests),
        *_describe_free_moves(requests),
        *_describe_segment_sizes(requests),
    ]
    return _describe_cluster_costs(requests) + "".join(f"{line}\n" for line in lines)


def find_unpriced_moves(request: Request) -> list[str]:
    """The costs of copies to the host, its disk and back, and of what the host computes, that a
    program has and nobody tells."""
    ops = request.timeline.program.used_opcodes
    costs = {
        row.cost
        for row in INSTRUCTIONS
        if row.op in ops and row.cost != "snapshot" and row.lane in _HOST_LANES
    }
    priced = request.prediction_costs
    return [] if priced is None else sorted(costs - priced.specified.keys())


def _describe_free_moves(requests: Sequence[Request]) -> Iterator[str]:
    names = sorted({name for request in requests if request.cluster is None
                    for name in find_unpriced_moves(request)})  # fmt: skip
    if names:
        example = ",".join(f"{name}=0.5" for name in names)
        yield (
            f"nobody tells what {', '.join(names)} cost: here they are free, which nothing of the "
            f"host is; --costs {example} says it, or a --cluster with the bandwidths of its host"
        )


def _uses_boundary_sizes(request: Request) -> bool:
    """Whether what pieces hand over is counted as what passes between whole stages."""
    told = request.for_comparison and request.sizes is not None and np.any(request.sizes.activation)
    return bool(told) and max(request.timeline.program.segments_per_stage) > 1


def _describe_segment_sizes(requests: Sequence[Request]) -> Iterator[str]:
    if any(map(_uses_boundary_sizes, requests)):
        yield (
            "memory counts of what pieces hand over as much as passes between stages; a residual "
            "stream beside it, or all tokens of a sequence that ranks share, are more: simulate "
            "--sizes takes each piece's own"
        )


def find_unused_costs(requests: Iterable[Request]) -> list[str]:
    """The costs of sums and gathers over replicas that somebody told, and none of the programs has.

    Which of them a program has its level of ZeRO says; of F, I and the like whoever asks of several
    schedules tells more than each has.
    """
    told, read = set[str](), set[str]()
    for request in requests:
        program = request.timeline.program
        if program.dp > 1 and not program.used_opcodes.isdisjoint(OPTIMIZER_STEP_OPS):
            told |= {
                name for name, cost in (request.costs or Costs()).specified.items() if np.any(cost)
            }
        read |= {INSTRUCTIONS[op].cost for op in program.used_opcodes}
    return [name for name in REPLICA_COSTS if name in told - read]


def _describe_unused_costs(requests: Sequence[Request]) -> Iterator[str]:
    if names := find_unused_costs(requests):
        levels = sorted({request.timeline.program.zero for request in requests})
        has = {
            INSTRUCTIONS[op].cost
            for request in requests
            for op in request.timeline.program.used_opcodes
        }
        own = " and ".join(name for name in REPLICA_COSTS if name in has)
        yield (
            f"nobody reads the cost of {' and '.join(names)}: with zero "
            f"{' and '.join(map(str, levels))} there is {own}"
        )


def _describe_cluster_costs(requests: Iterable[Request]) -> str:
    """What clusters filled of the costs, a line for each of these that is another."""
    each = dict[str, None]()
    for request in requests:
        if request.cluster is None:
            continue
        found = {
            name: cost
            for name, cost in round_costs(request.cluster_costs).specified.items()
            if cost
        }
        said, ops = format_costs(Costs(**found)), request.program.used_opcodes
        priced = {
            row.cost for row in INSTRUCTIONS if row.op in ops and row.lane is not Lane.COMPUTE
        }
        if free := sorted(priced - request.stage_costs.specified.keys() - {""}):
            said += f"; nobody tells {', '.join(free)}: free"
        each[f"the cluster fills, in seconds: {said}\n"] = None
    return "".join(each)


def collect_cost_facts(request: Request) -> dict[str, Any]:
    """The same of one, for a program to read; nothing where nothing is to be said."""
    found: dict[str, Any] = (
        {} if request.cluster is None else {"filled": request.cluster_costs.specified}
    )
    found |= {"untold": names} if (names := find_unpriced_moves(request)) else {}
    found |= {"handed_over": "as between stages"} if _uses_boundary_sizes(request) else {}
    return found | ({"not_read": names} if (names := find_unused_costs([request])) else {})
