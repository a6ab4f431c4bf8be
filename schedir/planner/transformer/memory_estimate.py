"""Estimate the peak memory of each rank of a plan: weights, gradients, activations and more."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS, get_formulas
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import GpuMemory, ParallelPlan
from schedir.planner.plan_columns import (
    RECOMPUTE_MODES,
    SCHEDULE_NAMES,
    Floats,
    PlanColumns,
    RankGroupShares,
)
from schedir.planner.transformer.layer_ops import require_even_division
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.layer_activation_bytes import compute_layer_terms


class StateBytes(NamedTuple):
    """Bytes of weight, gradient and optimizer state for each parameter.

    Attributes:
        params: Bytes of a weight. An element of an activation has the same number of bytes.
        grads: Bytes of a gradient.
        optimizer: Bytes of the optimizer state, including float32 main parameters.

    Example:
        >>> from schedir.planner import StateBytes
        >>> sum(StateBytes(params=2, grads=4, optimizer=12))  # Adam with float32 gradients
        18
    """

    params: float
    grads: float
    optimizer: float


# Mixed-precision Adam has 16-bit weights and gradients, and 32-bit main parameters and moments
# (arXiv 1910.02054, section 3.1). The sum is 16 bytes per parameter.
ADAM: Final = StateBytes(2, 2, 12)
# Megatron-LM accumulates gradients of bfloat16 models in 32 bits: 18 bytes per parameter.
ADAM_MAIN_GRADS: Final = StateBytes(2, 4, 12)
# A model in 32 bits needs no main parameters: 16 bytes per parameter.
ADAM_32: Final = StateBytes(4, 4, 8)


def get_state_bytes(cluster: Cluster) -> StateBytes:
    """Return the bytes per parameter of training with Adam in the number type of a cluster.

    Args:
        cluster: The cluster. Its `itemsize` selects mixed precision or 32 bits.
    """
    return ADAM_32 if cluster.itemsize >= 4 else ADAM


def count_layer_params(model: TransformerSpec, t: Any = 1, e: Any = 1) -> tuple[Any, Any]:
    """Return the numbers of parameters of a layer on one GPU: outside of experts, and in experts.

    The matrices, and the biases of column-parallel products, are divided among tensor-parallel
    ranks. The parameters of `count_replicated_params` are not divided (arXiv 1909.08053, section
    3). With fewer `kv_heads` than tensor-parallel ranks, each rank has one key-value head.

    Args:
        model: The model.
        t: The tensor-parallel size, a number or an array.
        e: The expert-parallel size, a number or an array.

    Returns:
        The number of parameters that all replicas have, and the number of parameters of the experts
        on one of `e` replicas.
    """
    model.require_supported()
    hidden, width = model.hidden, model.attention_width
    columns = width / t + 2 * np.maximum(model.kv_heads / t, 1) * model.head_dim
    attention = (hidden + 1) * columns + hidden * width / t
    input_columns = model.ffn * (2 if model.gated else 1)
    network = ((hidden + 1) * input_columns + hidden * model.ffn) / t
    replicated, replicated_experts = count_replicated_params(model, e)
    if model.experts == 1:
        return attention + network + replicated, 0 * network
    return attention + replicated, network * model.experts / e + replicated_experts


def count_replicated_params(model: TransformerSpec, e: Any = 1) -> tuple[Any, Any]:
    """Return the number of parameters of a layer that each tensor-parallel rank has in full.

    These are the norms, the biases of row-parallel products, and the router of experts.

    Args:
        model: The model.
        e: The expert-parallel size, a number or an array.

    Returns:
        The number of parameters that all replicas have, and the number of parameters of the experts
        on one of `e` replicas.

    Example:
        >>> model = TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=32)
        >>> count_replicated_params(model)
        (384, 0)
    """
    norms, bias = 4 * model.hidden, model.hidden
    if model.experts == 1:
        return norms + 2 * bias, 0
    return norms + bias + model.hidden * model.experts, bias * model.experts / e


def count_end_params(model: TransformerSpec, t: Any = 1) -> tuple[Any, Any, Any]:
    """Return the parameter counts of the embedding, the last norm and the head on one GPU.

    Args:
        model: The model.
        t: The tensor-parallel size, a number or an array.

    Returns:
        The numbers of parameters of the token and position embeddings, of the last norm, and of the
        head matrix. The caller must not count a tied head matrix on a rank that also has the
        embedding.
    """
    table = -(-model.vocab // t) * model.hidden
    return table + model.position_params, 2 * model.hidden + 0 * table, table


def compute_saved_bytes(
    model: TransformerSpec,
    plan: ParallelPlan,
    itemsize: float = 2,
    constants: SoftwareConstants | None = None,
) -> tuple[float, float]:
    """Return the bytes that a layer saves for a microbatch, and the bytes of its recomputation.

    The terms are the terms of `compute_layer_terms` with these changes:

    - Keys and values have `kv_heads` heads, and a head has `head_dim` elements.
    - Terms of the feed-forward network have the width `ffn`. With a gate, the input of the
      activation function is counted twice, and software can also save the output of this function
      (`gate_bytes`). Each of the `active` experts of a token is counted.
    - A mask of dropout has `mask_bytes` per element.
    - Flash attention saves no scores, but 4 bytes per token and head.
    - A context-parallel rank has 1/cp of the tokens, and the attention scores between its tokens
      and all tokens.
    - A layer with full recomputation saves only its input. With sequence parallelism, a
      tensor-parallel rank saves 1/tp of the input.

    Args:
        model: The model.
        plan: The plan.
        itemsize: Bytes of an element. Masks and softmax sums have fixed sizes.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Returns:
        The saved bytes, and the additional bytes that the layer uses while it is recomputed.

    References:
        arXiv 2205.05198: the terms.
        arXiv 2307.08691, section 3.1.2: the softmax sums of flash attention.
    """
    constants = constants or SoftwareConstants()
    all_terms = _compute_saved_terms(model, plan, "none", itemsize, constants)
    kept_terms = _compute_saved_terms(model, plan, plan.recompute, itemsize, constants)
    if plan.recompute == "full" and plan.sequence_parallel:
        kept_terms = {term: size / plan.tp for term, size in kept_terms.items()}
    saved = sum(kept_terms.values())
    recomputed = sum(all_terms.values()) - sum(kept_terms.values())
    if plan.sequence_parallel and plan.recompute != "full":
        tokens = plan.microbatch_size * (model.sequence // plan.cp)
        saved += constants.gathered_bytes * (1 - 1 / plan.tp) * tokens * model.hidden
    return saved, recomputed


_SCORE_TERMS: Final = (
    "output of the softmax", "mask of its dropout", "output of its dropout",
)  # fmt: skip


def _compute_saved_terms(
    model: TransformerSpec,
    plan: ParallelPlan,
    recompute: Any,
    itemsize: float,
    constants: SoftwareConstants,
) -> dict[str, float]:
    tokens = model.sequence // plan.cp
    terms = compute_layer_terms(
        tokens, plan.microbatch_size, model.hidden, model.heads, plan.tp,
        recompute=recompute, sequence_parallel=plan.sequence_parallel,
    )  # fmt: skip
    width_scale = model.attention_width / model.hidden
    kv_scale = model.kv_heads / model.heads
    ffn_scale = model.ffn / (4 * model.hidden) * model.active
    scale = {
        "Q and K": width_scale * (1 + kv_scale) / 2,
        "V": width_scale * kv_scale,
        "input of the projection": width_scale,
        "input of the first linear layer": model.active,
        "input of GELU": ffn_scale * (2 if model.gated else 1),
        "input of the second linear layer": ffn_scale,
        **dict.fromkeys(_SCORE_TERMS, plan.cp * (plan.attention != "flash")),
    }
    result = {
        term: size
        * scale.get(term, 1)
        * (constants.mask_bytes if term.startswith("mask") else itemsize / 2)
        for term, size in terms.items()
    }
    if recompute == "full":
        return result
    rank_tokens = tokens * plan.microbatch_size / plan.tp
    if model.gated:
        result["output of GELU"] = constants.gate_bytes * model.ffn * model.active * rank_tokens
    if plan.attention == "flash":
        result["sums of the softmax"] = 4.0 * model.heads * rank_tokens
    return result


class MemoryTable(NamedTuple):
    """The memory and the parameters of each rank group, for many plans.

    Attributes:
        memory: Bytes, of shape (fields of `GpuMemory`, plans, groups).
        common_params: The number of parameters of a rank that all replicas have, before ZeRO shards
            them, of shape (plans, groups).
        expert_params: The number of parameters of the experts of a rank, of shape (plans, groups).
        outer_stage_params: The number of parameters of the first stage of a rank, of shape (plans,
            groups).
    """

    memory: Floats
    common_params: Floats
    expert_params: Floats
    outer_stage_params: Floats


class _RankParams(NamedTuple):
    """The numbers of parameters of the ranks before ZeRO shards them, of shape (plans, groups).

    Attributes:
        common: The parameters of a rank that all replicas have.
        experts: The parameters of the experts of a rank.
        inner: The parameters of the layers of one stage.
        embedding: The parameters of the embedding, on the first rank.
        head: The parameters of the last norm and of the head, on the last rank.
    """

    common: Floats
    experts: Floats
    inner: Floats
    embedding: Floats
    head: Floats


def _get_columns(plans: PlanColumns, *names: str) -> tuple[Any, ...]:
    """Return fields of all plans, each of shape (plans, 1)."""
    return tuple(getattr(plans, name)[:, None] for name in names)


def _count_rank_params(
    model: TransformerSpec, plans: PlanColumns, shares: RankGroupShares
) -> _RankParams:
    t, v, e = _get_columns(plans, "tp", "stages_per_rank", "ep")
    exists = shares.rank_count > 0
    common, network = count_layer_params(model, t, e)
    table, norm, matrix = count_end_params(model, t)
    own_matrix = shares.has_last_stage & ~(shares.has_first_stage & model.tied)
    embedding = shares.has_first_stage * table
    head = shares.has_last_stage * norm + own_matrix * matrix
    return _RankParams(
        common=(shares.layers * common + embedding + head) * exists,
        experts=shares.layers * network * exists,
        inner=shares.layers / v * (common + network) * exists,
        embedding=embedding,
        head=head,
    )


def _estimate_states(
    plans: PlanColumns, shares: RankGroupShares, params: _RankParams, state_bytes: StateBytes
) -> tuple[Floats, Floats, Floats]:
    """Return the bytes of weights, of gradients and of optimizer state, after sharding by ZeRO."""
    d, v, c, e, zero = _get_columns(plans, "dp", "stages_per_rank", "cp", "ep", "zero")
    exists = shares.rank_count > 0
    replicas = {"common": d * c, "experts": np.maximum(d * c // e, 1)}

    def state(size: float, name: str) -> Any:
        """Return the bytes that a rank has of a state with `size` bytes per parameter.

        The ZeRO level decides whether the replicas shard this state.
        """
        is_sharded = zero >= SHARDED_FROM_LEVEL[name]
        return size * sum(
            unsharded / np.where(is_sharded, replicas[kind], 1)
            for kind, unsharded in (("common", params.common), ("experts", params.experts))
        )

    # If ZeRO shards weights, two stages are unsharded at the same time
    # (passes/communication/unshard_placement.py). If ZeRO shards gradients, the gradients of one
    # stage are unsharded until they are reduced. With at most two stages per rank, all stages are
    # unsharded.
    has_few_stages, end_params = v <= 2, np.maximum(params.embedding, params.head)
    all_params = params.common + params.experts
    unsharded = {
        "params": np.where(has_few_stages, all_params, (2 * params.inner + end_params) * exists),
        "grads": np.where(has_few_stages, all_params, (params.inner + end_params) * exists),
    }
    weights, grads = (
        state(size, name) + (zero >= SHARDED_FROM_LEVEL[name]) * size * unsharded[name]
        for name, size in (("params", state_bytes.params), ("grads", state_bytes.grads))
    )
    return weights, grads, state(state_bytes.optimizer, "optimizer")


def _estimate_activations(
    model: TransformerSpec,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
    itemsize: float,
) -> tuple[Floats, Floats]:
    """Return the bytes of saved activations, and of the buffers at boundaries between stages."""
    p, t, v, b, m, c = _get_columns(
        plans, "pp", "tp", "stages_per_rank", "microbatch_size", "microbatches", "cp"
    )
    saved_per_layer, recomputed = compute_saved_by_plan(model, plans, itemsize, constants)
    live_stages, loss_microbatches, boundary_buffers = _count_in_flight(plans, shares)
    boundary_size = 1.0 * b * model.sequence / c * model.hidden
    sequence_shards = np.where(plans.sequence_parallel[:, None] > 0, t, 1)
    # The first stage saves the mask of the dropout after the embedding. The last stage saves the
    # inputs of the last norm and of the logits, and the tensors of the loss.
    activations = (
        live_stages * shares.layers / v * saved_per_layer
        + np.minimum(shares.layers, 1) * recomputed
    )
    activations = (
        activations
        + shares.has_first_stage
        * np.minimum(np.ceil(live_stages / v), m)
        * constants.mask_bytes
        * boundary_size
        / sequence_shards
    )
    activations = activations + shares.has_last_stage * (
        loss_microbatches * (2 * itemsize * boundary_size / sequence_shards)
        + _estimate_loss_bytes(model, plans, loss_microbatches, constants, itemsize)
    )
    boundary = itemsize * boundary_size / sequence_shards
    return activations, np.where(p > 1, boundary_buffers * boundary, 0.0)


def _estimate_loss_bytes(
    model: TransformerSpec,
    plans: PlanColumns,
    loss_microbatches: Floats,
    constants: SoftwareConstants,
    itemsize: float,
) -> Floats:
    """Return the bytes of the tensors of the loss on the last stage, of shape (plans, 1).

    The last stage saves the logits in 32 bits for the loss (arXiv 2205.05198, section 4.3). With a
    split backward, I replaces the 32-bit logits by their gradients in the number type of
    activations. These gradients remain until W.
    """
    t, b, c = _get_columns(plans, "tp", "microbatch_size", "cp")
    has_split = plans.get_formula_column("has_split_backward")[:, None]
    logits = 1.0 * b * model.sequence / c * -(-model.vocab // t)
    later_bytes = np.where(has_split, np.minimum(itemsize, 4), 4)
    total = constants.logit_bytes + (loss_microbatches - 1) * later_bytes
    return np.asarray(total * logits)


def compute_loss_bytes(
    model: TransformerSpec,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    itemsize: float = 2,
) -> float:
    """Return the bytes of the tensors of the loss, which are part of the activations.

    Args:
        model: The model.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.
        itemsize: Bytes of an element of an activation.

    Example:
        >>> model = TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=32)
        >>> compute_loss_bytes(model, ParallelPlan()) == 4 * 32 * 256
        True
    """
    plans = PlanColumns.from_plan(plan)
    _, loss_microbatches, _ = _count_in_flight(plans, plans.compute_shares(model))
    constants = constants or SoftwareConstants()
    return float(_estimate_loss_bytes(model, plans, loss_microbatches, constants, itemsize)[0, 0])


def compute_reclaimed_bytes(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants,
    used: Floats,
) -> Floats:
    """Return the bytes that the allocator reclaims on each pipeline rank, of shape (ranks,).

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software.
        used: The bytes that each pipeline rank uses if the allocator reclaims nothing.
    """
    if plan.has_offload or plan.schedule not in SCHEDULE_FORMULAS:
        return np.zeros(used.shape)
    plans = PlanColumns.from_plan(plan)
    shares = plans.compute_shares(model, merge_equal_ranks=False)
    reclaimed: Floats = _compute_reclaimed(model, cluster, plans, shares, constants, used[None])[0]
    return reclaimed


def _compute_reclaimed(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
    used: Floats,
) -> Floats:
    """Return the bytes of gathered tensors that the allocator reclaims.

    The host can free a tensor that a collective uses before the GPU has run the collective. The
    allocator reuses such memory late. If memory is exhausted, the allocator waits for the GPU, and
    then reuses the memory. The runs of docs/results/planner-h100.md show this only if a
    tensor-parallel group is on several nodes.

    Returns:
        Bytes of shape (plans, groups), like `used`.

    References:
        torch.Tensor.record_stream, and `release_cached_blocks` of torch's CUDACachingAllocator.cpp.
    """
    t, v, b, c = _get_columns(plans, "tp", "stages_per_rank", "microbatch_size", "cp")
    is_reclaimable = (t > cluster.gpus_per_node) & (plans.sequence_parallel[:, None] > 0)
    is_reclaimable &= plans.recompute[:, None] != RECOMPUTE_MODES.index("full")
    if not is_reclaimable.any() or not constants.gathered_bytes:
        return np.zeros(used.shape)
    tokens = 1.0 * b * (model.sequence // c)
    per_layer = constants.gathered_bytes * (1 - 1 / t) * tokens * model.hidden
    live_stages, _, _ = _count_in_flight(plans, shares)
    reclaimable = is_reclaimable * live_stages * shares.layers / v * per_layer
    available = (cluster.memory - constants.reserved_bytes) / (1 + constants.allocator_share)
    reclaimed: Floats = np.clip(used - np.floor(available), 0, reclaimable)
    return reclaimed


def estimate_memory(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
    state_bytes: StateBytes = ADAM,
) -> MemoryTable:
    """Estimate the memory of each rank group of many plans.

    Args:
        model: The model.
        cluster: The cluster. Its memory limits the memory that the allocator reuses late.
        plans: The plans.
        shares: The layers of each rank group, from `PlanColumns.compute_shares`.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.
    """
    v, zero = _get_columns(plans, "stages_per_rank", "zero")
    params = _count_rank_params(model, plans, shares)
    weights, grads, optimizer = _estimate_states(plans, shares, params, state_bytes)
    activations, buffers = _estimate_activations(
        model,
        plans,
        shares,
        constants,
        itemsize=state_bytes.params,  # Activations have the number type of weights.
    )
    all_params = params.common + params.experts
    buffers = buffers + constants.unsharded_bytes * (zero == 1) * all_params
    used = weights + grads + optimizer + activations + buffers
    reclaimed = _compute_reclaimed(model, cluster, plans, shares, constants, used)
    activations, used = activations - reclaimed, used - reclaimed
    # On CPUs, `schedir train` has no caching allocator and no GPU context (`get_trainer`).
    has_gpus = cluster.processors is None
    allocator = has_gpus * constants.allocator_share * used
    process = np.full(used.shape, has_gpus * constants.reserved_bytes)
    parts = (weights, grads, optimizer, activations, buffers, allocator, process)
    memory = np.stack([part * (shares.rank_count > 0) for part in parts])
    outer_stage_params = params.inner + params.embedding + np.where(v > 1, 0, params.head)
    return MemoryTable(memory, params.common, params.experts, outer_stage_params)


def compute_saved_by_plan(
    model: TransformerSpec,
    plans: PlanColumns,
    itemsize: float,
    constants: SoftwareConstants | None = None,
) -> tuple[Floats, Floats]:
    """Return `compute_saved_bytes` of each plan, as two arrays of shape (plans, 1).

    Args:
        model: The model.
        plans: The plans.
        itemsize: Bytes of an element.
        constants: Constants of the software. None means `SoftwareConstants()`.
    """
    first_rows, row_of_plan = plans.find_distinct(
        "tp", "microbatch_size", "recompute", "sequence_parallel", "cp"
    )
    distinct_bytes = [
        compute_saved_bytes(model, plans.plan_at(model, i), itemsize, constants)
        for i in first_rows.tolist()
    ]
    saved, recomputed = np.array(distinct_bytes).reshape(-1, 2)[row_of_plan].T
    return saved[:, None], recomputed[:, None]


def _count_in_flight(plans: PlanColumns, shares: RankGroupShares) -> tuple[Floats, Floats, Floats]:
    """Return the peaks of three counts in the schedule of each plan.

    The first array has the number of (stage, microbatch) pairs in flight, of shape (plans, groups).
    The second array has the number of microbatches for which the loss keeps tensors. The third
    array has the number of boundaries in buffers. The second and the third array have the shape
    (plans, 1).
    """
    stages = np.zeros(shares.first_rank.shape)
    ends, waiting = np.ones((2, len(plans), 1))
    for number in np.unique(plans.schedule).tolist():
        is_mine = plans.schedule == number
        formulas = SCHEDULE_FORMULAS[SCHEDULE_NAMES[number]]
        P, v, m = (
            getattr(plans, name)[is_mine][:, None]
            for name in ("pp", "stages_per_rank", "microbatches")
        )
        stages[is_mine] = formulas.live_activations(P, v, m, shares.first_rank[is_mine])
        ends[is_mine] = formulas.loss_microbatches(P, v, m)
        waiting[is_mine] = formulas.boundary_buffers(P, v, m)
    return stages, ends, waiting


def peak_memory(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> GpuMemory:
    """Return the peak memory of the rank with the highest peak, in bytes.

    All microbatches in flight have saved activations. Weights, gradients and optimizer state are
    sharded as the ZeRO level requires.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan. It must not offload.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Raises:
        UsageError: The planner does not support the schedule, the degrees do not divide the model
            evenly, or the plan offloads.

    References:
        arXiv 2205.05198, equations 1 to 6: activations.
        arXiv 1910.02054, section 5: ZeRO.

    Example:
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
    """Return the peak memory of each pipeline rank, in bytes.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan. It must not offload.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Raises:
        UsageError: See `peak_memory`.
    """
    get_formulas(plan.schedule)
    require_even_division(model, plan)
    state_bytes = state_bytes or get_state_bytes(cluster)
    plans = PlanColumns.from_plan(plan)
    shares = plans.compute_shares(model, merge_equal_ranks=False)
    memory_table = estimate_memory(
        model, cluster, plans, shares, constants or SoftwareConstants(), state_bytes
    ).memory
    return tuple(GpuMemory(*rank) for rank in memory_table[:, 0].T.tolist())
