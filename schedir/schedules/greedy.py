"""`greedy_schedule`: build a schedule from priorities and memory limits by simulating it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import index

from schedir.errors import ScheduleError, describe, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BY_TEXT,
    FORWARD,
    SENDS,
    Instr,
    Opcode,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream

_F, _B, _I, _W = FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT


def greedy_schedule(
    shape: PipelineShape,
    prefer: str,
    in_flight: int | Callable[[int], int],
    costs: Costs | None = None,
    name: str = "greedy",
    frozen_stages: int = 0,
) -> Program:
    """A draft by list scheduling: an idle rank never waits while there is something it may do.

    It starts what is ready and comes first in `prefer`, the letters of F and B or of F, I and W;
    among equals the lowest microbatch, then the deepest stage.  Rank r has at most `in_flight`,
    or `in_flight(r)`, (stage, mb) alive, each from its F to its B or W.

    No F takes the room that later stages of its own rank need to go on.  So the deepest
    microbatch can always move, nothing hangs, and the limit need only be the number of a rank's
    own stages or more; ScheduleError where it is less.

    The first `frozen_stages` stages are not trained: they have no backward, and what they run is
    not alive, for nothing is kept of it.

    `compile` and `simulate` take a draft as it is.  Raises UsageError for a shape or costs of
    another kind, and ScheduleError for what is no order or no number.

    >>> from schedir import PipelineShape, expand_schedule, greedy_schedule, schedules
    >>> shape = PipelineShape(ranks=4, microbatches=8)
    >>> found = greedy_schedule(shape, "BF", lambda rank: shape.ranks - rank)
    >>> found.streams == expand_schedule(schedules.one_f_one_b, shape).streams
    True
    """
    require_type(shape, PipelineShape, "PipelineShape(ranks=2, microbatches=4)")
    costs = Costs() if costs is None else costs
    require_type(costs, Costs, "Costs(F=1, B=2)")
    if not isinstance(prefer, str) or sorted(prefer) not in (["B", "F"], ["F", "I", "W"]):
        raise ScheduleError(f"prefer orders the letters BF or FIW, not {describe(prefer)}")
    drafted = Program(name, shape, (Stream.of([]),) * shape.ranks, frozen_stages=frozen_stages)
    run = _GreedyState(drafted, [BY_TEXT[letter] for letter in prefer], in_flight, costs)
    return replace(drafted, streams=tuple(run.streams()))


def _limit(given: object) -> int:
    try:
        if isinstance(given, bool):
            raise TypeError
        return index(given)  # type: ignore[arg-type]
    except TypeError:
        raise ScheduleError(
            f"in_flight is a whole number, or a function of the rank that gives one, not "
            f"{describe(given)}"
        ) from None


class _GreedyState:
    """The state of the ranks at one moment."""

    def __init__(
        self,
        drafted: Program,
        prefer: list[Opcode],
        in_flight: int | Callable[[int], int],
        costs: Costs,
    ) -> None:
        self.shape = shape = drafted.shape
        self.frozen = drafted.frozen_stages
        self.costs = {op: costs.of(op, shape).tolist() for op in (*prefer, SENDS[0])}
        self.prefer = {op: k for k, op in enumerate(prefer)}
        self.backward = _I if _I in prefer else _B
        # How many may be alive before an F of a stage: one less for each stage after it.
        self.room: list[dict[int, int]] = [{} for _ in range(shape.ranks)]
        for rank, own in enumerate(shape.stages_of):
            limit = _limit(in_flight(rank) if callable(in_flight) else in_flight)
            trained = [stage for stage in own if stage >= self.frozen]
            if limit < len(trained):
                raise ScheduleError(
                    f"{limit} activations in flight are too few for rank {rank}, which "
                    f"{'trains' if self.frozen else 'has'} {len(trained)} "
                    f"stage{'s' * (len(trained) > 1)}"
                )
            for after, stage in enumerate(reversed(trained)):
                self.room[rank][stage] = limit - after
        self.ready: list[set[Instr]] = [set() for _ in range(shape.ranks)]
        self.alive = [0] * shape.ranks
        self.done: list[list[Instr]] = [[] for _ in range(shape.ranks)]

    def streams(self) -> Iterable[Stream]:
        """Run everything; what each rank did, in order."""
        for mb in range(self.shape.microbatches):
            self.ready[int(self.shape.rank_at(0, mb))].add(Instr(_F, 0, mb))
        # When a rank is through with a task, or when a task's value has come from elsewhere.
        events: list[tuple[float, int, Instr, bool]] = []
        idle, now = set(range(self.shape.ranks)), 0.0
        while True:
            for rank in sorted(idle):
                task = self._start(rank)
                if task is not None:
                    idle.discard(rank)
                    end = now + self._cost(task.op, task)
                    heapq.heappush(events, (end, rank, task, True))
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] == now:
                _, rank, task, ends = heapq.heappop(events)
                if ends:
                    idle.add(rank)
                    for after in self._after(*task):
                        there = int(self.shape.rank_at(*after[1:]))
                        send = self._cost(SENDS[0], task) * (there != rank)
                        heapq.heappush(events, (now + send, there, after, False))
                else:
                    self.ready[rank].add(task)
        yield from map(Stream.of, self.done)

    def _cost(self, op: Opcode, task: Instr) -> float:
        """What an instruction of a task's stage and microbatch costs."""
        own = self.costs[op][task.stage]
        return float(own[task.mb if len(own) > 1 else 0])

    def _start(self, rank: int) -> Instr | None:
        """What an idle rank starts now, if anything."""
        alive = self.alive[rank]
        room = self.room[rank]
        may = [
            t for t in self.ready[rank]
            if t.op is not _F or t.stage < self.frozen or alive < room[t.stage]
        ]  # fmt: skip
        if not may:
            return None
        task = min(may, key=lambda t: (self.prefer[t.op], t.mb, -t.stage))
        self.ready[rank].discard(task)
        self.alive[rank] += (task.op is _F and task.stage >= self.frozen) - (task.op in (_B, _W))
        self.done[rank].append(task)
        return task

    def _after(self, op: Opcode, stage: int, mb: int) -> Iterable[Instr]:
        """What needs the value of a task."""
        if op is _F:
            last = stage + 1 == self.shape.stages
            yield Instr(self.backward, stage, mb) if last else Instr(_F, stage + 1, mb)
        elif op is not _W and stage > self.frozen:
            yield Instr(self.backward, stage - 1, mb)
        if op is _I:
            yield Instr(_W, stage, mb)
