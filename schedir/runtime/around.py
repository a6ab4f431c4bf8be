"""Around: what a module finds where it runs, and what it must leave as it was, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from schedir.ir.ops import Instr, Opcode
from schedir.runtime.buffers import watched
from schedir.runtime.random import BACKWARD, FORWARD, WEIGHT
from schedir.runtime.rank import Rank

_PURPOSES = {Opcode.Forward: FORWARD, Opcode.BackwardWeight: WEIGHT}


def around(rank: Rank, i: Instr, run: Callable[[], None]) -> Callable[[], None]:
    """The same as `run`, which computes with an own stage, with the random numbers and the weights
    that are the microbatch's: also where a backward recomputes."""
    purpose = _PURPOSES.get(i.op, BACKWARD)
    seeded = rank.draws.seeded(purpose, i.stage, i.mb, watched(rank, i, run))
    return on_version(rank, i, seeded)


def on_version(rank: Rank, i: Instr, run: Callable[[], None]) -> Callable[[], None]:
    """The same with the weights that are the microbatch's, or the stage's own of what it shares."""
    stage = rank.stages[i.stage]
    if stage.versions is not None:
        use: Callable[[], None] = partial(stage.versions.use, int(rank.plan.version(i.stage, i.mb)))
    elif stage.own is not None:
        use = stage.own.use
    else:
        return run

    def on() -> None:
        use()
        run()

    return on
