"""Tied weights: which stages hold a copy of the same weight.

A program knows stages alone: `tied` is `((0, 3),)` where stages 0 and 3 share weights.  A model
knows parameters by name, and while it is whole, which names are one object:

    ties = schedir.find_tied_weights(model)                     # lm_head.weight is
    transformer.wte.weight ties = ties.among(stages)                      # of the model's stages,
    shared or copied program = schedir.compile(schedule, shape, tied_weights=ties)

Nothing here imports torch: a module is what has `named_parameters`.
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

TiedStages = tuple[
    tuple[int, ...], ...
]  # ascending stages that share weights, each set once, sorted
ParameterLocation = tuple[int, str]  # a stage, and what a parameter is called there


class ModuleLike(Protocol):
    """What is asked of an nn.Module."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True)
class TiedWeights:
    """Weights that several stages hold: the places of each, stages ascending.

    `schedir.find_tied_weights(stages)` finds them; where a process makes its own stages alone, they
    are said. Raises UsageError for what is no such places.

    >>> from schedir import TiedWeights
    >>> ties = TiedWeights((((0, "embedding.weight"), (3, "head.weight")),))
    >>> ties.stages
    ((0, 3),)
    """

    weights: tuple[tuple[ParameterLocation, ...], ...] = ()

    def __post_init__(self) -> None:
        try:
            weights = tuple(
                tuple(sorted({(index(s), _require_name(name)) for s, name in places}))
                for places in self.weights
            )
        except (TypeError, ValueError):
            raise UsageError(
                f"of each tied weight the places are said, a stage and a name each, not "
                f"{describe(self.weights)}",
                hint="TiedWeights((((0, 'embedding.weight'), (3, 'head.weight')),))",
            ) from None
        object.__setattr__(self, "weights", weights)

    @property
    def stages(self) -> TiedStages:
        """What `Program.tied` is."""
        return tuple(sorted({tuple(sorted({s for s, _ in one})) for one in self.weights}))

    def __bool__(self) -> bool:
        return bool(self.weights)


def _require_name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


@dataclass(frozen=True)
class ModelTies:
    """What a whole model calls by several names: the names of each weight."""

    names: tuple[tuple[str, ...], ...] = ()
    parameters: tuple[object, ...] = field(default=(), repr=False, compare=False)  # the weights

    def __bool__(self) -> bool:
        return bool(self.names)

    def locate_in_stages(
        self, stages: Sequence[ModuleLike] | Mapping[int, ModuleLike]
    ) -> TiedWeights:
        """Where these weights are in all the stages of the model.

        They are found as objects, or, in stages that are copies, by their names in the model.
        Raises UsageError for a weight that no stage has, or of which one stage has two.
        """
        modules = _list_stages(stages)
        weights = []
        for names, weight in zip(self.names, self.parameters, strict=True):
            places, missed = [], {*names}
            for s, module in enumerate(modules):
                own = [*module.named_parameters(remove_duplicate=False)]
                here = [(name, p) for name, p in own if p is weight]
                missed -= {*names} if here else set()
                here = here or [(name, p) for name, p in own if name in names]
                missed -= {name for name, _ in here}
                if any(p is not here[0][1] for _, p in here):
                    raise UsageError(
                        f"{here[0][0]} and {here[1][0]} are one weight in the model, and two in "
                        f"stage {s}"
                    )
                places += [(s, here[0][0])] if here else []
            if missed:
                raise UsageError(
                    f"the model ties {' and '.join(names)}, and no stage has "
                    f"{' or '.join(sorted(missed))}",
                    hint="schedir.find_tied_weights(stages), before they are copied, finds ties by "
                    "any name",
                )
            weights += [tuple(places)] if len(places) > 1 else []
        return TiedWeights(tuple(weights))


