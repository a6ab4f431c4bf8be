"""Turn a parallel plan into a program, or into a configuration of `schedir train`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from schedir.compiler.compile import compile
from schedir.errors import UsageError
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

_CACHE_SIZE: Final = 16  # programs that are kept: choices differ in sizes more often than in these
_MAX_CACHED_INSTRUCTIONS: Final = 2**18  # instructions of one that is not
# Options with which `schedir train` compiles for processes on processors.
CPU_COMPILE_OPTIONS: Final[dict[str, Any]] = {
    "overlap": True,
    "buffer_sharing": None,
    "blocking_hosts": True,
}


def build_pipeline_shape(plan: ParallelPlan) -> PipelineShape:
    """The shape of a choice's pipeline, with the placement that its schedule is made for.

    Raises UsageError for a schedule that is none, or takes another number of stages to a rank;
    ShapeError for what no pipeline can have.

    >>> from schedir.planner import ParallelPlan
    >>> build_pipeline_shape(ParallelPlan(pp=4, microbatches=8, stages_per_rank=2, schedule="zb_v"))
    PipelineShape(ranks=4, microbatches=8, stages_per_rank=2, placement='vee')
    """
    source = Source(plan.schedule)
    if isinstance(source.schedule_or_program, Program):
        said = {
            "ranks": plan.pp,
            "microbatches": plan.microbatches,
            "stages_per_rank": plan.stages_per_rank,
        }
        return Request(source, said, defaults={}).shape
    placement, own = get_placement_mark(source.schedule_or_program)
    own = own or (None if has_free_v(source.schedule_or_program) else 1)
    if own not in (None, plan.stages_per_rank):
        raise UsageError(
            f"{plan.schedule} has {own} stage{'s' * (own > 1)} to a rank, not "
            f"{plan.stages_per_rank}",
            hint=f"v={own}",
            fields=["stages_per_rank", "schedule"],
        )
    return PipelineShape(plan.pp, plan.microbatches, plan.stages_per_rank, placement or "loop")


def plan_program(plan: ParallelPlan, *, tied_weights: bool = True, **options: Any) -> Program:
    """The checked program of a choice, its messages, reductions and recomputation in it.

    A replica's step, as `schedir.compile` makes it of the schedule: with scatters and gathers at
    boundaries where t > 1 (with `sequence_parallel` parts of the sequence cross as they are, and
    gradients of parts are summed at the end), with the level of ZeRO, and an R for each forward
    that is run again where `recompute` is "full".
    "selective" shows in what backwards take.  Which microbatches `offload` "fit" moves their
    sizes and a limit decide, which are `options` then, with costs: `program_for` finds these.
    Parts of a sequence (`cp`) are replicas to what sums gradients.  The norm of gradients is
    taken, as trainers do that clip.  `tied_weights` says that the head shares the embedding's
    weight;
    `options` are those of `compile`; unless told, messages have a queue for each directed edge,
    and the fewest buffers.

    Raises what `build_pipeline_shape` does, and a SchedirError for a schedule that does not work
    so.

    >>> from schedir.planner import ParallelPlan, plan_program
    >>> plan_program(ParallelPlan(pp=4, tp=2, dp=2, microbatches=8, zero=1, schedule="one_f_one_b"))
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
    found, shape = Source(plan.schedule).schedule_or_program, build_pipeline_shape(plan)
    if isinstance(found, Program) and not found.is_draft:
        if plan.has_offload:
            raise UsageError(
                f"{plan.schedule} is a program, which says itself what it offloads",
                fields=["offload", "optimizer_placement", "schedule"],
            )
        said = {"tp": plan.tp, "dp": plan.dp, "zero": plan.zero, "tied_weights": tied_weights}
        said["sequence_parallel"] = plan.sequence_parallel and plan.tp > 1
        return Request(Source(plan.schedule), said, defaults={}, progress_model="per_edge").program
    drafted = found if isinstance(found, Program) else expand_schedule(found, shape)
    return lower_draft(drafted, plan, tied_weights=tied_weights, **options)


def lower_draft(
    draft: Program, plan: ParallelPlan, *, tied_weights: bool = True, **options: Any
) -> Program:
    """The program that a choice has with the compute of a draft, as `plan_program` says."""
    how: dict[str, Any] = {
        "progress_model": "per_edge",
        "buffer_sharing": "minimal",
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
    }
    if plan.recompute == "full":
        how["recompute"] = "all"
    if _reduces_each_backward(plan):
        how["reduce_scatter_at"] = "each_backward"
    if plan.offload != "none":
        how["offload"] = plan.offload
    if plan.optimizer_placement != "device":
        how["optimizer_placement"] = plan.optimizer_placement
    how |= {"tied_weights": tied_weights, "clip_grad_norm": True, "zero": plan.zero}
    return compile(draft, None, plan.tp, plan.dp * plan.cp, **(how | options))


