"""Hypothesis strategies: plans, and drafts that some order of time allows."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from schedir.costs import Costs
from schedir.ops import COMPUTE, Instr
from schedir.plan import Plan
from schedir.program import Program, Stream

F, B, I, W = COMPUTE


@st.composite
def plans(draw: st.DrawFn, ranks: int = 4, microbatches: int = 6, per_rank: int = 3) -> Plan:
    """Small plans of every placement, explicit and uneven ones among them."""
    P = draw(st.integers(1, ranks))
    m = draw(st.integers(1, microbatches))
    kind = draw(st.sampled_from(["loop", "vee", "given"]))
    if kind == "given":
        more = draw(st.lists(st.integers(0, P - 1), max_size=P * (per_rank - 1)))
        return Plan(P, m, placement=tuple(draw(st.permutations([*range(P), *more]))))
    return Plan(P, m, draw(st.integers(1, per_rank)), kind)


def random_draft(plan: Plan, rng: random.Random, *, split: float = 0.5) -> Program:
    """A draft in the order in which a random execution would meet its instructions.

    Every stage's backwards ascend. `split` is the share of backwards cut into I and W.
    """
    S, m = plan.stages, plan.microbatches
    streams: list[list[Instr]] = [[] for _ in range(plan.ranks)]
    ready = [Instr(F, 0, mb) for mb in range(m)]
    backward = {(s, mb): I if rng.random() < split else B for s in range(S) for mb in range(m)}
    turn = [0] * S  # the microbatch whose backward is next in each stage
    arrived: set[tuple[int, int]] = set()  # (stage, mb) whose gradient is there
    weights: list[list[int]] = [[] for _ in range(S)]  # microbatches whose I ran, W did not

    def offer(stage: int) -> None:
        """The stage's next backward, if its gradient is there; a whole one waits for all W."""
        mb = turn[stage]
        if (stage, mb) in arrived and (backward[stage, mb] is I or not weights[stage]):
            arrived.remove((stage, mb))
            ready.append(Instr(backward[stage, mb], stage, mb))

    while ready:
        instr = ready.pop(rng.randrange(len(ready)))
        op, s, mb = instr
        streams[int(plan.rank_of[s])].append(instr)
        if op is F and s + 1 < S:
            ready.append(Instr(F, s + 1, mb))
        elif op is F:
            arrived.add((s, mb))
        elif op is W:
            weights[s].remove(mb)
            if weights[s]:
                ready.append(Instr(W, s, weights[s][0]))
        else:
            turn[s] += 1
            if op is I:
                weights[s].append(mb)
                if len(weights[s]) == 1:
                    ready.append(Instr(W, s, mb))
            if s:
                arrived.add((s - 1, mb))
                offer(s - 1)
        offer(s)
    return Program("random", plan, tuple(map(Stream.of, streams)))


@st.composite
def drafts(
    draw: st.DrawFn, ranks: int = 4, microbatches: int = 6, per_rank: int = 3, split: float = 0.5
) -> Program:
    """Legal ascending drafts on small plans."""
    plan = draw(plans(ranks, microbatches, per_rank))
    return random_draft(plan, random.Random(draw(st.integers(0, 2**32 - 1))), split=split)


@st.composite
def costs(draw: st.DrawFn, plan: Plan, send: bool = True) -> Costs:
    """Whole costs, so that sums are exact in floating point; some are zero."""

    def per_stage() -> tuple[float, ...]:
        one = st.integers(0, 5).map(float)
        return tuple(draw(st.lists(one, min_size=plan.stages, max_size=plan.stages)))

    return Costs(
        F=per_stage(), I=per_stage(), W=per_stage(), B=per_stage(),
        send=draw(st.integers(0, 3)) if send else 0,
    )  # fmt: skip
