"""Around: what a module finds where it runs, and what it must leave as it was, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from schedir.errors import ModelError
from schedir.ir.ops import Instr
from schedir.runtime.bits import versions_of
from schedir.runtime.buffers import buffers_checked
from schedir.runtime.gradients import Gradients
from schedir.runtime.random import FORWARD
from schedir.runtime.rank import State
from schedir.runtime.versions import Versions
from schedir.runtime.weight_write_checks import weight_writes_checked


def around(state: State, i: Instr, purpose: int, run: Callable[[], None]) -> Callable[[], None]:
    """The same as `run`, which computes with an own stage, with the random numbers and the weights
    that are the microbatch's: also where a backward recomputes.  `purpose` is one of `random`."""
    if purpose == FORWARD and i.stage in state.versions:
        run = partial(_without_gradients, state.stages[i.stage].gradients, i.stage, run)
        run = partial(
            _in_place, state.versions[i.stage], int(state.plan.version(i.stage, i.mb)), run
        )
    run = weight_writes_checked(state, i, purpose == FORWARD, run)
    checked = buffers_checked(state, i, purpose == FORWARD, run)
    seeded = state.draws.seeded(purpose, i.stage, i.mb, checked)
    return on_version(state, i, seeded)


def _without_gradients(gradients: Gradients, stage: int, run: Callable[[], None]) -> None:
    """Run a forward; raise ModelError if it adds to gradients.

    In a program of several updates a forward may run while the sum has gradients of an update
    before its own.
    """
    before = versions_of(gradients.flat)
    run()
    if versions_of(gradients.flat) != before:
        raise ModelError(
            f"stage {stage} calls backward() in its forward, and in a program of several updates "
            "the gradient may be added to that of another update",
            hint="add the auxiliary loss to the loss, or compile a program of one update",
        )


def _in_place(versions: Versions, version: int, run: Callable[[], None]) -> None:
    """Run a forward. In the first step, raise ModelError if it replaced a Parameter."""
    run()
    if versions.by_value:
        versions.require_in_place(version)


def on_version(state: State, i: Instr, run: Callable[[], None]) -> Callable[[], None]:
    """The same with the weights that are the microbatch's, or the stage's own of what it shares."""
    stage, versions = state.stages[i.stage], state.versions.get(i.stage)
    if versions is not None:
        use: Callable[[], None] = partial(versions.use, int(state.plan.version(i.stage, i.mb)))
    elif stage.own is not None:
        use = stage.own.use
    else:
        return run

    def on() -> None:
        use()
        run()

    return on
