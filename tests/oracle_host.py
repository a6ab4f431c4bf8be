"""The host of one rank in the oracle: it issues the instructions of a Stream.

`oracle_threads.py` describes the oracle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from schedir.ir.isa.instructions import Instr, Opcode
from tests import (
    oracle_activation_offload,
    oracle_optimizer_offload,
    oracle_segments,
    oracle_sequence_parallel,
    oracle_sharding,
    oracle_snapshots,
    oracle_unknown_instructions,
)
from tests.oracle_values import Entry, Event, Message, OracleError, Slot, SlotValue, Tensor, met

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
PER_STAGE |= {*oracle_optimizer_offload.NEXT}
LARGEST = 256
# A part of a stage's gradient: the microbatch, and "split" for weights whose gradients W computes,
# or "plain" for all other weights.
Part = tuple[int, str]


class Host:
    """Issues the Stream of one rank.  A slot counts as filled when its instruction is issued."""

    def __init__(self, machine: Machine, rank: int, replica: int = 0) -> None:
        self.machine, self.rank, self.replica = machine, rank, replica
        self.sums: dict[int, list[Part]] = defaultdict(list)  # stage -> parts in its gradient sum
        self.ending = 0  # the update that the rank ends next
        self.own = machine.own[rank]
        self.trained = [s for s in self.own if s >= machine.frozen]
        self.slots: dict[Slot, SlotValue] = {}
        self.given: list[tuple[Slot, SlotValue]] = []  # slots that the current group fills
        self.changes: dict[tuple[Slot, bool], list[tuple[str, str]]] | None = None
        self.turns: Counter[tuple[int, ...]] = Counter()  # (opcode, stage) -> number of issues
        self.parts: dict[int, list[Part]] = defaultdict(list)  # stage -> parts that are reduced
        self.reducing: dict[int, list[Entry]] = defaultdict(list)  # stage -> its reductions
        self.whole: dict[int, int] = {}  # unsharded stage -> number of steps before its gather
        self.adding: set[int] = set()  # stages that have a gradient sum
        self.stepped = 0
        self.summed: dict[tuple[int, int], Event] = {}  # ends of sequence-parallel reductions
        self.room: dict[str, list[Event]] = {}  # kind of slot -> events at which slots are free
        self.states: dict[int, tuple[str, Event]] = {}  # stage -> place of optimizer state, event
        self.gone: dict[int, Event] = {}  # stage -> event at which its gradient is on the host
        self.update = 0  # the update that the host steps
        self.released: Event | None = None  # event at which the host may use its gradients
        for each in (oracle_sharding, oracle_activation_offload, oracle_optimizer_offload):
            each.begin(self)
        self.entries: list[Entry] = []

    def issue_all(self) -> None:
        groups: list[list[Instr]] = []
        for instr, joined in self.machine.lists[self.rank]:
            if not joined:
                groups.append([])
            elif not groups:
                raise OracleError(f"{instr} is joined to nothing")
            groups[-1].append(instr)
        for group in groups:
            self.require_group(group)
            ways = {i.op in SENDING if i.op in MESSAGES else None for i in group}
            if self.machine.model == "torch_lazy" and ways in ({True}, {False}):
                for instr in group:  # torch issues such messages one by one
                    self.issue([instr])
            else:
                self.issue(group)

    def require_group(self, group: list[Instr]) -> None:
        """Raise Wrong if the instructions cannot be one group."""
        if len(group) > 1:
            messages = all(i.op in MESSAGES for i in group) and len(group) <= LARGEST
            cell = (
                all(oracle_unknown_instructions.computes(i.op) for i in group) and len(group) == 2
            )
            if not (messages or cell):
                raise OracleError(f"{len(group)} instructions from {group[0]} on cannot run as one")

    def issue(self, group: list[Instr]) -> None:
        self.entry = Entry(self.rank, group)
        for instr in group:
            self.address(instr)
            if instr.op in oracle_sharding.READS:
                oracle_sharding.read(self, instr)
            if instr.op in self.ISSUE:
                self.ISSUE[instr.op](self, instr)
                oracle_unknown_instructions.beside(self, instr)
            else:
                oracle_unknown_instructions.issue(self, instr)
        for slot, value in self.given:
            if slot in self.slots:
                raise OracleError(f"{self.entry} fills {slot}, which is still in use")
            self.slots[slot] = value
        self.given.clear()
        self.entries.append(self.entry)

    def address(self, i: Instr) -> None:
        """Raise Wrong if the rank does not have the stage or the microbatch of an instruction."""
        per_rank = i.op in (O.ReduceNorm, O.OptimizerStep, O.CheckGradsFinite)
        per_stage = i.op in PER_STAGE
        most = self.machine.updates if per_rank or per_stage else self.machine.microbatches
        if i.op in oracle_sharding.TURNS:
            per_stage, most = True, i.mb + 1
        elif i.op not in self.ISSUE:
            per_rank, per_stage, most = oracle_unknown_instructions.address(self, i)
        here = per_rank or per_stage or self.runs(i.stage, i.mb)
        if i.stage not in ([0] if per_rank else self.own) or i.mb >= most or not here:
            raise OracleError(f"there is no {i} on rank {self.rank}")

    def runs(self, stage: int, mb: int) -> bool:
        """Return whether this rank runs a microbatch in a stage."""
        return stage in self.own and self.machine.holder(stage, mb) == self.rank

    def wrong(self, why: str) -> None:
        self.fail(self.entry, why)

    def fail(self, entry: Entry, why: str) -> None:
        raise OracleError(f"{entry} on rank {self.rank}: {why}")

    # ------------------------------------------------------------ slots

    def look(self, *slot: object) -> SlotValue:
        """Return the value of a slot. The current entry will wait until the value is ready."""
        if slot not in self.slots:
            raise OracleError(f"{self.entry} needs {slot}, which has not been issued")
        value = self.slots[slot]
        self.entry.waits.append(value.ready)
        return value

    def take(self, *slot: object) -> SlotValue:
        """Return the value of a slot as `look` does, and free the slot."""
        value = self.look(*slot)
        oracle_unknown_instructions.expect(self, slot, value)
        self.slots.pop(slot, None)
        return value

    def give(self, *slot: object) -> SlotValue:
        """Fill a slot with a value that is ready when the current entry ends."""
        value = SlotValue(self.entry.done, state=oracle_unknown_instructions.made(self, slot))
        self.given.append((slot, value))
        return value

    def expect(self, value: SlotValue, *tensor: object) -> None:
        """Verify at the run of the current entry that a value has the expected tensor."""

        def see() -> None:
            if value.tensor != tensor:
                raise OracleError(
                    f"{entry} on rank {self.rank} takes in {value.tensor}, not {tensor}"
                )

        entry = self.entry
        entry.actions.append(see)

    def add(self, i: Instr, *parts: str) -> None:
        """Add parts of a gradient to the stage's gradient sum when the current entry runs."""
        self.give("added", *parts, i.stage, i.mb)
        added = [(i.mb, part) for part in parts]
        oracle_sharding.add(self, i.stage)
        self.entry.actions.append(lambda: self.sums[i.stage].extend(added))

    def total(self, stage: int, update: int) -> None:
        """Verify, when the entry runs, that the gradient sum has exactly the parts of an update."""
        mbs = [mb for mb in self.machine.mbs(update) if self.runs(stage, mb)]
        right = sorted((mb, part) for mb in mbs for part in ("plain", "split"))

        def see() -> None:
            found, rest = self.sums[stage], []
            if self.machine.zero:
                found, rest = self.parts[stage], found
            if sorted(found) != right or rest:
                raise OracleError(f"{entry} on rank {self.rank} finds {found}, not {right}")

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
            self.expect(found, "act", i.stage - 1, i.mb, oracle_segments.taken(self, i))
        if i.stage in self.machine.skips.values():
            begin = self.machine.beginning(i.stage)
            self.expect(self.take("skip_in", i.stage, i.mb), "skip", begin, i.mb, True)
        if i.stage in self.machine.skips:
            self.hand("skip", i, self.machine.skips[i.stage])
        if i.stage == self.machine.stages - 1:
            self.give("loss", i.mb)
        elif self.runs(i.stage + 1, i.mb):
            to = self.give("act_in", i.stage + 1, i.mb)
            self.make(to, "act", i.stage, i.mb, oracle_segments.given(self, i))
        else:
            self.make(self.give("act_out", i.stage, i.mb), "act", i.stage, i.mb)
        if self.machine.trains and i.stage >= self.machine.frozen:
            oracle_activation_offload.save(self, i)

    def backward_input(self, i: Instr) -> None:
        self.hand_back(i)
        self.add(i, "plain")
        self.give("tape", i.stage, i.mb)

    def backward(self, i: Instr) -> None:
        self.hand_back(i)
        self.add(i, "plain", "split")

    def hand_back(self, i: Instr) -> None:
        """Issue the part of B or I that computes the gradient of the input."""
        self.queue("compute")
        oracle_activation_offload.use(self, i)
        if i.stage < self.machine.stages - 1:
            found = self.take("grad_in", i.stage, i.mb)
            self.expect(found, "grad", i.stage + 1, i.mb, oracle_segments.taken(self, i))
        if i.stage in self.machine.skips:
            end = self.machine.skips[i.stage]
            self.expect(self.take("skip_grad_in", i.stage, i.mb), "skip_grad", end, i.mb, True)
        if self.machine.beginning(i.stage) >= self.machine.frozen:
            self.hand("skip_grad", i, self.machine.beginning(i.stage))
        if i.stage == self.machine.frozen:
            return  # no stage needs the gradient of its input
        if self.runs(i.stage - 1, i.mb):
            to = self.give("grad_in", i.stage - 1, i.mb)
            self.make(to, "grad", i.stage, i.mb, oracle_segments.given(self, i))
        else:
            self.make(self.give("grad_out", i.stage, i.mb), "grad", i.stage, i.mb)

    def hand(self, kind: str, i: Instr, to: int) -> None:
        """Fill the slot of a skip: the input of a stage of this rank, or the value of a message."""
        slot = (f"{kind}_in", to) if self.runs(to, i.mb) else (f"{kind}_out", i.stage)
        self.make(self.give(*slot, i.mb), kind, i.stage, i.mb)

    def backward_weight(self, i: Instr) -> None:
        self.queue("compute")
        self.take("tape", i.stage, i.mb)
        self.add(i, "split")

    def message(self, i: Instr) -> None:
        """Issue a transfer: a send takes the value of its out slot, a receive fills its in slot."""
        machine, model = self.machine, self.machine.model
        kind, sends = MOVES[i.op], i.op in SENDING
        lane = "grad" if "grad" in kind else "act"
        up = (lane == "act") == sends  # True if the other side is a later stage
        if "skip" in kind:
            stage = machine.skips.get(i.stage, -1) if up else machine.beginning(i.stage)
        else:
            stage = i.stage + (1 if up else -1)
        first = machine.frozen if lane == "grad" else 0
        if not first <= stage < machine.stages or self.runs(stage, i.mb):
            raise OracleError(f"{i} on rank {self.rank} has nobody to go to")
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
        """Issue a collective. `Machine.join` raises Wrong if its members are of other updates."""
        met = Event()
        member = met, update
        place = self.replica, communicator
        self.entry.actions.append(lambda: self.machine.join(place, members, member))
        self.entry.meets.append(met)

    def reduce_grads(self, i: Instr) -> None:
        """Issue the reduction of a stage's gradients over replicas, which all run this Stream."""
        self.queue("reductions")
        oracle_sharding.meet_replicas(self, i, "dp")
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
        """Issue the reduction over the ranks that have a replica of the stage."""
        self.queue("reductions")
        self.take("half grad", i.stage, i.mb)
        oracle_sharding.reduced(self, i.stage)
        self.give("grad", i.stage, i.mb)
        self.collective(("holders", i.stage), len(self.machine.holders), i.mb)

    def reduce_tied(self, i: Instr) -> None:
        """Issue the reduction of tied weights over the ranks with copies.

        The instruction has the number of the rank's first stage with a copy.
        """
        self.queue("reductions")
        copies = [s for s in self.own if s in self.machine.tied]
        if i.stage != min(copies, default=None):
            raise OracleError(f"{i}: not the rank's first copy of a tied weight")
        for stage in copies:
            self.take("grad", stage, i.mb)
            oracle_sharding.reduced(self, stage)
            self.give("tied grad", stage, i.mb)
        party = met(self.machine.ties, self.machine.own, self.rank)
        if len(party) > 1:
            self.collective(("tied", *sorted(party)), len(party), i.mb)

    def final(self, update: int) -> list[Slot]:
        """Return the slots of the rank's reduced gradients of an update."""
        oracle_sequence_parallel.expect(self, *self.trained, update=update)
        tied = self.machine.tied
        return [("tied grad" if s in tied else "grad", s, update) for s in self.trained]

    def ends(self, update: int) -> None:
        """Raise Wrong if a rank ends its updates out of order. It has only one norm."""
        if update < self.ending:
            raise OracleError(f"update {update} ends after what is of update {self.ending}")
        self.ending = update

    def reduce_norm(self, i: Instr) -> None:
        self.ends(i.mb)
        self.queue("reductions")
        for slot in self.final(i.mb):
            self.look(*slot)
        oracle_sharding.reduced(self, *self.trained)
        self.give("norm", i.mb)
        self.collective("all ranks", len(self.machine.lists), i.mb)

    def step(self, i: Instr) -> None:
        self.ends(i.mb)
        self.queue("compute")
        for slot in self.final(i.mb) + [("norm", i.mb)] * self.machine.program.clip_grad_norm:
            self.take(*slot)
        oracle_sharding.step(self)
        oracle_snapshots.step(self, i)
        oracle_optimizer_offload.end(self, i)
        self.give("parameters", i.mb + 1)

    def judge(self) -> None:
        """Raise Wrong if the slots in use at the end are not the expected ones."""
        updates = range(self.machine.updates if self.machine.trains else 0)
        right: set[Slot] = {("parameters", update + 1) for update in updates}
        microbatches = range(self.machine.microbatches)
        right |= {("loss", mb) for mb in microbatches if self.runs(self.machine.stages - 1, mb)}
        if self.machine.zero and not self.machine.trains:
            right |= {("parts", stage) for stage in self.trained}
        for slot in self.slots.keys() - right - oracle_unknown_instructions.kept(self):
            raise OracleError(f"{slot} is left on rank {self.rank}")
        for slot in right - self.slots.keys():
            raise OracleError(f"{slot} is missing on rank {self.rank}")

    ISSUE: dict[Opcode, Callable[[Host, Instr], None]] = {  # noqa: RUF012
        O.Forward: forward,
        O.Backward: backward,
        O.BackwardInput: backward_input,
        O.BackwardWeight: backward_weight,
        **dict.fromkeys(MESSAGES, message),
        **dict.fromkeys(oracle_segments.SLICES, oracle_segments.reshape),
        **dict.fromkeys(oracle_segments.SUMS, oracle_segments.meet),
        **dict.fromkeys(oracle_segments.EXCHANGES, oracle_segments.exchange),
        O.ReduceGrads: reduce_grads,
        O.ReduceReplicatedStages: reduce_holders,
        O.ReduceTied: reduce_tied,
        O.ReduceSequenceParallelGrads: oracle_sequence_parallel.reduce,
        O.ReduceNorm: reduce_norm,
        O.OptimizerStep: step,
        O.Unshard: oracle_sharding.unshard,
        O.Reshard: oracle_sharding.reshard,
        O.ReduceScatter: oracle_sharding.reduce_scatter,
        O.Snapshot: oracle_snapshots.snapshot,
        **dict.fromkeys(oracle_activation_offload.MOVED, oracle_activation_offload.move),
        **dict.fromkeys(oracle_optimizer_offload.NEXT, oracle_optimizer_offload.turn),
        O.CheckGradsFinite: oracle_optimizer_offload.release,
    }
