"""Away: what the oracle's host does where what a forward saved leaves the device and comes back.

A part of the oracle in `threads.py`.  Who uses it finds it on the device; who moves it finds it
where it is to go from, and there it is no more.  It goes each way once.  A rank that says how many
slots it has on the device, or on the host, has room for as many at once there: whoever brings one
waits for who left the slot that has been free for longest, and one that nobody is about to leave is
an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests.oracle_values import Event

if TYPE_CHECKING:
    from tests.oracle_host import Host

HERE = "device"
ROOMS = {HERE: "saved", "host": "host"}  # the disk has room
# From where to where, and in which queue; that to the host is that of snapshots.
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
    """Have the entry wait for a slot of a kind, if the rank says how many there are."""
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
