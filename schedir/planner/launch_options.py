"""Format a plan as options of Megatron-LM, NeMo (Megatron Bridge), torchtitan and nanotron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Final, NamedTuple

from schedir.planner.parallel_plan import SEARCHED_SCHEDULE, ParallelPlan
from schedir.planner.plan_compilation import build_pipeline_shape
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.transformer_spec import TransformerSpec

# `_format_layout` writes this many or more consecutive equal stages as "(...)*n".
_MIN_FOLDED_STAGES: Final = 3
_TORCHTITAN_LAYERS_FIELD: Final = "pipeline_parallel_module_fqns_per_model_part"
# Names of schedules in torch.distributed.pipelining and in nanotron.
_TORCH_SCHEDULES: Final = {
    "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS", "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}  # fmt: skip
_NANOTRON_SCHEDULES: Final = {"gpipe": "afab", "one_f_one_b": "1f1b"}
_MEGATRON_SCHEDULES: Final = ("one_f_one_b", "interleaved")


class _Setting(NamedTuple):
    """A setting of Megatron-LM: the option, the field of Megatron Bridge, and the value.

    The value True is an option without a value.
    """

    option: str
    field: str
    value: int | str | bool


def launcher_options(model: TransformerSpec, plan: ParallelPlan) -> dict[str, str]:
    r"""Return the options with which other trainers run a plan.

    The options are those of the plan: parallel degrees, batch, schedule, recomputation, ZeRO and
    the layers of each stage. They do not describe the model. A line that begins with # describes an
    alternative, or a part of the plan that the trainer cannot run.

    For an uneven division of the layers, Megatron-LM has `--decoder-first-pipeline-num-layers`,
    `--decoder-last-pipeline-num-layers`, and `--pipeline-model-parallel-layout`, which can express
    every division. nanotron divides the layers itself.

    Args:
        model: The model.
        plan: The plan.

    Returns:
        The options as text, under the keys "megatron" (arguments of Megatron-LM), "nemo" (overrides
        of Megatron Bridge), "torchtitan" (its configuration) and "nanotron" (its configuration).

    Raises:
        UsageError: See `get_layers_per_stage` and `build_pipeline_shape`.
        ShapeError: A pipeline cannot have this shape.

    References:
        Megatron-LM: megatron/training/arguments.py,
        megatron/core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py; user
        guide, "Custom Pipeline Model Parallel Layout".
        Megatron Bridge: its configuration classes have the fields of Megatron-LM.
        torchtitan: torchtitan/config/parallelism.py and distributed/pipeline_parallel.py.
        nanotron: src/nanotron/config/parallelism_config.py and config.py.

    Example:
        >>> from schedir.planner import ParallelPlan, TransformerSpec, launcher_options
        >>> model = TransformerSpec(layers=7, hidden=64, heads=4, vocab=256, sequence=64)
        >>> plan = ParallelPlan(pp=3, tp=2, microbatches=6, layers_per_stage=(2, 3, 2))
        >>> print(launcher_options(model, plan)["megatron"])
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3
        --micro-batch-size 1 --global-batch-size 6
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2
        # or, if your version has this option, in place of the last line:
        --pipeline-model-parallel-layout "Et*2|t*3|t*2L"
    """
    parts = get_layers_per_stage(model, plan)
    # The program of a searched schedule is not a part of the plan.
    placement = "" if plan.schedule == SEARCHED_SCHEDULE else build_pipeline_shape(plan).placement
    megatron, nemo = [], []
    for group in _list_megatron_settings(plan):
        megatron.append(_join_arguments(group))
        nemo.append(_join_overrides(group))
    comments = _list_megatron_comments(plan)
    layer_lines = _format_megatron_layers(plan, parts) if placement == "loop" else []
    torchtitan = _format_torchtitan(plan, parts, is_supported=placement in ("loop", "vee"))
    return {
        "megatron": "\n".join([*filter(None, megatron), *layer_lines, *comments]),
        "nemo": "\n".join([*filter(None, nemo), *_to_overrides(layer_lines), *comments]),
        "torchtitan": "\n".join(torchtitan),
        "nanotron": "\n".join(_format_nanotron(model, plan)),
    }


# ---------------------------------------------------------------- Megatron-LM and Megatron Bridge


def _list_megatron_settings(plan: ParallelPlan) -> Iterator[list[_Setting]]:
    """Yield groups of settings: degrees, batch, ranks and optimizer, and the work of a layer."""
    degrees = [("tensor", plan.tp), ("pipeline", plan.pp)]
    names = [(f"{name}-model-parallel-size", degree) for name, degree in degrees]
    names += [("context-parallel-size", plan.cp)] * (plan.cp > 1)
    names += [("expert-model-parallel-size", plan.ep)] * (plan.ep > 1)
    yield [_Setting(name, f"model.{name.replace('-', '_')}", degree) for name, degree in names]
    yield [
        _Setting("micro-batch-size", "train.micro_batch_size", plan.microbatch_size),
        _Setting("global-batch-size", "train.global_batch_size", plan.batch),
    ]
    flags = {
        "sequence-parallel": ("model.sequence_parallel", plan.sequence_parallel),
        "use-distributed-optimizer": ("ddp.use_distributed_optimizer", plan.zero > 0),
        "optimizer-cpu-offload": (
            "optimizer.optimizer_cpu_offload",
            plan.optimizer_placement == "host",
        ),
        "use-tp-pp-dp-mapping": (
            "dist.use_tp_pp_dp_mapping",
            plan.rank_order == "tp-pp-dp" and plan.pp > 1 and plan.dp > 1,
        ),
    }
    yield [_Setting(option, *row) for option, row in flags.items() if row[1]]
    layer: dict[str, int | str] = {}
    if plan.attention == "flash":
        layer["attention_backend"] = "flash"
    if plan.recompute != "none":
        layer["recompute_granularity"] = plan.recompute
    if plan.recompute == "full":
        layer |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    yield [
        _Setting(name.replace("_", "-"), f"model.{name}", value) for name, value in layer.items()
    ]


def _join_arguments(settings: list[_Setting]) -> str:
    return " ".join(
        f"--{setting.option}" + f" {setting.value}" * (setting.value is not True)
        for setting in settings
    )


def _join_overrides(settings: list[_Setting]) -> str:
    return " ".join(f"{setting.field}={str(setting.value).lower()}" for setting in settings)


# Options of Megatron-LM for the layers of stages -> fields of Megatron Bridge.
_LAYER_FIELDS: Final = {
    "--num-virtual-stages-per-pipeline-rank ": "model.virtual_pipeline_model_parallel_size=",
    "--decoder-first-pipeline-num-layers ": "model.num_layers_in_first_pipeline_stage=",
    "--decoder-last-pipeline-num-layers ": "model.num_layers_in_last_pipeline_stage=",
    "--pipeline-model-parallel-layout ": "model.pipeline_model_parallel_layout=",
}


def _to_overrides(lines: list[str]) -> Iterator[str]:
    """Yield lines of `_format_megatron_layers` with the fields of Megatron Bridge."""
    for line in lines:
        for option, field in _LAYER_FIELDS.items():
            line = line.replace(option, field)
        yield line


def _list_megatron_comments(plan: ParallelPlan) -> list[str]:
    """Return comments about parts of a plan for which Megatron-LM has no option."""
    comments = []
    if plan.schedule not in _MEGATRON_SCHEDULES:
        comments.append(
            f"# Megatron-LM has no schedule {plan.schedule}: "
            f"schedir.megatron.forward_backward({_name_schedule(plan)}) runs it"
        )
    if plan.pp == 1 and plan.stages_per_rank > 1:
        comments.append("# Megatron-LM does not divide the layers of one pipeline rank into stages")
    if plan.zero > 1:
        strategy = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        comments.append(
            f"# ZeRO {plan.zero} is --use-megatron-fsdp --data-parallel-sharding-strategy "
            f"{strategy}"
        )
    if plan.offload != "none":
        comments.append("# no option offloads activations as this plan does")
    return comments


def _name_schedule(plan: ParallelPlan) -> str:
    """Return the name of a schedule, or of a file that `schedir plan -o` writes, as an argument."""
    return '"best.sched"' if plan.schedule == SEARCHED_SCHEDULE else f'"{plan.schedule}"'


def _format_megatron_layers(plan: ParallelPlan, layers_per_stage: tuple[int, ...]) -> list[str]:
    """Return the options for the number of stages and for the layers of each stage."""
    if plan.pp == 1:
        return []
    short = _format_end_options(plan, layers_per_stage)
    if short is None:
        return [_format_layout(layers_per_stage)]
    virtual = [f"--num-virtual-stages-per-pipeline-rank {plan.stages_per_rank}"] * (
        plan.stages_per_rank > 1
    )
    if not short:
        return virtual
    lines = "2 lines" if virtual else "line"
    alternative = f"# or, if your version has this option, in place of the last {lines}:"
    return [*virtual, short, alternative, _format_layout(layers_per_stage)]


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
    is_sharded = plan.zero > 0 and plan.dp > 1
    replicas, shards = (1, plan.dp) if is_sharded else (plan.dp, 1)
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicas}",
        f"data_parallel_shard_degree = {shards}",
    ]
    if is_sharded:
        lines.append(f'fsdp_reshard_after_forward = "{"always" if plan.zero == 3 else "never"}"')
    if is_sharded and plan.zero == 1:
        lines.append("# torchtitan has no ZeRO 1: these two lines are ZeRO 2")
    for name, degree in (("tensor", plan.tp), ("context", plan.cp), ("expert", plan.ep)):
        lines += [f"{name}_parallel_degree = {degree}"] * (degree > 1)
    if plan.pp > 1:
        lines += _format_torchtitan_pipeline(plan, layers_per_stage, is_supported=is_supported)
    # Without a pipeline, torchtitan accumulates the gradients of local batches.
    local_microbatches = plan.microbatches if plan.pp > 1 else 1
    lines += [
        "[training]",
        f"local_batch_size = {plan.microbatch_size * local_microbatches}",
        f"global_batch_size = {plan.batch}",
        "[activation_checkpoint]",
        f'mode = "{plan.recompute}"',
    ]
    if plan.recompute == "selective":
        lines.append("# torchtitan recomputes other operations of a layer than this plan")
    if plan.tp > 1 and not plan.sequence_parallel:
        lines.append("# torchtitan uses sequence parallelism with tensor parallelism")
    return lines


def _format_torchtitan_pipeline(
    plan: ParallelPlan, layers_per_stage: tuple[int, ...], *, is_supported: bool
) -> list[str]:
    """Return the lines about the pipeline: its schedule, and the layers of its stages."""
    if not is_supported and plan.schedule != SEARCHED_SCHEDULE:
        return [
            f"# torchtitan has only placements loop and vee, and {plan.schedule} has another one"
        ]
    options = [
        f"pipeline_parallel_degree = {plan.pp}",
        f"pipeline_parallel_microbatch_size = {plan.microbatch_size}",
    ]
    if torch_name := _TORCH_SCHEDULES.get(plan.schedule):
        options.append(f'pipeline_parallel_schedule = "{torch_name}"')
    else:
        keyword = "program=" * _name_schedule(plan).endswith('.sched"')
        options.append(
            f"# torch has no schedule {plan.schedule}: "
            f"schedir.torch_pipelining.patch_torchtitan({keyword}{_name_schedule(plan)}) runs it"
        )
    if (removed_layers := _count_removed_layers(layers_per_stage)) is not None:
        layer_slots = sum(layers_per_stage) + sum(removed_layers)
        layers_per_slot = -(-layer_slots // len(layers_per_stage))
        has_slots = plan.stages_per_rank > 2 and -(-layer_slots // layers_per_slot) == len(
            layers_per_stage
        )
        if has_slots:
            options.append(f"pipeline_parallel_layers_per_stage = {layers_per_slot}")
        if plan.stages_per_rank <= 2 or has_slots:
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


# ---------------------------------------------------------------- nanotron


def _format_nanotron(model: TransformerSpec, plan: ParallelPlan) -> list[str]:
    lines = ["parallelism:", f"  dp: {plan.dp}", f"  pp: {plan.pp}", f"  tp: {plan.tp}"]
    lines += [f"  context_parallel_size: {plan.cp}"] * (plan.cp > 1)
    lines += [f"  expert_parallel_size: {plan.ep}"] * (plan.ep > 1)
    engine = _NANOTRON_SCHEDULES.get(plan.schedule)
    if engine and plan.stages_per_rank == 1:
        lines.append(f"  pp_engine: {engine}")
    elif plan.pp > 1:
        lines.append(f"  # nanotron has no schedule {plan.schedule}, only 1f1b and afab (gpipe)")
    lines += [
        f"  tp_mode: {'REDUCE_SCATTER' if plan.sequence_parallel else 'ALL_REDUCE'}",
        f"  recompute_layer: {str(plan.recompute == 'full').lower()}",
        "tokens:",
        f"  sequence_length: {model.sequence}",
        f"  micro_batch_size: {plan.microbatch_size}",
        f"  batch_accumulation_per_replica: {plan.microbatches}",
        "optimizer:",
        f"  zero_stage: {min(plan.zero, 1)}",
    ]
    if plan.zero > 1:
        lines.append(f"  # nanotron has no ZeRO {plan.zero}")
    if plan.recompute == "selective":
        lines.append("# nanotron has no selective recomputation")
    if len({*get_layers_per_stage(model, plan)}) > 1:
        lines.append("# nanotron divides the layers itself, by their cost")
    return lines
