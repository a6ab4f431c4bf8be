"""Decide when stages under `fully_shard` are unsharded.

torch's runtime gathers the parameters of a stage at UNSHARD, and frees them at RESHARD. The actions
that use these parameters must come between the two. `insert_unshards` adds UNSHARD and RESHARD to
the actions of a rank.

With schedir's executor, `unshard_stages` gathers the parameters of all stages before a step. It
reduces the gradients and frees the parameters after the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _Action,
)

from schedir.errors import CompletenessError, OrderError, SlotError
from schedir.passes.communication.unshard_placement import place_unshards

BACKWARDS: Final = (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
COMPUTE: Final = (FORWARD, *BACKWARDS)


def insert_unshards(actions: Sequence[Any], unsharded_stages: int) -> list[Any]:
    """Return the actions of a rank with UNSHARD and RESHARD added.

    The added actions are placed like Unshard and Reshard in a program with zero 3. A stage is used
    by its compute actions and by its REDUCE_GRAD, which needs unsharded gradients.

    Args:
        actions: The actions of the rank.
        unsharded_stages: The largest number of stages that are unsharded at once. If a single
            action uses more stages, the number of its stages is the limit.
    """
    changes_before = place_unshards(
        [_stages_of_action(action) for action in actions], unsharded_stages
    )
    order: list[Any] = []
    for changes, action_list in zip(
        changes_before, [*([action] for action in actions), []], strict=True
    ):
        order += [
            _Action(stage, UNSHARD if is_unshard else RESHARD, None)
            for stage, is_unshard in changes
        ]
        order += action_list
    return order


def _max_unsharded(actions: Sequence[Any], unsharded_stages: int) -> int:
    """Return the largest number of stages that may be unsharded at once."""
    return max(unsharded_stages, *(len(_stages_of_action(action)) for action in actions), 0)


def _stages_of_action(
    action: Any, kinds: Sequence[Any] = (*COMPUTE, REDUCE_GRAD)
) -> tuple[int, ...]:
    """Return the stages of an action and of its sub-actions, if these have one of the given kinds.

    By default, these are the kinds that need unsharded parameters or gradients.
    """
    if action.sub_actions is not None:
        return tuple(
            dict.fromkeys(
                s for sub_action in action.sub_actions for s in _stages_of_action(sub_action, kinds)
            )
        )
    return (action.stage_index,) if action.computation_type in kinds else ()


def require_unsharded(actions: Sequence[Any], unsharded_stages: int) -> None:
    """Refuse a rank's actions that use `fully_shard` wrongly.

    Args:
        actions: The actions of the rank.
        unsharded_stages: The largest number of stages that may be unsharded at once. If a single
            action uses more stages, the number of its stages is the limit.

    Raises:
        OrderError: An action uses a stage that is sharded, or comes after the reduction of its
            stage. Or a stage is unsharded or resharded twice in a row.
        SlotError: Too many stages are unsharded at once.
        CompletenessError: A stage stays unsharded at the end. Or a stage has backwards but no
            reduction, or a reduction but no backwards.
    """
    unsharded: set[int] = set()
    reduced: set[int] = set()
    added: set[int] = set()  # stages whose backwards have added to gradients
    limit = _max_unsharded(actions, unsharded_stages)
    for action in actions:
        kind, stage = action.computation_type, action.stage_index
        if kind == UNSHARD:
            if stage in unsharded:
                raise OrderError(f"{action}: stage {stage} is already unsharded")
            unsharded.add(stage)
        elif kind == RESHARD:
            if stage not in unsharded:
                raise OrderError(f"{action}: stage {stage} is already sharded")
            unsharded.remove(stage)
        needed_stages = _stages_of_action(action)
        if needed_stages and len(unsharded) > limit:
            raise SlotError(
                f"{action}: stages {sorted(unsharded)} are unsharded, but the limit is {limit} "
                "unsharded stages"
            )
        for s in needed_stages:
            if s not in unsharded:
                raise OrderError(f"{action} needs stage {s} unsharded, but the stage is sharded")
            if s in reduced:
                raise OrderError(f"{action} comes after the reduction of stage {s}")
        added.update(_stages_of_action(action, BACKWARDS))
        reduced.update(_stages_of_action(action, (REDUCE_GRAD,)))
    if unsharded:
        raise CompletenessError(
            f"stages {sorted(unsharded)} are still unsharded after the last action"
        )
    if added != reduced:
        raise CompletenessError(f"stages {sorted(added ^ reduced)} lack a backward or a reduction")


def accumulate_gradients(module: Any) -> None:
    """Add the gradients of a `fully_shard` module to its accumulators in `reduce_dtype`.

    FSDP does this after each full backward. But W, the second half of a split backward, calls no
    hook of FSDP. Without this function, the gradients of all microbatches would add up in the
    parameters' dtype.

    Args:
        module: The module of a stage. Nothing happens if `fully_shard` was not applied to the
            module.
    """
    for parameter in (p for group in list_parameter_groups(module) for p in group.fsdp_params):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def list_parameter_groups(module: Any) -> list[Any]:
    """Return FSDP's groups of parameters in the module of a stage.

    Args:
        module: The module. The list is empty if `fully_shard` was not applied to the module.
    """
    if not isinstance(module, FSDPModule):
        return []
    parts: Iterator[Any] = module.modules()  # type: ignore[attr-defined]
    # Several modules may share one state, as after `fully_shard([norm, head])`.
    states = dict.fromkeys(part._get_fsdp_state() for part in parts if isinstance(part, FSDPModule))
    return [group for state in states for group in state._fsdp_param_groups]


def has_dtensor_weight(parameter: Any) -> bool:
    """Return whether a parameter of FSDP is a DTensor while it is unsharded, or a shard of one.

    torch 2.14 and later keep a parameter with types of `spmd_types` as a plain tensor. This tensor
    is the complete weight if no mesh dimension shards it.

    Args:
        parameter: An `FSDPParam`.
    """
    spec = parameter._unsharded_dtensor_spec
    if spec is None:
        return False
    is_plain = getattr(parameter, "is_spmd_types", False)
    return not is_plain or not all(placement.is_replicate() for placement in spec.placements)


@contextmanager
def unshard_stages(stages: Sequence[Any], *, trains: bool) -> Iterator[None]:
    """Keep the parameters of stages under `fully_shard` unsharded in this context.

    FSDP neither reshards nor reduces within the context. Gradients add up in `reduce_dtype`. At the
    end of the context, the gradients are reduced once, and the stages are sharded again.

    Args:
        stages: The stages of this rank.
        trains: True if the context computes gradients.
    """
    sharded_stages = [stage for stage in stages if isinstance(stage.submod, FSDPModule)]
    groups = [group for stage in sharded_stages for group in list_parameter_groups(stage.submod)]
    for group in groups:
        group.lazy_init()
        group.unshard()
        group.wait_for_unshard()
        group.reshard = group.post_backward = _do_nothing
        for p in group.fsdp_params:
            if p.reduce_dtype is not None:
                p.unsharded_param.grad_dtype = p.reduce_dtype
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        for group in groups:
            del group.reshard, group.post_backward
        if is_complete and trains:
            for stage in sharded_stages:
                stage.perform_reduce_grad(1)
        for group in groups:
            for p in group.fsdp_params:
                p.unsharded_param.grad = None
            group._to_sharded()


def _do_nothing(*_: Any) -> None:
    """Replace a method of FSDP that must not run."""
