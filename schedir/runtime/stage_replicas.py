"""Copies of stages and Parameters that several ranks of one process have.

The first of these ranks has the stage or Parameter itself, and the others have copies, as processes
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.parameter_copies import expect_no_node_hooks, like, share_hooks
from schedir.runtime.tied import where


class StageReplica(NamedTuple):
    """The copy of a stage on a rank that is not its first holder."""

    stage: int
    copy: nn.Module
    module: nn.Module  # of the first holder

    @torch.no_grad()
    def follow(self) -> None:
        """Set the copy to the state of the module, which users change between steps: its
        Parameters, its buffers, its mode, and numbers and strings such as a dropout's `p`."""
        for mine, theirs in zip(self.copy.modules(), self.module.modules(), strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, bool | int | float | str):
                    setattr(mine, name, value)
            for name, p in theirs._parameters.items():
                if p is not None:
                    mine.get_parameter(name).copy_(p)
            for name, buffer in theirs._buffers.items():
                mine._buffers[name] = None if buffer is None else buffer.clone()

    def share_hooks(self, program: Program) -> None:
        """Let the tensor hooks of the module's Parameters be called for the copy's, too.

        Raises ModelError for a post-accumulate hook: it would see the sum of one holder.
        """
        if not program.trains:
            return
        named = self.module.named_parameters()
        for (name, p), copy in zip(named, self.copy.parameters(), strict=True):
            if p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"{name} of stage {self.stage} has a post-accumulate hook, and the stage has "
                    "several holders: each adds up the gradients of its own microbatches",
                    program=program.name,
                    hint="register_hook, whose hooks see the gradient of each microbatch",
                )
            if p.requires_grad:
                expect_no_node_hooks(p, f"{name} of stage {self.stage}")
            share_hooks(copy, p)


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a stage; deepcopy forgets the attributes of Parameters and the types of gradients."""
    copy = deepcopy(module)
    for p, own in zip(copy.parameters(), module.parameters(), strict=True):
        vars(p).update(vars(own))
        p.grad_dtype = own.grad_dtype
    return copy


def copies_of(
    program: Program, stages: Sequence[nn.Module]
) -> list[dict[nn.Parameter, nn.Parameter]]:
    """For each rank, what it computes with in place of Parameters that other ranks have, too.

    Raises ModelError where ZeRO would keep parts of such a Parameter on several ranks.
    """
    copies: list[dict[nn.Parameter, nn.Parameter]] = [{} for _ in range(program.plan.ranks)]
    places: dict[nn.Parameter, dict[int, tuple[int, str]]] = {}  # by rank, the first on it
    for s, (rank, module) in enumerate(zip(program.plan.rank_of.tolist(), stages, strict=True)):
        for name, p in module.named_parameters():
            if p.requires_grad:
                places.setdefault(p, {}).setdefault(rank, (s, name))
    for p, of in places.items():
        home, *others = of
        if others and program.zero:
            raise ModelError(
                f"{where(of.values())} are one Parameter on {len(of)} ranks, and ZeRO level "
                f"{program.zero} would shard it on each of them",
                program=program.name,
                hint="ties = schedir.ties(stages), then copies: stages = [deepcopy(stage) for "
                "stage in stages], and tied=ties for the ranks; or zero=0",
            )
        if others and program.trains:
            expect_no_node_hooks(p, where(of.values()))
            copies[home][p] = p
            for rank in others:
                copies[rank][p] = like(p, p.detach().clone())
    return copies
