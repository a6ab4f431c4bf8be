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
from schedir.ir.pipeline.tied_weights import (
    ParameterLocation,
    TiedStages,
    TiedWeights,
    find_sharing_ranks,
    format_tied_stages,
    is_tied_across_ranks,
)
from schedir.ir.program import Program
from schedir.runtime.parameters.mixed_precision import describe_options
from schedir.runtime.parameters.parameter_copies import make_parameter_like
from schedir.transports.transport import ChainedWork, Transport, Work

SAMPLE_SIZE = 4096  # numbers of a parameter that are compared
TIES_HINT = (
    "ties = schedir.find_tied_weights(stages), for compile(..., tied_weights=ties) "
    "and the executor's tied_weights=ties"
)


class ParameterFingerprint(NamedTuple):
    """What processes tell each other of a parameter of a stage."""

    names: tuple[str, ...]
    object_id: int  # equal where two stages of a process have one Parameter
    kind: str  # shape and type
    is_trained: bool
    is_constant: bool  # all its numbers are one
    values_digest: str  # equal where kinds and numbers are
    is_named_tied: bool  # the module calls it its `tied_weight`
    optimizer_options: str  # how an optimizer steps it, as far as is known


StageFingerprints = Mapping[int, Sequence[ParameterFingerprint]]  # by stage


def fingerprint_parameters(
    stages: Mapping[int, nn.Module], optimizer: object = None
) -> dict[int, list[ParameterFingerprint]]:
    """What is told of the parameters of some stages, and of how an optimizer steps them.

    `values_digest` is a digest of a sample: 4096 numbers at even distances, or a few more, or all
    where these are one.  Equal parameters have equal ones, and others hardly ever.
    """
    told: dict[int, list[ParameterFingerprint]] = {}
    options = describe_options(optimizer)
    for s, module in stages.items():
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        tied = getattr(module, "tied_weight", None)
        told[s] = [
            _fingerprint(
                p,
                own,
                p is tied,
                options.get(p, "not at all" if options and p.requires_grad else ""),
            )
            for p, own in names.items()
        ]
    return told


@torch.no_grad()
def _fingerprint(
    p: nn.Parameter, names: list[str], is_named_tied: bool, optimizer_options: str
) -> ParameterFingerprint:
    kind, constant, values = f"{list(p.shape)} of {p.dtype}", True, ""
    if not p.is_meta:
        own = p.detach()
        own = own.to_local() if hasattr(own, "to_local") else own  # of a sharded one this shard
        flat = own.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE_SIZE)]
        constant = bool((sample == sample[:1]).all())
        if constant and not bool((flat == flat[:1]).all()):
            sample, constant = flat, False  # what differs is elsewhere
        numbers = sample.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        values = sha256(kind.encode() + numbers).hexdigest()[:16]
    return ParameterFingerprint(
        tuple(names),
        id(p),
        kind,
        p.requires_grad,
        constant,
        values,
        is_named_tied,
        optimizer_options,
    )


