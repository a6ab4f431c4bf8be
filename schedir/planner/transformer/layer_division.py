"""Divide the layers of a model among stages and ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from schedir.errors import UsageError
from schedir.planner.estimate.schedule_formulas import get_formulas
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec


class RankGroupShare(NamedTuple):
    """The part of the model that each rank of a group has.

    Attributes:
        rank_count: The number of ranks of the group.
        first_rank: The first rank of the group.
        layers: The number of layers of each rank.
        has_first_stage: True if the ranks have the first stage, and so the embedding.
        has_last_stage: True if the ranks have the last stage, and so the head.
    """

    rank_count: int
    first_rank: int
    layers: int
    has_first_stage: bool
    has_last_stage: bool


def divide_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible.

    If some stages need one more layer, these are late stages, because late stages have the fewest
    microbatches in flight. The first and the last stage get one more layer only after all other
    stages, because they also have the embedding and the head.

    Args:
        layers: The number of layers of the model.
        stages: The number of stages of the pipeline.

    Example:
        >>> divide_evenly(8, 4), divide_evenly(10, 4), divide_evenly(7, 4)
        ((2, 2, 2, 2), (2, 3, 3, 2), (2, 2, 2, 1))
    """
    quotient, remainder = divmod(layers, stages)
    longer_stages = [*range(stages - 2, 0, -1), 0, stages - 1][:remainder]
    return tuple(quotient + (stage in longer_stages) for stage in range(stages))


def divide_by_compute(model: TransformerSpec, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the compute per token is balanced.

    The compute of a layer is the number of weights with which each token is multiplied. The compute
    of the head is the number of weights of its matrix. A stage takes layers until this stage and
    all earlier stages together have their share of the sum. The last stages can remain without
    layers.

    Args:
        model: The model.
        stages: The number of stages of the pipeline.

    References:
        nanotron: `get_block_compute_costs` of its Llama, and `build_model` of helpers.py.

    Example:
        >>> from schedir.planner import TransformerSpec
        >>> model = TransformerSpec(16, 2048, 32, vocab=131072, sequence=4096, ffn=8192, gated=True)
        >>> divide_by_compute(model, 4)
        (5, 5, 5, 1)
    """
    layer = model.attention_weights + model.active * model.hidden * model.ffn * (
        3 if model.gated else 2
    )
    model_total = model.layers * layer + model.embedding_params
    counts, stage = [0] * stages, 0
    for number in range(1, model.layers + 1):
        counts[stage] += 1
        if number * layer * stages >= model_total * (stage + 1) and stage < stages - 1:
            stage += 1
    return tuple(counts)


DivisionRule = Literal["even", "compute"]


def divide_layers(model: TransformerSpec, stages: int, division: DivisionRule) -> tuple[int, ...]:
    """Return the number of layers of each stage, by `divide_evenly` or `divide_by_compute`.

    Args:
        model: The model.
        stages: The number of stages of the pipeline.
        division: "even" divides the number of layers. "compute" divides the compute of layers and
            head.
    """
    if division == "even":
        return divide_evenly(model.layers, stages)
    return divide_by_compute(model, stages)


def get_layers_per_stage(model: TransformerSpec, plan: ParallelPlan) -> tuple[int, ...]:
    """Return the number of layers of each stage of a plan.

    Args:
        model: The model.
        plan: The plan.

    Raises:
        UsageError: The stages do not divide the layers evenly and the plan has no
            `layers_per_stage`. Or `layers_per_stage` is not a division of the model's layers into
            the plan's stages.

    Example:
        >>> from schedir.planner import TransformerSpec
        >>> model = TransformerSpec(layers=6, hidden=64, heads=4, vocab=256, sequence=32)
        >>> get_layers_per_stage(model, ParallelPlan(pp=3)), get_layers_per_stage(model,
        ...     ParallelPlan(pp=2, layers_per_stage=(2, 4)))
        ((2, 2, 2), (2, 4))
    """
    stages, layers = plan.stages, plan.layers_per_stage
    if not layers:
        if model.layers % stages:
            raise UsageError(
                f"{model.layers} layers cannot be divided evenly among pp {plan.pp} x "
                f"stages_per_rank {plan.stages_per_rank} = {stages} stages",
                hint=f"layers_per_stage={divide_evenly(model.layers, stages)}"
                if stages <= model.layers
                else "",
                fields=["layers_per_stage", "pp", "stages_per_rank"],
            )
        return divide_evenly(model.layers, stages)
    if len(layers) != stages or sum(layers) != model.layers or min(layers) < 0:
        raise UsageError(
            f"layers_per_stage has {sum(layers)} layers in {len(layers)} stages: it must have "
            f"{model.layers} layers in pp {plan.pp} x stages_per_rank {plan.stages_per_rank} = "
            f"{stages} stages",
            fields=["layers_per_stage"],
        )
    return layers


def compute_rank_shares(
    model: TransformerSpec, plan: ParallelPlan, *, merge_equal_ranks: bool = True
) -> tuple[RankGroupShare, ...]:
    """Return the layers, the embedding and the head on each rank group of a plan.

    Args:
        model: The model.
        plan: The plan.
        merge_equal_ranks: True if ranks with equal shares form one group. Otherwise each rank is a
            group.
    """
    layers, vee = get_layers_per_stage(model, plan), get_formulas(plan.schedule).is_vee
    return _compute_shares_cached(layers, plan.pp, vee, merge_equal_ranks)


@lru_cache(maxsize=4096)
def _compute_shares_cached(
    layers_per_stage: tuple[int, ...], p: int, vee: bool, merge_equal_ranks: bool
) -> tuple[RankGroupShare, ...]:
    stages = len(layers_per_stage)
    groups = dict[object, RankGroupShare]()
    for rank in range(p):
        stages_on_rank = [
            loop * p + (p - 1 - rank if vee and loop % 2 else rank) for loop in range(stages // p)
        ]
        share = RankGroupShare(
            1,
            rank,
            sum(layers_per_stage[s] for s in stages_on_rank),
            0 in stages_on_rank,
            stages - 1 in stages_on_rank,
        )
        key = share[2:] if merge_equal_ranks else rank
        group = groups.get(key, share._replace(rank_count=0))
        groups[key] = group._replace(rank_count=group.rank_count + 1)
    return tuple(groups.values())
