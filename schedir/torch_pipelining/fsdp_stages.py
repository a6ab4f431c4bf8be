"""Support stages under `fully_shard`: when each is unsharded.

torch's runtime gathers a stage's parameters at UNSHARD and lets go of them at RESHARD.  What is in
between is all that may be computed with them; these actions are put in as the list is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from schedir.analysis.memory.unshard_residency import place_unshards
from schedir.errors import CompletenessError, OrderError, SlotError

BACKWARDS: Final = (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
COMPUTE: Final = (FORWARD, *BACKWARDS)


def insert_unshards(actions: Sequence[Any], unsharded_stages: int) -> list[Any]:
    """The actions of a rank, with UNSHARD and RESHARD: at most `unsharded_stages` are
    whole at once, or as many as an action uses.

    They are placed as Unshard and Reshard of a program with zero 3 are.  A stage is used by what
    computes it and by its REDUCE_GRAD, which needs whole gradients.
    """
    put = place_unshards([_stages_of_action(action) for action in actions], unsharded_stages)
    order: list[Any] = []
    for changes, also in zip(put, [*([action] for action in actions), []], strict=True):
        order += [_Action(one, UNSHARD if begins else RESHARD, None) for one, begins in changes]
        order += also
    return order


def _max_unsharded(actions: Sequence[Any], unsharded_stages: int) -> int:
    """How many stages may be whole at once."""
    return max(unsharded_stages, *(len(_stages_of_action(action)) for action in actions), 0)


def _stages_of_action(
    action: Any, kinds: Sequence[Any] = (*COMPUTE, REDUCE_GRAD)
) -> tuple[int, ...]:
    """The stages that an action of one of these kinds is of, or that parts of it are of; unless
    told, those whose parameters it needs whole."""
    if action.sub_actions is not None:
        return tuple(
            dict.fromkeys(s for each in action.sub_actions for s in _stages_of_action(each, kinds))
        )
    return (action.stage_index,) if action.computation_type in kinds else ()


def require_unsharded(actions: Sequence[Any], unsharded_stages: int) -> None:
    """Refuse a rank's actions that use a stage while it is cut up, make it whole twice, hold more
    than `unsharded_stages` (or than one uses) whole at once, or do not reduce it once, after all
    that adds to its gradient.

    Raises OrderError, SlotError or CompletenessError.
    """
    whole: set[int] = set()
    reduced: set[int] = set()
    added: set[int] = set()  # to gradients of these
    room = _max_unsharded(actions, unsharded_stages)
    for action in actions:
        kind, stage = action.computation_type, action.stage_index
        if kind == UNSHARD:
            if stage in whole:
                raise OrderError(f"{action} makes stage {stage} whole, which it is")
            whole.add(stage)
        elif kind == RESHARD:
            if stage not in whole:
                raise OrderError(f"{action} cuts up stage {stage}, which is cut up")
            whole.remove(stage)
        needs = _stages_of_action(action)
        if needs and len(whole) > room:
            raise SlotError(f"at {action} stages {sorted(whole)} are whole, and {room} may be")
        for s in needs:
            if s not in whole:
                raise OrderError(f"{action} needs stage {s}, which is cut up")
            if s in reduced:
                raise OrderError(f"{action} comes after the reduction of stage {s}")
        added.update(_stages_of_action(action, BACKWARDS))
        reduced.update(_stages_of_action(action, (REDUCE_GRAD,)))
    if whole:
        raise CompletenessError(f"stages {sorted(whole)} are whole at the end")
    if added != reduced:
        raise CompletenessError(f"stages {sorted(added ^ reduced)} are not reduced after backwards")


def accumulate_gradients(module: Any) -> None:
    """Add the gradients of a `fully_shard` module to its accumulators, which are in `reduce_dtype`.

    FSDP does this after each full backward. The half that computes the gradients of weights calls
    no hook of FSDP: the gradients of all microbatches would add up in the parameters' dtype.

    Args:
        module: The module of a stage. Nothing happens if `fully_shard` was not applied to it.
    """
    if not isinstance(module, FSDPModule):
        return
    parts: Iterator[Any] = module.modules()  # type: ignore[attr-defined]
    states = [part._get_fsdp_state() for part in parts if isinstance(part, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    for parameter in (p for group in groups for p in group.fsdp_params):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
