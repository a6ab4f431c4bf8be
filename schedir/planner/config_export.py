"""Turn a parallel plan into a program, or into a configuration of `schedir train`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.zero_states import CUT_FROM
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import HOST
from schedir.passes.selection import stages_of
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import layers_of
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.schedules.schedule_algebra import placed_for, takes_v
from schedir.schedules.schedule_expansion import expand_schedule

_KEPT: Final = 16  # programs that are kept: choices differ in sizes more often than in these
_LARGE: Final = 2**18  # instructions of one that is not
# Options with which `schedir train` compiles for processes on processors.
ON_PROCESSORS: Final[dict[str, Any]] = {
    "overlap": True,
    "buffer_sharing": None,
    "blocking_hosts": True,
}


def plan_of(choice: ParallelPlan) -> PipelineShape:
    """The shape of a choice's pipeline, with the placement that its schedule is made for.

    Raises UsageError for a schedule that is none, or takes another number of stages to a rank;
    ShapeError for what no pipeline can have.

    >>> from schedir.planner import ParallelPlan
    >>> plan_of(ParallelPlan(pp=4, microbatches=8, stages_per_rank=2, schedule="zb_v"))
    PipelineShape(ranks=4, microbatches=8, stages_per_rank=2, placement='vee')
    """
    source = Source(choice.schedule)
    if isinstance(source.found, Program):
        said = {
            "ranks": choice.pp,
            "microbatches": choice.microbatches,
            "stages_per_rank": choice.stages_per_rank,
        }
        return Request(source, said, usual={}).shape
    placement, own = placed_for(source.found)
    own = own or (None if takes_v(source.found) else 1)
    if own not in (None, choice.stages_per_rank):
        raise UsageError(
            f"{choice.schedule} has {own} stage{'s' * (own > 1)} to a rank, not "
            f"{choice.stages_per_rank}",
            hint=f"v={own}",
            fields=["stages_per_rank", "schedule"],
        )
    return PipelineShape(
        choice.pp, choice.microbatches, choice.stages_per_rank, placement or "loop"
    )


def plan_program(choice: ParallelPlan, *, tied: bool = True, **options: Any) -> Program:
    """The checked program of a choice, its messages, reductions and recomputation in it.

    A replica's step, as `schedir.compile` makes it of the schedule: with scatters and gathers at
    boundaries where t > 1 (with `sequence_parallel` parts of the sequence cross as they are, and
    gradients of parts are summed at the end), with the level of ZeRO, and an R for each forward
    that is run again where `recompute` is "full".
    "selective" shows in what backwards take.  Which microbatches `offload` "fit" moves their
    sizes and a limit decide, which are `options` then, with costs: `program_for` finds these.
    Parts of a sequence (`cp`) are replicas to what sums gradients.  The norm of gradients is
    taken, as trainers do that clip.  `tied` says that the head shares the embedding's weight;
    `options` are those of `compile`; unless told, messages have a queue for each directed edge,
    and the fewest buffers.

    Raises what `plan_of` does, and a SchedirError for a schedule that does not work so.

    >>> from schedir.planner import ParallelPlan, plan_program
    >>> plan_program(ParallelPlan(pp=4, tp=2, dp=2, microbatches=8, zero=1, schedule="one_f_one_b"))
    <program one_f_one_b: 4 ranks, 278 instructions>
    """
    shape = ParallelPlan(pp=choice.pp, tp=choice.tp, dp=choice.dp * choice.cp,
                         stages_per_rank=choice.stages_per_rank, microbatches=choice.microbatches,
                   schedule=choice.schedule, zero=choice.zero, recompute=choice.recompute,
                   sequence_parallel=choice.sequence_parallel, offload=choice.offload,
                   optimizer_placement=choice.optimizer_placement)  # fmt: skip
    large = 6 * choice.stages * choice.microbatches > _LARGE
    large = large or options not in ({}, ON_PROCESSORS)
    if large or choice.schedule.endswith((".sched", ")")) or ":" in choice.schedule:
        return _made(choice, tied=tied, options=options)
    return _known(shape, tied=tied, **options)


@lru_cache(_KEPT)
def _known(choice: ParallelPlan, *, tied: bool, **options: Any) -> Program:
    return _made(choice, tied=tied, options=options)


def _made(choice: ParallelPlan, *, tied: bool, options: dict[str, Any]) -> Program:
    found, shape = Source(choice.schedule).found, plan_of(choice)
    if isinstance(found, Program) and not found.is_draft:
        if choice.offloads:
            raise UsageError(
                f"{choice.schedule} is a program, which says itself what it offloads",
                fields=["offload", "optimizer_placement", "schedule"],
            )
        said = {"tp": choice.tp, "dp": choice.dp, "zero": choice.zero, "tied_weights": tied}
        said["sequence_parallel"] = choice.sequence_parallel and choice.tp > 1
        return Request(Source(choice.schedule), said, usual={}, progress_model="per_edge").program
    drafted = found if isinstance(found, Program) else expand_schedule(found, shape)
    return lowered(drafted, choice, tied=tied, **options)


def lowered(
    drafted: Program, choice: ParallelPlan, *, tied: bool = True, **options: Any
) -> Program:
    """The program that a choice has with the compute of a draft, as `plan_program` says."""
    how: dict[str, Any] = {
        "progress_model": "per_edge",
        "buffer_sharing": "minimal",
        "sequence_parallel": choice.sequence_parallel and choice.tp > 1,
    }
    if choice.recompute == "full":
        how["recompute"] = "all"
    if _by_turns(choice):
        how["reduce_scatter_at"] = "each_backward"
    if choice.offload != "none":
        how["offload"] = choice.offload
    if choice.optimizer_placement != "device":
        how["optimizer_placement"] = choice.optimizer_placement
    how |= {"tied_weights": tied, "clip_grad_norm": True, "zero": choice.zero}
    return compile(drafted, None, choice.tp, choice.dp * choice.cp, **(how | options))


def _by_turns(choice: ParallelPlan) -> bool:
    """Whether gradients are summed behind each run of a stage's backwards: where they are in parts,
    and of many stages, so that few whole ones are there at once."""
    return choice.zero >= CUT_FROM["grads"] and choice.stages_per_rank > 2


# ---------------------------------------------------------------- for `schedir train`

# What the trainer's GPT does not have: a field of Model or of Choice, what it has, and why.
_WITHOUT: Final = (
    ("kv_heads", "heads", "a GPT's attention has keys and values of each head's own"),
    ("gated", False, "a GPT's feed-forward network has two matrices"),
    ("experts", 1, "its layers have one feed-forward network"),
    ("cp", 1, "it takes whole sequences"),
    ("ep", 1, "its layers have one feed-forward network"),
)


def train_config(
    model: TransformerSpec,
    choice: ParallelPlan,
    *,
    moves: Program | None = None,
    **train: str | int | float,
) -> str:
    """A configuration in TOML with which `schedir train` runs a choice, its division included.

    `train` are further settings of its section [train]: steps=100, device="cuda".  Of one that
    offloads, `moves` is the `program_for` it, which says what.

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
    parts = layers_of(model, choice)
    _require_trainable(model, choice, parts, moves)
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "vocab": model.vocab, "layers": model.layers, "hidden": model.hidden,
            "heads": model.heads, "context": model.sequence, "tied": model.tied,
        },
        "pipeline": {
            "schedule": choice.schedule, "ranks": choice.pp, "microbatches": choice.microbatches,
            "stages_per_rank": choice.stages_per_rank, "tp": choice.tp, "dp": choice.dp,
        },
        "memory": {},
        "data": {"microbatch_size": choice.microbatch_size},
        "train": train,
    }  # fmt: skip
    if len({*parts}) > 1:
        tables["pipeline"]["layers_per_stage"] = list(parts)
    if choice.zero:
        tables["pipeline"]["zero"] = choice.zero
    if choice.sequence_parallel and choice.tp > 1:
        tables["pipeline"]["sequence_parallel"] = True
    if _by_turns(choice):
        tables["pipeline"]["reduce_scatter_at"] = "each_backward"
    if choice.recompute == "full":
        tables["memory"]["recompute"] = "all"
    if moves is not None and (said := _offloaded(moves)):
        tables["memory"]["offload"] = said
    if choice.optimizer_placement != "device":
        tables["memory"]["optimizer_placement"] = choice.optimizer_placement
    many = f"{choice.gpus} process{'es' * (choice.gpus > 1)}"
    text = [f"# {many}: schedir train FILE"]
    for name, table in tables.items():
        if table:
            text += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join([*text, ""])


