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
    is_interleaved = problem.shape.stages > P
    leads = _list_leads(problem)
    unlimited_lags = (m * len(max(problem.stages_of_rank, key=len)),) * P
    lags = (
        [unlimited_lags, tuple(range(P)), *((lag,) * P for lag in (0, 1, 2, 3))]
        if problem.split_backward
        else [unlimited_lags]
    )
    wait_shares = (0.0, 0.5, 1.0)
    forward_firsts = (False, True)
    stage_choices = (0, 1, 2) if is_interleaved else (0,)
    late_shares = (0.0, -inf, 0.25, 0.5, 1.0) if problem.split_backward else (0.0,)
    idle_shares = (0.5, 0.0, 0.9, inf, 1.0) if problem.split_backward else (inf,)
    likely_combinations = list(
        product(
            leads[:3],
            lags[:1],
            wait_shares[:2],
            late_shares[:2],
            idle_shares[:4],
            forward_firsts,
            stage_choices,
        )
    )
    combinations = list(
        product(leads, lags, wait_shares, late_shares, idle_shares, forward_firsts, stage_choices)
    )
    likely_combinations.sort(key=lambda parameters: leads.index(parameters[0]))
    seen = set()
    random.shuffle(combinations)
    for parameters in (*likely_combinations, *combinations):
        if parameters not in seen:
            seen.add(parameters)
            yield DispatchPolicy(*parameters)


def _list_leads(problem: SchedulingProblem) -> list[tuple[int, ...]]:
    """Return values of `max_lead` to try. The values that are most often best come first.

    Each value has a number for each stage. In some values, this is the number of F's that the stage
    can run before its first gradient can arrive, plus 0 to 3. In one value, it is the number of
    microbatches. In the other values, it is a multiple of the number of later stages, plus 0 to 3.
    """
    m, S = problem.microbatches, problem.shape.stages
    forward_counts = []
    forward_to_backward = 0.0  # The time from the end of an F to the start of its I.
    for stage in reversed(range(S)):
        rank_time = sum(
            problem.F[local_stage] for local_stage in problem.stages_of_rank[problem.rank_of[stage]]
        )
        if rank_time:
            forward_counts.append(
                (forward_to_backward / problem.F[stage], forward_to_backward / rank_time)
            )
        else:
            forward_counts.append((inf, inf))
        if stage:
            forward_to_backward += (
                problem.act_delay[stage - 1]
                + problem.F[stage]
                + problem.I[stage]
                + problem.grad_delay[stage]
            )
    forward_counts.reverse()
    leads = [
        tuple(_clip_count(1 + alone + extra, m) for alone, _ in forward_counts)
        for extra in (0, 1, 2, 3)
    ]
    leads.insert(2, (m,) * S)
    if problem.shape.ranks < S:
        leads += [
            tuple(_clip_count(1 + shared + extra, m) for _, shared in forward_counts)
            for extra in (0, 1, 2, 3)
        ]
    for slope in (1.0, 1.5, 2.0, 2.5, 3.0):
        leads += [
            tuple(_clip_count(slope * (S - 1 - stage) + extra, m) for stage in range(S))
            for extra in range(4)
        ]
    return list(dict.fromkeys(leads))


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
    lag_limit = m * len(max(problem.stages_of_rank, key=len))
    neighbours = []
    for step in (-1, 1, -2, 2, -4, 4):
        for stage, lead in enumerate(policy.max_lead):
            if 1 <= lead + step <= m:
                neighbours.append(
                    policy._replace(max_lead=_replace_at(policy.max_lead, stage, lead + step))
                )
        for rank, lag in enumerate(policy.max_lag if problem.split_backward else ()):
            if 0 <= lag + step < lag_limit:
                neighbours.append(
                    policy._replace(max_lag=_replace_at(policy.max_lag, rank, lag + step))
                )
        neighbours.append(
            policy._replace(max_lead=tuple(min(max(n + step, 1), m) for n in policy.max_lead))
        )
    if problem.split_backward:
        neighbours += [
            policy._replace(max_lag=_replace_at(policy.max_lag, rank, lag))
            for rank, current_lag in enumerate(policy.max_lag)
            for lag in {0, 2, lag_limit} - {current_lag}
        ]
        neighbours += [
            policy._replace(late_share=share) for share in (-inf, -0.5, 0.0, 0.15, 0.3, 0.6, 1.0)
        ]
        neighbours += [
            policy._replace(idle_share=share) for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, inf)
        ]
    neighbours += [policy._replace(wait_share=share) for share in (0.0, 0.15, 0.3, 0.6, 1.0)]
    neighbours += [policy._replace(forward_first=not policy.forward_first)]
    random.shuffle(neighbours)
    return iter(neighbours)


def _replace_at(numbers: tuple[int, ...], position: int, number: int) -> tuple[int, ...]:
    return (*numbers[:position], number, *numbers[position + 1 :])
