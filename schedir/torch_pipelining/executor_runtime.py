"""`runtime="schedir"`: run torch's stages with schedir's Executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import UsageError
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.torch_pipelining import gradients
from schedir.torch_pipelining.boundary_inference import BoundaryCache, ExecutorRequirements
from schedir.torch_pipelining.executor_factory import (
    CachedExecutor,
    collect_requirements,
    collect_shapes,
    make_executor,
)
from schedir.torch_pipelining.forward_checks import compute_loss
from schedir.torch_pipelining.fsdp_stages import unshard_stages
from schedir.torch_pipelining.step_checks import PendingOutputs, find_microbatch_error
from schedir.transports.rank_agreement import gather_or_raise, require_same

# A larger number would keep the memory and connections of more executors that may not run again.
MAX_EXECUTORS: Final = 4


class ExecutorRuntime:
    """Runs the steps of a `schedir.torch_pipelining.Schedule` with schedir's Executor.

    The first step builds the executor, for the stages' `submod` and the shapes of all microbatches.
    Before each step, the ranks reduce one number, which is 0 if the executor still fits on all
    ranks. If shapes, dtypes, autocast, modules or trained parameters changed on a rank, all ranks
    build another executor, or reuse an executor that they kept. So a change never causes a
    hang. The newest `MAX_EXECUTORS` executors are kept.

    A rank whose step fails disconnects, and the ranks that wait for it raise an ExecutionError. The
    next step builds a new executor.

    Args:
        stages: The stages of this rank.
        program: The program of training steps.
        forward_program: The program of forwards only.
        loss_fn: The loss function, or None.
        scale_grads: True to divide gradients by the number of microbatches.
        tied_weights: The tied weights that the user gives, or None.
        group: The process group of the pipeline.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        program: Program,
        forward_program: Program,
        loss_fn: Any,
        scale_grads: bool,
        tied_weights: TiedWeights | None,
        group: Any,
    ) -> None:
        self.stages = stages
        self.group = group
        self.tied_weights = tied_weights
        self.programs = {False: forward_program, program.has_backward: program}
        self.loss_fn = loss_fn
        self.divisor = program.shape.microbatches if scale_grads else 1
        self.sets_gradients_aside = self.divisor > 1 or bool(program.tied_weights)
        self.has_first_stage = any(stage.is_first for stage in stages)
        self.last_stage = next((stage for stage in stages if stage.is_last), None)
        self.executors: dict[tuple[ExecutorRequirements, ...], CachedExecutor] = {}
        self.current: CachedExecutor | None = None
        self.boundary_cache = BoundaryCache(group)
        self.num_failures = 0
        self.changed_flag = torch.zeros(
            1, dtype=torch.int32, device=_choose_flag_device(group, stages[0].device)
        )
        self.max_reduction = dist.AllreduceOptions()
        self.max_reduction.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        # Outputs and losses of the current step, by microbatch.
        self.outputs: list[Any] = []
        self.losses: list[Any] = []
        self.keeps_outputs = self.computes_losses = False
        self.loss_kwargs: Mapping[str, Any] = {}
        self.pending_outputs = PendingOutputs(by_value=False)

    def step(
        self,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run one step, or only its forwards if `has_backward` of the stages is False.

        The outputs of the last stage are added to its `output_chunks`. All outputs and losses are
        detached.

        Args:
            arg_mbs: A tuple of arguments for each microbatch, on the rank of the first stage.
            kwarg_mbs: A dict of keywords for each microbatch, or None.
            target_mbs: The target of each microbatch, on the rank of the last stage.
            losses: A list that is filled with the loss of each microbatch, or None.
            return_outputs: True to keep the outputs of the last stage.
            loss_kwargs: Keywords for the loss function, or None.

        Raises:
            UsageError: On all ranks, if the arguments of one rank are wrong.
            ExecutionError: Another rank failed.
        """
        has_backward = bool(self.stages[0].has_backward)
        n = self.programs[has_backward].shape.microbatches
        computes_loss = self.last_stage is not None and self.loss_fn is not None
        argument_error = find_microbatch_error(
            n,
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            needs_target=computes_loss and (has_backward or losses is not None),
        )
        inputs = [*(arg_mbs or [()] * n)] if self.has_first_stage and not argument_error else []
        cached_executor: CachedExecutor | None = None
        try:
            with ExitStack() as stack:
                if has_backward and self.sets_gradients_aside:
                    stack.enter_context(gradients.set_gradients_aside(self.stages))
                with unshard_stages(self.stages, trains=has_backward):
                    previous = self.current
                    cached_executor = self._get_executor(
                        has_backward, inputs, kwarg_mbs or [{}] * n, argument_error
                    )
                    self.current = cached_executor
                    self.pending_outputs = PendingOutputs(by_value=cached_executor is not previous)
                    self.loss_kwargs = loss_kwargs or {}
                    self.keeps_outputs = return_outputs
                    self.computes_losses = self.loss_fn is not None and target_mbs is not None
                    self.outputs = [None] * n
                    self.losses = [None] * n
                    all_targets = enumerate(target_mbs or [None] * n)
                    targets: Any = [*all_targets] if self.last_stage is not None else []
                    cached_executor.executor.step(inputs, targets, keywords=kwarg_mbs or ())
                    self.pending_outputs.finish()
                if has_backward:
                    self._reduce_gradients()
        except BaseException:
            if cached_executor is not None:
                self._drop_executors(cached_executor)
            raise
        if self.last_stage is not None and return_outputs:
            self.last_stage.output_chunks.extend(self.outputs)
        if self.last_stage is not None and losses is not None:
            losses.clear()
            losses.extend(self.losses if self.computes_losses else ())
        self.outputs = []
        self.losses = []

    def refuse_step(self, reason: str, *, trains: bool) -> None:
        """Raise an error on all ranks about the arguments of this rank.

        Args:
            reason: The text of the error.
            trains: True if the step has backwards.

        Raises:
            UsageError: Always, on all ranks.
        """
        self._get_executor(trains, [], [], reason)

    def _reduce_gradients(self) -> None:
        """Reduce and scale the gradients of a step, as torch's runtime does at REDUCE_GRAD."""
        for stage in self.stages:
            if isinstance(stage.submod, Replicated):
                gradients.average_over_replicas(stage.submod)
        if self.divisor > 1:
            gradients.scale_gradients(self.stages, self.divisor)

    def _compute_loss(self, output: Any, mb_and_target: tuple[int, Any]) -> Tensor:
        """Keep the output and the loss of a microbatch, and return the tensor to differentiate."""
        mb, target = mb_and_target
        if self.keeps_outputs:
            self.outputs[mb] = tree_map_only(Tensor, self._detach_for_caller, output)
        if self.computes_losses:
            loss = compute_loss(self.loss_fn, output, target, mb, self.loss_kwargs)
            self.losses[mb] = tree_map_only(Tensor, self._detach_for_caller, loss)
        assert self.last_stage is not None
        tensors = tree_leaves([self.outputs[mb], self.losses[mb]])
        self.pending_outputs.add(self.last_stage.stage_index, mb, tensors)
        if not self.computes_losses:
            return torch.zeros(())
        has_backward = self.current is not None and self.current.requirements.has_backward
        return loss if has_backward else torch.zeros(())

    def _detach_for_caller(self, tensor: Tensor) -> Tensor:
        """Return a detached tensor for the caller; a copy if the next step would overwrite it."""
        assert self.current is not None
        is_in_buffer = tensor.untyped_storage().data_ptr() in self.current.receive_storages
        return tensor.detach().clone() if is_in_buffer else tensor.detach()

    def _drop_executors(self, failed: CachedExecutor) -> None:
        self.num_failures += 1
        self.current = None
        self.executors.clear()
        failed.disconnect()

    # ------------------------------------------------------------ which executor

    def _get_executor(
        self, has_backward: bool, inputs: list[Any], kwarg_mbs: list[Any], bad_arguments: str = ""
    ) -> CachedExecutor:
        """Return the executor of a step; all ranks reuse or build it together.

        If the arguments are wrong on one rank, all ranks raise the error.
        """
        if bad_arguments:
            inputs, kwarg_mbs = [], []
        shapes = tuple(map(collect_shapes, inputs)), tuple(map(collect_shapes, kwarg_mbs))
        current = self.current
        is_current = (
            not bad_arguments
            and current is not None
            and current.matches_step(has_backward, shapes, self.stages)
        )
        self.changed_flag.fill_(not is_current)
        self.group.allreduce([self.changed_flag], self.max_reduction).wait()
        if current is not None and not self.changed_flag.item():
            return current
        program = self.programs[has_backward]

        def get_requirements() -> ExecutorRequirements:
            if bad_arguments:
                raise UsageError(bad_arguments, program=program.name)
            return collect_requirements(self.stages, has_backward, shapes, self.num_failures)

        key = tuple(gather_or_raise(get_requirements, self.group, [ExecutorRequirements]))
        require_same("has_backward of the step", [facts.has_backward for facts in key])
        for old_key in [
            k
            for k in self.executors
            if [*map(_get_num_failures, k)] != [*map(_get_num_failures, key)]
        ]:
            self.executors.pop(old_key).disconnect()
        if key not in self.executors:
            while len(self.executors) >= MAX_EXECUTORS:
                self.executors.pop(next(iter(self.executors))).transport.shut_down()
            self.executors[key] = make_executor(
                key,
                self.stages,
                program,
                self.group,
                self._compute_loss,
                self.tied_weights,
                self.boundary_cache,
                inputs,
                kwarg_mbs,
            )
        return self.executors[key]


def _get_num_failures(requirements: ExecutorRequirements) -> int:
    return requirements.num_failures


def _choose_flag_device(group: Any, device: torch.device) -> torch.device:
    """Return the device of `changed_flag`: the CPU if the group has a backend for the CPU."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device(device)
    return torch.device("cpu")
