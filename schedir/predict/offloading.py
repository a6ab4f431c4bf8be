"""Offloading: what of a program could be held elsewhere, or not at all, and what that takes; each
claim from simulating it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from schedir.analysis.memory import require_memory_limit, tiers_of
from schedir.compiler.again import compute_of
from schedir.errors import MemoryLimitError, ProgramError, UsageError, in_bytes
from schedir.ir.costs import FIELD, Costs
from schedir.ir.ops import RECOMPUTE
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.passes.moves import HOST
from schedir.predict.calibrate import calibrate, completed
from schedir.predict.recomputation import without
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.predict.what_if import LARGE, LEAST, Lowering

_KEPT: Final[dict[str, Any]] = {"recompute": None, "offload": None, "spill": None}
_TRIED: Final[tuple[dict[str, str], ...]] = (
    {}, {"offload": "half"}, {"offload": "all"}, {"recompute": "all"},
    {"offload": "all", "recompute": "all"},
)  # fmt: skip
_WITHIN: Final[tuple[dict[str, str], ...]] = (
    {"offload": "fit"}, {"recompute": "fit"}, {"offload": "fit", "recompute": "fit"},
)  # fmt: skip


_SHOWN: Final = 5  # of what fits


class Way(NamedTuple):
    """A run in which forwards' values are held elsewhere, and with which options of `compile`."""

    options: dict[str, str]
    run: Timeline
    fits: bool = True

    @property
    def what(self) -> str:
        """Its options, in words."""
        return ", ".join(f'{name}="{which}"' for name, which in self.options.items()) or "all kept"

    def most(self, tier: str = "device") -> float:
        """The most bytes that a rank holds on a tier."""
        return max(float(curve.held.max(initial=0.0)) for curve in self.run.memory_on(tier))


def ways(timeline: Timeline, costs: Costs | None = None, limit: float | None = None) -> list[Way]:
    """A run as it is, simulated, and behind it the same compute with what forwards saved kept,
    offloaded, recomputed, or both, the shortest first.

    With a `limit` in bytes only what is never above it, whatever takes how long, and what "fit"
    finds.  `costs` are those of a prediction; without, they are read off the run.

    Nothing without sizes, without a backward, of very large programs, and where nobody says what
    Offload and Reload cost: then it is not known what offload takes.
    """
    program, sizes = timeline.program, timeline.sizes
    if sizes is None or not program.trains or len(program) > LARGE:
        return []
    costs = completed(costs or calibrate(timeline), program)
    if not {FIELD[op] for op in HOST} <= {*costs.told}:
        return []
    lowering, compute = Lowering(program, timeline.model), without(compute_of(program))
    tried = _TRIED if limit is None else (*_TRIED, *_WITHIN)
    others: list[tuple[dict[str, str], Program]] = []
    for options in tried:
        bounds = {"sizes": sizes, "limit": limit} if "fit" in options.values() else {}
        with suppress(ProgramError, UsageError):  # what this program cannot, or too large
            others.append((options, lowering.of(compute, costs, **_KEPT | options | bounds)))
    found, seen = [], {program.digest}
    for options, other in others:
        if other.digest not in seen and (limit is None or _fits(other, sizes, limit)):
            found.append(Way(options, _run(other, costs, timeline)))
        seen.add(other.digest)
    fits = limit is None or _fits(program, sizes, limit)
    now = Way(_own(program), _run(program, costs, timeline), fits)
    return [now, *sorted(found, key=lambda way: (way.run.span, way.most()))]


def _run(program: Program, costs: Costs, like: Timeline) -> Timeline:
    run = simulate(program, costs, model=like.model, blocks=like.blocks, sizes=like.sizes)
    return replace(run, unit=like.unit)


def _own(program: Program) -> dict[str, str]:
    """What a program has of it, without how much."""
    has = {"offload": HOST.there in program.ops, "recompute": RECOMPUTE in program.ops}
    return {name: "some" for name, there in has.items() if there}


def _fits(program: Program, sizes: Sizes, limit: float) -> bool:
    try:
        require_memory_limit(program, sizes, limit)
    except MemoryLimitError:
        return False
    return True


def format_ways(found: list[Way], limit: float | None = None) -> list[str]:
    """What is proposed, a line each, and what is not as it costs time; nothing where there is
    nothing to say."""
    if not found:
        return []
    now, *others = found
    if not now.fits and limit is not None:
        head = f"what is held does not fit into {in_bytes(limit)}: {_figures(now)}; "
        if not others:
            return [f"{head}nothing that was tried does"]
        lines = [_line(way, now) for way in sorted(others, key=_by_time_and_traffic)]
        return [f"{head}what does, by simulation:", *lines[:_SHOWN]]
    shorter = [way for way in others if way.run.span <= now.run.span * (1 - LEAST)]
    spares = [
        way for way in others
        if way.run.span <= now.run.span * (1 + LEAST) and way.most() < now.most() * (1 - LEAST)
    ]  # fmt: skip
    if shorter or spares:
        head = f"held now: {_figures(now)}; what would be shorter, or spare memory for nothing:"
        return [head, *(_line(way, now) for way in _best([*shorter, *spares]))]
    costly = [way for way in others if "recompute" not in way.options and way.options]
    if not costly or now.options.get("offload"):
        return []
    best = min(costly, key=lambda way: (way.run.span, way.most()))
    spare = best.most() < now.most() * (1 - LEAST)
    why = "costs time" if spare else "spares no device memory"
    return [f"offload {why} here, and is not proposed: {_line(best, now).strip()}"]


def _by_time_and_traffic(way: Way) -> tuple[float, float]:
    """Among what fits and takes as long, the better one holds less elsewhere."""
    return float(f"{way.run.span:.9g}"), sum(map(way.most, tiers_of(way.run.program)[1:]))


def _best(others: list[Way]) -> list[Way]:
    """Those of which no other is shorter and holds less on the device, the shortest first."""
    best: list[Way] = []
    for way in sorted(others, key=lambda way: (float(f"{way.run.span:.9g}"), way.most())):
        if all(way.most() < other.most() for other in best):
            best.append(way)
    return best


def _line(way: Way, now: Way) -> str:
    more = way.run.span / now.run.span - 1 if now.run.span else 0.0
    return f"  {more:+7.1%}  {way.what}: {_figures(way)}"


def _figures(way: Way) -> str:
    unit = way.run.unit and f" {way.run.unit}"
    said = [f"{way.run.span:.4g}{unit}", f"{in_bytes(way.most())} on the fullest device"]
    said += [f"{in_bytes(way.most(tier))} on a {tier}" for tier in tiers_of(way.run.program)[1:]]
    return ", ".join(said)
