"""Mistakes: which of those that people make gives a gradient, told from what it is a sum of.

A gradient is a sum over microbatches, and over the uses of its weight.  A mistake counts some of
these terms otherwise: not at all, twice, divided once more.  So each known mistake is a list of
factors, one for each term, and it is found if the terms with these factors add up to what is there.
Of terms that depend on each other several mistakes may give the same; then all of them are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import e
from typing import Final, NamedTuple

import torch
from torch import Tensor

# Each kind of mistake, and what it often comes from.
KINDS: Final = {
    "not divided": "often scale_grads=False, or no division, with a loss that takes the mean",
    "divided again": "often scale_grads=True with a loss that is a sum, or is divided already",
    "divided at every step": "often scale_grads=True where gradients add up over several steps",
    "missing": "often a backward that is never run, or weights that are others' copies",
    "zero": "often zero_grad after the last backward",
    "held by nobody": "often a part of the model that is in no stage",
    "not due": "often a weight that is frozen only in part, or that the loss does not use",
    "last only": "often gradients that are assigned, or set to None, between backwards",
    "first only": "often a loop that ends too early",
    "microbatch missing": "often a backward that is never run",
    "microbatch twice": "often a backward that is run twice, or a warm-up that is not zeroed",
    "microbatch mistaken": "often a message or a buffer that is taken for another microbatch's",
    "twice": "often gradients that are not zeroed before, or are added up twice",
    "replicas not summed": "often split backwards under DDP, whose hooks they do not call",
    "replicas": "often a mean over replicas where their sum is due, or the reverse",
    "ranks": "often a reduction over all ranks where one over replicas is due",
    "tied not summed": "often copies of a tied weight that are not summed over their ranks",
    "use missing": "often a value that is detached between two uses of a weight",
    "use twice": "often a split backward of a weight that is used twice in a stage",
    "not finite": "often an overflow, or memory that is read before it is written",
    "factor": "no known mistake gives this factor",
    "weights": "no known mistake counts microbatches so",
    "unknown": "no known mistake gives this difference",
}


class Finding(NamedTuple):
    """What is wrong with a gradient, as far as it can be told."""

    kind: str  # of KINDS
    words: str


class Tier(NamedTuple):
    """Mistakes that explain a gradient: of how many that were tried, with how many free factors."""

    findings: frozenset[Finding]
    tried: int = 0
    free: int = 0


class Explained(NamedTuple):
    """What explains a gradient, the simplest first.

    It has as many `numbers`, zeros left out, and what explains it is as `near`: of the norm of its
    difference from what is due.
    """

    tiers: tuple[Tier, ...]
    numbers: int = 0
    near: float = 0.0

    def by_chance(self, tier: int) -> float:
        """How many of the mistakes tried would explain a random difference, at most.

        Of its n numbers a mistake leaves d to chance, whose squares are then at most x = near^2 of
        the sum of all n: so likely as (e n x / d)^(d / 2), by Chernoff's bound for a sum of d
        squares of normal numbers, where that is less than one.
        """
        tried, free = self.tiers[tier].tried, self.tiers[tier].free
        left = self.numbers - free
        if left <= 0:
            return tried
        return float(tried * min(1.0, self.near * (e * self.numbers / left) ** 0.5) ** left)

    @classmethod
    def surely(cls, kind: str, words: str) -> Explained:
        """What is seen, and needs no terms."""
        return cls((Tier(frozenset([Finding(kind, words)])),))


MOST_SWAPPED: Final = 64  # microbatches of which each may be taken for each other
HARDLY: Final = 0.1  # of how far off a gradient is, an explanation of it may be off
NOTHING: Final = Finding("unknown", "another gradient")
Use = tuple[str, int]  # a module, and which of its uses of a weight, from 1


@dataclass(frozen=True)
class Facts:
    """What is known of a step: its numbers, what the sum of losses is divided by, and how far
    rounding may go."""

    microbatches: int
    replicas: int
    ranks: int
    divisor: float
    tolerance: float


class _Pattern(NamedTuple):
    finding: Finding
    factors: tuple[float, ...]


class _Table(NamedTuple):
    """Mistakes, and a row of factors for each."""

    findings: list[Finding]
    factors: Tensor


def explain(got: Tensor, parts: Tensor, uses: Mapping[Use, Tensor], facts: Facts) -> Explained:
    """The mistakes that give the numbers `got`, where the sum of `parts` is due: one mistake
    alone, else two at once, else any factor for the whole or for each microbatch.

    `parts` is (microbatches, numbers), and `uses` has what each use of the weight adds.
    """
    if not bool(got.isfinite().all()):
        return Explained.surely("not finite", "not finite")
    if not bool(got.any()):
        return Explained.surely("zero", "zero")
    over = _Terms(got, parts, facts.tolerance)
    several = [(over, _by_microbatch(facts))]
    if len(uses) > 1:
        by_use = _Terms(got, torch.stack([*uses.values()]), facts.tolerance)
        several.append((by_use, _by_use(tuple(uses))))
    scales = [*_scales(facts)]
    one = [finding for finding, factor in scales if over.fit(factor)]
    two = []
    for terms, table in several:
        one += terms.fitting(table)
        for finding, factor in scales:
            two += [
                Finding(kind, f"{words}, and {finding.words}")
                for kind, words in terms.fitting(table, factor)
            ]
    some = []
    if (common := over.factor()) is not None:
        some.append(Finding("factor", _times(common)))
    elif (found := over.solved()) is not None:
        counts = ", ".join(f"{c + 0.0:.3g}" for c in found)
        some.append(Finding("weights", f"microbatches count {counts} times"))
    rows = sum(len(table.findings) for _, table in several)
    tiers = (
        Tier(frozenset(one), len(scales) + rows),
        Tier(frozenset(two), len(scales) * rows),
        Tier(frozenset(some), 1, 1 if common is not None else len(parts)),
    )
    near = facts.tolerance * float(torch.maximum(over.norm, over.norms.sum()) / over.off)
    return Explained(tiers, int(got.bool().sum()), min(near, HARDLY))


class _Terms:
    """A gradient, and terms of which it may be a sum: in the few dimensions of these terms."""

    def __init__(self, got: Tensor, terms: Tensor, tolerance: float) -> None:
        basis, self.coordinates = torch.linalg.qr(terms.T)
        self.got = basis.T @ got
        self.outside = (got - basis @ self.got).norm()
        self.size = terms.T.shape
        self.norms = terms.norm(dim=1)
        self.norm = got.norm()
        self.tolerance = tolerance
        self.off = (got - terms.sum(0)).norm()

    def fits(self, factors: Tensor) -> Tensor:
        """Which rows of factors make the terms add up to the gradient, but for rounding.

        What is hardly nearer to it than what is due explains nothing.
        """
        errors = (self.got - factors @ self.coordinates.T).norm(dim=1).hypot(self.outside)
        sizes = torch.maximum(self.norm, factors.abs() @ self.norms)
        near: Tensor = errors <= torch.minimum(self.tolerance * sizes, HARDLY * self.off)
        return near

    def fit(self, factor: float) -> bool:
        """Whether it is the sum of the terms, but for a factor."""
        return bool(self.fits(torch.full_like(self.norms, factor)[None]))

    def fitting(self, table: _Table, factor: float = 1) -> list[Finding]:
        """The mistakes that make the terms add up to the gradient, but for a factor."""
        fits = self.fits(factor * table.factors).tolist()
        return [finding for finding, fit in zip(table.findings, fits, strict=True) if fit]

    def factor(self) -> float | None:
        """The one factor of all terms."""
        whole = self.coordinates.sum(1)
        square = float(whole @ whole)
        factor = float(whole @ self.got) / square if square else 0.0
        return factor if self.fit(factor) else None

    def solved(self) -> list[float] | None:
        """The factors of the terms, if there is one solution, and numbers left to try it on."""
        numbers, terms = self.size
        if numbers <= terms or not float(self.norms.min()):
            return None
        if float(torch.linalg.svdvals(self.coordinates / self.norms)[-1]) < 1e-3:
            return None
        found = torch.linalg.solve(self.coordinates, self.got)
        return found.tolist() if bool(self.fits(found[None])) else None


def _times(factor: float) -> str:
    """A factor in words."""
    if factor < 0:
        return f"{factor:.4g} times what it should be"
    if factor < 1:
        return f"{1 / factor:.4g} times too small"
    return f"{factor:.4g} times too large"


def _scales(facts: Facts) -> Iterator[tuple[Finding, float]]:
    """What goes wrong with a whole gradient, and its factor."""
    M, R, P, d = facts.microbatches, facts.replicas, facts.ranks, facts.divisor

    def scale(kind: str, factor: float, why: str) -> tuple[Finding, float]:
        return Finding(kind, f"{_times(factor)}: {why}"), factor

    if d != 1:
        due = f"the {M} microbatches" if d == M else f"{d:g}"
        yield scale("not divided", d, f"never divided by {due}")
        for power, times in enumerate(("twice", "three times", "four times"), 1):
            yield scale("divided again", 1 / d**power, f"divided {times} by {due}")
    for n in sorted({M, M // R} - {1, d}):
        of = f"the {n} microbatches" + (" of a replica" if n < M else "")
        yield scale("not divided", n, f"multiplied by {of}")
        yield scale("divided again", 1 / n, f"divided by {of}, which is not due")
        yield scale("divided again", 1 / n**2, f"divided twice by {of}, which is not due")
    yield scale("twice", 2, "counted twice")
    if R > 1:
        yield scale("replicas", R, f"the sum over the {R} replicas, and not their mean")
        yield scale("replicas", 1 / R, f"the mean over the {R} replicas, and not their sum")
    if P not in (1, R):
        yield scale("ranks", P, f"summed over the {P} ranks")
        yield scale("ranks", 1 / P, f"divided by the {P} ranks")


@cache
def _by_microbatch(facts: Facts) -> _Table:
    return _table(_of_microbatches(facts), facts.microbatches)


@cache
def _by_use(uses: tuple[Use, ...]) -> _Table:
    return _table(_of_uses(uses), len(uses))


def _of_microbatches(facts: Facts) -> Iterator[_Pattern]:
    """What goes wrong with single microbatches."""
    M, R = facts.microbatches, facts.replicas
    each = torch.arange(M).double()  # a power of single floats is not exact in float64
    if M == 1:
        return
    for r in range(R if R > 1 else 0):
        own = each // (M // R) == r
        words = f"the microbatches of replica {r} alone"
        yield _pattern("replicas not summed", words, own)
        yield _pattern("replicas not summed", f"{words}, divided by their number", R * own)
    for n in (n for n in range(1, M) if M % n == 0):
        these, by = (f"{n} microbatches", n) if n > 1 else ("microbatch", M)
        again = f"after every {these} all that was added up is divided by {by}"
        yield _pattern("last only", f"the last {these} alone", each >= M - n)
        yield _pattern("first only", f"the first {these} alone", each < n)
        yield _pattern("divided at every step", again, by ** (each // n + 1.0 - M // n))
    for k in range(M):
        this = each == k
        yield _pattern("microbatch missing", f"microbatch {k} is missing", ~this)
        yield _pattern("microbatch missing", f"microbatch {k} alone", this)
        yield _pattern("microbatch twice", f"microbatch {k} counts twice", 1 + 1 * this)
    for k, j in permutations(range(M if M <= MOST_SWAPPED else 0), 2):
        swap = 1 + 1 * (each == k) - 1 * (each == j)
        yield _pattern("microbatch mistaken", f"microbatch {k} in place of {j}", swap)


def _of_uses(uses: Sequence[Use]) -> Iterator[_Pattern]:
    """What goes wrong with a weight that is used in several places."""
    modules = [module for module, _ in uses]
    several = {module: torch.tensor([m == module for m in modules]) for module in modules}
    if len(several) > 1:
        for module, own in several.items():
            yield _pattern("tied not summed", f"the part of {module} alone", own)
        for module, own in several.items():
            yield _pattern("tied not summed", f"all but the part of {module}", ~own)
            yield _pattern("use twice", f"the part of {module} counts twice", 1 + 1 * own)
    for use in uses:
        own = torch.tensor([other == use for other in uses])
        if own.sum() < several[use[0]].sum():
            name = f"use {use[1]} in {use[0]}"
            yield _pattern("use missing", f"{name} is missing", ~own)
            yield _pattern("use missing", f"{name} alone", own)
            yield _pattern("use twice", f"{name} counts twice", 1 + 1 * own)
    again = torch.arange(len(uses), 0, -1)
    yield _pattern("use twice", "each use counts once more for each later one", again)


def _pattern(kind: str, words: str, factors: Tensor) -> _Pattern:
    return _Pattern(Finding(kind, words), tuple(factors.double().tolist()))


def _table(patterns: Iterator[_Pattern], terms: int) -> _Table:
    """The first of those that are the same mistake, said twice; none that changes nothing."""
    first: dict[tuple[str, tuple[float, ...]], _Pattern] = {}
    for pattern in patterns:
        if {*pattern.factors} != {1.0}:
            first.setdefault((pattern.finding.kind, pattern.factors), pattern)
    rows = torch.tensor([p.factors for p in first.values()], dtype=torch.float64)
    return _Table([p.finding for p in first.values()], rows.view(-1, terms))
