"""Parallel plans: the layout of a training run on a cluster, with estimates of time and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, get_args

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_SEQUENCES
from schedir.ir.cost.zero_states import ZERO_LEVEL_COUNT
from schedir.ir.notebook_repr import render_html
from schedir.predict.layer_activation_bytes import Recompute
from schedir.retired_names import get_rename_hint

Attention = Literal["softmax", "flash"]
RankOrder = Literal["tp-pp-dp", "tp-dp-pp"]
OffloadMode = Literal["none", "fit"]
StatePlacement = Literal["device", "host"]
_CHOICES: Final = {
    name: get_args(kind)
    for name, kind in (
        ("recompute", Recompute),
        ("attention", Attention),
        ("rank_order", RankOrder),
        ("offload", OffloadMode),
        ("optimizer_placement", StatePlacement),
    )
}


# The schedule of a plan whose order of instructions `improve_schedule` has found.
SEARCHED_SCHEDULE: Final = "search"


@explain_wrong_calls("ParallelPlan(pp=8, tp=8, dp=16, microbatches=96)")
@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """A layout of a training run: parallel degrees, a schedule and memory options.

    Args:
        pp: The number of pipeline ranks.
        tp: The number of tensor-parallel ranks of each stage.
        dp: The number of data-parallel replicas. A plan uses pp * tp * dp * cp GPUs.
        stages_per_rank: The number of pipeline stages of each rank.
        microbatch_size: The number of sequences in a microbatch.
        microbatches: The number of microbatches of a replica in one step.
        schedule: The name of a built-in schedule, or the path of a `.sched` file.
        recompute: The part of a layer that runs again in the backward: "none", "selective" or
            "full" (arXiv 2205.05198, section 5).
        zero: The ZeRO level, from 0 to 3.
        sequence_parallel: True if norms and dropout are divided among the tensor-parallel ranks
            (arXiv 2205.05198, section 4.2.2).
        cp: The number of ranks that share each sequence (context parallelism).
        ep: The number of replicas that share the experts of a layer (expert parallelism).
        layers_per_stage: The number of layers of each stage. () means that the layers are divided
            evenly.
        attention: "softmax" writes all scores to memory and reads them again (arXiv 2205.05198,
            section 4.1). "flash" keeps them on chip, and computes them again in the backward (arXiv
            2307.08691).
        rank_order: The order in which processes are numbered, the innermost dimension first.
            "tp-pp-dp" is the order of schedir. "tp-dp-pp" is the default of Megatron-LM.
            Context-parallel ranks are numbered directly after the tensor-parallel ranks.
        offload: "fit" offloads as few saved activations to the host as the memory of the GPUs
            requires. "none" offloads no activations.
        optimizer_placement: Where the optimizer state is between steps: "device" or "host".

    Raises:
        UsageError: A field has an invalid value.

    Example:
        >>> from schedir.planner import ParallelPlan
        >>> plan = ParallelPlan(pp=8, tp=8, dp=16, microbatches=96)
        >>> plan.gpus, plan.batch, plan.stages
        (1024, 1536, 8)
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    stages_per_rank: int = 1
    microbatch_size: int = 1
    microbatches: int = 1
    schedule: str = "one_f_one_b"
    recompute: Recompute = "none"
    zero: int = 0
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    layers_per_stage: tuple[int, ...] = ()
    attention: Attention = "softmax"
    rank_order: RankOrder = "tp-pp-dp"
    offload: OffloadMode = "none"
    optimizer_placement: StatePlacement = "device"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise UsageError(
                    f"plan: {name} must be {' or '.join(choices)}, not {describe(value)}",
                    hint=get_rename_hint(name, value),
                    fields=[name],
                )
        for f in fields(ParallelPlan):
            value, name = getattr(self, f.name), f.name
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(
                        f"plan: {name} must be True or False, not {describe(value)}", fields=[name]
                    )
            elif isinstance(f.default, int):
                lower = 0 if name == "zero" else 1
                upper = ZERO_LEVEL_COUNT - 1 if name == "zero" else MAX_SEQUENCES
                if not _is_integer(value, lower) or value > upper:
                    raise UsageError(
                        f"plan: {name} must be an integer from {lower} to {upper}, not "
                        f"{describe(value)}",
                        fields=[name],
                    )
        if isinstance(self.layers_per_stage, list):
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        parts = self.layers_per_stage
        if not isinstance(parts, tuple) or not all(
            _is_integer(layers, 0) and layers <= MAX_LAYERS for layers in parts
        ):
            raise UsageError(
                "plan: layers_per_stage must have the number of layers of each stage, not "
                f"{describe(parts)}",
                hint="layers_per_stage=(2, 3, 2)",
                fields=["layers_per_stage"],
            )

    @property
    def gpus(self) -> int:
        """The number of GPUs of the plan."""
        return self.pp * self.tp * self.dp * self.cp

    @property
    def layout(self) -> ParallelPlan:
        """A plan with only the degrees and the rank order, which decide the node of each rank."""
        names = ("pp", "tp", "dp", "cp", "ep", "rank_order")
        return ParallelPlan(**{name: getattr(self, name) for name in names})

    @property
    def batch(self) -> int:
        """The number of sequences of a step, over all replicas."""
        return self.dp * self.microbatches * self.microbatch_size

    @property
    def stages(self) -> int:
        """The number of pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def has_offload(self) -> bool:
        """Return whether activations or optimizer state are copied to the host."""
        return self.offload != "none" or self.optimizer_placement != "device"


def _is_integer(value: object, min_value: int) -> bool:
    """Return whether `value` is an integer of at least `min_value`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= min_value


