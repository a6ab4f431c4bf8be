"""Find the tied weights of a model, and check that they match the ties of the program."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from schedir.errors import ModelError, require_type
from schedir.ir.pipeline.tied_weights import (
    ParameterLocation,
    TiedStages,
    TiedWeights,
    format_tied_stages,
)
from schedir.ir.program import Program
from schedir.runtime.parameters.mixed_precision import describe_options
from schedir.runtime.parameters.tied_parameters import TiedWeight

SAMPLE_SIZE = 4096  # elements in the digest of a large parameter, to limit the time
TIES_HINT = (
    "call ties = schedir.find_tied_weights(stages), and pass tied_weights=ties to compile and to "
    "the executor"
)


class ParameterFingerprint(NamedTuple):
    """The properties of a stage's parameter that processes exchange and compare.

    Attributes:
        names: All names of the parameter in its stage.
        object_id: An id that is equal if two stages of a process have the same Parameter.
        kind: The shape and the dtype, as text.
        is_trained: True if the parameter requires a gradient.
        is_constant: True if all its elements are equal.
        values_digest: A digest of `kind` and elements, see `fingerprint_parameters`.
        is_named_tied: True if the parameter is the module's attribute `tied_weight`.
        optimizer_options: The type of the optimizer and its options for the parameter, or "" if
            they are unknown.
    """

    names: tuple[str, ...]
    object_id: int
    kind: str
    is_trained: bool
    is_constant: bool
    values_digest: str
    is_named_tied: bool
    optimizer_options: str


StageFingerprints = Mapping[int, Sequence[ParameterFingerprint]]  # stage -> its parameters


def fingerprint_parameters(
    stages: Mapping[int, nn.Module], optimizer: object = None
) -> dict[int, list[ParameterFingerprint]]:
    """Return the fingerprints of the parameters of stages.

    The digest of a parameter covers a sample of about 4096 elements at equal distances. If these
    are all equal but other elements differ, it covers all elements. Equal parameters have equal
    digests. Different parameters have equal digests only very rarely.

    Args:
        stages: The stages, by number.
        optimizer: The optimizer that steps the parameters, or None.

    Returns:
        Stage -> the fingerprints of its parameters.
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
            sample, constant = flat, False  # the sample lacks the different elements
        # Copy, because `numpy` fixes the size of a storage, but FSDP must be able to free the
        # weight's storage.
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

    Weights are tied in one of three ways: `tied` lists them, several stages of a process have the
    same Parameter, or modules have them as attribute `tied_weight`.

    Args:
        rank_fingerprints: The fingerprints of all ranks.
        tied: The tied weights that the user passed, or None.
        tied_stages: For each tied weight of the program, the stages that share it.

    Attributes:
        fingerprints: (Stage, first name) -> fingerprint of the parameter.
        weights: For each tied weight, the stage and name of each copy.
        weight_index: (Stage, name) of a copy -> index of its weight in `weights`.

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
                "tied_weights",
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
                    f"{' and '.join(map(format_tied_stages, its))}, but it has only one "
                    "attribute `tied_weight`",
                    hint=TIES_HINT,
                )
            if not its:
                raise ModelError(
                    f"stage {s} has a tied weight, but the program does not sum its gradients",
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
        """Check that the ties are those of the program, and that equal weights are tied.

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
                        hint="if they are one weight, call ties = "
                        "schedir.find_tied_weights(stages) before you copy the stages, and pass "
                        "tied_weights=ties to compile and to the executor; otherwise pass "
                        "allow_identical_stages=True",
                    )

    def _require_same_copies(self, one: ParameterLocation, other: ParameterLocation) -> None:
        """Check that copy `other` is trained, and has the values and options of copy `one`."""
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
        places: Pairs of a stage and a name.
    """
    return " and ".join(f"{name} of stage {s}" for s, name in places)


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
        tied: The tied weights that the user passed, or None.
        allow_identical_stages: If True, weights of different stages may be equal without a tie.

    Raises:
        ModelError: The ties do not match the program (see `ParameterTable`), or a tied weight has a
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


def require_no_max_norm(
    program: Program, stages: Mapping[int, nn.Module], weights: Sequence[TiedWeight]
) -> None:
    """Refuse embeddings with `max_norm` if their weights have copies.

    The forward of such an embedding scales rows of its weight, but not of the copies. If the only
    copies are in data-parallel replicas, this function warns: each replica scales the rows that it
    uses.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        weights: The tied weights of the rank.

    Raises:
        ModelError: The weight has stage replicas, ties or ZeRO shards, or the program may run a
            training step again.
    """
    for s, module in stages.items():
        tied = {id(weight.local_copies[s]) for weight in weights if s in weight.local_copies}
        for name, layer in module.named_modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or layer.max_norm is None:
                continue
            fact = f"{name or 'the embedding'} of stage {s} scales rows of its weight (max_norm)"
            if program.shape.placement_rows > 1 or id(layer.weight) in tied:
                raise ModelError(
                    f"{fact}, but the weight has other copies, or other layers use it",
                    program=program.name,
                    hint="max_norm=None",
                )
            if program.zero:
                raise ModelError(
                    f"{fact}, but each replica has only a shard of it (zero {program.zero})",
                    program=program.name,
                    hint="max_norm=None, or zero=0",
                )
            if program.norm_check == "after_step":
                raise ModelError(
                    f"{fact}, but the step may run again (norm_check 'after_step')",
                    program=program.name,
                    hint="max_norm=None, or compile(..., norm_check='before_step')",
                )
            if program.dp > 1:
                warnings.warn(
                    f"{fact}, and each replica scales only the rows that it uses", stacklevel=2
                )