def _reduces_each_backward(plan: ParallelPlan) -> bool:
    """Whether gradients are summed behind each run of a stage's backwards: where they are in parts,
    and of many stages, so that few whole ones are there at once."""
    return plan.zero >= SHARDED_FROM_LEVEL["grads"] and plan.stages_per_rank > 2


# ---------------------------------------------------------------- for `schedir train`

# What the trainer's GPT does not have: a field of Model or of Choice, what it has, and why.
_UNSUPPORTED_FIELDS: Final = (
    ("kv_heads", "heads", "a GPT's attention has keys and values of each head's own"),
    ("gated", False, "a GPT's feed-forward network has two matrices"),
    ("experts", 1, "its layers have one feed-forward network"),
    ("cp", 1, "it takes whole sequences"),
    ("ep", 1, "its layers have one feed-forward network"),
)


def train_config(
    model: TransformerSpec,
    plan: ParallelPlan,
    *,
    offload_program: Program | None = None,
    **train_settings: str | int | float,
) -> str:
    """A configuration in TOML with which `schedir train` runs a choice, its division included.

    `train_settings` are further settings of its section [train]: steps=100, device="cuda".  Of one
    that offloads, `offload_program` is the `program_for` it, which says what.

    Raises UsageError for what that trainer cannot do, saying what; and what `plan_program` raises.

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
    if offload_program is not None and (said := _format_offload(offload_program)):
        tables["memory"]["offload"] = said
    if plan.optimizer_placement != "device":
        tables["memory"]["optimizer_placement"] = plan.optimizer_placement
    many = f"{plan.gpus} process{'es' * (plan.gpus > 1)}"
    text = [f"# {many}: schedir train FILE"]
    for name, table in tables.items():
        if table:
            text += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join([*text, ""])


def _format_offload(program: Program) -> str:
    """What a program offloads, as an option says it: stages, and microbatches of stages."""
    stage, mb = split_addresses(program.words[program.op == HOST_TRIP[0]])
    each, m = [*zip(stage.tolist(), mb.tolist(), strict=True)], program.shape.microbatches
    whole = {s for s in {*stage.tolist()} if sum(s == one for one, _ in each) == m}
    return ",".join([*map(str, sorted(whole)), *(f"{s}.{k}" for s, k in sorted(each)
                                                 if s not in whole)])  # fmt: skip


def _require_trainable(
    model: TransformerSpec,
    plan: ParallelPlan,
    layers_per_stage: tuple[int, ...],
    offload_program: Program | None,
) -> None:
    """Raise UsageError for what `schedir train` cannot do."""
    if 0 in layers_per_stage[1:-1]:
        raise _unsupported_error(
            "layers_per_stage", list(layers_per_stage), "a stage between the ends has nothing to do"
        )
    if model.ffn != 4 * model.hidden:
        raise _unsupported_error(
            "ffn", model.ffn, f"a GPT's feed-forward network is 4 x {model.hidden} wide"
        )
    if model.heads % plan.tp:
        raise UsageError(
            f"tp {plan.tp} does not divide {model.heads} heads", fields=["tp", "heads"]
        )
    for name, usual, why in _UNSUPPORTED_FIELDS:
        value = getattr(model if hasattr(model, name) else plan, name)
        if value != (model.heads if usual == "heads" else usual):
            raise _unsupported_error(name, value, why)
    if plan.rank_order != "tp-pp-dp" and min(plan.pp, plan.dp) > 1:
        raise _unsupported_error(
            "rank_order", plan.rank_order, "its replicas are numbered behind the ranks of each"
        )
    if plan.offload != "none" and offload_program is None:
        raise UsageError(
            "which microbatches are offloaded a program says, and nobody gives it",
            hint="config(model, choice, moves=program_for(model, cluster, choice))",
            fields=["offload"],
        )
    if plan.recompute == "selective":
        raise _unsupported_error("recompute", "selective", "its attention keeps no scores to spare")


def _unsupported_error(name: str, value: object, reason: str) -> UsageError:
    llama = name in ("ffn", "kv_heads", "gated")
    return UsageError(
        f"schedir train cannot run {name} {json.dumps(value)}: {reason}",
        hint='a [model] of your own with kind = "llama" can have it' if llama else "",
        fields=[name],
    )
