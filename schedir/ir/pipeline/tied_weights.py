"""Tied weights: the stages that have a copy of the same weight.

A program has only the stages of a tied weight: `Program.tied_weights` is `((0, 3),)` if stages 0
and 3 share a weight. A model has named parameters. Before the model is split, a tied weight is one
object with several names:

    ties = schedir.find_tied_weights(model)  # lm_head.weight is transformer.wte.weight
    ties = ties.locate_in_stages(stages)  # the stages of the model may be copies
    program = schedir.compile(schedule, shape, tied_weights=ties)

This module does not import torch. Its functions accept any object that has `named_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, Protocol, overload

from schedir.errors import ShapeError, UsageError, describe
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import PipelineShape

# Sets of stages that share weights.  Each set occurs once.  The sets, and the stages in each set,
# are in ascending order.
TiedStages = tuple[tuple[int, ...], ...]
ParameterLocation = tuple[int, str]  # A stage, and the name of a parameter in that stage.


class ModuleLike(Protocol):
    """The part of `torch.nn.Module` that this module uses."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, Any]]:
        """See `torch.nn.Module.named_parameters`."""
        ...


@dataclass(frozen=True)
class TiedWeights:
    """The locations of weights that have a copy in several stages.

    `schedir.find_tied_weights(stages)` returns this object. A process that creates only some of the
    stages must list the locations.

    Args:
        weights: One tuple for each weight, with the location of each copy. A location is a pair of
            the stage and the name of the parameter in that stage. Locations are sorted by stage.

    Raises:
        UsageError: `weights` has another structure.

    Example:
        >>> from schedir import TiedWeights
        >>> ties = TiedWeights((((0, "embedding.weight"), (3, "head.weight")),))
        >>> ties.stages
        ((0, 3),)
    """

    weights: tuple[tuple[ParameterLocation, ...], ...] = ()

    def __post_init__(self) -> None:
        try:
            weights = tuple(
                tuple(sorted({(index(s), _require_name(name)) for s, name in locations}))
                for locations in self.weights
            )
        except (TypeError, ValueError):
            raise UsageError(
                "weights must have the places of each tied weight, as pairs of stage and name, "
                f"not {describe(self.weights)}",
                hint="TiedWeights((((0, 'embedding.weight'), (3, 'head.weight')),))",
            ) from None
        object.__setattr__(self, "weights", weights)

    @property
    def stages(self) -> TiedStages:
        """The value of `Program.tied_weights`: the sets of stages that share weights."""
        return tuple(
            sorted({tuple(sorted({s for s, _ in locations})) for locations in self.weights})
        )

    def __bool__(self) -> bool:
        return bool(self.weights)


def _require_name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


@dataclass(frozen=True)
class ModelTies:
    """Weights that have several names in a model that is not split into stages.

    Args:
        names: One tuple for each weight, with its names.
        parameters: The parameter object of each weight, in the same order.
    """

    names: tuple[tuple[str, ...], ...] = ()
    parameters: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.names)

    def locate_in_stages(
        self, stages: Sequence[ModuleLike] | Mapping[int, ModuleLike]
    ) -> TiedWeights:
        """Return the locations of these weights in all stages of the model.

        If a stage has the model's parameter object, this object identifies the weight. If the stage
        is a copy, the names of the weight in the model identify the weight.

        Args:
            stages: All stages of the model, in order or by number.

        Returns:
            The locations of each weight that several stages have.

        Raises:
            UsageError: A weight or one of its names is in no stage. Or one stage has two different
                parameters with names of one weight.
        """
        modules = _list_stages(stages)
        weights = []
        for names, weight in zip(self.names, self.parameters, strict=True):
            locations, missing_names = [], {*names}
            for s, module in enumerate(modules):
                parameters = [*module.named_parameters(remove_duplicate=False)]
                matches = [(name, p) for name, p in parameters if p is weight]
                missing_names -= {*names} if matches else set()
                matches = matches or [(name, p) for name, p in parameters if name in names]
                missing_names -= {name for name, _ in matches}
                if any(p is not matches[0][1] for _, p in matches):
                    raise UsageError(
                        f"{matches[0][0]} and {matches[1][0]} are one weight in the model, but two "
                        f"different weights in stage {s}"
                    )
                locations += [(s, matches[0][0])] if matches else []
            if missing_names:
                raise UsageError(
                    f"the model ties {' and '.join(names)}, but no stage has "
                    f"{' or '.join(sorted(missing_names))}",
                    hint="call schedir.find_tied_weights(stages) before the stages are copied: it "
                    "finds ties with any name",
                )
            weights += [tuple(locations)] if len(locations) > 1 else []
        return TiedWeights(tuple(weights))


