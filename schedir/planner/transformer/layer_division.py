"""Divide layers among stages and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from schedir.errors import UsageError
from schedir.planner.estimate.schedule_formulas import get_formulas
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec


class RankGroupShare(NamedTuple):
    """What some ranks of a pipeline, `rank_count` of them, have alike, the first of which is
    `first_rank`."""

    rank_count: int
    first_rank: int
    layers: int
    has_first_stage: bool  # whether they have the first stage, and with it the embedding
    has_last_stage: bool  # whether they have the last stage, and with it the head


def divide_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be.

    Where some have one more it is late stages, which keep the fewest microbatches; and the ends,
    which also have the embedding and the head, get theirs last.

    >>> divide_evenly(8, 4), divide_evenly(10, 4), divide_evenly(7, 4)
    ((2, 2, 2, 2), (2, 3, 3, 2), (2, 2, 2, 1))
    """
    each, more = divmod(layers, stages)
    turns = [*range(stages - 2, 0, -1), 0, stages - 1][:more]
    return tuple(each + (stage in turns) for stage in range(stages))


def get_layers_per_stage(model: TransformerSpec, plan: ParallelPlan) -> tuple[int, ...]:
    """Layers of each stage of a choice, in the order of stages.

    Raises UsageError where they do not divide evenly and the choice says nothing, or something that
    is no division.

    >>> from schedir.planner import TransformerSpec
    >>> model = TransformerSpec(layers=6, hidden=64, heads=4, vocab=256, sequence=32)
    >>> get_layers_per_stage(model, ParallelPlan(pp=3)), get_layers_per_stage(model,
    ...     ParallelPlan(pp=2, layers_per_stage=(2, 4)))
    ((2, 2, 2), (2, 4))
    """
    stages, given = plan.stages, plan.layers_per_stage
    if not given:
        if model.layers % stages:
            raise UsageError(
                f"{model.layers} layers do not divide into pp {plan.pp} x stages_per_rank "
                f"{plan.stages_per_rank} = {stages} "
                "stages",
                hint=f"layers_per_stage={divide_evenly(model.layers, stages)}"
                if stages <= model.layers
                else "",
                fields=["layers_per_stage", "pp", "stages_per_rank"],
            )
        return divide_evenly(model.layers, stages)
    if len(given) != stages or sum(given) != model.layers or min(given) < 0:
        raise UsageError(
            f"layers_of divides {sum(given)} layers into {len(given)} stages, and there are "
            f"{model.layers}, and pp {plan.pp} x stages_per_rank {plan.stages_per_rank} = "
            f"{stages} stages",
            fields=["layers_per_stage"],
        )
    return given


def compute_rank_shares(
    model: TransformerSpec, plan: ParallelPlan, *, merge_equal_ranks: bool = True
) -> tuple[RankGroupShare, ...]:
    """What the ranks of a choice have, those that are `merge_equal_ranks` as one."""
    layers, vee = get_layers_per_stage(model, plan), get_formulas(plan.schedule).is_vee
    return _compute_shares_cached(layers, plan.pp, vee, merge_equal_ranks)


@lru_cache(maxsize=4096)
def _compute_shares_cached(
    layers_per_stage: tuple[int, ...], p: int, vee: bool, merge_equal_ranks: bool
) -> tuple[RankGroupShare, ...]:
    stages, found = len(layers_per_stage), dict[object, RankGroupShare]()
    for rank in range(p):
        own = [*_iter_stages_on_rank(rank, p, stages // p, vee)]
        share = RankGroupShare(
            1, rank, sum(layers_per_stage[s] for s in own), 0 in own, stages - 1 in own
        )
        key = share[2:] if merge_equal_ranks else rank
        known = found.get(key, share._replace(rank_count=0))
        found[key] = known._replace(rank_count=known.rank_count + 1)
    return tuple(found.values())


def _iter_stages_on_rank(rank: int, p: int, v: int, vee: bool) -> Iterator[int]:
    """The stages of a rank."""
    for turn in range(v):
        yield turn * p + (p - 1 - rank if vee and turn % 2 else rank)
