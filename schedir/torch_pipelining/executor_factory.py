"""Build executors for the stages of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError, SchedirError, UsageError, in_words
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime.autograd.module_buffers import restored
from schedir.runtime.autograd.module_state import attributes_and_gradients_restored
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary, graded, passed_on
from schedir.runtime.executor import Executor
from schedir.runtime.rank_resources import device_of
from schedir.torch_pipelining.actions import splits
from schedir.torch_pipelining.stages import require_reducible, require_wrapped_whole
from schedir.transports.gloo import GlooTransport, ProcessTransport
from schedir.transports.json_collectives import broadcast
from schedir.transports.nccl import nccl_transport
from schedir.transports.shared_memory import SharedMemoryTransport

# ---------------------------------------------------------------- shapes of boundaries

# Run one microbatch through torch's stages, and note the tensors that pass between them.


def boundaries(
    modules: Mapping[int, nn.Module],
    shape: PipelineShape,
    group: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    trains: bool,
) -> dict[int, tuple[Boundary, ...]]:
    """Return the boundaries of each stage but the last.

    The stages run one after the other, each on zeros of the shapes that the one before returned.
    Buffers, gradients and generators are restored.  All ranks of the group must call this.

    Args:
        modules: This rank's stages.
        shape: The shape of the program.
        group: The process group of the pipeline.
        args: The arguments of the first stage for a microbatch.
        kwargs: The keywords of this rank's stages for a microbatch.
        trains: Whether the step has backwards.

    Raises:
        ModelError: In all ranks, if a stage fails or returns anything but tensors.
    """
    rank, found = dist.get_rank(group), dict[int, tuple[Boundary, ...]]()
    for s in range(shape.stages - 1):
        owner = int(shape.rank_of[s])
        told: Any = None
        if rank == owner:
            try:
                given = found[s - 1] if s else args
                told = _given(modules[s], s, given, kwargs, trains=trains)
            except SchedirError as error:
                told = error.fact
            except Exception as error:
                told = f"stage {s} fails in the first microbatch: {in_words(error)}"
        said = broadcast(told, owner, group, [Boundary])
        if isinstance(said, str):
            raise ModelError(said)
        found[s] = said
    return found


def _given(
    module: nn.Module, s: int, given: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool
) -> tuple[Boundary, ...]:
    """Run a stage on one microbatch, and return the boundaries of its outputs."""
    device = device_of({s: module})
    xs = tuple(_zeros(x, device) if isinstance(x, Boundary) else x for x in given)
    # Copies, and no leaves: a module may write to what it is given.
    with (
        restored(module, device),
        attributes_and_gradients_restored(module),
        torch.set_grad_enabled(trains),
    ):
        args, named = tree_map_only(Tensor, torch.clone, (xs, dict(kwargs)))
        y = module(*args, **named)
    ys = passed_on(y, s)
    return tuple(
        Boundary(tuple(y.shape), y.dtype, has) for y, has in zip(ys, graded(ys), strict=True)
    )


def _zeros(one: Boundary, device: torch.device) -> Tensor:
    return torch.zeros(one.shape, dtype=one.dtype, device=device).requires_grad_(bool(one.grad))


# ---------------------------------------------------------------- executors


Shapes = tuple[tuple[Any, ...], ...]  # of inputs and keywords, by microbatch


class ExecutorRequirements(NamedTuple):
    """What a rank's executor is made for; of all ranks, it says which executor runs a step."""

    trains: bool
    shapes: Shapes
    modules: tuple[int, ...]
    trained: tuple[int, ...]  # of their parameters, in order: which it is, 0 of a frozen one
    types: tuple[torch.dtype | None, ...]  # that of autocast, if it is on, and of the parameters
    prefixes: tuple[str, ...]  # of their names, as torch.compile has them
    failures: int


@dataclass
class CachedExecutor:
    """An executor, and what it was made for."""

    facts: ExecutorRequirements
    modules: tuple[nn.Module, ...]
    executor: Executor
    transport: ProcessTransport
    received: frozenset[int]  # where what is received lies

    def fits(self, trains: bool, shapes: Shapes, stages: Sequence[Any]) -> bool:
        """Whether it is for this step, as far as this rank can see."""
        if (trains, shapes) != (self.facts.trains, self.facts.shapes):
            return False
        if any(one.submod is not other for one, other in zip(stages, self.modules, strict=True)):
            return False
        unchanged = self.executor.held.unchanged
        if _types(stages[0].device, unchanged.parameters) != self.facts.types:
            return False
        try:
            unchanged.expect()
        except ModelError:
            return False
        return True

    def leave(self) -> None:
        """Let go what is under way, and let ranks that wait for this one know."""
        state = self.executor.state
        state.sending.clear()
        state.reducing.clear()
        for stage in state.stages.values():
            stage.arrivals.clear()
        self.transport.leave()


