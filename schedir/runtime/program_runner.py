"""ProgramRunner: one program of a rank, linked and ready to run steps.

A step is a loop over calls, to which the Stream was linked once.  A Transport moves the tensors.
The caller chooses one of the legal orders of the calls: a process makes them in Stream order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from time import monotonic_ns

import torch
from torch import Tensor
from torch.profiler import record_function

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.total_order import find_total_order
from schedir.errors import ExecutionError, ModelError
from schedir.io.black_box import POSITION_FIELD, POSITION_TIME_FIELD, BlackBox
from schedir.io.profiler_range_names import format_range_names
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.evaluation_run import evaluation_mode
from schedir.runtime.handlers.handler_registry import link_stream
from schedir.runtime.rank_resources import RankResources
from schedir.runtime.rank_state import Call, State
from schedir.runtime.recording.recorder import RecordedTransport, Timestamps, make_timestamps
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.warm_up import RecordedState, UnsteppedParameters, warm_up
from schedir.transports.serialized_transport import SerializedTransport

# ---------------------------------------------------------------- position in the program

# The instruction that the host of a rank issues.


class DispatchPosition:
    """The words of a black box in which the dispatch loop notes what it has begun, and when.

    `progress` is memory of the process alone, unless it is given that of a file.
    """

    calls: list[Call]

    def __init__(self) -> None:
        self.progress: memoryview[int] = BlackBox().values

    @property
    def position(self) -> int:
        """The instruction that was begun last, by its index in the Stream."""
        return min(self.progress[POSITION_FIELD], len(self.calls) - 1)


class ProgramRunner(DispatchPosition):
    """A program on what a rank holds.

    With `record_timestamps`, `timestamps` notes when each instruction begins and ends.
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
        self.resources, transport = resources, resources.transport
        self.record_timestamps, self.is_profiled = record_timestamps, False
        self.serialized_transport = (
            transport if isinstance(transport, SerializedTransport) else None
        )
        self.is_warm = self.serialized_transport is None
        self.timestamps: Timestamps | None = None
        if record_timestamps:
            self.timestamps = make_timestamps(
                program, resources.rank, transport.progress_model, resources.device
            )
            transport = RecordedTransport(transport, self.timestamps)
        self.state = State(program, resources, transport, boundaries, program_number)
        if self.timestamps is not None:
            self.state.record_as, self.state.get_lane_observer = (
                self.timestamps.attribute_to,
                self.timestamps.make_lane_observer,
            )
        self.unstepped_parameters = UnsteppedParameters(self.state)
        super().__init__()
        self.calls = link_stream(self.state)

    @property
    def program(self) -> Program:
        """The program of this run."""
        return self.state.program

    @property
    def rank(self) -> int:
        """Which of the pipeline's ranks this is."""
        return self.state.rank

    @property
    def stages(self) -> Mapping[int, StageState]:
        """Own stages by number, with their modules and gradients."""
        return self.state.stages

    @property
    def is_in_step(self) -> bool:
        """Whether the rank is in a step, or in one that has failed."""
        return self.resources.is_in_step

    @is_in_step.setter
    def is_in_step(self, is_in_step: bool) -> None:
        self.resources.is_in_step = is_in_step

    @property
    def random_streams(self) -> RandomStreams:
        """What modules draw from; its `step` is the number of the next step."""
        return self.state.random_streams

    @property
    def grad_norm(self) -> Tensor:
        """The global norm of the last update's gradients before clipping, if the program clips:
        0-dim, float64, on the rank's device."""
        return (self.resources.get_last_update_result or self.state.get_update_result)()[0]

    @property
    def finite_updates(self) -> Tensor:
        """Of each update of the last step whether it was made: bool, on the rank's device."""
        return (self.resources.get_last_update_result or self.state.get_update_result)()[1]

    def run_step(self, batch: StepInputs) -> Tensor | None:
        """As Executor.step."""
        if not self.is_warm:
            self._warm_up(batch)
        return self._run_until_valid(batch)

    def run_evaluation(self, batch: StepInputs) -> Tensor | None:
        """As Executor.evaluate."""
        with evaluation_mode(self.state):
            return self.run_step(batch)

    def step_serialized(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        grad_scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """As `step`, over a transport of streams, but one instruction after the other, in an order
        that all ranks share: nothing overlaps, and nothing hangs, whoever waits for the device.

        All processes must call this.  Raises ModelError over another transport.
        """
        if self.serialized_transport is None:
            raise ModelError(
                "one instruction after the other is for messages on streams of their own",
                program=self.program.name,
            )
        with self.serialized_transport.serialize():
            return self._run_until_valid(
                StepInputs(inputs, targets, grad_scale, keywords), self._serial_order
            )

    @cached_property
    def _serial_order(self) -> list[int]:
        of = self.state.transport
        graph = Graph.from_program(
            self.program, of.progress_model, blocking_hosts=of.blocking_hosts
        )
        return [*map(int, find_total_order(graph)[self.rank])]

    def _warm_up(self, batch: StepInputs) -> None:
        """Do whatever a step does at first use, in steps in turn that are undone."""
        self.state.require_inputs(batch)
        record, self.record_timestamps = self.record_timestamps, False
        try:
            warm_up(self.state, self.step_serialized, batch)
        finally:
            self.record_timestamps = record
        self.is_warm = True

    def _run_until_valid(
        self, batch: StepInputs, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """A step in the order of the Stream, or another one; again where it was in vain."""
        try:
            total = self._run_once(batch, order)
            while self.needs_rerun():
                total = self._run_once(batch, order)
        except BaseException:  # an interrupt, too, must not leave modules what stands in
            self.state.abort_step(has_begun=self.is_in_step)
            raise
        return total

    def _run_once(self, batch: StepInputs, order: Sequence[int] | None) -> Tensor | None:
        self.begin_step(batch)
        with (
            self.random_streams.preserve_generators(),
            torch.set_grad_enabled(self.program.has_backward),
        ):
            if order or self.record_timestamps or self.is_profiled:
                for k in order or range(len(self.calls)):
                    self.run_instruction(k)
            else:
                self._run_instructions()
        return self.finish_step()

    def _run_instructions(self) -> None:
        """Every call in order, and nothing else."""
        self.is_in_step, at, clock = True, self.progress, monotonic_ns
        try:
            for k, (wait, run) in enumerate(self.calls):
                at[POSITION_FIELD], at[POSITION_TIME_FIELD] = k, clock()
                if wait is not None:
                    wait()
                run()
        except Exception as error:
            raise self.state.wrap_error(self.position, error) from error

    def begin_step(self, batch: StepInputs) -> None:
        """Make ready for a step; then every call is made once, in a legal order."""
        state = self.state
        self._require_no_failed_step()
        self.resources.parameter_guard.require_unchanged(self.program.name)
        state.require_inputs(batch)
        self.is_profiled = self.is_warm and torch.autograd.profiler._is_profiler_enabled
        if state.optimistic_step is not None and state.optimistic_step.begin_step():
            noted = RecordedState(state, batch, self.unstepped_parameters)
            batch, state.optimistic_step.restore_step_state = noted.batch, noted.restore
        self.progress[POSITION_FIELD] = 0
        state.begin_step(batch)

    def needs_rerun(self) -> bool:
        """Whether the step that has ended was run on wrong weights, on all ranks: these are right
        now, all else is as it was, and it must be run again."""
        ahead, self.is_in_step = (
            self.state.optimistic_step,
            True,
        )  # who fails here has failed in the step
        try:
            in_vain = ahead is not None and ahead.end_step()
        except Exception as error:
            raise self.state.wrap_error(self.position, error) from error
        self.is_in_step = False
        return in_vain

    def _require_no_failed_step(self) -> None:
        """Raise ExecutionError after a step that has failed."""
        if self.is_in_step:
            raise ExecutionError(
                f"rank {self.rank} has failed in the step before, and left messages on their way",
                program=self.program.name,
                hint="make the executor and its transport anew",
            )

    @cached_property
    def _profiler_range_names(self) -> list[str]:
        """The names of the ranges that instructions are under torch.profiler, by their index."""
        return format_range_names(self.state.stream)

    def run_instruction(self, index: int) -> None:
        """Run the instruction at index k of the Stream; `step` has set whether gradients flow."""
        self.is_in_step, self.progress[POSITION_FIELD], self.progress[POSITION_TIME_FIELD] = (
            True,
            index,
            monotonic_ns(),
        )
        wait, run = self.calls[index]
        stamps = self.timestamps if self.record_timestamps else None
        try:
            if wait is not None:
                wait()
            if stamps is not None:
                stamps.begin_instruction(index)
            if self.is_profiled:
                with record_function(self._profiler_range_names[index]):
                    run()
            else:
                run()
            if stamps is not None:
                stamps.end_instruction(index)
        except Exception as error:
            raise self.state.wrap_error(self.position, error) from error

    def finish_step(self) -> Tensor | None:
        """End a step: everything that is still on its way out is waited for."""
        self.progress[POSITION_FIELD], self.progress[POSITION_TIME_FIELD] = (
            len(self.calls),
            monotonic_ns(),
        )
        total, self.is_in_step = self.state.finish_step(), False
        if self.timestamps is not None and self.record_timestamps:
            self.timestamps.end_step()
        return total
