"""Compute the time of a microbatch through the pipeline if it waits for no other microbatch."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from schedir.schedule_search.problem import SchedulingProblem


class MicrobatchLatency(NamedTuple):
    """The least times of a microbatch between points of the pipeline, for each stage.

    Attributes:
        until_forward: The time from the start of the run to the start of the F on the stage.
        forward_to_backward: The time from the end of this F to the start of the I on the stage.
        backward_to_stage_0: The time from the end of this I to the end of the I on stage 0.
        outside_stage: The least time of the run before the first F and after the last I of the
            stage. For the objective "active_span", the longest active span of an earlier rank
            replaces the time of the run. 0 for stage 0.
    """

    until_forward: tuple[float, ...]
    forward_to_backward: tuple[float, ...]
    backward_to_stage_0: tuple[float, ...]
    outside_stage: tuple[float, ...]

    @classmethod
    def from_problem(cls, problem: SchedulingProblem) -> MicrobatchLatency:
        """Return the times of a problem.

        Args:
            problem: The problem.
        """
        stages, F, I = problem.shape.stages, problem.F, problem.I
        until_forward = [0.0] * stages
        forward_to_backward = [0.0] * stages
        backward_to_stage_0 = [0.0] * stages
        for a, b in pairwise(range(stages)):
            until_forward[b] = until_forward[a] + F[a] + problem.act_delay[a]
            backward_to_stage_0[b] = problem.grad_delay[b] + I[a] + backward_to_stage_0[a]
        for a, b in pairwise(range(stages - 1, -1, -1)):
            forward_to_backward[b] = (
                problem.act_delay[b] + F[a] + forward_to_backward[a] + I[a] + problem.grad_delay[a]
            )
        minimizes_active_span = problem.objective == "active_span"
        outside_stage, longest = [0.0] * stages, 0.0
        for s in range(stages):
            # `longest` is the maximum, over the earlier stages, of the time from the end of the I
            # on stage 0 to the end of the earlier stage's work. For "active_span", the time before
            # the first F of the earlier stage's rank is subtracted.
            outside_stage[s] = until_forward[s] + backward_to_stage_0[s] + longest if s else 0.0
            rank = problem.rank_of[s]
            end = problem.W[s] + problem.tail_time[rank] * (not minimizes_active_span)
            begin = until_forward[problem.stages_of_rank[rank][0]] * minimizes_active_span
            longest = max(longest, end - backward_to_stage_0[s] - begin) if s else end - begin
        return cls(
            tuple(until_forward),
            tuple(forward_to_backward),
            tuple(backward_to_stage_0),
            tuple(outside_stage),
        )
