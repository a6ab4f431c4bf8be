"""ProgramRunner: one program of a rank, with the calls of its instructions.

The handlers create one call for each instruction of the stream, and a step is a loop over these
calls. A process runs the calls in the order of the stream. `InProcessExecutor` may choose another
legal order. In a legal order, each instruction comes after all instructions that it depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from time import monotonic_ns

import torch
from torch import Tensor
from torch.profiler import record_function

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.total_order import find_total_order
from schedir.errors import ModelError, SchedirError
from schedir.io.black_box import POSITION_FIELD, POSITION_TIME_FIELD, BlackBox
from schedir.io.profiler_range_names import format_range_names
from schedir.ir.program import Program
from schedir.runtime.autograd.evaluation_mode import evaluation_mode
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.handlers.handler_registry import link_stream
from schedir.runtime.model_checks.parameter_guard import ParameterGuard
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.rank_resources import RankResources
from schedir.runtime.recording.recorder import RecordedTransport, Timestamps, make_timestamps
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.step_rollback import warm_up
from schedir.transports.serialized_transport import SerializedTransport


class ProgramRunner:
    """A program of a rank, with a call for each instruction.

    Args:
        program: The program.
        resources: The stages, gradients, optimizer and memory of the rank.
        boundaries: The boundaries of the program, by microbatch.
        program_number: The index of the program among the programs of the executor.
        record_timestamps: True to record in `timestamps` when each instruction begins and ends.

    Attributes:
        state: The state of the program.
        calls: The calls of the instructions, in the order of the stream.
        timestamps: The recorder of the times of instructions, or None if `record_timestamps` was
            False.
        is_warm: True if the next step needs no warm-up steps.
        progress: The index of the current instruction and its start time in nanoseconds. By default
            they are in memory of the process. A caller may set `progress` to a view of a black box,
            a memory-mapped file that remains if the process dies.
    """

    def __init__(
        self,
        program: Program,
        resources: RankResources,
        boundaries: BoundaryTable,
        program_number: int,
        *,
        record_timestamps: bool,
    ) -> None:
        self.resources = resources
        transport = resources.transport
        self.record_timestamps: bool = record_timestamps
        self.is_profiled: bool = False
        self.serialized_transport: SerializedTransport | None = (
            transport if isinstance(transport, SerializedTransport) else None
        )
        self.is_warm: bool = self.serialized_transport is None
        self.timestamps: Timestamps | None = None
        if record_timestamps:
            self.timestamps = make_timestamps(
                program, resources.rank, transport.progress_model, resources.device
            )
            transport = RecordedTransport(transport, self.timestamps)
        self.state: ProgramState = ProgramState(
            program, resources, transport, boundaries, self.timestamps
        )
        self.program_number = program_number
        modules = {s: stage.module for s, stage in resources.stages.items()}
        self.parameter_guard: ParameterGuard = ParameterGuard(modules)
        self.calls: list[Call] = link_stream(self.state)
        self.progress: memoryview[int] = BlackBox().values

    @property
    def program(self) -> Program:
        """The program that this runner runs."""
        return self.state.program

    @property
    def position(self) -> int:
        """The index in the stream of the instruction that began last."""
        return min(self.progress[POSITION_FIELD], len(self.calls) - 1)

    def run_step(self, batch: StepInputs) -> Tensor | None:
        """Run one training step, after the warm-up steps if `is_warm` is False.

        Args:
            batch: The inputs of the step.

        Returns:
            See `Executor.step`.

        Raises:
            ExecutionError: See `Executor.step`.
        """
        if not self.is_warm:
            self._warm_up(batch)
        return self._run_until_valid(batch)

    def run_evaluation(self, batch: StepInputs) -> Tensor | None:
        """Run the forwards between two steps, in evaluation mode.

        Args:
            batch: The inputs of the evaluation.

        Returns:
            See `Executor.evaluate`.

        Raises:
            ExecutionError: See `Executor.step`.
            ModelError: A forward wrote to a Parameter.
        """
        with evaluation_mode(self.state):
            return self.run_step(batch)

    def step_serialized(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        grad_scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """Run one training step without overlap, one instruction after the other.

        All ranks use the same total order of instructions. So there is no deadlock, even if an
        instruction waits for the device. All processes must call this method together.

        Args:
            inputs: See `Executor.step`.
            targets: See `Executor.step`.
            grad_scale: See `Executor.step`.
            keywords: See `Executor.step`.

        Returns:
            See `Executor.step`.

        Raises:
            ModelError: The transport does not use NCCL.
            ExecutionError: See `Executor.step`.
        """
        if self.serialized_transport is None:
            raise ModelError(
                "step_serialized needs an NCCL transport",
                program=self.program.name,
            )
        with self.serialized_transport.serialize():
            return self._run_until_valid(
                StepInputs(inputs, targets, grad_scale, keywords), self._serial_order
            )

    @cached_property
    def _serial_order(self) -> list[int]:
        transport = self.state.transport
        graph = Graph.from_program(
            self.program, transport.progress_model, blocking_hosts=transport.blocking_hosts
        )
        return [*map(int, find_total_order(graph)[self.state.rank])]

    def _warm_up(self, batch: StepInputs) -> None:
        """Run and undo the warm-up steps, without timestamps."""
        self.state.require_inputs(batch)
        with PreservedState() as preserved:
            preserved.add_fields(self, "record_timestamps")
            self.record_timestamps = False
            warm_up(self.state, self.step_serialized, batch)
        self.is_warm = True

    def _run_until_valid(
        self, batch: StepInputs, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """Run a step in `order`, or by default in stream order, until `needs_rerun` is False."""
        step_number = self.state.random_streams.step
        try:
            total_loss = self._run_once(batch, order)
            while self.needs_rerun():
                total_loss = self._run_once(batch, order)
        except BaseException:  # restore modules also after KeyboardInterrupt
            self.state.abort_step(step_number, has_begun=self.resources.is_in_step)
            raise
        return total_loss

    def _run_once(self, batch: StepInputs, order: Sequence[int] | None) -> Tensor | None:
        self.begin_step(batch)
        with (
            self.state.random_streams.preserve_generators(),
            torch.set_grad_enabled(self.program.has_backward),
        ):
            if order or self.record_timestamps or self.is_profiled:
                for k in order or range(len(self.calls)):
                    self.run_instruction(k)
            else:
                self._run_instructions()
        return self.finish_step()

    def _run_instructions(self) -> None:
        """Run all calls in stream order, without timestamps and profiler ranges."""
        self.resources.is_in_step, progress, clock = True, self.progress, monotonic_ns
        try:
            for k, (wait, run) in enumerate(self.calls):
                progress[POSITION_FIELD], progress[POSITION_TIME_FIELD] = k, clock()
                if wait is not None:
                    wait()
                run()
        except Exception as error:
            raise self.state.wrap_error(self.position, error) from error

    def begin_step(self, batch: StepInputs) -> None:
        """Prepare a step. The caller then runs every instruction once, in a legal order.

        Args:
            batch: The inputs of the step.

        Raises:
            ExecutionError: An earlier step failed, or an input is missing.
            ModelError: The set of trainable parameters has changed.
        """
        state = self.state
        state.require_no_failed_step()
        self.parameter_guard.require_unchanged(self.program.name)
        state.require_inputs(batch)
        self.is_profiled = self.is_warm and torch.autograd.profiler._is_profiler_enabled
        for service in state.list_services():
            batch = service.prepare_inputs(batch)
        self.progress[POSITION_FIELD] = 0
        state.transport.on_step_begin(self.program_number)
        state.begin_step(batch)

    def needs_rerun(self) -> bool:
        """Return whether all ranks must run the step again, because its weights were wrong.

        The weights are wrong if the previous update failed its validation. In this case the method
        corrects the weights, and restores all other state from before the step. Call this method
        once after each step.

        Raises:
            ExecutionError: The validation of the update failed.
        """
        self.resources.is_in_step = True  # an error here counts as a failed step
        try:
            must_repeat = any([service.needs_rerun() for service in self.state.list_services()])
        except Exception as error:
            raise self.state.wrap_error(None, error) from error
        self.resources.is_in_step = False
        return must_repeat

    @cached_property
    def _profiler_range_names(self) -> list[str]:
        """The names of the profiler ranges of the instructions, by index in the stream."""
        return format_range_names(self.state.stream)

    def run_instruction(self, index: int) -> None:
        """Run one instruction, with its timestamps and profiler range.

        The caller must have called `begin_step`, and must have set torch's gradient mode.

        Args:
            index: The index of the instruction in the stream.

        Raises:
            ExecutionError: The instruction failed.
        """
        self.resources.is_in_step = True
        self.progress[POSITION_FIELD] = index
        self.progress[POSITION_TIME_FIELD] = monotonic_ns()
        wait, run = self.calls[index]
        timestamps = self.timestamps if self.record_timestamps else None
        try:
            if wait is not None:
                wait()
            if timestamps is not None:
                timestamps.begin_instruction(index)
            if self.is_profiled:
                with record_function(self._profiler_range_names[index]):
                    run()
            else:
                run()
            if timestamps is not None:
                timestamps.end_instruction(index)
        except Exception as error:
            raise self.state.wrap_error(self.position, error) from error

    def finish_step(self) -> Tensor | None:
        """End a step after its last instruction.

        Returns:
            The sum of the losses on a rank with the last stage, and None on other ranks.

        Raises:
            ExecutionError: The end of the step failed, for example because a peer ended before it
                received a message.
            ModelError: See `ProgramState.finish_step`.
        """
        self.progress[POSITION_FIELD] = len(self.calls)
        self.progress[POSITION_TIME_FIELD] = monotonic_ns()
        try:
            total_loss = self.state.finish_step()
        except SchedirError:
            raise
        except Exception as error:
            raise self.state.wrap_error(None, error) from error
        self.resources.is_in_step = False
        if self.timestamps is not None and self.record_timestamps:
            self.timestamps.end_step()
        return total_loss
