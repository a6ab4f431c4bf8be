"""Infer the boundaries between torch's stages, for each shape of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from schedir.errors import ModelError, SchedirError, describe_exception
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.preserved_state import preserve_module
from schedir.runtime.boundaries.boundary import (
    Boundary,
    infer_requires_grad,
    require_output_tensors,
)
from schedir.runtime.boundaries.microbatch_boundaries import PerMicrobatchBoundary
from schedir.runtime.model_checks.stage_requirements import find_device
from schedir.transports.json_collectives import broadcast

StageBoundaries = dict[int, tuple[Boundary, ...]]  # by stage number, without the last stage

# Two tuples, for inputs and for keywords: the result of `collect_shapes` for each microbatch.
InputShapes = tuple[tuple[Any, ...], ...]


class ExecutorRequirements(NamedTuple):
    """The properties of a rank's step on which its executor depends.

    The properties on all ranks together identify the executor of a step.

    Attributes:
        has_backward: True if the step trains.
        shapes: The shapes of inputs and keywords.
        module_ids: The `id()` of the module of each stage.
        trained_ids: The `id()` of each parameter in the order of the modules, 0 for frozen ones.
        dtypes: The dtype of autocast, or None if autocast is off, and the dtypes of the parameters.
        name_prefixes: The prefix of parameter names in each module, which `torch.compile` adds.
        names_hash: The hash of the names of all parameters. The names change if another module
            wraps a layer. All ranks exchange this number instead of the names.
        num_failures: The number of steps that have failed.
    """

    has_backward: bool
    shapes: InputShapes
    module_ids: tuple[int, ...]
    trained_ids: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    name_prefixes: tuple[str, ...]
    names_hash: int
    num_failures: int


class BoundaryCache:
    """The boundaries that were inferred for the shapes of earlier microbatches.

    The boundaries of one kind of step are kept, for example of training steps. Another kind, other
    modules or other trained parameters replace them.

    Args:
        group: The process group of the pipeline.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        # True for training steps -> the requirements of each rank, without shapes.
        self._keys: dict[bool, tuple[ExecutorRequirements, ...]] = {}
        # The `id()` of a module in a key is unique only while the module is alive.
        self._modules: dict[bool, list[nn.Module]] = {}
        self._boundaries: dict[bool, dict[Any, StageBoundaries]] = {}

    def infer(
        self,
        requirements: Sequence[ExecutorRequirements],
        modules: Mapping[int, nn.Module],
        shape: PipelineShape,
        inputs: Sequence[tuple[Any, ...]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
    ) -> StageBoundaries | PerMicrobatchBoundary:
        """Return the boundaries of a step. All ranks of the group must call this.

        A forward of each stage runs for each shape of a microbatch that is not in the cache.

        Args:
            requirements: The result of `collect_requirements` on each rank.
            modules: The modules of this rank's stages, by stage number.
            shape: The shape of the program.
            inputs: The arguments of the first stage for each microbatch, on its rank.
            kwarg_mbs: The keywords of this rank's stages for each microbatch.

        Raises:
            ModelError: On all ranks, if a stage fails or returns anything but tensors.
        """
        trains = requirements[0].has_backward
        key = tuple(rank_facts._replace(shapes=()) for rank_facts in requirements)
        if self._keys.get(trains) != key:
            self._keys[trains] = key
            self._modules[trains] = [*modules.values()]
            self._boundaries[trains] = {}
        known = self._boundaries[trains]
        rows = list[StageBoundaries]()
        for mb in range(shape.microbatches):
            mb_shapes = tuple(
                shapes[mb : mb + 1] for facts in requirements for shapes in facts.shapes
            )
            if mb_shapes not in known:
                known[mb_shapes] = infer_stage_boundaries(
                    modules, shape, self._group, (*inputs[mb : mb + 1], ())[0], kwarg_mbs[mb], mb,
                    has_backward=trains,
                )  # fmt: skip
            rows.append(known[mb_shapes])
        is_varying = any(row != rows[0] for row in rows)
        return PerMicrobatchBoundary(rows) if is_varying else rows[0]


def infer_stage_boundaries(
    modules: Mapping[int, nn.Module],
    shape: PipelineShape,
    group: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mb: int,
    *,
    has_backward: bool,
) -> StageBoundaries:
    """Return the boundaries of each stage except the last, by stage number.

    The stages run one after the other. Each stage runs on zeros with the shapes of the previous
    stage's outputs. Afterwards buffers, gradients and random generators are restored. All ranks of
    the group must call this.

    Args:
        modules: The modules of this rank's stages, by stage number.
        shape: The shape of the program.
        group: The process group of the pipeline.
        args: The arguments of the first stage for a microbatch.
        kwargs: The keywords of this rank's stages for a microbatch.
        mb: The number of the microbatch, for an error.
        has_backward: True if the step has backwards.

    Raises:
        ModelError: On all ranks, if a stage fails or returns anything but tensors.
    """
    rank = dist.get_rank(group)
    boundaries = StageBoundaries()
    for s in range(shape.stages - 1):
        owner = int(shape.first_rank_per_stage[s])
        result: Any = None
        if rank == owner:
            try:
                inputs = boundaries[s - 1] if s else args
                result = _infer_outputs(modules[s], s, inputs, kwargs, has_backward=has_backward)
            except SchedirError as error:
                result = error.fact
            except Exception as error:
                result = f"stage {s} fails in microbatch {mb}: {describe_exception(error)}"
        stage_result = broadcast(result, owner, group, [Boundary])
        if isinstance(stage_result, str):
            raise ModelError(stage_result)
        boundaries[s] = stage_result
    return boundaries


def _infer_outputs(
    module: nn.Module,
    stage: int,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    has_backward: bool,
) -> tuple[Boundary, ...]:
    """Run a stage on one microbatch, and return the boundaries of its outputs."""
    device = find_device({stage: module})
    xs = tuple(_make_zeros(x, device) if isinstance(x, Boundary) else x for x in inputs)
    # The stage gets clones, because it may write to its inputs in place. Autograd refuses such
    # writes to leaf tensors.
    with preserve_module(module, device), torch.set_grad_enabled(has_backward):
        args, keywords = tree_map_only(Tensor, torch.clone, (xs, dict(kwargs)))
        y = module(*args, **keywords)
    ys = require_output_tensors(y, stage)
    return tuple(
        Boundary(tuple(y.shape), y.dtype, requires_grad)
        for y, requires_grad in zip(ys, infer_requires_grad(ys), strict=True)
    )


def _make_zeros(boundary: Boundary, device: torch.device) -> Tensor:
    return torch.zeros(boundary.shape, dtype=boundary.dtype, device=device).requires_grad_(
        bool(boundary.requires_grad)
    )
