"""Convert a parallel plan into a configuration of `schedir train`."""

from __future__ import annotations

import json
from typing import Any, Final

from schedir.errors import CommandHint, UsageError
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import HOST_TRIP
from schedir.passes.selection import split_addresses
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_compilation import reduces_each_backward
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.transformer_spec import TransformerSpec

# Fields of a model or a plan that `schedir train` cannot change: (field, the value that the GPT of
# `schedir train` has, reason). The values "heads" and "hidden / heads" are computed from the model.
_UNSUPPORTED_FIELDS: Final = (
    ("kv_heads", "heads", "each head of its GPT has its own keys and values"),
    ("head_dim", "hidden / heads", "the heads of its GPT share the hidden size"),
    ("gated", False, "the feed-forward network of its GPT has two matrices"),
    ("rotary", False, "its GPT has learned position embeddings"),
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
    if reduces_each_backward(plan):
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
    llama = name in ("ffn", "kv_heads", "gated", "rotary")
    other_kind = f'; kind = "llama" in [model] of a configuration has {name}' if llama else ""
    return UsageError(
        f"schedir train does not support {name} {json.dumps(value)}: {reason}",
        hint=CommandHint(
            f"plan_program(plan) returns the program of the plan{other_kind}",
            f"-o FILE.sched writes the program of the plan{other_kind}",
        ),
        fields=[name],
    )
