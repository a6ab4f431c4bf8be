"""Search for a shorter schedule for one plan, within its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedir.analysis.numba_jit import Numba
from schedir.compiler.relower import compute_of
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import CUT_FROM
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.planner.config_export import lowered, plan_program
from schedir.planner.estimate.instruction_costs import costs_of, times_of
from schedir.planner.estimate.offload_plans import refuse_offload
from schedir.planner.estimate.simulated_estimate import simulate_plan, simulated
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate
from schedir.planner.plan_estimate import plain
from schedir.planner.trainer_profile import trainer_for
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.stage_bytes import sizes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_results import combined


class ImprovedPlan(NamedTuple):
    """A choice with a schedule of its own, and its program.

    `bound` is what no schedule of the choice takes less than, in seconds, its sums over replicas
    left out: the lesser of schedules whose backwards are whole and of those with W apart, whose
    collectives hide less.  What runs again does so just before its backward.  `numba` is that of
    `schedir.schedule_search.search_results.SearchResult`, for both searches.
    """

    priced: PlanEstimate
    program: Program
    bound: float
    numba: Numba


def improve_schedule(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    states: StateBytes | None = None,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
) -> ImprovedPlan:
    """Search for a shorter schedule of a choice, in the memory that its states leave on each rank.

    `schedir.search_schedule` looks for it, at the times of this choice's stages and messages, half
    of the `seconds` among schedules with whole backwards, and half among those with W apart.  What
    is found is priced as `simulate_plan` prices the choice, of which it has all but the schedule,
    whose name then is "search"; where nothing shorter is found it is the choice as it is.

    To train it, write `schedir.to_text(program)` into a FILE.sched, which is the schedule of
    `config(model, replace(choice, schedule="FILE.sched"))`.

    Raises what `simulate_plan` and `schedir.search_schedule` do.

    >>> from schedir import planner
    >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> node = planner.cluster_preset("a100", nodes=1)
    >>> one = planner.ParallelPlan(pp=4, tp=2, microbatch_size=2, microbatches=8)
    >>> found = planner.improve_schedule(gpt, node, one, seconds=60, evaluations=50)
    >>> found.priced.step <= planner.simulate_plan(gpt, node,
    ...     one).step, found.bound <= found.priced.step
    (True, True)
    """
    refuse_offload(choice, "a search")
    of = trainer_for(cluster, constants, states)
    choice = plain(choice)
    best = simulate_plan(model, cluster, choice, constants, states=states)
    kept, bound = plan_program(choice, tied=model.tied, **of.options), best.step
    within = of._replace(constants=replace(of.constants, recompute_ahead=0.0))
    again = within.constants
    room = (cluster.memory - again.reserved) / (1 + again.allocator_share)
    size = _at_rest(sizes(model, choice, kept.shape, again, of.states), choice, kept.shape)
    uses = set[Numba]()
    for split in (False, True):
        kind = replace(choice, schedule="zb_h1" if split else "one_f_one_b")
        times = times_of(model, cluster, kind, again)
        costs = costs_of(model, cluster, kind, kept.shape, times, again, of.states)
        found = search_schedule(
            kept.shape, costs, size, room, split=split, seconds=seconds / 2,
            evaluations=evaluations, seed=seed,
        )  # fmt: skip
        bound = min(bound, found.bound)
        uses.add(found.numba)
        own = lowered(compute_of(found.program), choice, tied_weights=model.tied, **of.options)
        told = simulated(model, cluster, kind, own, times, within)
        if told.fits and (told.step < best.step or not best.fits):
            best, kept = replace(told, schedule="search"), own
    return ImprovedPlan(best, kept, bound, combined(uses))


def _at_rest(size: Sizes, choice: ParallelPlan, shape: PipelineShape) -> Sizes:
    """The sizes with the states of each stage as one sum: the optimizer's in parts, and of weights
    and gradients in parts whole ones, of which there may be as many at once."""
    replicas = choice.dp * choice.cp
    rest = {
        name: size.of(name, shape.stages) for name in ("params", "grads", "optimizer", "buffers")
    }
    if choice.zero >= CUT_FROM["optimizer"]:
        rest["optimizer"] = rest["optimizer"] / replicas
    whole = tuple(np.sum([*rest.values()], axis=0).tolist())
    return replace(size, params=0.0, grads=0.0, optimizer=0.0, buffers=0.0, model_states=whole)
