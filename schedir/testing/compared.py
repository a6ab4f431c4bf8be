"""Compared: what ranks leave of a step beside a plain loop, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from schedir.errors import UsageError
from schedir.testing.mistakes import KINDS, NOTHING, Explained, Facts, Finding, explain
from schedir.testing.plain import Due, Plain, names_of, numbers

TOLERANCES: Final = {torch.float32: 1e-6, torch.float64: 1e-12}
MOST_TERMS = 2**26  # numbers
CHANCE: Final = 1e-3  # of mistakes tried, that would be found in random numbers
SHOWN = 3  # names, or possible mistakes, of one line


@dataclass(frozen=True)
class Left:
    """What a rank leaves: gradients by name, and the names of its stages' parameters, if known."""

    gradients: Mapping[str, Tensor | None]
    stages: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def by_prefix(self) -> Left:
        """Of a model that was given as a list, whose parts are the stages."""
        if self.stages:
            return self
        stages: dict[int, list[str]] = {}
        for name in self.gradients:
            stages.setdefault(int(name.partition(".")[0]), []).append(name)
        return replace(self, stages={s: tuple(names) for s, names in sorted(stages.items())})


class Place(NamedTuple):
    """A stage on a rank; the stage is None if its number is not known, the rank if it has none."""

    stage: int | None
    rank: int | None


class Mistake(NamedTuple):
    """Gradients that are wrong in one way."""

    places: tuple[Place, ...]
    names: tuple[str, ...]
    every: bool  # whether these are all parameters there
    findings: tuple[Finding, ...]  # several if several mistakes give the same
    off: float  # the norm of the difference over the norm, of the worst

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it may be, of KINDS."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    @property
    def stages(self) -> tuple[int | None, ...]:
        """The stages, in order."""
        return tuple(dict.fromkeys(place.stage for place in self.places))

    def __str__(self) -> str:
        number = len(self.names)
        if self.every and number > 1:
            what = f"all {number} parameters"
        else:
            more = f" and {number - SHOWN} more" if number > SHOWN else ""
            what = f"{', '.join(self.names[:SHOWN])}{more}"
        words = [
            f"off by {self.off:.2g} of the norm" if finding == NOTHING else finding.words
            for finding in self.findings
        ]
        more = f"; or {len(words) - SHOWN} mistakes more" if len(words) > SHOWN else ""
        return f"{_where(self.places)}, {what}: {'; or '.join(words[:SHOWN])}{more}"


def _where(places: Sequence[Place]) -> str:
    """`stages 0, 1 (ranks 0, 1)`, as far as it is known."""

    def several(what: str, numbers: Sequence[int]) -> str:
        numbers = sorted({*numbers})
        return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" * bool(numbers)

    stages = several("stage", [p.stage for p in places if p.stage is not None])
    ranks = several("rank", [p.rank for p in places if p.rank is not None]) or "on no rank"
    return f"{stages} ({ranks})" if stages else ranks


class WrongGradients(AssertionError):
    """Gradients that are not those of a plain loop; `mistakes` says which, stages ascending."""

    def __init__(
        self,
        mistakes: Sequence[Mistake],
        weights: Sequence[tuple[str, ...]],
        right: Sequence[Place],
    ) -> None:
        names = {name for mistake in mistakes for name in mistake.names}
        wrong = sum(not names.isdisjoint(own) for own in weights)
        lines = [f"{wrong} of {len(weights)} gradients are not those of a plain loop"]
        told: set[str] = set()
        for mistake in mistakes:
            lines.append(f"  {mistake}")
            lines += [f"    {KINDS[kind]}" for kind in mistake.kinds if kind not in told]
            told |= {*mistake.kinds}
        if right:
            lines.append(f"  right: {_where(right)}")
        begins = _begins(mistakes, right)
        super().__init__("\n".join([*lines, *([f"  hint: {begins}"] if begins else [])]))
        self.mistakes = tuple(mistakes)


def _begins(mistakes: Sequence[Mistake], right: Sequence[Place]) -> str:
    """Where a difference begins that is in all stages up to one: backwards come from the last."""
    stages = [s for mistake in mistakes for s in mistake.stages]
    good = {place.stage for place in right}
    if not good or None in stages or None in good or any(m.kinds != ("unknown",) for m in mistakes):
        return ""
    last = max(s for s in stages if s is not None)
    if {*stages} != {*range(last + 1)} or any(s is not None and s < last for s in good):
        return ""
    return f"it begins in the backward of stage {last}, or in what stage {last + 1} sends to it"


