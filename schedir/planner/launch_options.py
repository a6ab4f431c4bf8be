"""Format a division of layers as options of Megatron-LM and torchtitan."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Final

from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_compilation import build_pipeline_shape
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.transformer_spec import TransformerSpec

# `_format_layout` writes this many or more consecutive equal stages as "(...)*n".
_MIN_FOLDED_STAGES: Final = 3
_TORCHTITAN_LAYERS_FIELD: Final = "pipeline_parallel_module_fqns_per_model_part"


def launcher_options(model: TransformerSpec, plan: ParallelPlan) -> dict[str, str]:
    r"""Return the options with which Megatron-LM and torchtitan give each stage its layers.

    For Megatron-LM, the function uses `--decoder-first-pipeline-num-layers` and
    `--decoder-last-pipeline-num-layers` if these options are enough.
    `--pipeline-model-parallel-layout` can express every division. For torchtitan, the options are
    fields of `config.parallelism`. A line that begins with # describes an alternative, or the
    reason why the framework cannot run the plan.

    Args:
        model: The model.
        plan: The plan. The options contain its pipeline size and its division of layers.

    Returns:
        The options as text, under the keys "megatron" and "torchtitan".

    Raises:
        UsageError: See `get_layers_per_stage` and `build_pipeline_shape`.
        ShapeError: A pipeline cannot have this shape.

    References:
        Megatron-LM: megatron/core/transformer/transformer_config.py and
        pipeline_parallel_layer_layout.py; user guide, "Custom Pipeline Model Parallel Layout".
        torchtitan: torchtitan/config/parallelism.py and distributed/pipeline_parallel.py.

    Example:
        >>> from schedir.planner import ParallelPlan, TransformerSpec, launcher_options
        >>> model = TransformerSpec(layers=7, hidden=64, heads=4, vocab=256, sequence=64)
        >>> for trainer, text in launcher_options(model, ParallelPlan(pp=3, microbatches=6,
        ...     layers_per_stage=(2, 3,
        ...     2))).items():
        ...     print(f"{trainer}:", text, sep="\n")
        megatron:
        --pipeline-model-parallel-size 3
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2
        # or, if your version has this option, in place of the last line:
        --pipeline-model-parallel-layout "Et*2|t*3|t*2L"
        torchtitan:
        pipeline_parallel_degree = 3
        pipeline_parallel_first_stage_less_layers = 1
        pipeline_parallel_last_stage_less_layers = 1
    """
    parts = get_layers_per_stage(model, plan)
    shape = build_pipeline_shape(plan)
    return {
        "megatron": "\n".join(_format_megatron(plan, parts, is_loop=shape.placement == "loop")),
        "torchtitan": "\n".join(
            _format_torchtitan(plan, parts, is_supported=shape.placement in ("loop", "vee"))
        ),
    }


# ---------------------------------------------------------------- Megatron-LM


def _format_megatron(
    plan: ParallelPlan, layers_per_stage: tuple[int, ...], *, is_loop: bool
) -> list[str]:
    if not is_loop:
        return [f"# Megatron-LM has only placement loop, and {plan.schedule} has another one"]
    lines_ = [f"--pipeline-model-parallel-size {plan.pp}"]
    short = _format_end_options(plan, layers_per_stage)
    if short is None:
        return [*lines_, _format_layout(layers_per_stage)]
    virtual = [f"--num-virtual-stages-per-pipeline-rank {plan.stages_per_rank}"] * (
        plan.stages_per_rank > 1
    )
    lines_ += virtual
    if not short:
        return lines_
    lines = "2 lines" if virtual else "line"
    alternative = f"# or, if your version has this option, in place of the last {lines}:"
    return [*lines_, short, alternative, _format_layout(layers_per_stage)]


def _format_end_options(plan: ParallelPlan, layers_per_stage: tuple[int, ...]) -> str | None:
    """Return Megatron-LM's options for the layers of the first and the last rank.

    The options work if all stages of a rank have equal numbers of layers, and all inner ranks have
    equal numbers of layers. The result is "" if all ranks are equal, and None if these options
    cannot express the division.
    """
    ranks = [{*layers_per_stage[rank :: plan.pp]} for rank in range(plan.pp)]
    if any(len(layers_per_rank) > 1 for layers_per_rank in ranks):
        return None
    layers_per_rank = [layers_per_stage[rank] * plan.stages_per_rank for rank in range(plan.pp)]
    if not all(layers_per_rank):
        return None
    for has_first, has_last in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inner = layers_per_rank[has_first : len(layers_per_rank) - has_last]
        if has_first + has_last > plan.pp or len({*inner}) > 1:
            continue
        first_option = [f"--decoder-first-pipeline-num-layers {layers_per_rank[0]}"] * has_first
        return " ".join(
            first_option + [f"--decoder-last-pipeline-num-layers {layers_per_rank[-1]}"] * has_last
        )
    return None


def _format_layout(layers_per_stage: tuple[int, ...]) -> str:
    """Return Megatron-LM's layout option.

    In the value of this option, E is the embedding, t is a layer, and L is the head with the loss.
    """
    inner = [_format_layer_letters(n) for n in layers_per_stage]
    inner[0], inner[-1] = "E" + inner[0], inner[-1] + "L"
    text = ""
    for layer_count, equal_stages in groupby(inner[:-1]):
        n = len([*equal_stages])
        text += (
            f"({layer_count}|)*{n}"
            if n >= _MIN_FOLDED_STAGES and layer_count
            else f"{layer_count}|" * n
        )
    return f'--pipeline-model-parallel-layout "{text}{inner[-1]}"'


def _format_layer_letters(layers: int) -> str:
    return "t" * layers if layers < 2 else f"t*{layers}"


# ---------------------------------------------------------------- torchtitan


def _format_torchtitan(
    plan: ParallelPlan, layers_per_stage: tuple[int, ...], *, is_supported: bool
) -> list[str]:
    if not is_supported:
        return [
            f"# torchtitan has only placements loop and vee, and {plan.schedule} has another one"
        ]
    options = [f"pipeline_parallel_degree = {plan.pp}"]
    if (removed_layers := _count_removed_layers(layers_per_stage)) is not None:
        layer_slots = sum(layers_per_stage) + sum(removed_layers)
        layers_per_slot = -(-layer_slots // len(layers_per_stage))
        if plan.stages_per_rank > 2 and -(-layer_slots // layers_per_slot) == len(layers_per_stage):
            options.append(f"pipeline_parallel_layers_per_stage = {layers_per_slot}")
        if plan.stages_per_rank <= 2 or len(options) > 1:
            options.append(f"pipeline_parallel_first_stage_less_layers = {removed_layers[0]}")
            return [*options, f"pipeline_parallel_last_stage_less_layers = {removed_layers[1]}"]
    names, layer = [], 0
    for n in layers_per_stage:
        names.append([f"layers.{k}" for k in range(layer, layer + n)])
        layer += n
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    older = _TORCHTITAN_LAYERS_FIELD.removeprefix("pipeline_parallel_")
    return [
        *options,
        f"{_TORCHTITAN_LAYERS_FIELD} = {json.dumps(names)}",
        f'# in older versions: {older}, with "output" in place of "lm_head"',
    ]


def _count_removed_layers(layers_per_stage: tuple[int, ...]) -> tuple[int, int] | None:
    """Return by how many layers torchtitan shortens the first and the last stage.

    torchtitan adds these two numbers to the number of layers, and divides the sum evenly. If the
    sum is not divisible, the first stages get one more layer. The result is None if no two numbers
    give this division.
    """
    stages = len(layers_per_stage)
    if stages < 2:
        return None
    for size in sorted({n - k for n in layers_per_stage for k in (0, 1)}, reverse=True):
        for longer_stages in range(stages):
            even = [size + (stage < longer_stages) for stage in range(stages)]
            first = even[0] - layers_per_stage[0]
            last = even[-1] - layers_per_stage[-1]
            if (
                even[1:-1] == [*layers_per_stage[1:-1]]
                and 0 <= min(first, last) <= max(first, last) <= size
            ):
                return first, last
    return None
