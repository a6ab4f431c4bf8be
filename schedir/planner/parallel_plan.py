"""ParallelPlan: the layout of a model on a cluster, and its estimates of time and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_SEQUENCES
from schedir.ir.cost.zero_states import ZERO_LEVEL_COUNT
from schedir.predict.activation_bytes import Recompute
from schedir.retired_names import get_rename_hint

Attention = Literal["softmax", "flash"]
RankOrder = Literal["tp-pp-dp", "tp-dp-pp"]
OffloadMode = Literal["none", "fit"]
StatePlacement = Literal["device", "host"]


@dataclass(frozen=True)
class ParallelPlan:
    """A layout of a training run: parallel degrees, a schedule, and what makes it fit in memory.

    Attributes:
        pp: Ranks of the pipeline.
        tp: Tensor-parallel ranks of each stage.
        dp: Data-parallel replicas.  A plan takes pp * tp * dp * cp GPUs.
        stages_per_rank: Pipeline stages of each rank.
        microbatch_size: Sequences in a microbatch.
        microbatches: Microbatches of a replica in one step.
        schedule: The name of a built-in schedule, or the path of a `.sched` file.
        recompute: What a layer computes again in the backward: "none", "selective" or "full"
            (arXiv 2205.05198, section 5).
        zero: The stage of ZeRO, from 0 to 3.
        sequence_parallel: Whether norms and dropout are divided over the tensor-parallel ranks
            (arXiv 2205.05198, section 4.2.2).
        cp: Parts of a sequence (context parallelism).
        ep: Replicas that share the experts of a layer (expert parallelism).
        layers_per_stage: The number of layers of each stage; () divides them evenly.
        attention: "softmax" writes all scores to memory and reads them again (arXiv 2205.05198,
            section 4.1); "flash" keeps them on chip, and computes them again in the backward
            (arXiv 2307.08691).
        rank_order: The order in which processes are numbered, the innermost dimension first.
            "tp-pp-dp" is schedir's order, "tp-dp-pp" the default of Megatron-LM.  Parts of a
            sequence are numbered with the tensor-parallel ranks.
        offload: "fit" moves as few saved activations to the host as the memory of the GPUs
            requires; "none" moves none.
        optimizer_placement: Where the optimizer's state is between steps: "device" or "host".

    Raises:
        UsageError: A field has a value that it cannot have.

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
        words_of = {"recompute": Recompute, "attention": Attention, "rank_order": RankOrder,
                    "offload": OffloadMode, "optimizer_placement": StatePlacement}  # fmt: skip
        for name, words in ((name, get_args(kind)) for name, kind in words_of.items()):
            if getattr(self, name) not in words:
                value = getattr(self, name)
                raise UsageError(
                    f"plan: {name} is {' or '.join(words)}, not {describe(value)}",
                    hint=get_rename_hint(name, value),
                    fields=[name],
                )
        for f in fields(ParallelPlan):
            value, name = getattr(self, f.name), f.name
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(
                        f"plan: {name} is True or False, not {describe(value)}", fields=[name]
                    )
            elif isinstance(f.default, int):
                least = 0 if name == "zero" else 1
                if not _is_integer(value, least):
                    raise UsageError(
                        f"plan: {name} is a whole number from {least} on, not {describe(value)}",
                        fields=[name],
                    )
                if value > MAX_SEQUENCES:
                    raise UsageError(
                        f"plan: {name} is {describe(value)}; it must be at most {MAX_SEQUENCES}",
                        fields=[name],
                    )
        if self.zero >= ZERO_LEVEL_COUNT:
            raise UsageError(
                f"plan: zero is a level of ZeRO, from 0 to {ZERO_LEVEL_COUNT - 1}, not {self.zero}",
                fields=["zero"],
            )
        if isinstance(self.layers_per_stage, list):
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        parts = self.layers_per_stage
        if not isinstance(parts, tuple) or not all(
            _is_integer(each, 0) and each <= MAX_LAYERS for each in parts
        ):
            raise UsageError(
                f"plan: layers_per_stage are the layers of each stage, not {describe(parts)}",
                hint="layers_per_stage=(2, 3, 2)",
                fields=["layers_per_stage"],
            )

    @property
    def gpus(self) -> int:
        """How many it runs on."""
        return self.pp * self.tp * self.dp * self.cp

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.microbatches * self.microbatch_size

    @property
    def stages(self) -> int:
        """Parts of the model."""
        return self.pp * self.stages_per_rank

    @property
    def has_offload(self) -> bool:
        """Whether anything goes to the host and comes back."""
        return self.offload != "none" or self.optimizer_placement != "device"


