"""Presets of training software: constants, bytes of states, and the division of a model."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from schedir.errors import UsageError, describe
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import Attention, ParallelPlan, RankOrder
from schedir.planner.transformer.layer_division import DivisionRule, divide_layers
from schedir.planner.transformer.memory_estimate import ADAM, ADAM_MAIN_GRADS, StateBytes
from schedir.planner.transformer.transformer_spec import TransformerSpec


class Stack(NamedTuple):
    """The properties of training software that change step times and memory.

    Attributes:
        constants: Constants of its kernels and libraries.
        state_bytes: Its bytes of weights, gradients and optimizer state per parameter.
        division: The rule by which it divides layers among stages.
        attention: Its implementation of attention.
        rank_order: The order in which it numbers ranks.
        source: The sources of these values.

    Example:
        >>> from schedir.planner import stack_preset
        >>> sum(stack_preset("megatron").state_bytes)
        18
    """

    constants: SoftwareConstants
    state_bytes: StateBytes
    division: DivisionRule
    attention: Attention
    rank_order: RankOrder
    source: str

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `schedir.planner.plan` for this software."""
        return {name: value for name, value in self._asdict().items() if name != "source"}

    def complete(self, model: TransformerSpec, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan with the attention, the rank order and the division of this software.

        Args:
            model: The model.
            plan: The plan. A plan with `layers_per_stage` keeps this division.
        """
        layers = plan.layers_per_stage or divide_layers(model, plan.stages, self.division)
        return replace(
            plan, layers_per_stage=layers, attention=self.attention, rank_order=self.rank_order
        )


_NANOTRON_CONSTANTS: Final = SoftwareConstants(
    speed_share=0.75,
    kernels_per_op=3.07,
    loss_share=0.5,
    tensors_per_layer=6,  # A layer of nanotron has six weights: two norms and four matrices.
    shard_copy_us=8.2,
    bucket_params=13.1e6,  # 25 MiB in 16 bits: bucket_cap_mb of DistributedDataParallel.
    all_reduce_overlap_share=1,  # nanotron wraps models in DistributedDataParallel without ZeRO.
    # FP32GradientAccumulator reads a 16-bit gradient, and reads and writes a 32-bit buffer.
    accumulation_bytes=10,
    crossing_us=191,
    mask_bytes=0,  # The Llama of nanotron has no dropout.
    gate_bytes=2,  # GLUActivation multiplies after the activation, so torch saves both factors.
    logit_bytes=9.2,
    gathered_bytes=3.7,
    unsharded_bytes=0.6,
    allocator_share=0.083,
    reserved_bytes=3e8,
)
_STACKS: Final = {
    "megatron": Stack(
        SoftwareConstants(), ADAM_MAIN_GRADS, "even", "flash", "tp-dp-pp",
        "the defaults of the constants; 32-bit gradients of bfloat16 models: Megatron-LM's "
        "--accumulate-allreduce-grads-in-fp32",
    ),
    "megatron-2021": Stack(
        SoftwareConstants(tensor_overlap_share=0), ADAM, "even", "softmax", "tp-dp-pp",
        "Megatron-LM of arXiv 2104.04473, before 2205.05198: no tensor-parallel sum is hidden",
    ),
    "megatron-fp8": Stack(
        SoftwareConstants(fp8_speedup=1.6), ADAM_MAIN_GRADS, "even", "flash", "tp-dp-pp",
        "as megatron, with products in FP8: fitted to the run of 64 B200 of docs/results/"
        "planner.md; the predicted memory is that of training in 16 bits, which is more",
    ),
    "megatron-fp4": Stack(
        SoftwareConstants(fp4_speedup=2.2), ADAM_MAIN_GRADS, "even", "flash", "tp-dp-pp",
        "as megatron-fp8, with products in FP4: fitted to the ratio of two steps of Llama 3.1 8B "
        "on a GB300, 9.05 s in 16 bits and 5.39 s in NVFP4: build.nvidia.com/station/"
        "nvfp4-pretraining",
    ),
    "nanotron": Stack(
        _NANOTRON_CONSTANTS, ADAM_MAIN_GRADS, "compute", "flash", "tp-dp-pp",
        "fitted to the runs of docs/results/planner-h100.md",
    ),
    "torchtitan": Stack(
        SoftwareConstants(), ADAM, "even", "flash", "tp-dp-pp",
        "torchtitan's docs/fsdp.md: 16-bit weights and gradients, 32-bit states; its times "
        "are not measured",
    ),
    "schedir": Stack(
        SoftwareConstants(recompute_ahead=1), ADAM, "even", "flash", "tp-pp-dp",
        "docs/how-to/fit-in-memory.md; times on GPUs are not measured",
    ),
}  # fmt: skip


def stack_presets() -> list[str]:
    """Return the names of the training software for which the planner has constants.

    Example:
        >>> from schedir.planner import stack_presets
        >>> [name for name in stack_presets() if "-" not in name]
        ['megatron', 'nanotron', 'schedir', 'torchtitan']
    """
    return sorted(_STACKS)


def stack_preset(name: str) -> Stack:
    """Return the preset of a training software by its name.

    Args:
        name: The name of the preset, such as "megatron".

    Raises:
        UsageError: No preset has this name.

    Example:
        >>> from schedir.planner import stack_preset
        >>> stack_preset("nanotron").division
        'compute'
    """
    if name not in _STACKS:
        matches = get_close_matches(str(name), _STACKS, 1)
        raise UsageError(
            f"there is no stack {describe(name)}",
            hint=f"did you mean {matches[0]!r}?"
            if matches
            else f"the stacks are {', '.join(stack_presets())}",
            fields=["stack"],
        )
    return _STACKS[name]
