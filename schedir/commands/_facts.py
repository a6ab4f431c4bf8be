"""Facts of a run, as several commands say them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedir.ir.costs import Costs
from schedir.ir.ops import ROWS, Lane
from schedir.predict.calibrate import format_costs, rounded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from schedir.io.request import Request
    from schedir.predict.timeline import Timeline
    from schedir.shortest.found import Bound


def facts(timeline: Timeline, bound: Bound | None = None) -> dict[str, Any]:
    """What is said of a run as a whole, with the bound on its span where one is known."""
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "stages_per_rank": timeline.program.plan.stages_per_rank,
        "doubt": timeline.doubt,
        "unit": timeline.unit,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bound": bound and bound.value,
        "gap": bound and max(timeline.span / bound.value - 1, 0.0),
    }


def filled(requests: Iterable[Request]) -> str:
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
    """The same of one, for a program to read; nothing where no cluster is."""
    return {} if request.cluster is None else {"filled": request.filled.told}
