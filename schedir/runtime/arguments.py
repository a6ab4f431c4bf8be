"""Validate the arguments of public functions of the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from schedir.errors import ExecutionError, ModelError, describe, require_type
from schedir.ir.program import Program
from schedir.runtime.parameters.mixed_precision import LossScale

_T = TypeVar("_T")
_PROGRAM_EXAMPLE = "schedir.compile(schedule, PipelineShape(ranks=2, microbatches=4))"


def require_shape(value: object) -> tuple[int, ...]:
    """A shape of whole numbers from 1 on; one number alone is that of a vector.

    Raises ModelError for anything else.
    """
    try:
        if isinstance(value, str | bytes | torch.Tensor | Set):
            raise TypeError
        each: Any = value if hasattr(value, "__iter__") else (value,)
        if any(isinstance(n, bool) for n in each):
            raise TypeError
        shape = tuple(map(index, each))
        if any(n < 1 for n in shape):
            raise TypeError
    except TypeError:
        raise ModelError(
            f"the shape of a boundary is whole numbers from 1 on, not {describe(value)}",
            hint="Boundary((4, 128, 512)), or Boundary((4, 128, 512), torch.bfloat16)",
        ) from None
    return shape


def require_program(value: object) -> Program:
    """A Program.  Raises UsageError for anything else."""
    require_type(value, Program, _PROGRAM_EXAMPLE)
    assert isinstance(value, Program)
    return value


def require_stages(
    value: object, program: Program, rank: int | None = None
) -> dict[int, nn.Module]:
    """The stages of a rank by number, or of the whole model: a mapping, or all stages in order.

    Of all stages a rank takes its own.  Raises ModelError for others, and for what is no module.
    """
    every = range(program.shape.stages)
    own = every if rank is None else program.shape.stages_on_rank[rank]
    wants = "the stages of the model in order" if rank is None else "{stage: module}"

    def refuse(fact: str) -> ModelError:
        return ModelError(fact, program=program.name, hint=f"this takes {wants}")

    whose = "the program has" if rank is None else f"rank {rank} owns"
    if isinstance(value, Mapping):
        found = dict(value)
        if {*found} != {*own}:
            raise refuse(f"{whose} stages {[*own]}, and is given {describe([*found])}")
    elif isinstance(value, Sequence | nn.Sequential | nn.ModuleList) and not isinstance(value, str):
        if len(value) != len(every):
            raise refuse(f"{len(value)} stages are given, the program has {len(every)}")
        found = {s: value[s] for s in own}
    else:
        raise refuse(f"{type(value).__name__} is given for stages")
    for s, module in found.items():
        if not isinstance(module, nn.Module):
            raise refuse(f"stage {s} is no nn.Module, but {describe(module)}")
    return found


def require_model_stages(value: object, *, allow_missing: bool = False) -> list[Any]:
    """All the stages of a model, in order, where there is no program to compare them with.

    With `allow_missing`, None stands for stages that others have.  Raises ModelError for what is no
    sequence of modules.
    """
    found: list[Any] = []
    if isinstance(value, Sequence | nn.Sequential | nn.ModuleList):
        found = [*value]
    if not found or not all(
        isinstance(m, nn.Module) or (allow_missing and m is None) for m in found
    ):
        raise ModelError(
            f"the stages of a model are modules, in order, not {describe(value)}",
            hint="[nn.Linear(8, 8), nn.Linear(8, 8)]",
        )
    return found


def count_microbatches(values: object, name: str, program: Program | None = None) -> int:
    """How many microbatches are given.  Raises ExecutionError for what does not count any."""
    try:
        if not hasattr(values, "__getitem__") or isinstance(values, str | bytes):
            raise TypeError
        return len(values)  # type: ignore[arg-type]
    except TypeError:
        raise ExecutionError(
            f"{name} are a tensor for each microbatch, and {describe(values)} is given",
            program=program.name if program else "",
        ) from None


def require_all_microbatches(values: object, name: str, program: Program, rank: int) -> None:
    """Raise ExecutionError for what is not one of each microbatch."""
    number, wanted = count_microbatches(values, name, program), program.shape.microbatches
    if number != wanted:
        raise ExecutionError(
            f"rank {rank} is given {number} {name} for {wanted} microbatches", program=program.name
        )


def require_callable(value: _T, name: str, example: str) -> _T:
    """What can be called.  Raises ModelError for anything else."""
    if not callable(value):
        raise ModelError(f"{name} is called, and {describe(value)} cannot be", hint=example)
    return value


def require_loss(value: _T) -> _T:
    """A loss.  Raises ModelError for what cannot be called, and for a class that makes one."""
    example = "loss=lambda y, target: (y - target).square().sum()"
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise ModelError(f"the loss is {describe(value)}, and not one of it", hint=example)
    return require_callable(value, "the loss", example)


def require_factory(
    value: Callable[..., _T] | None, name: str, example: str
) -> Callable[..., _T] | None:
    """What makes an optimizer or a loss scale of each rank.  Raises ModelError for one of them."""
    if value is None:
        return None
    return require_callable(value, f"what makes {name} of each rank", example)


def require_optimizer(value: _T) -> _T:
    """What steps.  Raises ModelError for what cannot, as a function that makes an optimizer."""
    step = getattr(value, "step", None)
    if value is not None and (isinstance(value, type) or not callable(step)):
        raise ModelError(
            f"an optimizer has a step(), and {describe(value)} has none",
            hint="optimizer=torch.optim.AdamW(module.parameters())",
        )
    return value


def require_rank(value: int, program: Program) -> int:
    """One of a program's ranks.  Raises ModelError for another."""
    if value in range(program.shape.ranks):
        return value
    raise ModelError(
        f"the ranks are 0 to {program.shape.ranks - 1}, and {describe(value)} is none of them",
        program=program.name,
    )


