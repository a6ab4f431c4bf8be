"""A slow reference simulator that has no dependency graph.

It visits all groups of instructions again and again.  A group starts if the previous groups in its
queues and all its producers have ended, and it ends after its cost.  If no group can start any
more, the remaining groups are in a deadlock.  With shared slots, an instruction that fills a slot
also waits for the instruction that freed this slot.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Lane, Opcode, Scope
from schedir.ir.program import Program
from tests.oracle_host import SENDING, TAKING
from tests.oracle_values import met

O = Opcode


@dataclass
class Machine:
    program: Program
    model: str
    costs: Costs
    ended: dict[tuple[int, int], float] = field(default_factory=dict)  # (rank, index) -> end time
    small: float = -1  # sends of at most this many bytes do not wait for their receive
    sizes: tuple[float, float, float] = (0, 0, 0)  # bytes of activations, gradients and skips

    def run(self) -> bool:
        """Set `ended`, and return whether all instructions end."""
        self.lists = [list(s) for s in self.program.streams]
        self.groups = [self._groups(r) for r in range(len(self.lists))]
        self.where = {(r, i): k for r, l in enumerate(self.lists) for k, i in enumerate(l)}
        self.left = [self._left(rank) for rank in range(len(self.lists))]
        queues = [
            [[g for g in groups if q in self._queues(r, g)] for q in self._all(r, groups)]
            for r, groups in enumerate(self.groups)
        ]
        self.before = {
            (r, g[0]): [q[k - 1] for q in qs for k, other in enumerate(q) if other == g and k]
            for r, qs in enumerate(queues)
            for g in self.groups[r]
        }
        moved = True
        while moved:
            moved = any([self._try(r, g) for r, gs in enumerate(self.groups) for g in gs])
        return len(self.ended) == len(self.program)

    def _groups(self, rank: int) -> list[tuple[int, ...]]:
        groups: list[tuple[int, ...]] = []
        for k, joined in enumerate(self.program.streams[rank].joined):
            groups[-1:] = [(*groups[-1], k)] if joined else [*groups[-1:], (k,)]
        if self.model == "torch_lazy":
            groups = [part for group in groups for part in self._taken_apart(rank, group)]
        return groups

    def _taken_apart(self, rank: int, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return a group as torch issues it: sends only or receives only are issued one by one."""
        ops = {self.lists[rank][k].op for k in group}
        sends, receives = {*SENDING}, {*TAKING}
        return [(k,) for k in group] if ops <= sends or ops <= receives else [group]

    def _all(self, rank: int, groups: list[tuple[int, ...]]) -> set[object]:
        return {q for g in groups for q in self._queues(rank, g)}

    def _queues(self, rank: int, group: tuple[int, ...]) -> set[object]:
        return {self._queue(rank, self.lists[rank][k], len(group) > 1) for k in group}

    def _queue(self, rank: int, i: Instr, grouped: bool) -> object:
        row = INSTRUCTIONS[i.op]
        if self.model == "blocking_serial":
            return "all"
        if not row.peer:
            return row.lane.name
        peer = int(self.program.shape.rank_of_stage(self._other(i), i.mb))
        if self.model == "per_edge":
            return (row.lane, peer, i.op in TAKING)
        if self.model == "per_direction":
            return row.lane
        return (
            peer
            if self.model == "per_pair" or (self.model == "torch_lazy" and not grouped)
            else "wire"
        )

    def _other(self, i: Instr) -> int:
        """Return the stage at the other side of a message."""
        skips = self.program.skips
        return {
            O.SendAct: i.stage + 1,
            O.RecvAct: i.stage - 1,
            O.SendGrad: i.stage - 1,
            O.RecvGrad: i.stage + 1,
            O.SendSkip: dict(skips).get(i.stage, -1),
            O.RecvSkipGrad: dict(skips).get(i.stage, -1),
            O.RecvSkip: {t: s for s, t in skips}.get(i.stage, -1),
            O.SendSkipGrad: {t: s for s, t in skips}.get(i.stage, -1),
        }[i.op]

    def _posted(self, rank: int, group: tuple[int, ...]) -> float | None:
        """Return the time when a group can start, or None if a predecessor has not ended."""
        times = [0.0]
        for g in self.before[rank, group[0]]:
            times += [self.ended.get((rank, k), -1.0) for k in g]
        for k in group:
            for need in self._needs(rank, self.lists[rank][k]):
                times.append(self.ended.get(need, -1.0))
            for at in self._of_parts(rank, k):
                times.append(self.ended.get((rank, at), -1.0))
            for free in self.left[rank].get(k, ()):
                times.append(self.ended.get((rank, free), -1.0))
        return None if min(times) < 0 else max(times)

    def _needs(self, rank: int, i: Instr) -> list[tuple[int, int]]:
        S, own = self.program.shape.stages, self.lists[rank]

        def here(*choices: tuple[Opcode, int]) -> list[tuple[int, int]]:
            for op, stage in choices:
                at = self.where.get((rank, Instr(op, stage, i.mb)))
                if at is not None:
                    return [(rank, at)]
            return []

        s = i.stage
        backward = [(O.Backward, s), (O.BackwardInput, s)]
        if i.op == O.Forward:
            shape = self.program.shape
            delay = (
                shape.weight_delay[s]
                if isinstance(shape.weight_delay, tuple)
                else shape.weight_delay
            )
            version = max(i.mb // (shape.microbatches // shape.optimizer_steps) - delay, 0)
            steps = [(rank, k) for k, j in enumerate(own) if j.op == O.OptimizerStep]
            version *= s >= self.program.frozen_stages
            skip = here((O.RecvSkip, s), (O.Forward, self._from(s)))
            came = here(
                (O.TPGatherAct, s),
                (O.TPReduceAct, s),
                (O.Dispatch, s),
                (O.Combine, s),
                (O.RecvAct, s),
                (O.Forward, s - 1),
            )
            return came + skip + steps[:version]
        if i.op in (O.Backward, O.BackwardInput):
            before = [(O.Backward, s + 1), (O.BackwardInput, s + 1)]
            grads = (
                (O.TPGatherGrad, s),
                (O.TPReduceGrad, s),
                (O.DispatchGrad, s),
                (O.CombineGrad, s),
                (O.RecvGrad, s),
                *before,
            )
            grad = here(*grads) if s + 1 < S else []
            late = dict(self.program.skips).get(s, -1)
            skip = here((O.RecvSkipGrad, s), (O.Backward, late), (O.BackwardInput, late))
            return here((O.Recompute, s), (O.Forward, s)) + grad + skip
        simple: dict[Opcode, list[tuple[Opcode, int]]] = {
            O.Recompute: [(O.Forward, s)],
            O.BackwardWeight: [(O.BackwardInput, s)],
            O.SendAct: [(O.TPScatterAct, s), (O.Forward, s)],
            O.TPScatterAct: [(O.Forward, s)],
            O.SendGrad: [(O.TPScatterGrad, s), *backward],
            O.SendSkip: [(O.Forward, s)],
            O.SendSkipGrad: backward,
            O.TPScatterGrad: backward,
            O.TPGatherAct: [(O.RecvAct, s), (O.Forward, s - 1)],
            O.TPGatherGrad: [(O.RecvGrad, s), (O.Backward, s + 1), (O.BackwardInput, s + 1)],
        }
        for op in (O.TPReduceAct, O.Dispatch, O.Combine):
            simple[op] = [(O.Forward, s - 1)]
        for op in (O.TPReduceGrad, O.DispatchGrad, O.CombineGrad):
            simple[op] = [(O.Backward, s + 1), (O.BackwardInput, s + 1)]
        if i.op in simple:
            return here(*simple[i.op])
        each = self.program.shape.microbatches // self.program.shape.optimizer_steps
        if i.op == O.Snapshot:
            return []
        if i.op == O.ReduceGrads:
            adds = (O.Backward, O.BackwardInput, O.BackwardWeight)
            return [
                (rank, k)
                for k, j in enumerate(own)
                if j.op in adds and j.stage == s and j.mb // each == i.mb
            ]
        makers = {
            O.ReduceReplicatedStages: (O.ReduceGrads,),
            O.ReduceTied: (O.ReduceGrads, O.ReduceReplicatedStages),
            O.ReduceSequenceParallelGrads: (O.ReduceGrads, O.ReduceReplicatedStages, O.ReduceTied),
            O.ReduceNorm: (
                O.ReduceGrads,
                O.ReduceReplicatedStages,
                O.ReduceTied,
                O.ReduceSequenceParallelGrads,
            ),
            O.OptimizerStep: (
                O.ReduceGrads,
                O.ReduceReplicatedStages,
                O.ReduceTied,
                O.ReduceSequenceParallelGrads,
                O.ReduceNorm,
                O.Snapshot,
            ),
        }.get(i.op, ())
        of = {
            O.ReduceReplicatedStages: {s},
            O.ReduceSequenceParallelGrads: {
                s,
                *(t for tie in self.program.tied_weights if s in tie for t in tie),
            },
            O.ReduceTied: {s for tie in self.program.tied_weights for s in tie},
        }.get(i.op, range(S))
        return [
            (rank, k)
            for k, j in enumerate(own)
            if j.op in makers and j.stage in of and j.mb == i.mb
        ]

    def _of_parts(self, rank: int, at: int) -> list[int]:
        """Return the indices of the instructions that an instruction needs because of ZeRO."""
        own, i = self.lists[rank], self.lists[rank][at]
        if not self.program.zero:
            return []

        def all_of(*ops: Opcode) -> list[int]:
            of_any = INSTRUCTIONS[i.op].scope is Scope.RANK
            return [k for k, j in enumerate(own) if j.op in ops and (of_any or j.stage == i.stage)]

        def before(*ops: Opcode) -> list[int]:
            return [k for k in all_of(*ops) if k < at]

        adds = (O.Backward, O.BackwardInput, O.BackwardWeight)
        needs = []
        if i.op in (O.Forward, O.Recompute, *adds[:2]) and i.stage >= self.program.frozen_stages:
            turns = before(O.Unshard, O.Reshard)
            there = bool(turns) and own[turns[-1]].op == O.Unshard
            needs += turns[-1:] if there else [k for k in all_of(O.Unshard) if k > at][:1]
        if i.op in adds and self.program.reduce_scatter_at == "each_backward":
            needs += before(O.ReduceScatter)[-1:]
        if i.op == O.Unshard:
            needs += before(O.Reshard)[-1:]
        if i.op == O.Reshard:
            needs += [k for k in all_of(O.Unshard) if own[k].mb == i.mb]
        # A ReduceScatter before all backwards still waits for the gradients that it sums.
        if i.op == O.ReduceScatter:
            last = all_of(O.ReduceScatter)[-1] == at
            needs += all_of(*adds) if last else before(*adds) or all_of(*adds)
        if i.op in (
            O.ReduceReplicatedStages,
            O.ReduceSequenceParallelGrads,
            O.ReduceNorm,
            O.OptimizerStep,
        ):
            needs += all_of(O.ReduceScatter)
        if i.op == O.ReduceTied:
            tied = {s for tie in self.program.tied_weights for s in tie}
            needs += [k for k, j in enumerate(own) if j.op == O.ReduceScatter and j.stage in tied]
        if i.op == O.OptimizerStep:
            needs += all_of(O.Reshard)
        return needs

    def _wholes(self, rank: int) -> dict[tuple[str, int, int], tuple[int, int]]:
        """Return the result of `values` for unsharded weights and gradients."""
        wholes, open_ = {}, dict[tuple[str, int], int]()
        adds = (O.Backward, O.BackwardInput, O.BackwardWeight)
        for k, i in enumerate(self.lists[rank]):
            if i.op == O.Unshard and self.program.zero > 2:
                open_["unsharded_params", i.stage] = k
            if i.op in adds and self.program.zero > 1:
                open_.setdefault(("wgrad", i.stage), k)
            ends = {O.Reshard: "unsharded_params", O.ReduceScatter: "wgrad"}.get(i.op, "")
            if (ends, i.stage) in open_:
                wholes[ends, i.stage, i.mb] = open_.pop((ends, i.stage)), k
        return wholes

    def _from(self, stage: int) -> int:
        """Return the stage from which a stage receives a skip, or -1."""
        return {t: s for s, t in self.program.skips}.get(stage, -1)

    def values(self, rank: int) -> dict[tuple[str, int, int], tuple[int, int]]:
        """Return for each value in a slot the indices that fill and free the slot.

        A key is (kind of the value, stage, microbatch).
        """
        own, S = self.lists[rank], self.program.shape.stages
        at = {i: k for k, i in enumerate(own)}
        values = {}
        for k, (op, s, mb) in enumerate(own):
            backward = (O.Backward, O.BackwardInput)
            if op == O.RecvAct:
                values["act_in", s, mb] = k, at[Instr(O.Forward, s, mb)]
            elif op == O.RecvGrad:
                values["grad_in", s, mb] = k, next(at[b] for o in backward
                                                   if (b := Instr(o, s, mb)) in at)  # fmt: skip
            elif op == O.RecvSkip:
                values["skip_in", s, mb] = k, at[Instr(O.Forward, s, mb)]
            elif op == O.RecvSkipGrad:
                takers = [Instr(o, s, mb) for o in backward]
                values["skip_grad_in", s, mb] = k, next(at[t] for t in takers if t in at)
            elif op == O.Forward and s + 1 < S:
                takers = [Instr(O.SendAct, s, mb), Instr(O.Forward, s + 1, mb)]
                values["act_out", s, mb] = k, next(at[t] for t in takers if t in at)
            elif op in backward and s > self.program.frozen_stages:
                takers = [Instr(O.SendGrad, s, mb), *(Instr(o, s - 1, mb) for o in backward)]
                values["grad_out", s, mb] = k, next(at[t] for t in takers if t in at)
            if op == O.Forward and (end := dict(self.program.skips).get(s)) is not None:
                takers = [Instr(O.SendSkip, s, mb), Instr(O.Forward, end, mb)]
                values["skip_out", s, mb] = k, next(at[t] for t in takers if t in at)
            if op in backward and (begin := self._from(s)) >= self.program.frozen_stages:
                takers = [Instr(O.SendSkipGrad, s, mb), *(Instr(o, begin, mb) for o in backward)]
                values["skip_grad_out", s, mb] = k, next(at[t] for t in takers if t in at)
        return values

    def _left(self, rank: int) -> dict[int, list[int]]:
        """Return for each index that fills used slots the indices that freed these slots."""
        left: dict[int, list[int]] = defaultdict(list)
        if not self.program.slots:
            return left
        # Each free slot is represented by the index that freed it, or -1 if it was never used.
        heap = {kind: deque([-1] * n) for kind, n in self.program.slots[rank].specified().items()}
        fills, frees = defaultdict(list), defaultdict(list)
        for (kind, _, _), (fill, free) in (self.values(rank) | self._wholes(rank)).items():
            fills[fill].append(kind)
            frees[free].append(kind)
        for group in self.groups[rank]:
            for k in group:
                for kind in heap.keys() & fills[k]:
                    before = heap[kind].popleft()
                    if before >= 0:
                        left[k].append(before)
            for k in group:
                for kind in heap.keys() & frees[k]:
                    heap[kind].append(k)
        return left

    def _partners(self, rank: int, i: Instr) -> list[tuple[int, int]]:
        row = INSTRUCTIONS[i.op]
        if row.partner is None:
            return [(rank, self.where[rank, i])]
        if row.peer:
            stage = self._other(i)
            peer = int(self.program.shape.rank_of_stage(stage, i.mb))
            other = (peer, self.where[peer, Instr(row.partner, stage, i.mb)])
            return [(rank, self.where[rank, i]), other]
        party = {*range(len(self.lists))}
        if i.op == O.ReduceTied:
            own = [[*stages] for stages in self.program.shape.stages_on_rank]
            party = met([{*tie} for tie in self.program.tied_weights], own, rank)
        return [
            (r, k)
            for r, own in enumerate(self.lists)
            for k, j in enumerate(own)
            if r in party
            and j.op == i.op
            and j.mb == i.mb
            and (i.op != O.ReduceReplicatedStages or j.stage == i.stage)
        ]

    def _apart(self, partners: list[tuple[int, int]]) -> bool:
        """Return whether a message can never match: one side is in a group, the other is not."""
        message = bool(INSTRUCTIONS[self.lists[partners[0][0]][partners[0][1]].op].peer)
        return message and len({len(self._group_of(r, n)) > 1 for r, n in partners}) > 1

    def _leaves(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
        """Return the send of a message if it does not wait for its receive, or None."""
        for rank, k in (one, other):
            i, size = self.lists[rank][k], self.sizes
            if i.op in (O.SendSkip, O.SendSkipGrad):
                return (rank, k) if size[2] <= self.small else None
            if i.op in (O.SendAct, O.SendGrad):
                act = i.op == O.SendAct
                cut = Instr(O.TPScatterAct if act else O.TPScatterGrad, i.stage, i.mb)
                shards = self.program.tp if (rank, cut) in self.where else 1
                return (rank, k) if size[not act] / shards <= self.small else None
        return None

    def _group_of(self, rank: int, index: int) -> tuple[int, ...]:
        return next(g for g in self.groups[rank] if index in g)

    def _cost(self, rank: int, i: Instr) -> float:
        if i.op == O.Backward and self.costs.B is None:
            return sum(
                self._cost(rank, Instr(op, i.stage, i.mb))
                for op in (O.BackwardInput, O.BackwardWeight)
            )
        if i.op == O.Recompute and self.costs.R is None:
            return self._cost(rank, Instr(O.Forward, i.stage, i.mb))
        value: Any = (
            getattr(self.costs.with_defaults(), INSTRUCTIONS[i.op].cost)
            if INSTRUCTIONS[i.op].cost
            else 0.0
        )
        value = 0.0 if value is None else value
        if isinstance(value, tuple):
            column = rank if INSTRUCTIONS[i.op].scope is Scope.RANK else i.stage
            value = value[min(column, len(value) - 1)]  # a single row is for all stages
        return float(value[i.mb] if isinstance(value, tuple) else value)

    def _try(self, rank: int, group: tuple[int, ...]) -> bool:
        """End a group if all its predecessors have ended. Return whether it ended now."""
        if (rank, group[0]) in self.ended:
            return False
        ends = []
        if INSTRUCTIONS[self.lists[rank][group[0]].op].lane is Lane.COMPUTE and len(group) > 1:
            start = self._posted(rank, group)
            if start is None:
                return False
            ends.append(start + sum(self._cost(rank, self.lists[rank][k]) for k in group))
        else:
            for k in group:
                partners = self._partners(rank, self.lists[rank][k])
                if self.model == "torch_lazy" and self._apart(partners):
                    return False
                leaves = self._leaves(*partners) if len(partners) == 2 else None
                if leaves == (rank, k):
                    partners = [leaves]
                starts = [self._posted(r, self._group_of(r, n)) for r, n in partners]
                if None in starts:
                    return False
                costs = [self._cost(r, self.lists[r][n]) for r, n in partners]
                if leaves is not None and len(partners) == 2:  # the receive of a small message
                    each = zip(starts, costs, strict=True)
                    ends.append(max(s + c for s, c in each if s is not None))
                else:
                    ends.append(max(s for s in starts if s is not None) + max(costs))
        for k in group:
            self.ended[rank, k] = max(ends)
        return True