def facts_of(
    stages: Sequence[Any], trains: bool, shapes: Shapes, failures: int, program: Program
) -> ExecutorRequirements:
    """What a rank has for a step.  Raises UsageError and ModelError for what cannot run."""
    for stage in stages:
        _require_own(stage)
    for each in shapes:
        for mb, one in enumerate(each):
            if one != each[0]:
                raise UsageError(
                    f"microbatch {mb} is {_said(one)}, and the first {_said(each[0])}: all have "
                    "one shape",
                    program=program.name,
                )
    modules = [stage.submod for stage in stages]
    parameters = [*dict.fromkeys(p for module in modules for p in module.parameters())]
    return ExecutorRequirements(
        trains,
        shapes,
        tuple(map(id, modules)),
        tuple(id(p) if p.requires_grad else 0 for p in parameters),
        _types(stages[0].device, parameters),
        tuple(_prefix(module) for module in modules),
        failures,
    )


def _types(where: Any, parameters: Iterable[Tensor]) -> tuple[torch.dtype | None, ...]:
    """What decides of which types tensors are that pass between stages."""
    device = torch.device(where).type
    on = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None, *map(_type, parameters)


_type = attrgetter("dtype")


def made(
    key: Sequence[ExecutorRequirements],
    stages: Sequence[Any],
    program: Program,
    group: Any,
    loss: Any,
    tied: TiedWeights | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CachedExecutor:
    """The executor of a rank, for what all ranks have; all of the group call this.

    `args` and `kwargs` are those of the first microbatch.  Layers are made splittable, in place,
    where backwards are split, but not within what torch.compile has compiled.
    """
    rank = dist.get_rank(group)
    trains = key[rank].trains
    modules = {stage.stage_index: _inner(stage.submod) for stage in stages}
    for s in splits(program) & modules.keys() if trains else ():
        if not hasattr(modules[s], "_orig_mod"):
            make_backward_splittable(modules[s])
    with torch.inference_mode(False):
        found = boundaries(modules, program.shape, group, args, kwargs, trains=trains)
        transport = _transport(program, group, torch.device(stages[0].device))
        executor = Executor(
            program,
            rank,
            modules,
            transport,
            loss=loss,
            boundary=found,
            seed=None,
            tied=_tied(tied, key, program),
            alike=True,  # `schedule.py` has checked for weights that are equal and not tied
            adds=not (trains and program.shape.rows > 1),
            record=False,
        )
    received = tree_leaves(executor.state.buffers)
    return CachedExecutor(
        key[rank],
        tuple(stage.submod for stage in stages),
        executor,
        transport,
        frozenset(one.untyped_storage().data_ptr() for one in received),
    )


def _tied(
    tied: TiedWeights | None, key: Sequence[ExecutorRequirements], program: Program
) -> TiedWeights | None:
    """What is tied, by the names that parameters have in the modules that run."""
    if tied is None:
        return None
    own = zip(program.shape.stages_of, key, strict=True)
    prefix = {s: p for stages, of in own for s, p in zip(stages, of.prefixes, strict=True)}
    return TiedWeights(
        tuple(tuple((s, prefix[s] + name) for s, name in places) for places in tied.weights)
    )


def _inner(module: nn.Module) -> nn.Module:
    """What runs: the module that DDP has, without its reductions."""
    return module.module if isinstance(module, Replicated) else module


def shapes_of(given: Any) -> tuple[Any, ...]:
    """The shapes and types of a microbatch's arguments, by name if they have names."""
    each = given.items() if isinstance(given, Mapping) else enumerate(given)
    return tuple(
        (name, x.shape, x.dtype) if isinstance(x, Tensor) else (name, _kind(x)) for name, x in each
    )


def _kind(given: object) -> str:
    """The type of what is no tensor; of what says which way a stage goes, what it says."""
    return repr(given) if isinstance(given, bool | str) else type(given).__name__


def _said(shapes: tuple[Any, ...]) -> str:
    each = (f"{[*one[1]]} of {one[2]}" if len(one) == 3 else str(one[1]) for one in shapes)
    return ", ".join(each) or "nothing"


def _prefix(module: nn.Module) -> str:
    """What stands before the names of a module's parameters where it is compiled."""
    return "_orig_mod." if hasattr(_inner(module), "_orig_mod") else ""


def _require_own(stage: Any) -> None:
    """Refuse a stage that our executor does not run as its wrapper would."""
    module = stage.submod
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        raise UsageError(
            f"stage {stage.stage_index} is sharded by fully_shard, which runtime='schedir' does "
            "not gather and reduce",
            hint="runtime='torch'",
            fields=["runtime"],
        )
    if isinstance(module, Replicated):
        require_reducible(stage)
    require_wrapped_whole([stage])


def _transport(program: Program, group: Any, device: torch.device) -> ProcessTransport:
    """The best transport between the processes of a group; all of them call this."""
    if device.type == "cpu":
        kind = (
            SharedMemoryTransport if SharedMemoryTransport.fits(program, group) else GlooTransport
        )
        return kind(program, group=group)
    if dist.get_world_size(group) != dist.get_world_size():
        raise UsageError(
            "on GPUs runtime='schedir' runs in all processes, and not in a group of them",
            hint="runtime='torch'",
            fields=["runtime"],
        )
    return nccl_transport(program, device)
