"""Pieces: what passes where the program says that ranks meet, and slices that are sent.

Where ranks enter a region (f), all take the same forward, and each gives an addend of the gradient
back; where they leave it (g), each gives an addend of the activation, and all take the same back.
Where experts begin (d) and end (c), a forward and a backward give values of other ranks' tokens,
and an all-to-all exchanges them.
If they share the sequence, what is the same for all is what each has of its own tokens: in a region
it takes all tokens, and what it makes of all of them is summed to the rank's own.

A part of the oracle in `threads.py`, which says what the machine is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests.oracle_values import Wrong

if TYPE_CHECKING:
    from tests.oracle_host import Host

SUMS = (Opcode.TPReduceAct, Opcode.TPReduceGrad)
ADDEND, OWN, ALL = "addend", "own tokens", "all tokens"
# By all-to-all: the letter of its boundaries, and True if it exchanges gradients.
EXCHANGES = {
    Opcode.Dispatch: ("d", False),
    Opcode.Combine: ("c", False),
    Opcode.DispatchGrad: ("d", True),
    Opcode.CombineGrad: ("c", True),
}
SLICES = (Opcode.TPScatterAct, Opcode.TPGatherAct, Opcode.TPScatterGrad, Opcode.TPGatherGrad)


def met(host: Host, stage: int) -> str:
    """Who meets behind a stage: tensor-parallel ranks that enter a region, or leave it."""
    return host.machine.program.segment_boundaries[stage : stage + 1] if stage >= 0 else ""


def given(host: Host, i: Instr) -> object:
    """What a forward, or a backward, hands to its neighbour here; True for what is taken so."""
    goes, letter = i.op is Opcode.Forward, met(host, i.stage - (i.op is not Opcode.Forward))
    if letter == ("g" if goes else "f"):
        return ADDEND
    if letter in ("d", "c"):
        return f"not exchanged at {letter}"
    inside = letter and letter in "fg" and host.machine.program.sequence_parallel
    return OWN if inside else True


def taken(host: Host, i: Instr) -> object:
    """What a forward, or a backward, must find."""
    goes = i.op is Opcode.Forward
    enters = met(host, i.stage - 1) == "f" if goes else met(host, i.stage) == "g"
    return ALL if enters and host.machine.program.sequence_parallel else True


def meet(host: Host, i: Instr) -> None:
    """Makes a sum of addends, or all tokens of each rank's own, in their place."""
    grad = i.op in (Opcode.TPReduceGrad, Opcode.TPGatherGrad)
    sums = i.op in SUMS
    came, made = (ADDEND, True) if sums else (OWN, ALL)
    letter = ("gf" if sums else "fg")[grad]
    if met(host, i.stage if grad else i.stage - 1) != letter:
        raise Wrong(f"{i}: the program does not say that anybody meets there")
    host.queue("gathers")
    kind, maker = ("grad", i.stage + 1) if grad else ("act", i.stage - 1)
    slot = (f"{kind}_in", i.stage, i.mb)
    host.expect(host.take(*slot), kind, maker, i.mb, came)
    host.make(host.give(*slot), kind, maker, i.mb, made)


def exchange(host: Host, i: Instr) -> None:
    """Exchanges the tokens of a boundary, or their gradients, in their place."""
    letter, grad = EXCHANGES[i.op]
    if met(host, i.stage if grad else i.stage - 1) != letter:
        raise Wrong(f"{i}: the program has no such all-to-all there")
    host.queue("all-to-alls")
    kind, maker = ("grad", i.stage + 1) if grad else ("act", i.stage - 1)
    slot = (f"{kind}_in", i.stage, i.mb)
    host.expect(host.take(*slot), kind, maker, i.mb, f"not exchanged at {letter}")
    host.make(host.give(*slot), kind, maker, i.mb, True)


def reshape(host: Host, i: Instr) -> None:
    """Scatter and gather, in place: the slot is taken and given again."""
    if host.machine.program.tp == 1:
        raise Wrong(f"{i}: there is no tensor-parallel group")
    if host.machine.program.sequence_parallel:
        if i.op in (Opcode.TPScatterAct, Opcode.TPScatterGrad):
            raise Wrong(f"{i}: each rank has its own tokens only")
        meet(host, i)
        return
    grad, gathers = (
        i.op in (Opcode.TPScatterGrad, Opcode.TPGatherGrad),
        i.op in (Opcode.TPGatherAct, Opcode.TPGatherGrad),
    )
    host.queue("gathers" if gathers else "compute")
    kind = "grad" if grad else "act"
    slot = (f"{kind}_in" if gathers else f"{kind}_out", i.stage, i.mb)
    maker = i.stage if not gathers else i.stage + (1 if grad else -1)
    host.expect(host.take(*slot), kind, maker, i.mb, not gathers)
    host.make(host.give(*slot), kind, maker, i.mb, gathers)
