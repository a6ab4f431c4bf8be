"""New instructions in the oracle, for which it has no code.

The oracle uses only the row of such an instruction in the instruction table: the values that it
needs, gives and frees, its changes of values, and its partner.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    TIERS,
    VALUES,
    Instr,
    Lane,
    Opcode,
    Scope,
    Value,
)
from tests.oracle_sharding import OWN_VALUES as OF_PARTS
from tests.oracle_values import Slot, SlotValue

if TYPE_CHECKING:
    from tests.oracle_host import Host

KNOWN_VALUES = 14
OWN_VALUES = (  # newer values for which the host has code
    *OF_PARTS, Value.SNAPSHOT, Value.STATE, Value.STATE_WRITTEN,
    Value.HOST_GRAD, Value.HOST_WEIGHTS, Value.WEIGHTS_RELOADED, Value.GRADS_CHECKED,
)  # fmt: skip
# The new values that each instruction needs. The instructions of schedir itself need none.
NEW_NEEDS = [
    [token for token in row.needs if token >= KNOWN_VALUES and token not in OWN_VALUES]
    for row in INSTRUCTIONS
]
_ON_DEVICE = {True: TIERS[0], False: ""}  # the state of a value that no instruction changes
_LANES = {Lane.COMPUTE: "compute", Lane.TP: "gathers", Lane.DP: "reductions"}


def computes(op: Opcode) -> bool:
    """Return whether an instruction can be one of a pair that runs together."""
    row = INSTRUCTIONS[op]
    cuts = (Opcode.TPScatterAct, Opcode.TPScatterGrad)
    return row.lane is Lane.COMPUTE and row.scope is Scope.MICROBATCH and op not in cuts


def address(host: Host, i: Instr) -> tuple[bool, bool, int]:
    """Return whether it is per rank, whether it is per stage, and how many values `mb` can have."""
    per = INSTRUCTIONS[i.op].scope
    if per is Scope.OCCURRENCE:
        own = [j for j, _ in host.machine.lists[host.rank] if j[:2] == i[:2]]
        return False, True, len(own) if own[i.mb : i.mb + 1] == [i] else 0
    updates, mbs = host.machine.updates, host.machine.microbatches
    return per is Scope.RANK, per is Scope.STAGE, mbs if per is Scope.MICROBATCH else updates


def issue(host: Host, i: Instr) -> None:
    """Issue an instruction: use the slots that its row names, and join a collective if needed."""
    row = INSTRUCTIONS[i.op]
    if row.scope is Scope.OCCURRENCE and host.machine.updates > 1:
        host.wrong(f"{i} with several updates")
    if row.scope is Scope.RANK:
        host.ends(i.mb)
    host.queue(_LANES.get(row.lane, row.lane))
    for token in filter(lambda token: _there(host, token), row.needs):
        for slot in _slots(host, token, i):
            if token in row.gives:
                _change(host, i, token, slot)
            elif token in row.frees:
                host.take(*slot)
            else:
                host.look(*slot)
    for token in row.gives:
        if token not in row.needs:
            for slot in _slots(host, token, i):
                host.give(*slot)
    if row.partner is i.op:
        host.collective((row.text, i.mb), len(host.machine.lists), i.mb)


def beside(host: Host, i: Instr) -> None:
    """Use the slots of the new values that a known instruction needs."""
    for token in NEW_NEEDS[i.op]:
        if _there(host, token):
            for slot in _slots(host, token, i):
                (host.take if token in INSTRUCTIONS[i.op].frees else host.look)(*slot)


def _there(host: Host, token: Value) -> bool:
    """Return whether the rank has values of a kind. A new kind needs a giver on the rank."""
    own = host.machine.lists[host.rank]
    if token < KNOWN_VALUES or token in OWN_VALUES:
        return token not in OWN_VALUES
    return any(token in INSTRUCTIONS[i.op].gives for i, _ in own)


def _slots(host: Host, token: Value, i: Instr) -> list[Slot]:
    """Return the slots of the values of a kind that an instruction uses."""
    if token is Value.GRAD:
        return host.final(i.mb)
    if token is Value.PARAMS:
        version = (
            host.machine.version(i.stage, i.mb)
            if INSTRUCTIONS[i.op].scope is Scope.MICROBATCH
            else 0
        )
        return [("parameters", version)] * (version > 0)
    per, name = VALUES[token].scope, token.name.lower()
    return [(name, *{Scope.MICROBATCH: i[1:], Scope.STAGE: i[1:2], Scope.RANK: i[2:]}[per])]


def _changes(host: Host, slot: Slot, tiers: bool) -> list[tuple[str, str]]:
    """Return the changes of the value of a slot, in the order of the rank's Stream."""
    if host.changes is None:
        host.changes = defaultdict(list)
        for i, _ in host.machine.lists[host.rank]:
            for change in INSTRUCTIONS[i.op].changes:
                for one in _slots(host, change.value, i):
                    place = one, change.before in TIERS
                    host.changes[place].append((change.before, change.after))
    return host.changes.get((slot, tiers), [])


def made(host: Host, slot: Slot) -> dict[bool, str]:
    """Return the state of a new value: on the device, in the form that its first change needs."""
    if host.changes is not None and not host.changes:
        return _ON_DEVICE.copy()
    forms = _changes(host, slot, False)
    return {True: TIERS[0], False: forms[0][0] if forms else ""}


def expect(host: Host, slot: Slot, value: SlotValue) -> None:
    """Verify that a used value is on the device, in the form after its last change."""
    if host.changes is not None and not host.changes and value.state == _ON_DEVICE:
        return
    forms = _changes(host, slot, False)
    if value.state != {True: TIERS[0], False: forms[-1][1] if forms else ""}:
        host.wrong(f"{slot} is {value.state}")


def _change(host: Host, i: Instr, token: Value, slot: Slot) -> None:
    value = host.look(*slot)
    state = {**value.state}
    moves = False
    for change in INSTRUCTIONS[i.op].changes:
        if change.value is token:
            tiers = change.before in TIERS
            moves |= tiers
            if state[tiers] != change.before:
                host.wrong(f"{i} finds {slot} {state}")
            state[tiers] = change.after
    if not moves and state[True] != TIERS[0]:
        host.wrong(f"{i} finds {slot} {state}")
    host.slots.pop(slot, None)
    host.give(*slot).state = state


def kept(host: Host) -> set[Slot]:
    """Return the slots that may be in use at the end, because no instruction frees their values."""
    names = {
        token.name.lower()
        for token in Value
        if token >= KNOWN_VALUES
        and token is not Value.SNAPSHOT
        and not any(token in row.frees for row in INSTRUCTIONS)
    }
    return {slot for slot in host.slots if slot[0] in names}
