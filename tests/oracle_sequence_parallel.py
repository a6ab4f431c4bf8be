"""Sequenced: what the oracle's host does where tensor-parallel ranks share the sequence.

A part of the oracle in `threads.py`.  All ranks of such a group run one Stream, so one of them
stands for all.  What each has of the gradients of weights that all hold whole is summed once for
each trained stage in an update: when all else has been added to them, and over the copies, if the
stage holds a tied weight.  Whoever steps them, takes their norm, or loads
their state finds that it has been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr

if TYPE_CHECKING:
    from tests.oracle_host import Host


def reduce(host: Host, i: Instr) -> None:
    host.queue("gathers")
    if not host.machine.program.sequence_parallel:
        host.wrong("each rank has seen all of the sequence")
    if (i.stage, i.mb) in host.summed:
        host.wrong("they are summed already")
    reduced(host, i)
    host.summed[i.stage, i.mb] = host.entry.done


def reduced(host: Host, i: Instr) -> None:
    """Have the entry find a stage's gradient as all pipeline ranks and replicas leave it."""
    copies = [s for s in host.own if s in host.machine.tied]
    there = [name for name in ("grad", "tied grad") if (name, i.stage, i.mb) in host.slots]
    host.look("tied grad" if i.stage in copies else [*there, "grad"][0], i.stage, i.mb)
    host.total(i.stage, i.mb)


def expect(host: Host, *stages: int, update: int) -> None:
    """Have the entry wait until these stages' have been summed."""
    for stage in stages if host.machine.program.sequence_parallel else ():
        if (stage, update) not in host.summed:
            host.wrong(f"gradients of stage {stage} are of a part of the sequence")
        host.entry.waits.append(host.summed[stage, update])
