"""A drop-in replacement for torch's schedule classes, such as `ScheduleInterleaved1F1B`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import REDUCE_GRAD
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel as Replicated

from schedir.call_errors import explain_wrong_calls
from schedir.compiler.evaluation_program import evaluation_program
from schedir.errors import ExecutionError, UsageError, describe, require_bool
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime.checkpoint_state import CheckpointState
from schedir.schedules.schedule_algebra import Schedule as Words
from schedir.torch_pipelining import actions, gradients, program_selection
from schedir.torch_pipelining.checkpoint_adapter import TorchCheckpointState
from schedir.torch_pipelining.executor_runtime import ExecutorRuntime
from schedir.torch_pipelining.forward_checks import CheckedRuntime
from schedir.torch_pipelining.fsdp_stages import insert_unshards, require_unsharded
from schedir.torch_pipelining.hook_detection import install_hook_counters
from schedir.torch_pipelining.stages import (
    SharedWeights,
    require_frozen_stages,
    require_outermost_wrapper,
    require_reducible,
    require_runnable,
    require_stages,
)
from schedir.torch_pipelining.step_checks import (
    can_merge_outputs,
    find_indivisible_tensor,
    find_microbatch_error,
    find_missing_input,
)
from schedir.transports.rank_agreement import gather_or_raise, require_same
from schedir.verify.check import check

Runtime = Literal["torch", "schedir"]


def _require_runtime(runtime: Any) -> None:
    if runtime not in get_args(Runtime):
        raise UsageError(
            f"runtime must be 'torch' or 'schedir', not {describe(runtime)}",
            fields=["runtime"],
        )


@explain_wrong_calls("Schedule([stage], n_microbatches=8, loss_fn=loss, schedule='zb_h1')")
class Schedule(CheckedRuntime):
    """A schedule of torch.distributed.pipelining that runs a schedir program.

    A Schedule takes the arguments of torch's schedules, and either `schedule` or `program`. All
    ranks of a pipeline must create their Schedules together, with the same program. Before the
    first step, schedir proves that the program is complete and cannot deadlock under the progress
    model of the stages' process group (`program_selection.get_progress_model`).

    `step` and `eval` work as in torch. `step` adds gradients, and updates no weights, even if the
    program has optimizer steps. Call `optimizer.step()` once after each `step`. `step` and `eval`
    take complete batches or microbatches (`arg_mbs`, `kwarg_mbs` and `target_mbs`, a list each).
    `eval` runs only the forwards of the program.

    Stages may be wrapped by `fully_shard` or by DistributedDataParallel. Gradients are reduced once
    per step, after all full and split backwards have added to them. Gradients of tied weights are
    summed once per step, in the order of stages.

    Args:
        stages: The PipelineStages of this rank, or a single one.
        n_microbatches: The number of microbatches.
        loss_fn: The loss function. Without it only forwards run.
        args_chunk_spec: The dimensions along which arguments of a complete batch are split.
        kwargs_chunk_spec: The same for keyword arguments.
        output_merge_spec: The dimensions along which outputs are merged.
        scale_grads: True to divide the gradients of a step once by the number of microbatches. The
            result is added to the gradients that exist before the step.
        schedule: A schedule function, its name, or "FILE.py:FUNCTION". The schedule is compiled for
            the shape that follows from the stages of all ranks.
        program: A Program, a draft, or the path of a .sched or .csv file. The program must be for
            exactly the stages of these ranks.
        runtime: "torch" runs the program and its transfers with torch's runtime. "schedir" runs it
            with schedir's Executor.
        tied_weights: The parameters that are copies of one weight, as
            `schedir.find_tied_weights(stages)` returns them for the stages of all ranks. Each rank
            passes the same value. The argument is not needed if the stages of a rank share one
            Parameter, or if modules have an attribute `tied_weight`.
        allow_identical_stages: True to allow equal trained parameters in different stages. By
            default, equal parameters are refused if they are neither tied nor constant (such as all
            zeros).
        unsharded_stages: The largest number of stages of a rank that are unsharded at once, if
            `fully_shard` wraps them.
        backward_requires_autograd: Passed on to torch's schedule class.

    Raises:
        ModelError: The tied weights do not match the stages.
        UsageError: An argument is wrong or differs between ranks. All ranks raise the same error.
        SchedirError: `check` refuses the program.

    Example:
        Replace a schedule of torch::

            schedule = ScheduleInterleaved1F1B(stages, n_microbatches, loss_fn=loss_fn)
            schedule = schedir.torch_pipelining.Schedule(
                stages, n_microbatches, loss_fn=loss_fn, schedule="zb_v"
            )
    """

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase] | _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        schedule: Words | str | None = None,
        program: program_selection.ProgramSource | None = None,
        runtime: Runtime = "torch",
        tied_weights: TiedWeights | None = None,
        allow_identical_stages: bool = False,
        unsharded_stages: int = 3,
        backward_requires_autograd: bool = True,
    ) -> None:
        local_stages = require_stages(stages)
        self._group = group = program_selection.get_process_group(local_stages[0])

        def facts() -> dict[str, Any]:
            require_runnable(local_stages, n_microbatches, loss_fn, unsharded_stages)
            _require_runtime(runtime)
            program_selection.load_schedule_or_program(schedule, program)
            return {
                "the stages": [stage.stage_index for stage in local_stages],
                "num_stages": local_stages[0].num_stages,
                "n_microbatches": n_microbatches,
                "runtime": runtime,
                "loss_fn": "None" if loss_fn is None else "a function",
                "scale_grads": require_bool(scale_grads, "scale_grads"),
                "allow_identical_stages": require_bool(
                    allow_identical_stages, "allow_identical_stages"
                ),
                "unsharded_stages": unsharded_stages,
                "tied_weights": tied_weights,
                "the progress model": program_selection.get_progress_model(
                    group, torch.device(local_stages[0].device)
                ),
            }

        all_facts = gather_or_raise(facts, group, [TiedWeights])
        for name in [*all_facts[0]][1:]:
            require_same(name, [rank_facts[name] for rank_facts in all_facts])
        super().__init__(  # type: ignore[no-untyped-call]
            local_stages,
            n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=all_facts[0]["scale_grads"],
            backward_requires_autograd=backward_requires_autograd,
        )
        shape = program_selection.infer_shape(
            [rank_facts["the stages"] for rank_facts in all_facts],
            local_stages[0].num_stages,
            n_microbatches,
        )
        self._rank_of: list[int] = shape.first_rank_per_stage.tolist()
        self._shared_weights = (
            SharedWeights(
                local_stages, group, tied_weights, allow_identical_stages=allow_identical_stages
            )
            if loss_fn is not None
            else None
        )
        model, blocking_hosts = all_facts[0]["the progress model"]

        def compile_programs() -> str:
            source = program_selection.load_schedule_or_program(schedule, program)
            full_program = self._compile_programs(source, shape)
            if runtime == "torch":
                for mode_program in (self.program, self.forward_program):
                    check(mode_program, model, blocking_hosts=blocking_hosts)
                    actions.make_actions(mode_program)
            return f"{full_program.name} ({full_program.digest[:16]})"

        require_same("the program", gather_or_raise(compile_programs, group))
        if self._shared_weights is not None and self.program.has_backward:
            self._shared_weights.bind_program(self.program)
        self._checkpoint_adapter = TorchCheckpointState(
            local_stages, self.program, self._shared_weights, loss_fn
        )
        self._init_step_state()
        self._executor_runtime: ExecutorRuntime | None = None
        if runtime == "schedir":
            programs = self.program, self.forward_program
            self._executor_runtime = ExecutorRuntime(
                local_stages, *programs, loss_fn, self.scale_grads, tied_weights, group
            )
        self._set_actions(unsharded_stages)
        self._set_mapping()
        self._split_stages = (
            actions.find_split_stages(self.program) if self.program.has_backward else frozenset()
        )
        if self._split_stages and runtime == "torch":
            install_hook_counters()
        self._last_stage_order = actions.get_last_stage_order(self.program, shape.stages - 1)
        self.register_custom_function(REDUCE_GRAD, self._reduce_gradients)

    def _compile_programs(self, source: Words | Program, shape: PipelineShape) -> Program:
        """Return the program for the stages, and set the programs that `step` and `eval` run."""
        full_program = program_selection.compile_for_stages(
            source, shape, self._shared_weights.tied_stages if self._shared_weights else ()
        )
        has_loss = self._loss_fn is not None
        if not has_loss and isinstance(source, Program) and full_program.has_backward:
            raise UsageError(
                "loss_fn is missing: the program has backwards",
                program=full_program.name,
                hint="loss_fn=..., or a program with forwards only",
                fields=["loss_fn"],
            )
        self.forward_program: Program = evaluation_program(full_program)
        self.program: Program = full_program if has_loss else self.forward_program
        return full_program

    def _init_step_state(self) -> None:
        self._losses_by_mb = {}
        self._given_microbatches: tuple[Any, Any, Any] | None = None
        self._loss_kwargs = None
        self._has_failed = False
        self._last_modules = []

    def _set_actions(self, unsharded_stages: int) -> None:
        """Set torch's actions of both programs. Verify that the actions unshard stages in time."""
        self._actions_by_mode = {
            mode_program.has_backward: {
                rank: insert_unshards(rank_actions, unsharded_stages)
                for rank, rank_actions in actions.make_actions(mode_program).items()
            }
            for mode_program in (self.program, self.forward_program)
        }
        for actions_by_rank in self._actions_by_mode.values():
            for rank_actions in actions_by_rank.values():
                require_unsharded(rank_actions, unsharded_stages)

    @classmethod
    def with_options(cls, **options: Any) -> type[Schedule]:
        """Return a subclass with these keywords as defaults, for code that takes a schedule class.

        For torchtitan, see `patch_torchtitan`.

        Args:
            **options: Keywords of `Schedule`.
        """

        class Of(cls):  # type: ignore[valid-type, misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(options | kwargs))

        Of.__name__ = Of.__qualname__ = f"{cls.__name__}.of({', '.join(options)})"
        return Of

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        raise UsageError(
            "a Schedule cannot load another program, because its constructor checks the program",
            hint=f"Schedule(..., program={filename!r})",
        )

    def _set_mapping(self) -> None:
        """Set the attributes from which torch reads the rank of a stage and the rank's actions."""
        self.pipeline_order: actions.ActionLists = actions.make_compute_actions(self.program)
        self.stage_index_to_group_rank: dict[int, int] = dict(enumerate(self._rank_of))
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = self._actions_by_mode[self.program.has_backward]

    def checkpoint_state(self) -> CheckpointState:
        """Return the state that `schedir.checkpoints` saves and loads.

        All processes of the default group must call this.

        Raises:
            CheckpointError: The pipelines of these processes are not replicas.
        """
        return self._checkpoint_adapter.checkpoint_state(has_failed=self._has_failed)

    # ------------------------------------------------------------ a step

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a complete batch or on microbatches.

        A complete batch is given as `args`, `kwargs` and `target`, and microbatches as `arg_mbs`,
        `kwarg_mbs` and `target_mbs`.

        Args:
            *args: Arguments of the first stage, on its rank.
            target: The target of the loss, on the rank of the last stage.
            losses: A list, or None. On the rank of the last stage it is filled with the loss of
                each microbatch in order.
            return_outputs: True to return the merged outputs on the rank of the last stage.
            loss_kwargs: Keywords for `loss_fn`.
            arg_mbs: A tuple of arguments for each microbatch. Their shapes may differ between
                microbatches if the runtime is "schedir".
            kwarg_mbs: A dict of keywords for each microbatch.
            target_mbs: A target for each microbatch.
            **kwargs: Keyword arguments of the stages. Each rank passes the arguments of its own
                stages.

        Returns:
            The merged outputs on the rank of the last stage, if `return_outputs`, and None
            elsewhere. If microbatches have different lengths, so that their outputs cannot be
            merged, a list with the output of each microbatch.

        Raises:
            ExecutionError: An earlier step failed, or a load of a checkpoint failed.
            UsageError: Both a batch and microbatches are given, or no target is given, or a target
                is given although `loss_fn` is None. Or `n_microbatches` does not divide the batch,
                or the program has no backwards.
            ModelError: A stage does not fit the program, or overwrites an output that is still
                needed.
        """
        if self._has_failed:
            raise ExecutionError(
                f"rank {self.rank} failed in an earlier step, and its messages may be incomplete",
                program=self.program.name,
                hint="create a new process group and a new Schedule",
            )
        self._checkpoint_adapter.require_complete_load()
        if self._has_backward and not self.program.has_backward:
            raise UsageError(
                "step needs backwards, but the program has forwards only",
                program=self.program.name,
                hint="schedule.eval(...), or a program with backwards",
            )
        if self._loss_fn is None and (target is not None or target_mbs is not None):
            self._refuse_step(
                "step got a target, but loss_fn is None: only forwards would run",
                "Schedule(..., loss_fn=loss_fn) trains; without a target, step runs only forwards",
                "loss_fn",
            )
        given_microbatches = (arg_mbs, kwarg_mbs, target_mbs)
        has_microbatches = any(microbatches is not None for microbatches in given_microbatches)
        if has_microbatches and (args or kwargs or target is not None):
            self._refuse_step(
                "step got a complete batch and microbatches: give only one of them",
                "step(x, target=y), or step(arg_mbs=[(x0,), (x1,)], target_mbs=[y0, y1])",
                "arg_mbs",
            )
        if target is not None and not isinstance(target, Tensor):
            self._refuse_step(
                f"target must be a tensor, not {describe(target)}",
                "step(arg_mbs=[(x0,), (x1,)], target_mbs=[y0, y1]) takes targets of any type",
                "target",
            )
        self._require_equal_microbatches(args, kwargs, target)
        inputs = (*args, *kwargs.values(), arg_mbs, kwarg_mbs)
        if reason := find_missing_input(self._stages, inputs):
            self._refuse_step(reason, "step(x) on the rank of stage 0", "args")
        self._given_microbatches = given_microbatches if has_microbatches else None
        try:
            return super().step(
                *args,
                target=target,
                losses=losses,
                return_outputs=return_outputs,
                loss_kwargs=loss_kwargs,
                **kwargs,
            )
        finally:
            self._given_microbatches = self._loss_kwargs = None

    def _require_equal_microbatches(self, args: Any, kwargs: Any, target: Any) -> None:
        """Refuse a complete batch that cannot be split into equal microbatches.

        Arguments with a user's own chunk spec are not checked: they may be split along another
        dimension.
        """
        values: dict[str, Any] = {"target": target}
        if self._kwargs_chunk_spec is None:
            values = kwargs | values
        if self._args_chunk_spec is None:
            values = {f"args[{k}]": value for k, value in enumerate(args)} | values
        reason = find_indivisible_tensor(values, self._n_microbatches)
        if reason:
            self._refuse_step(
                reason,
                "DataLoader(..., drop_last=True), or another Schedule for the other size",
                "n_microbatches",
            )

    def _refuse_step(self, reason: str, hint: str, field: str) -> NoReturn:
        """Raise an error about the arguments of a step. With the executor, all ranks raise."""
        if self._executor_runtime is not None:
            self._executor_runtime.refuse_step(reason, trains=self._has_backward)
        raise UsageError(reason, program=self.program.name, hint=hint, fields=[field])

    def _split_inputs(self, args: Any, kwargs: Any = None) -> tuple[Any, Any]:
        """Return the given microbatches, or split a complete batch as torch does."""
        if self._given_microbatches is not None:
            return self._given_microbatches[0], self._given_microbatches[1]
        microbatches: tuple[Any, Any] = super()._split_inputs(args, kwargs)
        return microbatches

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """Return the merged outputs, or a list if microbatches of different shapes do not fit."""
        if self._output_merge_spec is None and not can_merge_outputs(output_chunks):
            return [*output_chunks]
        return super()._merge_outputs(output_chunks)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if self._given_microbatches is not None:
            target_mbs = self._given_microbatches[2]
        arguments = (arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        # The executor runtime checks the arguments itself, and raises errors on all ranks.
        if self._executor_runtime is not None:
            self._executor_runtime.step(*arguments, loss_kwargs)
            return
        has_last_stage = any(stage.is_last for stage in self._stages)
        computes_loss = has_last_stage and self._loss_fn is not None
        if argument_error := find_microbatch_error(
            self._n_microbatches,
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            needs_target=computes_loss and (self._has_backward or losses is not None),
        ):
            raise UsageError(argument_error, program=self.program.name)
        self._disable_auto_reshard()
        if self._has_backward:
            require_frozen_stages(self._stages, self.program)
        self._claim_stages()
        self._has_failed = True
        self._loss_kwargs = loss_kwargs
        self._losses_by_mb.clear()
        self._internal_losses.clear()
        self.pipeline_order_with_comms: actions.ActionLists = self._actions_by_mode[
            self._has_backward
        ]
        with ExitStack() as stack:
            if self._must_set_gradients_aside():
                stack.enter_context(gradients.set_gradients_aside(self._stages))
            stack.enter_context(self._check_stage_calls())
            stack.enter_context(self._remove_ddp())
            if self._has_backward and self._shared_weights is not None:
                self._shared_weights.refresh()
            super()._step_microbatches(*arguments, loss_kwargs)
            if self._has_backward:
                self._finish_gradients()
        self._has_failed = False
        if has_last_stage and return_outputs:
            (last_stage,) = (stage for stage in self._stages if stage.is_last)
            outputs_by_mb = dict(zip(self._last_stage_order, last_stage.output_chunks, strict=True))
            last_stage.output_chunks[:] = [outputs_by_mb[mb] for mb in sorted(outputs_by_mb)]

    def _disable_auto_reshard(self) -> None:
        """Disable FSDP's reshard after each forward; the schedule has RESHARD actions instead.

        After FSDP's reshard, a split backward would add gradients to freed parameters.
        """
        modules = self._stage_modules()
        if modules == self._last_modules:
            return
        require_outermost_wrapper(self._stages)
        for module in modules:
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False)

    # ------------------------------------------------------------ gradients

    def _must_set_gradients_aside(self) -> bool:
        """Return whether gradients from before the step must be set aside.

        If they stay in place, this step scales or sums them again. torch also drops the gradients
        of sharded stages when it infers shapes.
        """
        is_divided = self.scale_grads and self._n_microbatches > 1
        has_ties = self._shared_weights is not None and bool(self._shared_weights.tied_stages)
        infers_shapes = not self._stages_forward_initialized or (
            self._has_backward != self._stages_backward_initialized
        )
        has_sharded_stage = any(isinstance(stage.submod, FSDPModule) for stage in self._stages)
        changes_gradients = self._has_backward and (is_divided or has_ties)
        return changes_gradients or (infers_shapes and has_sharded_stage)

    @contextmanager
    def _remove_ddp(self) -> Iterator[None]:
        """Remove DDP from stages in this context if it would not reduce gradients correctly.

        DDP has no hook at W of a split backward. With a static graph, it would reduce after the
        first microbatch.
        """
        self._ddp_modules: dict[int, Any] = {
            stage.stage_index: stage.submod
            for stage in self._stages
            if isinstance(stage.submod, Replicated)
            and (stage.stage_index in self._split_stages or stage.submod.static_graph)
        }
        for stage in self._stages:
            if stage.stage_index in self._ddp_modules:
                require_reducible(stage)
                stage.submod = self._ddp_modules[stage.stage_index].module
        try:
            yield
        finally:
            for stage in self._stages:
                stage.submod = self._ddp_modules.get(stage.stage_index, stage.submod)

    def _reduce_gradients(self, action: Any, ctx: Any) -> None:
        """Run REDUCE_GRAD: reduce a stage's gradients. `_finish_gradients` scales them later."""
        (stage,) = (s for s in self._stages if s.stage_index == action.stage_index)
        stage.perform_reduce_grad(1)
        if (ddp := self._ddp_modules.get(action.stage_index)) is not None:
            gradients.average_over_replicas(ddp)

    def _finish_gradients(self) -> None:
        """Sum the gradients of tied weights, and scale all gradients, each parameter once."""
        if self._shared_weights is not None:
            gradients.sum_tied_gradients(self._shared_weights.weights, self._rank_of, self._group)
        if self.scale_grads and self._n_microbatches > 1:
            gradients.scale_gradients(self._stages, self._n_microbatches)