@overload
def find_tied_weights(model: Sequence[ModuleLike] | Mapping[int, ModuleLike]) -> TiedWeights: ...
@overload
def find_tied_weights(model: ModuleLike) -> ModelTies: ...
def find_tied_weights(
    model: ModuleLike | Sequence[ModuleLike] | Mapping[int, ModuleLike],
) -> TiedWeights | ModelTies:
    """Find trained weights that have several names in a model, or that several stages share.

    Call this function before you copy the model or a stage.

    Args:
        model: All stages of a model, in order or by number, or a model that is not split.

    Returns:
        For stages, the locations of each weight that several stages have. `compile` and the
        executor accept these locations as `tied_weights`. For a model, the names of each weight.
        `ModelTies.locate_in_stages` then finds the locations.

    Raises:
        UsageError: `model` has no `named_parameters`, or stages are missing.

    Example:
        >>> import schedir
        >>> class Stage:  # the function calls only this method of an nn.Module
        ...     def __init__(self, **parameters):
        ...         self.parameters = parameters
        ...     def named_parameters(self, *, remove_duplicate=True):
        ...         return iter(self.parameters.items())
        >>> weight = object()
        >>> schedir.find_tied_weights([Stage(embedding=weight), Stage(layer=object()),
        ...     Stage(head=weight)])
        TiedWeights(weights=(((0, 'embedding'), (2, 'head')),))
    """
    if hasattr(model, "named_parameters"):
        shared_weights = [
            (names, weight) for weight, names in _find_shared_weights([model]) if len(names) > 1
        ]
        return ModelTies(
            tuple(tuple(name for _, name in locations) for locations, _ in shared_weights),
            tuple(weight for _, weight in shared_weights),
        )
    # With `reversed`, the first name remains if a weight has several names in one stage.
    shared = (
        dict(reversed(locations)) for _, locations in _find_shared_weights(_list_stages(model))
    )
    weights = (sorted(names.items()) for names in shared if len(names) > 1)
    return TiedWeights(tuple(map(tuple, weights)))


def _list_stages(stages: Sequence[ModuleLike] | Mapping[int, ModuleLike]) -> list[ModuleLike]:
    """Return all stages, in order. Raises UsageError if a stage is missing or is not a module."""
    result: list[Any]
    if isinstance(stages, Mapping):
        if {*stages} != {*range(len(stages))}:
            raise UsageError(
                "stages must be all stages of the model, numbered from 0, not only "
                f"{describe([*stages])}",
                hint="pass all stages, or list the ties: TiedWeights((((0, 'embedding.weight'), "
                "(3, 'head.weight')),))",
            )
        result = [stages[s] for s in range(len(stages))]
    else:
        is_sequence = isinstance(stages, Iterable) and not isinstance(stages, str | bytes)
        result = [*stages] if is_sequence else [stages]
    for stage in result:
        if not hasattr(stage, "named_parameters"):
            raise UsageError(
                f"stages must be a model, or its stages in order, not {describe(stage)}",
                hint="schedir.find_tied_weights(stages)",
            )
    return result


def _find_shared_weights(
    modules: Iterable[ModuleLike],
) -> list[tuple[Any, list[ParameterLocation]]]:
    """Return each trained weight with its locations, as (index of the module, name)."""
    locations_by_id: dict[int, tuple[Any, list[ParameterLocation]]] = {}
    for s, module in enumerate(modules):
        for name, p in module.named_parameters(remove_duplicate=False):
            if getattr(p, "requires_grad", True):
                locations_by_id.setdefault(id(p), (p, []))[1].append((s, name))
    return [*locations_by_id.values()]


# ------------------------------------------------------------ tied weights of a program


def normalize_tied_stages(tied: object, shape: PipelineShape) -> TiedStages:
    """Return the value of `Program.tied_weights` for any accepted form of ties.

    Args:
        tied: True if the first and the last stage share a weight, False if no stages do, a
            `TiedWeights`, or sets of stages.
        shape: Shape of the pipeline.

    Returns:
        The sets of stages, in ascending order. With one stage, True means no tie.

    Raises:
        ShapeError: `tied` has another type, a set has fewer than two stages, or a stage does not
            exist. A `ModelTies` is refused, because it has no stages.
    """
    if isinstance(tied, bool):
        return ((0, shape.stages - 1),) if tied and shape.stages > 1 else ()
    if isinstance(tied, ModelTies):
        raise ShapeError(
            "tied_weights has the names of weights in the model, but a program needs the stages "
            "that share each weight",
            hint="schedir.find_tied_weights(model).locate_in_stages(stages)",
            fields=["tied_weights"],
        )
    sets: Any = tied.stages if isinstance(tied, TiedWeights) else tied
    try:
        result = {tuple(sorted({index(stage) for stage in stages})) for stages in sets}
    except TypeError:
        raise ShapeError(
            "tied_weights must be a bool, schedir.find_tied_weights(stages), or sets of stages "
            f"like ((0, 3), (1, 2)), not {tied!r:.60}",
            fields=["tied_weights"],
        ) from None
    for stages in result:
        if len(stages) < 2:
            raise ShapeError(
                f"each set of tied_weights needs two stages or more, but one is {[*stages]}",
                fields=["tied_weights"],
            )
        if stages[0] < 0 or stages[-1] >= shape.stages:
            raise ShapeError(
                f"tied_weights has {format_tied_stages(stages)}, but the stages are 0 to "
                f"{shape.stages - 1}",
                fields=["tied_weights"],
            )
    return tuple(sorted(result))


