"""Activation offload in the oracle of `oracle_threads.py`.

A backward must find its saved activations on the device.  A move must find them on its source tier,
and leaves them on its target tier.  Each move happens once.  If the program limits the slots of a
rank on the device or the host, a value that arrives on this tier waits for the slot that was freed
first.  It is an error if no slot will be freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests.oracle_values import Event

if TYPE_CHECKING:
    from tests.oracle_host import Host

HERE = "device"
ROOMS = {HERE: "saved", "host": "host"}  # tier -> kind of its slots; the disk has no limit
# Opcode -> source tier, target tier and queue. Snapshots use the queue "copies" as well.
MOVED = {
    Opcode.Offload: (HERE, "host", "copies"),
    Opcode.Reload: ("host", HERE, "back"),
    Opcode.OffloadToDisk: ("host", "disk", "disk"),
    Opcode.ReloadFromDisk: ("disk", "host", "disk"),
}
ALWAYS = Event()
ALWAYS.when = -1


def begin(host: Host) -> None:
    slots = host.machine.program.slots
    for kind, number in slots[host.rank].specified().items() if slots else ():
        host.room[kind] = [ALWAYS] * number


def enter(host: Host, kind: str) -> None:
    """Make the current entry wait for a slot of a kind, if the rank limits these slots."""
    if kind in host.room:
        if not host.room[kind]:
            host.wrong("there is no slot for it")
        host.entry.waits.append(host.room[kind].pop(0))


def leave(host: Host, kind: str) -> None:
    if kind in host.room:
        host.room[kind].append(host.entry.done)


def save(host: Host, i: Instr) -> None:
    enter(host, "saved")
    host.give("saved", i.stage, i.mb)


def use(host: Host, i: Instr) -> None:
    host.take("saved", i.stage, i.mb)
    leave(host, "saved")


def move(host: Host, i: Instr) -> None:
    before, after, queue = MOVED[i.op]
    host.queue(queue)
    if host.turns[i]:
        host.wrong("it was moved so before")
    host.turns[i] += 1
    slot = "saved", i.stage, i.mb
    state = {**host.look(*slot).state}
    if state[True] != before:
        host.wrong(f"it is on the {state[True]}")
    del host.slots[slot]
    host.give(*slot).state = state | {True: after}
    if after in ROOMS:
        enter(host, ROOMS[after])
    if before in ROOMS:
        leave(host, ROOMS[before])
