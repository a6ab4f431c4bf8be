"""Build and run the model chunks of a vee placement in Megatron.

In a vee with two chunks per rank, chunk 1 of rank r is the stage that Megatron's looped placement
gives to rank `ranks - 1 - r`. So rank r builds and runs chunk 1 as if it were that rank: Megatron's
functions for the pipeline rank return the rank of the looped placement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from megatron.core import parallel_state, utils
from megatron.core.models.common.language_module.language_module import LanguageModule

from schedir.errors import UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.megatron.delayed_weight_gradients import delay_setting_accepted
from schedir.megatron.run_requirements import require_untied_embeddings
from schedir.megatron.schedule_compilation import load_schedule
from schedir.schedules.schedule_algebra import (
    Schedule,
    apply_schedule_defaults,
    get_schedule_name,
)


def model_provider(
    build: Callable[..., Any], schedule: str | Schedule | Program
) -> Callable[..., Any]:
    """Return a model provider that builds the chunks of a schedule's placement.

    Pass the result to Megatron instead of `build`. For each chunk the result calls `build` once, as
    Megatron does. In a looped placement, `build` gets the arguments that Megatron passes. In a vee,
    `build` gets the `pre_process` and `post_process` of the chunk's stage, and the chunk's layers
    have the numbers of this stage's layers. While `build` runs, Megatron's TransformerConfig
    accepts `delay_wgrad_compute` for all models.

    Args:
        build: Megatron's model provider. It takes `pre_process`, `post_process` and, with several
            chunks per rank, `vp_stage`, and returns a model chunk.
        schedule: The schedule, as for `forward_backward`.

    Returns:
        A function with the parameters of `build`.

    Raises:
        UsageError: The schedule does not exist. Or chunk k of a rank is none of the stages `k *
            ranks` to `(k + 1) * ranks - 1`. Megatron can build only these stages as chunk k.
        ModelError: A model ties its embeddings, and the first and the last stage are on one rank.
    """
    source = load_schedule(schedule)

    @wraps(build)
    def build_chunk(pre_process: bool = True, post_process: bool = True, **arguments: Any) -> Any:
        chunk = arguments.get("vp_stage") or 0
        group = parallel_state.get_pipeline_model_parallel_group()
        shape = _find_shape(source, group.size())
        stage = int(shape.stages_on_rank[group.rank()][chunk])
        looped_rank = find_looped_rank(shape, group.rank(), chunk)
        if looped_rank != group.rank():
            pre_process, post_process = stage == 0, stage == shape.stages - 1
        name = source.name if isinstance(source, Program) else get_schedule_name(source)
        with (
            as_pipeline_rank(looped_rank, group),
            _tied_embeddings_checked(shape, name),
            delay_setting_accepted(),
        ):
            model = build(pre_process=pre_process, post_process=post_process, **arguments)
        if getattr(model, "share_embeddings_and_output_weights", False):
            require_untied_embeddings(shape, name)
        if looped_rank != group.rank() and hasattr(model, "sharded_state_dict"):
            model.sharded_state_dict = _ShardedStateDict(model, looped_rank)
        return model

    return build_chunk


def stage_contexts(
    shape: PipelineShape, rank: int, group: Any
) -> Callable[[int], AbstractContextManager[object]]:
    """Return a function that maps a stage to the context in which the stage must run.

    Args:
        shape: The shape of the program.
        rank: The pipeline rank of this process.
        group: The pipeline-parallel group.
    """
    looped_ranks = {
        stage: find_looped_rank(shape, rank, chunk)
        for chunk, stage in enumerate(shape.stages_on_rank[rank])
    }

    def enter_stage(stage: int) -> AbstractContextManager[object]:
        looped_rank = looped_ranks[stage]
        return nullcontext() if looped_rank == rank else as_pipeline_rank(looped_rank, group)

    return enter_stage


def find_looped_rank(shape: PipelineShape, rank: int, chunk: int) -> int:
    """Return the rank to which a looped placement gives the stage of a chunk.

    Args:
        shape: The shape of the program.
        rank: The pipeline rank that has the chunk.
        chunk: The number of the chunk on this rank.

    Raises:
        UsageError: A looped placement gives the stage to another chunk.
    """
    stage = int(shape.stages_on_rank[rank][chunk])
    looped_chunk, looped_rank = divmod(stage, shape.ranks)
    if looped_chunk != chunk:
        raise UsageError(
            f"with placement {shape.placement!r}, stage {stage} is chunk {chunk} of rank {rank}, "
            f"but Megatron builds the layers of this stage only as chunk {looped_chunk} of a rank",
            hint='use the placement "loop" or "vee"',
            fields=["placement"],
        )
    return looped_rank


@contextmanager
def as_pipeline_rank(rank: int, group: Any) -> Iterator[None]:
    """Let Megatron's functions for the pipeline rank of this process return another rank.

    Args:
        rank: The pipeline rank that the functions return in this context.
        group: The pipeline-parallel group.
    """
    own_rank, get_group_rank = parallel_state.get_pipeline_model_parallel_rank, utils.get_pg_rank

    def return_rank() -> int:
        return rank

    def return_group_rank(queried_group: Any = None) -> int:
        return rank if queried_group is group else int(get_group_rank(queried_group))

    replacements = {own_rank: return_rank, get_group_rank: return_group_rank}
    module_count = len(sys.modules)
    patches = [
        (module, name, value)
        for module, name in _find_names(own_rank, get_group_rank, module_count)
        if (value := getattr(module, name)) is own_rank or value is get_group_rank
    ]
    for module, name, value in patches:
        setattr(module, name, replacements[value])
    try:
        yield
    finally:
        for module, name, value in patches:
            setattr(module, name, value)
        # Modules that were imported in the context have the replacements.
        if len(sys.modules) != module_count:
            originals = {new: old for old, new in replacements.items()}
            for module, name in _scan_modules(return_rank, return_group_rank):
                setattr(module, name, originals[getattr(module, name)])


@lru_cache(maxsize=1)
def _find_names(first: object, second: object, module_count: int) -> list[tuple[Any, str]]:
    """Return the result of `_scan_modules`, cached until another module is imported."""
    return _scan_modules(first, second)


def _scan_modules(first: object, second: object) -> list[tuple[Any, str]]:
    """Return all names in Megatron's modules that refer to one of two functions."""
    return [
        (module, name)
        for module_name, module in [*sys.modules.items()]
        if module_name.startswith("megatron.")
        for name, value in [*vars(module).items()]
        if value is first or value is second
    ]