def format_tied_stages(stages: Iterable[int]) -> str:
    """Return stages that share weights as a text, such as `0=3`.

    Args:
        stages: The stages of one set.

    Returns:
        The numbers with `=` between them.
    """
    return "=".join(map(str, stages))


def format_tied_weights(tied: TiedStages, shape: PipelineShape) -> str:
    """Return tied weights as a text: yes for the first and the last stage, no, or `0=3,1=2`.

    Args:
        tied: Sets of stages.
        shape: Shape of the pipeline.

    Returns:
        The text.
    """
    if tied in ((), normalize_tied_stages(True, shape)):
        return "yes" if tied else "no"
    return ",".join(map(format_tied_stages, tied))


def parse_tied_weights(text: str) -> TiedStages | bool:
    """Return the ties that a text describes.

    Args:
        text: yes, no, or stages such as `0=3,1=2`.

    Returns:
        True for yes, False for no, and otherwise the sets of stages, which are not normalized.

    Raises:
        ValueError: The text has another form.
    """
    if text in ("yes", "no"):
        return text == "yes"
    if not re.fullmatch(r"\d{1,5}(=\d{1,5})+(,\d{1,5}(=\d{1,5})+)*", text, re.ASCII):
        raise ValueError(f"must be yes, no, or stages like 0=2,1=3, not {text!r}")
    return tuple(tuple(map(int, stages.split("="))) for stages in text.split(","))


TIED_WEIGHTS_TYPE: Final = FieldType(
    "must be yes, no, or stages like 0=3,1=2",
    parse_tied_weights,
    bool,
    to_text=format_tied_weights,
    resolve=lambda _, value, shape: normalize_tied_stages(value, shape),
    metavar="STAGES",
)


def find_sharing_ranks(stages: Iterable[int], shape: PipelineShape) -> tuple[int, ...]:
    """Return the ranks that have at least one of the given stages.

    Args:
        stages: Stages that share a weight, or one stage.
        shape: Shape of the pipeline.

    Returns:
        The ranks of all replicas of these stages, ascending.
    """
    return tuple(sorted({int(rank) for s in stages for rank in shape.replica_ranks[:, s]}))


def is_tied_across_ranks(stages: tuple[int, ...], shape: PipelineShape) -> bool:
    """Return whether ranks must communicate to sum the gradients of a tied weight.

    Args:
        stages: Stages that share the weight.
        shape: Shape of the pipeline.

    Returns:
        False if every rank that has one of these stages has all of them.
    """
    return any(
        not {*stages} <= {*shape.stages_on_rank[rank]} for rank in find_sharing_ranks(stages, shape)
    )


def find_reduction_groups(tied: TiedStages, shape: PipelineShape) -> list[tuple[int, ...]]:
    """Return the groups of ranks that sum gradients with each other.

    Each stage with several replicas has a group, and so has each weight that is tied across ranks.

    Args:
        tied: Sets of stages that share weights.
        shape: Shape of the pipeline.

    Returns:
        The ranks of each group. Each group occurs once.
    """
    stages = range(shape.stages) if shape.placement_rows > 1 else ()
    tied_across_ranks = [stages for stages in tied if is_tied_across_ranks(stages, shape)]
    return [
        *dict.fromkeys(
            find_sharing_ranks(group, shape)
            for group in [*([s] for s in stages), *tied_across_ranks]
        )
    ]


def number_tied_groups(tied: TiedStages, shape: PipelineShape) -> list[int]:
    """Return a group number for each rank, for `reduce_tied`.

    Two ranks are in one group if they sum the gradients of a common weight. Groups with a common
    rank are merged.

    Args:
        tied: Sets of stages that share weights.
        shape: Shape of the pipeline.

    Returns:
        For each rank, the smallest rank of its group.
    """
    groups = [*range(shape.ranks)]
    for stages in tied:
        if is_tied_across_ranks(stages, shape):
            merged = {groups[rank] for rank in find_sharing_ranks(stages, shape)}
            groups = [min(merged) if group in merged else group for group in groups]
    return groups
