"""Estimate the peak memory of each rank of a plan, by kind."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS, get_formulas
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import GpuMemory, ParallelPlan
from schedir.planner.plan_columns import SCHEDULE_NAMES, Floats, PlanColumns, RankGroupShares
from schedir.planner.transformer.layer_ops import require_even_division
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.activation_bytes import compute_layer_terms


class StateBytes(NamedTuple):
    """Bytes that training keeps of each number of a model: of weights and gradients as they are
    computed with, and of the optimizer's own.  Activations have as many as weights."""

    params: float
    grads: float
    optimizer: float


# Mixed precision Adam: 16 bits of weights and gradients, and 32 of main weights and two moments
# (arXiv 1910.02054, section 3.1): 16 bytes.
ADAM: Final = StateBytes(2, 2, 12)
# The same with gradients summed in 32 bits, as Megatron-LM does with bfloat16: 18 bytes.
ADAM_MAIN_GRADS: Final = StateBytes(2, 4, 12)
# All in 32 bits, without main weights: 16 bytes.
ADAM_32: Final = StateBytes(4, 4, 8)


def get_state_bytes(cluster: Cluster) -> StateBytes:
    """Those of the type that trains on a cluster, by the bytes of its numbers."""
    return ADAM_32 if cluster.itemsize >= 4 else ADAM


def count_layer_params(model: TransformerSpec, t: Any = 1, e: Any = 1) -> tuple[Any, Any]:
    """Numbers of a layer on one of `tp` slices: those that all replicas have, and those of its
    experts, of which `ep` replicas have a part each.

    Matrices and what goes with their columns are cut, `count_replicated_params` are not (arXiv
    1909.08053, section 3).  With fewer `kv_heads` than slices each has one.
    """
    hidden, width = model.hidden, model.hidden // model.heads
    columns = hidden / t + 2 * np.maximum(model.kv_heads / t, 1) * width
    attention = (hidden + 1) * columns + hidden * hidden / t
    into = model.ffn * (2 if model.gated else 1)
    network = ((hidden + 1) * into + hidden * model.ffn) / t
    whole, of_experts = count_replicated_params(model, e)
    if model.experts == 1:
        return attention + network + whole, 0 * network
    return attention + whole, network * model.experts / e + of_experts


def count_replicated_params(model: TransformerSpec, e: Any = 1) -> tuple[Any, Any]:
    """Numbers of a layer that each slice has whole, those of all replicas and those of experts:
    norms, what is added to whole outputs, and what sends tokens to experts.

    >>> model = TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=32)
    >>> count_replicated_params(model)
    (384, 0)
    """
    norms, added = 4 * model.hidden, model.hidden
    if model.experts == 1:
        return norms + 2 * added, 0
    return norms + added + model.hidden * model.experts, added * model.experts / e


