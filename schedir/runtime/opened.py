"""Opened: a step that programs share: open ones, which accumulate, and the one that closes it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from schedir.errors import ExecutionError
from schedir.ir.program import Program
from schedir.runtime.batch import Batch


class Opened(NamedTuple):
    """What programs have run of a step: how many microbatches of each replica, of how many in all
    if that is said, by what gradients are to be multiplied, and the losses that this rank has."""

    done: int
    of: int | None
    scale: float | Tensor
    losses: tuple[Tensor, ...] = ()


def opened_by(step: Opened | None, program: Program, batch: Batch, *, drawn: bool) -> Opened:
    """The step of which a program runs the next microbatches: one that is open, or a new one.

    `drawn` says that numbers are drawn for microbatches.  Raises ExecutionError for microbatches
    or a scale that do not go with what was run, and where replicas cannot number theirs.
    """

    def refuse(fact: str, hint: str) -> ExecutionError:
        return ExecutionError(fact, program=program.name, hint=hint)

    own, before = program.plan.microbatches, 0 if step is None else step.done
    of = batch.of if step is None or step.of is None else step.of
    if batch.of not in (None, of):
        raise refuse(
            f"the step is one of {of} microbatches, and now of {batch.of}",
            "`of` is the same for all programs of a step",
        )
    if of is None and program.open and drawn and program.dp > 1:
        raise refuse(
            f"{program.dp} replicas draw numbers for the microbatches of a whole step, and nobody "
            "says how many there are",
            f"step(..., of={2 * own}), the same for all programs of the step; or seed=None",
        )
    done = before + own
    if of is not None and (done >= of if program.open else done != of):
        ends = "stays open" if program.open else "ends"
        raise refuse(
            f"a step of {of} microbatches {ends} after {done}",
            "`of` counts those of all programs of a step; the last of them is not open",
        )
    if step is None:
        return Opened(0, of, batch.scale)
    if not same_scale(step.scale, batch.scale):
        raise refuse(
            f"the step was begun with a scale of {_said(step.scale)}, and goes on with "
            f"{_said(batch.scale)}",
            "one scale for all programs of a step: gradients are multiplied when all are there",
        )
    return step._replace(of=of)


def same_scale(one: float | Tensor, other: float | Tensor) -> bool:
    """Whether two scales are one, as far as the host may look: on a GPU they are one tensor."""
    if one is other:
        return True
    if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in (one, other)):
        return False
    return bool(one == other)


def _said(scale: float | Tensor) -> str:
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        return "a tensor"
    return f"{float(scale):g}"
