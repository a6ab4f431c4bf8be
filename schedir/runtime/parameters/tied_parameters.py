"""Tied weights of a rank: copies in several stages, with one gradient sum each.

The sums are added once, in the order of stages, and every copy gets the total.  Copies may be on
several ranks, or on one, and there they may be one Parameter: then the first stage computes with
the Parameter itself, and others with one that stands in for it, in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from schedir.errors import ModelError, require_type
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import Place, Tied, TiedWeights, meets, ranks_of, show_tie
from schedir.ir.program import Program
from schedir.runtime.parameters.mixed_precision import options_of
from schedir.runtime.parameters.parameter_copies import like
from schedir.transports.transport import ChainedWork, Transport, Work

SAMPLE = 4096  # numbers of a parameter that are compared
HOW = (
    "ties = schedir.find_tied_weights(stages), for compile(..., tied_weights=ties) "
    "and the executor's tied=ties"
)


class ParameterFingerprint(NamedTuple):
    """What processes tell each other of a parameter of a stage."""

    names: tuple[str, ...]
    object: int  # equal where two stages of a process have one Parameter
    kind: str  # shape and type
    trained: bool
    constant: bool  # all its numbers are one
    values: str  # equal where kinds and numbers are
    named: bool  # the module calls it its `tied_weight`
    stepped: str  # how an optimizer steps it, as far as is known


Told = Mapping[int, Sequence[ParameterFingerprint]]  # by stage


def prints(
    stages: Mapping[int, nn.Module], optimizer: object = None
) -> dict[int, list[ParameterFingerprint]]:
    """What is told of the parameters of some stages, and of how an optimizer steps them.

    `values` is a digest of a sample: 4096 numbers at even distances, or a few more, or all where
    these are one.  Equal parameters have equal ones, and others hardly ever.
    """
    told: dict[int, list[ParameterFingerprint]] = {}
    options = options_of(optimizer)
    for s, module in stages.items():
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        tied = getattr(module, "tied_weight", None)
        told[s] = [
            _print(
                p,
                own,
                p is tied,
                options.get(p, "not at all" if options and p.requires_grad else ""),
            )
            for p, own in names.items()
        ]
    return told


@torch.no_grad()
def _print(p: nn.Parameter, names: list[str], named: bool, stepped: str) -> ParameterFingerprint:
    kind, constant, values = f"{list(p.shape)} of {p.dtype}", True, ""
    if not p.is_meta:
        own = p.detach()
        own = own.to_local() if hasattr(own, "to_local") else own  # of a sharded one this shard
        flat = own.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)]
        constant = bool((sample == sample[:1]).all())
        if constant and not bool((flat == flat[:1]).all()):
            sample, constant = flat, False  # what differs is elsewhere
        numbers = sample.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        values = sha256(kind.encode() + numbers).hexdigest()[:16]
    return ParameterFingerprint(
        tuple(names), id(p), kind, p.requires_grad, constant, values, named, stepped
    )


class ParameterTable:
    """All parameters of all stages, as processes tell of them, and what ties them.

    `weights` has the places of each tied weight: as `tied` says, as stages of one process have one
    Parameter, as modules name it in `tied_weight`; `sets` are the stages that may name one
    together.  A place has the first of its names.  Raises ModelError for a contradiction.
    """

    def __init__(self, told: Sequence[Told], tied: TiedWeights | None, sets: Tied) -> None:
        if tied is not None:
            require_type(
                tied,
                TiedWeights,
                "schedir.find_tied_weights(stages), or "
                "schedir.find_tied_weights(model).among(stages)",
            )
        self.prints: dict[Place, ParameterFingerprint] = {}
        first: dict[Place, Place] = {}
        for own in told:
            for s, parameters in own.items():
                for p in parameters:
                    self.prints.setdefault((s, p.names[0]), p)
                    first |= {(s, name): (s, p.names[0]) for name in p.names}
        self.weights: list[tuple[Place, ...]] = []
        self.of: dict[Place, int] = {}  # of a place, its weight
        for places in tied.weights if tied else ():
            for s, name in places:
                if (s, name) not in first:
                    raise ModelError(f"stage {s} has no parameter {name}, which is said to be tied")
            self._add({first[place] for place in places})
        for own in told:
            for shared in _objects(own):
                if len({self.of.get(place, place) for place in shared}) == 1:
                    continue
                if any(place in self.of for place in shared):
                    raise ModelError(
                        f"{where(shared)} are one Parameter, and `tied` says otherwise",
                        hint="schedir.find_tied_weights(stages) finds all that is tied",
                    )
                self._add(shared)
        named = dict(place for place, p in self.prints.items() if p.named and place not in self.of)
        for s in sorted(named):
            its = [stages for stages in sets if s in stages]
            if len(its) > 1:
                raise ModelError(
                    f"stage {s} shares weights as {' and '.join(map(show_tie, its))}, and its "
                    "`tied_weight` does not say which it is",
                    hint=HOW,
                )
            if not its:
                raise ModelError(
                    f"stage {s} holds a copy of a tied weight, but the program does not reduce it",
                    hint="compile(..., tied_weights=True)",
                )
        for stages in sets:
            if any(s in named for s in stages):
                self._add((s, named[s]) for s in stages if s in named)

    def _add(self, places: Iterable[Place]) -> None:
        for s, name in (added := tuple(sorted(places))):
            if (s, name) in self.of:
                raise ModelError(f"{name} of stage {s} is said to be in two ties: say one of both")
            self.of[s, name] = len(self.weights)
        for one, other in pairwise(added):
            if one[0] == other[0]:
                raise ModelError(
                    f"{where([one, other])} are said to be one weight, and are two Parameters",
                    hint="within a stage a weight is one Parameter: stage.b = stage.a",
                )
        self.weights.append(added)

    def fit(self, program: Program, *, alike: bool) -> None:
        """Refuse what a program does not tie as it is, and, unless they may be `alike`, weights
        that are equal and tied to nobody's knowledge."""
        for places in self.weights:
            stages = tuple(s for s, _ in places)
            if stages not in program.summed and not self.prints[places[0]].named:
                raise ModelError(
                    f"{where(places)} are one weight, but the program does not tie stages "
                    f"{show_tie(stages)}",
                    hint=HOW,
                )
            for place in places:
                self._fit_copies(places[0], place)
        for stages in program.summed:
            of = [{s for s, _ in places} for places in self.weights]
            if {*stages} not in of:
                named = set().union(*(own for own in of if own < {*stages}))
                lacks = min({*stages} - named, default=stages[0])
                raise ModelError(
                    f"the program reduces a tied weight, but stage {lacks} names none", hint=HOW
                )
        if alike:
            return
        equal: dict[str, list[Place]] = {}
        for place, p in self.prints.items():
            if p.trained and not p.constant:
                equal.setdefault(p.values, []).append(place)
        for alike_ones in equal.values():
            one = min(alike_ones)
            for other in sorted(alike_ones):
                if other[0] != one[0] and self.of.get(one, one) != self.of.get(other, other):
                    raise ModelError(
                        f"{where([one, other])} are equal, and not said to be one weight",
                        hint="ties = schedir.find_tied_weights(stages) before they are copied, "
                        "for compile(..., tied_weights=ties) and the executor's tied=ties; its "
                        "alike=True lets pass what was only seeded alike",
                    )

    def _fit_copies(self, one: Place, other: Place) -> None:
        """Refuse copies of a weight that are not the same."""
        a, b = self.prints[one], self.prints[other]
        if not b.trained:
            raise ModelError(
                f"the program reduces a tied weight, but {other[1]} of stage {other[0]} is frozen"
            )
        if a.kind != b.kind:
            raise ModelError(f"{where([one, other])} are one weight, and are {a.kind} and {b.kind}")
        if a.values != b.values:
            raise ModelError(f"{where([one, other])} are one weight, and their numbers differ")
        if a.stepped and b.stepped and a.stepped != b.stepped:
            raise ModelError(
                f"{where([one, other])} are one weight, and optimizers step them otherwise: "
                f"{a.stepped}, and {b.stepped}",
                hint="copies of a weight need the same options, or they would drift apart",
            )


