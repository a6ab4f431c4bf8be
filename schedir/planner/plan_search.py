"""Find the best plans of a model on a cluster, and what would allow better ones."""

from __future__ import annotations

from typing import Any, Final, get_args

import numpy as np

from schedir.errors import UsageError, describe, require_bool, require_type
from schedir.ir.cost.cluster import Cluster
from schedir.planner.bottleneck import alone, among, nothing_fits
from schedir.planner.estimate.offload_plans import beside, for_states_alone, offloaded
from schedir.planner.estimate.schedule_formulas import FAMILIES, SCHEDULES, family
from schedir.planner.estimate.simulated_estimate import require_host
from schedir.planner.estimate.simulated_estimate import simulate_plan as simulated
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import Attention, Order, ParallelPlan, PlanEstimate
from schedir.planner.plan_columns import PlanColumns, simulated_only
from schedir.planner.plan_enumeration import asked, choices, leaves_node
from schedir.planner.plan_estimate import plain
from schedir.planner.plan_table import PlanTable, closed_form
from schedir.planner.transformer.layer_division import layers_of
from schedir.planner.transformer.layer_ops import refuse_uneven
from schedir.planner.transformer.memory_estimate import StateBytes, states_for
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.activation_bytes import Recompute

FINALISTS: Final = 32  # that are simulated

Some = int | tuple[int, ...] | None


def estimate_step(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    *,
    exact: bool = True,
    constants: SoftwareConstants | None = None,
    states: StateBytes | None = None,
) -> PlanEstimate:
    """What a step of one choice takes and holds, also of one that does not fit.

    Raises UsageError for a choice that is none of this model on this cluster.

    >>> from schedir import planner
    >>> gpt3 = planner.TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200,
    ...     sequence=2048)
    >>> cluster = planner.cluster_preset("a100", nodes=128)
    >>> one = planner.ParallelPlan(pp=8, tp=8, dp=16, microbatches=96, recompute="full")
    >>> found = planner.estimate_step(gpt3, cluster, one, exact=False)
    >>> found.fits, found.step == sum(found.parts), 0.3 < found.mfu < 0.6
    (True, True, True)
    """
    _expect(model, cluster)
    _refuse(model, cluster, choice)
    if choice.tp > cluster.gpus_per_node:
        leaves_node(choice.tp, cluster, stacklevel=2)
    if states is not None:
        require_type(states, StateBytes, "StateBytes(), the bytes of each parameter's states")
    constants, states = constants or SoftwareConstants(), states or states_for(cluster)
    if exact:
        return alone(cluster, simulated(model, cluster, choice, constants, states=states))
    found = closed_form(model, cluster, PlanColumns.of(choice), constants, states)
    return alone(cluster, found.at(model, cluster, 0))


