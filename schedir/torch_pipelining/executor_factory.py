"""Build executors for the stages of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError, UsageError
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.pending_sends import PendingSends
from schedir.torch_pipelining.actions import find_split_stages
from schedir.torch_pipelining.boundary_inference import (
    BoundaryCache,
    ExecutorRequirements,
    InputShapes,
)
from schedir.torch_pipelining.fsdp_stages import has_dtensor_weight, list_parameter_groups
from schedir.torch_pipelining.stages import require_outermost_wrapper, require_reducible
from schedir.transports.gloo import GlooTransport
from schedir.transports.nccl import nccl_transport
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.shared_memory import SharedMemoryTransport


@dataclass
class CachedExecutor:
    """An executor, and the properties of the step for which it was built.

    Args:
        requirements: The properties of this rank's step.
        modules: The modules of the stages.
        executor: The executor.
        transport: The transport of the executor.
        receive_storages: The addresses of the storages in which messages are received.
    """

    requirements: ExecutorRequirements
    modules: tuple[nn.Module, ...]
    executor: Executor
    transport: ProcessTransport
    receive_storages: frozenset[int]

    def matches_step(self, has_backward: bool, shapes: InputShapes, stages: Sequence[Any]) -> bool:
        """Return whether the executor fits this rank's part of a step.

        Args:
            has_backward: True if the step trains.
            shapes: The shapes of inputs and keywords of the step.
            stages: The stages of this rank.
        """
        if (has_backward, shapes) != (self.requirements.has_backward, self.requirements.shapes):
            return False
        if any(
            stage.submod is not module for stage, module in zip(stages, self.modules, strict=True)
        ):
            return False
        guard = self.executor.runner.parameter_guard
        if _boundary_dtypes(stages[0].device, guard.parameters) != self.requirements.dtypes:
            return False
        try:
            guard.require_unchanged()
        except ModelError:
            return False
        return True

    def disconnect(self) -> None:
        """Drop unfinished transfers, and close the connections.

        Ranks that wait for this rank get an error.
        """
        state = self.executor.state
        state.service(PendingSends).works.clear()
        state.service(PendingReductions).works.clear()
        for stage in state.stages.values():
            stage.arrivals.clear()
        self.transport.disconnect()


def collect_requirements(
    stages: Sequence[Any],
    has_backward: bool,
    shapes: InputShapes,
    num_failures: int,
) -> ExecutorRequirements:
    """Return the properties of a rank's step on which its executor depends.

    Args:
        stages: The stages of this rank.
        has_backward: True if the step trains.
        shapes: The shapes of inputs and keywords.
        num_failures: The number of steps that have failed.

    Raises:
        UsageError: A stage is wrapped in a way that the executor does not support.
        ModelError: The gradients of a stage under DistributedDataParallel cannot be reduced.
    """
    for stage in stages:
        _require_executor_support(stage)
    modules = [stage.submod for stage in stages]
    named_parameters = [pair for module in modules for pair in module.named_parameters()]
    parameters = [*dict.fromkeys(p for _, p in named_parameters)]
    return ExecutorRequirements(
        has_backward,
        shapes,
        tuple(map(id, modules)),
        tuple(id(p) if p.requires_grad else 0 for p in parameters),
        _boundary_dtypes(stages[0].device, parameters),
        tuple(_parameter_prefix(module) for module in modules),
        hash(tuple(name for name, _ in named_parameters)),
        num_failures,
    )


def _boundary_dtypes(
    stage_device: Any, parameters: Iterable[Tensor]
) -> tuple[torch.dtype | None, ...]:
    """Return the autocast dtype and the parameter dtypes. These determine boundary dtypes."""
    device = torch.device(stage_device).type
    is_autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else None, *map(_get_dtype, parameters)


_get_dtype = attrgetter("dtype")


def make_executor(
    requirements: Sequence[ExecutorRequirements],
    stages: Sequence[Any],
    program: Program,
    group: Any,
    loss: Any,
    tied_weights: TiedWeights | None,
    boundary_cache: BoundaryCache,
    inputs: Sequence[tuple[Any, ...]],
    kwarg_mbs: Sequence[Mapping[str, Any]],
) -> CachedExecutor:
    """Return the executor of a rank for a step.

    All ranks of the group must call this. If a stage has split backwards, its layers are made
    splittable in place. A module that `torch.compile` compiled is not changed.

    Args:
        requirements: The result of `collect_requirements` on each rank.
        stages: The stages of this rank.
        program: The program of the step.
        group: The process group of the pipeline.
        loss: The loss function of the executor.
        tied_weights: The tied weights that the user gives, or None.
        boundary_cache: The boundaries that are known.
        inputs: The arguments of the first stage for each microbatch, on its rank.
        kwarg_mbs: The keywords of this rank's stages for each microbatch.
    """
    rank = dist.get_rank(group)
    has_backward = requirements[rank].has_backward
    modules = {stage.stage_index: _unwrap_ddp(stage.submod) for stage in stages}
    for s in find_split_stages(program) & modules.keys() if has_backward else ():
        if not hasattr(modules[s], "_orig_mod"):
            make_backward_splittable(modules[s])
    with torch.inference_mode(False):
        boundary = boundary_cache.infer(requirements, modules, program.shape, inputs, kwarg_mbs)
        transport = _make_transport(program, group, torch.device(stages[0].device))
        executor = Executor(
            program,
            rank,
            modules,
            transport,
            loss=loss,
            boundary=boundary,
            seed=None,
            tied_weights=_prefix_tied_names(tied_weights, requirements, program),
            gradients=GradientOptions(accumulate_grads=True),
            # `SharedWeights` has checked for equal weights that are not tied.
            execution=ExecutionOptions(record_timestamps=False, allow_identical_stages=True),
        )
    buffers = tree_leaves(executor.state.service(MessageBuffers).received)
    return CachedExecutor(
        requirements[rank],
        tuple(stage.submod for stage in stages),
        executor,
        transport,
        frozenset(buffer.untyped_storage().data_ptr() for buffer in buffers),
    )


def _prefix_tied_names(
    tied_weights: TiedWeights | None, requirements: Sequence[ExecutorRequirements], program: Program
) -> TiedWeights | None:
    """Return the tied weights with the names that parameters have in the modules that run."""
    if tied_weights is None:
        return None
    rank_facts = zip(program.shape.stages_on_rank, requirements, strict=True)
    prefixes = {
        s: prefix
        for stages, facts in rank_facts
        for s, prefix in zip(stages, facts.name_prefixes, strict=True)
    }
    return TiedWeights(
        tuple(
            tuple((s, prefixes[s] + name) for s, name in copies) for copies in tied_weights.weights
        )
    )


def _unwrap_ddp(module: nn.Module) -> nn.Module:
    """Return the module inside a DDP wrapper, or `module` if it is not wrapped."""
    return module.module if isinstance(module, Replicated) else module


def collect_shapes(arguments: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a microbatch's arguments.

    Args:
        arguments: A sequence of arguments, or a mapping of keywords.

    Returns:
        For each argument its index or name, and its shape and dtype. The entry of a tuple, a list
        or a mapping has those of its elements. For another value, the entry has the type instead of
        shape and dtype. For a bool or a string, the entry has the value instead.
    """
    named_arguments = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    return tuple(
        (name, x.shape, x.dtype) if isinstance(x, Tensor) else (name, _describe_non_tensor(x))
        for name, x in named_arguments
    )


