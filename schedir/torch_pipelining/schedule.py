"""Schedule: a drop-in for torch's schedule classes, such as `ScheduleInterleaved1F1B`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import REDUCE_GRAD
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel as Replicated

from schedir.compiler.evaluation_program import evaluation_program
from schedir.errors import ExecutionError, UsageError, describe, require_bool
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
from schedir.torch_pipelining.schedule_consistency import gather_or_raise, require_same
from schedir.torch_pipelining.stages import (
    SharedWeights,
    require_frozen_stages,
    require_outermost_wrapper,
    require_reducible,
    require_runnable,
    require_stages,
)
from schedir.verify.check import check

Runtime = Literal["torch", "schedir"]


class Schedule(CheckedRuntime):
    """A schedule of torch.distributed.pipelining that runs a program of ours.

    It takes what torch's own schedules take, and stands where they stand:

        schedule = ScheduleInterleaved1F1B(stages, n_microbatches, loss_fn=loss_fn)
        schedule = schedir.torch_pipelining.Schedule(
            stages, n_microbatches, loss_fn=loss_fn, schedule="zb_v"
        )

    `stages` are this rank's PipelineStages, or one.  `schedule` is one of ours, its name, or a
    function of one's own, compiled for the shape that follows from the stages: who holds which is
    found out among the ranks.  `program` is a Program, a draft, or the path of a .sched or .csv,
    for these very stages.  Without a `loss_fn` only forwards are run.

    With runtime="torch" torch's own runtime makes the calls, with the program's transfers; with
    runtime="schedir" our executor does.  The program is proven before the first step, under the
    progress model that the stages' process group gives (`programs.model_of`), and all ranks have
    the same.

    `step` and `eval` are torch's: of whole batches, which are cut as `args_chunk_spec` and
    `kwargs_chunk_spec` say and merged as `output_merge_spec` does, or of microbatches (`arg_mbs`,
    `kwarg_mbs`, `target_mbs`, a list each).  `eval` runs the forwards alone, of any schedule.  With
    `scale_grads` the gradients of a step are divided by the number of microbatches, once, and then
    added to what was there before it.

    Stages may be wrapped by `fully_shard` (at most `unsharded_stages` of a rank are whole at once),
    or by DistributedDataParallel; gradients are reduced once in a step, after all that adds to
    them, halves of backwards included.

    `tied_weights` says which parameters are copies of one weight:
    `schedir.find_tied_weights(stages)` of all stages, the same on every rank.  It may be left out
    where a rank sees it, as its stages have one Parameter, and where modules name their
    `tied_weight`.  Gradients of copies are summed once in a step, in the order of stages.  Trained
    parameters of different stages that are equal, not constant and not tied are refused, unless
    `allow_identical_stages`.

    All ranks of a pipeline make theirs together.  Raises whatever `check` does for a program that
    is not proven, ModelError for ties that do not go with the stages, and UsageError for anything
    else that cannot be, the same on all ranks.
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
        held = require_stages(stages)
        self._group = group = program_selection.get_process_group(held[0])

        def facts() -> dict[str, Any]:
            require_runnable(held, n_microbatches, loss_fn, unsharded_stages)
            if runtime not in get_args(Runtime):
                raise UsageError(
                    f"runtime is 'torch' or 'schedir', not {describe(runtime)}", fields=["runtime"]
                )
            program_selection.load_schedule_or_program(schedule, program)
            return {
                "the stages": [stage.stage_index for stage in held],
                "num_stages": held[0].num_stages,
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
                    group, torch.device(held[0].device)
                ),
            }

        each = gather_or_raise(facts, group, [TiedWeights])
        for what in [*each[0]][1:]:
            require_same(what, [of[what] for of in each])
        super().__init__(  # type: ignore[no-untyped-call]
            held,
            n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=each[0]["scale_grads"],
            backward_requires_autograd=backward_requires_autograd,
        )
        shape = program_selection.infer_shape(
            [of["the stages"] for of in each], held[0].num_stages, n_microbatches
        )
        self._rank_of: list[int] = shape.first_rank_per_stage.tolist()
        self._shared_weights = (
            SharedWeights(held, group, tied_weights, allow_identical_stages=allow_identical_stages)
            if loss_fn is not None
            else None
        )
        self.program: Program
        self.forward_program: Program
        model, blocks = each[0]["the progress model"]

        def compiled() -> str:
            found = program_selection.load_schedule_or_program(schedule, program)
            whole = program_selection.compile_for_stages(
                found, shape, self._shared_weights.tied_stages if self._shared_weights else ()
            )
            if loss_fn is None and isinstance(found, Program) and whole.has_backward:
                raise UsageError(
                    "the program has backwards, and there is no loss_fn to take them of",
                    program=whole.name,
                    hint="loss_fn=..., or a program of forwards",
                    fields=["loss_fn"],
                )
            forward = evaluation_program(whole)
            self.program = whole if loss_fn is not None else forward
            self.forward_program = forward
            if runtime == "torch":
                for one in (self.program, forward):
                    check(one, model, blocking_hosts=blocks)
                    actions.make_actions(one)
            return f"{whole.name} ({whole.digest[:16]})"

        require_same("the program", gather_or_raise(compiled, group))
        if self._shared_weights is not None and self.program.has_backward:
            self._shared_weights.bind_program(self.program)
        self._checkpoint_adapter = TorchCheckpointState(
            held, self.program, self._shared_weights, loss_fn
        )
        self._losses_by_mb = {}
        self._given_microbatches: tuple[Any, Any, Any] | None = None
        self._loss_kwargs = None
        self._has_failed = False
        self._last_modules = []
        self._executor_runtime: ExecutorRuntime | None = None
        if runtime == "schedir":
            both = self.program, self.forward_program
            self._executor_runtime = ExecutorRuntime(
                held, *both, loss_fn, self.scale_grads, tied_weights, group
            )
        self._actions_by_mode = {
            one.has_backward: {
                rank: insert_unshards(order, unsharded_stages)
                for rank, order in actions.make_actions(one).items()
            }
            for one in (self.program, self.forward_program)
        }
        for orders in self._actions_by_mode.values():
            for order in orders.values():
                require_unsharded(order, unsharded_stages)
        self._set_mapping()
        self._split_stages = (
            actions.find_split_stages(self.program) if self.program.has_backward else frozenset()
        )
        if self._split_stages and runtime == "torch":
            install_hook_counters()
        self._last_stage_order = actions.get_last_stage_order(self.program, shape.stages - 1)
        self.register_custom_function(REDUCE_GRAD, self._reduce_gradients)

    @classmethod
    def with_options(cls, **options: Any) -> type[Schedule]:
        """A class of schedules with these keywords, for what takes a class, as torchtitan:
        `Schedule.of(schedule="zb_v")`."""

        class Of(cls):  # type: ignore[valid-type, misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(options | kwargs))

        Of.__name__ = Of.__qualname__ = f"{cls.__name__}.of({', '.join(options)})"
        return Of

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        raise UsageError(
            "a schedule is proven as it is made, and takes no other list later",
            hint=f"Schedule(..., program={filename!r})",
        )

    def _set_mapping(self) -> None:
        """Tell torch who holds which stage, and what each rank computes."""
        self.pipeline_order = actions.make_compute_actions(self.program)
        self.stage_index_to_group_rank = dict(enumerate(self._rank_of))
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = self._actions_by_mode[self.program.has_backward]

    def checkpoint_state(self) -> CheckpointState:
        """What `schedir.checkpoints` saves and loads; all processes of the default group call this.

        Raises CheckpointError where the pipelines of these are no replicas.
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
        """Run one step, of a whole batch (`args`, `target`, `kwargs`) or of microbatches.

        `args` go to the first stage and are told to its rank, `target` to the last; `kwargs` go to
        every stage, each rank telling those of its own.  Of microbatches each has a tuple in
        `arg_mbs`, a dict in `kwarg_mbs`, and what is in `target_mbs`.  On the rank of the last
        stage `losses` is filled with the loss of each microbatch in order, and the outputs are
        returned, merged, if `return_outputs`; elsewhere None is.  `loss_kwargs` go to `loss_fn`.
        """
        if self._has_failed:
            raise ExecutionError(
                f"rank {self.rank} has failed in the step before, and left messages on their way",
                program=self.program.name,
                hint="make the schedule and its process group anew",
            )
        self._checkpoint_adapter.require_complete_load()
        if self._has_backward and not self.program.has_backward:
            raise UsageError(
                "a step trains, and the program has forwards alone",
                program=self.program.name,
                hint="schedule.eval(...), or a program with backwards",
            )
        cut = (arg_mbs, kwarg_mbs, target_mbs)
        if any(each is not None for each in cut):
            if args or kwargs or target is not None:
                raise UsageError(
                    "a step takes a whole batch or microbatches, and is given both",
                    program=self.program.name,
                    hint="step(x, target=y), or step(arg_mbs=[(x0,), (x1,)], target_mbs=[y0, y1])",
                )
            self._given_microbatches = cut
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

    def _split_inputs(self, args: Any, kwargs: Any = None) -> tuple[Any, Any]:
        """Microbatches: those that are given, or what torch cuts."""
        if self._given_microbatches is not None:
            return self._given_microbatches[0], self._given_microbatches[1]
        split: tuple[Any, Any] = super()._split_inputs(args, kwargs)
        return split

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
        given = (arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        if (
            self._executor_runtime is not None
        ):  # which looks at them itself, and lets all ranks know
            self._executor_runtime.step(*given, loss_kwargs)
            return
        self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        has_last = any(stage.is_last for stage in self._stages)
        lacks = has_last and self._loss_fn is not None and target_mbs is None
        if lacks and (self._has_backward or losses is not None):
            raise UsageError("a loss is taken, and no target is given", fields=["target"])
        self._disable_auto_reshard()
        if self._has_backward:
            require_frozen_stages(self._stages, self.program)
        self._claim_stages()
        self._has_failed = True
        self._loss_kwargs = loss_kwargs
        self._losses_by_mb.clear()
        self._internal_losses.clear()
        self.pipeline_order_with_comms = self._actions_by_mode[self._has_backward]
        with ExitStack() as stack:
            if self._must_set_gradients_aside():
                stack.enter_context(gradients.set_gradients_aside(self._stages))
            stack.enter_context(self._check_stage_calls())
            stack.enter_context(self._remove_ddp())
            if self._has_backward and self._shared_weights is not None:
                self._shared_weights.refresh()
            super()._step_microbatches(*given, loss_kwargs)
            if self._has_backward:
                self._finish_gradients()
        self._has_failed = False
        if has_last and return_outputs:
            (last,) = (stage for stage in self._stages if stage.is_last)
            made = dict(zip(self._last_stage_order, last.output_chunks, strict=True))
            last.output_chunks[:] = [made[mb] for mb in sorted(made)]

    def _disable_auto_reshard(self) -> None:
        """Leave it to the schedule when sharded stages are cut up, and not to their forwards: after
        one of these, half of a backward would add to parameters that are gone."""
        modules = self._stage_modules()
        if modules == self._last_modules:
            return
        require_outermost_wrapper(self._stages)
        for module in modules:
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False)

    # ------------------------------------------------------------ gradients

    def _must_set_gradients_aside(self) -> bool:
        """Whether gradients of before must not be there meanwhile: they would be scaled or summed
        again, and torch forgets those of sharded stages where it infers shapes."""
        divides = self.scale_grads and self._n_microbatches > 1
        sums = self._shared_weights is not None and bool(self._shared_weights.tied_stages)
        infers = not self._stages_forward_initialized or (
            self._has_backward != self._stages_backward_initialized
        )
        sharded = any(isinstance(stage.submod, FSDPModule) for stage in self._stages)
        return (self._has_backward and (divides or sums)) or (infers and sharded)

    @contextmanager
    def _remove_ddp(self) -> Iterator[None]:
        """Within this, stages are without a DDP that would not reduce them: of split backwards it
        sees no W, and of a static graph it takes the first microbatch for all."""
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
        """REDUCE_GRAD: over replicas, once; what is scaled is scaled at the end of the step."""
        (stage,) = (s for s in self._stages if s.stage_index == action.stage_index)
        stage.perform_reduce_grad(1)
        if (ddp := self._ddp_modules.get(action.stage_index)) is not None:
            gradients.average_over_replicas(ddp)

    def _finish_gradients(self) -> None:
        """Sum the copies of tied weights, and scale, each parameter once."""
        if self._shared_weights is not None:
            gradients.sum_tied_gradients(self._shared_weights.weights, self._rank_of, self._group)
        if self.scale_grads and self._n_microbatches > 1:
            gradients.scale_gradients(self._stages, self._n_microbatches)
