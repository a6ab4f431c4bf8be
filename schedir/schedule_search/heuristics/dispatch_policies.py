"""Generate dispatch policies for list scheduling, and variations of a policy.

A dispatch policy decides which task an idle rank starts next (`list_scheduling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from random import Random

from schedir.schedule_search.heuristics.order_evaluator import DispatchPolicy
from schedir.schedule_search.problem import SchedulingProblem


def generate_policies(problem: SchedulingProblem, random: Random) -> Iterator[DispatchPolicy]:
    """Yield policies to try: first the policies that are most often best, then all others.

    The others are in random order. A policy limits how many forwards a rank runs ahead of its
    backwards, and decides when the rank runs its W's. `idle_share` balances idle time over the
    ranks: a rank with little idle time may wait, and a rank with much idle time runs a W instead.

    Args:
        problem: The problem.
        random: The source of random numbers.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1.
    """
    m, P = problem.microbatches, problem.shape.ranks
    several = problem.shape.stages > P
    leads = _list_leads(problem)
    never = (m * len(max(problem.stages_of_rank, key=len)),) * P
    lags = (
        [never, tuple(range(P)), *((lag,) * P for lag in (0, 1, 2, 3))]
        if problem.split_backward
        else [never]
    )
    waits, firsts, picks = (0.0, 0.5, 1.0), (False, True), (0, 1, 2) if several else (0,)
    lates = (0.0, -inf, 0.25, 0.5, 1.0) if problem.split_backward else (0.0,)
    slacks = (0.5, 0.0, 0.9, inf, 1.0) if problem.split_backward else (inf,)
    likely = list(product(leads[:3], lags[:1], waits[:2], lates[:2], slacks[:4], firsts, picks))
    every = list(product(leads, lags, waits, lates, slacks, firsts, picks))
    likely.sort(key=lambda each: leads.index(each[0]))
    seen = set()
    random.shuffle(every)
    for each in (*likely, *every):
        if each not in seen:
            seen.add(each)
            lead, lag, wait, late, slack, first, pick = each
            yield DispatchPolicy(lead, lag, wait, late, slack, first, pick)


def _list_leads(problem: SchedulingProblem) -> list[tuple[int, ...]]:
    """Return values of `max_lead` to try. The values that are most often best come first.

    Some values are the number of F's that fit before the first gradient can arrive, plus 0 to 3.
    One value is the number of microbatches. The others are multiples of the number of later stages,
    plus 0 to 3.
    """
    m, S = problem.microbatches, problem.shape.stages
    fit = []
    comes = 0.0  # The time from the end of an F to the start of its I.
    for stage in reversed(range(S)):
        own = sum(problem.F[other] for other in problem.stages_of_rank[problem.rank_of[stage]])
        fit.append((comes / problem.F[stage], comes / own) if own else (inf, inf))
        if stage:
            comes += (
                problem.act_delay[stage - 1]
                + problem.F[stage]
                + problem.I[stage]
                + problem.grad_delay[stage]
            )
    fit.reverse()
    found = [tuple(_clip_count(1 + alone + more, m) for alone, _ in fit) for more in (0, 1, 2, 3)]
    found.insert(2, (m,) * S)
    if problem.shape.ranks < S:
        found += [
            tuple(_clip_count(1 + shared + more, m) for _, shared in fit) for more in (0, 1, 2, 3)
        ]
    for slope in (1.0, 1.5, 2.0, 2.5, 3.0):
        found += [
            tuple(_clip_count(slope * (S - 1 - stage) + more, m) for stage in range(S))
            for more in range(4)
        ]
    return list(dict.fromkeys(found))


def _clip_count(number: float, max_count: int) -> int:
    return max_count if number >= max_count else max(1, int(number))


def generate_neighbours(
    problem: SchedulingProblem, policy: DispatchPolicy, random: Random
) -> Iterator[DispatchPolicy]:
    """Yield the policies that differ from `policy` in one parameter, in random order.

    Args:
        problem: The problem.
        policy: The policy to vary.
        random: The source of random numbers.
    """
    m = problem.microbatches
    most = m * len(max(problem.stages_of_rank, key=len))
    found = []
    for by in (-1, 1, -2, 2, -4, 4):
        for stage, lead in enumerate(policy.max_lead):
            if 1 <= lead + by <= m:
                found.append(
                    policy._replace(max_lead=_replace_at(policy.max_lead, stage, lead + by))
                )
        for rank, lag in enumerate(policy.max_lag if problem.split_backward else ()):
            if 0 <= lag + by < most:
                found.append(policy._replace(max_lag=_replace_at(policy.max_lag, rank, lag + by)))
        found.append(
            policy._replace(max_lead=tuple(min(max(n + by, 1), m) for n in policy.max_lead))
        )
    if problem.split_backward:
        found += [
            policy._replace(max_lag=_replace_at(policy.max_lag, rank, lag))
            for rank, now in enumerate(policy.max_lag)
            for lag in {0, 2, most} - {now}
        ]
        found += [
            policy._replace(late_share=late) for late in (-inf, -0.5, 0.0, 0.15, 0.3, 0.6, 1.0)
        ]
        found += [
            policy._replace(idle_share=slack) for slack in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, inf)
        ]
    found += [policy._replace(wait_share=wait) for wait in (0.0, 0.15, 0.3, 0.6, 1.0)]
    found += [policy._replace(forward_first=not policy.forward_first)]
    random.shuffle(found)
    return iter(found)


def _replace_at(numbers: tuple[int, ...], position: int, number: int) -> tuple[int, ...]:
    return (*numbers[:position], number, *numbers[position + 1 :])
