"""An independent oracle: it executes a program with blocking transfers and named values.

It shares no code and no rule with the dependency graph and the checker.  Every rank has a host that
issues its Stream in order to in-order queues.  Every queue is a thread that runs its first entry.
The threads are coroutines, because real threads would be 100 times slower.  A coroutine sleeps
until the event that it yields has happened.  If all coroutines sleep, the program hangs.  The seed
of the caller decides which coroutine runs next.  The verdict must not depend on it.

The rules:

- *Queues* of a rank: compute (with scatter), gathers, reductions, copies to the host, copies back,
  the disk, and the compute of the host.  The queues for transfers depend on the progress model:
  one per peer, kind and direction (`per_edge`), one per peer (`per_pair`), one per kind
  (`per_direction`), or a single one (`per_device`).  Under `torch_lazy`, groups of sends and
  receives have one queue, and all other transfers have one queue per peer.  Under
  `blocking_serial`, all instructions of a rank have one queue.
- *Values* are in slots.  The host reads a slot when it issues an instruction that needs the value.
  It is an error if no earlier instruction fills the slot, like the wait for a CUDA event that was
  never recorded.  An instruction that uses up a value frees its slot.  No instruction may fill a
  slot that is in use.
- *Gradients* of a stage are added to one sum.  B adds all gradients of a microbatch, I those of
  weights that are not split, and W the rest.  A reduction and an optimizer step verify that the sum
  has exactly the gradients of their update.  The step then empties the sum.  It also gives the
  weights to later forwards.
- *Transfers* block until both sides have reached them.  They match by position: the k-th send from
  one rank to another matches the k-th receive there.  Under `per_edge` and `per_direction`,
  activations and gradients are counted separately.  Under `torch_lazy`, the transfers of each queue
  are counted separately.  A send of at most `limit` bytes does not wait for its receive.  Tensors
  have names, so an instruction detects a wrong tensor.
- *Groups* of transfers are issued together.  They start when the group is the first one in all its
  queues, and end when all their transfers have matched.  Under `torch_lazy`, a group with only
  sends or only receives is issued one by one.  Two grouped computes run as one.  NCCL hangs on
  groups of more than 256 transfers.
- *Segments* of a stage return partial sums at the program's `segment_boundaries`.  With sequence
  parallelism, their values have only some of the tokens.  An instruction detects a value that is
  not summed, or that does not have all tokens (`oracle_segments.py`).
- *Weights* are sharded or unsharded, according to `zero` (`oracle_sharding.py`).
- *Hosts* issue one instruction after the other.  A blocking host, as on CPUs, waits for the end of
  a compute or a dispatch, and for the inputs of a gather.  Before a reduction over several ranks,
  and before a gradient is copied to the host, it waits for all earlier reductions.  Before a host
  step, it also waits for all copies to the host.
- *Replicas* run the same Streams, and each replica has separate ranks.  They communicate only in
  reductions and gathers, which have one communicator each.
- *Collectives* block until all members have reached them.  All members must have the same update.
  A rank ends its updates in order, with the norm and the step.

At the end, slots may contain only the losses of all microbatches and, if there are backwards, the
parameters of every rank after each step.  A step needs the reduced gradients of all its stages and
the norm, so these must have been computed.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.ir.program import Program
from tests.oracle_host import COMPUTES, Host
from tests.oracle_values import Entry, Event, Message, OracleError, Slot, SlotValue

SMALL = Sizes()


class Verdict(NamedTuple):
    """`kind` is "ok", "wrong" or "hang".  `why` has the error, or an instruction that hangs."""

    kind: str
    why: str = ""


def verdict(
    program: Program,
    model: str,
    seed: int | None = None,
    limit: float = -1,
    sizes: Sizes = SMALL,
    *,
    blocking_hosts: bool = False,
    replicas: int = 1,
) -> Verdict:
    """Run the program under a progress model, in a random order that depends on `seed`."""
    try:
        machine = Machine(
            program, model, seed, limit, sizes, blocking_hosts=blocking_hosts, replicas=replicas
        )
    except OracleError as wrong:
        return Verdict("wrong", str(wrong))
    try:
        return machine.run()
    except OracleError as wrong:
        return Verdict("wrong", str(wrong))
    finally:
        machine.forget()


_latest: list[Any] = [None, None]  # the last program of `list_instructions`, and its result


def list_instructions(program: Program) -> list[list[tuple[Instr, bool]]]:
    """Return the instructions of each Stream, and whether each one is joined to the one before.

    Tests run a program under several models in turn, so the lists of the last program are kept.
    """
    lists: list[list[tuple[Instr, bool]]]
    if _latest[0] is not program:
        lists = [[*zip(s, s.joined.tolist(), strict=True)] for s in program.streams]
        _latest[:] = program, lists
    lists = _latest[1]
    return lists


class Machine:
    """All ranks of the program, and the messages and collectives between them."""

    def __init__(
        self,
        program: Program,
        model: str,
        seed: int | None,
        limit: float = -1,
        sizes: Sizes = SMALL,
        *,
        blocking_hosts: bool = False,
        replicas: int = 1,
    ) -> None:
        self.program, self.model = program, model
        self.blocks, self.replicas = blocking_hosts, replicas
        self.limit, self.sizes = limit, sizes
        self.random = None if seed is None else random.Random(seed)
        self.holders: list[list[int]] = program.shape.replica_ranks.tolist()
        self.stages, self.microbatches = program.shape.stages, program.shape.microbatches
        self.updates = program.shape.optimizer_steps
        n, m = len(self.holders), self.microbatches
        self.holders_of_mb: list[list[int]] = [
            self.holders[k] for k in range(n) for _ in range(m // n + (k < m % n))
        ]
        if len(program.streams) != program.shape.ranks:
            raise OracleError(f"{len(program.streams)} Streams")
        self.lists = list_instructions(program)
        holders_of = [*enumerate(zip(*self.holders, strict=True))]
        ranks = range(program.shape.ranks)
        self.own = [[s for s, holders in holders_of if rank in holders] for rank in ranks]
        self.trains = any(i.op in COMPUTES[1:] for l in self.lists for i, _ in l)
        self.frozen, self.zero = program.frozen_stages, program.zero
        self.ties = [{*one} for one in program.tied_weights if min(one) >= self.frozen]
        self.tied = {s for one in self.ties for s in one}
        self.skips = dict(program.skips)
        self.hosts: list[Host] = []
        self.awake: list[Iterator[Event]] = []
        self.happened = 0  # number of events that have happened
        self.sent: dict[Slot, deque[Message]] = defaultdict(deque)
        self.received: dict[Slot, deque[Message]] = defaultdict(deque)
        self.meetings: dict[Slot, list[tuple[Event, int]]] = defaultdict(list)

    def holder(self, stage: int, mb: int) -> int:
        """Return the rank that runs a microbatch in a stage.

        The ranks with a replica of the stage have equal shares of the microbatches, or one more.
        """
        return self.holders_of_mb[min(mb, self.microbatches - 1)][stage]

    def beginning(self, stage: int) -> int:
        """Return the stage from which a stage receives a skip, or -1."""
        return next((s for s, t in self.skips.items() if t == stage), -1)

    def mbs(self, update: int) -> range:
        """Return the microbatches of an update."""
        each = self.microbatches // self.updates
        return range(update * each, (update + 1) * each)

    def version(self, stage: int, mb: int) -> int:
        """Return the weight version that a stage uses for a microbatch, as a number of updates."""
        delay = self.program.shape.weight_delay
        behind = delay if isinstance(delay, int) else delay[stage]
        update = mb * self.updates // self.microbatches if self.trains else 0
        return max(update - behind, 0) if stage >= self.frozen else 0

    def small(self, i: Instr, kind: str) -> bool:
        """Return whether a send is so small that it does not wait for its receive."""
        if self.limit < 0:
            return False
        # The stage that computed the activation, which has the size of its gradient.
        maker = i.stage if kind == "act" else i.stage - 1
        name = {"grad": "activation_grad", "act": "activation"}.get(kind, "skip")
        if "skip" in kind:
            maker = i.stage if kind == "skip" else self.beginning(i.stage)
        size = float(self.sizes.for_stages(name, self.program.shape.stages)[maker])
        scatter = Opcode.TPScatterAct if kind == "act" else Opcode.TPScatterGrad
        cut = any((j.op, j.stage, j.mb) == (scatter, *i[1:]) for own in self.lists for j, _ in own)
        return size / (self.program.tp if cut else 1) <= self.limit

    def run(self) -> Verdict:
        ranks, replicas = range(len(self.lists)), range(self.replicas)
        self.hosts = [Host(self, rank, k) for k in replicas for rank in ranks]
        threads: list[Iterator[Event]] = []
        for host in self.hosts:
            queues: dict[object, list[Entry]] = defaultdict(list)
            host.issue_all()
            for entry in host.entries:
                for queue in entry.queues:
                    queues[queue].append(entry)
            threads += map(self.thread, queues.values())
            threads.append(self.calls(host))
        self.let_run(threads)
        for host in self.hosts:
            for entry in host.entries:
                if not entry.done.when:
                    return Verdict("hang", f"rank {host.rank} never ends {entry}")
        for host in self.hosts:
            host.judge()
        return Verdict("ok")

    def forget(self) -> None:
        """Break reference cycles. The garbage collector would take as long as the run."""
        for host in self.hosts:
            for entry in [*host.entries, getattr(host, "entry", None)]:
                if entry is not None:
                    for event in (entry.issued, entry.done, *entry.meets):
                        event.sleepers.clear()
                    entry.actions.clear()
            vars(host).clear()
        self.hosts.clear()

    def let_run(self, threads: list[Iterator[Event]]) -> None:
        """Run the threads until each of them has ended or sleeps."""
        self.awake = threads
        while self.awake:
            pick = self.random.randrange(len(self.awake)) if self.random else -1
            self.awake[pick], self.awake[-1] = self.awake[-1], self.awake[pick]
            thread = self.awake.pop()
            for event in thread:
                if not event.when:
                    event.sleepers.append(thread)
                    break

    def calls(self, host: Host) -> Iterator[Event]:
        """Run the calls of a host in order, and yield the events that it waits for."""
        last: dict[object, Entry] = {}  # kind, such as computes or gathers -> last entry
        for entry in host.entries:
            if self.blocks:
                yield from (last[kind].done for kind in self.drains(entry) if kind in last)
            if self.blocks and entry.kind == "gathers":
                yield from entry.waits
            self.happen(entry.issued)
            # The host reads the numbers of tokens, which all members of a dispatch must send first.
            if self.blocks and (entry.kind == "compute" or entry.group[0].op is Opcode.Dispatch):
                yield entry.done
            last[entry.kind] = entry

    def drains(self, entry: Entry) -> tuple[object, ...]:
        """Return the kinds of earlier entries that a blocking host waits for before an entry."""
        i = entry.group[0]
        holders = i.op is Opcode.ReduceReplicatedStages and self.program.dp > 1
        if holders or i.op in (Opcode.ReduceTied, Opcode.ReduceNorm):
            return (entry.kind,)
        return {
            Opcode.OffloadGrads: ("reductions",),
            **dict.fromkeys(
                (Opcode.HostOptimizerStep, Opcode.CheckGradsFinite), ("reductions", "copies")
            ),
        }.get(i.op, ())

    def thread(self, entries: list[Entry]) -> Iterator[Event]:
        """Run the entries of a queue in order, and yield the events that it waits for."""
        for entry in entries:
            yield entry.issued
            entry.arrived += 1
            if entry.arrived < len(entry.queues):
                yield entry.done  # the last queue that reaches the entry runs it
                continue
            yield from entry.waits
            for action in entry.actions:
                action()
            yield from entry.meets
            self.happen(entry.done)

    def happen(self, event: Event) -> None:
        self.happened += 1
        event.when = self.happened
        self.awake += event.sleepers

    def post(self, message: Message) -> None:
        """Add one side of a message to its channel. The second side transfers the tensor."""
        if message.alone:  # a small send ends now, and a copy of its tensor is transferred later
            message.value = SlotValue(message.met, message.value.tensor)
            self.happen(message.met)
        (self.sent if message.sends else self.received)[message.channel].append(message)
        sent, received = self.sent[message.channel], self.received[message.channel]
        if sent and received:
            one, other = sent.popleft(), received.popleft()
            other.value.tensor = one.value.tensor
            if not one.alone:
                self.happen(one.met)
            self.happen(other.met)

    def join(self, communicator: Slot, members: int, member: tuple[Event, int]) -> None:
        """Join a collective. The last member ends it for all members."""
        meeting = self.meetings[communicator]
        meeting.append(member)
        if len(meeting) == members:
            if len(updates := {update for _, update in meeting}) > 1:
                raise OracleError(f"{communicator} meet for updates {updates}")
            for event, _ in meeting:
                self.happen(event)
            meeting.clear()