def _is_integer(value: object, min_value: int) -> bool:
    """Return whether `value` is a whole number from `min_value` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= min_value


class PhaseTimes(NamedTuple):
    """Seconds of one microbatch in one stage: the forward, the backward of inputs and of weights,
    and what runs again before them."""

    F: float = 0.0
    I: float = 0.0
    W: float = 0.0
    R: float = 0.0

    @property
    def B(self) -> float:
        """The whole backward, with what runs again."""
        return self.I + self.W + self.R

    def plus(self, other: PhaseTimes, count: float = 1.0) -> PhaseTimes:
        """The sum with another, so many times."""
        return PhaseTimes(*(a + count * b for a, b in zip(self, other, strict=True)))


class StageTimes(NamedTuple):
    """What one microbatch takes on one GPU: work, and tensor-parallel collectives that nothing
    hides."""

    compute: PhaseTimes = PhaseTimes()
    tensor_parallel: PhaseTimes = PhaseTimes()

    @property
    def total(self) -> PhaseTimes:
        """Both."""
        return self.compute.plus(self.tensor_parallel)

    def plus(self, other: StageTimes, count: float = 1.0) -> StageTimes:
        """The sum with another, so many times."""
        return StageTimes(*(a.plus(b, count) for a, b in zip(self, other, strict=True)))


class StepBreakdown(NamedTuple):
    """Where the seconds of a step go, on the rank that decides: they add up to the step.

    >>> from schedir.planner import StepBreakdown
    >>> StepBreakdown(20, 0, 2, 0.5, 3, 0.5, 0).bubble
    3
    """

    compute: float  # of the model, as if it were all there is
    recompute: float  # what runs again
    tensor_parallel: float  # collectives inside of layers, as far as they are not hidden
    transfers: float  # messages between stages, as far as they are waited for
    bubble: float  # waiting for other stages
    data_parallel: float  # sums over replicas, gathers of ZeRO, as far as they are not hidden
    optimizer: float  # norms and updates
    host_copies: float = 0.0  # copies to the host's memory and back, as far as they are waited for


class GpuMemory(NamedTuple):
    """Bytes at the peak of the fullest GPU, by what they are.

    >>> from schedir.planner import GpuMemory
    >>> GpuMemory(weights=5e9, gradients=5e9, optimizer=7e9, activations=20e9, other=3e9).total
    40000000000.0
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    other: float  # buffers of communication, of the allocator, and what kernels work in

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


class HostMemory(NamedTuple):
    """Bytes that the GPU has on its host which has most there, at the peak of that.

    >>> from schedir.planner import HostMemory
    >>> HostMemory(optimizer=36e9, activations=50e9).total
    86000000000.0
    """

    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return sum(self)


NO_HOST_MEMORY: Final = HostMemory()  # of what has all on its GPU


@dataclass(frozen=True, kw_only=True)
class PlanEstimate(ParallelPlan):
    """A plan, and estimates of its step time and memory.

    Attributes:
        step_time: Seconds of a step, the sum of `breakdown`.
        breakdown: Seconds of each part of the step.
        memory: Bytes on the fullest GPU, by what they hold.
        flops_per_second: Operations of the model per second on one GPU.
        mfu: `flops_per_second` as a share of the peak in the GPU's data sheet.
        bottleneck: The largest part that another plan could reduce, or "memory".
        explanation: A sentence that explains `bottleneck`.
        is_simulated: Whether the step was simulated as a program; else a closed form gives its
        time.
        fits: Whether the plan fits in the memory of the GPUs and their hosts.
        host_memory: Bytes on the host.
        offload_comparison: With an offload, how the plan compares with the best plan without one.

    Example:
        >>> from schedir import planner
        >>> model, node = planner.load_model("gpt-22b"), planner.cluster_preset("a100")
        >>> found = planner.estimate_step(model, node, planner.ParallelPlan(tp=8, microbatches=4,
        ...     microbatch_size=4), exact=False)
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
    exact: bool = False
    fits: bool = True
    host_memory: HostMemory = NO_HOST_MEMORY
    offload_comparison: str = ""
