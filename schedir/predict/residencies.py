"""Residencies: what replicas could hold in place of what they hold, and what that takes; each claim
from simulating it.

Of ZeRO's levels (arXiv 1910.02054), of stages that are whole at once, of how far ahead they are
gathered, of when gradients are reduced, and of a schedule that gathers less often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.gathers import gathers
from schedir.compiler.again import compute_of
from schedir.errors import ProgramError, in_bytes
from schedir.ir.costs import Costs
from schedir.ir.per_stage import from_grid, grid
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes, ample
from schedir.ir.zero import CUT_FROM, LEVELS, is_cut
from schedir.predict.calibrate import calibrate, completed
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.predict.what_if import LARGE, LEAST, Lowering
from schedir.schedules import looped_bfs
from schedir.schedules.draft import draft

_WHOLE: Final = CUT_FROM["params"]  # the level from which on weights are parts between uses
_WHEN: Final = {"end": "at the end", "turn": "each turn"}


class Residency(NamedTuple):
    """A run in which replicas hold something else, and what that is, in words."""

    what: str
    run: Timeline

    @property
    def gathers(self) -> int:
        """How often the rank that does so most gathers weights."""
        return max(gathers(self.run.program).times, default=0)

    @property
    def most(self) -> float:
        """The most bytes that a rank holds; 0 where no sizes are known."""
        return float(self.run.peak_memory.max()) if self.run.sizes is not None else 0.0


def residencies(
    timeline: Timeline, costs: Costs | None = None, limit: float | None = None
) -> list[Residency]:
    """What could be held in place of what is: the run as it is, simulated, and behind it what takes
    less time, or less memory, the shortest first.  Of the same schedule nothing else that was tried
    takes less of both.

    `costs` are those of a prediction; without, they are read off the run.  What another level has
    that the run's has not is priced by `repriced`.  What is above a `limit` in bytes is left out.

    Nothing where there is one replica, of very large programs, and of plain data parallelism
    without sizes that tell apart what is held all the time.
    """
    program, sizes = timeline.program, timeline.sizes
    apart = sizes is not None and not {*sizes.told_apart}.isdisjoint(CUT_FROM)
    if program.dp == 1 or not (program.zero or apart) or len(program) > LARGE:
        return []
    costs = completed(costs or calibrate(timeline), program)
    tried = []
    for what, other in _others(timeline, costs):
        price = repriced(costs, program, other.zero, sizes)
        run = simulate(other, price, model=timeline.model, blocks=timeline.blocks, sizes=sizes)
        tried.append(Residency(what, replace(run, unit=timeline.unit)))
    now, *others = tried
    found: list[Residency] = []
    for one in sorted(others, key=lambda one: (float(f"{one.run.span:.9g}"), one.most)):
        shorter = one.run.span <= now.run.span * (1 - LEAST)
        spares = one.most < now.most * (1 - LEAST)
        alike = [other for other in found if other.run.program.name == one.run.program.name]
        beaten = sizes is not None and any(other.most <= one.most for other in alike)
        if (shorter or spares) and not beaten and (limit is None or one.most <= ample(limit)):
            found.append(one)
    return [now, *found]


def _others(timeline: Timeline, costs: Costs) -> Iterator[tuple[str, Program]]:
    """What is tried, in words, one change each; the program as it is first."""
    program = timeline.program
    lowering, compute = Lowering(program, timeline.model), compute_of(program)
    own, zero = max(map(len, program.plan.stages_of)), program.zero
    active = lowering.options.get("active", own)
    yield _said(program, lowering.options), program
    changes: list[tuple[str, dict[str, Any]]] = []
    for level in {*range(LEVELS)} - {zero}:
        reduce = program.reduce if level >= CUT_FROM["grads"] else "end"
        plain = {"zero": level, "reduce": reduce, "active": None, "ahead": None}
        changes.append((f"zero {level}", plain))
        if level == _WHOLE and own > 1:
            changes.append((f"zero {level}, one stage whole", plain | {"active": 1}))
    if zero == _WHOLE:
        for number in sorted({1, 2, active // 2, 2 * active, own} - {0, active}):
            if number <= own:
                changes.append((_whole(number), {"active": number}))
        changes += [(f"gathered {ahead} ahead", {"ahead": ahead}) for ahead in (0, 2) if own > 1]
    if zero >= CUT_FROM["grads"]:
        other = "end" if program.reduce == "turn" else "turn"
        changes.append((f"gradients reduced {_WHEN[other]}", {"reduce": other}))
    for what, options in changes:
        with suppress(ProgramError):  # what cannot be together with all else that is said
            yield what, lowering.of(compute, costs, **options)
    if zero == _WHOLE and own > 1 and program.name != looped_bfs.__name__:
        with suppress(ProgramError):
            breadth = lowering.of(draft(looped_bfs, program.plan), costs)
            yield f"{breadth.name}, breadth-first", breadth


def _said(program: Program, options: Mapping[str, Any]) -> str:
    """What a program holds, in words."""
    said = [f"zero {program.zero}"]
    said += [_whole(options["active"])] if "active" in options else []
    if is_cut("grads", program.zero):
        said.append(f"gradients reduced {_WHEN[program.reduce]}")
    return ", ".join(said)


def _whole(stages: int) -> str:
    return f"{stages} stage{'s' * (stages > 1)} whole"


def repriced(costs: Costs, program: Program, zero: int, sizes: Sizes | None = None) -> Costs:
    """Costs of a program with those that it needs with another level of ZeRO.

    An all-reduce takes as long as a reduce-scatter and an all-gather (arXiv 1910.02054, section
    7.1): so each of these takes half of it, and the gather of weights as much as their bytes are
    more or less than those of gradients, where sizes tell.  What is stepped in parts takes 1/dp.
    A cost that is told, and is not 0, stays.
    """
    if bool(zero) == bool(program.zero):
        return costs
    dp, more = program.dp, 1.0 if sizes is None else _ratio(sizes, program.plan.stages)
    step = from_grid(grid(costs.step or 0.0) * (1 / dp if zero else dp))
    if not zero:
        whole = costs.reduce_grads or from_grid(2 * grid(costs.reduce_scatter or 0.0))
        return replace(costs, reduce_grads=whole, step=step)
    half = grid(costs.reduce_grads or 0.0) / 2
    return replace(
        costs,
        reduce_scatter=costs.reduce_scatter or from_grid(half),
        unshard=costs.unshard or from_grid(half * more),
        step=step,
    )


def _ratio(sizes: Sizes, stages: int) -> float | NDArray[np.float64]:
    """Bytes of weights over those of gradients, of each stage; 1 where nobody tells both."""
    params, grads = (sizes.of(name, stages)[:, None] for name in ("params", "grads"))
    told = (params > 0) & (grads > 0)
    each = np.where(told, params / np.where(told, grads, 1.0), 1.0)
    return float(each[0, 0]) if (each == each[0]).all() else each


def format_residencies(found: list[Residency]) -> list[str]:
    """What could be held instead, a line each; nothing where nothing is better in any way."""
    if len(found) < 2:
        return []
    now, *others = found
    unit = now.run.unit and f" {now.run.unit}"
    head = f"replicas hold {now.what}: {_figures(now, unit)}; they could, by simulation:"
    return [head] + [
        f"  {one.run.span / now.run.span - 1:+7.1%}  {one.what}: {_figures(one, unit)}"
        for one in others
    ]


def _figures(one: Residency, unit: str) -> str:
    said = [f"{one.run.span:.4g}{unit}"]
    said += [f"{in_bytes(one.most)} on the fullest rank"] if one.run.sizes is not None else []
    said += [f"{one.gathers} gathers"] if one.gathers else []
    return ", ".join(said)