class ParameterTable:
    """All parameters of all stages, as processes tell of them, and what ties them.

    `weights` has the places of each tied weight: as `tied` says, as stages of one process have one
    Parameter, as modules name it in `tied_weight`; `tied_stages` are the stages that may name one
    together.  A place has the first of its names.  Raises ModelError for a contradiction.
    """

    def __init__(
        self,
        rank_fingerprints: Sequence[StageFingerprints],
        tied: TiedWeights | None,
        tied_stages: TiedStages,
    ) -> None:
        if tied is not None:
            require_type(
                tied,
                TiedWeights,
                "schedir.find_tied_weights(stages), or "
                "schedir.find_tied_weights(model).locate_in_stages(stages)",
            )
        self.fingerprints: dict[ParameterLocation, ParameterFingerprint] = {}
        first: dict[ParameterLocation, ParameterLocation] = {}
        for own in rank_fingerprints:
            for s, parameters in own.items():
                for p in parameters:
                    self.fingerprints.setdefault((s, p.names[0]), p)
                    first |= {(s, name): (s, p.names[0]) for name in p.names}
        self.weights: list[tuple[ParameterLocation, ...]] = []
        self.weight_index: dict[ParameterLocation, int] = {}  # of a place, its weight
        for places in tied.weights if tied else ():
            for s, name in places:
                if (s, name) not in first:
                    raise ModelError(f"stage {s} has no parameter {name}, which is said to be tied")
            self._add_weight({first[place] for place in places})
        for own in rank_fingerprints:
            for shared in _find_shared_objects(own):
                if len({self.weight_index.get(place, place) for place in shared}) == 1:
                    continue
                if any(place in self.weight_index for place in shared):
                    raise ModelError(
                        f"{describe_places(shared)} are one Parameter, and `tied` says otherwise",
                        hint="schedir.find_tied_weights(stages) finds all that is tied",
                    )
                self._add_weight(shared)
        named = dict(
            place
            for place, p in self.fingerprints.items()
            if p.is_named_tied and place not in self.weight_index
        )
        for s in sorted(named):
            its = [stages for stages in tied_stages if s in stages]
            if len(its) > 1:
                raise ModelError(
                    f"stage {s} shares weights as "
                    f"{' and '.join(map(format_tied_stages, its))}, and its "
                    "`tied_weight` does not say which it is",
                    hint=TIES_HINT,
                )
            if not its:
                raise ModelError(
                    f"stage {s} holds a copy of a tied weight, but the program does not reduce it",
                    hint="compile(..., tied_weights=True)",
                )
        for stages in tied_stages:
            if any(s in named for s in stages):
                self._add_weight((s, named[s]) for s in stages if s in named)

    def _add_weight(self, places: Iterable[ParameterLocation]) -> None:
        for s, name in (added := tuple(sorted(places))):
            if (s, name) in self.weight_index:
                raise ModelError(f"{name} of stage {s} is said to be in two ties: say one of both")
            self.weight_index[s, name] = len(self.weights)
        for one, other in pairwise(added):
            if one[0] == other[0]:
                raise ModelError(
                    f"{describe_places([one, other])} are said to be one weight, and are two "
                    "Parameters",
                    hint="within a stage a weight is one Parameter: stage.b = stage.a",
                )
        self.weights.append(added)

    def require_program_match(self, program: Program, *, allow_identical_stages: bool) -> None:
        """Refuse what a program does not tie as it is, and, unless they may be
        `allow_identical_stages`, weights that are equal and tied to nobody's knowledge."""
        for places in self.weights:
            stages = tuple(s for s, _ in places)
            if (
                stages not in program.trained_ties
                and not self.fingerprints[places[0]].is_named_tied
            ):
                raise ModelError(
                    f"{describe_places(places)} are one weight, but the program does not tie "
                    "stages "
                    f"{format_tied_stages(stages)}",
                    hint=TIES_HINT,
                )
            for place in places:
                self._require_same_copies(places[0], place)
        for stages in program.trained_ties:
            of = [{s for s, _ in places} for places in self.weights]
            if {*stages} not in of:
                named = set().union(*(own for own in of if own < {*stages}))
                lacks = min({*stages} - named, default=stages[0])
                raise ModelError(
                    f"the program reduces a tied weight, but stage {lacks} names none",
                    hint=TIES_HINT,
                )
        if allow_identical_stages:
            return
        equal: dict[str, list[ParameterLocation]] = {}
        for place, p in self.fingerprints.items():
            if p.is_trained and not p.is_constant:
                equal.setdefault(p.values_digest, []).append(place)
        for alike_ones in equal.values():
            one = min(alike_ones)
            for other in sorted(alike_ones):
                if other[0] != one[0] and self.weight_index.get(one, one) != self.weight_index.get(
                    other, other
                ):
                    raise ModelError(
                        f"{describe_places([one, other])} are equal, and not said to be one weight",
                        hint="ties = schedir.find_tied_weights(stages) before they are copied, "
                        "for compile(..., tied_weights=ties) and the executor's "
                        "tied_weights=ties; its "
                        "allow_identical_stages=True lets pass what was only seeded alike",
                    )

    def _require_same_copies(self, one: ParameterLocation, other: ParameterLocation) -> None:
        """Refuse copies of a weight that are not the same."""
        a, b = self.fingerprints[one], self.fingerprints[other]
        if not b.is_trained:
            raise ModelError(
                f"the program reduces a tied weight, but {other[1]} of stage {other[0]} is frozen"
            )
        if a.kind != b.kind:
            raise ModelError(
                f"{describe_places([one, other])} are one weight, and are {a.kind} and {b.kind}"
            )
        if a.values_digest != b.values_digest:
            raise ModelError(
                f"{describe_places([one, other])} are one weight, and their numbers differ"
            )
        if (
            a.optimizer_options
            and b.optimizer_options
            and a.optimizer_options != b.optimizer_options
        ):
            raise ModelError(
                f"{describe_places([one, other])} are one weight, and optimizers step them "
                "otherwise: "
                f"{a.optimizer_options}, and {b.optimizer_options}",
                hint="copies of a weight need the same options, or they would drift apart",
            )


def _find_shared_objects(fingerprints: StageFingerprints) -> Iterator[list[ParameterLocation]]:
    """The places of each Parameter that several stages of one process have."""
    objects: dict[int, list[ParameterLocation]] = {}
    for s, parameters in fingerprints.items():
        for p in parameters:
            if p.is_trained:
                objects.setdefault(p.object_id, []).append((s, p.names[0]))
    return (places for places in objects.values() if len(places) > 1)


