"""Copies of stages and Parameters that several ranks of an `InProcessExecutor` have.

The first of these ranks computes with the stage or Parameter itself. Each later rank computes with
a copy, as it would in a separate process.
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
from schedir.ir.pipeline.tied_weights import ParameterLocation
from schedir.ir.program import Program
from schedir.runtime.parameters.parameter_copies import (
    make_parameter_like,
    require_no_node_hooks,
    share_hooks,
)

# `StageReplica.sync_state` copies attributes of `_SYNCED_TYPES`, and the attributes in
# `_SYNCED_DICTS`.
_SYNCED_TYPES: Final = (bool, int, float, str)
_SYNCED_DICTS: Final = ("_parameters", "_buffers")
# Attribute name -> (value, version counter). The version counter is 0 if the value is no tensor.
_AttributeState = dict[str, tuple[object, int]]
_ABSENT: Final = object()


@dataclass
class StageReplica:
    """The copy of a stage on a rank that is not the first rank with the stage.

    Args:
        stage: The number of the stage.
        copy: The copy.
        module: The module that was copied. The first rank computes with it.
        recorded_state: The attributes of the module that `sync_state` does not copy, as they were
            after the last step.
    """

    stage: int
    copy: nn.Module
    module: nn.Module
    recorded_state: _AttributeState | None = None

    def record_state(self) -> None:
        """Record the attributes that `sync_state` does not copy. `sync_state` compares them."""
        self.recorded_state = _collect_unsynced_state(self.module)

    @torch.no_grad()
    def sync_state(self, program: Program) -> None:
        """Set the copy to the present state of the module.

        The method copies Parameters, buffers, the training mode, and attributes that are numbers or
        strings, such as the `p` of a dropout. Users may change this state between steps.

        Args:
            program: The program that the error names.

        Raises:
            ModelError: State that this method does not copy has changed since `record_state`: a
                submodule, a hook, or an attribute that is neither a number nor a string.
        """
        recorded_state = self.recorded_state
        if recorded_state is not None and (
            name := _find_changed_name(recorded_state, _collect_unsynced_state(self.module))
        ):
            raise ModelError(
                f"{name} of stage {self.stage} changed between steps, but stage replicas get "
                "copies of Parameters, buffers, modes, numbers and strings only",
                program=program.name,
                hint="change it before you create the InProcessExecutor, or create a new one",
            )
        for submodule_copy, submodule in zip(
            self.copy.modules(), self.module.modules(), strict=True
        ):
            for name, value in vars(submodule).items():
                if isinstance(value, _SYNCED_TYPES):
                    setattr(submodule_copy, name, value)
            for name, p in submodule._parameters.items():
                if p is not None:
                    submodule_copy.get_parameter(name).copy_(p)
            for name, buffer in submodule._buffers.items():
                submodule_copy._buffers[name] = None if buffer is None else buffer.clone()

    def share_hooks(self, program: Program) -> None:
        """Make the Parameters of the copy call the tensor hooks of the module's Parameters.

        Args:
            program: The program that runs. Without a backward, the method does nothing.

        Raises:
            ModelError: A Parameter has a post-accumulate hook, which would get the sum over the
                microbatches of one rank only. Or the autograd node of a Parameter has hooks.
        """
        if not program.has_backward:
            return
        named_parameters = self.module.named_parameters()
        for (name, p), copy in zip(named_parameters, self.copy.parameters(), strict=True):
            if p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"{name} of stage {self.stage} has a post-accumulate hook, but each stage "
                    "replica accumulates the gradients of its own microbatches only",
                    program=program.name,
                    hint="use register_hook, whose hooks get the gradient of each microbatch",
                )
            if p.requires_grad:
                require_no_node_hooks(p, f"{name} of stage {self.stage}")
            share_hooks(copy, p)


def _collect_unsynced_state(module: nn.Module) -> _AttributeState:
    """Return the attributes of a module and its submodules that `sync_state` does not copy."""
    state: _AttributeState = {}
    for path, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if attribute in _SYNCED_DICTS or isinstance(value, _SYNCED_TYPES):
                continue
            name = f"{path}.{attribute}".lstrip(".")
            items = {name: value}
            if isinstance(value, Mapping):
                items |= {f"{name}[{key!r}]": element for key, element in value.items()}
            elif isinstance(value, list | tuple | set | deque):
                items |= {f"{name}[{k}]": element for k, element in enumerate(value)}
            for item_name, item in items.items():
                version = (
                    item._version if isinstance(item, Tensor) and not item.is_inference() else 0
                )
                state[item_name] = (item, version)
    return state


def _find_changed_name(before: _AttributeState, after: _AttributeState) -> str:
    """Return the first name whose value differs between two states, or an empty string."""
    for name in {**before, **after}:
        x, old_version = before.get(name, (_ABSENT, 0))
        y, new_version = after.get(name, (_ABSENT, 0))
        if old_version != new_version or not (x is y or (isinstance(x, _SYNCED_TYPES) and x == y)):
            return name
    return ""


def copy_stage(module: nn.Module) -> nn.Module:
    """Return a deep copy of a stage, with the attributes of its Parameters.

    Args:
        module: The module of the stage.
    """
    copy = deepcopy(module)
    # deepcopy omits the attributes and the `grad_dtype` of Parameters.
    for p, original in zip(copy.parameters(), module.parameters(), strict=True):
        vars(p).update(vars(original))
        p.grad_dtype = original.grad_dtype
    return copy


def find_shared_parameters(
    program: Program, stages: Sequence[nn.Module]
) -> dict[nn.Parameter, dict[int, ParameterLocation]]:
    """Return the trained Parameters that stages on several ranks share.

    Args:
        program: The program.
        stages: All stages of the model, in order.

    Returns:
        Parameter -> rank -> the rank's first stage with the Parameter, and its name in this stage.
    """
    parameter_locations: dict[nn.Parameter, dict[int, ParameterLocation]] = {}
    for s, (rank, module) in enumerate(
        zip(program.shape.first_rank_per_stage.tolist(), stages, strict=True)
    ):
        for name, p in module.named_parameters():
            if p.requires_grad:
                parameter_locations.setdefault(p, {}).setdefault(rank, (s, name))
    return {p: locations for p, locations in parameter_locations.items() if len(locations) > 1}


def copy_shared_parameters(
    program: Program, stages: Sequence[nn.Module]
) -> list[dict[nn.Parameter, nn.Parameter]]:
    """Copy the trained Parameters that stages on several ranks share.

    Args:
        program: The program. Without a backward, there are no copies.
        stages: All stages of the model, in order.

    Returns:
        For each rank, shared Parameter -> the Parameter with which the rank computes. On the first
        rank with the Parameter this is the Parameter itself. On other ranks it is a copy.
    """
    copies_by_rank: list[dict[nn.Parameter, nn.Parameter]] = [
        {} for _ in range(program.shape.ranks)
    ]
    shared_parameters = find_shared_parameters(program, stages) if program.has_backward else {}
    for p, (first_rank, *other_ranks) in shared_parameters.items():
        copies_by_rank[first_rank][p] = p
        for rank in other_ranks:
            copies_by_rank[rank][p] = make_parameter_like(p, p.detach().clone())
    return copies_by_rank