def compare(
    loop: Plain,
    left: Sequence[Left],
    *,
    replicas: int = 1,
    tolerance: float | None = None,
) -> float:
    """The largest difference between what ranks left and what is due, over its norm.

    Raises WrongGradients where one is more than rounding, and UsageError where nothing was left.
    """
    if not any(g is not None for one in left for g in one.gradients.values()):
        raise UsageError(
            "no rank has a gradient of `model` after the step",
            hint="a step that works on copies returns {name: gradient} by the names of `model`",
        )
    due = loop.due
    wrong: dict[Place, dict[str, Tensor | None]] = {}
    offs: dict[tuple[Place, str], float] = {}
    every = names_of(loop.model).values()
    weights = [names for names in every if names[0] in due]
    held = [*_held(left, weights, replicas)]
    for place, name, got in held:
        off, same = _difference(name, got, due.get(name), tolerance)
        offs[place, name] = off
        if not same:
            wrong.setdefault(place, {})[name] = got
    if not wrong:
        return max(offs.values(), default=0.0)
    facts = _facts(loop, due, replicas, len(left), tolerance)
    on = {n: {at.rank for at, of, g in held if of == n and g is not None} for n in due}
    told = _told(loop, wrong, on, facts)
    found = [
        Mistake(
            places=(place,),
            names=names,
            every={*names} == {n for at, n, _ in held if at == place},
            findings=findings,
            off=max(offs[place, name] for name in names),
        )
        for place, each in told.items()
        for names, findings in _grouped(each)
    ]
    places = dict.fromkeys(place for place, _, _ in held)
    of_wrong = {name for own in wrong.values() for name in own}
    right = [place for place in places if place not in wrong and place.rank is not None]
    undue = [names for names in every if names not in weights and not of_wrong.isdisjoint(names)]
    raise WrongGradients(_merged(found), [*weights, *undue], right)


def _held(
    left: Sequence[Left], weights: Sequence[tuple[str, ...]], replicas: int
) -> Iterator[tuple[Place, str, Tensor | None]]:
    """Who has, or should have, the gradient of what; and what nobody has, or too few have."""
    found = []
    staged = {name for one in left for names in one.stages.values() for name in names}
    for rank, one in enumerate(left):
        of = {name: s for s, names in one.stages.items() for name in names}
        for name in dict.fromkeys([*of, *one.gradients]):
            got = one.gradients.get(name)
            if name not in of and name in staged and got is not None and not bool(got.any()):
                got = None  # zeros for the whole model, of which this rank has a part
            if got is not None or name in of:  # else it is another's, or nobody's
                found.append((Place(of.get(name), rank), name, got))
    for names in weights:
        on = {place.rank for place, name, _ in found if name in names}
        elsewhere = any(one.gradients.get(name, 0) is None for one in left for name in names)
        if not on or (len(on) < replicas and not elsewhere):
            found.append((Place(None, None), names[0], None))
    yield from sorted(found, key=lambda f: (f[0].stage is None, f[0].stage or 0))


def _difference(
    name: str, got: Tensor | None, due: Due | None, tolerance: float | None
) -> tuple[float, bool]:
    """How far a gradient is off, over the norm of what is due; and whether that is rounding."""
    if got is None or due is None:
        one = got if due is None else due.value
        wrong = one is not None and bool(one.any())
        return float(wrong), not wrong
    if got.shape != due.value.shape:
        raise UsageError(
            f"the gradient of {name} has shape {[*got.shape]}, and its weight {[*due.value.shape]}",
            hint="put slices together first",
        )
    types = {got.dtype, due.value.dtype}
    allowed = max(map(_tolerance, types)) if tolerance is None else tolerance
    norm = float(numbers(due.value).norm())
    error = float((numbers(got) - numbers(due.value)).norm())
    off = error / norm if norm else float(error > 0)
    return off, error <= allowed * due.size


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, 8 * torch.finfo(dtype).eps)


