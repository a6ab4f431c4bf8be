"""ZeRO in the oracle of `oracle_threads.py`.

All replicas run the same Streams.

- The weights of a stage are sharded or unsharded.  An Unshard gathers sharded weights as they are
  then, and a Reshard frees unsharded weights.  F, B, I and R need unsharded weights when they are
  issued and when they run, from a gather before the optimizer step.  If the program limits the
  slots, a gather waits for a free slot.
- The optimizer step needs all weights sharded.  No later instruction uses them.
- A gradient sum exists from the first addition until its reduction.  These sums also need slots.  A
  ReduceScatter moves the gradients in the sum to the shard.  The sum must not be empty.  No
  gradient may be added to the sum during the ReduceScatter.  Instructions that use the shard verify
  that it has each gradient once, and that the sum is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import TIERS, Instr, Opcode, Value
from tests import oracle_activation_offload
from tests.oracle_values import Event, SlotValue

if TYPE_CHECKING:
    from tests.oracle_host import Host

READS = (Opcode.Forward, Opcode.Backward, Opcode.BackwardInput, Opcode.Recompute)
TURNS = (Opcode.Unshard, Opcode.Reshard, Opcode.ReduceScatter)
OWN_VALUES = (Value.UNSHARDED_PARAMS, Value.SHARDED_PARAMS, Value.WGRAD_BUFFER)


def begin(host: Host) -> None:
    """Begin a step with sharded weights."""
    machine = host.machine
    if machine.zero:
        for stage in host.trained:
            host.slots["parts", stage] = SlotValue(
                oracle_activation_offload.ALWAYS, state={True: TIERS[0], False: ""}
            )


def meet_replicas(host: Host, i: Instr, lane: str) -> None:
    """Join a collective of this rank in all replicas. Replicas match by position.

    The oracle raises Wrong if the replicas match different instructions.
    """
    machine, met = host.machine, Event()
    member = met, int(i.op) << 48 | i.stage << 32 | i.mb
    place = "replicas", lane if machine.model != "blocking_serial" else "all", host.rank
    host.entry.actions.append(lambda: machine.join(place, machine.replicas, member))
    host.entry.meets.append(met)


def meet_experts(host: Host, i: Instr) -> None:
    """Join an all-to-all of this rank in the replicas of its expert-parallel group."""
    machine, met = host.machine, Event()
    ep = min(machine.program.ep, machine.replicas)
    place = "replicas", "ep", host.rank, host.replica // ep
    member = met, int(i.op) << 48 | i.stage << 32 | i.mb
    host.entry.actions.append(lambda: machine.join(place, ep, member))
    host.entry.meets.append(met)


def reduced(host: Host, *stages: int) -> None:
    """Verify that the shards have all gradients of some stages when the current entry runs."""
    for stage in stages if host.machine.zero else ():
        host.total(stage, 0)


def require(host: Host, i: Instr) -> None:
    if not host.machine.zero:
        host.wrong("replicas hold all, and no parts")
    if i.mb != host.turns[i[:2]]:
        host.wrong("it is not its turn")
    host.turns[i[:2]] += 1


def read(host: Host, i: Instr) -> None:
    """Verify that a stage is unsharded when an instruction is issued and when it runs."""
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
    oracle_activation_offload.enter(host, "unsharded_params")
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
    oracle_activation_offload.leave(host, "unsharded_params")

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
        oracle_activation_offload.leave(host, "wgrad")
    result = ("half grad" if len(host.machine.holders) > 1 else "grad", i.stage, 0)
    host.slots.pop(result, None)  # the result of the previous ReduceScatter, to which this one adds
    host.give(*result)
    host.reducing[i.stage].append(host.entry)

    def reduce() -> None:
        host.parts[i.stage] += host.sums[i.stage]
        host.sums[i.stage] = []

    host.entry.actions.append(reduce)


def add(host: Host, stage: int) -> None:
    """Add to the gradient sum of a stage, after all its earlier ReduceScatters have ended."""
    entry, before = host.entry, [*host.reducing[stage]]
    if host.machine.zero > 1 and stage not in host.adding:
        host.adding.add(stage)
        oracle_activation_offload.enter(host, "wgrad")
    if host.machine.program.reduce_scatter_at == "each_backward":
        entry.waits += [other.done for other in before]

    def see() -> None:
        if not all(other.done.when for other in before):
            host.fail(entry, "adds to what is being reduced")

    entry.actions.append(see)


def step(host: Host) -> None:
    """Run the optimizer step on the shards."""
    if not host.machine.zero:
        return
    for stage in host.trained:
        host.take("parts", stage)
    none_whole(host)

    def count() -> None:
        host.stepped += 1

    host.entry.actions.append(count)


def none_whole(host: Host) -> None:
    """Verify that no stage is unsharded when the current entry runs."""
    entry = host.entry

    def see() -> None:
        if host.whole:
            host.fail(entry, f"leaves {host.whole} whole, as they were")

    entry.actions.append(see)
