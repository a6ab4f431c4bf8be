"""Snapshots in the oracle of `oracle_threads.py`.

In a step, the first replica of each trained stage is copied once.  The first update needs the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr

if TYPE_CHECKING:
    from tests.oracle_host import Host


def copied(host: Host) -> list[int]:
    """Return the stages that this rank copies."""
    first = host.machine.holders[0]
    said = host.machine.program.checkpoint_snapshots and host.machine.trains
    return [s for s in host.trained if said and first[s] == host.rank]


def snapshot(host: Host, i: Instr) -> None:
    if i.mb or i.stage not in copied(host):
        host.wrong("nothing is copied there")
    host.queue("copies")
    host.give("copy", i.stage)


def step(host: Host, i: Instr) -> None:
    for stage in copied(host) if not i.mb else ():
        host.take("copy", stage)
