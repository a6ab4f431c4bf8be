"""Refuse models and optimizers that ZeRO cannot shard correctly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.model_checks.memory_overlap import require_no_overlap
from schedir.runtime.model_checks.step_isolation import state_shares_memory
from schedir.runtime.parameters.optimizer_inspection import (
    find_optimizers,
    is_torch_optimizer,
    list_stepped_parameters,
    map_main_parameters,
    unwrap_optimizer,
)
from schedir.runtime.parameters.sharded_parameters import find_owner, list_state_tensors

# torch's optimizers that step each element of a weight independently of the other elements.
_ELEMENTWISE_OPTIMIZERS: Final = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


def require_shardable(program: Program, stages: Mapping[int, nn.Module], optimizer: object) -> None:
    """Check that ZeRO can shard the parameters of stages.

    Without ZeRO this function checks only that no other executor has sharded the stages, and that
    the memory layouts of parameters fit fused optimizers.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        optimizer: The optimizer, or None.

    Raises:
        ModelError: A parameter is sharded by another executor, is not contiguous, is a tensor
            subclass, or shares memory with another tensor.
    """

    def refuse(fact: str, hint: str) -> ModelError:
        return ModelError(fact, program=program.name, hint=hint)

    trained_parameters = [
        (s, name, p) for s, name, p in _list_parameters(stages) if p.requires_grad
    ]
    for s, name, p in trained_parameters:
        owner = find_owner(p)
        if owner is not None and (program.zero or not owner.summoned_flat):
            raise refuse(
                f"{name} of stage {s} is sharded by another executor",
                "use one executor for these stages; a program with zero 0 runs within "
                "`with first.full_parameters():`",
            )
    fused_parameters = (
        _find_fused_parameters(optimizer) if program.dp > 1 or program.trained_ties else set()
    )
    for s, name, p in trained_parameters:
        if p in fused_parameters and not p.is_contiguous():
            raise refuse(
                f"{name} of stage {s} is not contiguous (its strides are {list(p.stride())}): a "
                "fused optimizer needs a parameter with the strides of its gradient, and the "
                "summed gradient is contiguous",
                "p.data = p.data.contiguous() before the executor is created, or fused=False",
            )
    if not program.zero:
        return
    for s, name, p in trained_parameters:
        if not p.is_contiguous():
            raise refuse(
                f"{name} of stage {s} is not contiguous (its strides are {list(p.stride())}): "
                "its shards would have another order of elements",
                "p.data = p.data.contiguous(), or module.to(memory_format="
                "torch.contiguous_format), before the executor is created",
            )
        if type(p.data) is not Tensor:
            raise refuse(
                f"{name} of stage {s} must be a plain tensor, not {type(p.data).__name__}",
                "do not parallelize parameters before the executor is created: schedir shards them",
            )
    require_no_overlap(stages, program.name)


def _find_fused_parameters(optimizer: object) -> set[Any]:
    parameters: set[Any] = set()
    for nested_optimizer in find_optimizers(optimizer):
        parameter_of_main = map_main_parameters(nested_optimizer)
        for group in getattr(unwrap_optimizer(nested_optimizer), "param_groups", ()):
            if group.get("fused"):
                parameters |= {parameter_of_main.get(p, p) for p in group["params"]}
    return parameters


def _list_parameters(stages: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    for s, module in stages.items():
        for name, p in module.named_parameters():
            yield s, name, p


def require_elementwise(program: Program, optimizer: object) -> None:
    """Check that an optimizer is elementwise: it steps each element of a weight independently.

    For such an optimizer, a step of shards is equal to a step of full weights.

    Args:
        program: The program. Without ZeRO or a backward, every optimizer is accepted.
        optimizer: The optimizer, or None.

    Raises:
        ModelError: The optimizer is not elementwise, or its state cannot be sharded.
    """
    if not program.zero or not program.has_backward or optimizer is None:
        return
    inner: Any = unwrap_optimizer(optimizer)
    name = type(inner).__name__
    is_known = is_torch_optimizer(inner) and name in _ELEMENTWISE_OPTIMIZERS
    if not getattr(inner, "elementwise", is_known):
        raise ModelError(
            f"{name} needs full weights, but each replica has only a shard of a weight (zero "
            f"{program.zero})"
            if is_torch_optimizer(inner) or hasattr(inner, "elementwise")
            else f"zero is {program.zero}, but {name} may not be elementwise: each replica steps "
            "a shard of a weight",
            program=program.name,
            hint="use an elementwise optimizer, such as AdamW, or zero=0"
            if is_torch_optimizer(inner) or hasattr(inner, "elementwise")
            else f"zero=0, or {name}.elementwise = True if it steps each element separately",
        )
    for nested_optimizer in map(unwrap_optimizer, find_optimizers(optimizer)):
        _require_separate_state(program, nested_optimizer)
        _require_elementwise_state(program, nested_optimizer)


def _require_separate_state(program: Program, inner: Any) -> None:
    """Check that each state tensor has separate memory, because ZeRO shards each one separately.

    torch's own optimizers always keep their state in separate memory.
    """
    state = getattr(inner, "state", {})
    tensors = [t for t in tree_leaves([*state.values()]) if isinstance(t, Tensor)]
    parameters = [p for p in state if isinstance(p, Tensor)]
    if not is_torch_optimizer(inner) and state_shares_memory(inner, tensors, parameters):
        raise ModelError(
            f"a state tensor of {type(inner).__name__} shares memory with another state tensor, a "
            "parameter, a gradient or an attribute, but ZeRO shards each of them separately",
            program=program.name,
            hint="state = tensor.clone(), or zero=0",
        )


def _require_elementwise_state(program: Program, inner: Any) -> None:
    """Check that the state of an optimizer can be sharded like weights."""
    name = type(inner).__name__
    state: Mapping[Any, Mapping[str, Any]] = getattr(inner, "state", {})
    for p, parameter_state in state.items():
        for key, value in list_state_tensors(parameter_state) if isinstance(p, Tensor) else ():
            if value.shape != p.shape:
                raise ModelError(
                    f"{name} keeps {key} of shape {list(value.shape)} for a weight of shape "
                    f"{list(p.shape)}, but ZeRO needs equal shapes",
                    program=program.name,
                    hint="zero=0",
                )
    shapes = {p.shape for p in list_stepped_parameters(inner) if p.numel() > 1}
    for key, value in getattr(inner, "__dict__", {}).items():
        for leaf in tree_leaves(value) if key not in ("state", "param_groups") else ():
            # Leave out Parameters, because a Parameter may be a weight, which ZeRO shards.
            is_own = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
            if is_own and leaf.shape in shapes:
                raise ModelError(
                    f"{name}.{key} has a tensor of shape {list(leaf.shape)}, like a weight, but "
                    f"ZeRO shards only tensors in {name}.state (zero {program.zero})",
                    program=program.name,
                    hint="keep the tensor in self.state[p], which ZeRO shards like p; or zero=0",
                )