def describe_places(places: Iterable[ParameterLocation]) -> str:
    """Places for people to read."""
    return " and ".join(f"{name} of stage {s}" for s, name in places)


# ------------------------------------------------------------ on a rank


@dataclass
class TiedWeight:
    """A tied weight as a rank has it: all stages that share it, and the rank's own copies."""

    stages: tuple[int, ...]
    local_copies: dict[int, nn.Parameter]


def list_local_tied_weights(
    program: Program,
    stages: Mapping[int, nn.Module],
    rank_fingerprints: Sequence[StageFingerprints],
    tied: TiedWeights | None,
    *,
    allow_identical_stages: bool,
) -> list[TiedWeight]:
    """The tied weights of which a rank has copies, in the order in which all ranks sum them.

    Raises ModelError where what is tied does not go with the program.
    """
    try:
        trained = [
            {s: own[s] for s in own if s >= program.frozen_stages} for own in rank_fingerprints
        ]
        known = ParameterTable(trained, tied, program.trained_ties)
        known.require_program_match(program, allow_identical_stages=allow_identical_stages)
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


def has_separate_copies(weight: TiedWeight, shape: PipelineShape) -> bool:
    """Whether copies of a weight are in several memories, and each is stepped by itself."""
    return (
        is_tied_across_ranks(weight.stages, shape)
        or len({p.data_ptr() for p in weight.local_copies.values()}) > 1
    )


class LocalTies:
    """What a stage computes with where other stages of the process have the same Parameters.

    Modules may be shared, too, so each compute puts its own in; between steps everybody sees the
    one Parameter.
    """

    def __init__(self, module: nn.Module, substitutes: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.substitutions = [
            (owner, name, p, substitutes[p])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if p in substitutes
        ]

    def install_substitutes(self) -> None:
        """Let the module compute with what stands in."""
        for owner, name, _, mine in self.substitutions:
            setattr(owner, name, mine)

    def restore(self) -> None:
        """Give the module the Parameters back that everybody sees."""
        for owner, name, theirs, _ in self.substitutions:
            setattr(owner, name, theirs)


def make_substitutes(
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
        uses = Counter(weight.local_copies.values())
        seen: set[nn.Parameter] = set()
        for s, p in weight.local_copies.items():
            if uses[p] == 1 and p not in copies:
                continue
            mine = copies.get(p, p)
            if p in seen:
                alias = make_parameter_like(p, mine.detach())
                aliases[alias] = mine
                mine = alias
            instead.setdefault(s, {})[p] = mine
            seen.add(p)
        weight.local_copies |= {
            s: instead[s][p] for s, p in weight.local_copies.items() if p in instead.get(s, ())
        }
    return instead, aliases


def sum_into_copies(*sums: Tensor, targets: Sequence[Tensor] | None = None) -> None:
    """Add up sums, the first first, into each of them, or into others."""
    total, *others = sums
    for other in others:
        total.add_(other)
    for grad in sums if targets is None else targets:
        if grad is not total:
            grad.copy_(total)


def make_tie_reducer(
    weight: TiedWeight,
    shape: PipelineShape,
    rank: int,
    transport: Transport,
    works: list[Work],
    get_grad: Callable[[int], Tensor],
) -> Callable[[], None]:
    """What begins to sum the gradients of a weight, in the order of stages, into every copy.

    `get_grad` tells that of an own stage's copy, or the part of it that the replica keeps.
    """
    own, ranks = [*weight.local_copies], find_sharing_ranks(weight.stages, shape)
    if not is_tied_across_ranks(weight.stages, shape):
        return lambda: sum_into_copies(*map(get_grad, own))
    if len(ranks) == len(weight.stages) == 2:  # in place: a sum of two has one order
        (copy,) = own

        def in_place() -> None:
            grad = get_grad(copy)
            works.append(transport.start_collective("all_reduce", ranks, grad, grad))

        return in_place

    def begin() -> None:
        grads = {s: get_grad(s) for s in own}
        first = next(iter(grads.values()))
        # One row for each stage, filled where its first holder is, so that all know every sum.
        rows = first.new_zeros((len(weight.stages), *first.shape))
        for row, s in zip(rows, weight.stages, strict=True):
            if s in own and shape.first_rank_per_stage[s] == rank:
                row.copy_(grads[s])
        work = transport.start_collective("all_reduce", ranks, rows, rows)
        works.append(ChainedWork(work, partial(sum_into_copies, *rows, targets=[*grads.values()])))

    return begin
