"""Copies of stages and Parameters that several ranks of one process have.

The first of these ranks has the stage or Parameter itself, and the others have copies, as processes
would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.parameter_copies import expect_no_node_hooks, like, share_hooks
from schedir.runtime.tied import where

_FOLLOWED: Final = (bool, int, float, str)
_State = dict[str, tuple[object, int]]
_GONE: Final = object()
_OF_TORCH: Final = ("_parameters", "_buffers")  # attributes of a module that a copy follows, too


@dataclass
class StageReplica:
    """The copy of a stage on a rank that is not its first holder."""

    stage: int
    copy: nn.Module
    module: nn.Module  # of the first holder
    before: _State | None = None

    def note_state(self) -> None:
        """Note the state of the module that a copy cannot follow, to see changes between steps."""
        self.before = _state_without_copy(self.module)

    @torch.no_grad()
    def follow(self, program: Program) -> None:
        """Set the copy to the state of the module, which users change between steps: its
        Parameters, its buffers, its mode, and numbers and strings such as a dropout's `p`.

        Raises ModelError if something else has changed since the last step: a submodule, a hook, or
        an attribute that is no number or string.
        """
        before = self.before
        if before is not None and (name := _changed(before, _state_without_copy(self.module))):
            raise ModelError(
                f"{name} of stage {self.stage} has changed between steps. The stage has several "
                "holders, whose copies follow Parameters, buffers, modes, numbers and strings only",
                program=program.name,
                hint="change it before InProcess is made, or make InProcess anew",
            )
        for mine, theirs in zip(self.copy.modules(), self.module.modules(), strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, _FOLLOWED):
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


def _state_without_copy(module: nn.Module) -> _State:
    """By name, what a module has that its copies do not follow, and the versions of its tensors."""
    found: _State = {}
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in _OF_TORCH or isinstance(value, _FOLLOWED):
                continue
            name = f"{path}.{attribute}".lstrip(".")
            items = {name: value}
            if isinstance(value, Mapping):
                items |= {f"{name}[{key!r}]": each for key, each in value.items()}
            elif isinstance(value, list | tuple | set | deque):
                items |= {f"{name}[{k}]": each for k, each in enumerate(value)}
            for each, one in items.items():
                version = one._version if isinstance(one, Tensor) and not one.is_inference() else 0
                found[each] = (one, version)
    return found


def _changed(before: _State, now: _State) -> str:
    """Return the name of something that is another one in two states, or nothing."""
    for name in {**before, **now}:
        (x, version), (y, later) = before.get(name, (_GONE, 0)), now.get(name, (_GONE, 0))
        if version != later or not (x is y or (isinstance(x, _FOLLOWED) and x == y)):
            return name
    return ""


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
