"""Compile the program of a parallel plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.planner.parallel_plan import ParallelPlan
from schedir.schedules.schedule_algebra import get_placement_mark, has_free_v
from schedir.schedules.schedule_expansion import expand_schedule

# The number of cached programs. A few are enough: plans that differ only in sizes share a program.
_CACHE_SIZE: Final = 16
# Larger programs are not cached, because a cache of such programs would use too much memory.
_MAX_CACHED_INSTRUCTIONS: Final = 2**18
# The compile options that `schedir train` uses when its processes run on CPUs.
CPU_COMPILE_OPTIONS: Final[dict[str, Any]] = {
    "overlap": True,
    "buffer_sharing": None,
    "blocking_hosts": True,
}


def build_pipeline_shape(plan: ParallelPlan) -> PipelineShape:
    """Return the pipeline shape of a plan, with the placement that its schedule requires.

    Args:
        plan: The plan. Its schedule is the name of a built-in schedule, or the path of a file.

    Raises:
        UsageError: The schedule does not exist, or requires a different number of stages per rank.
        ShapeError: A pipeline cannot have this shape.

    Example:
        >>> from schedir.planner import ParallelPlan
        >>> build_pipeline_shape(ParallelPlan(pp=4, microbatches=8, stages_per_rank=2,
        ...     schedule="zb_v"))
        PipelineShape(ranks=4, microbatches=8, stages_per_rank=2, placement='vee')
    """
    source = Source(plan.schedule)
    if isinstance(source.schedule_or_program, Program):
        request_fields = {
            "ranks": plan.pp,
            "microbatches": plan.microbatches,
            "stages_per_rank": plan.stages_per_rank,
        }
        return Request(source, request_fields, defaults={}).shape
    placement, required_v = get_placement_mark(source.schedule_or_program)
    required_v = required_v or (None if has_free_v(source.schedule_or_program) else 1)
    if required_v not in (None, plan.stages_per_rank):
        raise UsageError(
            f"schedule {plan.schedule} needs stages_per_rank {required_v}, not "
            f"{plan.stages_per_rank}",
            fields=["stages_per_rank", "schedule"],
        )
    if placement is not None and not isinstance(placement, str):
        return PipelineShape(plan.pp, plan.microbatches, placement=placement)
    return PipelineShape(plan.pp, plan.microbatches, plan.stages_per_rank, placement or "loop")


def plan_program(plan: ParallelPlan, *, tied_weights: bool = True, **options: Any) -> Program:
    """Compile the program of a plan: the step of one data-parallel replica.

    `schedir.compile` compiles the schedule into a program with these properties:

    - If tp > 1, boundaries are scattered and gathered. With `sequence_parallel`, each rank sends
      its shard of the sequence, and gradients of replicated weights are summed at the end.
    - The program uses the ZeRO level of the plan. The program computes the global gradient norm for
      clipping.
    - With `recompute="full"`, every forward runs again as an instruction R. "selective" only
      changes the cost of backwards, not the program.
    - Context-parallel ranks (`cp`) count as replicas, because gradients are summed over them.

    If the schedule is a file with a lowered program, the function returns the program of the file
    and ignores `options`. Small programs of built-in schedules are cached.

    Args:
        plan: The plan. With `offload="fit"`, sizes, costs and a memory limit decide which
            microbatches are offloaded. Pass these in `options`, or call `simulated_program`, which
            computes them.
        tied_weights: True if the head shares the weight of the embedding.
        **options: Options of `schedir.compile`. By default each pair of sender and receiver has a
            message queue (`progress_model="per_edge"`), and buffers are shared as much as possible.

    Raises:
        UsageError: See `build_pipeline_shape`. Also if the schedule is a lowered program and the
            plan offloads, because a plan cannot add offload instructions to a lowered program.
        SchedirError: The schedule does not work with these options.

    Example:
        >>> from schedir.planner import ParallelPlan, plan_program
        >>> plan_program(ParallelPlan(pp=4, tp=2, dp=2, microbatches=8, zero=1,
        ...     schedule="one_f_one_b"))
        <program one_f_one_b: 4 ranks, 278 instructions>
    """
    shape = ParallelPlan(pp=plan.pp, tp=plan.tp, dp=plan.dp * plan.cp,
                         stages_per_rank=plan.stages_per_rank, microbatches=plan.microbatches,
                   schedule=plan.schedule, zero=plan.zero, recompute=plan.recompute,
                   sequence_parallel=plan.sequence_parallel, offload=plan.offload,
                   optimizer_placement=plan.optimizer_placement)  # fmt: skip
    large = 6 * plan.stages * plan.microbatches > _MAX_CACHED_INSTRUCTIONS
    large = large or options not in ({}, CPU_COMPILE_OPTIONS)
    if large or plan.schedule.endswith((".sched", ")")) or ":" in plan.schedule:
        return _build_program(plan, tied_weights=tied_weights, options=options)
    return _build_program_cached(shape, tied_weights=tied_weights, **options)


@lru_cache(_CACHE_SIZE)
def _build_program_cached(plan: ParallelPlan, *, tied_weights: bool, **options: Any) -> Program:
    return _build_program(plan, tied_weights=tied_weights, options=options)


def _build_program(plan: ParallelPlan, *, tied_weights: bool, options: dict[str, Any]) -> Program:
    schedule, shape = Source(plan.schedule).schedule_or_program, build_pipeline_shape(plan)
    if isinstance(schedule, Program) and not schedule.is_draft:
        if plan.has_offload:
            raise UsageError(
                f"{plan.schedule} is a lowered program, and a plan cannot change its offload",
                hint='offload="none" and optimizer_placement="device"',
                fields=["offload", "optimizer_placement", "schedule"],
            )
        request_fields = {
            "tp": plan.tp,
            "dp": plan.dp,
            "zero": plan.zero,
            "tied_weights": tied_weights,
        }
        request_fields["sequence_parallel"] = plan.sequence_parallel and plan.tp > 1
        return Request(
            Source(plan.schedule), request_fields, defaults={}, progress_model="per_edge"
        ).program
    drafted = schedule if isinstance(schedule, Program) else expand_schedule(schedule, shape)
    return lower_draft(drafted, plan, tied_weights=tied_weights, **options)


def lower_draft(
    draft: Program, plan: ParallelPlan, *, tied_weights: bool = True, **options: Any
) -> Program:
    """Compile a draft with the options of a plan, as `plan_program` does.

    Args:
        draft: The compute instructions of the program.
        plan: The plan. Its schedule is not used.
        tied_weights: True if the head shares the weight of the embedding.
        **options: Options of `schedir.compile`. They override the options that follow from the
            plan.

    Raises:
        SchedirError: The draft does not work with these options.
    """
    defaults: dict[str, Any] = {
        "progress_model": "per_edge",
        "buffer_sharing": "minimal",
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
    }
    if plan.recompute == "full":
        defaults["recompute"] = "all"
    if reduces_each_backward(plan):
        defaults["reduce_scatter_at"] = "each_backward"
    if plan.offload != "none":
        defaults["offload"] = plan.offload
    if plan.optimizer_placement != "device":
        defaults["optimizer_placement"] = plan.optimizer_placement
    defaults |= {"tied_weights": tied_weights, "clip_grad_norm": True, "zero": plan.zero}
    return compile(draft, None, tp=plan.tp, dp=plan.dp * plan.cp, **(defaults | options))


def reduces_each_backward(plan: ParallelPlan) -> bool:
    """Return whether a stage reduces its gradients after each group of consecutive backwards.

    With sharded gradients and more than two stages per rank, these reductions limit the number of
    unsharded gradients that a rank keeps.

    Args:
        plan: The plan.
    """
    return plan.zero >= SHARDED_FROM_LEVEL["grads"] and plan.stages_per_rank > 2
