"""Formulas for the bubble and the memory of each schedule.

Each formula takes arrays: P ranks, v stages per rank, m microbatches, and F, I and W of one stage,
where I has what runs again before it.  tests/pure/test_planner_families.py holds them beside the
simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from schedir.errors import UsageError, describe

WaitFormula = Callable[[Any, Any, Any], Any]  # of F, I and W
CountFormula = Callable[[Any, Any, Any], Any]  # of P, v and m


class ScheduleFormulas(NamedTuple):
    """A schedule, and its laws: where stages are alike, ranks idle (P-1) `wait_time`, and messages
    add as much as `exposed_messages` of them that nothing hides: 2 more or less, or P + 1 where
    halves of a backward stand apart, which wait for each other in more ways than the law has.

    `live_activations` are the stage activations on the rank `r` at most.  `stages_per_rank` per
    rank are one, two, or many, and `is_vee` tells that they lie down the ranks and back.  It takes
    `min_microbatches` microbatches, and where it is `needs_multiple_of_ranks` a multiple of P.
    `has_split_backward` tells that W stands apart.  The last stage keeps what the loss left of
    `loss_microbatches` microbatches.  Of the messages
    `messages_per_microbatch` are every microbatch's, which hide where ranks wait for a slower one
    anyway.  A rank has room for `boundary_buffers` boundaries; and
    `is_breadth_first` tells that all microbatches pass one loop of stages before the next, so that
    each loop is as slow as its slowest stage.
    """

    name: str
    wait_time: WaitFormula
    exposed_messages: CountFormula
    live_activations: Callable[[Any, Any, Any, Any], Any]
    stages_per_rank: Literal["one", "two", "many"] = "one"
    is_vee: bool = False
    min_microbatches: Callable[[Any], Any] = lambda P: 1
    needs_multiple_of_ranks: bool = False
    has_split_backward: bool = False
    loss_microbatches: CountFormula = lambda P, v, m: 1
    messages_per_microbatch: Callable[[Any], Any] = lambda P: 0 * P
    boundary_buffers: CountFormula = lambda P, v, m: 4
    is_breadth_first: bool = False


def _flush_wait(F: Any, I: Any, W: Any) -> Any:
    """GPipe (arXiv 1811.06965) and 1F1B: (P-1)(F+B); SC21 (2104.04473), section 2.2, of a stage."""
    return F + I + W


def _zb_h1_wait(F: Any, I: Any, W: Any) -> Any:
    """ZB-H1 (arXiv 2401.10241, section 2), as `schedules.zb_h1` has it."""
    return np.maximum(F, I + np.maximum(F - W, 0))


def _zb_h2_wait(F: Any, I: Any, W: Any) -> Any:
    """ZB-H2, as `schedules.zb_h2` has it, to the last end: ranks end together for the norm."""
    return np.maximum.reduce([F, F + I - 2 * W, I - F, I - W])


def _zb_v_wait(F: Any, I: Any, W: Any) -> Any:
    """ZB-V at F <= I, as `schedules.zb_v` has it at F = I.  A shorter I waits no less, within
    F - I once."""
    return np.maximum.reduce([W, F, I, 2 * F - I, 2 * (F - W), 2 * (I - W)])


SCHEDULE_FORMULAS: Final = {
    family.name: family
    for family in (
        ScheduleFormulas(
            "gpipe", _flush_wait, lambda P, v, m: 2 * (P - 1), lambda P, v, m, r: m + 0 * r,
            loss_microbatches=lambda P, v, m: m,
        ),
        ScheduleFormulas(
            "one_f_one_b", _flush_wait,
            lambda P, v, m: 2 * (P - 1) * np.maximum(m / P, 1) + 2 * (P - 2) * (m > P) * (P > 1),
            lambda P, v, m, r: np.minimum(P - r, m),
            messages_per_microbatch=lambda P: 2 * (P - 1) / P,
        ),
        ScheduleFormulas(
            "eager_1f1b", _flush_wait, lambda P, v, m: 2 * (P - 1),
            lambda P, v, m, r: np.minimum(2 * (P - 1 - r) + 1, m),
        ),
        ScheduleFormulas(
            "interleaved", _flush_wait, lambda P, v, m: 2 * (v * P - 1),
            lambda P, v, m, r: np.minimum(2 * (P - 1 - r) + (v - 1) * P + 1, v * m),
            stages_per_rank="many", needs_multiple_of_ranks=True,
        ),
        ScheduleFormulas(
            "looped_bfs", _flush_wait, lambda P, v, m: 2 * (P - 1), lambda P, v, m,
            r: v * m + 0 * r,
            stages_per_rank="many", min_microbatches=lambda P: P, loss_microbatches=lambda P, v,
            m: m,
            boundary_buffers=lambda P, v, m: 4 + np.maximum(m - P, 0), is_breadth_first=True,
        ),
        ScheduleFormulas(
            "zb_h1", _zb_h1_wait, lambda P, v, m: 4 * (P - 1), lambda P, v, m,
            r: np.minimum(P, m) + 0 * r,
            min_microbatches=lambda P: P, has_split_backward=True, loss_microbatches=lambda P, v,
            m: np.minimum(P, m),
        ),
        ScheduleFormulas(
            "zb_h2", _zb_h2_wait, lambda P, v, m: P - 1,
            lambda P, v, m, r: np.minimum(2 * P - 1, m) + 0 * r,
            min_microbatches=lambda P: 2 * P - 1, has_split_backward=True,
            loss_microbatches=lambda P, v, m: np.minimum(2 * P - 1, m),
        ),
        ScheduleFormulas(
            "interleaved_zb", _zb_h1_wait, lambda P, v, m: (v + 3) * P - 4,
            lambda P, v, m, r: v * P + 0 * r, stages_per_rank="many",
            needs_multiple_of_ranks=True, has_split_backward=True,
            loss_microbatches=lambda P, v, m: np.minimum(P, m),
        ),
        ScheduleFormulas(
            "zb_v", _zb_v_wait, lambda P, v, m: np.maximum(6 * P - 9, 0),
            lambda P, v, m, r: np.minimum(2 * P, 2 * m) + 0 * r,
            stages_per_rank="two", is_vee=True, min_microbatches=lambda P: 2 * P - 1,
            has_split_backward=True,
        ),
    )
}  # fmt: skip
DEFAULT_SCHEDULES: Final = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def get_formulas(name: object) -> ScheduleFormulas:
    """The family of a schedule's name.  Raises UsageError for one that the planner has no laws of.

    >>> get_formulas("zb_h1").has_split_backward
    True
    >>> get_formulas("zb_hl")
    Traceback (most recent call last):
        ...
    schedir.errors.UsageError: the planner knows no schedule 'zb_hl'
      hint: did you mean zb_h2?
    """
    if isinstance(name, str) and name in SCHEDULE_FORMULAS:
        return SCHEDULE_FORMULAS[name]
    near = get_close_matches(name, SCHEDULE_FORMULAS, 1) if isinstance(name, str) else []
    hint = f"did you mean {near[0]}?" if near else f"it knows {', '.join(SCHEDULE_FORMULAS)}"
    raise UsageError(
        f"the planner knows no schedule {describe(name)}", hint=hint, fields=["schedule"]
    )


def count_unshards(name: str, P: Any, v: Any, m: Any) -> Any:
    """How often a rank makes a stage whole in a step where weights are in parts (`zero=3`): each
    once where two are all, which may be whole at once; else as Belady's rule does
    (`analysis/memory/unshard_residency.py`)."""
    groups = np.maximum(m // P, 1)
    if name == "looped_bfs":
        often = 2 * v - 2
    else:
        often = 2 * v - 2 + (groups > 1) * (2 + (groups - 1) * (2 * v - 4))
    return np.where(v <= 2, v, often)
