"""Late moves: which copies from the host and its disk are waited for, and how much faster they had
to be that none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from schedir.ir.costs import FIELD, Costs
from schedir.ir.ops import ROWS, Lane, Token
from schedir.ir.per_stage import from_grid, grid
from schedir.predict.bubble_causes import Cause, idleness
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline

# What moves something on a tier's lanes, by the field that prices it.
_ON: Final = {"host": (Lane.D2H, Lane.H2D), "disk": (Lane.DISK,)}
_CAUSE: Final = {"host": Cause.OFFLOAD, "disk": Cause.DISK}
MOVES: Final = {
    tier: tuple(FIELD[r.op] for r in ROWS if r.lane in lanes and Token.COPY not in r.gives)
    for tier, lanes in _ON.items()
}
_LEAST: Final = 0.005  # of the span: what is shorter by less is as long
_FINE: Final = 0.01  # of a bandwidth


class Late(NamedTuple):
    """Waits for copies to and from a tier: how many, how long together, and the longest.

    The longest is of the instruction at `user`, at last for the copy at `move` (indices into
    `Timeline.spans`), which came late by `by`.
    """

    tier: str
    waits: int
    total: float
    by: float
    move: int
    user: int


class Faster(NamedTuple):
    """The run with so many `times` the bandwidth of a tier, from which on more saves nothing."""

    tier: str
    times: float
    run: Timeline


def late_moves(timeline: Timeline) -> list[Late]:
    """The waits for each tier on which compute waits for copies.

    >>> from schedir import Costs, Plan, compile, schedules, simulate
    >>> late_moves(simulate(compile(schedules.one_f_one_b, Plan(2, 4)), Costs(F=1, B=2)))
    []
    """
    idle, spans = idleness(timeline), timeline.spans
    found = []
    for tier, cause in _CAUSE.items():
        mine = idle[idle["cause"] == cause]
        if not len(mine):
            continue
        user = np.empty(len(mine), np.int64)
        for rank in np.unique(mine["rank"]).tolist():
            own = np.flatnonzero((spans["rank"] == rank) & (spans["lane"] == Lane.COMPUTE))
            here = mine["rank"] == rank
            ends = mine["end"][here] - 1e-9 * timeline.span
            user[here] = own[np.searchsorted(spans["start"][own], ends)]
        users, which = np.unique(user, return_inverse=True)
        late = np.bincount(which, mine["end"] - mine["start"])
        worst = int(late.argmax())
        own = np.flatnonzero(which == worst)
        last = int(mine["awaits"][own[mine["end"][own].argmax()]])
        by = float(late[worst])
        found.append(Late(tier, len(users), float(late.sum()), by, last, int(users[worst])))
    return found


def faster(base: Timeline, costs: Costs, tier: str) -> Faster:
    """How much faster a tier's copies had to be that the step is as short as if they took no time.

    By bisection, as no step is longer with shorter copies.  `base` is the prediction at `costs`.
    """
    told = [name for name in MOVES[tier] if name in costs.told]

    def run(share: float) -> Timeline:
        scaled = {name: from_grid(share * grid(costs.told[name])) for name in told}
        found = simulate(
            base.program, replace(costs, **scaled), model=base.model, blocks=base.blocks
        )
        return replace(found, unit=base.unit)

    enough = run(0.0).span * (1 + _LEAST)
    low, high = 0.0, 1.0
    while high - low > _FINE * high > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if run(middle).span <= enough else (low, middle)
    return Faster(tier, 1 / low if low else np.inf, run(low))


def format_late(late: list[Late], timeline: Timeline, sooner: list[Faster]) -> list[str]:
    """What was late, a line for each tier, and what bandwidth would do."""
    unit = timeline.unit and f" {timeline.unit}"
    lines = []
    for one in late:
        (move, _, _), (user, _, _) = (_of(timeline, at) for at in (one.move, one.user))
        rank = int(timeline.spans["rank"][one.user])
        many = f"{one.waits} instruction{'s wait' if one.waits > 1 else ' waits'}"
        lines.append(
            f"{many} for the {one.tier}, {one.total:.4g}{unit} in all: {user} on rank {rank} "
            f"longest, for {move}, which is {one.by:.4g}{unit} late"
        )
        for each in sooner:
            if each.tier == one.tier:
                of = f"{each.times:.2g}x the bandwidth of the {one.tier}"
                of = of if np.isfinite(each.times) else f"a {one.tier} that takes no time"
                saves = 1 - each.run.span / timeline.span if timeline.span else 0.0
                lines.append(
                    f"  with {of} the step takes {each.run.span:.4g}{unit}, {saves:.1%} less; with "
                    "more, hardly less"
                )
    return lines


def _of(timeline: Timeline, position: int) -> tuple[object, float, float]:
    rank = int(timeline.spans["rank"][position])
    return timeline.of(rank, position - int(timeline.program.offsets[rank]))
