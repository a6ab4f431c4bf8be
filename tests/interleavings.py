"""Find the shortest order of a tiny search problem by trying all orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import KINDS, F, I, W, compute_length, compute_peaks


def list_orders(problem: SchedulingProblem, rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders of a rank that fit into its memory.

    In an order, microbatches ascend for F, I and W, and F comes before I and I before W.

    What is held is judged by `compute_peaks`, and ranks by themselves: an order of all of them may
    hang.
    """
    kinds = (F, I, W) if problem.split_backward else (F, I)
    stages = problem.stages_of_rank[rank]
    m = problem.microbatches

    def more(done: dict[int, int], codes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(codes) == m * len(stages) * len(kinds):
            yield codes
            return
        for s in stages:
            for kind in kinds:
                code = KINDS * s + kind
                before = done[code - 1] if kind else m
                if done[code] < min(before, m) and fits((*codes, code)):
                    yield from more(done | {code: done[code] + 1}, (*codes, code))

    def fits(codes: tuple[int, ...]) -> bool:
        order: list[tuple[int, ...]] = [()] * problem.shape.ranks
        order[rank] = codes
        return problem.fits_on_rank(compute_peaks(problem, order)[rank], rank)

    return more({KINDS * s + kind: 0 for s in stages for kind in kinds}, ())


def find_shortest_length(problem: SchedulingProblem) -> float:
    """Return the length of the shortest combination of the orders of all ranks."""
    each = [list(list_orders(problem, rank)) for rank in range(problem.shape.ranks)]
    taken = (compute_length(problem, order) for order in product(*each))
    return min((t for t in taken if t is not None), default=inf)