def _objects(own: Told) -> Iterator[list[Place]]:
    """The places of each Parameter that several stages of one process have."""
    objects: dict[int, list[Place]] = {}
    for s, parameters in own.items():
        for p in parameters:
            if p.trained:
                objects.setdefault(p.object, []).append((s, p.names[0]))
    return (places for places in objects.values() if len(places) > 1)


def where(places: Iterable[Place]) -> str:
    """Places for people to read."""
    return " and ".join(f"{name} of stage {s}" for s, name in places)


# ------------------------------------------------------------ on a rank


@dataclass
class TiedWeight:
    """A tied weight as a rank has it: all stages that share it, and the rank's own copies."""

    stages: tuple[int, ...]
    own: dict[int, nn.Parameter]


def weights_of(
    program: Program,
    stages: Mapping[int, nn.Module],
    told: Sequence[Told],
    tied: TiedWeights | None,
    *,
    alike: bool,
) -> list[TiedWeight]:
    """The tied weights of which a rank has copies, in the order in which all ranks sum them.

    Raises ModelError where what is tied does not go with the program.
    """
    try:
        trained = [{s: own[s] for s in own if s >= program.frozen_stages} for own in told]
        known = ParameterTable(trained, tied, program.summed)
        known.fit(program, alike=alike)
    except ModelError as error:
        error.program = program.name
        raise
    weights = []
    for places in sorted(known.weights, key=lambda places: [s for s, _ in places]):
        own = {s: stages[s].get_parameter(name) for s, name in places if s in stages}
        for s, p in own.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"{dict(places)[s]} of stage {s} is tied, and has a hook on its gradient: it "
                    "would see the part of one stage",
                    program=program.name,
                )
        weights += [TiedWeight(tuple(s for s, _ in places), own)] if own else []
    return weights


