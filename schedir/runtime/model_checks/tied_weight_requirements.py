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
from schedir.runtime.model_checks.tensor_fingerprint import get_local_shard
from schedir.runtime.parameters.optimizer_inspection import describe_options
from schedir.runtime.parameters.tied_parameters import TiedWeight

SAMPLE_SIZE = 4096  # the fewest elements in the digest of a large parameter
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

    To limit the time, the digest of a parameter covers a sample of 4096 to 8191 elements at equal
    distances. The digest of a smaller parameter covers all elements. It also covers all elements if
    the sample has equal elements but other elements differ. Equal parameters have equal digests.
    Different parameters have equal digests only very rarely.

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
        tied_weight = getattr(module, "tied_weight", None)
        fingerprints[s] = [
            _fingerprint(
                p,
                parameter_names,
                p is tied_weight,
                options.get(p, "none" if options and p.requires_grad else ""),
            )
            for p, parameter_names in names.items()
        ]
    return fingerprints


@torch.no_grad()
def _fingerprint(
    p: nn.Parameter, names: list[str], is_named_tied: bool, optimizer_options: str
) -> ParameterFingerprint:
    kind, is_constant, values_digest = f"{list(p.shape)} of {p.dtype}", True, ""
    if not p.is_meta:
        flat = get_local_shard(p.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE_SIZE)]
        is_constant = bool((sample == sample[:1]).all())
        if is_constant and not bool((flat == flat[:1]).all()):
            sample, is_constant = flat, False  # the sample missed the elements that differ

        # Copy, because `numpy()` makes a storage non-resizable. FSDP frees the storage of a weight
        # by a resize.
        copy = sample.clone(memory_format=torch.contiguous_format)
        raw_bytes = copy.view(torch.uint8).cpu().numpy().tobytes()
        values_digest = sha256(kind.encode() + raw_bytes).hexdigest()[:16]
    return ParameterFingerprint(
        tuple(names),
        id(p),
        kind,
        p.requires_grad,
        is_constant,
        values_digest,
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
        first_locations: dict[ParameterLocation, ParameterLocation] = {}
        for stage_fingerprints in rank_fingerprints:
            for s, parameters in stage_fingerprints.items():
                for p in parameters:
                    self.fingerprints.setdefault((s, p.names[0]), p)
                    first_locations |= {(s, name): (s, p.names[0]) for name in p.names}
        self.weights: list[tuple[ParameterLocation, ...]] = []
        self.weight_index: dict[ParameterLocation, int] = {}
        for locations in tied.weights if tied else ():
            for s, name in locations:
                if (s, name) not in first_locations:
                    raise ModelError(
                        f"tied_weights has {name} of stage {s}, but the stage has no such parameter"
                    )
            self._add_weight({first_locations[location] for location in locations})
        for stage_fingerprints in rank_fingerprints:
            for shared_locations in _find_shared_objects(stage_fingerprints):
                weights = {
                    self.weight_index.get(location, location) for location in shared_locations
                }
                if len(weights) == 1:
                    continue
                if any(location in self.weight_index for location in shared_locations):
                    raise ModelError(
                        f"{describe_places(shared_locations)} are one Parameter, but not in "
                        "tied_weights",
                        hint="schedir.find_tied_weights(stages) finds all tied weights",
                    )
                self._add_weight(shared_locations)
        tied_names = dict(
            location
            for location, p in self.fingerprints.items()
            if p.is_named_tied and location not in self.weight_index
        )
        for s in sorted(tied_names):
            stage_ties = [stages for stages in tied_stages if s in stages]
            if len(stage_ties) > 1:
                raise ModelError(
                    f"stage {s} has several tied weights "
                    f"({', '.join(map(format_tied_stages, stage_ties))}), but it has only one "
                    "attribute `tied_weight`",
                    hint=TIES_HINT,
                )
            if not stage_ties:
                raise ModelError(
                    f"stage {s} has a tied weight, but the program does not sum its gradients",
                    hint="compile(..., tied_weights=True)",
                )
        for stages in tied_stages:
            if any(s in tied_names for s in stages):
                self._add_weight((s, tied_names[s]) for s in stages if s in tied_names)

    def _add_weight(self, locations: Iterable[ParameterLocation]) -> None:
        for s, name in (sorted_locations := tuple(sorted(locations))):
            if (s, name) in self.weight_index:
                raise ModelError(f"{name} of stage {s} is in two ties, but it can be in one only")
            self.weight_index[s, name] = len(self.weights)
        for first, second in pairwise(sorted_locations):
            if first[0] == second[0]:
                raise ModelError(
                    f"{describe_places([first, second])} are tied, but they are two Parameters of "
                    "the same stage; a tie connects different stages",
                    hint="use one Parameter within a stage: stage.b = stage.a",
                )
        self.weights.append(sorted_locations)

    def require_program_match(self, program: Program, *, allow_identical_stages: bool) -> None:
        """Check that the model has the same ties as the program, and that equal weights are tied.

        Args:
            program: The program.
            allow_identical_stages: If True, weights of different stages may be equal without a tie.

        Raises:
            ModelError: The ties differ from the program's ties, the copies of a weight differ, or
                equal weights are not tied.
        """
        for locations in self.weights:
            stages = tuple(s for s, _ in locations)
            if (
                stages not in program.trained_ties
                and not self.fingerprints[locations[0]].is_named_tied
            ):
                raise ModelError(
                    f"{describe_places(locations)} are one weight, but the program does not tie "
                    f"stages {format_tied_stages(stages)}",
                    hint=TIES_HINT,
                )
            for location in locations:
                self._require_same_copies(locations[0], location)
        for stages in program.trained_ties:
            stages_by_weight = [{s for s, _ in locations} for locations in self.weights]
            if {*stages} not in stages_by_weight:
                partial_ties = [tie for tie in stages_by_weight if tie < {*stages}]
                tied_stages = set().union(*partial_ties)
                missing_stage = min({*stages} - tied_stages, default=stages[0])
                raise ModelError(
                    "the program sums the gradients of a tied weight, but stage "
                    f"{missing_stage} has no copy",
                    hint=TIES_HINT,
                )
        if allow_identical_stages:
            return
        locations_by_digest: dict[str, list[ParameterLocation]] = {}
        for location, p in self.fingerprints.items():
            if p.is_trained and not p.is_constant:
                locations_by_digest.setdefault(p.values_digest, []).append(location)
        for equal_locations in locations_by_digest.values():
            first = min(equal_locations)
            for second in sorted(equal_locations):
                first_weight = self.weight_index.get(first, first)
                second_weight = self.weight_index.get(second, second)
                if second[0] != first[0] and first_weight != second_weight:
                    raise ModelError(
                        f"{describe_places([first, second])} are equal, but they are not tied",
                        hint="if they are one weight, call ties = "
                        "schedir.find_tied_weights(stages) before you copy the stages, and pass "
                        "tied_weights=ties to compile and to the executor. If a wrapper such as "
                        "DistributedDataParallel copied the weights from another pipeline rank, "
                        "pass it the group of the stage's replicas. Otherwise pass "
                        "allow_identical_stages=True",
                    )

    def _require_same_copies(self, first: ParameterLocation, second: ParameterLocation) -> None:
        """Check that copy `second` is trained, and has the same values and options as `first`."""
        a, b = self.fingerprints[first], self.fingerprints[second]
        if not b.is_trained:
            raise ModelError(
                f"the program sums the gradients of a tied weight, but its copy {second[1]} of "
                f"stage {second[0]} is frozen"
            )
        if a.kind != b.kind:
            raise ModelError(
                f"{describe_places([first, second])} are one weight, but their shapes or "
                f"dtypes differ: {a.kind}, and {b.kind}"
            )
        if a.values_digest != b.values_digest:
            raise ModelError(
                f"{describe_places([first, second])} are one weight, but their values differ"
            )
        if (
            a.optimizer_options
            and b.optimizer_options
            and a.optimizer_options != b.optimizer_options
        ):
            raise ModelError(
                f"{describe_places([first, second])} are one weight, but their optimizer options "
                f"differ: {a.optimizer_options}, and {b.optimizer_options}",
                hint="use the same options for all copies of a weight",
            )


def _find_shared_objects(fingerprints: StageFingerprints) -> Iterator[list[ParameterLocation]]:
    """Return the locations of each trained Parameter that several stages of one process have."""
    locations_by_object: dict[int, list[ParameterLocation]] = {}
    for s, parameters in fingerprints.items():
        for p in parameters:
            if p.is_trained:
                locations_by_object.setdefault(p.object_id, []).append((s, p.names[0]))
    return (locations for locations in locations_by_object.values() if len(locations) > 1)


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
    """Return the tied weights of a rank. All ranks sum the gradients of the weights in this order.

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
        trained_fingerprints = [
            {s: stage_fingerprints[s] for s in stage_fingerprints if s >= program.frozen_stages}
            for stage_fingerprints in rank_fingerprints
        ]
        table = ParameterTable(trained_fingerprints, tied, program.trained_ties)
        table.require_program_match(program, allow_identical_stages=allow_identical_stages)
    except ModelError as error:
        error.program = program.name
        raise
    weights = []
    for locations in sorted(table.weights, key=lambda locations: [s for s, _ in locations]):
        local_copies = {s: stages[s].get_parameter(name) for s, name in locations if s in stages}
        for s, p in local_copies.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"{dict(locations)[s]} of stage {s} is tied and has a hook on its gradient, "
                    "but the hook would get the gradient of one stage only",
                    program=program.name,
                )
        if local_copies:
            weights.append(TiedWeight(tuple(s for s, _ in locations), local_copies))
    return weights


def require_no_max_norm(
    program: Program, stages: Mapping[int, nn.Module], weights: Sequence[TiedWeight]
) -> None:
    """Refuse embeddings with `max_norm` if their weights have copies.

    The forward of such an embedding scales rows of its own weight, but no rows of the copies. If
    all copies are in data-parallel replicas, this function only warns that each replica scales
    other rows.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        weights: The tied weights of the rank.

    Raises:
        ModelError: The weight has stage replicas, ties or ZeRO shards, or the program may run a
            training step again.
    """
    for s, module in stages.items():
        tied_ids = {id(weight.local_copies[s]) for weight in weights if s in weight.local_copies}
        for name, layer in module.named_modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or layer.max_norm is None:
                continue
            fact = f"{name or 'the embedding'} of stage {s} scales rows of its weight (max_norm)"
            if program.shape.placement_rows > 1 or id(layer.weight) in tied_ids:
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
