"""Stepped: what the oracle's host does where optimizers' states lie on the host, or the disk.

A part of the oracle in `threads.py`.  The state of each trained stage is on the host when a step
begins, or on the disk: then it is fetched once.  It is loaded once, when the stage's gradient is
reduced and whoever copies the stage has; that of the rank's first copy of a tied weight, when the
copies are summed.  It is stepped once, on the device, when all gradients of the rank are there,
with the norm, and all weights are in parts; it is stored once, behind that, and spilled if it came
from the disk; and the rank ends its update when all have been.  A rank that says how many slots it
has for states has room for as many on the device, or on the host on their way.

Where the host itself steps them nothing is loaded: each gradient is copied to the host once, when
it is reduced, as above.  Each stage is stepped once, in a queue of what the host computes, when the
copies of all the rank's gradients are there, with the norm, all weights are in parts, and whoever
copies any stage of the rank has, which reads the one optimizer that is used from then on beside;
behind that its weights come back once, and the rank ends its update when all have.

Of several updates each does all of this in turn, for there is one place on the host for a gradient,
and one for weights.  Each rank lets go of its gradients once in each, in the queue of what it
computes, when copies of all are on the host, with the norm: then its sums are empty, and no stage
is stepped before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests import away, sequenced, sharded, snapshots
from tests.oracle_values import Wrong

if TYPE_CHECKING:
    from tests.oracle_host import Host

NEXT = {  # what a state must have been through, where that leaves it, and on which queue
    Opcode.ReloadState: ("on the host", "loaded", "back"),
    Opcode.StageOptimizerStep: ("loaded", "stepped", "compute"),
    Opcode.OffloadState: ("stepped", "stored", "copies"),
    Opcode.ReadStateFromDisk: ("on the disk", "on the host", "disk"),
    Opcode.WriteStateToDisk: ("stored", "spilled", "disk"),
    Opcode.OffloadGrads: ("on the cpu_step", "to be stepped", "copies"),
    Opcode.HostOptimizerStep: ("to be stepped", "stepped there", "host"),
    Opcode.ReloadWeights: ("stepped there", "new here", "back"),
}
LAST = {"host": "stored", "disk": "spilled", "cpu_step": "new here"}


def kept(host: Host) -> list[int]:
    """The stages whose states lie elsewhere."""
    machine = host.machine
    return (
        host.trained if machine.program.optimizer_placement != "device" and machine.trains else []
    )


def begin(host: Host) -> None:
    host.states = dict.fromkeys(kept(host), (f"on the {_lies(host)}", away.ALWAYS))
    host.gone, host.update, host.released = {}, 0, None


def _lies(host: Host) -> str:
    return host.machine.program.optimizer_placement


def turn(host: Host, i: Instr) -> None:
    before, after, queue = NEXT[i.op]
    host.queue(queue)
    if i.stage not in host.states:
        host.wrong("no state of it lies elsewhere")
    if i.mb != host.update:
        host.wrong(f"the rank's states are of update {host.update}")
    found, ready = host.states[i.stage]
    if found != before:
        host.wrong(f"its state is {found}")
    host.entry.waits.append(ready)
    host.states[i.stage] = after, host.entry.done
    if i.op is Opcode.ReloadState:
        _load(host, i)
    elif i.op is Opcode.StageOptimizerStep:
        _step(host, i)
    elif i.op is Opcode.OffloadState:
        away.leave(host, "state")
        away.enter(host, "state_host")
    elif i.op is Opcode.ReadStateFromDisk:
        away.enter(host, "state_host")
    elif i.op is Opcode.WriteStateToDisk:
        away.leave(host, "state_host")
    elif i.op is Opcode.OffloadGrads:
        host.gone[i.stage] = host.entry.done
        _reduced(host, i)
    elif i.op is Opcode.HostOptimizerStep:
        _step_there(host, i)


def _load(host: Host, i: Instr) -> None:
    away.enter(host, "state")
    away.leave(host, "state_host")
    _reduced(host, i)
    if i.stage in snapshots.copied(host):
        host.look("copy", i.stage)


def _reduced(host: Host, i: Instr) -> None:
    """Have the entry find the stage's gradient, to which nothing is added any more."""
    sequenced.reduced(host, i)
    sequenced.expect(host, i.stage, update=i.mb)


def _step_there(host: Host, i: Instr) -> None:
    for stage in host.trained:
        if stage not in host.gone:
            host.wrong(f"the gradient of stage {stage} is not on the host")
        host.entry.waits.append(host.gone[stage])
    for stage in snapshots.copied(host) if not i.mb else ():
        host.look("copy", stage)
    if releases(host):
        if (released := host.released) is None:
            raise Wrong("the rank has not let go of its gradients")
        host.entry.waits.append(released)
    _step(host, i)


def releases(host: Host) -> bool:
    """Whether the rank lets go of its gradients ahead of its step."""
    return _lies(host) == "cpu_step" and host.machine.trains and host.machine.updates > 1


def release(host: Host, i: Instr) -> None:
    """The rank's gradients are let go."""
    host.ends(i.mb)
    host.queue("compute")
    if not releases(host) or host.released is not None or i.mb != host.update:
        host.wrong("there is nothing to let go of")
    for stage in host.trained:
        if stage not in host.gone:
            host.wrong(f"the gradient of stage {stage} is not on the host")
        host.entry.waits.append(host.gone[stage])
        host.total(stage, i.mb)
    for slot in [("norm", i.mb)] * host.machine.program.clip_grad_norm:
        host.look(*slot)
    host.entry.actions.append(host.sums.clear)
    host.released = host.entry.done


def _step(host: Host, i: Instr) -> None:
    for slot in host.final(i.mb) + [("norm", i.mb)] * host.machine.program.clip_grad_norm:
        host.look(*slot)
    for stage in host.trained:
        if not releases(host):
            host.total(stage, i.mb)
        if host.machine.zero:
            host.look("parts", stage)
    sharded.none_whole(host)


def end(host: Host, i: Instr) -> None:
    """The rank ends its update."""
    for stage in kept(host):
        found, ready = host.states[stage]
        if found != LAST[_lies(host)]:
            host.wrong(f"the state of stage {stage} is {found}")
        host.entry.waits.append(ready)
    if not releases(host):
        for stage in host.trained:
            host.total(stage, i.mb)
        host.entry.actions.append(host.sums.clear)
    else:
        if host.released is None or i.mb != host.update:
            host.wrong("the rank has not let go of its gradients")
        host.states = dict.fromkeys(host.states, ("on the cpu_step", host.entry.done))
        host.gone, host.update, host.released = {}, i.mb + 1, None
