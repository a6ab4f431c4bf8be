"""Tied weights of a rank: copies in several stages, with one gradient sum each.

The gradients of the copies are added once, in the order of stages, and every copy gets the sum.
Copies may be on several ranks or on one. Two stages of one rank may have the same Parameter. Then
the first stage computes with the Parameter itself, and the others with substitutes in the same
memory.
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

SAMPLE_SIZE = 4096  # the numbers of a parameter in its digest, so that large ones take little time
TIES_HINT = (
    "ties = schedir.find_tied_weights(stages), for compile(..., tied_weights=ties) "
    "and the executor's tied_weights=ties"
)


class ParameterFingerprint(NamedTuple):
    """The facts about a parameter of a stage that processes exchange.

    Attributes:
        names: All names of the parameter in its stage.
        object_id: An id that is equal if two stages of a process have the same Parameter.
        kind: The shape and the type, as text.
        is_trained: True if the parameter requires a gradient.
        is_constant: True if all its numbers are equal.
        values_digest: A digest of kind and numbers, see `fingerprint_parameters`.
        is_named_tied: True if the parameter is the module's attribute `tied_weight`.
        optimizer_options: The optimizer's type and options for it, or "" if they are unknown.
    """

    names: tuple[str, ...]
    object_id: int
    kind: str
    is_trained: bool
    is_constant: bool
    values_digest: str
    is_named_tied: bool
    optimizer_options: str


StageFingerprints = Mapping[int, Sequence[ParameterFingerprint]]  # by stage


def fingerprint_parameters(
    stages: Mapping[int, nn.Module], optimizer: object = None
) -> dict[int, list[ParameterFingerprint]]:
    """Return the fingerprints of the parameters of stages.

    The digest of a parameter is over a sample of about 4096 numbers at equal distances. If these
    are all equal but others differ, it is over all numbers. Equal parameters have equal digests,
    and different parameters very rarely do.

    Args:
        stages: The stages, by number.
        optimizer: The optimizer that steps them, or None.

    Returns:
        The fingerprints of each stage, by its number.
    """
    fingerprints: dict[int, list[ParameterFingerprint]] = {}
    options = describe_options(optimizer)
    for s, module in stages.items():
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        tied = getattr(module, "tied_weight", None)
        fingerprints[s] = [
            _fingerprint(
                p,
                parameter_names,
                p is tied,
                options.get(p, "none" if options and p.requires_grad else ""),
            )
            for p, parameter_names in names.items()
        ]
    return fingerprints


@torch.no_grad()
def _fingerprint(
    p: nn.Parameter, names: list[str], is_named_tied: bool, optimizer_options: str
) -> ParameterFingerprint:
    kind, constant, values = f"{list(p.shape)} of {p.dtype}", True, ""
    if not p.is_meta:
        local = p.detach()
        local = local.to_local() if hasattr(local, "to_local") else local  # a DTensor's local shard
        flat = local.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE_SIZE)]
        constant = bool((sample == sample[:1]).all())
        if constant and not bool((flat == flat[:1]).all()):
            sample, constant = flat, False  # the numbers that differ are not in the sample
        # A copy, because `numpy` fixes the size of a storage, and FSDP frees that of the weight.
        copy = sample.clone(memory_format=torch.contiguous_format)
        numbers = copy.view(torch.uint8).cpu().numpy().tobytes()
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
    """The parameters of all stages, and the tied weights among them.

    Weights are tied in three ways: by `tied`, as the same Parameter in several stages of a process,
    or as the attribute `tied_weight` of modules.

    Args:
        rank_fingerprints: The fingerprints of all ranks.
        tied: The tied weights that the user gives, or None.
        tied_stages: The stages that may have a common `tied_weight`, for each weight.

    Attributes:
        fingerprints: The fingerprint of each parameter, by stage and first name.
        weights: For each tied weight the stage and name of its copies.
        weight_index: The index in `weights` of each copy.

    Raises:
        ModelError: The ties contradict each other or the stages.
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
        self.weight_index: dict[ParameterLocation, int] = {}
        for places in tied.weights if tied else ():
            for s, name in places:
                if (s, name) not in first:
                    raise ModelError(
                        f"tied_weights has {name} of stage {s}, but the stage has no such parameter"
                    )
            self._add_weight({first[place] for place in places})
        for own in rank_fingerprints:
            for shared in _find_shared_objects(own):
                if len({self.weight_index.get(place, place) for place in shared}) == 1:
                    continue
                if any(place in self.weight_index for place in shared):
                    raise ModelError(
                        f"{describe_places(shared)} are one Parameter, but not in tied_weights",
                        hint="schedir.find_tied_weights(stages) finds all tied weights",
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
                    f"stage {s} has several tied weights, of stages "
                    f"{' and '.join(map(format_tied_stages, its))}, but one attribute "
                    "`tied_weight`",
                    hint=TIES_HINT,
                )
            if not its:
                raise ModelError(
                    f"stage {s} has a tied weight, but the program does not reduce it",
                    hint="compile(..., tied_weights=True)",
                )
        for stages in tied_stages:
            if any(s in named for s in stages):
                self._add_weight((s, named[s]) for s in stages if s in named)

    def _add_weight(self, places: Iterable[ParameterLocation]) -> None:
        for s, name in (added := tuple(sorted(places))):
            if (s, name) in self.weight_index:
                raise ModelError(f"{name} of stage {s} is in two ties, but it can be in one only")
            self.weight_index[s, name] = len(self.weights)
        for one, other in pairwise(added):
            if one[0] == other[0]:
                raise ModelError(
                    f"{describe_places([one, other])} are tied, but they are two Parameters of the "
                    "same stage; a tie connects different stages",
                    hint="use one Parameter within a stage: stage.b = stage.a",
                )
        self.weights.append(added)

    def require_program_match(self, program: Program, *, allow_identical_stages: bool) -> None:
        """Refuse ties that the program does not have, and equal weights that are not tied.

        Args:
            program: The program.
            allow_identical_stages: If True, weights of different stages may be equal without a tie.

        Raises:
            ModelError: The ties differ from those of the program, the copies of a weight differ, or
                equal weights are not tied.
        """
        for places in self.weights:
            stages = tuple(s for s, _ in places)
            if (
                stages not in program.trained_ties
                and not self.fingerprints[places[0]].is_named_tied
            ):
                raise ModelError(
                    f"{describe_places(places)} are one weight, but the program does not tie "
                    f"stages {format_tied_stages(stages)}",
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
                    "the program sums the gradients of a tied weight, but stage "
                    f"{lacks} has no copy",
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
                        f"{describe_places([one, other])} are equal, but they are not tied",
                        hint="ties = schedir.find_tied_weights(stages) before you copy the "
                        "stages, for compile(..., tied_weights=ties) and the executor's "
                        "tied_weights=ties; or allow_identical_stages=True",
                    )

    def _require_same_copies(self, one: ParameterLocation, other: ParameterLocation) -> None:
        """Refuse copies of a weight that are frozen, or differ in numbers or options."""
        a, b = self.fingerprints[one], self.fingerprints[other]
        if not b.is_trained:
            raise ModelError(
                f"the program sums the gradients of a tied weight, but its copy {other[1]} of "
                f"stage {other[0]} is frozen"
            )
        if a.kind != b.kind:
            raise ModelError(
                f"{describe_places([one, other])} are one weight, but are {a.kind} and {b.kind}"
            )
        if a.values_digest != b.values_digest:
            raise ModelError(
                f"{describe_places([one, other])} are one weight, but their values differ"
            )
        if (
            a.optimizer_options
            and b.optimizer_options
            and a.optimizer_options != b.optimizer_options
        ):
            raise ModelError(
                f"{describe_places([one, other])} are one weight, but their optimizer options "
                f"differ: {a.optimizer_options}, and {b.optimizer_options}",
                hint="use the same options for all copies of a weight",
            )


