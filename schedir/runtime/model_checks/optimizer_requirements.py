"""Check that the optimizer and the options of gradients fit a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.model_checks.memory_overlap import require_no_views
from schedir.runtime.model_checks.step_isolation import ON_DEVICE_HINT, make_offload_error
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import (
    OptimizerLike,
    describe_options,
    has_known_effects,
    has_step_hooks,
    is_torch_optimizer,
    list_stepped_parameters,
    map_main_parameters,
    unwrap_optimizer,
)

# The optimizers of torch that step each parameter separately. LBFGS does not.
_PER_PARAMETER_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


def require_steppable(
    program: Program, stages: Mapping[int, nn.Module], optimizer: OptimizerLike | None
) -> None:
    """Check that an optimizer can update the parameters of the stages as the program requires.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        optimizer: The optimizer, or None.

    Raises:
        ModelError: The program may repeat an update, but the optimizer cannot repeat it. Or the
            program has a weight delay, but a weight has a view. Or the optimizer has a weight
            twice, or no weight of the stages.
    """
    if program.norm_check == "after_step" and program.has_backward:
        _require_repeatable(program, stages, optimizer)
    if program.has_backward and np.any(program.shape.weight_delay):
        require_no_views(stages, program.name)
    _require_no_duplicates(optimizer, program)
    require_stepped_stages(program, stages, optimizer)


def require_gradient_options(
    program: Program,
    gradients: GradientOptions,
    optimizer: OptimizerLike | None,
    extra_programs: Sequence[Program],
) -> None:
    """Check that the options of gradients fit the programs.

    Args:
        program: The first program.
        gradients: The options.
        optimizer: The optimizer, or None.
        extra_programs: The other programs.

    Raises:
        ModelError: There is a loss scale, but the program computes no gradient norm, or makes
            several updates. Or `accumulate_grads` is True, but the executor would change gradients
            or has extra programs.
    """
    if gradients.loss_scale is not None:
        _require_scalable(program)
    if gradients.accumulate_grads:
        for extra_program in extra_programs:
            raise ModelError(
                "accumulate_grads is True, but the executor has extra_programs",
                program=extra_program.name,
            )
        if program.zero:
            raise ModelError(
                f"accumulate_grads is True, but zero is {program.zero}: ZeRO keeps no full "
                "gradients",
                program=program.name,
                hint="zero=0, or accumulate_grads=False",
            )
        _require_accumulation_only(program, optimizer)


def _require_scalable(program: Program) -> None:
    """Check that a program can use a loss scale: it has a gradient norm and one update."""
    if not program.clip_grad_norm:
        raise ModelError(
            "a loss scale needs the norm of the gradients, but the program does not compute it",
            program=program.name,
            hint="compile(..., clip_grad_norm=True); max_norm=math.inf clips nothing",
        )
    if program.shape.optimizer_steps > 1:
        raise ModelError(
            "a loss scale needs a program with one update per step, but this one has "
            f"{program.shape.optimizer_steps}",
            program=program.name,
        )


def _require_repeatable(
    program: Program, stages: Mapping[int, nn.Module], optimizer: OptimizerLike | None
) -> None:
    """Check that the rank has an optimizer whose update can be undone and repeated."""
    require_known_optimizer(optimizer, program.name)
    trains = any(p.requires_grad for module in stages.values() for p in module.parameters())
    if optimizer is None and trains:
        raise ModelError(
            "norm_check is 'after_step', so the executor may have to repeat an update, but this "
            "rank has no optimizer",
            program=program.name,
            hint="pass optimizer=..., or compile(..., norm_check='before_step')",
        )


def _require_accumulation_only(program: Program, optimizer: OptimizerLike | None) -> None:
    """Check that the executor only accumulates gradients: no reduction, clipping or update."""
    applies_by_fact = {
        "sums gradients over replicas": program.dp > 1,
        "sums gradients over stage replicas": program.shape.placement_rows > 1
        and program.has_backward,
        "sums gradients over tensor-parallel ranks": program.sequence_parallel,
        "makes several updates": program.shape.optimizer_steps > 1,
        "computes the norm of the gradients": program.clip_grad_norm,
        "steps an optimizer": optimizer is not None,
    }
    if fact := next((text for text, applies in applies_by_fact.items() if applies), ""):
        raise ModelError(
            f"accumulate_grads is True, but the executor {fact}",
            program=program.name,
            hint="set accumulate_grads=False: each step then has its own gradients",
        )


def _require_no_duplicates(optimizer: OptimizerLike | None, program: Program) -> None:
    keys: set[object] = set()
    # Also check the 16-bit parameters of a MainOptimizer. Its main parameters are separate copies,
    # even if a 16-bit parameter occurs twice.
    rounded_groups = (
        [{"params": optimizer.parameters}] if isinstance(optimizer, MainOptimizer) else []
    )
    for group in (*rounded_groups, *getattr(optimizer, "param_groups", ())):
        for p in group["params"]:
            key = (p.data_ptr(), p.shape, p.stride()) if p.numel() and not p.is_meta else id(p)
            if key in keys:
                raise ModelError(
                    f"the optimizer has a weight of shape {list(p.shape)} twice",
                    program=program.name,
                    hint="remove duplicates: [*dict.fromkeys(parameters)]",
                )
            keys.add(key)


def require_known_optimizer(optimizer: OptimizerLike | None, program: str = "") -> None:
    """Check that the step of an optimizer changes only state that schedir can restore.

    Args:
        optimizer: The optimizer. None is accepted.
        program: The name of the program, for the error.

    Raises:
        ModelError: The optimizer is not one of torch's own, or its step has hooks.
    """
    inner = unwrap_optimizer(optimizer)
    if inner is None or has_known_effects(optimizer):
        return
    reason = "has hooks on its step" if has_step_hooks(inner) else "is not one of torch's own"
    name = type(
        optimizer if is_torch_optimizer(inner) and not has_step_hooks(inner) else inner
    ).__name__
    raise ModelError(
        f"norm_check is 'after_step', but the optimizer {name} {reason}, so schedir may be unable "
        "to undo its step",
        program=program,
        hint="compile(..., norm_check='before_step')",
    )


def require_stepped_stages(
    program: Program, stages: Mapping[int, nn.Module], optimizer: object
) -> None:
    """Check that an optimizer with parameters has at least one parameter of the stages.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        optimizer: The optimizer, or None.

    Raises:
        ModelError: All parameters of the optimizer are outside of the stages.
    """
    stepped_parameters = describe_options(optimizer)
    # Leave out stages with a tied weight: the optimizer may have the rank's copy of the weight.
    tied_stages = {stage for stages_of_weight in program.tied_weights for stage in stages_of_weight}
    trained_parameters = [
        p
        for stage, module in stages.items()
        if stage not in tied_stages
        for p in module.parameters()
        if p.requires_grad
    ]
    is_used = any(p in stepped_parameters for p in trained_parameters)
    if program.has_backward and stepped_parameters and trained_parameters and not is_used:
        raise ModelError(
            f"the optimizer has no parameter of the stages {[*stages]}: its steps would not train "
            "them",
            program=program.name,
            hint="create the optimizer from the parameters of the same modules that `stages` has, "
            "not of a copy of them",
        )


def require_placeable_state(
    programs: Sequence[Program],
    stages: Mapping[int, nn.Module],
    optimizer: OptimizerLike | None,
    parameter_copies: Mapping[nn.Parameter, nn.Parameter],
) -> None:
    """Check that the optimizer state can be kept in the tier that the first program sets.

    Args:
        programs: The programs of the executor. The check is needed only if one of them trains.
        stages: The stages of the rank, by number.
        optimizer: The optimizer, or None.
        parameter_copies: Parameter that several ranks of an `InProcessExecutor` share -> the copy
            that this rank uses.

    Raises:
        ModelError: The optimizer cannot step one stage after the other, or the rank has no
            optimizer.
    """
    has_backward = any(program.has_backward for program in programs)
    program = programs[0]
    if program.optimizer_placement != "device" and has_backward:
        parameters = {
            s: [parameter_copies.get(p, p) for p in module.parameters()]
            for s, module in stages.items()
            if s >= program.frozen_stages
        }
        require_stagewise_steps(program, parameters, optimizer)


def require_stagewise_steps(
    program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike | None
) -> None:
    """Check that one optimizer step per stage gives the same bits as one step of all stages.

    The optimizer must be a torch.optim.Optimizer, so that its state can be found. It must step each
    parameter separately. An optimizer that is not one of torch's own declares this by an attribute
    `elementwise`.

    Args:
        program: The program.
        parameters: The parameters of each trained stage.
        optimizer: The optimizer, or None if the rank has none.

    Raises:
        ModelError: The optimizer cannot step one stage after the other, or a rank with trained
            parameters has no optimizer.
    """
    refuse = partial(make_offload_error, program=program.name)
    trained_parameters = {
        p for stage_parameters in parameters.values() for p in stage_parameters if p.requires_grad
    }
    if optimizer is None:
        if trained_parameters and program.has_backward:
            raise refuse(
                "this rank has no optimizer, so there is no state to place",
                "pass optimizer=..., or compile(..., optimizer_placement='device')",
            )
        return
    inner, device_hint = unwrap_optimizer(optimizer), ON_DEVICE_HINT
    name = type(inner).__name__
    if isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer:
        raise refuse(
            f"{type(optimizer).__name__} may step other tensors than its main parameters",
            device_hint,
        )
    if not isinstance(inner, torch.optim.Optimizer):
        raise refuse(f"{name} is not a torch.optim.Optimizer, so its state is unknown", device_hint)
    if not getattr(
        inner, "elementwise", is_torch_optimizer(inner) and name in _PER_PARAMETER_OPTIMIZERS
    ):
        raise refuse(
            f"{name} steps all parameters together, so it cannot step one stage after the other"
            if is_torch_optimizer(inner)
            else f"{name} may not be elementwise, and it must step one stage after the other",
            device_hint
            if is_torch_optimizer(inner)
            else f"{name}.elementwise = True if it steps each element separately; or {device_hint}",
        )
    if has_step_hooks(inner):
        raise refuse(f"{name} has hooks on its step, which would run for each stage", device_hint)
    if program.optimizer_placement == "cpu_step" and any(
        group.get("capturable") for group in inner.param_groups
    ):
        raise refuse(f"{name} is capturable, which needs a step on the GPU", "capturable=False")
    require_own_parameters(optimizer, parameters, program.name)


def require_own_parameters(
    optimizer: object, parameters: Mapping[int, Sequence[Tensor]], program: str = ""
) -> None:
    """Check that an optimizer steps only parameters of the rank's trained stages.

    Args:
        optimizer: The optimizer.
        parameters: The parameters of each trained stage.
        program: The name of the program, for the error.

    Raises:
        ModelError: The optimizer steps a parameter that is in no trained stage of the rank.
    """
    inner, parameter_of_main = unwrap_optimizer(optimizer), map_main_parameters(optimizer)
    stage_parameters = {*chain.from_iterable(parameters.values())}
    for p in list_stepped_parameters(inner):
        parameter = parameter_of_main.get(p, p)
        if parameter.requires_grad and parameter not in stage_parameters:
            raise make_offload_error(
                f"{type(inner).__name__} steps a parameter of shape {list(p.shape)} that is "
                "in none of this rank's trained stages",
                f"use another optimizer for that parameter, or {ON_DEVICE_HINT}",
                program,
            )