def require_loss_scale(value: LossScale | None) -> LossScale | None:
    """A loss scale, or none.  Raises UsageError for anything else."""
    if value is not None:
        require_type(value, LossScale, "LossScale()")
    return value


def require_transport(value: _T) -> _T:
    """A transport.  Raises ModelError for anything else."""
    if not hasattr(value, "check_agreement"):
        raise ModelError(f"{describe(value)} is no transport", hint="GlooTransport(program)")
    return value


def require_seed(value: object) -> int:
    """A seed: any whole number.  Raises ModelError for another."""
    try:
        return index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ModelError(f"a seed is a whole number, not {describe(value)}") from None


def require_spill_dir(value: object) -> Path | None:
    """A folder, or None.  Raises ModelError for what is no path."""
    if value is None or (isinstance(value, str | Path) and str(value)):
        return None if value is None else Path(value)
    raise ModelError(f"spill_dir is a path, not {describe(value)}", hint="spill_dir='/nvme'")


def require_max_norm(value: float | None, program: Program) -> float:
    """The largest norm of the gradients: a number above 0, or 1 where none is given.

    Raises ModelError for another, and for one that the program would not clip to.
    """
    if value is None:
        return 1.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0 or isinstance(value, str):
        raise ModelError(
            f"max_norm is a number above 0, not {describe(value)}",
            hint="math.inf takes the norm and clips nothing",
        )
    if not program.clip_grad_norm:
        raise ModelError(
            f"max_norm is {number:g}, and the program takes no norm and clips nothing",
            program=program.name,
            hint="compile(..., clip_grad_norm=True)",
        )
    return value


def require_scalar_loss(loss: object) -> torch.Tensor:
    """A loss, 0-dim.  Raises ModelError for what is not one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if not loss.dim() else loss.reshape(())
    raise ModelError(
        f"the loss is {describe(loss)}, and not a tensor of one number", hint="its .sum()"
    )
