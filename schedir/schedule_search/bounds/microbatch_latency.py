"""Compute the unobstructed time of a microbatch between two points of the pipeline."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from schedir.schedule_search.problem import SchedulingProblem


class MicrobatchLatency(NamedTuple):
    """The least times of a microbatch, by stage.

    `until_forward` is from the beginning of the run to the start of its F on a stage,
    `forward_to_backward` from the end of that F to the start of its I there, and
    `backward_to_stage_0` from the end of that I to the end of its I on stage 0.  `outside_stage` is
    what a run takes at least before the first F of a stage and after the last I of it: on its way
    to the first stages the gradient is followed by a W, and there by the optimizer's step.  Where
    what is to be short are own spans, it is the own span of whichever rank this is longest of; 0
    where no rank has any stage before.
    """

    until_forward: tuple[float, ...]
    forward_to_backward: tuple[float, ...]
    backward_to_stage_0: tuple[float, ...]
    outside_stage: tuple[float, ...]

    @classmethod
    def from_problem(cls, problem: SchedulingProblem) -> MicrobatchLatency:
        """Those of a SchedulingProblem."""
        stages, F, I = problem.shape.stages, problem.F, problem.I
        head, turn, back = [0.0] * stages, [0.0] * stages, [0.0] * stages
        for a, b in pairwise(range(stages)):
            head[b] = head[a] + F[a] + problem.act_delay[a]
            back[b] = problem.grad_delay[b] + I[a] + back[a]
        for a, b in pairwise(range(stages - 1, -1, -1)):
            turn[b] = problem.act_delay[b] + F[a] + turn[a] + I[a] + problem.grad_delay[a]
        own = problem.objective == "own"
        around, most = [0.0] * stages, 0.0
        for s in range(stages):
            # The rank of each stage before, as seen from here: its begin, and its end.
            around[s] = head[s] + back[s] + most if s else 0.0
            rank = problem.rank_of[s]
            end = problem.W[s] + problem.tail_time[rank] * (not own)
            begin = head[problem.stages_of_rank[rank][0]] * own
            most = max(most, end - back[s] - begin) if s else end - begin
        return cls(tuple(head), tuple(turn), tuple(back), tuple(around))
