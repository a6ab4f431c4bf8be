"""Sharded stages: when each is whole, where `fully_shard` cut its parameters up.

torch's runtime gathers a stage's parameters at UNSHARD and lets go of them at RESHARD.  What is in
between is all that may be computed with them; these actions are put in as the list is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _Action,
)

from schedir.errors import CompletenessError, OrderError, SlotError


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


def _stages(action: Any) -> tuple[int, ...]:
    """The stages whose parameters an action needs whole."""
    if action.sub_actions is not None:
        return tuple(dict.fromkeys(s for each in action.sub_actions for s in _stages(each)))
    computes = action.is_compute_op or action.computation_type == REDUCE_GRAD
    return (action.stage_index,) if computes else ()


def require_whole(actions: Sequence[Any], active: int, trains: bool) -> None:
    """Refuse a rank's actions that use a stage while it is cut up, make it whole twice, hold more
    than `active` whole at once, or do not reduce it once, after all that adds to its gradient.

    Raises OrderError, SlotError or CompletenessError.
    """
    whole: set[int] = set()
    reduced: set[int] = set()
    used: set[int] = set()
    room = active
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
        used.update(needs)
        reduced.update(stage for _ in range(kind == REDUCE_GRAD))
    if whole:
        raise CompletenessError(f"stages {sorted(whole)} are whole at the end")
    if trains and used != reduced:
        raise CompletenessError(f"stages {sorted(used - reduced)} are not reduced")


def fsdp(module: Any) -> Iterator[Any]:
    """The modules that `fully_shard` was given, of those of a stage."""
    from torch.distributed.fsdp import FSDPModule

    return (m for m in module.modules() if isinstance(m, FSDPModule))