def _offloaded(program: Program) -> str:
    """What a program offloads, as an option says it: stages, and microbatches of stages."""
    stage, mb = stages_of(program.words[program.op == HOST[0]])
    each, m = [*zip(stage.tolist(), mb.tolist(), strict=True)], program.shape.microbatches
    whole = {s for s in {*stage.tolist()} if sum(s == one for one, _ in each) == m}
    return ",".join([*map(str, sorted(whole)), *(f"{s}.{k}" for s, k in sorted(each)
                                                 if s not in whole)])  # fmt: skip


def _require_trainable(
    model: TransformerSpec, choice: ParallelPlan, parts: tuple[int, ...], moves: Program | None
) -> None:
    """Raise UsageError for what `schedir train` cannot do."""
    if 0 in parts[1:-1]:
        raise _cannot("layers_per_stage", list(parts), "a stage between the ends has nothing to do")
    if model.ffn != 4 * model.hidden:
        raise _cannot("ffn", model.ffn, f"a GPT's feed-forward network is 4 x {model.hidden} wide")
    if model.heads % choice.tp:
        raise UsageError(
            f"tp {choice.tp} does not divide {model.heads} heads", fields=["tp", "heads"]
        )
    for name, usual, why in _WITHOUT:
        value = getattr(model if hasattr(model, name) else choice, name)
        if value != (model.heads if usual == "heads" else usual):
            raise _cannot(name, value, why)
    if choice.rank_order != "tp-pp-dp" and min(choice.pp, choice.dp) > 1:
        raise _cannot(
            "rank_order", choice.rank_order, "its replicas are numbered behind the ranks of each"
        )
    if choice.offload != "none" and moves is None:
        raise UsageError(
            "which microbatches are offloaded a program says, and nobody gives it",
            hint="config(model, choice, moves=program_for(model, cluster, choice))",
            fields=["offload"],
        )
    if choice.recompute == "selective":
        raise _cannot("recompute", "selective", "its attention keeps no scores to spare")


def _cannot(name: str, value: object, why: str) -> UsageError:
    llama = name in ("ffn", "kv_heads", "gated")
    return UsageError(
        f"schedir train cannot run {name} {json.dumps(value)}: {why}",
        hint='a [model] of your own with kind = "llama" can have it' if llama else "",
        fields=[name],
    )
