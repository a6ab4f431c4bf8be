"""Sequence parallelism in the oracle of `oracle_threads.py`.

All ranks of a tensor-parallel group run one Stream, so the oracle has only one of them.  A weight
that all ranks have unsharded has partial gradients.  In each update, they are summed once for each
trained stage, after all other reductions of the stage.  For a tied weight, this includes the sum
over its copies.  Steps, norms and loads of optimizer state verify that the gradients were summed.
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
    """Verify that pipeline ranks and replicas have reduced a stage's gradient."""
    copies = [s for s in host.own if s in host.machine.tied]
    there = [name for name in ("grad", "tied grad") if (name, i.stage, i.mb) in host.slots]
    host.look("tied grad" if i.stage in copies else [*there, "grad"][0], i.stage, i.mb)
    host.total(i.stage, i.mb)


def expect(host: Host, *stages: int, update: int) -> None:
    """Make the current entry wait for the sequence-parallel reductions of some stages."""
    for stage in stages if host.machine.program.sequence_parallel else ():
        if (stage, update) not in host.summed:
            host.wrong(f"gradients of stage {stage} are of a part of the sequence")
        host.entry.waits.append(host.summed[stage, update])