def plan(
    model: TransformerSpec,
    cluster: Cluster,
    batch: int,
    *,
    top: int = 20,
    schedules: str | tuple[str, ...] = SCHEDULES,
    exact: bool = True,
    pp: Some = None,
    tp: Some = None,
    dp: Some = None,
    stages_per_rank: Some = None,
    microbatch_size: Some = None,
    cp: Some = 1,
    ep: Some = 1,
    recompute: str | tuple[str, ...] | None = None,
    zero: Some = None,
    sequence_parallel: bool | None = None,
    attention: Attention = "softmax",
    rank_order: Order = "tp-pp-dp",
    offload: bool = False,
    constants: SoftwareConstants | None = None,
    states: StateBytes | None = None,
) -> list[PlanEstimate]:
    """The `top` plans that fit into the cluster's memory, the fastest first.

    All plans are priced in closed form, and with `exact` the best of them once more as programs.
    A degree, a level or a word, or several of them, leave only plans that have one of these.

    With `offload` there are also plans that do not fit but with the memory of their hosts, to which
    activations, the optimizer's states, or both go meanwhile (`ParallelPlan.offload`,
    `ParallelPlan.optimizer_placement`). These are simulated, the likeliest ones;
    `PlanEstimate.beside` compares them with plans without.

    Raises UsageError where there is no plan, or none fits; with `offload` also where the cluster
    does not tell `host` and `host_memory`, and without `exact`.

    >>> from schedir import planner
    >>> gpt3 = planner.TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200,
    ...     sequence=2048)
    >>> cluster = planner.cluster_preset("a100", nodes=128)
    >>> best, *_ = planner.plan(gpt3, cluster, 1536, tp=8, exact=False)
    >>> best.gpus, best.batch, best.fits
    (1024, 1536, True)
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"top is a number of plans, not {describe(top)}", fields=["top"])
    _expect(model, cluster)
    if require_bool(offload, "offload"):
        require_host(cluster)
        if not exact:
            raise simulated_only()
    if states is not None:
        require_type(states, StateBytes, "StateBytes(), the bytes of each parameter's states")
    constants, states = constants or SoftwareConstants(), states or states_for(cluster)
    found = all_plans(
        model, cluster, batch, constants=constants, states=states, schedules=schedules, pp=pp,
        tp=tp,
        dp=dp, stages_per_rank=stages_per_rank, microbatch_size=microbatch_size, cp=cp, ep=ep,
        recompute=recompute, zero=zero,
        sequence_parallel=sequence_parallel, attention=attention, rank_order=rank_order,
        offload=offload,
    )  # fmt: skip
    usual = ~for_states_alone(found) if offload else np.ones(len(found.plans), bool)
    fits = usual & (found.total <= cluster.memory)
    if not fits.any() and not offload:
        raise nothing_fits(model, cluster, found)
    ranked = np.lexsort((found.total, found.step))
    ranked = ranked[fits[ranked]]
    if not exact:
        first = [(found.at(model, cluster, at), at) for at in ranked[:top].tolist()]
        return [among(model, cluster, one, at, found) for one, at in first]
    tried: list[tuple[PlanEstimate, int]] = []
    for at in ranked.tolist():  # some may hold a little more as programs
        if len(tried) >= FINALISTS and sum(one.fits for one, _ in tried) >= top:
            break
        one = plain(found.at(model, cluster, at))
        tried.append((simulated(model, cluster, one, constants, states=states), at))
    found = found.told(tried)
    tried = sorted((pair for pair in tried if pair[0].fits), key=lambda x: _plainest_first(x[0]))
    others = found.take(usual)
    place = np.cumsum(usual) - 1
    best = [among(model, cluster, one, int(place[at]), others) for one, at in tried[:top]]
    if offload:
        steps = [one.step for one in best]
        best += offloaded(model, cluster, found, max(top, FINALISTS), constants, states, steps)
        least = others.at(model, cluster, int(others.total.argmin()))
        best = beside(sorted(best, key=_plainest_first), least)
    if not best:
        raise nothing_fits(model, cluster, others, offload=offload)
    return best[:top]


def _plainest_first(one: PlanEstimate) -> tuple[float, bool, int, int]:
    """What plans are sorted by: of those that take as long, but for rounding, the plainest first,
    since a prediction knows nothing of what more instructions cost to be issued."""
    own, again = [*FAMILIES].index(one.schedule), get_args(Recompute).index(one.recompute)
    return float(f"{one.step:.6g}"), one.offloads, own, again


def all_plans(
    model: TransformerSpec,
    cluster: Cluster,
    batch: int,
    *,
    constants: SoftwareConstants | None = None,
    states: StateBytes | None = None,
    **which: Any,
) -> PlanTable:
    """All plans that `plan` chooses from, also those that do not fit, in closed form and in no
    order; `which` are those that it takes.

    Raises UsageError where there is none.

    >>> from schedir import planner
    >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> found = planner.all_plans(gpt, planner.cluster_preset("a100", nodes=4), 512, tp=(1, 2))
    >>> len(found.plans) == len(found.step) == len(found.total) > 1000
    True
    """
    _expect(model, cluster)
    plans = choices(model, cluster, batch, asked(**which))
    states = states or states_for(cluster)
    return closed_form(model, cluster, plans, constants or SoftwareConstants(), states)


def _expect(model: TransformerSpec, cluster: Cluster) -> None:
    require_type(model, TransformerSpec, 'planner.load_model("gpt-22b")')
    require_type(cluster, Cluster, 'planner.cluster("a100", nodes=8)')


def _refuse(model: TransformerSpec, cluster: Cluster, choice: ParallelPlan) -> None:
    """Raise UsageError for a choice that cannot be."""
    own = family(choice.schedule)
    want = {"one": (1, 1), "two": (2, 2), "many": (1, model.layers)}[own.stages]
    if not want[0] <= choice.stages_per_rank <= want[1]:
        raise UsageError(
            f"{choice.schedule} has {want[0]} stage{'s' * (want[0] > 1)} per rank, not "
            f"{choice.stages_per_rank}",
            fields=["stages_per_rank", "schedule"],
        )
    if choice.gpus != cluster.gpus:
        raise UsageError(
            f"pp {choice.pp} x tp {choice.tp} x dp {choice.dp} x cp {choice.cp} = "
            f"{choice.gpus} are not "
            f"the {cluster.gpus} GPUs of {cluster.nodes} x {cluster.gpus_per_node}",
            fields=["pp", "tp", "dp", "cp"],
        )
    least = int(own.least(choice.pp))
    if choice.microbatches < least or (
        own.grouped and choice.stages_per_rank > 1 and choice.microbatches % choice.pp
    ):
        takes = f"a multiple of pp {choice.pp}" if own.grouped else f"at least {least}"
        raise UsageError(
            f"{choice.schedule} takes {takes} microbatches, not {choice.microbatches}",
            fields=["microbatches", "schedule"],
        )
    layers_of(model, choice)
    refuse_uneven(model, choice)
