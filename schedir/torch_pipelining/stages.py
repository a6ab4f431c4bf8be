"""The stages of a rank, the wrappers of their modules, and the weights that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel as Replicated

from schedir.errors import ModelError, UsageError, describe
from schedir.ir.pipeline.tied_weights import TiedStages, TiedWeights
from schedir.ir.program import Program
from schedir.runtime.arguments import require_loss
from schedir.runtime.model_checks.tied_weight_requirements import (
    ParameterFingerprint,
    ParameterTable,
    StageFingerprints,
    fingerprint_parameters,
    list_local_tied_weights,
)
from schedir.runtime.parameters.tied_parameters import TiedWeight
from schedir.transports.rank_agreement import gather_or_raise

EXAMPLE = "[PipelineStage(module, stage_index, num_stages, device)]"


def require_stages(stages: object) -> list[Any]:
    """Return the stages of a rank in ascending order of their numbers.

    Args:
        stages: A sequence of torch's PipelineStages, or a single one.

    Raises:
        UsageError: `stages` contains anything but PipelineStages, or is empty.
    """
    is_sequence = isinstance(stages, Sequence) and not isinstance(stages, str)
    stage_list: list[Any] = [*stages] if is_sequence else [stages]  # type: ignore[misc]
    for stage in stage_list:
        if not isinstance(stage, _PipelineStageBase):
            raise UsageError(
                f"stages must be PipelineStages of torch, not {describe(stage)}",
                hint=EXAMPLE,
                fields=["stages"],
            )
    if not stage_list:
        raise UsageError("stages is empty: a rank needs a stage", hint=EXAMPLE, fields=["stages"])
    return sorted(stage_list, key=lambda stage: int(stage.stage_index))


def require_runnable(
    stages: Sequence[Any], microbatches: object, loss_fn: object, unsharded_stages: object
) -> None:
    """Refuse stages and options with which a Schedule cannot run.

    Args:
        stages: The stages of this rank.
        microbatches: The number of microbatches.
        loss_fn: The loss function, or None.
        unsharded_stages: The largest number of stages that may be unsharded at once.

    Raises:
        UsageError: Stages differ in `num_stages`, group or device. Or a number is not an integer of
            at least 1, `loss_fn` is not a function, or only submodules of a stage are wrapped.
    """
    for stage in stages[1:]:
        for attribute in ("num_stages", "group", "device"):
            first_value = getattr(stages[0], attribute)
            value = getattr(stage, attribute)
            if first_value != value:
                raise UsageError(
                    f"stage {stages[0].stage_index} has {attribute} {describe(first_value)}, but "
                    f"stage {stage.stage_index} of the same rank has {describe(value)}",
                    fields=["stages"],
                )
    for name, number in (("n_microbatches", microbatches), ("unsharded_stages", unsharded_stages)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(
                f"{name} must be an integer, 1 or more, not {describe(number)}", fields=[name]
            )
    if loss_fn is not None:
        require_loss(loss_fn)
    require_outermost_wrapper(stages)


def require_outermost_wrapper(stages: Sequence[Any]) -> None:
    """Refuse a stage whose submodules are sharded or replicated, but not the stage's module itself.

    torch's runtime checks only the outermost module.

    Args:
        stages: The stages of this rank.

    Raises:
        UsageError: Only submodules of a stage are wrapped.
    """
    for stage in stages:
        for is_wrapped, adjective, hint in (
            (_is_sharded, "sharded", "call fully_shard(stage.submod) after its modules"),
            (_is_replicated, "replicated", "DistributedDataParallel(torch.compile(module))"),
        ):
            is_wrapper = isinstance(stage.submod, FSDPModule | Replicated)
            is_outermost = is_wrapper and is_wrapped(stage.submod)
            if not is_outermost and any(map(is_wrapped, stage.submod.modules())):
                raise UsageError(
                    f"some modules of stage {stage.stage_index} are {adjective}, but the stage "
                    "itself is not: torch checks only the stage itself, so it would reduce "
                    "gradients in each backward or never",
                    hint=hint,
                    fields=["stages"],
                )


def _is_sharded(module: Any) -> bool:
    return isinstance(module, FSDPModule)


def _is_replicated(module: Any) -> bool:
    """Return whether a module is replicated by DistributedDataParallel, or by `replicate`.

    `replicate` has the effect of DDP without a wrapper module.
    """
    is_registered = "replicate" in (_get_registry(module) or ()) and not isinstance(
        module, FSDPModule
    )
    return isinstance(module, Replicated) or is_registered


def require_frozen_stages(stages: Sequence[Any], program: Program) -> None:
    """Refuse a trained stage for which the program has no backward.

    Args:
        stages: The stages of this rank.
        program: The program.

    Raises:
        ModelError: A frozen stage of the program has trained parameters.
    """
    for stage in stages:
        if stage.stage_index < program.frozen_stages and any(
            p.requires_grad for p in stage.submod.parameters()
        ):
            raise ModelError(
                f"the program has no backward of stage {stage.stage_index}, but the stage has "
                "trainable parameters",
                program=program.name,
                hint="stage.submod.requires_grad_(False), or a program without frozen stages",
            )


def require_declared_output(stage: Any, output: object, *, is_sent: bool) -> None:
    """Refuse an output that differs from the declared output or from the output of the first step.

    torch would not raise an error. It would send an output into a buffer with a different shape
    than the output, or would not send the gradient of the output back.

    Args:
        stage: A stage of torch.
        output: The output of its forward.
        is_sent: True if the next stage is on another rank.

    Raises:
        ModelError: A sent output has a different shape or dtype than the declared output. Or an
            output requires a gradient, but the declared output does not.
    """
    declared = stage._stage_meta.outputs or ()
    outputs = output if isinstance(output, tuple | list) else (output,)
    for k, (tensor, expected) in enumerate(zip(outputs, declared, strict=False)):
        output_type, required_type = (tensor.shape, tensor.dtype), (expected.shape, expected.dtype)
        if is_sent and type(tensor) is Tensor and output_type != required_type:
            raise ModelError(
                f"output {k} of stage {stage.stage_index} is {[*output_type[0]]} of "
                f"{output_type[1]}, but must be {[*required_type[0]]} of {required_type[1]}, as in "
                "the first step: torch's runtime needs the same shapes in all microbatches",
                hint="Schedule(..., runtime='schedir'), which runs microbatches of different "
                "shapes; or pad all microbatches to one shape",
                fields=["runtime"],
            )
        if tensor.requires_grad and not expected.requires_grad and stage.has_backward:
            raise ModelError(
                f"output {k} of stage {stage.stage_index} needs a gradient, but needed none in "
                "its output_args or in the first step",
                hint="use requires_grad=True in its output_args and in the input_args of the next "
                "stage, or a new Schedule if more stages are trained now",
            )


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return a stage's module without its wrappers; its parameters have their original names.

    Args:
        module: The module of a stage.
    """
    while True:
        wrapped = getattr(module, "_orig_mod", None)
        if isinstance(module, Replicated):
            wrapped = module.module
        if not isinstance(wrapped, nn.Module):
            return module
        module = wrapped


