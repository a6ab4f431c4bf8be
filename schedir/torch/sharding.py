"""Sharded stages: when each is whole, where `fully_shard` cut its parameters up.

torch's runtime gathers a stage's parameters at UNSHARD and lets go of them at RESHARD.  What is in
between is all that may be computed with them; these actions are put in as the list is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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

BACKWARDS: Final = (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
COMPUTE: Final = (FORWARD, *BACKWARDS)


def with_shards(actions: Sequence[Any], active: int) -> list[Any]:
    """The actions of a rank, with UNSHARD and RESHARD: at most `active` stages are whole at once.

    Those are kept whole that are used next, so that the one whose next use is farthest goes, and
    each is asked for as soon as there is room.  A stage is used by what computes it and by its
    REDUCE_GRAD, which needs whole gradients.
    """
    uses = [_stages(action) for action in actions]
    coming = _coming(uses, active)
    whole: list[int] = []
    order: list[Any] = []
    for action, used, wanted in zip(actions, uses, coming, strict=True):
        if used:
            for stage in [s for s in whole if s not in wanted]:
                whole.remove(stage)
                order.append(_Action(stage, RESHARD, None))
            for stage in [s for s in wanted if s not in whole]:
                whole.append(stage)
                order.append(_Action(stage, UNSHARD, None))
        order.append(action)
    return order + [_Action(stage, RESHARD, None) for stage in whole]


def _coming(uses: Sequence[Sequence[int]], active: int) -> list[list[int]]:
    """At each action the stages that are used next, the nearest first, `active` of them; and all
    that the action itself uses."""
    coming: list[list[int]] = []
    nearest: list[int] = []
    for used in reversed(uses):
        nearest = [*used, *(s for s in nearest if s not in used)]
        coming.append(nearest[: max(active, len(used))])
    return coming[::-1]


def _stages(action: Any, kinds: Sequence[Any] = (*COMPUTE, REDUCE_GRAD)) -> tuple[int, ...]:
    """The stages that an action of one of these kinds is of, or that parts of it are of; unless
    told, those whose parameters it needs whole."""
    if action.sub_actions is not None:
        return tuple(dict.fromkeys(s for each in action.sub_actions for s in _stages(each, kinds)))
    return (action.stage_index,) if action.computation_type in kinds else ()


def require_whole(actions: Sequence[Any], active: int) -> None:
    """Refuse a rank's actions that use a stage while it is cut up, make it whole twice, hold more
    than `active` whole at once, or do not reduce it once, after all that adds to its gradient.

    Raises OrderError, SlotError or CompletenessError.
    """
    whole: set[int] = set()
    reduced: set[int] = set()
    added: set[int] = set()  # to gradients of these
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
        needs = _stages(action)
        room = max(active, len(needs))
        if needs and len(whole) > room:
            raise SlotError(f"at {action} stages {sorted(whole)} are whole, and {active} may be")
        for s in needs:
            if s not in whole:
                raise OrderError(f"{action} needs stage {s}, which is cut up")
            if s in reduced:
                raise OrderError(f"{action} comes after the reduction of stage {s}")
        added.update(_stages(action, BACKWARDS))
        reduced.update(_stages(action, (REDUCE_GRAD,)))
    if whole:
        raise CompletenessError(f"stages {sorted(whole)} are whole at the end")
    if added != reduced:
        raise CompletenessError(f"stages {sorted(added ^ reduced)} are not reduced after backwards")
