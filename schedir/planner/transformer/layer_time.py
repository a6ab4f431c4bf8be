"""Compute the times of a layer, an embedding, a head and a stage for one microbatch on one GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from schedir.errors import CommandHint, UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.planner.estimate.link_time import place_on_nodes
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PhaseTimes, StageTimes
from schedir.planner.transformer.layer_ops import list_embedding_ops, list_head_ops, list_layer_ops
from schedir.planner.transformer.op_time import OpTimes
from schedir.planner.transformer.transformer_spec import TransformerSpec


class GpuWork(NamedTuple):
    """The GPU, collective and host times of one microbatch in a part of the model, in seconds.

    Attributes:
        gpu: The time of compute on the GPU.
        layer_collectives: The time of collectives that compute does not hide.
        host: The time that the host takes to issue the kernels.
        all_to_alls: The part of `layer_collectives` in which the all-to-alls of experts run.
    """

    gpu: PhaseTimes = PhaseTimes()
    layer_collectives: PhaseTimes = PhaseTimes()
    host: PhaseTimes = PhaseTimes()
    all_to_alls: PhaseTimes = PhaseTimes()

    def plus(self, other: GpuWork, count: float = 1.0) -> GpuWork:
        """Return this work plus `count` times `other`, field by field.

        Args:
            other: The work to add.
            count: The factor of `other`.
        """
        return GpuWork(*(a.plus(b, count) for a, b in zip(self, other, strict=True)))

    @property
    def stage_times(self) -> StageTimes:
        """The longer of GPU time and host time, for the forward, the backward and recomputation.

        If the host takes longer, the GPU waits for the host, and this wait is a part of the compute
        time. In the backward, the wait is divided between I and W in proportion to their host
        times. Values are numbers or arrays.
        """
        gpu, tensor, host, all_to_alls = self
        gpu_time = gpu.plus(tensor)
        maximum, halves = np.maximum, host.I + host.W
        wait = maximum(0.0, halves - gpu_time.I - gpu_time.W) / np.where(halves > 0, halves, 1.0)
        waits = PhaseTimes(
            maximum(0.0, host.F - gpu_time.F),
            host.I * wait,
            host.W * wait,
            maximum(0.0, host.R - gpu_time.R),
        )
        return StageTimes(gpu.plus(waits), tensor, all_to_alls)


def layer_time(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
) -> StageTimes:
    """Return the time of one microbatch in one layer on one GPU, in seconds.

    The forward and the backward each take the time of the GPU or of the host, whichever is longer.
    A matrix product takes the time of its tiles or of its bytes, whichever is longer. Other kernels
    take the time of their bytes. A collective takes the time of a ring or a tree over the links of
    its group, whichever is shorter. `list_layer_ops` lists the operations with their sources.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Raises:
        UsageError: The degrees of the plan do not divide the layer evenly.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200,
        ...     sequence=2048)
        >>> node = planner.cluster_preset("a100")
        >>> for t in (1, 8):
        ...     times = planner.layer_time(gpt, node, planner.ParallelPlan(tp=t, microbatch_size=4))
        ...     sums = times.layer_collectives.F * 1e3
        ...     print(f"t {t}: {times.compute.F * 1e3:4.1f} ms, {sums:.1f} in sums")
        t 1: 41.8 ms, 0.0 in sums
        t 8:  6.0 ms, 1.7 in sums
    """
    return _to_python_floats(compute_work("layer", model, cluster, plan, constants))


def embedding_time(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
) -> StageTimes:
    """Return the time of one microbatch in the embedding on one GPU, in seconds.

    The time includes token and position embeddings, a dropout, and their gradients. See
    `layer_time`.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200,
        ...     sequence=2048)
        >>> taken = planner.embedding_time(gpt, planner.cluster_preset("a100"),
        ...     planner.ParallelPlan(microbatch_size=4)).total
        >>> f"{taken.F * 1e3:.1f} ms forward, {taken.B * 1e3:.1f} ms backward"
        '0.6 ms forward, 2.5 ms backward'
    """
    return _to_python_floats(compute_work("embedding", model, cluster, plan, constants))


def head_time(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
) -> StageTimes:
    """Return the time of one microbatch in the head on one GPU, in seconds.

    The head has a norm, the logits and the loss. See `layer_time`.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200,
        ...     sequence=2048)
        >>> node, choice = planner.cluster_preset("a100"), planner.ParallelPlan(tp=8,
        ...     microbatch_size=4)
        >>> head, layer = (part(gpt, node, choice).total for part in (planner.head_time,
        ...     planner.layer_time))
        >>> f"as long as {(head.F + head.B) / (layer.F + layer.B):.1f} layers"
        'as long as 0.5 layers'
    """
    return _to_python_floats(compute_work("head", model, cluster, plan, constants))


def stage_time(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    layers: int,
    is_first: bool = False,
    is_last: bool = False,
    constants: SoftwareConstants | None = None,
) -> StageTimes:
    """Return the time of one microbatch in one stage on one GPU, in seconds.

    The host can issue kernels of a later layer while the GPU computes an earlier layer. The time of
    a phase is therefore the longer of the GPU time and the host time of the stage. This time may be
    less than the sum of the layer times.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        layers: The number of layers of the stage.
        is_first: True if the stage has the embedding.
        is_last: True if the stage has the head.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Raises:
        UsageError: The degrees of the plan do not divide the layer evenly.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200,
        ...     sequence=2048)
        >>> node, choice = planner.cluster_preset("a100"), planner.ParallelPlan(pp=12, tp=8,
        ...     microbatch_size=4,
        ...     recompute="full")
        >>> for ends in ({}, {"is_first": True}, {"is_last": True}):
        ...     F, I, W, R = (1e3 * each for each in planner.stage_time(gpt, node, choice, 4,
        ...     **ends).total)
        ...     print(f"F {F:.1f}  I {I:.1f}  W {W:.1f}  again {R:.1f} ms", *ends)
        F 30.8  I 30.1  W 17.8  again 30.8 ms
        F 32.1  I 30.3  W 18.3  again 30.8 ms is_first
        F 34.7  I 33.9  W 20.7  again 30.8 ms is_last
    """
    work = GpuWork().plus(compute_work("layer", model, cluster, plan, constants), layers)
    for is_present, part in ((is_first, "embedding"), (is_last, "head")):
        if is_present:
            work = work.plus(compute_work(part, model, cluster, plan, constants))
    return _to_python_floats(work)


_LIST_OPS = {"layer": list_layer_ops, "embedding": list_embedding_ops, "head": list_head_ops}


def _to_python_floats(work: GpuWork) -> StageTimes:
    return StageTimes(*(PhaseTimes(*map(float, phases)) for phases in work.stage_times))


def compute_work(
    part: str,
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None,
) -> GpuWork:
    """Return the work of one microbatch in a part of the model, from a cache if possible.

    Args:
        part: "layer", "embedding" or "head".
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.

    Raises:
        UsageError: The degrees of the plan do not divide the layer evenly, or the FP8 or FP4 peak
            of the GPU is missing or too low for the speedup of the software.
    """
    has_full_backward = (
        plan.schedule not in SCHEDULE_FORMULAS
        or not SCHEDULE_FORMULAS[plan.schedule].has_split_backward
    )
    reduced_plan = ParallelPlan(
        pp=plan.pp if plan.ep > 1 else 1, tp=plan.tp, dp=plan.ep,
        microbatch_size=plan.microbatch_size,
        recompute=plan.recompute, sequence_parallel=plan.sequence_parallel, cp=plan.cp,
        ep=plan.ep, attention=plan.attention, rank_order=plan.rank_order,
    )  # fmt: skip
    constants = constants or SoftwareConstants()
    _require_low_precision(cluster, constants)
    crosses_nodes = (
        constants.crossing_us > 0
        and plan.pp > 1
        and plan.gpus == cluster.gpu_count
        and place_on_nodes(cluster, plan.layout).node_crossings > 0
    )
    return _compute_work_cached(
        part, model, cluster, reduced_plan, constants, has_full_backward, crosses_nodes
    )


def _require_low_precision(cluster: Cluster, constants: SoftwareConstants) -> None:
    """Raise an error if the FP8 or FP4 peak of the GPU is missing or too low for the speedup."""
    for precision, bits in (("fp8", 8), ("fp4", 4)):
        speedup_name, peak_name = f"{precision}_speedup", f"{precision}_peak"
        speedup, peak = getattr(constants, speedup_name), getattr(cluster, peak_name)
        advice = (
            f"set {peak_name} of the cluster to the dense {bits}-bit FLOP/s in the data sheet of "
            "the GPU"
        )
        hint = CommandHint(
            f"{advice}, or use software that trains in 16 bits",
            f"--stack megatron plans training in 16 bits. Or {advice}",
        )
        if speedup > 1 and peak is None:
            raise UsageError(
                f"{speedup_name} {speedup:g} needs GPUs that compute in {precision.upper()}, and "
                f"the cluster has no {peak_name}",
                hint=hint,
                fields=[speedup_name, peak_name],
            )
        if peak is not None and speedup > peak / cluster.peak_flops:
            raise UsageError(
                f"{speedup_name} {speedup:g} is more than the {peak_name} of the cluster divided "
                f"by its peak_flops, {peak / cluster.peak_flops:.3g}",
                hint=hint,
                fields=[speedup_name, peak_name],
            )


@lru_cache(maxsize=4096)
def _compute_work_cached(
    part: str,
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants,
    has_full_backward: bool,
    crosses_nodes: bool,
) -> GpuWork:
    """Compute the work of all phases of a part. Only the part "layer" can be recomputed."""
    gemms, passes, collectives = ops = _LIST_OPS[part](model, plan)
    op_times = OpTimes(cluster, plan, constants, has_full_backward, crosses_nodes)
    products = {gemm.name: op_times.time_gemm(gemm) for gemm in gemms}
    core = _sum_phases(products[gemm.name] for gemm in gemms if gemm.is_attention_core)
    core = core.plus(
        _sum_phases(op_times.time_memory_pass(op) for op in passes if op.is_attention_core)
    )
    gpu = _sum_phases([*products.values(), *map(op_times.time_memory_pass, passes)])
    gpu = PhaseTimes().plus(gpu, 1 / constants.speed_share)
    host = _sum_phases(op_times.time_issue(op) for ops_of_kind in ops for op in ops_of_kind)
    exposed = [
        op_times.time_exposed_collective(
            collective, products.get(collective.overlapped_gemm, PhaseTimes()), core
        )
        for collective in collectives
    ]
    tensor = _sum_phases(exposed)
    all_to_alls = PhaseTimes()
    for collective, times in zip(collectives, exposed, strict=True):
        if collective.kind == "all_to_all":
            all_to_alls = all_to_alls.plus(times)
    if part == "layer" and plan.recompute == "full":
        gpu, tensor, host, all_to_alls = (
            phases._replace(R=phases.F) for phases in (gpu, tensor, host, all_to_alls)
        )
    elif part == "layer" and plan.recompute == "selective":
        issued = _sum_phases(
            op_times.time_issue(op)
            for ops_of_kind in ops[:2]
            for op in ops_of_kind
            if op.is_attention_core
        )
        gpu = gpu._replace(R=core.F)
        host = host._replace(R=issued.F)
    if not op_times.has_gpu:  # The same cores issue the kernels and compute, one after the other.
        return GpuWork(gpu.plus(host), tensor, all_to_alls=all_to_alls)
    return GpuWork(gpu, tensor, host, all_to_alls)


def _sum_phases(phases: Iterable[PhaseTimes]) -> PhaseTimes:
    return PhaseTimes(*map(sum, zip(*phases, strict=True)))
