"""An independent oracle: the program is really executed, with blocking semantics and named data.

It shares no code with the dependency graph or the checker, and no rule of theirs is written
here.  Every rank has a host that issues its Stream in order into in-order queues, and every
queue is a thread that runs what is at its head.  The threads are coroutines, which block as
threads do but cost a hundredth: one sleeps until the event that it yields has happened, and
when all sleep the program hangs.  Which of those awake goes on is the caller's seed to say;
the verdict must not depend on it.

The machine:

- *Queues* of a rank: compute (with scatter), gathers, reductions, copies to the host, copies back,
  the disk, what the host computes, and those of the progress model for transfers: one per peer,
  kind and direction (`per_edge`), one per peer (`per_pair`), one per kind (`per_direction`),
  or one (`per_device`).
  Under `torch_lazy` there is one for what has both sends and receives,
  and one per peer for all else.
  Under `blocking_serial` everything goes into a single queue.
- *Values* live in slots.  The host looks a value up when it issues the instruction that needs
  it; one that has not been issued yet is an error, as the wait for a CUDA event that was never
  recorded.  What an instruction uses up is gone, and no slot is filled twice.
- *Gradients* of a stage add up in one sum, in the queue's time: B adds all of a microbatch's, I
  those of weights that are not split, and W the rest.  A reduction and its step each look
  whether just their update's are in it, and the step empties it.  Updates before the last leave
  the weights that later forwards look for.
- *Transfers* block until the other side is there too.  They match by position, not by name:
  the k-th send from one rank to another meets the k-th receive there,
  under `per_edge` and `per_direction`
  of activations and gradients apart,
  and under `torch_lazy` those of the two kinds of queue apart.  A
  send of at most `limit` bytes leaves its tensor there, and goes on.  Tensors say what they are, so
  who takes in the wrong one notices.
- *Groups* of transfers are issued as one,
but under `torch_lazy` one by one if all go one way: their
  needs are looked up together, they are posted when it is the group's turn in all its queues, and
  what they give is there when all have met.  Two computes joined run as one.  NCCL hangs on groups
  of more than 256.
- *Pieces* of a stage give addends where the program says that ranks meet (`meets`), and what has
  their own tokens only, if they share the sequence; who takes one that is not summed, or not all
  tokens, notices (`pieces.py`).
- *Weights* are in parts, or whole, where the program says `zero` (`sharded.py`).
- *Hosts* issue one thing after the other.  One that `blocks`, as on CPUs, waits until a compute is
  over, for what a gather takes, and for the reductions before one that other ranks meet, before a
  gradient goes to the host, and before the host steps, or gradients are let go: then for all
  copies to it, too.
- *Replicas*, of which there may be several, run the same Streams, each rank for itself; they meet
  where they reduce or gather, on a communicator for each of the two.
- *Collectives* block until every member is there, and all must be there for one update.
  A rank ends its updates, with the norm and the step, in turn.

At the end nothing may be left in any slot but the losses of all microbatches and, if there was
any backward, the parameters of every rank as each step left them; a step takes the reduced, tied
gradients of all its stages and the norm, so it cannot be there without them.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.ir.program import Program
from tests.oracle_host import COMPUTES, Host
from tests.oracle_values import Entry, Event, Message, Slot, SlotValue, Wrong

SMALL = Sizes()


class Verdict(NamedTuple):
    """`kind` is "ok", "wrong" or "hang"; `why` says what went wrong, or who hangs."""

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
    """Run the program under a progress model, in the order that `seed` picks."""
    try:
        machine = Machine(
            program, model, seed, limit, sizes, blocking_hosts=blocking_hosts, replicas=replicas
        )
    except Wrong as wrong:
        return Verdict("wrong", str(wrong))
    try:
        return machine.run()
    except Wrong as wrong:
        return Verdict("wrong", str(wrong))
    finally:
        machine.forget()


class Machine:
    """All ranks, and where they meet."""

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
        self.whose = [k for k in range(n) for _ in range(m // n + (k < m % n))]
        if len(program.streams) != program.shape.ranks:
            raise Wrong(f"{len(program.streams)} Streams")
        self.lists = [[*zip(s, s.joined.tolist(), strict=True)] for s in program.streams]
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
        self.happened = 0  # how many events have
        self.sent: dict[Slot, deque[Message]] = defaultdict(deque)
        self.received: dict[Slot, deque[Message]] = defaultdict(deque)
        self.meetings: dict[Slot, list[tuple[Event, int]]] = defaultdict(list)

    def holder(self, stage: int, mb: int) -> int:
        """Who runs a microbatch in a stage: each of n holders has an n-th, or one more."""
        return self.holders[self.whose[min(mb, self.microbatches - 1)]][stage]

    def beginning(self, stage: int) -> int:
        """The stage whose skip a stage takes; -1 for none."""
        return next((s for s, t in self.skips.items() if t == stage), -1)

    def mbs(self, update: int) -> range:
        """The microbatches of an update."""
        each = self.microbatches // self.updates
        return range(update * each, (update + 1) * each)

    def version(self, stage: int, mb: int) -> int:
        """How many updates the weights have had that a stage uses for a microbatch."""
        delay = self.program.shape.weight_delay
        behind = delay if isinstance(delay, int) else delay[stage]
        update = mb * self.updates // self.microbatches if self.trains else 0
        return max(update - behind, 0) if stage >= self.frozen else 0

    def small(self, i: Instr, kind: str) -> bool:
        """Whether a send waits for nobody."""
        if self.limit < 0:
            return False
        maker = i.stage if kind == "act" else i.stage - 1  # of what the gradient is of
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
        """Cut the circles of what a run has made: to find them costs as much as the run."""
        for host in self.hosts:
            for entry in [*host.entries, getattr(host, "entry", None)]:
                if entry is not None:
                    for event in (entry.issued, entry.done, *entry.meets):
                        event.sleepers.clear()
                    entry.actions.clear()
            vars(host).clear()
        self.hosts.clear()

    def let_run(self, threads: list[Iterator[Event]]) -> None:
        """Until all have ended, or sleep."""
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
        """A host's calls, one after the other; one that blocks waits in some of them."""
        last: dict[object, Entry] = {}  # by what it is of: computes, gathers and so on
        for entry in host.entries:
            if self.blocks:
                yield from (last[kind].done for kind in self.drains(entry) if kind in last)
            if self.blocks and entry.kind == "gathers":
                yield from entry.waits
            self.happen(entry.issued)
            if self.blocks and entry.kind == "compute":
                yield entry.done
            last[entry.kind] = entry

    def drains(self, entry: Entry) -> tuple[object, ...]:
        """What a host waits for: all of these kinds before it."""
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
        """One queue: runs its entries in order, and yields what it must wait for."""
        for entry in entries:
            yield entry.issued
            entry.arrived += 1
            if entry.arrived < len(entry.queues):
                yield entry.done  # the queue that comes last runs the group for all
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
        """Stand in line for the other side; whoever is second carries the tensor over."""
        if message.alone:  # a copy is on its way
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
        """Meet the other members of a collective; the last to come lets all go."""
        meeting = self.meetings[communicator]
        meeting.append(member)
        if len(meeting) == members:
            if len(updates := {update for _, update in meeting}) > 1:
                raise Wrong(f"{communicator} meet for updates {updates}")
            for event, _ in meeting:
                self.happen(event)
            meeting.clear()