class SharedWeights:
    """Finds the tied weights of a rank: the weights that several stages share.

    All ranks of the group must create this object together.

    Args:
        stages: The stages of this rank.
        group: The process group of the pipeline.
        tied_weights: The tied weights that the user gives, or None.
        allow_identical_stages: True to allow equal weights of different stages without a tie.

    Attributes:
        weights: The tied weights that have copies on this rank. `bind_program` sets them.
        tied_stages: For each tied weight, the numbers of its stages.

    Raises:
        ModelError: The ties contradict each other or the stages.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        group: Any,
        tied_weights: TiedWeights | None,
        allow_identical_stages: bool,
    ) -> None:
        self._stages = stages
        self._group = group
        self._tied_weights = tied_weights
        self._allow_identical_stages = allow_identical_stages
        self.weights: list[TiedWeight] = []
        self._program: Program | None = None
        self._fingerprints = self._gather_fingerprints()
        table = ParameterTable(self._fingerprints, tied_weights, self._find_named_ties())
        self.tied_stages: TiedStages = tuple(
            sorted({tuple(s for s, _ in copies) for copies in table.weights if len(copies) > 1})
        )

    def _gather_fingerprints(self) -> list[StageFingerprints]:
        return gather_or_raise(
            lambda: fingerprint_parameters(self._unwrapped_modules()),
            self._group,
            [ParameterFingerprint],
        )

    def _unwrapped_modules(self) -> dict[int, nn.Module]:
        return {stage.stage_index: unwrap_module(stage.submod) for stage in self._stages}

    def _find_named_ties(self) -> TiedStages:
        """Return all stages with a `tied_weight` as one tie, or () if there are fewer than two.

        The `tied_weight` of each of these modules is a copy of the same weight.
        """
        named = {
            s
            for rank_fingerprints in self._fingerprints
            for s, fingerprints in rank_fingerprints.items()
            if any(p.is_named_tied for p in fingerprints)
        }
        return (tuple(sorted(named)),) if len(named) > 1 else ()

    def bind_program(self, program: Program) -> None:
        """Find the tied weights of this rank for a program.

        Args:
            program: The program.

        Raises:
            ModelError: The ties do not match the program, or equal weights are not tied.
        """
        self._program = program
        self.weights = self._find_weights(allow_identical_stages=self._allow_identical_stages)

    def _find_weights(self, *, allow_identical_stages: bool) -> list[TiedWeight]:
        assert self._program is not None
        return list_local_tied_weights(
            self._program,
            self._unwrapped_modules(),
            self._fingerprints,
            self._tied_weights,
            allow_identical_stages=allow_identical_stages,
        )

    def refresh(self) -> None:
        """Find the tied weights again if the parameters of a module were replaced.

        Parameters on the meta device have no values to compare. If a module had such parameters,
        all ranks compare the values at their first step.

        Raises:
            ModelError: The ties do not match the program, or equal weights are not tied.
        """
        if any(
            not p.values_digest
            for rank_fingerprints in self._fingerprints
            for fingerprints in rank_fingerprints.values()
            for p in fingerprints
        ):
            self._fingerprints = self._gather_fingerprints()
            self.weights = self._find_weights(allow_identical_stages=self._allow_identical_stages)
        tied_parameters = {p for weight in self.weights for p in weight.local_copies.values()}
        if tied_parameters and tied_parameters - {
            p for module in self._unwrapped_modules().values() for p in module.parameters()
        }:
            self.weights = self._find_weights(allow_identical_stages=True)


def require_reducible(stage: Any) -> None:
    """Refuse a stage under DDP whose gradients cannot be reduced outside of DDP.

    Args:
        stage: A stage with a DistributedDataParallel module.

    Raises:
        ModelError: DDP has a communication hook or mixed precision.
    """
    ddp = stage.submod
    for feature, is_used in (
        ("a communication hook", bool(getattr(ddp, "_comm_hooks", ()))),
        ("mixed precision", getattr(ddp, "mixed_precision", None) is not None),
    ):
        if is_used:
            raise ModelError(
                f"stage {stage.stage_index} is wrapped by DistributedDataParallel with {feature}, "
                f"but schedir reduces the gradients of the stage without {feature}",
                hint="use fully_shard; or use full backwards and DDP without static_graph, so that "
                "DDP reduces the gradients",
            )
