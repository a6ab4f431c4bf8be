"""Build a schedule from priorities and memory limits by simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import index

from schedir.call_errors import explain_wrong_calls
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


@explain_wrong_calls("greedy_schedule(PipelineShape(ranks=4, microbatches=8), 'BF', 4)")
def greedy_schedule(
    shape: PipelineShape,
    priority: str,
    max_in_flight: int | Callable[[int], int],
    costs: Costs | None = None,
    *,
    name: str = "greedy",
    frozen_stages: int = 0,
) -> Program:
    """Make a draft (compute only) by list scheduling, from priorities and a memory limit.

    An idle rank starts an instruction as soon as it is ready and the memory limit allows it. If
    several are ready, the rank starts the instruction with the first letter in `priority`. If
    several have this letter, the rank starts the instruction of the lowest microbatch. If several
    have this microbatch, the rank starts the instruction of the last stage.

    A forward starts only if it leaves memory for one forward of each later stage of its rank. So
    the schedule has no deadlock. `max_in_flight` can be as low as the number of trained stages of
    the rank.

    Args:
        shape: Shape of the pipeline.
        priority: The letters of F and B, or of F, I and W, in order of priority: "BF" or "FIW".
        max_in_flight: Limit on the pairs (stage, microbatch) in flight on a rank, or a function of
            the rank that returns this limit. A pair is in flight from its F to its B or W.
        costs: Times of instructions. The default is `Costs()`.
        name: Name of the draft.
        frozen_stages: Number of frozen stages, which are the first stages. They have no backward,
            and their forwards are not counted as in flight.

    Returns:
        The draft. `compile` and `simulate` accept it.

    Raises:
        UsageError: `shape` or `costs` has a wrong type.
        ScheduleError: `priority` is not an order of these letters, or the limit is not an integer
            or is too low.

    Example:
        >>> from schedir import PipelineShape, expand_schedule, greedy_schedule, schedules
        >>> shape = PipelineShape(ranks=4, microbatches=8)
        >>> found = greedy_schedule(shape, "BF", lambda rank: shape.ranks - rank)
        >>> found.streams == expand_schedule(schedules.one_f_one_b, shape).streams
        True
    """
    require_type(shape, "shape", PipelineShape, "PipelineShape(ranks=2, microbatches=4)")
    costs = Costs() if costs is None else costs
    require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
    if not isinstance(priority, str) or sorted(priority) not in (["B", "F"], ["F", "I", "W"]):
        raise ScheduleError(
            f"priority must be the letters BF or FIW in any order, not {describe(priority)}"
        )
    empty_draft = Program(
        name, shape, (Stream.from_instructions([]),) * shape.ranks, frozen_stages=frozen_stages
    )
    state = _GreedyState(
        empty_draft, [OPCODE_BY_TEXT[letter] for letter in priority], max_in_flight, costs
    )
    return replace(empty_draft, streams=tuple(state.streams()))


def _require_integer(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ScheduleError(
            "max_in_flight must be an integer, or a function of the rank that returns one, not "
            f"{describe(value)}"
        ) from None


class _GreedyState:
    """The state of the simulation: the ready, live and finished tasks of all ranks."""

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
        # For each rank: stage -> number of pairs.  An F of the stage may start if fewer pairs are
        # in flight.  The number is one less for each later stage of the rank, because later stages
        # need memory to continue.
        self.capacity: list[dict[int, int]] = [{} for _ in range(shape.ranks)]
        for rank, local_stages in enumerate(shape.stages_on_rank):
            limit = _require_integer(
                max_in_flight(rank) if callable(max_in_flight) else max_in_flight
            )
            trained_stages = [stage for stage in local_stages if stage >= self.frozen_stages]
            if limit < len(trained_stages):
                raise ScheduleError(
                    f"max_in_flight must be at least {len(trained_stages)} on rank {rank}, the "
                    f"number of its {'trained ' if self.frozen_stages else ''}stages, not {limit}"
                )
            for later_stages, stage in enumerate(reversed(trained_stages)):
                self.capacity[rank][stage] = limit - later_stages
        self.ready_tasks: list[set[Instr]] = [set() for _ in range(shape.ranks)]
        self.live_counts = [0] * shape.ranks
        self.done_tasks: list[list[Instr]] = [[] for _ in range(shape.ranks)]

    def streams(self) -> Iterable[Stream]:
        """Simulate the step, and yield the instructions of each rank in order.

        Yields:
            The Stream of each rank.
        """
        for mb in range(self.shape.microbatches):
            self.ready_tasks[int(self.shape.rank_of_stage(0, mb))].add(Instr(_F, 0, mb))
        # Entries (time, rank, task, has_ended).  If `has_ended` is True, the rank has finished the
        # task at this time.  Otherwise the input of the task has arrived.
        events: list[tuple[float, int, Instr, bool]] = []
        idle_ranks, time = set(range(self.shape.ranks)), 0.0
        while True:
            for rank in sorted(idle_ranks):
                task = self._start_task(rank)
                if task is not None:
                    idle_ranks.discard(rank)
                    end = time + self._get_cost(task.op, task)
                    heapq.heappush(events, (end, rank, task, True))
            if not events:
                break
            time = events[0][0]
            while events and events[0][0] == time:
                _, rank, task, has_ended = heapq.heappop(events)
                if has_ended:
                    idle_ranks.add(rank)
                    for successor in self._find_successors(*task):
                        successor_rank = int(self.shape.rank_of_stage(*successor[1:]))
                        send_time = self._get_cost(SEND_OPS[0], task) * (successor_rank != rank)
                        heapq.heappush(events, (time + send_time, successor_rank, successor, False))
                else:
                    self.ready_tasks[rank].add(task)
        yield from map(Stream.from_instructions, self.done_tasks)

    def _get_cost(self, op: Opcode, task: Instr) -> float:
        """Return the cost of an opcode at the stage and microbatch of a task."""
        stage_costs = self.costs[op][task.stage]
        return float(stage_costs[task.mb if len(stage_costs) > 1 else 0])

    def _start_task(self, rank: int) -> Instr | None:
        """Start a task on an idle rank and return it, or return None if no task may start."""
        live_count = self.live_counts[rank]
        capacity = self.capacity[rank]
        candidates = [
            t for t in self.ready_tasks[rank]
            if t.op is not _F or t.stage < self.frozen_stages or live_count < capacity[t.stage]
        ]  # fmt: skip
        if not candidates:
            return None
        task = min(candidates, key=lambda t: (self.priority[t.op], t.mb, -t.stage))
        self.ready_tasks[rank].discard(task)
        self.live_counts[rank] += (task.op is _F and task.stage >= self.frozen_stages) - (
            task.op in (_B, _W)
        )
        self.done_tasks[rank].append(task)
        return task

    def _find_successors(self, op: Opcode, stage: int, mb: int) -> Iterable[Instr]:
        """Yield the tasks that need the result of a task."""
        if op is _F:
            is_last = stage + 1 == self.shape.stages
            yield Instr(self.backward, stage, mb) if is_last else Instr(_F, stage + 1, mb)
        elif op is not _W and stage > self.frozen_stages:
            yield Instr(self.backward, stage - 1, mb)
        if op is _I:
            yield Instr(_W, stage, mb)
