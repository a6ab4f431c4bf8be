"""Formulas for the bubble and the memory of each schedule.

The arguments are numbers or arrays: P ranks, v stages per rank, m microbatches, and the times F, I
and W of one stage. I includes recomputation. tests/pure/test_planner_families.py compares the
formulas with the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from schedir.errors import UsageError, describe
from schedir.schedules import suggest_schedules

WaitFormula = Callable[[Any, Any, Any], Any]  # A function of F, I and W.
CountFormula = Callable[[Any, Any, Any], Any]  # A function of P, v and m.


class ScheduleFormulas(NamedTuple):
    """The formulas of a schedule, for stages with equal times.

    The bubble of a rank is (P-1) times `wait_time`, plus the time of the exposed messages. With
    full backwards, the error of the number of messages is at most 2. With split backwards, the
    error is at most P + 1, because their dependencies are more complex than the formula assumes.

    Attributes:
        name: The name of the schedule.
        wait_time: The time that a rank waits for each of the other ranks, a function of F, I and W.
        exposed_messages: The number of messages in a step that compute does not hide, a function of
            P, v and m.
        live_activations: The largest number of (stage, microbatch) pairs in flight on rank r, a
            function of P, v, m and r.
        stages_per_rank: The number of stages per rank that the schedule supports.
        is_vee: True if the stages are placed from the first rank to the last and back.
        min_microbatches: The smallest number of microbatches, a function of P.
        needs_multiple_of_ranks: True if the number of microbatches must be a multiple of P.
        has_split_backward: True if W is a separate instruction.
        loss_microbatches: The number of microbatches for which the last stage keeps the saved
            tensors of the loss, a function of P, v and m.
        messages_per_microbatch: The number of exposed messages of every microbatch, a function of
            P. If stages have different times, ranks wait for a slower rank, and this waiting time
            hides these messages.
        boundary_buffers: The number of boundaries that a rank has buffers for, a function of P, v
            and m.
        is_breadth_first: True if all microbatches pass one loop over the ranks before any of them
            starts the next loop. Each loop is then as slow as its slowest stage.
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
    """Return the wait time of GPipe (arXiv 1811.06965) and 1F1B (2104.04473, section 2.2)."""
    return F + I + W


def _zb_h1_wait(F: Any, I: Any, W: Any) -> Any:
    """Return the wait time of `schedules.zb_h1` (2401.10241, section 2)."""
    return np.maximum(F, I + np.maximum(F - W, 0))


def _zb_h2_wait(F: Any, I: Any, W: Any) -> Any:
    """Return the wait time of `schedules.zb_h2`.

    The wait time includes the idle time at the end of the step, in which all ranks wait for the
    gradient norm.
    """
    return np.maximum.reduce([F, F + I - 2 * W, I - F, I - W])


def _zb_v_wait(F: Any, I: Any, W: Any) -> Any:
    """Return the wait time of ZB-V for F <= I, in the order that `schedules.zb_v` builds for F = I.

    If I < F, the error is at most F - I.
    """
    return np.maximum.reduce([W, F, I, 2 * F - I, 2 * (F - W), 2 * (I - W)])


