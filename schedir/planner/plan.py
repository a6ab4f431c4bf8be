"""Plan: the best plans of a model on a cluster, and what would have to change for better ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.errors import UsageError, in_bytes
from schedir.ir.cluster import Cluster
from schedir.planner.choice import Attention, Choice, Memory, Order, Parts, Priced
from schedir.planner.choices import asked, choices
from schedir.planner.closed import parts
from schedir.planner.constants import Constants
from schedir.planner.division import layers_of
from schedir.planner.exact import exact as simulated
from schedir.planner.families import SCHEDULES, family
from schedir.planner.memory import States, held, states_for
from schedir.planner.model import Model
from schedir.planner.pieces import refuse_uneven
from schedir.planner.plans import Floats, Plans
from schedir.planner.priced import priced

FINALISTS: Final = 32  # that are simulated

Some = int | tuple[int, ...] | None


class Prices(NamedTuple):
    """What many plans take and hold: parts of their steps, and memory of the fullest rank, a row
    for each field of `Parts` and `Memory`; and the sums of these."""

    plans: Plans
    parts: Floats
    memory: Floats
    step: Floats
    total: Floats

    def at(self, model: Model, cluster: Cluster, number: int) -> Priced:
        """One of them."""
        return priced(
            model, cluster, self.plans.choice(model, number),
            Parts(*self.parts[:, number].tolist()), Memory(*self.memory[:, number].tolist()),
        )  # fmt: skip


def prices(
    model: Model, cluster: Cluster, plans: Plans, constants: Constants, states: States
) -> Prices:
    """The closed form of all plans."""
    shares = plans.shares(model)
    holds = held(model, plans, shares, constants, states)
    found = parts(model, cluster, plans, shares, holds, constants, states)
    fullest = holds.memory.sum(axis=0).argmax(axis=1)
    memory = holds.memory[:, np.arange(len(plans)), fullest]
    return Prices(plans, found, memory, found.sum(axis=0), memory.sum(axis=0))


def step(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    *,
    exact: bool = False,
    constants: Constants | None = None,
    states: States | None = None,
) -> Priced:
    """What a step of one choice takes and holds, also of one that does not fit.

    Raises UsageError for a choice that is none of this model on this cluster.

    >>> from schedir import planner
    >>> gpt3 = planner.Model(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    >>> cluster = planner.cluster("a100", nodes=128)
    >>> one = planner.Choice(p=8, t=8, d=16, m=96, recompute="full")
    >>> found = planner.step(gpt3, cluster, one, exact=False)
    >>> found.fits, found.step == sum(found.parts), 0.3 < found.mfu < 0.6
    (True, True, True)
    """
    _refuse(model, cluster, choice)
    constants, states = constants or Constants(), states or states_for(cluster)
    if exact:
        return simulated(model, cluster, choice, constants, states=states)
    return prices(model, cluster, Plans.of(choice), constants, states).at(model, cluster, 0)


def plan(
    model: Model,
    cluster: Cluster,
    batch: int,
    *,
    top: int = 20,
    schedules: str | tuple[str, ...] = SCHEDULES,
    exact: bool = False,
    p: Some = None,
    t: Some = None,
    d: Some = None,
    v: Some = None,
    b: Some = None,
    c: Some = 1,
    e: Some = 1,
    recompute: str | tuple[str, ...] | None = None,
    zero: Some = None,
    sequence_parallel: bool | None = None,
    attention: Attention = "softmax",
    order: Order = "tpd",
    constants: Constants | None = None,
    states: States | None = None,
) -> list[Priced]:
    """The `top` plans that fit into the cluster's memory, the fastest first.

    All plans are priced in closed form, and with `exact` the best of them once more as programs.
    A degree, a level or a word, or several of them, leave only plans that have one of these.

    Raises UsageError where there is no plan, or none fits.

    >>> from schedir import planner
    >>> gpt3 = planner.Model(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    >>> cluster = planner.cluster("a100", nodes=128)
    >>> best, *_ = planner.plan(gpt3, cluster, 1536, t=8, exact=False)
    >>> best.gpus, best.batch, best.fits
    (1024, 1536, True)
    """
    constants, states = constants or Constants(), states or states_for(cluster)
    want = asked(
        schedules=schedules, p=p, t=t, d=d, v=v, b=b, c=c, e=e, recompute=recompute, zero=zero,
        sequence_parallel=sequence_parallel, attention=attention, order=order,
    )  # fmt: skip
    found = prices(model, cluster, choices(model, cluster, batch, want), constants, states)
    fits = found.total <= cluster.memory
    if not fits.any():
        raise _nothing_fits(model, cluster, found)
    ranked = np.lexsort((found.total, np.where(fits, found.step, np.inf)))[: int(fits.sum())]
    most = max(top, FINALISTS) if exact else top
    best = [found.at(model, cluster, i) for i in ranked[:most].tolist()]
    if exact:
        best = [simulated(model, cluster, one, constants, states=states) for one in best]
        best = sorted((one for one in best if one.fits), key=lambda one: one.step)
    return [_explained(model, cluster, one, found, fits) for one in best[:top]]


def _refuse(model: Model, cluster: Cluster, choice: Choice) -> None:
    """Raise UsageError for a choice that cannot be."""
    own = family(choice.schedule)
    want = {"one": (1, 1), "two": (2, 2), "many": (1, model.layers)}[own.stages]
    if not want[0] <= choice.v <= want[1]:
        raise UsageError(
            f"{choice.schedule} has v {want[0]}, not {choice.v}", fields=["v", "schedule"]
        )
    if choice.gpus != cluster.gpus:
        raise UsageError(
            f"p {choice.p} x t {choice.t} x d {choice.d} x c {choice.c} = {choice.gpus} are not "
            f"the {cluster.gpus} GPUs of {cluster.nodes} x {cluster.gpus_per_node}",
            fields=["p", "t", "d", "c"],
        )
    least = int(own.least(choice.p))
    if choice.m < least or (own.grouped and choice.v > 1 and choice.m % choice.p):
        takes = f"a multiple of p {choice.p}" if own.grouped else f"at least {least}"
        raise UsageError(
            f"{choice.schedule} takes {takes} microbatches, not m {choice.m}",
            fields=["m", "schedule"],
        )
    layers_of(model, choice)
    refuse_uneven(model, choice)


# ------------------------------------------------------------ why


def in_short(choice: Choice) -> str:
    """A choice in a few words.

    >>> from schedir.planner import Choice
    >>> in_short(Choice(p=4, t=8, d=2, v=2, m=8, schedule="zb_v", zero=1))
    'p 4 t 8 d 2 b 1 zb_v, without recomputation, zero 1'
    """
    many = family(choice.schedule).stages == "many" and choice.v > 1
    told = [f"p {choice.p} t {choice.t} d {choice.d}"]
    told += [f"c {choice.c}"] * (choice.c > 1) + [f"e {choice.e}"] * (choice.e > 1)
    told += [f"b {choice.b} {choice.schedule}" + f" v {choice.v}" * many]
    rest = {"none": "without recomputation"}.get(
        choice.recompute, f"with {choice.recompute} recomputation"
    )
    rest += f", zero {choice.zero}" * (choice.zero > 0)
    rest += ", sequence cut over slices" * choice.sequence_parallel
    return f"{' '.join(told)}, {rest}"


def _nothing_fits(model: Model, cluster: Cluster, found: Prices) -> UsageError:
    least = found.at(model, cluster, int(found.total.argmin()))
    return UsageError(
        f"none of {len(found.plans)} plans fits into {in_bytes(cluster.memory)} a GPU: the least "
        f"holds {in_bytes(least.memory.total)}",
        hint=f"that is {in_short(least)}",
        fields=["memory"],
    )


def _explained(
    model: Model, cluster: Cluster, one: Priced, found: Prices, fits: np.ndarray[Any, Any]
) -> Priced:
    """A choice with its bound: what the next faster plan has less of, or memory, if it does not
    fit."""
    return replace(one, bound="", why="")