def _find_shared_objects(fingerprints: StageFingerprints) -> Iterator[list[ParameterLocation]]:
    """Return the locations of each Parameter that several stages of one process have."""
    objects: dict[int, list[ParameterLocation]] = {}
    for s, parameters in fingerprints.items():
        for p in parameters:
            if p.is_trained:
                objects.setdefault(p.object_id, []).append((s, p.names[0]))
    return (places for places in objects.values() if len(places) > 1)


def describe_places(places: Iterable[ParameterLocation]) -> str:
    """Return the names and stages of parameters as text.

    Args:
        places: The stages and names.
    """
    return " and ".join(f"{name} of stage {s}" for s, name in places)


# ------------------------------------------------------------ on a rank


@dataclass
class TiedWeight:
    """A tied weight of a rank.

    Args:
        stages: All stages that share the weight.
        local_copies: The Parameters of this rank's stages, by stage.
    """

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
    """Return the tied weights of a rank, in the order in which all ranks sum them.

    Args:
        program: The program.
        stages: The stages of this rank.
        rank_fingerprints: The fingerprints of all ranks.
        tied: The tied weights that the user gives, or None.
        allow_identical_stages: If True, weights of different stages may be equal without a tie.

    Raises:
        ModelError: The ties do not match the program, see `ParameterTable`, or a tied weight has a
            hook on its gradient.
    """
    try:
        trained = [
            {s: own[s] for s in own if s >= program.frozen_stages} for own in rank_fingerprints
        ]
        table = ParameterTable(trained, tied, program.trained_ties)
        table.require_program_match(program, allow_identical_stages=allow_identical_stages)
    except ModelError as error:
        error.program = program.name
        raise
    weights = []
    for places in sorted(table.weights, key=lambda places: [s for s, _ in places]):
        own = {s: stages[s].get_parameter(name) for s, name in places if s in stages}
        for s, p in own.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"{dict(places)[s]} of stage {s} is tied and has a hook on its gradient, but "
                    "the hook would get the gradient of one stage only",
                    program=program.name,
                )
        weights += [TiedWeight(tuple(s for s, _ in places), own)] if own else []
    return weights


