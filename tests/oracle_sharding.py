"""Sharded weights: what the oracle's host does where replicas hold a part each (ZeRO).

A part of the oracle in `threads.py`.  All replicas run one Stream, so one of them stands for all.

- A stage's weights are in parts, or whole.  An Unshard finds them in parts and leaves them whole,
  as they are then; a Reshard does the opposite.  Who computes with them, and does not only add to
  their gradient, finds them whole as it is issued and as it runs, and as they were when the step
  began.  There is room for as many whole ones as the rank has slots, if it says how many.
- The step finds all in parts, and leaves them for the next one: nothing touches them behind it.
- A sum of gradients is there from who adds first until it is reduced; of these, too, there are no
  more than slots.  A ReduceScatter takes out of the sum what is in it, which is something, and
  adds it to the part that stays.  While one has not ended, nothing is added to the sum.  Whoever
  goes on with the part finds all gradients in it, once, and nothing left in the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import TIERS, Instr, Opcode, Value
from tests import away
from tests.oracle_values import Event, SlotValue

if TYPE_CHECKING:
    from tests.oracle_host import Host

READS = (Opcode.Forward, Opcode.Backward, Opcode.BackwardInput, Opcode.Recompute)
TURNS = (Opcode.Unshard, Opcode.Reshard, Opcode.ReduceScatter)
OWN_VALUES = (Value.UNSHARDED_PARAMS, Value.SHARDED_PARAMS, Value.WGRAD_BUFFER)


def begin(host: Host) -> None:
    """Weights are in parts when a step begins."""
    machine = host.machine
    if machine.zero:
        for stage in host.trained:
            host.slots["parts", stage] = SlotValue(away.ALWAYS, state={True: TIERS[0], False: ""})


def meet_replicas(host: Host, i: Instr, lane: str) -> None:
    """The same rank of all replicas: they meet by position, and for the same."""
    machine, met = host.machine, Event()
    member = met, int(i.op) << 48 | i.stage << 32 | i.mb
    place = "replicas", lane if machine.model != "blocking_serial" else "all", host.rank
    host.entry.actions.append(lambda: machine.join(place, machine.replicas, member))
    host.entry.meets.append(met)


def reduced(host: Host, *stages: int) -> None:
    """Have the entry find all in the parts that are reduced, where it may be by turns."""
    for stage in stages if host.machine.zero else ():
        host.total(stage, 0)


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
    host.look("unsharded_params", i.stage)
    entry = host.entry

    def see() -> None:
        if host.whole.get(i.stage) != 0:
            host.fail(entry, f"runs on weights of version {host.whole.get(i.stage)}")

    entry.actions.append(see)


def unshard(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("params")
    meet_replicas(host, i, "params")
    host.take("parts", i.stage)
    host.give("unsharded_params", i.stage)
    away.enter(host, "unsharded_params")
    entry = host.entry

    def gather() -> None:
        if i.stage in host.whole:
            host.fail(entry, "they are whole already")
        host.whole[i.stage] = host.stepped

    entry.actions.append(gather)


def reshard(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("compute")
    host.take("unsharded_params", i.stage)
    host.give("parts", i.stage)
    away.leave(host, "unsharded_params")

    def let_go() -> None:
        del host.whole[i.stage]

    host.entry.actions.append(let_go)


def reduce_scatter(host: Host, i: Instr) -> None:
    require(host, i)
    host.queue("reductions")
    meet_replicas(host, i, "dp")
    if host.machine.program.reduce_scatter_at == "update_end" and i.mb:
        host.wrong("it is reduced once, at the end")
    added = [slot for slot in host.slots if slot[0] == "added" and slot[-2] == i.stage]
    if not added:
        host.wrong("nothing was added since it was reduced")
    if (i.stage, 0) in host.summed:
        host.wrong("what it adds is not summed over parts of the sequence")
    if i.stage in host.states and not host.states[i.stage][0].startswith("on the"):
        host.wrong("its stage's state was loaded for the gradient of the turns before")
    if any(found.startswith(("step", "stored", "spill")) for found, _ in host.states.values()):
        host.wrong("a state of its rank was stepped without it")
    for slot in added:
        host.take(*slot)
    if i.stage in host.adding:
        host.adding.remove(i.stage)
        away.leave(host, "wgrad")
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
    if host.machine.zero > 1 and stage not in host.adding:
        host.adding.add(stage)
        away.enter(host, "wgrad")
    if host.machine.program.reduce_scatter_at == "each_backward":
        entry.waits += [other.done for other in before]

    def see() -> None:
        if not all(other.done.when for other in before):
            host.fail(entry, "adds to what is being reduced")

    entry.actions.append(see)


def step(host: Host) -> None:
    """The optimizer steps parts."""
    if not host.machine.zero:
        return
    for stage in host.trained:
        host.take("parts", stage)
    none_whole(host)

    def count() -> None:
        host.stepped += 1

    host.entry.actions.append(count)


def none_whole(host: Host) -> None:
    """Have the entry find no weights whole when it runs."""
    entry = host.entry

    def see() -> None:
        if host.whole:
            host.fail(entry, f"leaves {host.whole} whole, as they were")

    entry.actions.append(see)
