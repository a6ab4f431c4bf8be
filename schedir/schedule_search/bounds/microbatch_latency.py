"""Compute the unobstructed time of a microbatch between two points of the pipeline."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from schedir.schedule_search.problem import SchedulingProblem


class MicrobatchLatency(NamedTuple):
    """The least times of a microbatch between points of the pipeline, by stage.

    Attributes:
        until_forward: From the start of the run to the start of its F on a stage.
        forward_to_backward: From the end of that F to the start of its I on the same stage.
        backward_to_stage_0: From the end of that I to the end of its I on stage 0.
        outside_stage: The least time before the first F plus the least time after the last I of a
            stage. For "span" it includes the W and the optimizer step of an earlier stage. For
            "own", it is the part of the active span of an earlier rank that is outside of that
            interval, for the earlier rank with the largest part. 0 for stage 0.
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
        head, turn, back = [0.0] * stages, [0.0] * stages, [0.0] * stages
        for a, b in pairwise(range(stages)):
            head[b] = head[a] + F[a] + problem.act_delay[a]
            back[b] = problem.grad_delay[b] + I[a] + back[a]
        for a, b in pairwise(range(stages - 1, -1, -1)):
            turn[b] = problem.act_delay[b] + F[a] + turn[a] + I[a] + problem.grad_delay[a]
        own = problem.objective == "own"
        outside, longest = [0.0] * stages, 0.0
        for s in range(stages):
            # The largest time over the ranks of earlier stages, between its start and its end.
            outside[s] = head[s] + back[s] + longest if s else 0.0
            rank = problem.rank_of[s]
            end = problem.W[s] + problem.tail_time[rank] * (not own)
            begin = head[problem.stages_of_rank[rank][0]] * own
            longest = max(longest, end - back[s] - begin) if s else end - begin
        return cls(tuple(head), tuple(turn), tuple(back), tuple(outside))