@dataclass
class _ShardedStateDict:
    """Replaces a chunk's method `sharded_state_dict`, and calls it as rank `looped_rank`.

    Megatron numbers the layers of a chunk from the layer offset of the pipeline rank.
    """

    model: Any
    looped_rank: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        with as_pipeline_rank(self.looped_rank, group):
            return type(self.model).sharded_state_dict(self.model, *args, **kwargs)


@contextmanager
def _tied_embeddings_checked(shape: PipelineShape, schedule: str) -> Iterator[None]:
    """Refuse tied embeddings in a vee before Megatron waits for a rank without an embedding."""
    set_up = LanguageModule.setup_embeddings_and_output_layer

    def check_and_set_up(model: Any) -> None:
        if model.share_embeddings_and_output_weights:
            require_untied_embeddings(shape, schedule)
        set_up(model)

    LanguageModule.setup_embeddings_and_output_layer = check_and_set_up
    try:
        yield
    finally:
        LanguageModule.setup_embeddings_and_output_layer = set_up


def _find_shape(source: Schedule | Program, ranks: int) -> PipelineShape:
    """Return the shape that a schedule has on Megatron's ranks and chunks."""
    if isinstance(source, Program):
        return source.shape
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return apply_schedule_defaults(source, PipelineShape(ranks, ranks, stages_per_rank=chunks))
