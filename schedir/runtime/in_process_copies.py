"""Copies of stages and Parameters that several ranks of one process hold.

The first of these ranks computes with the stage or Parameter itself.  Each of the others computes
with a copy, as it would in a process of its own.
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
from schedir.runtime.parameters.parameter_copies import (
    make_parameter_like,
    require_no_node_hooks,
    share_hooks,
)
from schedir.runtime.parameters.tied_parameters import describe_places

_SYNCED_TYPES: Final = (bool, int, float, str)  # of attributes that a copy follows
_SYNCED_DICTS: Final = ("_parameters", "_buffers")  # attributes of nn.Module that it follows, too
_AttributeState = dict[
    str, tuple[object, int]
]  # by name, a value and the version of its tensor, else 0
_ABSENT: Final = object()


@dataclass
class StageReplica:
    """The copy of a stage, on a rank other than the first that holds the stage.

    Args:
        stage: The number of the stage.
        copy: The copy.
        module: The module that was copied, with which the first rank computes.
        recorded_state: What of the module the copy does not follow, as it was after the last step.
    """

    stage: int
    copy: nn.Module
    module: nn.Module
    recorded_state: _AttributeState | None = None

    def record_state(self) -> None:
        """Note what of the module the copy does not follow, so that `sync_state` finds changes."""
        self.recorded_state = _collect_unsynced_state(self.module)

    @torch.no_grad()
    def sync_state(self, program: Program) -> None:
        """Set the copy to the present state of the module.

        A copy follows Parameters, buffers, the mode, and numbers and strings such as a dropout's
        `p`.  Users may change these between steps.

        Raises:
            ModelError: Something else has changed since `record_state`: a submodule, a hook, or an
                attribute that is neither a number nor a string.
        """
        before = self.recorded_state
        if before is not None and (
            name := _find_changed_name(before, _collect_unsynced_state(self.module))
        ):
            raise ModelError(
                f"{name} of stage {self.stage} has changed between steps. The stage has several "
                "holders, whose copies follow Parameters, buffers, modes, numbers and strings only",
                program=program.name,
                hint="change it before InProcessExecutor is made, or make InProcessExecutor anew",
            )
        for mine, theirs in zip(self.copy.modules(), self.module.modules(), strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, _SYNCED_TYPES):
                    setattr(mine, name, value)
            for name, p in theirs._parameters.items():
                if p is not None:
                    mine.get_parameter(name).copy_(p)
            for name, buffer in theirs._buffers.items():
                mine._buffers[name] = None if buffer is None else buffer.clone()

    def share_hooks(self, program: Program) -> None:
        """Make the copy's Parameters call the tensor hooks of the module's Parameters.

        Raises:
            ModelError: A Parameter has a post-accumulate hook.  It would see only the sum over the
                microbatches of one rank.
        """
        if not program.has_backward:
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
                require_no_node_hooks(p, f"{name} of stage {self.stage}")
            share_hooks(copy, p)


def _collect_unsynced_state(module: nn.Module) -> _AttributeState:
    """Return what a module has that its copies do not follow."""
    found: _AttributeState = {}
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in _SYNCED_DICTS or isinstance(value, _SYNCED_TYPES):
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


def _find_changed_name(before: _AttributeState, now: _AttributeState) -> str:
    """Return the first name whose value differs between two states, or an empty string."""
    for name in {**before, **now}:
        (x, version), (y, later) = before.get(name, (_ABSENT, 0)), now.get(name, (_ABSENT, 0))
        if version != later or not (x is y or (isinstance(x, _SYNCED_TYPES) and x == y)):
            return name
    return ""


def copy_stage(module: nn.Module) -> nn.Module:
    """Return a deep copy of a stage."""
    copy = deepcopy(module)
    # deepcopy does not copy the attributes of Parameters and the types of their gradients.
    for p, own in zip(copy.parameters(), module.parameters(), strict=True):
        vars(p).update(vars(own))
        p.grad_dtype = own.grad_dtype
    return copy


def copy_shared_parameters(
    program: Program, stages: Sequence[nn.Module]
) -> list[dict[nn.Parameter, nn.Parameter]]:
    """Return, for each rank, the tensors with which it computes for Parameters of several ranks.

    Returns:
        For each rank, a map from each Parameter that other ranks have, too.  On the first of these
        ranks its value is the Parameter itself, and on the others a copy.

    Raises:
        ModelError: ZeRO would shard such a Parameter on each of its ranks.
    """
    copies: list[dict[nn.Parameter, nn.Parameter]] = [{} for _ in range(program.shape.ranks)]
    # By Parameter and rank: the first stage that has the Parameter, and its name there.
    places: dict[nn.Parameter, dict[int, tuple[int, str]]] = {}
    for s, (rank, module) in enumerate(
        zip(program.shape.first_rank_per_stage.tolist(), stages, strict=True)
    ):
        for name, p in module.named_parameters():
            if p.requires_grad:
                places.setdefault(p, {}).setdefault(rank, (s, name))
    for p, of in places.items():
        home, *others = of
        if others and program.zero:
            raise ModelError(
                f"{describe_places(of.values())} are one Parameter on {len(of)} ranks, and "
                "ZeRO level "
                f"{program.zero} would shard it on each of them",
                program=program.name,
                hint="ties = schedir.find_tied_weights(stages), then copies: "
                "stages = [deepcopy(stage) for stage in stages], and tied_weights=ties for the "
                "ranks; "
                "or zero=0",
            )
        if others and program.has_backward:
            require_no_node_hooks(p, describe_places(of.values()))
            copies[home][p] = p
            for rank in others:
                copies[rank][p] = make_parameter_like(p, p.detach().clone())
    return copies
