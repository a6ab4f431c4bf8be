"""PendingSends: the sends of a step that may still be running.

A rank keeps the memory of a sent tensor until the send has ended. Gloo has no query for the end of
a send, only a wait. An early wait could delay work that the receiver needs. So the rank waits as
late as possible.

A receiver may use a message and then send a second message back. When the second message arrives,
the first message must have arrived, too. The rank can then free the sent tensor without a delay.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from schedir.ir.isa.instructions import INSTRUCTIONS, LOCAL_HANDOVER, SEND_OPS, PeerRule
from schedir.ir.program import Program
from schedir.runtime.program_state import ProgramService, ProgramState
from schedir.runtime.value_slots import iterate_slot_reuses
from schedir.transports.transport import Work


class PendingSends(ProgramService):
    """The sends of a program that may still be running.

    Args:
        state: The state of the program.

    Attributes:
        works: Index of a pending send in the stream -> its work and the sent tensor.
        implied_acks: Index of a receive -> indices of the sends whose arrival it proves.
        before_reuse: Index of an instruction that reuses a slot -> indices of the sends that must
            end before this instruction.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.works: dict[int, tuple[Work, Tensor]] = {}
        self.implied_acks = _find_implied_acks(state.program, state.rank)
        self.before_reuse: dict[int, list[int]] = {}
        for _, fill, free in iterate_slot_reuses(state.program, state.rank):
            if state.stream[free].op in SEND_OPS:
                self.before_reuse.setdefault(fill, []).append(free)

    def complete(self, send: int) -> None:
        """Wait for a send if it is pending, and then free the sent tensor.

        Args:
            send: The index of the send in the stream.
        """
        if send in self.works:
            work, tensor = self.works.pop(send)
            work.wait()
            del tensor  # only after the wait, because a GPU may reuse the memory immediately

    def finish_step(self) -> None:
        """Wait for all pending sends."""
        for work, _ in self.works.values():
            work.wait()
        self.works.clear()


# Opcode of an instruction -> (opcode of the send, direction to the sending stage) for each received
# value that the instruction needs.
_SENDS_BY_CONSUMER: Final = {
    row.op: [
        (send, LOCAL_HANDOVER[kind][1])
        for kind in row.needs
        for send in SEND_OPS
        if kind in LOCAL_HANDOVER and LOCAL_HANDOVER[kind][0] in INSTRUCTIONS[send].needs
    ]
    for row in INSTRUCTIONS
}


def _find_implied_acks(program: Program, rank: int) -> dict[int, list[int]]:
    """Return a dict: index of a receive -> indices of the sends that it proves to have arrived.

    Each send appears only with the first receive that proves its arrival.
    """
    stream = program.streams[rank]
    neighbors = {hop: program.neighbor_stages(hop).tolist() for hop in PeerRule}
    index_of: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(stream)}
    peers = {program.peer_rank(i) for i in stream if i.op in SEND_OPS}
    acks: dict[int, list[int]] = {}
    for peer in peers:
        # The sends of values that the peer has used since its last send to this rank.
        used_sends: list[int] = []
        for op, stage, mb in program.streams[peer]:
            row = INSTRUCTIONS[op]
            for send, hop in _SENDS_BY_CONSUMER[op]:
                k = index_of.pop((send, neighbors[hop][stage], mb), None)
                used_sends += [k] if k is not None else []
            if row.peer and op in SEND_OPS and used_sends:
                receive = index_of.get((row.partner, neighbors[row.peer][stage], mb))
                if receive is not None:
                    acks[receive], used_sends = used_sends, []
    return acks
