"""Format a plan as options of Megatron-LM, NeMo (Megatron Bridge), torchtitan and nanotron."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from schedir.planner.parallel_plan import SEARCHED_SCHEDULE, ParallelPlan
from schedir.planner.plan_compilation import build_pipeline_shape
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.transformer_spec import TransformerSpec

# The options of a line: option of Megatron-LM -> value. True is an option without a value. Options
# with the value None or False are not printed.
_MegatronLine = dict[str, int | float | str | bool | None]

_MAX_WIDTH: Final = 96  # `schedir plan` prints lines of up to 100 characters.
# `_format_layout` writes this many or more consecutive equal stages as "(...)*n".
_MIN_FOLDED_STAGES: Final = 3
# Names of schedules in torch.distributed.pipelining and in nanotron.
_TORCH_SCHEDULES: Final = {
    "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS", "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}  # fmt: skip
_NANOTRON_SCHEDULES: Final = {"gpipe": "afab", "one_f_one_b": "1f1b"}
_MEGATRON_SCHEDULES: Final = ("one_f_one_b", "interleaved")
# Options of Megatron-LM -> fields of Megatron Bridge.
_BRIDGE_FIELDS: Final = {
    "tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "context-parallel-size": "model.context_parallel_size",
    "expert-model-parallel-size": "model.expert_model_parallel_size",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "sequence-parallel": "model.sequence_parallel",
    "use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "overlap-param-gather": "ddp.overlap_param_gather",
    "use-megatron-fsdp": "dist.use_megatron_fsdp",
    "data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "ckpt-format": "checkpoint.ckpt_format",
    "optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
    "use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "attention-backend": "model.attention_backend",
    "recompute-granularity": "model.recompute_granularity",
    "recompute-method": "model.recompute_method",
    "recompute-num-layers": "model.recompute_num_layers",
}
# Stacks -> the precision in Megatron-LM, and the precision in Megatron Bridge.
_PRECISIONS: Final = {
    "megatron-2021": ("--fp16", "mixed_precision=fp16_mixed"),
    "megatron-fp8": (
        "--bf16 --fp8-format hybrid", "mixed_precision=bf16_with_fp8_delayed_scaling_mixed",
    ),
    "megatron-fp4": ("--bf16 --fp4-format e2m1", "mixed_precision=bf16_with_nvfp4_mixed"),
}  # fmt: skip
_DEFAULT_PRECISION: Final = ("--bf16", "mixed_precision=bf16_mixed")
_SHARDING_STRATEGIES: Final = {2: "optim_grads", 3: "optim_grads_params"}


def launcher_options(
    model: TransformerSpec, plan: ParallelPlan, *, stack: str = ""
) -> dict[str, str]:
    r"""Return the options with which other trainers run a plan.

    The options are those of the plan: parallel degrees, batch, schedule, precision, recomputation,
    ZeRO and the layers of each stage. They do not describe the model. A line that begins with #
    describes a requirement, another version, or a part of the plan that the trainer cannot run.

    nanotron divides the layers itself. All other trainers have an option for each division.

    Args:
        model: The model.
        plan: The plan.
        stack: The name of the training software for which the plan was made, or "". The options of
            Megatron-LM for "megatron-fp8" and "megatron-fp4" are those of training in FP8 and FP4.

    Returns:
        The options as text, under the keys "megatron" (arguments of Megatron-LM), "nemo" (overrides
        of Megatron Bridge), "torchtitan" (its configuration) and "nanotron" (its configuration).

    Raises:
        UsageError: See `get_layers_per_stage` and `build_pipeline_shape`.
        ShapeError: A pipeline cannot have this shape.

    References:
        Megatron-LM, from megatron-core 0.16: megatron/training/arguments.py,
        megatron/core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py; user
        guide, "Custom Pipeline Model Parallel Layout".
        Megatron Bridge 0.7: its configuration classes have the fields of Megatron-LM.
        torchtitan 0.2.2: torchtitan/config/job_config.py and distributed/pipeline_parallel.py.
        torchtitan 0.3.0: torchtitan/config/configs.py.
        nanotron 0.4 (main): src/nanotron/config/parallelism_config.py and config.py.

    Example:
        >>> from schedir.planner import ParallelPlan, TransformerSpec, launcher_options
        >>> model = TransformerSpec(layers=7, hidden=64, heads=4, vocab=256, sequence=64)
        >>> plan = ParallelPlan(pp=3, microbatches=6, layers_per_stage=(2, 3, 2), attention="flash")
        >>> print(launcher_options(model, plan)["megatron"])
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3
        --micro-batch-size 1 --global-batch-size 6
        --pipeline-model-parallel-layout "Et*2|t*3|t*2L"
        --attention-backend flash
        --bf16
    """
    parts = get_layers_per_stage(model, plan)
    # The program of a searched schedule is not a part of the plan.
    placement = "" if plan.schedule == SEARCHED_SCHEDULE else build_pipeline_shape(plan).placement
    has_stage_options = placement in ("loop", "vee")
    lines = _list_megatron_lines(model, plan, parts if has_stage_options else ())
    megatron_precision, bridge_precision = _PRECISIONS.get(stack, _DEFAULT_PRECISION)
    comments = _list_megatron_comments(model, plan, is_vee=placement == "vee")
    precision = stack.removeprefix("megatron-").upper()
    is_low = precision in ("FP8", "FP4")
    differences = [f"# the plan is in {precision}, and these options are in 16 bits"] * is_low
    return {
        "megatron": "\n".join([*_join_arguments(lines), megatron_precision, *comments]),
        "nemo": "\n".join([*_join_overrides(lines), bridge_precision, *comments]),
        "torchtitan": "\n".join(
            [
                *_format_torchtitan(model, plan, parts, is_supported=has_stage_options),
                *differences,
            ]
        ),
        "nanotron": "\n".join([*_format_nanotron(model, plan), *differences]),
    }


# ---------------------------------------------------------------- Megatron-LM and Megatron Bridge


def _list_megatron_lines(
    model: TransformerSpec, plan: ParallelPlan, layers_per_stage: tuple[int, ...]
) -> list[_MegatronLine]:
    """Return the lines of options, without options that are not set and without empty lines.

    The options of stages are left out if `layers_per_stage` is empty.
    """
    is_sharded, on_host = plan.zero > 1, plan.optimizer_placement == "host"
    is_full = plan.recompute == "full"
    # On a rank with several stages, the reduction of a stage overlaps with later backwards.
    is_overlapped = plan.dp * plan.cp > 1 and plan.pp > 1 and plan.stages_per_rank > 1
    lines: list[_MegatronLine] = [
        {
            "tensor-model-parallel-size": plan.tp,
            "pipeline-model-parallel-size": plan.pp,
            "context-parallel-size": plan.cp if plan.cp > 1 else None,
            "expert-model-parallel-size": plan.ep if plan.ep > 1 else None,
        },
        {"micro-batch-size": plan.microbatch_size, "global-batch-size": plan.batch},
        _get_stage_options(plan, layers_per_stage),
        {
            "sequence-parallel": plan.tp > 1 and (plan.sequence_parallel or model.experts > 1),
            "use-tp-pp-dp-mapping": _has_tp_pp_dp_order(plan) and plan.ep == 1 and not is_sharded,
            "use-distributed-optimizer": plan.zero > 0 or on_host,
            "overlap-grad-reduce": is_overlapped,
            "overlap-param-gather": is_overlapped and plan.zero > 0,
        },
        {
            "use-megatron-fsdp": is_sharded,
            "data-parallel-sharding-strategy": _SHARDING_STRATEGIES.get(plan.zero),
            "ckpt-format": "fsdp_dtensor" if is_sharded else None,
        },
        {
            "optimizer-cpu-offload": on_host,
            "optimizer-offload-fraction": 1.0 if on_host else None,
            "use-precision-aware-optimizer": on_host,
        },
        {
            "attention-backend": "flash" if plan.attention == "flash" else "unfused",
            "recompute-granularity": plan.recompute if plan.recompute != "none" else None,
            "recompute-method": "uniform" if is_full else None,
            "recompute-num-layers": 1 if is_full else None,
        },
    ]
    set_lines: list[_MegatronLine] = [
        {option: value for option, value in line.items() if value not in (None, False)}
        for line in lines
    ]
    return [line for line in set_lines if line]


def _has_tp_pp_dp_order(plan: ParallelPlan) -> bool:
    """Return whether a plan numbers its ranks differently from Megatron-LM's default order."""
    return plan.rank_order == "tp-pp-dp" and plan.pp > 1 and plan.dp > 1


