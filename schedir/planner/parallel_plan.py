"""ParallelPlan: the layout of a model on a cluster, and its estimates of time and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MOST_LAYERS, MOST_SEQUENCES
from schedir.ir.cost.zero_states import LEVELS
from schedir.predict.activation_bytes import Recompute

Attention = Literal["softmax", "flash"]
Order = Literal["tpd", "tdp"]
Offload = Literal["none", "fit"]
Lies = Literal["device", "host"]


@dataclass(frozen=True)
class ParallelPlan:
    """One plan of many: degrees, a schedule, and what is done to make it fit.

    `p` ranks of a pipeline, `t` tensor-parallel slices, `d` replicas, and `c` parts of a sequence
    (context parallelism) make p t d c GPUs; `e` of the replicas share a layer's experts.  Each rank
    has `v` stages; a replica's step has `m` microbatches of `b` sequences.  `recompute` is what a
    layer runs again (arXiv 2205.05198, section 5), `zero` the stage of ZeRO, `sequence_parallel`
    whether norms and dropout are cut over the `t` slices (section 4.2.2 there).  `layers_of` are
    the layers of each stage, in the order of stages; () divides them evenly.  `attention` is how
    scores become weights: "softmax" writes all of them and reads them again (arXiv 2205.05198,
    section 4.1), "flash" keeps them on chip, and computes them again in the backward (2307.08691).

    `order` says which processes stand side by side, the nearest first: slices, and with them parts
    of a sequence, then the ranks of a pipeline, then replicas, as this project has it ("tpd"); or
    replicas before the ranks of a pipeline, as Megatron-LM has it ("tdp").

    `offload` "fit" moves of what forwards saved as little to the host meanwhile as the memory of
    the GPUs asks for, and with `states` "host" the optimizer's lie there between steps
    (docs/offload.md).

    >>> from schedir.planner import ParallelPlan
    >>> one = ParallelPlan(p=8, t=8, d=16, m=96)
    >>> one.gpus, one.batch, one.stages
    (1024, 1536, 8)
    """

    p: int = 1
    t: int = 1
    d: int = 1
    v: int = 1
    b: int = 1
    m: int = 1
    schedule: str = "one_f_one_b"
    recompute: Recompute = "none"
    zero: int = 0
    sequence_parallel: bool = False
    c: int = 1
    e: int = 1
    layers_of: tuple[int, ...] = ()
    attention: Attention = "softmax"
    order: Order = "tpd"
    offload: Offload = "none"
    states: Lies = "device"

    def __post_init__(self) -> None:
        words_of = {"recompute": Recompute, "attention": Attention, "order": Order,
                    "offload": Offload, "states": Lies}  # fmt: skip
        for name, words in ((name, get_args(kind)) for name, kind in words_of.items()):
            if getattr(self, name) not in words:
                raise UsageError(
                    f"choice: {name} is {' or '.join(words)}, not {describe(getattr(self, name))}",
                    fields=[name],
                )
        for f in fields(ParallelPlan):
            value, name = getattr(self, f.name), f.name
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(
                        f"choice: {name} is True or False, not {describe(value)}", fields=[name]
                    )
            elif isinstance(f.default, int):
                least = 0 if name == "zero" else 1
                if not _whole(value, least):
                    raise UsageError(
                        f"choice: {name} is a whole number from {least} on, not {describe(value)}",
                        fields=[name],
                    )
                if value > MOST_SEQUENCES:
                    raise UsageError(
                        f"choice: {name} is {describe(value)}; it must be at most {MOST_SEQUENCES}",
                        fields=[name],
                    )
        if self.zero >= LEVELS:
            raise UsageError(
                f"choice: zero is a level of ZeRO, from 0 to {LEVELS - 1}, not {self.zero}",
                fields=["zero"],
            )
        if isinstance(self.layers_of, list):
            object.__setattr__(self, "layers_of", tuple(self.layers_of))
        parts = self.layers_of
        if not isinstance(parts, tuple) or not all(
            _whole(each, 0) and each <= MOST_LAYERS for each in parts
        ):
            raise UsageError(
                f"choice: layers_of are the layers of each stage, not {describe(parts)}",
                hint="layers_of=(2, 3, 2)",
                fields=["layers_of"],
            )

    @property
    def gpus(self) -> int:
        """How many it runs on."""
        return self.p * self.t * self.d * self.c

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.d * self.m * self.b

    @property
    def stages(self) -> int:
        """Parts of the model."""
        return self.p * self.v

    @property
    def moves(self) -> bool:
        """Whether anything goes to the host and comes back."""
        return self.offload != "none" or self.states != "device"


def _whole(value: object, least: int) -> bool:
    """Return whether `value` is a whole number from `least` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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

    def plus(self, other: PhaseTimes, times: float = 1.0) -> PhaseTimes:
        """The sum with another, so many times."""
        return PhaseTimes(*(a + times * b for a, b in zip(self, other, strict=True)))


class StageTimes(NamedTuple):
    """What one microbatch takes on one GPU: work, and tensor-parallel collectives that nothing
    hides."""

    compute: PhaseTimes = PhaseTimes()
    tensor: PhaseTimes = PhaseTimes()

    @property
    def total(self) -> PhaseTimes:
        """Both."""
        return self.compute.plus(self.tensor)

    def plus(self, other: StageTimes, times: float = 1.0) -> StageTimes:
        """The sum with another, so many times."""
        return StageTimes(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


class StepBreakdown(NamedTuple):
    """Where the seconds of a step go, on the rank that decides: they add up to the step.

    >>> from schedir.planner import StepBreakdown
    >>> StepBreakdown(20, 0, 2, 0.5, 3, 0.5, 0).bubble
    3
    """

    compute: float  # of the model, as if it were all there is
    recompute: float  # what runs again
    tensor: float  # collectives inside of layers, as far as they are not hidden
    transfers: float  # messages between stages, as far as they are waited for
    bubble: float  # waiting for other stages
    data: float  # sums over replicas, gathers of ZeRO, as far as they are not hidden
    optimizer: float  # norms and updates
    host: float = 0.0  # copies to the host's memory and back, as far as they are waited for


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


NOWHERE: Final = HostMemory()  # of what has all on its GPU


@dataclass(frozen=True, kw_only=True)
class PlanEstimate(ParallelPlan):
    """A choice with what a step of it takes, in seconds, and holds, in bytes.

    `step` is sum(parts); `flops` what a GPU does of the model's operations in a second, and `mfu`
    that over the peak of its data sheet.  `bound` names the largest thing that another choice could
    make less, and `why` says it in a sentence.  `exact` tells that the step was simulated as a
    program, not taken from a closed form; `fits` whether the memory is there.  `host` is what lies
    on the host, and `beside` says what that is worth, beside the best plan that has all on the GPU.

    >>> from schedir import planner
    >>> model, node = planner.load_model("gpt-22b"), planner.cluster_preset("a100")
    >>> found = planner.estimate_step(model, node, planner.ParallelPlan(t=8, m=4, b=4), exact=False)
    >>> sum(found.parts) == found.step, found.fits, found.batch
    (True, False, 16)
    """

    step: float
    parts: StepBreakdown
    memory: GpuMemory
    flops: float
    mfu: float
    bound: str = ""
    why: str = ""
    exact: bool = False
    fits: bool = True
    host: HostMemory = NOWHERE
    beside: str = ""
