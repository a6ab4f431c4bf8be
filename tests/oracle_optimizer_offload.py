"""Optimizer offload in the oracle of `oracle_threads.py`.

With a step on the device, the optimizer state of each trained stage is on the host or the disk when
an update begins.  It passes these states in order, each once (`NEXT`):

- A state on the disk is read to the host.
- It is loaded to the device, after the stage's gradient is reduced and its snapshot is copied.  For
  tied weights, the copies must be summed.
- The stage is stepped, after all gradients of the rank and the norm are ready and all weights are
  sharded.
- The state is stored on the host, and written to the disk if it came from there.

The rank ends its update when all its stages have passed.  If the program limits the buffers for
states, a state waits for a free buffer.

With a step on the host, each gradient is copied to the host after it is reduced.  The host steps a
stage after all gradients of the rank and the norm are on the host, all weights are sharded, and all
snapshots of the rank are copied.  Then the new weights are copied to the device.

With several updates, each update repeats this, because the host has one buffer for a gradient and
one for weights.  In each update, a rank releases its gradients once in the compute queue, after all
their copies and the norm are ready.  This empties its sums.  The host steps no stage before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests import (
    oracle_activation_offload,
    oracle_sequence_parallel,
    oracle_sharding,
    oracle_snapshots,
)
from tests.oracle_values import OracleError

if TYPE_CHECKING:
    from tests.oracle_host import Host

NEXT = {  # opcode -> the state before it, the state after it, and the queue
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
    """Return the trained stages whose optimizer state is not on the device."""
    machine = host.machine
    return (
        host.trained if machine.program.optimizer_placement != "device" and machine.trains else []
    )


def begin(host: Host) -> None:
    host.states = dict.fromkeys(
        kept(host), (f"on the {_lies(host)}", oracle_activation_offload.ALWAYS)
    )
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
        oracle_activation_offload.leave(host, "state")
        oracle_activation_offload.enter(host, "state_host")
    elif i.op is Opcode.ReadStateFromDisk:
        oracle_activation_offload.enter(host, "state_host")
    elif i.op is Opcode.WriteStateToDisk:
        oracle_activation_offload.leave(host, "state_host")
    elif i.op is Opcode.OffloadGrads:
        host.gone[i.stage] = host.entry.done
        _reduced(host, i)
    elif i.op is Opcode.HostOptimizerStep:
        _step_there(host, i)


def _load(host: Host, i: Instr) -> None:
    oracle_activation_offload.enter(host, "state")
    oracle_activation_offload.leave(host, "state_host")
    _reduced(host, i)
    if i.stage in oracle_snapshots.copied(host):
        host.look("copy", i.stage)


def _reduced(host: Host, i: Instr) -> None:
    """Verify that the stage's gradient is completely reduced when the current entry runs."""
    oracle_sequence_parallel.reduced(host, i)
    oracle_sequence_parallel.expect(host, i.stage, update=i.mb)


def _step_there(host: Host, i: Instr) -> None:
    for stage in host.trained:
        if stage not in host.gone:
            host.wrong(f"the gradient of stage {stage} is not on the host")
        host.entry.waits.append(host.gone[stage])
    for stage in oracle_snapshots.copied(host) if not i.mb else ():
        host.look("copy", stage)
    if releases(host):
        if (released := host.released) is None:
            raise OracleError("the rank has not let go of its gradients")
        host.entry.waits.append(released)
    _step(host, i)


def releases(host: Host) -> bool:
    """Return whether the rank releases its gradients before its step."""
    return _lies(host) == "cpu_step" and host.machine.trains and host.machine.updates > 1


def release(host: Host, i: Instr) -> None:
    """Issue the release of the rank's gradients."""
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
    oracle_sharding.none_whole(host)


def end(host: Host, i: Instr) -> None:
    """End the update of the rank."""
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