def _has_separate_copies(weight: TiedWeight, shape: PipelineShape) -> bool:
    """Return whether the copies of a weight do not share memory.

    Each copy is then stepped separately.

    Args:
        weight: The tied weight.
        shape: The pipeline shape.
    """
    return (
        is_tied_across_ranks(weight.stages, shape)
        or len({p.data_ptr() for p in weight.local_copies.values()}) > 1
    )


class LocalTies:
    """The substitutes of a stage for Parameters that other stages of the process have, too.

    Stages may share modules, so each computation installs its own substitutes. Between steps the
    modules have the original Parameters.

    Args:
        module: The stage.
        substitutes: The substitute of each Parameter.
    """

    def __init__(self, module: nn.Module, substitutes: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.substitutions = [
            (owner, name, p, substitutes[p])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if p in substitutes
        ]

    def install_substitutes(self) -> None:
        """Let the module compute with its substitutes."""
        for owner, name, _, substitute in self.substitutions:
            setattr(owner, name, substitute)

    def restore(self) -> None:
        """Give the module the original Parameters again."""
        for owner, name, original, _ in self.substitutions:
            setattr(owner, name, original)


class RankTies:
    """The tied weights of a rank, and its Parameters that share memory with others.

    Args:
        weights: The tied weights with copies on the rank. They get the substitutes.
        parameter_copies: The Parameter with which this rank computes, by each Parameter that
            virtual ranks of the process share.
        program: The first program of the rank.
        keeps_gradients: True if gradients are added to existing ones.

    Attributes:
        substitutes: By stage, the substitute of each Parameter that several stages have.
        aliases: For each Parameter in the memory of another one, that other one.
        has_separate_copies: True if the copies of a weight do not share memory.
    """

    def __init__(
        self,
        weights: Sequence[TiedWeight],
        parameter_copies: Mapping[nn.Parameter, nn.Parameter],
        program: Program,
        *,
        keeps_gradients: bool,
    ) -> None:
        self.weights, self.parameter_copies = weights, parameter_copies
        self.is_sharded, self.keeps_gradients = program.zero > 0, keeps_gradients
        self.substitutes, self.aliases = _make_substitutes(weights, parameter_copies)
        self.has_separate_copies = any(_has_separate_copies(w, program.shape) for w in weights)

    def list_local_copies(self, stage: int) -> list[nn.Parameter]:
        """Return the Parameters of a stage that are copies of tied weights.

        Args:
            stage: The stage.
        """
        return [w.local_copies[stage] for w in self.weights if stage in w.local_copies]

    def copy_shared_parameters(self) -> None:
        """Copy the values of shared Parameters to the rank's own copies."""
        for shared, copy in self.parameter_copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())

    def begin_update(self) -> None:
        """Let aliases use the memory of the other Parameter: the caller may have replaced it."""
        for alias, one in self.aliases.items():
            if not self.is_sharded and alias.data_ptr() != one.data_ptr():
                alias.data = one.data
            if self.keeps_gradients:
                alias.grad = None


