"""Report facts of a run that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import ROWS, STEPS, Lane
from schedir.predict.calibrate import format_costs, rounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

# Costs of what replicas do together with a stage's weights and gradients.
OVER_REPLICAS: Final = [row.cost for row in ROWS if row.ring and row.ring.members == "dp"]

_OF_HOSTS: Final = (Lane.D2H, Lane.H2D, Lane.DISK, Lane.HOST)


def facts(timeline: Timeline, bound: LowerBound | None = None) -> dict[str, Any]:
    """What is said of a run as a whole, with the bound on its span where one is known."""
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "stages_per_rank": timeline.program.shape.stages_per_rank,
        "doubt": timeline.doubt,
        "unit": timeline.unit,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bound": bound and bound.value,
        "gap": bound and max(timeline.span / bound.value - 1, 0.0),
    }


def said_of_costs(requests: Sequence[Request]) -> str:
    """What is to be known of the costs: what clusters filled, and what is told and never read."""
    lines = [*_not_read(requests), *_free_moves(requests), *_handed_over(requests)]
    return _filled(requests) + "".join(f"{line}\n" for line in lines)


def untold_moves(request: Request) -> list[str]:
    """The costs of copies to the host, its disk and back, and of what the host computes, that a
    program has and nobody tells."""
    ops = request.timeline.program.ops
    costs = {
        row.cost
        for row in ROWS
        if row.op in ops and row.cost != "snapshot" and row.lane in _OF_HOSTS
    }
    priced = request.priced
    return [] if priced is None else sorted(costs - priced.told.keys())


def _free_moves(requests: Sequence[Request]) -> Iterator[str]:
    names = sorted({name for request in requests if request.cluster is None
                    for name in untold_moves(request)})  # fmt: skip
    if names:
        example = ",".join(f"{name}=0.5" for name in names)
        yield (
            f"nobody tells what {', '.join(names)} cost: here they are free, which nothing of the "
            f"host is; --costs {example} says it, or a --cluster with the bandwidths of its host"
        )


def _as_between_stages(request: Request) -> bool:
    """Whether what pieces hand over is counted as what passes between whole stages."""
    told = request.share and request.sizes is not None and np.any(request.sizes.activation)
    return bool(told) and max(request.timeline.program.pieces) > 1


def _handed_over(requests: Sequence[Request]) -> Iterator[str]:
    if any(map(_as_between_stages, requests)):
        yield (
            "memory counts of what pieces hand over as much as passes between stages; a residual "
            "stream beside it, or all tokens of a sequence that ranks share, are more: simulate "
            "--sizes takes each piece's own"
        )


def not_read(requests: Iterable[Request]) -> list[str]:
    """The costs of sums and gathers over replicas that somebody told, and none of the programs has.

    Which of them a program has its level of ZeRO says; of F, I and the like whoever asks of several
    schedules tells more than each has.
    """
    told, read = set[str](), set[str]()
    for request in requests:
        program = request.timeline.program
        if program.dp > 1 and not program.ops.isdisjoint(STEPS):
            told |= {name for name, cost in (request.costs or Costs()).told.items() if np.any(cost)}
        read |= {ROWS[op].cost for op in program.ops}
    return [name for name in OVER_REPLICAS if name in told - read]


def _not_read(requests: Sequence[Request]) -> Iterator[str]:
    if names := not_read(requests):
        levels = sorted({request.timeline.program.zero for request in requests})
        has = {ROWS[op].cost for request in requests for op in request.timeline.program.ops}
        own = " and ".join(name for name in OVER_REPLICAS if name in has)
        yield (
            f"nobody reads the cost of {' and '.join(names)}: with zero "
            f"{' and '.join(map(str, levels))} there is {own}"
        )


def _filled(requests: Iterable[Request]) -> str:
    """What clusters filled of the costs, a line for each of these that is another."""
    each = dict[str, None]()
    for request in requests:
        if request.cluster is None:
            continue
        found = {name: cost for name, cost in rounded(request.filled).told.items() if cost}
        said, ops = format_costs(Costs(**found)), request.program.ops
        priced = {row.cost for row in ROWS if row.op in ops and row.lane is not Lane.COMPUTE}
        if free := sorted(priced - request.stage_costs.told.keys() - {""}):
            said += f"; nobody tells {', '.join(free)}: free"
        each[f"the cluster fills, in seconds: {said}\n"] = None
    return "".join(each)


def filled_facts(request: Request) -> dict[str, Any]:
    """The same of one, for a program to read; nothing where nothing is to be said."""
    found: dict[str, Any] = {} if request.cluster is None else {"filled": request.filled.told}
    found |= {"untold": names} if (names := untold_moves(request)) else {}
    found |= {"handed_over": "as between stages"} if _as_between_stages(request) else {}
    return found | ({"not_read": names} if (names := not_read([request])) else {})
