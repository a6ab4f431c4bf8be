"""Executor: run the stream of one pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ModelError, require_type
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.retired_names import raise_attribute_error
from schedir.runtime import arguments
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, build_checkpoint_state
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.extra_programs import ExtraProgram, ProgramOrder, resolve_extra_programs
from schedir.runtime.model_checks.model_to_check import ModelToCheck
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.program_state import ProgramState
from schedir.runtime.rank_resources import Loss, RankOptions, RankResources
from schedir.runtime.recording.recorder import Timestamps
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.sharded_stages import ShardedStages
from schedir.runtime.services.update_checks import UpdateChecks
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.step_rollback import WARM_UP_STEPS as WARM_UP_STEPS
from schedir.transports.serialized_transport import SerializedTransport
from schedir.transports.transport import Transport


@explain_wrong_calls(
    "Executor(program, rank, stages, GlooTransport(program), loss=loss, boundary=boundary)"
)
class Executor:
    """An executor that runs training steps of one pipeline rank.

    Each process creates an executor for its rank, and calls `step` once per training step. All
    processes of a transport must create their executors together, because the executors compare
    their programs, stages and options.

    The set of trainable parameters is fixed when the executor is created. `step` raises
    `ModelError` if `requires_grad_` or a new Parameter has changed the set.

    Finite updates: the executor makes an update only if all its losses and gradients are finite.
    Otherwise the weights and the optimizer state stay unchanged. Buffers that a forward wrote, such
    as running statistics, keep their new values. `finite_updates` has the result for each update of
    the last step. If the program clips gradients, all ranks decide by the global norm, so they
    decide alike. Otherwise each rank decides by its local gradients, so some ranks may make an
    update that others skip. Then the copies of a tied weight may differ, and so may the copies of a
    weight on several tensor-parallel ranks. With `compile(..., clip_grad_norm=True)` and
    `GradientOptions(max_norm=math.inf)`, all ranks decide alike and nothing is clipped. A fused
    optimizer of torch reads the decision on the device. For any other optimizer, and for one with
    hooks on its step, the host reads the decision. If the decision is on a GPU, the host waits for
    it.

    Post-validation: if the program has `norm_check="after_step"`, an update does not wait for the
    global norm. If the norm turns out to be too large or not finite, the executor corrects the
    update, and runs the following step again. Call `validate_last_update` before you read weights.
    See `schedir.runtime.parameters.post_validation`.

    Tied weights: each copy has its own gradient. A step adds these gradients in the order of
    stages, and gives the sum to all copies. The global norm counts the weight once. Several local
    stages may share a Parameter. Within a step, the first of these stages computes with the
    Parameter itself. The others compute with a substitute Parameter in the same memory.

    ZeRO: from level 1 on, the `dp` replicas shard the trained parameters of each stage, and each
    replica steps one shard. Between steps, a trained parameter and its gradient are the replica's
    1-dimensional shard. The optimizer steps shards, so it must be elementwise. `full_parameters`
    gathers the weights.

    Tensor parallelism: a parameter that is split over the tensor-parallel ranks has an attribute
    `shard_dim`, the dimension along which it is split. All ranks have a full copy of any other
    parameter, and the global norm counts it once.

    Recomputation: a recomputed forward must give the same output as the first one. On a CPU the
    executor compares checksums of the two outputs. On a GPU it does so only with `debug`.

    Profiling: under torch.profiler each instruction is a profiler range. If
    `torch.distributed.pipelining` has a name for the instruction, the range has this name, such as
    `PP:0F3`, `PP:1REDUCE_GRAD` or `PP:step`.

    Args:
        program: The program to run. `schedir.check` must accept it under the progress model of the
            transport.
        rank: The pipeline rank of this process.
        stages: Either the local stages by number, or all stages of the model in order. From all
            stages, the executor takes the local ones. A stage is any module that can be called as
            `module(*tensors, **keywords)`. The first stage takes the inputs of the model.
        transport: The transport that sends and receives tensors.
        loss: A function or module that is called as `loss(output, target)` with the output of the
            last stage. It returns a floating-point tensor with one element.
        boundary: The tensors that pass between stages. For one tensor, it is a `Boundary` or a
            shape. For several tensors, it is a sequence with a `Boundary` for each tensor. If the
            tensors differ between stages, it is a mapping: stage -> the boundary after this stage,
            for all stages except the last. The key of a skip connection is the pair of its stages.
            If the tensors differ between microbatches, it is a `PerMicrobatchBoundary`.
            `infer_boundaries` determines the boundary from one microbatch. A tensor without a
            gradient is detached before it goes to the next stage. An input that a stage does not
            use gets a gradient of zeros.
        optimizer: The optimizer of the local parameters. Its `step` runs at OptimizerStep, after
            clipping. Do not also call `optimizer.step()` after `step`: that call would be a second
            update from the same gradients. By default the weights do not change.
        gradients: The options of gradients: their clipping, their scale, and their accumulation. By
            default the largest norm is 1.0, if the program clips gradients.
        seed: The seed of the random numbers that modules draw from torch's default generators.
            These numbers depend only on the seed, the step, the microbatch and the stage (see
            `schedir.runtime.autograd.random_streams`). At the end of a step, the executor restores
            the states of these generators. With None, the executor does not set the generators.
        tied_weights: The parameters that are copies of one weight: the result of
            `schedir.find_tied_weights(stages)` for all stages of the model. It must be the same in
            every process. The argument is not needed if local stages share a Parameter, or if each
            module has its copy as an attribute `tied_weight`.
        extra_programs: Other programs for the same stages, such as one for evaluation or one with
            another number of microbatches. An entry is a program, or a pair (program, boundary) if
            the program needs another boundary than `boundary`. The transport must be created for
            these programs, too.
        execution: The options of the execution: recording, checks, and the folder for values on the
            disk. These options change no result.

    Raises:
        ModelError: Processes passed different arguments, or stages, transport, options and program
            do not fit together.
        UsageError: An argument has a wrong type.
        SchedirError: `schedir.check` finds an error in the program, under the progress model of the
            transport.

    Example:
        >>> import schedir, torch
        >>> from torch import distributed, nn
        >>> from schedir.runtime import Executor, GlooTransport
        >>> distributed.init_process_group(
        ...     "gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> shape = schedir.PipelineShape(ranks=1, microbatches=4, stages_per_rank=2)
        >>> program = schedir.compile(schedir.schedules.interleaved, shape)
        >>> stages, loss = [nn.Linear(8, 8), nn.Linear(8, 1)], nn.functional.mse_loss
        >>> sgd = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.01)
        >>> how = dict(loss=loss, boundary=(2, 8), optimizer=sgd)
        >>> rank = Executor(program, 0, stages, GlooTransport(program),
        ...     **how)  # each process creates one
        >>> x, y = torch.ones(4, 2, 8), torch.ones(4, 2, 1)  # 4 microbatches of 2 samples
        >>> bool(rank.step(x, y) > rank.step(x, y))  # the loss decreases
        True
        >>> distributed.destroy_process_group()

    References:
        Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054).
        Qi et al. 2024, zero bubble pipeline parallelism (arXiv 2401.10241), section 4:
        post-validation.
    """

    # Parameter that several ranks of an `InProcessExecutor` share -> the copy that this rank uses.
    # The mapping is empty if each rank has a separate process.
    parameter_copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})

    if not TYPE_CHECKING:  # With `__getattr__`, a type checker would allow any attribute.
        __getattr__ = raise_attribute_error

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module] | Sequence[nn.Module],
        transport: Transport,
        *,
        loss: Loss,
        boundary: BoundaryLike | BoundaryByEdge | PerMicrobatchBoundary | BoundaryTable,
        optimizer: OptimizerLike | None = None,
        gradients: GradientOptions = GradientOptions(),
        seed: int | None = 0,
        tied_weights: TiedWeights | None = None,
        extra_programs: Sequence[ExtraProgram] = (),
        execution: ExecutionOptions = ExecutionOptions(),
    ) -> None:
        program = arguments.require_program(program)
        boundaries = BoundaryTable.from_boundary(boundary, program)
        extra_runs = resolve_extra_programs(extra_programs, program, boundaries)
        rank = arguments.require_rank(rank, program)
        transport = arguments.require_transport(transport)
        if (process_rank := getattr(transport, "rank", rank)) != rank:
            raise ModelError(
                f"rank is {rank}, but the transport of this process has rank {process_rank}",
                program=program.name,
                hint="pass transport.rank as rank",
                fields=["rank"],
            )
        local_stages = arguments.require_stages(stages, program, rank)
        numbered_stages = [] if isinstance(stages, Mapping) else [*enumerate(stages)]
        stages = local_stages
        arguments.require_optimizer(optimizer)
        programs = [program, *(extra_program for extra_program, _ in extra_runs)]
        require_type(
            gradients, "gradients", GradientOptions, "gradients=GradientOptions(max_norm=1.0)"
        )
        require_type(
            execution, "execution", ExecutionOptions, "execution=ExecutionOptions(debug=True)"
        )
        options = RankOptions(
            loss=arguments.require_loss(loss),
            gradients=gradients.resolve(program),
            execution=execution.resolve(programs),
            seed=None if seed is None else arguments.require_seed(seed),
            other_rank_stages=[
                module
                for s, module in numbered_stages
                if s not in stages and isinstance(module, nn.Module)
            ],
            parameter_copies=self.parameter_copies,
        )
        weights = ModelToCheck(
            [(program, boundaries), *extra_runs], rank, stages, transport, optimizer, options,
            tied_weights,
        ).check()  # fmt: skip
        rank_transport = (
            SerializedTransport(transport) if transport.uses_static_buffers else transport
        )
        resources = RankResources(
            program, rank, stages, rank_transport, optimizer, options, weights
        )
        resources.service(MessageBuffers).allocate([(program, boundaries), *extra_runs])
        self.resources = resources
        self.runner: ProgramRunner = ProgramRunner(
            program, resources, boundaries, 0, record_timestamps=options.execution.record_timestamps
        )
        # Digest of a program -> its runner. `runner` is the runner of the first program.
        self.runners: dict[str, ProgramRunner] = {program.digest: self.runner}
        for program_number, (extra_program, extra_boundaries) in enumerate(extra_runs, 1):
            runner = self.runners[extra_program.digest] = ProgramRunner(
                extra_program, resources, extra_boundaries, program_number, record_timestamps=False
            )
            runner.progress = self.runner.progress
        self.program_order: ProgramOrder = ProgramOrder(programs, rank, transport)
        self.current_runner: ProgramRunner = self.runner  # The runner of the current or last step.
        for service in self.state.list_services():
            service.finish_setup()

    @property
    def program(self) -> Program:
        """The first program of the executor."""
        return self.resources.program

    @property
    def rank(self) -> int:
        """The pipeline rank."""
        return self.resources.rank

    @property
    def stages(self) -> Mapping[int, StageState]:
        """The local stages by number, with their modules and gradients."""
        return self.resources.stages

    @property
    def random_streams(self) -> RandomStreams:
        """The random streams of the modules. Their `step` is the number of the next step."""
        return self.resources.random_streams

    @property
    def state(self) -> ProgramState:
        """The state of the first program."""
        return self.runner.state

    @property
    def grad_norm(self) -> Tensor:
        """The global norm of the last update's gradients, before clipping.

        It is a 0-dimensional float64 tensor on the rank's device, and 0 if the program does not
        clip gradients.
        """
        return self.state.service(UpdateChecks).read_last_result()[0]

    @property
    def finite_updates(self) -> Tensor:
        """For each update of the last step, True if the executor made the update.

        The executor skips an update whose gradients are not finite. The result is a bool tensor of
        shape (updates,) on the rank's device.
        """
        return self.state.service(UpdateChecks).read_last_result()[1]

    @property
    def timestamps(self) -> Timestamps | None:
        """The recorded times of the last step of the first program, or None without recording."""
        return self.runner.timestamps

    @property
    def record_timestamps(self) -> bool:
        """True if the executor records the times of instructions of the first program."""
        return self.runner.record_timestamps

    @record_timestamps.setter
    def record_timestamps(self, record_timestamps: bool) -> None:
        self.runner.record_timestamps = record_timestamps

    @explain_wrong_calls("executor.step(inputs, targets)")
    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        grad_scale: float | Tensor = 1.0,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor | None:
        """Run one training step: all instructions of the rank, with all updates of the program.

        Some transports, such as NCCL, use CUDA streams. Before the first step over such a
        transport, the executor runs warm-up steps on the same data. Loading a kernel, allocating
        memory or connecting to a peer may wait for all work on the GPU. If that happened while a
        receive waits for its peer, the ranks could deadlock. So warm-up steps run one instruction
        at a time. The executor undoes their changes to Parameters and buffers, but not to other
        state of modules, losses and hooks, such as a counter.

        Args:
            inputs: The input of the first stage for each microbatch: a tensor or a tuple of
                tensors. A rank without the first stage may pass an empty sequence.
            targets: The target of the loss for each microbatch. A rank without the last stage may
                pass an empty sequence.
            grad_scale: A factor. The step computes the gradients of `grad_scale` times the sum of
                the losses of an update. A 0-dimensional tensor on the rank's device is also
                allowed. The host does not read it.
            keywords: For each microbatch, the keyword arguments of all stages. By default there are
                none.
            program: The program to run. By default the first program of this executor.

        Returns:
            On a rank with the last stage, the unscaled sum of the losses that the rank computed,
            0-dimensional. On other ranks, None.

        Raises:
            ExecutionError: An instruction failed, inputs or targets are missing, or an earlier step
                failed.
            ModelError: The set of trainable parameters has changed, or the executor was not created
                with `program`.
            ProgramSequenceError: Ranks run different programs.
        """
        runner = self.find_step_runner(program)
        self._switch_program(runner)
        return runner.run_step(StepInputs(inputs, targets, grad_scale, keywords))

    @explain_wrong_calls("executor.evaluate(inputs, targets)")
    def evaluate(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor | None:
        """Run the forwards of a program between two steps, with all modules in evaluation mode.

        An evaluation does not change the state of training. Gradients stay unchanged, and the
        executor restores buffers, module modes and generators. `random_streams.step` stays the
        same, so later steps draw the same random numbers as without the evaluation.

        Args:
            inputs: See `step`.
            targets: See `step`.
            keywords: See `step`.
            program: The program to run. By default the only program of this executor without a
                backward.

        Returns:
            The sum of the losses, as `step` returns it.

        Raises:
            ExecutionError: As in `step`.
            ModelError: A forward wrote to a Parameter, or the executor was not created with
                `program`.
            ProgramSequenceError: Ranks run different programs.
        """
        runner = self.find_runner(program, has_backward=False)
        self.validate_last_update()
        self._switch_program(runner)
        return runner.run_evaluation(StepInputs(inputs, targets, 1.0, keywords))

    def find_step_runner(self, program: Program | None) -> ProgramRunner:
        """Return the runner of a training step.

        Args:
            program: See `step`.

        Raises:
            ModelError: The executor has no such program, or it has an optimizer, but its first
                program has only forwards.
        """
        if program is not None:
            return self.find_runner(program, has_backward=True)
        if not self.program.has_backward and self.resources.optimizer is not None:
            raise ModelError(
                "step needs backwards, but the program has only forwards, so the optimizer would "
                "not update the weights",
                program=self.program.name,
                hint="evaluate(inputs, targets), or a schedule with B, or with I and W",
            )
        return self.runner

    def find_runner(self, program: Program | None, *, has_backward: bool) -> ProgramRunner:
        """Return the runner of one of the programs of this executor.

        Args:
            program: The program. If `program` is None, the executor must have exactly one program
                with this `has_backward`.
            has_backward: True for a program that trains, False for one that only evaluates.

        Raises:
            ModelError: The executor has no such program, or it has several and `program` is None.
        """
        if program is not None:
            arguments.require_program(program)
        candidates = [
            runner
            for runner in self.runners.values()
            if runner.program.has_backward == has_backward
            if program is None or runner.program.digest == program.digest
        ]
        if len(candidates) == 1:
            return candidates[0]
        verb = "trains" if has_backward else "does not train"
        names = ", ".join(runner.program.name for runner in self.runners.values())
        description = (
            f"program that {verb}" if program is None else f"program {program.name!r} that {verb}"
        )
        raise ModelError(
            f"the executor has {'more than one' if candidates else 'no'} {description}: it has "
            f"{names}",
            program=self.program.name,
            hint="pass program=..., one of these programs"
            if candidates
            else "create the executor with extra_programs=[program]"
            if has_backward or program is not None
            else "create the executor with extra_programs=[schedir.evaluation_program(program)]",
        )

    def _switch_program(self, runner: ProgramRunner) -> None:
        """Make `runner` the current runner. All processes must call this method together."""
        self.state.require_no_failed_step()
        self.program_order.start_run(runner.program_number)
        self.current_runner = runner

    def validate_last_update(self) -> None:
        """Validate the last update of a program with `norm_check="after_step"`.

        Before this call the weights and the optimizer state may be wrong. The loss that `step`
        returns is always right, and so are `grad_norm` and `finite_updates`. For other programs the
        method does nothing. All processes must call this method after the same step.

        Raises:
            ModelError: The processes call the method after different steps.
            ExecutionError: An earlier step failed.
        """
        for service in self.state.list_services():
            service.validate()

    def checkpoint_state(self) -> CheckpointState:
        """Return the state that `schedir.checkpoints` saves and loads."""
        return build_checkpoint_state([self.state], self.validate_last_update)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which every parameter is unsharded (ZeRO), to save or load weights.

        Use this context between steps. All processes must enter and leave the context together, and
        must write the same values to parameters.

        Raises:
            ExecutionError: An earlier step failed.
            ModelError: Replicas wrote different values. The error is raised at the end of the
                context.
        """
        self.state.require_no_failed_step()
        return self.state.service(ShardedStages).gather_full()
