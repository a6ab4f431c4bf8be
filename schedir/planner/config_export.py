"""Convert a parallel plan into a program, or into a configuration of `schedir train`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from schedir.compiler.compile import compile
from schedir.errors import CommandHint, UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import HOST_TRIP
from schedir.passes.selection import split_addresses
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.transformer_spec import TransformerSpec
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
    if _reduces_each_backward(plan):
        defaults["reduce_scatter_at"] = "each_backward"
    if plan.offload != "none":
        defaults["offload"] = plan.offload
    if plan.optimizer_placement != "device":
        defaults["optimizer_placement"] = plan.optimizer_placement
    defaults |= {"tied_weights": tied_weights, "clip_grad_norm": True, "zero": plan.zero}
    return compile(draft, None, tp=plan.tp, dp=plan.dp * plan.cp, **(defaults | options))


def _reduces_each_backward(plan: ParallelPlan) -> bool:
    """Return whether a stage reduces its gradients after each group of consecutive backwards.

    With sharded gradients and more than two stages per rank, these reductions limit the number of
    unsharded gradients that a rank keeps.
    """
    return plan.zero >= SHARDED_FROM_LEVEL["grads"] and plan.stages_per_rank > 2


# ---------------------------------------------------------------- for `schedir train`

# Fields of a model or a plan that `schedir train` cannot change: (field, the value that the GPT of
# `schedir train` has, reason). The values "heads" and "hidden / heads" are computed from the model.
_UNSUPPORTED_FIELDS: Final = (
    ("kv_heads", "heads", "each head of its GPT has its own keys and values"),
    ("head_dim", "hidden / heads", "the heads of its GPT share the hidden size"),
    ("gated", False, "the feed-forward network of its GPT has two matrices"),
    ("experts", 1, "a layer of its GPT has one feed-forward network"),
    ("cp", 1, "its ranks do not divide a sequence"),
    ("ep", 1, "a layer of its GPT has one feed-forward network"),
)


def train_config(
    model: TransformerSpec,
    plan: ParallelPlan,
    *,
    offload_program: Program | None = None,
    **train_settings: str | int | float,
) -> str:
    """Return a TOML configuration with which `schedir train` runs a plan.

    Args:
        model: The model.
        plan: The plan. The configuration includes its division of layers.
        offload_program: The program that `simulated_program` returns for the plan. A plan with an
            `offload` needs this program, because the program decides which microbatches are
            offloaded.
        **train_settings: Settings of the section [train], such as `steps=100` or `device="cuda"`.

    Raises:
        UsageError: `schedir train` cannot run this model or plan. The message names the field.

    Example:
        >>> from schedir.planner import ParallelPlan, TransformerSpec, train_config
        >>> model = TransformerSpec(layers=4, hidden=64, heads=4, vocab=256, sequence=64)
        >>> print(train_config(model, ParallelPlan(pp=2, microbatch_size=2, microbatches=8,
        ...     layers_per_stage=(3, 1)), steps=20))
        # 2 processes: schedir train FILE
        <BLANKLINE>
        [model]
        vocab = 256
        layers = 4
        hidden = 64
        heads = 4
        context = 64
        tied = true
        <BLANKLINE>
        [pipeline]
        schedule = "one_f_one_b"
        ranks = 2
        microbatches = 8
        stages_per_rank = 1
        tp = 1
        dp = 1
        layers_per_stage = [3, 1]
        <BLANKLINE>
        [data]
        microbatch_size = 2
        <BLANKLINE>
        [train]
        steps = 20
        <BLANKLINE>
    """
    parts = get_layers_per_stage(model, plan)
    _require_trainable(model, plan, parts, offload_program)
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "vocab": model.vocab, "layers": model.layers, "hidden": model.hidden,
            "heads": model.heads, "context": model.sequence, "tied": model.tied,
        },
        "pipeline": {
            "schedule": plan.schedule, "ranks": plan.pp, "microbatches": plan.microbatches,
            "stages_per_rank": plan.stages_per_rank, "tp": plan.tp, "dp": plan.dp,
        },
        "memory": {},
        "data": {"microbatch_size": plan.microbatch_size},
        "train": train_settings,
    }  # fmt: skip
    if len({*parts}) > 1:
        tables["pipeline"]["layers_per_stage"] = list(parts)
    if plan.zero:
        tables["pipeline"]["zero"] = plan.zero
    if plan.sequence_parallel and plan.tp > 1:
        tables["pipeline"]["sequence_parallel"] = True
    if _reduces_each_backward(plan):
        tables["pipeline"]["reduce_scatter_at"] = "each_backward"
    if plan.recompute == "full":
        tables["memory"]["recompute"] = "all"
    if offload_program is not None and (offload := _format_offload(offload_program)):
        tables["memory"]["offload"] = offload
    if plan.optimizer_placement != "device":
        tables["memory"]["optimizer_placement"] = plan.optimizer_placement
    processes = f"{plan.gpus} process{'es' * (plan.gpus > 1)}"
    text = [f"# {processes}: schedir train FILE"]
    for name, table in tables.items():
        if table:
            text += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join([*text, ""])


def _format_offload(program: Program) -> str:
    """Return the offloads of a program in the syntax of the option `offload`.

    An entry is a stage with all its microbatches, or one microbatch as "stage.mb".
    """
    stage, mb = split_addresses(program.words[program.op == HOST_TRIP[0]])
    moved, m = [*zip(stage.tolist(), mb.tolist(), strict=True)], program.shape.microbatches
    complete_stages = {
        s for s in {*stage.tolist()} if sum(s == moved_stage for moved_stage, _ in moved) == m
    }
    return ",".join([*map(str, sorted(complete_stages)), *(f"{s}.{k}" for s, k in sorted(moved)
                                                 if s not in complete_stages)])  # fmt: skip


def _require_trainable(
    model: TransformerSpec,
    plan: ParallelPlan,
    layers_per_stage: tuple[int, ...],
    offload_program: Program | None,
) -> None:
    if 0 in layers_per_stage[1:-1]:
        raise _unsupported_error(
            "layers_per_stage",
            list(layers_per_stage),
            "each stage except the first and the last needs a layer",
        )
    if model.ffn != 4 * model.hidden:
        raise _unsupported_error(
            "ffn", model.ffn, f"the feed-forward network of its GPT has width 4 x {model.hidden}"
        )
    if model.heads % plan.tp:
        raise UsageError(
            f"tp {plan.tp} does not divide heads {model.heads}", fields=["tp", "heads"]
        )
    for name, usual, reason in _UNSUPPORTED_FIELDS:
        value = getattr(model if hasattr(model, name) else plan, name)
        derived = {"heads": model.heads, "hidden / heads": model.hidden // model.heads}
        if value != derived.get(str(usual), usual):
            raise _unsupported_error(name, value, reason)
    if plan.rank_order != "tp-pp-dp" and min(plan.pp, plan.dp) > 1:
        raise _unsupported_error(
            "rank_order",
            plan.rank_order,
            "it numbers the ranks of a replica before those of the next replica",
        )
    if plan.offload != "none" and offload_program is None:
        raise UsageError(
            f"offload {plan.offload!r} needs an offload_program, the program that contains the "
            "offloads of each microbatch",
            hint="offload_program=simulated_program(model, cluster, plan)",
            fields=["offload"],
        )
    if plan.recompute == "selective":
        raise _unsupported_error("recompute", "selective", "its attention saves no scores")


def _unsupported_error(name: str, value: object, reason: str) -> UsageError:
    llama = name in ("ffn", "kv_heads", "gated")
    other_kind = f'; kind = "llama" in [model] of a configuration has {name}' if llama else ""
    return UsageError(
        f"schedir train does not support {name} {json.dumps(value)}: {reason}",
        hint=CommandHint(
            f"plan_program(plan) returns the program of the plan{other_kind}",
            f"-o FILE.sched writes the program of the plan{other_kind}",
        ),
        fields=[name],
    )