# P is the number of ranks, v the stages per rank, m the microbatches, and r a rank.
SCHEDULE_FORMULAS: Final = {
    formulas.name: formulas
    for formulas in (
        ScheduleFormulas(
            name="gpipe",
            wait_time=_flush_wait,
            exposed_messages=lambda P, v, m: 2 * (P - 1),
            live_activations=lambda P, v, m, r: m + 0 * r,
            loss_microbatches=lambda P, v, m: m,
        ),
        ScheduleFormulas(
            name="one_f_one_b",
            wait_time=_flush_wait,
            exposed_messages=lambda P, v, m: (
                2 * (P - 1) * np.maximum(m / P, 1) + 2 * (P - 2) * (m > P) * (P > 1)
            ),
            live_activations=lambda P, v, m, r: np.minimum(P - r, m),
            messages_per_microbatch=lambda P: 2 * (P - 1) / P,
        ),
        ScheduleFormulas(
            name="eager_1f1b",
            wait_time=_flush_wait,
            exposed_messages=lambda P, v, m: 2 * (P - 1),
            live_activations=lambda P, v, m, r: np.minimum(2 * (P - 1 - r) + 1, m),
        ),
        ScheduleFormulas(
            name="interleaved",
            wait_time=_flush_wait,
            exposed_messages=lambda P, v, m: 2 * (v * P - 1),
            live_activations=lambda P, v, m, r: np.minimum(
                2 * (P - 1 - r) + (v - 1) * P + 1, v * m
            ),
            stages_per_rank="many",
            needs_multiple_of_ranks=True,
        ),
        ScheduleFormulas(
            name="looped_bfs",
            wait_time=_flush_wait,
            exposed_messages=lambda P, v, m: 2 * (P - 1),
            live_activations=lambda P, v, m, r: v * m + 0 * r,
            stages_per_rank="many",
            min_microbatches=lambda P: P,
            loss_microbatches=lambda P, v, m: m,
            boundary_buffers=lambda P, v, m: 4 + np.maximum(m - P, 0),
            is_breadth_first=True,
        ),
        ScheduleFormulas(
            name="zb_h1",
            wait_time=_zb_h1_wait,
            exposed_messages=lambda P, v, m: 4 * (P - 1),
            live_activations=lambda P, v, m, r: np.minimum(P, m) + 0 * r,
            min_microbatches=lambda P: P,
            has_split_backward=True,
            loss_microbatches=lambda P, v, m: np.minimum(P, m),
        ),
        ScheduleFormulas(
            name="zb_h2",
            wait_time=_zb_h2_wait,
            exposed_messages=lambda P, v, m: P - 1,
            live_activations=lambda P, v, m, r: np.minimum(2 * P - 1, m) + 0 * r,
            min_microbatches=lambda P: 2 * P - 1,
            has_split_backward=True,
            loss_microbatches=lambda P, v, m: np.minimum(2 * P - 1, m),
        ),
        ScheduleFormulas(
            name="interleaved_zb",
            wait_time=_zb_h1_wait,
            exposed_messages=lambda P, v, m: (v + 3) * P - 4,
            live_activations=lambda P, v, m, r: v * P + 0 * r,
            stages_per_rank="many",
            needs_multiple_of_ranks=True,
            has_split_backward=True,
            loss_microbatches=lambda P, v, m: np.minimum(P, m),
        ),
        ScheduleFormulas(
            name="zb_v",
            wait_time=_zb_v_wait,
            exposed_messages=lambda P, v, m: np.maximum(6 * P - 9, 0),
            live_activations=lambda P, v, m, r: np.minimum(2 * P, 2 * m) + 0 * r,
            stages_per_rank="two",
            is_vee=True,
            min_microbatches=lambda P: 2 * P - 1,
            has_split_backward=True,
        ),
    )
}
DEFAULT_SCHEDULES: Final = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def describe_schedule_names() -> str:
    """Return a text that lists the schedules with formulas, and the default schedules."""
    extra = [name for name in SCHEDULE_FORMULAS if name not in DEFAULT_SCHEDULES]
    return f"{', '.join(SCHEDULE_FORMULAS)}; the default is all but {', '.join(extra)}"


def get_formulas(name: object, argument: str = "schedule") -> ScheduleFormulas:
    """Return the formulas of a schedule.

    Args:
        name: The name of the schedule.
        argument: Name of the user's argument, for the error message.

    Raises:
        UsageError: The planner has no formulas for this schedule.

    Example:
        >>> get_formulas("zb_h1").has_split_backward
        True
        >>> get_formulas("zb_hl")
        Traceback (most recent call last):
            ...
        schedir.errors.UsageError: schedule: the planner has no formulas for schedule 'zb_hl'
          hint: did you mean 'zb_h2'?
    """
    if isinstance(name, str) and name in SCHEDULE_FORMULAS:
        return SCHEDULE_FORMULAS[name]
    hint = suggest_schedules(name, [*SCHEDULE_FORMULAS]) if isinstance(name, str) else ""
    if not hint.startswith("did you mean"):
        hint = f"the schedules are {describe_schedule_names()}"
    raise UsageError(
        f"{argument}: the planner has no formulas for schedule {describe(name)}",
        hint=hint,
        fields=[argument],
    )


def count_unshards(name: str, P: Any, v: Any, m: Any) -> Any:
    """Return the number of unshards of a rank in a step with sharded weights (`zero=3`).

    With at most two stages per rank, each stage is unsharded once, and then stays unsharded. With
    more stages, Belady's rule gives the number (passes/communication/unshard_placement.py).

    Args:
        name: The name of the schedule.
        P: The number of ranks, or an array.
        v: The number of stages per rank, or an array.
        m: The number of microbatches, or an array.
    """
    groups = np.maximum(m // P, 1)
    if name == "looped_bfs":
        count = 2 * v - 2
    else:
        count = 2 * v - 2 + (groups > 1) * (2 + (groups - 1) * (2 * v - 4))
    return np.where(v <= 2, v, count)