class PhaseTimes(NamedTuple):
    """Times of one microbatch in one stage, in seconds, by phase.

    Attributes:
        F: The forward.
        I: The backward of the inputs.
        W: The backward of the weights.
        R: Recomputation before the backward.
    """

    F: float = 0.0
    I: float = 0.0
    W: float = 0.0
    R: float = 0.0

    @property
    def B(self) -> float:
        """Seconds of the full backward, including recomputation."""
        return self.I + self.W + self.R

    def plus(self, other: PhaseTimes, count: float = 1.0) -> PhaseTimes:
        """Return these times plus `count` times `other`.

        Args:
            other: The times to add.
            count: The factor of `other`.
        """
        return PhaseTimes(
            self.F + count * other.F,
            self.I + count * other.I,
            self.W + count * other.W,
            self.R + count * other.R,
        )


class StageTimes(NamedTuple):
    """Times of one microbatch on one GPU, in seconds.

    Attributes:
        compute: The time of compute.
        layer_collectives: The time of tensor-, context- and expert-parallel collectives that does
            not overlap with compute of the same microbatch.
        all_to_alls: The part of `layer_collectives` in which the all-to-alls of experts run.
    """

    compute: PhaseTimes = PhaseTimes()
    layer_collectives: PhaseTimes = PhaseTimes()
    all_to_alls: PhaseTimes = PhaseTimes()

    @property
    def total(self) -> PhaseTimes:
        """The sum of compute and collectives, by phase."""
        return self.compute.plus(self.layer_collectives)

    def plus(self, other: StageTimes, count: float = 1.0) -> StageTimes:
        """Return these times plus `count` times `other`, field by field.

        Args:
            other: The times to add.
            count: The factor of `other`.
        """
        return StageTimes(*(a.plus(b, count) for a, b in zip(self, other, strict=True)))


