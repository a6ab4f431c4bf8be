"""Segment boundaries and sliced messages in the oracle of `oracle_threads.py`.

At f, tensor-parallel ranks enter a region.  All ranks have the same activation there, and each
computes an addend of its gradient.  At g, they leave the region.  Each rank computes an addend of
the activation, and all ranks have the same gradient.  At d and c, before and after experts, an
all-to-all exchanges the values of tokens between ranks.

With sequence parallelism, a rank has only the values of some tokens outside of a region.  At the
entry of a region, it gets the values of all tokens.  At the exit, the addends are summed, and each
rank gets the sums of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests import oracle_sharding
from tests.oracle_values import OracleError

if TYPE_CHECKING:
    from tests.oracle_host import Host

SUMS = (Opcode.TPReduceAct, Opcode.TPReduceGrad)
ADDEND, OWN, ALL = "addend", "own tokens", "all tokens"
# All-to-all -> the letter of its boundaries, and True if it exchanges gradients.
EXCHANGES = {
    Opcode.Dispatch: ("d", False),
    Opcode.Combine: ("c", False),
    Opcode.DispatchGrad: ("d", True),
    Opcode.CombineGrad: ("c", True),
}
SLICES = (Opcode.TPScatterAct, Opcode.TPGatherAct, Opcode.TPScatterGrad, Opcode.TPGatherGrad)


def met(host: Host, stage: int) -> str:
    """Return the letter of the segment boundary after a stage, or ""."""
    return host.machine.program.segment_boundaries[stage : stage + 1] if stage >= 0 else ""


def given(host: Host, i: Instr) -> object:
    """Return the form of the value that a forward or backward gives to its neighbor on the rank.

    True means that the neighbor can use the value without a collective.
    """
    goes, letter = i.op is Opcode.Forward, met(host, i.stage - (i.op is not Opcode.Forward))
    if letter == ("g" if goes else "f"):
        return ADDEND
    if letter in ("d", "c"):
        return f"not exchanged at {letter}"
    inside = letter and letter in "fg" and host.machine.program.sequence_parallel
    return OWN if inside else True


def taken(host: Host, i: Instr) -> object:
    """Return the form of the value that a forward or backward needs."""
    goes = i.op is Opcode.Forward
    enters = met(host, i.stage - 1) == "f" if goes else met(host, i.stage) == "g"
    return ALL if enters and host.machine.program.sequence_parallel else True


def meet(host: Host, i: Instr) -> None:
    """Issue a collective that replaces addends by their sum, or some tokens by all tokens."""
    grad = i.op in (Opcode.TPReduceGrad, Opcode.TPGatherGrad)
    sums = i.op in SUMS
    came, made = (ADDEND, True) if sums else (OWN, ALL)
    letter = ("gf" if sums else "fg")[grad]
    if met(host, i.stage if grad else i.stage - 1) != letter:
        raise OracleError(f"{i}: the program does not say that anybody meets there")
    host.queue("gathers")
    kind, maker = ("grad", i.stage + 1) if grad else ("act", i.stage - 1)
    slot = (f"{kind}_in", i.stage, i.mb)
    host.expect(host.take(*slot), kind, maker, i.mb, came)
    host.make(host.give(*slot), kind, maker, i.mb, made)


def exchange(host: Host, i: Instr) -> None:
    """Issue an all-to-all that replaces the values of a boundary by the exchanged values."""
    letter, grad = EXCHANGES[i.op]
    if met(host, i.stage if grad else i.stage - 1) != letter:
        raise OracleError(f"{i}: the program has no such all-to-all there")
    host.queue("all-to-alls")
    oracle_sharding.meet_experts(host, i)
    kind, maker = ("grad", i.stage + 1) if grad else ("act", i.stage - 1)
    slot = (f"{kind}_in", i.stage, i.mb)
    host.expect(host.take(*slot), kind, maker, i.mb, f"not exchanged at {letter}")
    host.make(host.give(*slot), kind, maker, i.mb, True)


def reshape(host: Host, i: Instr) -> None:
    """Issue a scatter or a gather, which replaces the value in its slot."""
    if host.machine.program.tp == 1:
        raise OracleError(f"{i}: there is no tensor-parallel group")
    if host.machine.program.sequence_parallel:
        if i.op in (Opcode.TPScatterAct, Opcode.TPScatterGrad):
            raise OracleError(f"{i}: each rank has its own tokens only")
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