def _get_stage_options(plan: ParallelPlan, layers_per_stage: tuple[int, ...]) -> _MegatronLine:
    """Return the options for the number of stages of a rank and for the layers of each stage."""
    if plan.pp == 1 or not layers_per_stage:
        return {}
    if len({*layers_per_stage}) > 1:
        return {"pipeline-model-parallel-layout": _format_layout(layers_per_stage)}
    v = plan.stages_per_rank
    return {"num-virtual-stages-per-pipeline-rank": v if v > 1 else None}


def _join_arguments(lines: list[_MegatronLine]) -> Iterator[str]:
    for line in lines:
        yield from _wrap(
            f"--{option}" + ("" if value is True else f" {_quote(value)}")
            for option, value in line.items()
        )


def _join_overrides(lines: list[_MegatronLine]) -> Iterator[str]:
    for line in lines:
        pairs = (
            f"{_BRIDGE_FIELDS[option]}={'true' if value is True else _quote(value)}"
            for option, value in line.items()
        )
        # Hydra parses the value of a layout with its quotation marks, so the shell must keep them.
        yield from _wrap(f"'{pair}'" if '"' in pair else pair for pair in pairs)


def _wrap(words: Iterable[str]) -> list[str]:
    """Join words in lines of a limited width. An option and its value are one word."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _MAX_WIDTH:
            lines.append("")
        lines[-1] += " " * bool(lines[-1]) + word
    return lines


def _quote(value: float | str | None) -> str:
    """Return a value as text, in quotation marks if it has characters with a meaning in a shell."""
    return f'"{value}"' if "|" in str(value) else str(value)


def _list_megatron_comments(
    model: TransformerSpec, plan: ParallelPlan, *, is_vee: bool
) -> list[str]:
    """Return comments: requirements, and parts of a plan for which Megatron-LM has no option."""
    is_sharded = plan.zero > 1
    schedule = _name_schedule(plan)
    table = {
        f"Megatron-LM has no schedule {plan.schedule}: schedir.megatron.forward_backward("
        f"{schedule}) runs it": plan.pp > 1 and plan.schedule not in _MEGATRON_SCHEDULES,
        f"schedir.megatron.model_provider(..., {schedule}) builds its stages": is_vee,
        # With FSDP, each layer is a unit that is gathered, like the stages of such a plan.
        "Megatron-LM does not divide the layers of one pipeline rank into stages": plan.pp == 1
        and plan.stages_per_rank > 1
        and not is_sharded,
        "tp and cp need the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before "
        "Blackwell": max(plan.tp, plan.cp) > 1 and not is_sharded,
        f"these options are ZeRO {plan.zero}, and need CUDA_DEVICE_MAX_CONNECTIONS to be unset or "
        "above 1": is_sharded,
        "the plan has no sequence parallelism, but Megatron-LM requires it with experts and tp": (
            plan.tp > 1 and model.experts > 1 and not plan.sequence_parallel
        ),
        f"Megatron-LM does not support the rank order {plan.rank_order} of the plan with ep or "
        "FSDP": _has_tp_pp_dp_order(plan) and (plan.ep > 1 or is_sharded),
        f"Megatron-LM requires sequences of a multiple of {2 * plan.cp} tokens (2 cp)": plan.cp > 1
        and model.sequence % (2 * plan.cp) > 0,
        "context parallelism needs flash attention in Megatron-LM": plan.cp > 1
        and plan.attention != "flash",
        "Megatron-LM offloads only the distributed optimizer: this is ZeRO 1": plan.zero == 0
        and plan.optimizer_placement == "host"
        and plan.dp * plan.cp > 1,
        "no option offloads activations as this plan does": plan.offload != "none",
    }
    return [f"# {text}" for text, is_needed in table.items() if is_needed]


def _name_schedule(plan: ParallelPlan) -> str:
    """Return the name of a schedule, or of a file that `schedir plan -o` writes, as an argument."""
    return '"best.sched"' if plan.schedule == SEARCHED_SCHEDULE else f'"{plan.schedule}"'


def _format_layout(layers_per_stage: tuple[int, ...]) -> str:
    """Return the value of Megatron-LM's layout option.

    In this value, E is the embedding, t is a layer, and L is the head with the loss.
    """
    inner = ["t" * n if n < 2 else f"t*{n}" for n in layers_per_stage]
    inner[0], inner[-1] = "E" + inner[0], inner[-1] + "L"
    text = ""
    for layer_count, equal_stages in groupby(inner[:-1]):
        n = len([*equal_stages])
        text += (
            f"({layer_count}|)*{n}"
            if n >= _MIN_FOLDED_STAGES and layer_count
            else f"{layer_count}|" * n
        )
    return text + inner[-1]


# ---------------------------------------------------------------- torchtitan


def _format_torchtitan(
    model: TransformerSpec,
    plan: ParallelPlan,
    layers_per_stage: tuple[int, ...],
    *,
    is_supported: bool,
) -> list[str]:
    has_other_degrees = max(plan.pp, plan.tp, plan.cp, plan.ep) > 1
    is_sharded = plan.dp > 1 and (plan.zero > 0 or has_other_degrees)
    replicas, shards = (1, plan.dp) if is_sharded else (plan.dp, 1)
    lines = [
        '# for torchtitan 0.2.2; 0.3.0 has the same fields in Python, and "lm_head" for "output"',
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicas}",
        f"data_parallel_shard_degree = {shards}",
    ]
    # torchtitan also shards over context-parallel ranks.
    if is_sharded or plan.cp > 1:
        lines.append(f'fsdp_reshard_after_forward = "{"always" if plan.zero == 3 else "never"}"')
        if plan.zero < 2:
            lines.append(f"# torchtitan has no ZeRO {plan.zero} with these degrees: this is ZeRO 2")
    for name, degree in (("tensor", plan.tp), ("context", plan.cp), ("expert", plan.ep)):
        lines += [f"{name}_parallel_degree = {degree}"] * (degree > 1)
    if plan.ep > 1 and plan.tp > 1:
        lines += [
            f"expert_tensor_parallel_degree = {plan.tp}",
            f"# 0.3.0 has no such field: expert_parallel_degree = {plan.ep * plan.tp} in its place",
        ]
    if plan.pp > 1:
        lines += _format_torchtitan_pipeline(plan, layers_per_stage, is_supported=is_supported)
    # Without a pipeline, torchtitan accumulates the gradients of local batches.
    local_microbatches = plan.microbatches if plan.pp > 1 else 1
    lines += [
        "[training]",
        f"seq_len = {model.sequence}",
        f"local_batch_size = {plan.microbatch_size * local_microbatches}",
        f"global_batch_size = {plan.batch}",
        "[activation_checkpoint]",
        f'mode = "{plan.recompute}"',
        "# in 0.3.0: activation_checkpoint = "
        + {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}[
            plan.recompute
        ],
    ]
    if plan.recompute == "selective":
        lines.append("# torchtitan recomputes other operations of a layer than this plan")
    if plan.tp > 1 and not plan.sequence_parallel:
        lines.append("# torchtitan uses sequence parallelism with tensor parallelism")
    return [*lines, *_list_differences("torchtitan", plan)]


def _list_differences(trainer: str, plan: ParallelPlan) -> Iterator[str]:
    """Yield comments about parts of a plan that torchtitan and nanotron run in another way."""
    if _has_tp_pp_dp_order(plan):
        yield f"# {trainer} numbers ranks in the order tp-dp-pp, and the plan tp-pp-dp"
    if plan.attention != "flash":
        yield f"# {trainer} uses flash attention, and the plan {plan.attention}"
    if plan.has_offload:
        yield f"# {trainer} does not offload as this plan does"


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
    names[-1] += ["norm", "output"]
    return [*options, f"module_fqns_per_model_part = {json.dumps(names)}"]


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
    if plan.ep > 1:
        lines.append("  # nanotron has no expert parallelism among replicas")
    engine = _NANOTRON_SCHEDULES.get(plan.schedule)
    if engine and plan.stages_per_rank == 1:
        lines.append(f"  pp_engine: {engine}")
    elif plan.pp > 1:
        lines.append(f"  # nanotron has no schedule {plan.schedule}, only 1f1b and afab (gpipe)")
    lines.append(f"  tp_mode: {'REDUCE_SCATTER' if plan.sequence_parallel else 'ALL_REDUCE'}")
    # nanotron overlaps the collectives with products only in this mode.
    lines += ["  tp_linear_async_communication: true"] * plan.sequence_parallel
    lines += [
        f"  recompute_layer: {str(plan.recompute == 'full').lower()}",
        "tokens:",
        f"  sequence_length: {model.sequence}",
        f"  micro_batch_size: {plan.microbatch_size}",
        f"  batch_accumulation_per_replica: {plan.microbatches}",
        "optimizer:",
        f"  zero_stage: {min(plan.zero, 1)}",
        "  accumulate_grad_in_fp32: true",
    ]
    if plan.zero > 1:
        lines.append(f"  # nanotron has no ZeRO {plan.zero}")
    if plan.recompute == "selective":
        lines.append("# nanotron has no selective recomputation")
    if len({*get_layers_per_stage(model, plan)}) > 1:
        lines.append("# nanotron divides the layers itself, by their cost")
    if plan.tp > model.kv_heads:
        lines.append(f"# nanotron requires tp to be at most the {model.kv_heads} heads of keys")
    return [*lines, *_list_differences("nanotron", plan)]
