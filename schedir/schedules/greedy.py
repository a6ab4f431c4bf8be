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
    FORWARD,
    OPCODE_BY_TEXT,
    SEND_OPS,
    Instr,
    Opcode,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream

_F, _B, _I, _W = FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT


def greedy_schedule(
    shape: PipelineShape,
    priority: str,
    max_in_flight: int | Callable[[int], int],
    costs: Costs | None = None,
    name: str = "greedy",
    frozen_stages: int = 0,
) -> Program:
    """A draft by list scheduling: an idle rank never waits while there is something it may do.

    It starts what is ready and comes first in `priority`, the letters of F and B or of F, I and W;
    among equals the lowest microbatch, then the deepest stage.  Rank r has at most `max_in_flight`,
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
    if not isinstance(priority, str) or sorted(priority) not in (["B", "F"], ["F", "I", "W"]):
        raise ScheduleError(f"prefer orders the letters BF or FIW, not {describe(priority)}")
    drafted = Program(
        name, shape, (Stream.from_instructions([]),) * shape.ranks, frozen_stages=frozen_stages
    )
    run = _GreedyState(
        drafted, [OPCODE_BY_TEXT[letter] for letter in priority], max_in_flight, costs
    )
    return replace(drafted, streams=tuple(run.streams()))


def _require_integer(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ScheduleError(
            f"in_flight is a whole number, or a function of the rank that gives one, not "
            f"{describe(value)}"
        ) from None


class _GreedyState:
    """The state of the ranks at one moment."""

    def __init__(
        self,
        draft: Program,
        priority: list[Opcode],
        max_in_flight: int | Callable[[int], int],
        costs: Costs,
    ) -> None:
        self.shape = shape = draft.shape
        self.frozen_stages = draft.frozen_stages
        self.costs = {op: costs.for_opcode(op, shape).tolist() for op in (*priority, SEND_OPS[0])}
        self.priority = {op: k for k, op in enumerate(priority)}
        self.backward = _I if _I in priority else _B
        # How many may be alive before an F of a stage: one less for each stage after it.
        self.capacity: list[dict[int, int]] = [{} for _ in range(shape.ranks)]
        for rank, own in enumerate(shape.stages_on_rank):
            limit = _require_integer(
                max_in_flight(rank) if callable(max_in_flight) else max_in_flight
            )
            trained = [stage for stage in own if stage >= self.frozen_stages]
            if limit < len(trained):
                raise ScheduleError(
                    f"{limit} activations in flight are too few for rank {rank}, which "
                    f"{'trains' if self.frozen_stages else 'has'} {len(trained)} "
                    f"stage{'s' * (len(trained) > 1)}"
                )
            for after, stage in enumerate(reversed(trained)):
                self.capacity[rank][stage] = limit - after
        self.ready_tasks: list[set[Instr]] = [set() for _ in range(shape.ranks)]
        self.live_counts = [0] * shape.ranks
        self.done_tasks: list[list[Instr]] = [[] for _ in range(shape.ranks)]

    def streams(self) -> Iterable[Stream]:
        """Run everything; what each rank did, in order."""
        for mb in range(self.shape.microbatches):
            self.ready_tasks[int(self.shape.rank_of_stage(0, mb))].add(Instr(_F, 0, mb))
        # When a rank is through with a task, or when a task's value has come from elsewhere.
        events: list[tuple[float, int, Instr, bool]] = []
        idle, now = set(range(self.shape.ranks)), 0.0
        while True:
            for rank in sorted(idle):
                task = self._start_task(rank)
                if task is not None:
                    idle.discard(rank)
                    end = now + self._get_cost(task.op, task)
                    heapq.heappush(events, (end, rank, task, True))
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] == now:
                _, rank, task, ends = heapq.heappop(events)
                if ends:
                    idle.add(rank)
                    for after in self._find_successors(*task):
                        there = int(self.shape.rank_of_stage(*after[1:]))
                        send = self._get_cost(SEND_OPS[0], task) * (there != rank)
                        heapq.heappush(events, (now + send, there, after, False))
                else:
                    self.ready_tasks[rank].add(task)
        yield from map(Stream.from_instructions, self.done_tasks)

    def _get_cost(self, op: Opcode, task: Instr) -> float:
        """What an instruction of a task's stage and microbatch costs."""
        own = self.costs[op][task.stage]
        return float(own[task.mb if len(own) > 1 else 0])

    def _start_task(self, rank: int) -> Instr | None:
        """What an idle rank starts now, if anything."""
        alive = self.live_counts[rank]
        room = self.capacity[rank]
        may = [
            t for t in self.ready_tasks[rank]
            if t.op is not _F or t.stage < self.frozen_stages or alive < room[t.stage]
        ]  # fmt: skip
        if not may:
            return None
        task = min(may, key=lambda t: (self.priority[t.op], t.mb, -t.stage))
        self.ready_tasks[rank].discard(task)
        self.live_counts[rank] += (task.op is _F and task.stage >= self.frozen_stages) - (
            task.op in (_B, _W)
        )
        self.done_tasks[rank].append(task)
        return task

    def _find_successors(self, op: Opcode, stage: int, mb: int) -> Iterable[Instr]:
        """What needs the value of a task."""
        if op is _F:
            last = stage + 1 == self.shape.stages
            yield Instr(self.backward, stage, mb) if last else Instr(_F, stage + 1, mb)
        elif op is not _W and stage > self.frozen_stages:
            yield Instr(self.backward, stage - 1, mb)
        if op is _I:
            yield Instr(_W, stage, mb)