class StepBreakdown(NamedTuple):
    """The times of the parts of a step, on the rank with the most compute, in seconds.

    The sum of the parts is the step time.

    Attributes:
        compute: Compute of the model, without recomputation.
        recompute: Recomputation.
        layer_collectives: Tensor-, context- and expert-parallel collectives that compute does not
            hide.
        transfers: Messages between stages that compute does not hide.
        bubble: Time for which the rank waits for the compute of other ranks.
        data_parallel: Reductions over replicas and gathers of ZeRO that compute does not hide.
        optimizer: The gradient norm and the update.
        host_copies: Copies to the host memory and back that compute does not hide.
        data_loading: Waiting for training data (`Cluster.data_loading_us`).

    Example:
        >>> from schedir.planner import StepBreakdown
        >>> StepBreakdown(20, 0, 2, 0.5, 3, 0.5, 0).bubble
        3
    """

    compute: float
    recompute: float
    layer_collectives: float
    transfers: float
    bubble: float
    data_parallel: float
    optimizer: float
    host_copies: float = 0.0
    data_loading: float = 0.0


class GpuMemory(NamedTuple):
    """Memory of the GPU with the highest peak, at the time of this peak, in bytes.

    Attributes:
        weights: Weights.
        gradients: Gradients.
        optimizer: Optimizer state.
        activations: Saved activations, and the tensors of the loss.
        buffers: Buffers of messages between stages, and of unsharded gradients with ZeRO 1.
        allocator: Memory that the allocator reserves, but no tensor uses.
        process: Memory outside of the allocator: the GPU context, kernels, and buffers of
            collectives.

    Example:
        >>> from schedir.planner import GpuMemory
        >>> GpuMemory(5e9, 5e9, 7e9, activations=20e9, buffers=1e9, allocator=2e9).total
        40000000000.0
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    allocator: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all fields in bytes."""
        return sum(self)


class HostMemory(NamedTuple):
    """Host memory of the process with the highest peak, at the time of this peak, in bytes.

    Each GPU has one process.

    Attributes:
        optimizer: Optimizer state.
        activations: Offloaded activations.

    Example:
        >>> from schedir.planner import HostMemory
        >>> HostMemory(optimizer=36e9, activations=50e9).total
        86000000000.0
    """

    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """The sum of both fields in bytes."""
        return sum(self)


NO_HOST_MEMORY: Final = HostMemory()  # The host memory of a plan without offload.


@dataclass(frozen=True, kw_only=True)
class PlanEstimate(ParallelPlan):
    """A plan with estimates of its step time and memory.

    Attributes:
        step_time: Seconds of a step, the sum of `breakdown`.
        breakdown: Seconds of each part of the step.
        memory: Peak bytes of the GPU with the highest peak.
        flops_per_second: Floating-point operations per second on one GPU. Recomputation does not
            count.
        mfu: `flops_per_second` divided by the peak in the GPU's data sheet.
        bottleneck: The part of the step that limits the speed of the plan: a field of
            `StepBreakdown`, or "memory".
        explanation: A sentence that explains `bottleneck`.
        is_simulated: True if the program was simulated. Otherwise the step time is from the closed
            form.
        fits: True if the plan fits in the memory of the GPUs and their hosts.
        host_memory: Peak bytes of host memory of the process with the highest peak.
        offload_comparison: A sentence that compares the step time with another plan. A plan with
            offload is compared with the best plan without offload. The fastest plan, if it does
            not offload, is compared with the best plan with offload. "" for all other plans.

    Example:
        >>> from schedir import planner
        >>> model, node = planner.load_model("gpt-22b"), planner.cluster_preset("a100")
        >>> found = planner.estimate_step(model, node, planner.ParallelPlan(tp=8, microbatches=4,
        ...     microbatch_size=4), closed_form_only=True)
        >>> sum(found.breakdown) == found.step_time, found.fits, found.batch
        (True, False, 16)
    """

    step_time: float
    breakdown: StepBreakdown
    memory: GpuMemory
    flops_per_second: float
    mfu: float
    bottleneck: str = ""
    explanation: str = ""
    is_simulated: bool = False
    fits: bool = True
    host_memory: HostMemory = NO_HOST_MEMORY
    offload_comparison: str = ""

    def _repr_html_(self) -> str:
        return render_html(self)
