"""Divide layers among stages and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from schedir.errors import UsageError
from schedir.planner.estimate.schedule_formulas import family
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec


class RankGroupShare(NamedTuple):
    """What some ranks of a pipeline, `number` of them, have alike, the first of which is `rank`."""

    number: int
    rank: int
    layers: int
    first: bool  # whether they have the first stage, and with it the embedding
    last: bool  # whether they have the last stage, and with it the head


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be.

    Where some have one more it is late stages, which keep the fewest microbatches; and the ends,
    which also have the embedding and the head, get theirs last.

    >>> even(8, 4), even(10, 4), even(7, 4)
    ((2, 2, 2, 2), (2, 3, 3, 2), (2, 2, 2, 1))
    """
    each, more = divmod(layers, stages)
    turns = [*range(stages - 2, 0, -1), 0, stages - 1][:more]
    return tuple(each + (stage in turns) for stage in range(stages))


def layers_of(model: TransformerSpec, choice: ParallelPlan) -> tuple[int, ...]:
    """Layers of each stage of a choice, in the order of stages.

    Raises UsageError where they do not divide evenly and the choice says nothing, or something that
    is no division.

    >>> from schedir.planner import TransformerSpec
    >>> model = TransformerSpec(layers=6, hidden=64, heads=4, vocab=256, sequence=32)
    >>> layers_of(model, ParallelPlan(pp=3)), layers_of(model,
    ...     ParallelPlan(pp=2, layers_per_stage=(2, 4)))
    ((2, 2, 2), (2, 4))
    """
    stages, given = choice.stages, choice.layers_per_stage
    if not given:
        if model.layers % stages:
            raise UsageError(
                f"{model.layers} layers do not divide into pp {choice.pp} x stages_per_rank "
                f"{choice.stages_per_rank} = {stages} "
                "stages",
                hint=f"layers_per_stage={even(model.layers, stages)}"
                if stages <= model.layers
                else "",
                fields=["layers_per_stage", "pp", "stages_per_rank"],
            )
        return even(model.layers, stages)
    if len(given) != stages or sum(given) != model.layers or min(given) < 0:
        raise UsageError(
            f"layers_of divides {sum(given)} layers into {len(given)} stages, and there are "
            f"{model.layers}, and pp {choice.pp} x stages_per_rank {choice.stages_per_rank} = "
            f"{stages} stages",
            fields=["layers_per_stage"],
        )
    return given


def shares(
    model: TransformerSpec, choice: ParallelPlan, *, alike: bool = True
) -> tuple[RankGroupShare, ...]:
    """What the ranks of a choice have, those that are `alike` as one."""
    layers, vee = layers_of(model, choice), family(choice.schedule).vee
    return _shares(layers, choice.pp, vee, alike)


@lru_cache(maxsize=4096)
def _shares(layers: tuple[int, ...], p: int, vee: bool, alike: bool) -> tuple[RankGroupShare, ...]:
    stages, found = len(layers), dict[object, RankGroupShare]()
    for rank in range(p):
        own = [*_own(rank, p, stages // p, vee)]
        share = RankGroupShare(1, rank, sum(layers[s] for s in own), 0 in own, stages - 1 in own)
        key = share[2:] if alike else rank
        known = found.get(key, share._replace(number=0))
        found[key] = known._replace(number=known.number + 1)
    return tuple(found.values())


def _own(rank: int, p: int, v: int, vee: bool) -> Iterator[int]:
    """The stages of a rank."""
    for turn in range(v):
        yield turn * p + (p - 1 - rank if vee and turn % 2 else rank)