def _rounding(dtype: torch.dtype) -> float:
    """How far a mistake's gradient may be off; in few digits chance comes as near as 8 `eps`."""
    return TOLERANCES.get(dtype, 0.5 * torch.finfo(dtype).eps)


def _facts(
    loop: Plain, due: Mapping[str, Due], replicas: int, ranks: int, tolerance: float | None
) -> Facts:
    types = {one.value.dtype for one in due.values()}
    rounding = 4 * max(tolerance or 0.0, *map(_rounding, types))
    return Facts(len(loop.microbatches), replicas, ranks, loop.divisor, rounding)


def _told(
    loop: Plain,
    wrong: Mapping[Place, Mapping[str, Tensor | None]],
    on: Mapping[str, Set[int | None]],
    facts: Facts,
) -> dict[Place, dict[str, Explained]]:
    """What explains each wrong gradient."""
    told: dict[Place, dict[str, Explained]] = {place: {} for place in wrong}
    for names in _portions(loop, [*dict.fromkeys(n for own in wrong.values() for n in own)]):
        parts, uses = loop.parts(names), loop.uses(names)
        for place, own in wrong.items():
            for name in (name for name in names if name in own):
                got = own[name]
                if got is None:
                    told[place][name] = _missing(place, len(on[name]), facts.replicas)
                elif name not in loop.due:
                    told[place][name] = Explained.surely("not due", "a gradient, and none is due")
                else:
                    told[place][name] = explain(
                        numbers(got), parts[name], uses.get(name, {}), facts
                    )
    return told


def _missing(place: Place, ranks: int, replicas: int) -> Explained:
    """What is said where there is no gradient, and `ranks` have one."""
    if place.rank is None and ranks:
        return Explained.surely(
            "missing", f"gradients on {ranks} rank alone, of {replicas} replicas"
        )
    return Explained.surely(
        "missing" if place.rank is not None else "held by nobody", "no gradient"
    )


def _portions(loop: Plain, names: Sequence[str]) -> Iterator[list[str]]:
    """Names in portions of which all terms are held at once."""
    portion: list[str] = []
    size = 0
    for name in names:
        terms = loop.model.get_parameter(name).numel() * len(loop.microbatches)
        if portion and size + terms > MOST_TERMS:
            yield portion
            portion, size = [], 0
        portion.append(name)
        size += terms
    yield portion


def _grouped(
    each: Mapping[str, Explained],
) -> Iterator[tuple[tuple[str, ...], tuple[Finding, ...]]]:
    """The parameters of a place in as few groups as mistakes explain.

    What explains more of them is likelier; what may as well be chance is unknown.
    """
    rest = dict(each)
    order = [*KINDS]
    while rest:
        groups = _explained(rest)
        if not groups:
            yield tuple(rest), (NOTHING,)
            return
        most = max(groups.values(), key=len)
        alike = [finding for finding, names in groups.items() if names == most]
        yield most, tuple(sorted(alike, key=lambda f: (order.index(f.kind), f.words)))
        rest = {name: one for name, one in rest.items() if name not in most}


def _explained(rest: Mapping[str, Explained]) -> dict[Finding, tuple[str, ...]]:
    """Which parameters a mistake explains, of the simplest mistakes that explain any."""
    for tier in range(max(len(one.tiers) for one in rest.values())):
        groups: dict[Finding, tuple[str, ...]] = {}
        sure: set[Finding] = set()
        for name, one in rest.items():
            if tier < len(one.tiers):
                for finding in one.tiers[tier].findings:
                    groups[finding] = (*groups.get(finding, ()), name)
                    if one.by_chance(tier) < CHANCE:
                        sure.add(finding)
        if sure:
            return {finding: names for finding, names in groups.items() if finding in sure}
    return {}


def _merged(found: Sequence[Mistake]) -> list[Mistake]:
    """Mistakes of several places that are the same, as one."""
    merged: dict[object, Mistake] = {}
    for one in found:
        key = one.findings, one.every, None if one.every else one.names
        before = merged.get(key)
        merged[key] = (
            one
            if before is None
            else before._replace(
                places=before.places + one.places,
                names=tuple(dict.fromkeys(before.names + one.names)),
                off=max(before.off, one.off),
            )
        )
    return [*merged.values()]
