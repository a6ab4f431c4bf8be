"""Closed form: what a step of many plans takes, in parts, without a program.

The rank that works longest decides: its work, the time that it waits for all others, and what is
not hidden of messages and sums.  `exact` simulates the program instead.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cluster import Cluster
from schedir.ir.cluster_costs import stepped
from schedir.planner.choice import Parts, Phases
from schedir.planner.constants import Constants
from schedir.planner.families import FAMILIES, gathers
from schedir.planner.layer import Work, work_of
from schedir.planner.links import replicas, ways
from schedir.planner.memory import Held, States, ends_numbers
from schedir.planner.model import Model
from schedir.planner.plans import NAMES, Floats, Plans, Shares

_PARTS: Final = ("layer", "embedding", "head")


class Rank(NamedTuple):
    """What one microbatch takes on each share: its `Times`, of arrays; and both together."""

    times: Any
    F: Floats
    I: Floats  # with what runs again before it
    W: Floats

    @property
    def all(self) -> Floats:
        """The whole of it."""
        return self.F + self.I + self.W


def parts(
    model: Model,
    cluster: Cluster,
    plans: Plans,
    shares: Shares,
    held: Held,
    constants: Constants,
    states: States,
) -> Floats:
    """The parts of a step of each plan, a row for each of the fields of `Parts`: they add up to it.

    `held` says what weights ranks have.
    """
    rank = ranks(model, cluster, plans, shares, constants)
    m, rows = plans.m[:, None], np.arange(len(plans))
    busy = np.where(shares.number > 0, m * rank.all, -1.0)
    at = busy.argmax(axis=1)

    def there(each: Any) -> Any:
        """Of the rank that decides."""
        return each[rows, at]

    waits, messages = _families(plans, shares, rank)
    way = ways(model, cluster, plans)
    v, p = plans.v, plans.p
    loop = np.array([FAMILIES[name].stages == "many" for name in NAMES])[plans.schedule]
    borders = np.where(loop, v * (p - 1) + v - 1, p - 1)
    path = np.where(loop, v * way.borders + (v - 1) * way.around, way.borders)
    mean = path / np.maximum(borders, 1)
    # A rank sends each microbatch's boundary on, and a gradient back, for each of its stages.
    transfers = np.maximum(messages * mean, 2 * plans.m * v * mean * (p > 1) - there(busy))
    compute, tensor = rank.times
    data = _data(model, cluster, plans, shares, held, constants, states, rank)
    optimizer = _optimizer(cluster, plans, held, states)
    found = dict(
        compute=plans.m * there(compute.F + compute.I + compute.W),
        recompute=plans.m * there(compute.R),
        tensor=plans.m * there(tensor.F + tensor.I + tensor.W + tensor.R),
        transfers=transfers,
        bubble=((waits * shares.number).sum(axis=1) - there(waits)) * _idle(cluster, plans),
        data=data,
        optimizer=optimizer,
    )
    return np.stack([found[name] for name in Parts._fields])


def _idle(cluster: Cluster, plans: Plans) -> Floats:
    """Of the time that ranks wait, the share in which processors do.

    While k of p ranks of a pipeline compute as it fills, k/p of all processes have what so many
    processors can give; where these are fewer than processes, they work on while others wait.
    """
    if cluster.processors is None:
        return np.ones(len(plans))
    can = min(cluster.processors / cluster.gpus_per_node, 1.0)
    found = np.ones(len(plans))
    for p in np.unique(plans.p[plans.p > 1]).tolist():
        working = np.arange(1, p) / p
        found[plans.p == p] = np.maximum(can - working, 0).sum() / (1 - working).sum()
    return found


def ranks(
    model: Model, cluster: Cluster, plans: Plans, shares: Shares, constants: Constants
) -> Rank:
    """What a microbatch takes on each rank: its stages one by one, as `layer.stage` has them."""
    layer, embedding, head = (_works(part, model, cluster, plans, constants) for part in _PARTS)
    v = plans.v[:, None]
    each = shares.layers / v
    first, last = 1.0 * shares.first, 1.0 * shares.last
    one = v == 1
    ends = _sum((layer, each), (embedding, first), (head, last * one)).times
    behind = _sum((layer, each), (head, last)).times
    inner = _sum((layer, shares.layers - each * np.where(one, 1, first + last))).times
    with_first: Any = np.where(one, 1.0, first)
    with_last: Any = np.where(one, 0.0, last)
    times: Any = inner.plus(ends, with_first).plus(behind, with_last)
    F, I, W, R = times.total
    return Rank(times, F, I + R, W)


def _sum(*terms: tuple[Work, Any]) -> Work:
    found = Work()
    for term, times in terms:
        found = found.plus(term, times)
    return found


def _works(part: str, model: Model, cluster: Cluster, plans: Plans, constants: Constants) -> Work:
    """The work of a part in each plan, columns: that of few combinations."""
    split = np.array([FAMILIES[name].split for name in NAMES])[plans.schedule]
    names = ["t", "b", "recompute", "sequence_parallel", "c", "e"]
    names += ["p"] if bool((plans.e > 1).any()) else []
    found = np.zeros((len(plans), 12))
    for half in (False, True):
        mine = np.flatnonzero(split == half)
        some = plans.take(mine)
        first, which = some.distinct(*names)
        each = [work_of(part, model, cluster, some.choice(model, i), constants) for i in first]
        if each:
            found[mine] = np.array(each).reshape(-1, 12)[which]
    columns = found.T[:, :, None]
    return Work(*(Phases(*columns[k : k + 4]) for k in (0, 4, 8)))


def _families(plans: Plans, shares: Shares, rank: Rank) -> tuple[Floats, Floats]:
    """How long the others wait for each share, and how many messages nothing hides."""
    waits = np.zeros(rank.F.shape)
    messages = np.zeros(len(plans))
    v = plans.v[:, None]
    for number in np.unique(plans.schedule).tolist():
        mine, family = plans.schedule == number, FAMILIES[NAMES[number]]
        waits[mine] = family.wait(*(x[mine] / v[mine] for x in (rank.F, rank.I, rank.W)))
        messages[mine] = family.messages(plans.p[mine], plans.v[mine], plans.m[mine])
    return waits, messages * (plans.p > 1)


def _data(
    model: Model,
    cluster: Cluster,
    plans: Plans,
    shares: Shares,
    held: Held,
    constants: Constants,
    states: States,
    rank: Rank,
) -> Floats:
    """Sums of gradients and gathers of weights over replicas, as far as nothing hides them.

    Sums: reduce-scatters and gathers of arXiv 1910.02054, section 7; without ZeRO a ring's
    all-reduce, which is both.  Those of all stages but the last to end run under its backwards, and
    its own under the last one of these, as far as the software does so (`reduce_hidden`).  Ranks
    that end before the first have until then.  With ZeRO weights are gathered at the head of the
    step, where ranks wait for their first microbatch; and in parts again and again, while others
    are computed with.
    """
    zero, v, p, m = (getattr(plans, name)[:, None] for name in ("zero", "v", "p", "m"))
    rings = (replicas(cluster, plans), replicas(cluster, plans, experts=True))
    owned = (held.numbers, held.experts)
    scatter = sum(ring.turn(states.grads * own) for ring, own in zip(rings, owned, strict=True))
    gather = sum(ring.turn(states.params * own) for ring, own in zip(rings, owned, strict=True))
    flush = np.array([not FAMILIES[name].split for name in NAMES])[plans.schedule][:, None]
    back = (rank.I + rank.W) / v  # of a stage
    sums = np.where(zero > 0, scatter, 2 * scatter) * _turns(plans)[:, None]
    hidden = constants.reduce_hidden
    early = sums * (v - 1) / v
    sums = sums - np.minimum(hidden * early, (v - 1) * np.minimum(p, m) * back)
    sums = sums - np.minimum(hidden * sums, back)
    late = np.maximum(sums - flush * shares.rank * back, 0)
    first = np.where(zero > 0, gather / v, 0.0)
    later = np.where(zero > 0, _gathers(plans)[:, None] * gather / v, 0.0) - first
    more = np.maximum(later + hidden * early - m * rank.all, 0)
    begin = np.maximum(first - shares.rank * rank.F / v, 0) + more
    tied = _tied(model, cluster, plans, states)
    there = shares.number > 0
    return (late * there).max(axis=1) + (begin * there).max(axis=1) + tied  # type: ignore[no-any-return]


def _gathers(plans: Plans) -> Floats:
    """How often a rank makes a stage whole in a step."""
    found = plans.v.astype(float)
    for number in np.unique(plans.schedule).tolist():
        mine = (plans.schedule == number) & (plans.zero >= 3)
        found[mine] = gathers(NAMES[number], plans.p[mine], plans.v[mine], plans.m[mine])
    return found


def _turns(plans: Plans) -> Any:
    """How often each gradient is summed: behind each run of a stage's backwards where gradients are
    in parts, of which a breadth-first order has one."""
    runs = np.where(plans.schedule == NAMES.index("looped_bfs"), 1, plans.m // plans.p)
    return np.where((plans.zero >= 2) & (plans.v > 2), np.maximum(runs, 1), 1)


def _tied(model: Model, cluster: Cluster, plans: Plans, states: States) -> Any:
    """The sum of the gradients of a tied embedding, of the first rank and the last (SC21, arXiv
    2104.04473, section 3; arXiv 1909.08053, appendix): a ring of two."""
    vee = np.array([FAMILIES[name].vee for name in NAMES])[plans.schedule]
    apart = (plans.p > 1) & ~vee & model.tied
    near = plans.p * plans.t * plans.c * (plans.d if plans.order == "tdp" else 1)
    link = np.where(
        near > cluster.gpus_per_node, min(cluster.nvlink, cluster.network), cluster.nvlink
    )
    size = states.grads * ends_numbers(model, plans.t)[2]
    return np.where(apart, 2 * (cluster.latency + size / 2 / link), 0.0)


def _optimizer(cluster: Cluster, plans: Plans, held: Held, states: States) -> Floats:
    """Norms and updates: the step of `Cluster.costs`, of the rank with the most weights."""
    zero, d, c, e = (getattr(plans, name)[:, None] for name in ("zero", "d", "c", "e"))
    common = held.numbers / np.where(zero > 0, d * c, 1)
    own = common + held.experts / np.where(zero > 0, np.maximum(d * c // e, 1), 1)
    each = stepped(*(size * own for size in states)) / cluster.hbm
    first, which = plans.distinct("p", "t")
    norms = [cluster.all_reduce_small(8, int(plans.p[i] * plans.t[i])) for i in first.tolist()]
    return each.max(axis=1) + np.array(norms)[which]  # type: ignore[no-any-return]
