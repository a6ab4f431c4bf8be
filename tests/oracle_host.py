"""The host of one rank: what it issues, and what it knows when it does.

A part of the oracle in `threads.py`, which says what the machine is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests import away, pieces, sequenced, sharded, snapshots, stepped, strange
from tests.oracle_values import Entry, Event, Message, Slot, SlotValue, Tensor, Wrong, met

if TYPE_CHECKING:
    from tests.oracle_threads import Machine

O = Opcode
COMPUTES = (O.Forward, O.Backward, O.BackwardInput, O.BackwardWeight)
SENDING = (O.SendAct, O.SendGrad, O.SendSkip, O.SendSkipGrad)
TAKING = (O.RecvAct, O.RecvGrad, O.RecvSkip, O.RecvSkipGrad)
MESSAGES = SENDING + TAKING
MOVES = dict(zip(MESSAGES, 2 * ("act", "grad", "skip", "skip_grad"), strict=True))
PER_STAGE = {
    O.ReduceGrads,
    O.ReduceReplicatedStages,
    O.ReduceTied,
    O.ReduceSequenceParallelGrads,
    O.Snapshot,
}
PER_STAGE |= {*stepped.NEXT}
LARGEST = 256
Part = tuple[int, str]  # of a stage's gradient: the microbatch's "plain" weights, or "split" ones


class Host:
    """What issues one rank's Stream.  Slots are as the host sees them: filled when issued."""

    def __init__(self, machine: Machine, rank: int, replica: int = 0) -> None:
        self.machine, self.rank, self.replica = machine, rank, replica
        self.sums: dict[int, list[Part]] = defaultdict(list)  # of gradients, by stage
        self.ending = 0  # the update that the rank ends next
        self.own = machine.own[rank]
        self.trained = [s for s in self.own if s >= machine.frozen]
        self.slots: dict[Slot, SlotValue] = {}
        self.given: list[tuple[Slot, SlotValue]] = []  # by the group that is being issued
        self.changes: dict[tuple[Slot, bool], list[tuple[str, str]]] | None = None
        self.turns: Counter[tuple[int, ...]] = Counter()  # that were issued, by opcode and stage
        self.parts: dict[int, list[Part]] = defaultdict(list)  # of gradients that were reduced
        self.reducing: dict[int, list[Entry]] = defaultdict(list)  # who reduces, by stage
        self.whole: dict[int, int] = {}  # stages whose weights are, and after how many steps
        self.adding: set[int] = set()  # stages whose sums of gradients are there
        self.stepped = 0
        self.summed: dict[tuple[int, int], Event] = {}  # over parts of the sequence, when
        self.room: dict[str, list[Event]] = {}  # slots of some kinds, by when they are free
        self.states: dict[int, tuple[str, Event]] = {}  # how far they are, and when
        self.gone: dict[int, Event] = {}  # when a stage's gradient is on the host
        self.update = 0  # that states are stepped in
        self.released: Event | None = None  # when its gradients are let go
        for each in (sharded, away, stepped):
            each.begin(self)
        self.entries: list[Entry] = []

    def issue_all(self) -> None:
        groups: list[list[Instr]] = []
        for instr, joined in self.machine.lists[self.rank]:
            if not joined:
                groups.append([])
            elif not groups:
                raise Wrong(f"{instr} is joined to nothing")
            groups[-1].append(instr)
        for group in groups:
            self.require_group(group)
            ways = {i.op in SENDING if i.op in MESSAGES else None for i in group}
            if self.machine.model == "torch_lazy" and ways in ({True}, {False}):
                for instr in group:  # torch sends, or receives, each by itself
                    self.issue([instr])
            else:
                self.issue(group)

    def require_group(self, group: list[Instr]) -> None:
        """Whether these can run as one."""
        if len(group) > 1:
            messages = all(i.op in MESSAGES for i in group) and len(group) <= LARGEST
            cell = all(strange.computes(i.op) for i in group) and len(group) == 2
            if not (messages or cell):
                raise Wrong(f"{len(group)} instructions from {group[0]} on cannot run as one")

    def issue(self, group: list[Instr]) -> None:
        self.entry = Entry(self.rank, group)
        for instr in group:
            self.address(instr)
            if instr.op in sharded.READS:
                sharded.read(self, instr)
            if instr.op in self.ISSUE:
                self.ISSUE[instr.op](self, instr)
                strange.beside(self, instr)
            else:
                strange.issue(self, instr)
        for slot, value in self.given:
            if slot in self.slots:
                raise Wrong(f"{self.entry} fills {slot}, which is still in use")
            self.slots[slot] = value
        self.given.clear()
        self.entries.append(self.entry)

    def address(self, i: Instr) -> None:
        """Whether there is such a stage here, and such a microbatch."""
        per_rank = i.op in (O.ReduceNorm, O.OptimizerStep, O.CheckGradsFinite)
        per_stage = i.op in PER_STAGE
        most = self.machine.updates if per_rank or per_stage else self.machine.microbatches
        if i.op in sharded.TURNS:
            per_stage, most = True, i.mb + 1
        elif i.op not in self.ISSUE:
            per_rank, per_stage, most = strange.address(self, i)
        here = per_rank or per_stage or self.runs(i.stage, i.mb)
        if i.stage not in ([0] if per_rank else self.own) or i.mb >= most or not here:
            raise Wrong(f"there is no {i} on rank {self.rank}")

    def runs(self, stage: int, mb: int) -> bool:
        """Whether this rank runs a microbatch in a stage."""
        return stage in self.own and self.machine.holder(stage, mb) == self.rank

    def wrong(self, why: str) -> None:
        self.fail(self.entry, why)

    def fail(self, entry: Entry, why: str) -> None:
        raise Wrong(f"{entry} on rank {self.rank}: {why}")

    # ------------------------------------------------------------ slots

    def look(self, *slot: object) -> SlotValue:
        """The value of a slot, for an entry that waits until it is there."""
        if slot not in self.slots:
            raise Wrong(f"{self.entry} needs {slot}, which has not been issued")
        value = self.slots[slot]
        self.entry.waits.append(value.ready)
        return value

    def take(self, *slot: object) -> SlotValue:
        """The same, and the slot is free again."""
        value = self.look(*slot)
        strange.expect(self, slot, value)
        self.slots.pop(slot, None)
        return value

    def give(self, *slot: object) -> SlotValue:
        """Fill a slot with what will be there when the entry has ended."""
        value = SlotValue(self.entry.done, state=strange.made(self, slot))
        self.given.append((slot, value))
        return value

    def expect(self, value: SlotValue, *tensor: object) -> None:
        """Have the entry look at what it took in."""

        def see() -> None:
            if value.tensor != tensor:
                raise Wrong(f"{entry} on rank {self.rank} takes in {value.tensor}, not {tensor}")

        entry = self.entry
        entry.actions.append(see)

    def add(self, i: Instr, *parts: str) -> None:
        """Add parts of a gradient to the stage's one sum, when the entry runs."""
        self.give("added", *parts, i.stage, i.mb)
        added = [(i.mb, part) for part in parts]
        sharded.add(self, i.stage)
        self.entry.actions.append(lambda: self.sums[i.stage].extend(added))

    def total(self, stage: int, update: int) -> None:
        """Have the entry find in the sum what belongs to an update, all of it and nothing else."""
        mbs = [mb for mb in self.machine.mbs(update) if self.runs(stage, mb)]
        right = sorted((mb, part) for mb in mbs for part in ("plain", "split"))

        def see() -> None:
            found, rest = self.sums[stage], []
            if self.machine.zero:
                found, rest = self.parts[stage], found
            if sorted(found) != right or rest:
                raise Wrong(f"{entry} on rank {self.rank} finds {found}, not {right}")

        entry = self.entry
        entry.actions.append(see)

    def make(self, value: SlotValue, *tensor: object) -> None:
        made = Tensor(*tensor)  # type: ignore[arg-type]
        self.entry.actions.append(lambda: setattr(value, "tensor", made))

    # ------------------------------------------------------------ instructions

    def queue(self, name: object) -> None:
        self.entry.kind = name
        self.entry.queues.add("all" if self.machine.model == "blocking_serial" else name)

    def forward(self, i: Instr) -> None:
        self.queue("compute")
        if version := self.machine.version(i.stage, i.mb):
            self.look("parameters", version)
        if i.stage > 0:
            found = self.take("act_in", i.stage, i.mb)
            self.expect(found, "act", i.stage - 1, i.mb, pieces.taken(self, i))
        if i.stage in self.machine.skips.values():
            begin = self.machine.beginning(i.stage)
            self.expect(self.take("skip_in", i.stage, i.mb), "skip", begin, i.mb, True)
        if i.stage in self.machine.skips:
            self.hand("skip", i, self.machine.skips[i.stage])
        if i.stage == self.machine.stages - 1:
            self.give("loss", i.mb)
        elif self.runs(i.stage + 1, i.mb):
            to = self.give("act_in", i.stage + 1, i.mb)
            self.make(to, "act", i.stage, i.mb, pieces.given(self, i))
        else:
            self.make(self.give("act_out", i.stage, i.mb), "act", i.stage, i.mb)
        if self.machine.trains and i.stage >= self.machine.frozen:
            away.save(self, i)

    def backward_input(self, i: Instr) -> None:
        self.hand_back(i)
        self.add(i, "plain")
        self.give("tape", i.stage, i.mb)

    def backward(self, i: Instr) -> None:
        self.hand_back(i)
        self.add(i, "plain", "split")

    def hand_back(self, i: Instr) -> None:
        """The gradient of the input, in B and in I."""
        self.queue("compute")
        away.use(self, i)
        if i.stage < self.machine.stages - 1:
            found = self.take("grad_in", i.stage, i.mb)
            self.expect(found, "grad", i.stage + 1, i.mb, pieces.taken(self, i))
        if i.stage in self.machine.skips:
            end = self.machine.skips[i.stage]
            self.expect(self.take("skip_grad_in", i.stage, i.mb), "skip_grad", end, i.mb, True)
        if self.machine.beginning(i.stage) >= self.machine.frozen:
            self.hand("skip_grad", i, self.machine.beginning(i.stage))
        if i.stage == self.machine.frozen:
            return  # nobody wants it
        if self.runs(i.stage - 1, i.mb):
            to = self.give("grad_in", i.stage - 1, i.mb)
            self.make(to, "grad", i.stage, i.mb, pieces.given(self, i))
        else:
            self.make(self.give("grad_out", i.stage, i.mb), "grad", i.stage, i.mb)

    def hand(self, kind: str, i: Instr, to: int) -> None:
        """What goes along a skip: to a stage here, or into a message."""
        slot = (f"{kind}_in", to) if self.runs(to, i.mb) else (f"{kind}_out", i.stage)
        self.make(self.give(*slot, i.mb), kind, i.stage, i.mb)

    def backward_weight(self, i: Instr) -> None:
        self.queue("compute")
        self.take("tape", i.stage, i.mb)
        self.add(i, "split")

    def message(self, i: Instr) -> None:
        """A transfer: sends at once what is in the out slot, or fills the in slot."""
        machine, model = self.machine, self.machine.model
        kind, sends = MOVES[i.op], i.op in SENDING
        lane = "grad" if "grad" in kind else "act"
        up = (lane == "act") == sends  # to a later stage, or from one
        if "skip" in kind:
            stage = machine.skips.get(i.stage, -1) if up else machine.beginning(i.stage)
        else:
            stage = i.stage + (1 if up else -1)
        first = machine.frozen if lane == "grad" else 0
        if not first <= stage < machine.stages or self.runs(stage, i.mb):
            raise Wrong(f"{i} on rank {self.rank} has nobody to go to")
        peer = machine.holder(stage, i.mb)
        way = (self.rank, peer) if sends else (peer, self.rank)
        queue, channel = {
            "per_edge": ((lane, peer, sends), (lane, *way)),
            "per_pair": (peer, way),
            "per_direction": (lane, (lane, *way)),
            "per_device": ("wire", way),
            "torch_lazy": ("wire", ("all", *way)) if len(self.entry.group) > 1 else (peer, way),
            "blocking_serial": ("all", way),
        }[model]
        self.queue(queue)
        slot = (f"{kind}_out" if sends else f"{kind}_in", i.stage, i.mb)
        value = self.take(*slot) if sends else self.give(*slot)
        met = Event()
        message = Message(
            (self.replica, channel), sends, value, met, sends and machine.small(i, kind)
        )
        self.entry.actions.append(lambda: machine.post(message))
        self.entry.meets.append(met)

    def collective(self, communicator: object, members: int, update: int) -> None:
        """Meet the others; who meets them for another update notices."""
        met = Event()
        member = met, update
        place = self.replica, communicator
        self.entry.actions.append(lambda: self.machine.join(place, members, member))
        self.entry.meets.append(met)

    def reduce_grads(self, i: Instr) -> None:
        """Over replicas, which all run this Stream."""
        self.queue("reductions")
        sharded.meet_replicas(self, i, "dp")
        if self.machine.zero:
            self.wrong("what replicas hold a part each of is reduced to parts")
        for mb in self.machine.mbs(i.mb):
            if self.runs(i.stage, mb):
                whole = ("added", "plain", "split", i.stage, mb)
                parts = [("added", part, i.stage, mb) for part in ("plain", "split")]
                for slot in [whole] if whole in self.slots else parts:
                    self.take(*slot)
        self.total(i.stage, i.mb)
        self.give("half grad" if len(self.machine.holders) > 1 else "grad", i.stage, i.mb)

    def reduce_holders(self, i: Instr) -> None:
        """The holders of a stage meet."""
        self.queue("reductions")
        self.take("half grad", i.stage, i.mb)
        sharded.reduced(self, i.stage)
        self.give("grad", i.stage, i.mb)
        self.collective(("holders", i.stage), len(self.machine.holders), i.mb)

    def reduce_tied(self, i: Instr) -> None:
        """The holders of copies meet; a rank that holds several names the first."""
        self.queue("reductions")
        copies = [s for s in self.own if s in self.machine.tied]
        if i.stage != min(copies, default=None):
            raise Wrong(f"{i}: not the rank's first copy of a tied weight")
        for stage in copies:
            self.take("grad", stage, i.mb)
            sharded.reduced(self, stage)
            self.give("tied grad", stage, i.mb)
        party = met(self.machine.ties, self.machine.own, self.rank)
        if len(party) > 1:
            self.collective(("tied", *sorted(party)), len(party), i.mb)

    def final(self, update: int) -> list[Slot]:
        """Where the rank's gradients are when nothing is left to add."""
        sequenced.expect(self, *self.trained, update=update)
        tied = self.machine.tied
        return [("tied grad" if s in tied else "grad", s, update) for s in self.trained]

    def ends(self, update: int) -> None:
        """A rank ends its updates in turn: it has one norm, that of the update that ends."""
        if update < self.ending:
            raise Wrong(f"update {update} ends after what is of update {self.ending}")
        self.ending = update

    def reduce_norm(self, i: Instr) -> None:
        self.ends(i.mb)
        self.queue("reductions")
        for slot in self.final(i.mb):
            self.look(*slot)
        sharded.reduced(self, *self.trained)
        self.give("norm", i.mb)
        self.collective("all ranks", len(self.machine.lists), i.mb)

    def step(self, i: Instr) -> None:
        self.ends(i.mb)
        self.queue("compute")
        for slot in self.final(i.mb) + [("norm", i.mb)] * self.machine.program.clip_grad_norm:
            self.take(*slot)
        sharded.step(self)
        snapshots.step(self, i)
        stepped.end(self, i)
        self.give("parameters", i.mb + 1)

    def judge(self) -> None:
        """What is left on this rank is what should be."""
        updates = range(self.machine.updates if self.machine.trains else 0)
        right: set[Slot] = {("parameters", update + 1) for update in updates}
        microbatches = range(self.machine.microbatches)
        right |= {("loss", mb) for mb in microbatches if self.runs(self.machine.stages - 1, mb)}
        if self.machine.zero and not self.machine.trains:
            right |= {("parts", stage) for stage in self.trained}
        for slot in self.slots.keys() - right - strange.kept(self):
            raise Wrong(f"{slot} is left on rank {self.rank}")
        for slot in right - self.slots.keys():
            raise Wrong(f"{slot} is missing on rank {self.rank}")

    ISSUE: dict[Opcode, Callable[[Host, Instr], None]] = {  # noqa: RUF012
        O.Forward: forward,
        O.Backward: backward,
        O.BackwardInput: backward_input,
        O.BackwardWeight: backward_weight,
        **dict.fromkeys(MESSAGES, message),
        **dict.fromkeys(pieces.SLICES, pieces.reshape),
        **dict.fromkeys(pieces.SUMS, pieces.meet),
        **dict.fromkeys(pieces.EXCHANGES, pieces.exchange),
        O.ReduceGrads: reduce_grads,
        O.ReduceReplicatedStages: reduce_holders,
        O.ReduceTied: reduce_tied,
        O.ReduceSequenceParallelGrads: sequenced.reduce,
        O.ReduceNorm: reduce_norm,
        O.OptimizerStep: step,
        O.Unshard: sharded.unshard,
        O.Reshard: sharded.reshard,
        O.ReduceScatter: sharded.reduce_scatter,
        O.Snapshot: snapshots.snapshot,
        **dict.fromkeys(away.MOVED, away.move),
        **dict.fromkeys(stepped.NEXT, stepped.turn),
        O.CheckGradsFinite: stepped.release,
    }
