"""Validate the arguments of public functions of the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from inspect import signature
from operator import index
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn

from schedir.errors import ExecutionError, ModelError, describe, require_type
from schedir.ir.isa.instructions import EP_COLLECTIVE_OPS, INSTRUCTIONS, Lane
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import DISK_TRIP
from schedir.runtime.parameters.mixed_precision import LossScale

_T = TypeVar("_T")
_DISK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.lane is Lane.DISK)
_PROGRAM_EXAMPLE = "schedir.compile(schedule, PipelineShape(ranks=2, microbatches=4))"


def require_shape(value: object) -> tuple[int, ...]:
    """Return the shape of a boundary tensor as a tuple of integers.

    Args:
        value: Integers of at least 1. A single integer is the length of a vector.

    Raises:
        ModelError: `value` is not a shape with integers of at least 1.
    """
    try:
        if isinstance(value, str | bytes | torch.Tensor | Set):
            raise TypeError
        sizes: Any = value if hasattr(value, "__iter__") else (value,)
        if any(isinstance(n, bool) for n in sizes):
            raise TypeError
        shape = tuple(map(index, sizes))
        if any(n < 1 for n in shape):
            raise TypeError
    except TypeError:
        raise ModelError(
            f"the shape of a boundary must be integers of at least 1, not {describe(value)}",
            hint="Boundary((4, 128, 512)), or Boundary((4, 128, 512), torch.bfloat16)",
        ) from None
    return shape


def require_program(value: object, name: str = "program") -> Program:
    """Return `value` if it is a program that executors can run.

    Args:
        value: The argument to check.
        name: Name of the argument, for the error message.

    Raises:
        UsageError: `value` is not a `Program`.
        ModelError: The program has expert parallelism and a ZeRO level above 1, or expert
            parallelism without an instruction that sends tokens to experts.
    """
    require_type(value, name, Program, _PROGRAM_EXAMPLE)
    assert isinstance(value, Program)
    if value.ep > 1 and value.zero > 1:
        raise ModelError(
            f"the program has ep={value.ep} and zero={value.zero}, but with expert parallelism "
            "only the optimizer state can be sharded",
            program=value.name,
            hint="zero=1",
        )
    if value.ep > 1 and value.used_opcodes.isdisjoint(EP_COLLECTIVE_OPS):
        raise ModelError(
            f"the program has ep={value.ep}, but no dispatch instruction, so no token would "
            "reach an expert of another replica",
            program=value.name,
            hint="compile(..., stage_segments='dc')",
        )
    return value


def require_stages(
    value: object, program: Program, rank: int | None = None
) -> dict[int, nn.Module]:
    """Return the stages of a rank, or all stages of the model, as a dict: number -> module.

    Args:
        value: A mapping from stage number to module with exactly the stages to return, or a
            sequence of all stages of the model in order. With `rank`, the function selects the
            stages of this rank from the sequence.
        program: The program that will run the stages.
        rank: The pipeline rank. By default the function returns all stages of the model.

    Raises:
        ModelError: `value` is neither a mapping nor a sequence, stages are missing or superfluous,
            or a stage is not an `nn.Module`.
    """
    all_stages = range(program.shape.stages)
    expected_stages = all_stages if rank is None else program.shape.stages_on_rank[rank]
    expected_form = "all stages of the model, in order" if rank is None else "{stage: module}"

    def refuse(fact: str) -> ModelError:
        return ModelError(fact, program=program.name, hint=f"pass {expected_form}")

    owner = "the program" if rank is None else f"rank {rank}"
    if isinstance(value, Mapping):
        stages = dict(value)
        if {*stages} != {*expected_stages}:
            raise refuse(
                f"`stages` has {describe([*stages])}, but {owner} needs {[*expected_stages]}"
            )
    elif isinstance(value, Sequence | nn.Sequential | nn.ModuleList) and not isinstance(value, str):
        if len(value) != len(all_stages):
            modules = f"{len(value)} module{'s' * (len(value) != 1)}"
            raise refuse(f"`stages` has {modules} instead of {len(all_stages)}")
        stages = {s: value[s] for s in expected_stages}
    else:
        raise refuse(f"`stages` must be a list or a mapping of modules, not {type(value).__name__}")
    for s, module in stages.items():
        if not isinstance(module, nn.Module):
            raise refuse(f"stage {s} must be an nn.Module, not {describe(module)}")
        _require_plain_stage(s, module, program)
    return stages


_REDUCING_WRAPPERS: Final = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "DataParallel",
)


def _find_reducing_wrapper(module: nn.Module) -> str:
    """Return the name of the wrapper that reduces a module's gradients, or "" if there is none.

    A module that `fully_shard` has wrapped counts only if its parameters are sharded.
    `schedir.torch_pipelining` gathers the parameters of such modules before it creates an executor.
    """
    base_names = {base.__name__ for base in type(module).__mro__}
    if "FSDPModule" in base_names:
        is_sharded = any(type(p).__name__ == "DTensor" for p in module.parameters())
        return "FSDPModule" if is_sharded else ""
    return next((wrapper for wrapper in _REDUCING_WRAPPERS if wrapper in base_names), "")


def _require_plain_stage(stage: int, module: nn.Module, program: Program) -> None:
    """Raise ModelError if a module reduces gradients itself, or a parameter has no shape yet."""
    for name, part in module.named_modules():
        if wrapper := _find_reducing_wrapper(part):
            location = f"module {name!r} of stage {stage}" if name else f"stage {stage}"
            options = (
                "dp=2, zero=3" if wrapper in ("FSDPModule", "FullyShardedDataParallel") else "dp=2"
            )
            raise ModelError(
                f"{location} is wrapped in {wrapper}, but the executor itself reduces the "
                "gradients of replicas",
                program=program.name,
                hint=f"pass the module without the wrapper, and compile(..., {options})",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"{name} of stage {stage} has no shape before the first forward of its lazy module",
                program=program.name,
                hint="call each stage once, in order, before you create the executor and the "
                "optimizer",
            )


def require_model_stages(value: object, *, allow_missing: bool = False) -> list[Any]:
    """Return all stages of a model as a list, for functions that have no program.

    Args:
        value: The stages, in order.
        allow_missing: True to accept None for a stage that another process has.

    Raises:
        ModelError: `value` is empty, or not a sequence of modules.
    """
    stages: list[Any] = []
    if isinstance(value, Sequence | nn.Sequential | nn.ModuleList):
        stages = [*value]
    if not stages or not all(
        isinstance(m, nn.Module) or (allow_missing and m is None) for m in stages
    ):
        raise ModelError(
            f"`stages` must be a list of at least one nn.Module, not {describe(value)}",
            hint="[nn.Linear(8, 8), nn.Linear(8, 8)]",
        )
    return stages


def count_microbatches(values: object, name: str, program: Program | None = None) -> int:
    """Return the number of microbatches.

    Args:
        values: A sequence with an entry for each microbatch, or a tensor that stacks them in its
            first dimension.
        name: The name of the argument in the error message.
        program: The program, for the error. By default the error names no program.

    Raises:
        ExecutionError: `values` is a string or a mapping of names. Or it has no length or no
            `__getitem__`.
    """
    try:
        has_names = isinstance(values, Mapping) and 0 not in values  # not numbers of microbatches
        if not hasattr(values, "__getitem__") or isinstance(values, str | bytes) or has_names:
            raise TypeError
        return len(values)  # type: ignore[arg-type]
    except TypeError:
        raise ExecutionError(
            f"{name} must be a sequence with one entry for each microbatch, not {describe(values)}",
            program=program.name if program else "",
        ) from None


def require_all_microbatches(values: object, name: str, program: Program, rank: int) -> None:
    """Check that there is one entry for each microbatch of a program.

    Args:
        values: The entries, one for each microbatch.
        name: The name of the argument in the error message.
        program: The program that runs the microbatches.
        rank: The pipeline rank, for the error message.

    Raises:
        ExecutionError: The number of entries differs from the number of microbatches.
    """
    count, expected_count = count_microbatches(values, name, program), program.shape.microbatches
    if count != expected_count:
        is_batch = isinstance(values, torch.Tensor) and count and count % expected_count == 0
        raise ExecutionError(
            f"rank {rank} has {count} {name} for {expected_count} microbatches",
            program=program.name,
            hint=f"divide a batch into microbatches: {name}.unflatten(0, ({expected_count}, -1))"
            if is_batch
            else "",
        )


def require_callable(value: _T, name: str, example: str) -> _T:
    """Return `value` if it is callable.

    Args:
        value: The argument to check.
        name: The name of the argument in the error message.
        example: An example of a correct argument, which the error gives as its hint.

    Raises:
        ModelError: `value` is not callable.
    """
    if not callable(value):
        raise ModelError(f"{name} must be callable, not {describe(value)}", hint=example)
    return value


def require_loss(value: _T) -> _T:
    """Return `value` if it is a loss function or a loss module.

    Args:
        value: The argument to check.

    Raises:
        ModelError: `value` is not callable, is a module class instead of an instance, or does not
            take two arguments.
    """
    example = "loss=lambda y, target: (y - target).square().sum()"
    if isinstance(value, type) and issubclass(value, nn.Module):
        fact = f"the loss must be an instance, such as {value.__name__}(), not {describe(value)}"
        raise ModelError(fact, hint=example)
    require_callable(value, "the loss", example)
    function = value.forward if isinstance(value, nn.Module) else cast(Callable[..., object], value)
    try:
        loss_signature = signature(function)
    except (TypeError, ValueError):  # Python does not know the parameters of this function.
        return value
    try:
        loss_signature.bind_partial(None, None)
    except TypeError:
        fact = f"the loss must take (output, target), but this one takes {loss_signature}"
        raise ModelError(fact, hint=example) from None
    return value


def require_optimizer_factory(
    value: Callable[..., _T] | None, example: str
) -> Callable[..., _T] | None:
    """Return `value` if it is callable or None.

    Args:
        value: A function that creates the optimizer of each rank, such as its class, or None.
        example: An example of a correct argument, which the error gives as its hint.

    Raises:
        ModelError: `value` is not callable, for example an optimizer instead of its class.
    """
    if value is None:
        return None
    return require_callable(value, "the function that creates the optimizer of a rank", example)


def require_optimizer(value: _T) -> _T:
    """Return `value` if it is an optimizer or None.

    Args:
        value: The argument to check.

    Raises:
        ModelError: `value` has no `step` method, is a class instead of an instance, or is a
            learning-rate scheduler. Or its `step` method requires an argument.
    """
    step = getattr(value, "step", None)
    if value is not None and (isinstance(value, type) or not callable(step)):
        raise ModelError(
            f"optimizer must be an object with a step method, not {describe(value)}",
            hint="optimizer=torch.optim.AdamW(module.parameters())",
            fields=["optimizer"],
        )
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        raise ModelError(
            "optimizer must be an optimizer, not the learning-rate scheduler "
            f"{type(value).__name__}",
            hint="give the optimizer itself, and call scheduler.step() after each step of the run",
            fields=["optimizer"],
        )
    if name := _find_required_parameter(type(value)):
        raise ModelError(
            f"the executor calls optimizer.step() without arguments, but {type(value).__name__}"
            f".step needs the argument {name!r}",
            hint="use an optimizer with a step without arguments, such as torch.optim.AdamW",
            fields=["optimizer"],
        )
    return value


def _find_required_parameter(optimizer_class: type) -> str:
    """Return the first parameter of a class's `step` that has no default, or an empty string.

    The `step` of the class is read, because a learning-rate scheduler replaces that of the object.
    """
    step = getattr(optimizer_class, "step", None)
    if not isinstance(step, FunctionType):
        return ""
    for parameter in [*signature(step).parameters.values()][1:]:  # without self
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            return parameter.name
    return ""


def require_rank(value: int, program: Program) -> int:
    """Return `value` if it is a pipeline rank of a program.

    Args:
        value: The argument to check.
        program: The program with the ranks 0 to `program.shape.ranks` - 1.

    Raises:
        ModelError: The program has no such rank.
    """
    if value in range(program.shape.ranks):
        return value
    raise ModelError(
        f"rank must be from 0 to {program.shape.ranks - 1}, not {describe(value)}",
        program=program.name,
        hint="pass transport.rank, the pipeline rank of this process",
    )


def require_loss_scale(value: LossScale | None) -> LossScale | None:
    """Return `value` if it is a loss scale or None.

    Args:
        value: The argument to check.

    Raises:
        UsageError: `value` is neither a `LossScale` nor None.
    """
    if value is not None:
        require_type(value, "loss_scale", LossScale, "GradientOptions(loss_scale=LossScale())")
    return value


def require_transport(value: _T) -> _T:
    """Return `value` if it is a transport.

    Args:
        value: The argument to check.

    Raises:
        ModelError: `value` has no `check_agreement` method, so it is not a transport.
    """
    if isinstance(value, type) or not hasattr(value, "check_agreement"):
        raise ModelError(f"transport cannot be {describe(value)}", hint="GlooTransport(program)")
    return value


def require_seed(value: object) -> int:
    """Return a seed as an `int`.

    Args:
        value: Any integer.

    Raises:
        ModelError: `value` is not an integer.
    """
    try:
        return index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ModelError(f"seed must be an integer, not {describe(value)}") from None


def require_max_norm(value: float | None, program: Program) -> float:
    """Return the largest allowed global norm of the gradients.

    Args:
        value: A number above 0, which may be infinity. None means 1.0.
        program: The program that clips the gradients.

    Raises:
        ModelError: `value` is not a number above 0, or the program does not clip gradients.
    """
    if value is None:
        return 1.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0 or isinstance(value, str):
        raise ModelError(
            f"max_norm must be a number above 0, not {describe(value)}",
            hint="max_norm=math.inf computes the norm and clips nothing",
        )
    if not program.clip_grad_norm:
        raise ModelError(
            f"max_norm is {number:g}, but the program does not clip gradients",
            program=program.name,
            hint="compile(..., clip_grad_norm=True)",
        )
    return value


def require_spill_dir(value: object, programs: Sequence[Program]) -> Path | None:
    """Return the folder for the tensors that programs move to the disk, or None.

    Args:
        value: The path of the folder, or None.
        programs: The programs that a rank runs.

    Raises:
        ModelError: `value` is an empty string or is not a path, or it is None although a program
            uses the disk.
    """
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    if value is not None:
        raise ModelError(
            f"spill_dir must be a path, not {describe(value)}",
            hint="ExecutionOptions(spill_dir='/nvme')",
        )
    for program in programs:
        if not program.used_opcodes.isdisjoint(_DISK_OPS):
            moves_activations = not program.used_opcodes.isdisjoint(DISK_TRIP)
            content = "activations" if moves_activations else "the optimizer state"
            raise ModelError(
                f"the program moves {content} to the disk, but spill_dir is not set",
                program=program.name,
                hint="execution=ExecutionOptions(spill_dir='/nvme'), or "
                '[memory] spill_dir = "/nvme"',
            )
    return None


def require_loss_input(output: object, stage: int) -> None:
    """Raise ModelError if the last stage returned None.

    Args:
        output: The output of the last stage.
        stage: Number of the stage.

    Raises:
        ModelError: `output` is None.
    """
    if output is None:
        raise ModelError(
            f"stage {stage}, the last one, returns None, but the loss needs its output",
            hint="return the output from the forward of the stage",
        )


def require_scalar_loss(loss: object) -> torch.Tensor:
    """Return a loss as a 0-dimensional tensor.

    Args:
        loss: A floating-point tensor with one element.

    Raises:
        ModelError: `loss` is not a floating-point tensor with one element.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if not loss.dim() else loss.reshape(())
    raise ModelError(
        f"the loss must return a floating-point tensor with one element, not {describe(loss)}",
        hint="loss=lambda y, target: (y - target).square().sum()",
    )
