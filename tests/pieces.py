"""Pieces: parts of sums where the program says that ranks meet, and slices that are sent.

A part of the oracle in `threads.py`, which says what the machine is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.ops import Instr, Opcode
from tests.carried import Wrong

if TYPE_CHECKING:
    from tests.host import Host

SUMS = (Opcode.SumAct, Opcode.SumGrad)
SLICES = (Opcode.Scatter, Opcode.Gather, Opcode.ScatterGrad, Opcode.GatherGrad)


def met(host: Host, stage: int) -> str:
    """Who meets behind a stage: tensor-parallel ranks that enter a region, or leave it."""
    return host.machine.program.meets[stage : stage + 1] if stage >= 0 else ""


def summed(host: Host, i: Instr) -> bool:
    """Whether what a forward, or a backward, hands to its neighbour here is no part of a sum."""
    if i.op is Opcode.Forward:
        return met(host, i.stage) != "g"
    return met(host, i.stage - 1) != "f"


def meet(host: Host, i: Instr) -> None:
    """Makes a sum of the part, in its place."""
    grad = i.op is Opcode.SumGrad
    if met(host, i.stage if grad else i.stage - 1) != ("f" if grad else "g"):
        raise Wrong(f"{i}: the program does not say that anybody meets there")
    host.queue("gathers")
    kind, maker = ("grad", i.stage + 1) if grad else ("act", i.stage - 1)
    slot = (f"{kind}_in", i.stage, i.mb)
    host.expect(host.take(*slot), kind, maker, i.mb, False)
    host.make(host.give(*slot), kind, maker, i.mb)


def reshape(host: Host, i: Instr) -> None:
    """Scatter and gather, in place: the slot is taken and given again."""
    if host.machine.program.tp == 1:
        raise Wrong(f"{i}: there is no tensor-parallel group")
    grad, gathers = (
        i.op in (Opcode.ScatterGrad, Opcode.GatherGrad),
        i.op in (Opcode.Gather, Opcode.GatherGrad),
    )
    host.queue("gathers" if gathers else "compute")
    kind = "grad" if grad else "act"
    slot = (f"{kind}_in" if gathers else f"{kind}_out", i.stage, i.mb)
    maker = i.stage if not gathers else i.stage + (1 if grad else -1)
    host.expect(host.take(*slot), kind, maker, i.mb, not gathers)
    host.make(host.give(*slot), kind, maker, i.mb, gathers)
