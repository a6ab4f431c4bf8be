"""Sharded weights: what the oracle's host does where replicas hold a part each (ZeRO).

A part of the oracle in `threads.py`.  All replicas run one Stream, so one of them stands for all.

- A stage's weights are in parts, or whole.  An Unshard finds them in parts and leaves them whole,
  as they are then; a Reshard does the opposite.  Who computes with them, and does not only add to
  their gradient, finds them whole as it is issued and as it runs, and as they were when the step
  began.  There is room for as many whole ones as the rank has slots, if it says how many.
- The step finds all in parts, and leaves them for the next one: nothing touches them behind it.
- A ReduceScatter takes out of the sum of gradients what is in it, which is something, and adds it
  to the part that stays.  While one has not ended, nothing is added to the sum.  Whoever goes on
  with the part finds all gradients in it, once, and nothing left in the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.ops import Instr, Opcode, Token

if TYPE_CHECKING:
    from tests.host import Host

READS = (Opcode.Forward, Opcode.Backward, Opcode.BackwardInput, Opcode.Recompute)
TURNS = (Opcode.Unshard, Opcode.Reshard, Opcode.ReduceScatter)
VALUES = (Token.FULL, Token.PARTS, Token.ROOM)


def require(host: Host, i: Instr) -> None:
    if not host.machine.zero:
        host.wrong("replicas hold all, and no parts")
    if i.mb != host.turns[i[:2]]:
        host.wrong("it is not its turn")
    host.turns[i[:2]] += 1


def read(host: Host, i: Instr) -> None:
    """Whole weights are there when it is issued, and when it runs."""
    if not host.machine.zero or i.stage < host.machine.frozen:
        return
    host.look("full", i.stage)
    entry = host.entry

    def see() -> None:
        if host.whole.get(i.stage) != 0:
            host.fail(entry, f"runs on weights of version {host.whole.get(i.stage)}")

    entry.actions.append(see)


def unshard(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("params")
    host.take("parts", i.stage)
    host.give("full", i.stage)
    if host.room is not None:
        if not host.room:
            host.wrong("there is no slot for it")
        host.entry.waits.append(host.room.pop(0))
    entry = host.entry

    def gather() -> None:
        if i.stage in host.whole:
            host.fail(entry, "they are whole already")
        host.whole[i.stage] = host.stepped

    entry.actions.append(gather)


def reshard(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("compute")
    host.take("full", i.stage)
    host.give("parts", i.stage)
    if host.room is not None:
        host.room.append(host.entry.done)
    host.entry.actions.append(lambda: host.whole.pop(i.stage))


def reduce_scatter(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("reductions")
    if host.machine.program.reduce == "end" and i.mb:
        host.wrong("it is reduced once, at the end")
    added = [slot for slot in host.slots if slot[0] == "added" and slot[-2] == i.stage]
    if not added:
        host.wrong("nothing was added since it was reduced")
    for slot in added:
        host.take(*slot)
    result = ("half grad" if len(host.machine.holders) > 1 else "grad", i.stage, 0)
    host.slots.pop(result, None)  # of the turn before, to which it adds
    host.give(*result)
    host.reducing[i.stage].append(host.entry)

    def reduce() -> None:
        host.parts[i.stage] += host.sums[i.stage]
        host.sums[i.stage] = []

    host.entry.actions.append(reduce)


def add(host: Host, stage: int) -> None:
    """Who adds to the sum waits for those who take it, and finds that they have ended."""
    entry, before = host.entry, [*host.reducing[stage]]
    if host.machine.program.reduce == "turn":
        entry.waits += [other.done for other in before]

    def see() -> None:
        if not all(other.done.when for other in before):
            host.fail(entry, "adds to what is being reduced")

    entry.actions.append(see)


def step(host: Host) -> None:
    """The optimizer steps parts."""
    entry = host.entry
    for stage in host.trained:
        host.take("parts", stage)

    def see() -> None:
        if host.whole:
            host.fail(entry, f"leaves {host.whole} whole, as they were")
        host.stepped += 1

    entry.actions.append(see)
