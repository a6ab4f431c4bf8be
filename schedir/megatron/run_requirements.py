"""Refuse the settings and the models of Megatron that schedir's programs cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from megatron.core.utils import get_attr_wrapped_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from schedir.errors import ExecutionError, ModelError, UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape


def _is_more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _uses_cuda_graphs(value: object) -> bool:
    return value not in (None, False, "none")


# Setting of Megatron's TransformerConfig -> the test for an unsupported value, and the reason.
_UNSUPPORTED_SETTINGS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "context_parallel_size": (_is_more_than_one, "context parallelism was not verified"),
    "hybrid_context_parallel": (bool, "context parallelism was not verified"),
    "expert_model_parallel_size": (_is_more_than_one, "expert parallelism was not verified"),
    "overlap_moe_expert_parallel_comm": (bool, "Megatron runs it in its own schedule only"),
    "mtp_num_layers": (bool, "multi-token prediction was not verified"),
    "enable_autocast": (bool, "split backwards under autocast were not verified"),
    "num_microbatches_with_partial_activation_checkpoints": (
        bool, "it depends on the warm-up of Megatron's own schedule",
    ),
    "fine_grained_activation_offloading": (bool, "Megatron runs it in its own schedule only"),
    "enable_cuda_graph": (bool, "CUDA graphs record Megatron's own schedule"),
    "external_cuda_graph": (bool, "CUDA graphs record Megatron's own schedule"),
    "cuda_graph_impl": (_uses_cuda_graphs, "CUDA graphs record Megatron's own schedule"),
}  # fmt: skip


def require_supported_settings(chunks: Sequence[Any], config: Any) -> None:
    """Refuse the settings of a run that schedir's programs do not support.

    Args:
        chunks: The model chunks of this rank.
        config: Megatron's TransformerConfig of the chunks.

    Raises:
        UsageError: A setting or a wrapper of the model is not supported. The error names it.
    """
    for name, (is_unsupported, reason) in _UNSUPPORTED_SETTINGS.items():
        value = getattr(config, name, None)
        if is_unsupported(value):
            raise UsageError(
                f"{name}={value!r} is not supported: {reason}",
                hint=f"unset {name}, or use Megatron's get_forward_backward_func()",
                fields=[name],
            )
    for chunk in chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if getattr(ddp_config, "use_megatron_fsdp", False):
            raise UsageError(
                "use_megatron_fsdp=True is not supported: it reduces gradients in its own hooks",
                hint="use Megatron's DistributedDataParallel, with use_distributed_optimizer=True "
                "to shard the optimizer states",
                fields=["use_megatron_fsdp"],
            )
        instances = getattr(ddp_config, "num_distributed_optimizer_instances", 1)
        if instances > 1 and getattr(ddp_config, "overlap_grad_reduce", False):
            raise UsageError(
                f"num_distributed_optimizer_instances={instances} with overlap_grad_reduce is not "
                "supported: Megatron would reduce the gradients twice",
                hint="unset overlap_grad_reduce, or use one instance",
                fields=["num_distributed_optimizer_instances", "overlap_grad_reduce"],
            )
        for module in chunk.modules() if isinstance(chunk, nn.Module) else ():
            if isinstance(module, DistributedDataParallel | FSDPModule):
                wrapper = "fully_shard" if isinstance(module, FSDPModule) else "torch's DDP"
                raise UsageError(
                    f"{wrapper} is not supported: it reduces gradients in its own hooks",
                    hint="use megatron.core.distributed.DistributedDataParallel",
                    fields=["model"],
                )


def require_call_arguments(chunks: int, iterators: int, has_shapes_fn: bool) -> None:
    """Refuse arguments of a call that do not fit the model, or are not supported.

    Args:
        chunks: The number of model chunks of this rank.
        iterators: The number of data iterators.
        has_shapes_fn: True if `adjust_tensor_shapes_fn` is given.

    Raises:
        UsageError: The number of data iterators is not the number of chunks, or
            `adjust_tensor_shapes_fn` is given.
    """
    if iterators != chunks:
        raise UsageError(
            f"{chunks} model chunks need {chunks} data iterators, but data_iterator has "
            f"{iterators}",
            hint="give a list with one data iterator for each model chunk",
            fields=["data_iterator"],
        )
    if has_shapes_fn:
        raise UsageError(
            "adjust_tensor_shapes_fn is not supported: schedir needs equal boundary shapes",
            fields=["adjust_tensor_shapes_fn"],
        )


def require_finished_reductions(chunks: Sequence[Any]) -> None:
    """Refuse a step while a reduction of gradients of an earlier step is in progress.

    Args:
        chunks: The model chunks of this rank.

    Raises:
        ExecutionError: A reduction was not finished. Megatron would not start another reduction.
    """
    for chunk in chunks:
        groups = getattr(chunk, "bucket_groups", []) + getattr(
            chunk, "expert_parallel_bucket_groups", []
        )
        if any(group.grad_reduce_handle is not None for group in groups):
            raise ExecutionError(
                "the reduction of gradients of an earlier step has not ended",
                hint="the earlier step failed: restart the processes from a checkpoint",
            )


class ChunkLayout(NamedTuple):
    """The part of the model that a chunk contains.

    Attributes:
        pre_process: True if the chunk has the embedding. None if its model has no such attribute.
        post_process: True if the chunk has the output layer. None if its model has no such
            attribute.
        ties_embeddings: True if the embedding and the output layer share their weight.
        layer_numbers: The numbers of the chunk's transformer layers in the full model, from 1.
    """

    pre_process: bool | None
    post_process: bool | None
    ties_embeddings: bool
    layer_numbers: list[int]


def read_layout(chunk: Any) -> ChunkLayout:
    """Return the part of the model that a chunk contains.

    Args:
        chunk: A model chunk, with or without its wrappers.
    """
    decoder = _read(chunk, "decoder")
    return ChunkLayout(
        _read(chunk, "pre_process"),
        _read(chunk, "post_process"),
        bool(_read(chunk, "share_embeddings_and_output_weights")),
        [int(layer.layer_number) for layer in getattr(decoder, "layers", ())],
    )


def _read(chunk: Any, name: str) -> Any:
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:  # no model inside the wrappers has the attribute
        return None


def require_layout(
    shape: PipelineShape, layouts_per_rank: Sequence[Sequence[ChunkLayout]], schedule: str
) -> None:
    """Refuse model chunks that do not match the stages of the program.

    Args:
        shape: The shape of the program. Chunk k of a rank is the rank's k-th stage.
        layouts_per_rank: The layouts of the chunks, for each pipeline rank.
        schedule: The name of the schedule, for errors.

    Raises:
        ModelError: A chunk does not match its stage. Or the embeddings are tied, and the first and
            the last stage are on one rank.
    """
    layout_by_stage = {
        stage: layout
        for stages, layouts in zip(shape.stages_on_rank, layouts_per_rank, strict=True)
        for stage, layout in zip(stages, layouts, strict=True)
    }
    last_stage = shape.stages - 1
    build_hint = (
        "build the model with schedir.megatron.model_provider(build, schedule), which gives each "
        "chunk the layers of its stage"
    )
    next_layer = 1
    for stage in range(shape.stages):
        layout, rank = layout_by_stage[stage], int(shape.first_rank_per_stage[stage])
        chunk = shape.stages_on_rank[rank].index(stage)
        chunk_text = f"model chunk {chunk} of pipeline rank {rank} is stage {stage} of {schedule}"
        for name, value, expected_value in (
            ("pre_process", layout.pre_process, stage == 0),
            ("post_process", layout.post_process, stage == last_stage),
        ):
            if value is not None and bool(value) != expected_value:
                raise ModelError(
                    f"{chunk_text}, so {name} must be {expected_value}, but it is {bool(value)}",
                    program=schedule,
                    hint=build_hint,
                )
        if layout.layer_numbers:
            expected = [*range(next_layer, next_layer + len(layout.layer_numbers))]
            if layout.layer_numbers != expected:
                raise ModelError(
                    f"{chunk_text}, so its layers must be {expected}, but they are "
                    f"{layout.layer_numbers}",
                    program=schedule,
                    hint=build_hint,
                )
            next_layer = expected[-1] + 1
    if layout_by_stage[0].ties_embeddings:
        require_untied_embeddings(shape, schedule)


def require_untied_embeddings(shape: PipelineShape, schedule: str) -> None:
    """Refuse tied embeddings if the first and the last stage are on one rank.

    Args:
        shape: The shape of the program.
        schedule: The name of the schedule, for the error.

    Raises:
        ModelError: There are several ranks, and one rank has the first and the last stage.
    """
    first_rank, last_rank = (int(shape.first_rank_per_stage[stage]) for stage in (0, -1))
    if first_rank == last_rank and shape.ranks > 1:
        raise ModelError(
            f"{schedule} puts the embedding and the output layer on rank {first_rank}, but "
            "Megatron sums the gradients of tied embeddings over the first and the last rank",
            hint="share_embeddings_and_output_weights=False "
            "(--untie-embeddings-and-output-weights)",
            fields=["share_embeddings_and_output_weights"],
        )