def _make_substitutes(
    weights: Sequence[TiedWeight], copies: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[dict[int, dict[nn.Parameter, nn.Parameter]], dict[nn.Parameter, nn.Parameter]]:
    """Create the substitutes for Parameters that several stages of a process have.

    The first of a rank's stages computes with the Parameter or the rank's copy of it. Each other
    stage gets a Parameter in the same memory, with a gradient of its own. The tied weights then
    contain the substitutes.

    Args:
        weights: The tied weights of the rank, which are changed.
        copies: The rank's own copies of Parameters that other ranks of the process have, too.

    Returns:
        By stage, the substitute of each shared Parameter. And for each Parameter in the memory of
        another one, that other one.
    """
    substitutes: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    for weight in weights:
        uses = Counter(weight.local_copies.values())
        seen: set[nn.Parameter] = set()
        for s, p in weight.local_copies.items():
            if uses[p] == 1 and p not in copies:
                continue
            substitute = copies.get(p, p)
            if p in seen:
                alias = make_parameter_like(p, substitute.detach())
                aliases[alias] = substitute
                substitute = alias
            substitutes.setdefault(s, {})[p] = substitute
            seen.add(p)
        weight.local_copies |= {
            s: substitutes[s][p]
            for s, p in weight.local_copies.items()
            if p in substitutes.get(s, ())
        }
    return substitutes, aliases


def sum_into_copies(*sums: Tensor, targets: Sequence[Tensor] | None = None) -> None:
    """Add tensors, the first ones first, and copy the sum into each target.

    The first tensor is changed.

    Args:
        *sums: The tensors to add.
        targets: The tensors that get the sum. By default these are `sums`.
    """
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
    """Return a function that starts the sum of a tied weight's gradients.

    Gradients are added in the order of stages, and every copy gets the sum.

    Args:
        weight: The tied weight.
        shape: The pipeline shape.
        rank: The pipeline rank.
        transport: The transport of the rank.
        works: A list to which the function appends the Work, if the copies are on several ranks.
        get_grad: Returns the gradient of a local stage's copy, or this replica's shard of it.
    """
    local_stages, ranks = [*weight.local_copies], find_sharing_ranks(weight.stages, shape)
    if not is_tied_across_ranks(weight.stages, shape):
        return lambda: sum_into_copies(*map(get_grad, local_stages))
    if len(ranks) == len(weight.stages) == 2:  # in place, because a sum of two has only one order
        (copy,) = local_stages

        def in_place() -> None:
            grad = get_grad(copy)
            works.append(transport.start_collective("all_reduce", ranks, grad, grad))

        return in_place

    def begin() -> None:
        grads = {s: get_grad(s) for s in local_stages}
        first = next(iter(grads.values()))
        # One row for each stage. The first rank with the stage fills it, and the all-reduce gives
        # all ranks the rows of all stages.
        rows = first.new_zeros((len(weight.stages), *first.shape))
        for row, s in zip(rows, weight.stages, strict=True):
            if s in local_stages and shape.first_rank_per_stage[s] == rank:
                row.copy_(grads[s])
        work = transport.start_collective("all_reduce", ranks, rows, rows)
        works.append(ChainedWork(work, partial(sum_into_copies, *rows, targets=[*grads.values()])))

    return begin