def is_apart(weight: TiedWeight, shape: PipelineShape) -> bool:
    """Whether copies of a weight are in several memories, and each is stepped by itself."""
    return meets(weight.stages, shape) or len({p.data_ptr() for p in weight.own.values()}) > 1


class LocalTies:
    """What a stage computes with where other stages of the process have the same Parameters.

    Modules may be shared, too, so each compute puts its own in; between steps everybody sees the
    one Parameter.
    """

    def __init__(self, module: nn.Module, instead: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.places = [
            (owner, name, p, instead[p])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if p in instead
        ]

    def use(self) -> None:
        """Let the module compute with what stands in."""
        for owner, name, _, mine in self.places:
            setattr(owner, name, mine)

    def restore(self) -> None:
        """Give the module the Parameters back that everybody sees."""
        for owner, name, theirs, _ in self.places:
            setattr(owner, name, theirs)


def stand_ins(
    weights: Sequence[TiedWeight], copies: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[dict[int, dict[nn.Parameter, nn.Parameter]], dict[nn.Parameter, nn.Parameter]]:
    """By stage, what each computes with in place of a Parameter that it shares; and of each that
    is in another's memory, that other.

    `copies` are the rank's own, where other ranks of the process have the same Parameter.  Of a
    rank's stages the first has it, others a second Parameter in the same memory, whose gradient is
    another.  `weights` then have what stands in.
    """
    instead: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    for weight in weights:
        uses = Counter(weight.own.values())
        seen: set[nn.Parameter] = set()
        for s, p in weight.own.items():
            if uses[p] == 1 and p not in copies:
                continue
            mine = copies.get(p, p)
            if p in seen:
                alias = like(p, mine.detach())
                aliases[alias] = mine
                mine = alias
            instead.setdefault(s, {})[p] = mine
            seen.add(p)
        weight.own |= {s: instead[s][p] for s, p in weight.own.items() if p in instead.get(s, ())}
    return instead, aliases


def spread(*sums: Tensor, into: Sequence[Tensor] | None = None) -> None:
    """Add up sums, the first first, into each of them, or into others."""
    total, *others = sums
    for other in others:
        total.add_(other)
    for grad in sums if into is None else into:
        if grad is not total:
            grad.copy_(total)


def summing(
    weight: TiedWeight,
    shape: PipelineShape,
    rank: int,
    transport: Transport,
    under_way: list[Work],
    grad_of: Callable[[int], Tensor],
) -> Callable[[], None]:
    """What begins to sum the gradients of a weight, in the order of stages, into every copy.

    `grad_of` tells that of an own stage's copy, or the part of it that the replica keeps.
    """
    own, ranks = [*weight.own], ranks_of(weight.stages, shape)
    if not meets(weight.stages, shape):
        return lambda: spread(*map(grad_of, own))
    if len(ranks) == len(weight.stages) == 2:  # in place: a sum of two has one order
        (copy,) = own

        def in_place() -> None:
            grad = grad_of(copy)
            under_way.append(transport.collective("all_reduce", ranks, grad, grad))

        return in_place

    def begin() -> None:
        grads = {s: grad_of(s) for s in own}
        first = next(iter(grads.values()))
        # One row for each stage, filled where its first holder is, so that all know every sum.
        rows = first.new_zeros((len(weight.stages), *first.shape))
        for row, s in zip(rows, weight.stages, strict=True):
            if s in own and shape.rank_of[s] == rank:
                row.copy_(grads[s])
        work = transport.collective("all_reduce", ranks, rows, rows)
        under_way.append(ChainedWork(work, partial(spread, *rows, into=[*grads.values()])))

    return begin
