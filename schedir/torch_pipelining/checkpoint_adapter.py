"""The checkpoint state of torch's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from schedir.errors import CheckpointError, ExecutionError, SchedirError, describe
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.checkpoint_state import (
    RUN_OPTIMIZER,
    CheckpointState,
    RankCheckpointState,
    StageCheckpointState,
)
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.optimizer_inspection import find_optimizers
from schedir.torch_pipelining.stages import SharedWeights, unwrap_module
from schedir.transports.rank_agreement import gather_or_raise


@dataclass(frozen=True)
class OptimizerList:
    """The optimizers of a process that has more than one.

    Args:
        optimizers: The optimizers.
    """

    optimizers: tuple[Any, ...]


class TorchCheckpointState:
    """Builds the checkpoint state of a schedule.

    The processes of the default group run one or several pipelines. Each pipeline is a replica.

    Args:
        stages: The stages of this rank.
        program: The program of the schedule.
        shared_weights: The weights that stages share, or None.
        loss_fn: The loss function, or None.

    Attributes:
        is_load_incomplete: True during a load, and after a failed load.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        program: Program,
        shared_weights: SharedWeights | None,
        loss_fn: Any,
    ) -> None:
        self.stages = stages
        self.program = program
        self.loss_fn = loss_fn
        self.group: Any = stages[0].group
        self.shared_weights = shared_weights if program.has_backward else None
        self.is_load_incomplete = False

    def require_complete_load(self) -> None:
        """Refuse a step after a failed load, which may have loaded only some weights.

        Raises:
            ExecutionError: A load failed.
        """
        if self.is_load_incomplete:
            raise ExecutionError(
                "an earlier load failed: some weights are loaded, and others are not",
                program=self.program.name,
                hint="build new stages and a new Schedule",
            )

    def checkpoint_state(self, *, has_failed: bool) -> CheckpointState:
        """Return the state that checkpoints save and load.

        All processes of the default group must call this.

        Args:
            has_failed: True if a step of the schedule failed. A save or a load with the returned
                state then raises CheckpointError.

        Raises:
            CheckpointError: The pipelines of the processes are not replicas, or the tied weights do
                not match the program.
        """

        def get_pipeline() -> list[int]:
            if self.shared_weights is not None:
                self.shared_weights.refresh()
            members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            return [self.stages[0].num_stages, *members]

        try:
            pipelines = gather_or_raise(get_pipeline, dist.group.WORLD)
        except SchedirError as error:
            raise CheckpointError(error.fact, hint=error.hint) from error
        mesh = _build_mesh(pipelines)

        def ranks(optimizer: Any) -> list[RankCheckpointState]:
            if has_failed or self.is_load_incomplete:
                raise CheckpointError(
                    "an earlier step or load failed, so the buffers or weights of the model are "
                    "incomplete",
                    hint="build new stages and a new Schedule, and load a complete checkpoint",
                )
            return [self._rank_state(optimizer, mesh)]

        # The user's optimizer makes the updates, so there is no post-validation.
        return CheckpointState(ranks, validate_last_update=lambda: None)

    def _rank_state(self, optimizer: Any, mesh: Sequence[tuple[int, ...]]) -> RankCheckpointState:
        shape = self.program.shape
        processes = [process for members in mesh for process in members]
        world_shape = [shape.ranks, 1, len(mesh), shape.stages]
        # Executors always number processes in ascending order, and do not save the order. A
        # Schedule does not save an ascending order either, so that a Schedule and an Executor can
        # load each other's random state.
        world_shape += [] if processes == [*range(len(processes))] else processes

        def set_incomplete(is_incomplete: bool) -> None:
            self.is_load_incomplete = is_incomplete

        return RankCheckpointState(
            self.program,
            dist.get_rank(self.group),
            {stage.stage_index: _stage_state(stage) for stage in self.stages},
            ShardSpec(len(mesh), next(k for k, row in enumerate(mesh) if dist.get_rank() in row)),
            _require_optimizer(optimizer, self.program),
            self.loss_fn,
            RandomStreams(None, torch.device(self.stages[0].device)),
            world_shape,
            set_incomplete,
            tied_weights=() if self.shared_weights is None else self.shared_weights.weights,
            has_external_reduction=True,
        )


def _build_mesh(pipelines: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return for each pipeline its processes, in the order of pipeline ranks.

    `pipelines` has an entry for each process: the number of stages, then the processes of its
    pipeline.
    """
    stages, mesh = pipelines[0][0], dict.fromkeys(tuple(members) for _, *members in pipelines)
    for process, (num_stages, *_) in enumerate(pipelines):
        if num_stages != stages:
            raise CheckpointError(
                f"num_stages is {stages} on process 0, and {num_stages} on process {process}: "
                "replicas must have the same stages"
            )
    for process in range(len(pipelines)):
        if sum(process in members for members in mesh) != 1:
            raise CheckpointError(
                f"process {process} is in the process groups of several pipelines",
                hint="create one process group for each replica, with each process in one of them",
            )
    return sorted(mesh, key=min)


def _stage_state(stage: Any) -> StageCheckpointState:
    module = unwrap_module(stage.submod)
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise CheckpointError(
            f"stage {stage.stage_index} is wrapped by FullyShardedDataParallel, which joins "
            "several weights to one parameter: checkpoints do not support it"
        )
    return StageCheckpointState(
        module, {p: name for name, p in module.named_parameters() if p.requires_grad}
    )


def _require_optimizer(optimizer: Any, program: Program) -> Any:
    """Check the optimizer that a save or a load receives for this process, and return it."""
    if optimizer is RUN_OPTIMIZER:
        if program.has_backward:
            raise CheckpointError(
                "optimizer is missing: a Schedule has no optimizer of its own",
                hint="optimizer=..., or optimizer=None to use weights only",
            )
        return None
    has_several = isinstance(optimizer, list | tuple)
    for item in optimizer if has_several else [] if optimizer is None else [optimizer]:
        if callable(item) or not any(
            hasattr(part, "param_groups") for part in find_optimizers(item)
        ):
            raise CheckpointError(
                f"optimizer must be an optimizer or a list of optimizers, not {describe(item)}",
                hint="optimizer=torch.optim.SGD(stage.submod.parameters(), lr=0.1)",
            )
    return OptimizerList(tuple(optimizer)) if has_several else optimizer
