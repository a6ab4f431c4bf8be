"""Shapes: what passes between torch's stages, found by running a microbatch through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from schedir.errors import ModelError, ProgramError, in_words
from schedir.ir.plan import Plan
from schedir.runtime.boundary import Boundary, graded, passed_on
from schedir.runtime.buffers import restored
from schedir.runtime.held import device_of
from schedir.runtime.module_state import attributes_and_gradients_restored
from schedir.transports.plain import broadcast


def boundaries(
    modules: Mapping[int, nn.Module],
    plan: Plan,
    group: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    trains: bool,
) -> dict[int, tuple[Boundary, ...]]:
    """Of each stage but the last, the tensors that it gives.

    `modules` are this rank's stages, `args` what the first is given for a microbatch, and `kwargs`
    what this rank's are.  The stages run one after the other, each on what the one before gives,
    as zeros; buffers, gradients and generators are then what they were.  All ranks of the group
    call this.  Raises ModelError, in all of them, for a stage that fails, and for one that gives
    anything but tensors.
    """
    rank, found = dist.get_rank(group), dict[int, tuple[Boundary, ...]]()
    for s in range(plan.stages - 1):
        owner = int(plan.rank_of[s])
        told: Any = None
        if rank == owner:
            try:
                given = found[s - 1] if s else args
                told = _given(modules[s], s, given, kwargs, trains=trains)
            except ProgramError as error:
                told = error.fact
            except Exception as error:
                told = f"stage {s} fails in the first microbatch: {in_words(error)}"
        said = broadcast(told, owner, group, [Boundary])
        if isinstance(said, str):
            raise ModelError(said)
        found[s] = said
    return found


def _given(
    module: nn.Module, s: int, given: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool
) -> tuple[Boundary, ...]:
    """What a stage gives for a microbatch."""
    device = device_of({s: module})
    xs = tuple(_zeros(x, device) if isinstance(x, Boundary) else x for x in given)
    # Copies, and no leaves: a module may write to what it is given.
    with (
        restored(module, device),
        attributes_and_gradients_restored(module),
        torch.set_grad_enabled(trains),
    ):
        args, named = tree_map_only(Tensor, torch.clone, (xs, dict(kwargs)))
        y = module(*args, **named)
    ys = passed_on(y, s)
    return tuple(
        Boundary(tuple(y.shape), y.dtype, has) for y, has in zip(ys, graded(ys), strict=True)
    )


def _zeros(one: Boundary, device: torch.device) -> Tensor:
    return torch.zeros(one.shape, dtype=one.dtype, device=device).requires_grad_(bool(one.grad))