def count_end_params(model: TransformerSpec, t: Any = 1) -> tuple[Any, Any, Any]:
    """Numbers on one of `tp` slices of the embedding with its positions; of the head's norm; and of
    its matrix, which a tied one shares with the embedding where both are on one rank."""
    table = -(-model.vocab // t) * model.hidden
    return table + model.sequence * model.hidden, 2 * model.hidden + 0 * table, table


def compute_saved_bytes(
    model: TransformerSpec, plan: ParallelPlan, itemsize: float = 2
) -> tuple[float, float]:
    """Bytes that a layer keeps of a microbatch, and that it holds more while it runs again what it
    did not keep: `compute_layer_terms` of arXiv 2205.05198, of this model.

    Keys and values are as many as `kv_heads`; the terms of the feed-forward network are as wide
    as it is, twice into a gate, and each token's of all `active` experts.  With "flash" no scores
    are kept but 4 bytes for each token and head (arXiv 2307.08691, section 3.1.2).  With `cp`
    parts of a sequence a rank has 1/cp of the tokens, and scores for all.  Recomputed layers keep
    their input, which is cut where norms are.  All but masks and sums of the softmax are numbers
    of `itemsize` bytes.
    """
    none = _compute_saved_terms(model, plan, "none", itemsize)
    kept = _compute_saved_terms(model, plan, plan.recompute, itemsize)
    if plan.recompute == "full" and plan.sequence_parallel:
        kept = {what: size / plan.tp for what, size in kept.items()}
    return sum(kept.values()), sum(none.values()) - sum(kept.values())


_SCORE_TERMS: Final = (
    "output of the softmax", "mask of its dropout", "output of its dropout",
)  # fmt: skip


def _compute_saved_terms(
    model: TransformerSpec, plan: ParallelPlan, recompute: Any, itemsize: float
) -> dict[str, float]:
    tokens = model.sequence // plan.cp
    terms = compute_layer_terms(
        tokens, plan.microbatch_size, model.hidden, model.heads, plan.tp,
        recompute=recompute, sequence_parallel=plan.sequence_parallel,
    )  # fmt: skip
    kv, wide = (
        model.kv_heads / model.heads,
        model.ffn / (4 * model.hidden) * model.active,
    )
    scale = {
        "Q and K": (1 + kv) / 2,
        "V": kv,
        "input of the first linear layer": model.active,
        "input of GELU": wide * (2 if model.gated else 1),
        "input of the second linear layer": wide,
        **dict.fromkeys(_SCORE_TERMS, plan.cp * (plan.attention != "flash")),
    }
    found = {
        what: size * scale.get(what, 1) * (1 if what.startswith("mask") else itemsize / 2)
        for what, size in terms.items()
    }
    if plan.attention == "flash" and recompute != "full":
        found["sums of the softmax"] = 4.0 * model.heads * tokens * plan.microbatch_size / plan.tp
    return found


class MemoryTable(NamedTuple):
    """What ranks hold, arrays of a row for each plan and a column for each share: bytes, by the
    fields of `GpuMemory` first; and the numbers of weights that ranks have, whole, those that all
    replicas have, and of experts."""

    memory: Floats
    common_params: Floats
    expert_params: Floats
    outer_stage_params: Floats  # of these, those of its first stage


def estimate_memory(
    model: TransformerSpec,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
    state_bytes: StateBytes = ADAM,
) -> MemoryTable:
    """What each share of many plans holds."""
    p, t, d, v, b, m, c, e, zero = (
        getattr(plans, name)[:, None]
        for name in (
            "pp",
            "tp",
            "dp",
            "stages_per_rank",
            "microbatch_size",
            "microbatches",
            "cp",
            "ep",
            "zero",
        )
    )
    there, first, last = shares.rank_count > 0, shares.has_first_stage, shares.has_last_stage
    common, network = count_layer_params(model, t, e)
    table, norm, matrix = count_end_params(model, t)
    own_matrix = last & ~(first & model.tied)
    before, behind = first * table, last * norm + own_matrix * matrix
    numbers = (shares.layers * common + before + behind) * there
    experts = shares.layers * network * there
    replicas = {"common": d * c, "experts": np.maximum(d * c // e, 1)}

    def state(size: float, name: str) -> Any:
        """Bytes of the parts that a replica has."""
        cut = zero >= SHARDED_FROM_LEVEL[name]
        return size * sum(
            whole / np.where(cut, replicas[of], 1)
            for of, whole in (("common", numbers), ("experts", experts))
        )

    # Where they are in parts, weights of two stages are whole at once
    # (analysis/memory/unshard_residency.py), and the gradient of one, until it is summed; of two
    # stages or fewer all are.
    inner = shares.layers / v * (common + network) * there
    few, end = v <= 2, np.maximum(before, behind)
    everything = numbers + experts
    whole = {
        "params": np.where(few, everything, (2 * inner + end) * there),
        "grads": np.where(few, everything, (inner + end) * there),
    }
    weights, grads = (
        state(size, name) + (zero >= SHARDED_FROM_LEVEL[name]) * size * whole[name]
        for name, size in (("params", state_bytes.params), ("grads", state_bytes.grads))
    )
    optimizer = state(state_bytes.optimizer, "optimizer")

    item = state_bytes.params  # bytes of an activation
    kept, again = compute_saved_by_plan(model, plans, item)
    stages, loss, waiting = _count_in_flight(plans, shares)
    split = np.array([SCHEDULE_FORMULAS[name].has_split_backward for name in SCHEDULE_NAMES])[
        plans.schedule
    ][:, None]
    tokens = 1.0 * b * model.sequence / c * model.hidden  # numbers of an activation
    cut = np.where(plans.sequence_parallel[:, None] > 0, t, 1)
    logits = 1.0 * b * model.sequence / c * -(-model.vocab // t)
    # The mask of the dropout behind the embedding; inputs of the last norm and of the logits;
    # logits in 32 bits for the loss (arXiv 2205.05198, section 4.3), of which halves of a backward
    # leave gradients as activations are until those of weights are made.
    activations = stages * shares.layers / v * kept + np.minimum(shares.layers, 1) * again
    activations = activations + first * np.minimum(np.ceil(stages / v), m) * tokens / cut
    activations = activations + last * (
        loss * (2 * item * tokens / cut)
        + 4 * logits
        + (loss - 1) * np.where(split, np.minimum(item, 4), 4) * logits
    )
    boundary = item * tokens / cut  # of what comes and goes, an activation and a gradient each
    buffers = np.where(p > 1, waiting * boundary, 0.0)
    used = weights + grads + optimizer + activations + buffers
    other = buffers + constants.allocator_share * used + constants.reserved_bytes
    memory = np.stack([x * there for x in (weights, grads, optimizer, activations, other)])
    return MemoryTable(memory, numbers, experts, inner + before + np.where(v > 1, 0, behind))


def compute_saved_by_plan(
    model: TransformerSpec, plans: PlanColumns, itemsize: float
) -> tuple[Floats, Floats]:
    """`compute_saved_bytes` of each plan, a column each."""
    first, which = plans.find_distinct(
        "tp", "microbatch_size", "recompute", "sequence_parallel", "cp"
    )
    each = [compute_saved_bytes(model, plans.plan_at(model, i), itemsize) for i in first.tolist()]
    kept, again = np.array(each).reshape(-1, 2)[which].T
    return kept[:, None], again[:, None]


def _count_in_flight(plans: PlanColumns, shares: RankGroupShares) -> tuple[Floats, Floats, Floats]:
    """Stage activations on each share, microbatches of the head, and boundaries, at most."""
    stages = np.zeros(shares.first_rank.shape)
    ends, waiting = np.ones((2, len(plans), 1))
    for number in np.unique(plans.schedule).tolist():
        mine = plans.schedule == number
        family = SCHEDULE_FORMULAS[SCHEDULE_NAMES[number]]
        P, v, m = (
            getattr(plans, name)[mine][:, None]
            for name in ("pp", "stages_per_rank", "microbatches")
        )
        stages[mine] = family.live_activations(P, v, m, shares.first_rank[mine])
        ends[mine], waiting[mine] = (
            family.loss_microbatches(P, v, m),
            family.boundary_buffers(P, v, m),
        )
    return stages, ends, waiting


def peak_memory(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> GpuMemory:
    """Bytes that the fullest rank of a choice holds at its peak.

    Activations are those of arXiv 2205.05198 (equations 1 to 6) of as many microbatches as the
    schedule has in flight; weights, gradients and the optimizer's are `state_bytes` for each
    number, in parts with ZeRO (arXiv 1910.02054, section 5); unless told, those of the cluster's
    type.

    Raises UsageError for a schedule that the planner does not know, and layers, heads or anything
    else that does not divide.

    >>> from schedir import planner
    >>> gpt3 = planner.TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200,
    ...     sequence=2048)
    >>> node = planner.cluster_preset("a100", nodes=8)
    >>> one = planner.peak_memory(gpt3, node, planner.ParallelPlan(pp=8, tp=8, microbatches=64,
    ...     sequence_parallel=True))
    >>> f"{one.optimizer / one.weights:.1f} {one.activations / 1e9:.1f} GB"
    '6.0 34.5 GB'
    """
    return max(
        estimate_by_rank(model, cluster, plan, constants, state_bytes=state_bytes),
        key=lambda x: x.total,
    )


def estimate_by_rank(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> tuple[GpuMemory, ...]:
    """The same of each rank of the pipeline."""
    get_formulas(plan.schedule)
    require_even_division(model, plan)
    state_bytes = state_bytes or get_state_bytes(cluster)
    plans = PlanColumns.from_plan(plan)
    shares = plans.compute_shares(model, merge_equal_ranks=False)
    found = estimate_memory(
        model, plans, shares, constants or SoftwareConstants(), state_bytes
    ).memory
    return tuple(GpuMemory(*rank) for rank in found[:, 0].T.tolist())