@overload
def find_tied_weights(model: Sequence[ModuleLike] | Mapping[int, ModuleLike]) -> TiedWeights: ...
@overload
def find_tied_weights(model: ModuleLike) -> ModelTies: ...
def find_tied_weights(
    model: ModuleLike | Sequence[ModuleLike] | Mapping[int, ModuleLike],
) -> TiedWeights | ModelTies:
    """The trained weights that are one object in several places, before anything is copied.

    Of all the stages of a model, in order, the places of each: `compile` and the executor take
    them as `tied`.  Of a whole model, its names for each; `among(stages)` then finds the places.

    >>> import schedir
    >>> class Stage:  # of an nn.Module nothing is asked but this
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
        found = [
            (names, weight) for weight, names in _find_shared_weights([model]) if len(names) > 1
        ]
        return ModelTies(
            tuple(tuple(name for _, name in places) for places, _ in found),
            tuple(weight for _, weight in found),
        )
    shared = (
        dict(reversed(places)) for _, places in _find_shared_weights(_list_stages(model))
    )  # its first name
    return TiedWeights(tuple(tuple(sorted(one.items())) for one in shared if len(one) > 1))


def _list_stages(stages: Sequence[ModuleLike] | Mapping[int, ModuleLike]) -> list[ModuleLike]:
    """All stages, in order."""
    found: list[Any]
    if isinstance(stages, Mapping):
        if {*stages} != {*range(len(stages))}:
            raise UsageError(
                f"ties are found among all stages of a model, not {describe([*stages])} alone",
                hint="TiedWeights((((0, 'embedding.weight'), (3, 'head.weight')),)) says what "
                "is tied",
            )
        found = [stages[s] for s in range(len(stages))]
    else:
        several = isinstance(stages, Iterable) and not isinstance(stages, str | bytes)
        found = [*stages] if several else [stages]
    for stage in found:
        if not hasattr(stage, "named_parameters"):
            raise UsageError(
                "ties are found in a model, or among its stages in order, not in "
                f"{describe(stage)}",
                hint="schedir.find_tied_weights(stages)",
            )
    return found


def _find_shared_weights(
    modules: Iterable[ModuleLike],
) -> list[tuple[Any, list[ParameterLocation]]]:
    """Every trained weight with its places, in order."""
    places: dict[int, tuple[Any, list[ParameterLocation]]] = {}
    for s, module in enumerate(modules):
        for name, p in module.named_parameters(remove_duplicate=False):
            if getattr(p, "requires_grad", True):
                places.setdefault(id(p), (p, []))[1].append((s, name))
    return [*places.values()]


# ------------------------------------------------------------ of a program


def normalize_tied_stages(tied: object, shape: PipelineShape) -> TiedStages:
    """What `Program.tied` is, from a bool (first and last stage), Ties, or sets of stages.

    Raises ShapeError for what is none of these, or names stages that the shape has not.
    """
    if isinstance(tied, bool):
        return ((0, shape.stages - 1),) if tied and shape.stages > 1 else ()
    if isinstance(tied, ModelTies):
        raise ShapeError(
            "ties of a whole model do not say which stages have the weights",
            hint="schedir.find_tied_weights(model).among(stages)",
            fields=["tied_weights"],
        )
    sets: Any = tied.stages if isinstance(tied, TiedWeights) else tied
    try:
        found = {tuple(sorted({index(stage) for stage in one})) for one in sets}
    except TypeError:
        raise ShapeError(
            "tied_weights is a bool, schedir.find_tied_weights(stages), or stages like "
            f"((0, 3), (1, 2)), not {tied!r:.60}",
            fields=["tied_weights"],
        ) from None
    for one in found:
        if len(one) < 2:
            raise ShapeError(
                f"tied_weights are of two stages or more, not {[*one]}", fields=["tied_weights"]
            )
        if one[0] < 0 or one[-1] >= shape.stages:
            raise ShapeError(
                f"stages {format_tied_stages(one)} are tied, but there are {shape.stages} stages",
                fields=["tied_weights"],
            )
    return tuple(sorted(found))


def format_tied_stages(stages: Iterable[int]) -> str:
    """Stages that share weights, as text has them: `0=3`."""
    return "=".join(map(str, stages))


def format_tied_weights(tied: TiedStages, shape: PipelineShape) -> str:
    """What is tied, as text has it: yes for first and last stage, no, or `0=3,1=2`."""
    if tied in ((), normalize_tied_stages(True, shape)):
        return "yes" if tied else "no"
    return ",".join(map(format_tied_stages, tied))


def parse_tied_weights(text: str) -> TiedStages | bool:
    """What a text says to be tied: yes, no, or stages like `0=3,1=2`; ValueError for any other."""
    if text in ("yes", "no"):
        return text == "yes"
    if not re.fullmatch(r"\d{1,5}(=\d{1,5})+(,\d{1,5}(=\d{1,5})+)*", text, re.ASCII):
        raise ValueError(f"stages that share weights are like 0=2,1=3, not {text!r}")
    return tuple(tuple(map(int, stages.split("="))) for stages in text.split(","))


TIED_WEIGHTS_TYPE: Final = FieldType(
    "is yes or no, or stages like 0=3,1=2",
    parse_tied_weights,
    bool,
    to_text=format_tied_weights,
    resolve=lambda _, value, shape: normalize_tied_stages(value, shape),
    metavar="STAGES",
)


def find_sharing_ranks(stages: Iterable[int], shape: PipelineShape) -> tuple[int, ...]:
    """The ranks that hold a copy of what these stages share, ascending."""
    return tuple(sorted({int(rank) for s in stages for rank in shape.replica_ranks[:, s]}))


def is_tied_across_ranks(stages: tuple[int, ...], shape: PipelineShape) -> bool:
    """Whether ranks must meet to sum what these stages share: not where each holds all copies."""
    return any(
        not {*stages} <= {*shape.stages_on_rank[rank]} for rank in find_sharing_ranks(stages, shape)
    )


def find_reduction_groups(tied: TiedStages, shape: PipelineShape) -> list[tuple[int, ...]]:
    """The ranks that sum gradients with each other, each set of them once.

    They are the holders of a stage, where it has several, and those of copies of a tied weight.
    """
    stages = range(shape.stages) if shape.placement_rows > 1 else ()
    apart = [stages for stages in tied if is_tied_across_ranks(stages, shape)]
    return [
        *dict.fromkeys(find_sharing_ranks(one, shape) for one in [*([s] for s in stages), *apart])
    ]


def number_tied_groups(tied: TiedStages, shape: PipelineShape) -> list[int]:
    """For each rank a number, the same for ranks that one `reduce_tied` brings together.

    Two ranks meet that sum a weight, or that both meet a third.
    """
    party = [*range(shape.ranks)]
    for stages in tied:
        if is_tied_across_ranks(stages, shape):
            together = {party[rank] for rank in find_sharing_ranks(stages, shape)}
            party = [min(together) if one in together else one for one in party]
    return party