def _describe_non_tensor(value: object) -> Any:
    """Return the type of a value, or the shapes of the elements of a tuple, list or mapping.

    For a bool or a string, return the value: stages may test it.
    """
    if isinstance(value, Mapping):
        value = {str(name): element for name, element in value.items()}
    if isinstance(value, tuple | list | dict):
        return type(value).__name__, *collect_shapes(value)
    return repr(value) if isinstance(value, bool | str) else type(value).__name__


def _parameter_prefix(module: nn.Module) -> str:
    """Return the prefix of a module's parameter names, which `torch.compile` adds."""
    return "_orig_mod." if hasattr(_unwrap_ddp(module), "_orig_mod") else ""


def _require_executor_support(stage: Any) -> None:
    """Refuse a stage whose FSDP or DDP wrapper has a feature that the executor does not support."""
    module = stage.submod
    if any(has_dtensor_weight(p) for g in list_parameter_groups(module) for p in g.fsdp_params):
        raise UsageError(
            f"stage {stage.stage_index} has tensor-parallel weights under fully_shard, but "
            "runtime='schedir' does not support them",
            hint="runtime='torch'",
            fields=["runtime"],
        )
    if isinstance(module, Replicated):
        require_reducible(stage)
    require_outermost_wrapper([stage])


def _make_transport(program: Program, group: Any, device: torch.device) -> ProcessTransport:
    """Return the fastest transport of a group. All processes of the group must call this."""
    if device.type == "cpu":
        transport_class = (
            SharedMemoryTransport
            if SharedMemoryTransport.supports(program, group)
            else GlooTransport
        )
        return transport_class(program, group=group)
    if dist.get_world_size(group) != dist.get_world_size():
        raise UsageError(
            "on GPUs, runtime='schedir' needs a group of all processes: this group has "
            f"{dist.get_world_size(group)} of {dist.get_world_size()}",
            hint="runtime='torch'",
            fields=["runtime"],
        )
    return nccl_transport(program, device)
