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
_PROGRAM = "schedir.compile(schedule, PipelineShape(ranks=2, microbatches=4))"


def shape_of(given: object) -> tuple[int, ...]:
    """A shape of whole numbers from 1 on; one number alone is that of a vector.

    Raises ModelError for anything else.
    """
    try:
        if isinstance(given, str | bytes | torch.Tensor | Set):
            raise TypeError
        each: Any = given if hasattr(given, "__iter__") else (given,)
        if any(isinstance(n, bool) for n in each):
            raise TypeError
        shape = tuple(map(index, each))
        if any(n < 1 for n in shape):
            raise TypeError
    except TypeError:
        raise ModelError(
            f"the shape of a boundary is whole numbers from 1 on, not {describe(given)}",
            hint="Boundary((4, 128, 512)), or Boundary((4, 128, 512), torch.bfloat16)",
        ) from None
    return shape


def program_of(given: object) -> Program:
    """A Program.  Raises UsageError for anything else."""
    require_type(given, Program, _PROGRAM)
    assert isinstance(given, Program)
    return given


def stages_of(given: object, program: Program, rank: int | None = None) -> dict[int, nn.Module]:
    """The stages of a rank by number, or of the whole model: a mapping, or all stages in order.

    Of all stages a rank takes its own.  Raises ModelError for others, and for what is no module.
    """
    every = range(program.shape.stages)
    own = every if rank is None else program.shape.stages_of[rank]
    wants = "the stages of the model in order" if rank is None else "{stage: module}"

    def refuse(fact: str) -> ModelError:
        return ModelError(fact, program=program.name, hint=f"this takes {wants}")

    whose = "the program has" if rank is None else f"rank {rank} owns"
    if isinstance(given, Mapping):
        found = dict(given)
        if {*found} != {*own}:
            raise refuse(f"{whose} stages {[*own]}, and is given {describe([*found])}")
    elif isinstance(given, Sequence | nn.Sequential | nn.ModuleList) and not isinstance(given, str):
        if len(given) != len(every):
            raise refuse(f"{len(given)} stages are given, the program has {len(every)}")
        found = {s: given[s] for s in own}
    else:
        raise refuse(f"{type(given).__name__} is given for stages")
    for s, module in found.items():
        if not isinstance(module, nn.Module):
            raise refuse(f"stage {s} is no nn.Module, but {describe(module)}")
    return found


def model_of(given: object, *, holes: bool = False) -> list[Any]:
    """All the stages of a model, in order, where there is no program to compare them with.

    With `holes`, None stands for stages that others have.  Raises ModelError for what is no
    sequence of modules.
    """
    found: list[Any] = []
    if isinstance(given, Sequence | nn.Sequential | nn.ModuleList):
        found = [*given]
    if not found or not all(isinstance(m, nn.Module) or (holes and m is None) for m in found):
        raise ModelError(
            f"the stages of a model are modules, in order, not {describe(given)}",
            hint="[nn.Linear(8, 8), nn.Linear(8, 8)]",
        )
    return found


def number_of(given: object, what: str, program: Program | None = None) -> int:
    """How many microbatches are given.  Raises ExecutionError for what does not count any."""
    try:
        if not hasattr(given, "__getitem__") or isinstance(given, str | bytes):
            raise TypeError
        return len(given)  # type: ignore[arg-type]
    except TypeError:
        raise ExecutionError(
            f"{what} are a tensor for each microbatch, and {describe(given)} is given",
            program=program.name if program else "",
        ) from None


def expect_all(given: object, what: str, program: Program, rank: int) -> None:
    """Raise ExecutionError for what is not one of each microbatch."""
    number, wanted = number_of(given, what, program), program.shape.microbatches
    if number != wanted:
        raise ExecutionError(
            f"rank {rank} is given {number} {what} for {wanted} microbatches", program=program.name
        )


def callable_of(given: _T, what: str, example: str) -> _T:
    """What can be called.  Raises ModelError for anything else."""
    if not callable(given):
        raise ModelError(f"{what} is called, and {describe(given)} cannot be", hint=example)
    return given


def loss_of(given: _T) -> _T:
    """A loss.  Raises ModelError for what cannot be called, and for a class that makes one."""
    example = "loss=lambda y, target: (y - target).square().sum()"
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise ModelError(f"the loss is {describe(given)}, and not one of it", hint=example)
    return callable_of(given, "the loss", example)


def maker_of(given: Callable[..., _T] | None, what: str, example: str) -> Callable[..., _T] | None:
    """What makes an optimizer or a loss scale of each rank.  Raises ModelError for one of them."""
    if given is None:
        return None
    return callable_of(given, f"what makes {what} of each rank", example)


def optimizer_of(given: _T) -> _T:
    """What steps.  Raises ModelError for what cannot, as a function that makes an optimizer."""
    step = getattr(given, "step", None)
    if given is not None and (isinstance(given, type) or not callable(step)):
        raise ModelError(
            f"an optimizer has a step(), and {describe(given)} has none",
            hint="optimizer=torch.optim.AdamW(module.parameters())",
        )
    return given


def rank_of(given: int, program: Program) -> int:
    """One of a program's ranks.  Raises ModelError for another."""
    if given in range(program.shape.ranks):
        return given
    raise ModelError(
        f"the ranks are 0 to {program.shape.ranks - 1}, and {describe(given)} is none of them",
        program=program.name,
    )


def loss_scale_of(given: LossScale | None) -> LossScale | None:
    """A loss scale, or none.  Raises UsageError for anything else."""
    if given is not None:
        require_type(given, LossScale, "LossScale()")
    return given


def transport_of(given: _T) -> _T:
    """A transport.  Raises ModelError for anything else."""
    if not hasattr(given, "agree"):
        raise ModelError(f"{describe(given)} is no transport", hint="GlooTransport(program)")
    return given


def seed_of(given: object) -> int:
    """A seed: any whole number.  Raises ModelError for another."""
    try:
        return index(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ModelError(f"a seed is a whole number, not {describe(given)}") from None


def folder_of(given: object) -> Path | None:
    """A folder, or None.  Raises ModelError for what is no path."""
    if given is None or (isinstance(given, str | Path) and str(given)):
        return None if given is None else Path(given)
    raise ModelError(f"folder is a path, not {describe(given)}", hint="folder='/nvme'")


def max_norm_of(given: float | None, program: Program) -> float:
    """The largest norm of the gradients: a number above 0, or 1 where none is given.

    Raises ModelError for another, and for one that the program would not clip to.
    """
    if given is None:
        return 1.0
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0 or isinstance(given, str):
        raise ModelError(
            f"max_norm is a number above 0, not {describe(given)}",
            hint="math.inf takes the norm and clips nothing",
        )
    if not program.clip_grad_norm:
        raise ModelError(
            f"max_norm is {number:g}, and the program takes no norm and clips nothing",
            program=program.name,
            hint="compile(..., clip_grad_norm=True)",
        )
    return given


def one_number(loss: object) -> torch.Tensor:
    """A loss, 0-dim.  Raises ModelError for what is not one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if not loss.dim() else loss.reshape(())
    raise ModelError(
        f"the loss is {describe(loss)}, and not a tensor of one number", hint="its .sum()"
    )
