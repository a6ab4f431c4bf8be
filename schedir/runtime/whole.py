"""Whole: the weights of a rank as everybody knows them, between steps of a run in parts (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schedir.runtime.rank import State
from schedir.runtime.tied import prints


@contextmanager
def whole(state: State) -> Iterator[None]:
    """Within this every parameter of the rank's stages is whole, and may be written to: each
    replica then keeps its part of what there is.

    All processes must enter and leave it together.  Raises ModelError where replicas have not
    written the same.
    """
    weights = [stage.weights for stage in state.stages.values() if stage.weights is not None]
    for one in weights:
        one.show(state.transport.collective)
    try:
        yield
        if state.share.zero:
            state.transport.agree(_numbers(state))  # always: who writes to `data` raises no version
    finally:
        for one in weights:
            one.take()


def _numbers(state: State) -> dict[str, str]:
    """What replicas compare of what there is, written or not."""
    modules = {s: stage.module for s, stage in state.stages.items()}
    return {
        f"the numbers of {p.names[0]} in stage {s}, slice {state.transport.tp_rank}": p.values
        for s, own in prints(modules).items()
        for p in own
    }
