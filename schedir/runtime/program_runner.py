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
from schedir.analysis.total_order import one_order
from schedir.errors import ExecutionError, ModelError
from schedir.io.black_box import AT, SINCE, BlackBox
from schedir.io.profiler_range_names import marks_of
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.evaluation_run import looking
from schedir.runtime.handlers.handler_registry import linked
from schedir.runtime.rank_resources import RankResources
from schedir.runtime.rank_state import Call, State
from schedir.runtime.recording.recorder import RecordedTransport, Timestamps, stamps_of
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.warm_up import RecordedState, UnsteppedParameters, warm_up
from schedir.transports.serialized_transport import SerializedTransport

# ---------------------------------------------------------------- position in the program

# The instruction that the host of a rank issues.


class DispatchPosition:
    """The words of a black box in which the dispatch loop notes what it has begun, and when.

    `at` is memory of the process alone, unless it is given that of a file.
    """

    calls: list[Call]

    def __init__(self) -> None:
        self.at: memoryview[int] = BlackBox().words

    @property
    def position(self) -> int:
        """The instruction that was begun last, by its index in the Stream."""
        return min(self.at[AT], len(self.calls) - 1)


class ProgramRunner(DispatchPosition):
    """A program on what a rank holds.

    With `record`, `stamps` notes when each instruction begins and ends.
    """

    def __init__(
        self,
        program: Program,
        held: RankResources,
        passing: BoundaryTable,
        number: int,
        *,
        record: bool,
    ) -> None:
        self.held, transport = held, held.transport
        self.record, self.profiled = record, False
        self.in_turn = transport if isinstance(transport, SerializedTransport) else None
        self.warm = self.in_turn is None
        self.stamps: Timestamps | None = None
        if record:
            self.stamps = stamps_of(program, held.rank, transport.progress_model, held.device)
            transport = RecordedTransport(transport, self.stamps)
        self.state = State(program, held, transport, passing, number)
        if self.stamps is not None:
            self.state.as_of, self.state.on_lane = self.stamps.as_of, self.stamps.on_lane
        self.unstepped = UnsteppedParameters(self.state)
        super().__init__()
        self.calls = linked(self.state)

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
    def under_way(self) -> bool:
        """Whether the rank is in a step, or in one that has failed."""
        return self.held.under_way

    @under_way.setter
    def under_way(self, under_way: bool) -> None:
        self.held.under_way = under_way

    @property
    def draws(self) -> RandomStreams:
        """What modules draw from; its `step` is the number of the next step."""
        return self.state.draws

    @property
    def norm(self) -> Tensor:
        """The global norm of the last update's gradients before clipping, if the program clips:
        0-dim, float64, on the rank's device."""
        return (self.held.stepped or self.state.norm_and_finite)()[0]

    @property
    def finite(self) -> Tensor:
        """Of each update of the last step whether it was made: bool, on the rank's device."""
        return (self.held.stepped or self.state.norm_and_finite)()[1]

    def run(self, batch: StepInputs) -> Tensor | None:
        """As Executor.step."""
        if not self.warm:
            self._warm_up(batch)
        return self._step(batch)

    def look(self, batch: StepInputs) -> Tensor | None:
        """As Executor.evaluate."""
        with looking(self.state):
            return self.run(batch)

    def step_in_turn(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """As `step`, over a transport of streams, but one instruction after the other, in an order
        that all ranks share: nothing overlaps, and nothing hangs, whoever waits for the device.

        All processes must call this.  Raises ModelError over another transport.
        """
        if self.in_turn is None:
            raise ModelError(
                "one instruction after the other is for messages on streams of their own",
                program=self.program.name,
            )
        with self.in_turn.one_by_one():
            return self._step(StepInputs(inputs, targets, scale, keywords), self._one_order)

    @cached_property
    def _one_order(self) -> list[int]:
        of = self.state.transport
        graph = Graph.of(self.program, of.progress_model, blocking_hosts=of.blocking_hosts)
        return [*map(int, one_order(graph)[self.rank])]

    def _warm_up(self, batch: StepInputs) -> None:
        """Do whatever a step does at first use, in steps in turn that are undone."""
        self.state.expect(batch)
        record, self.record = self.record, False
        try:
            warm_up(self.state, self.step_in_turn, batch)
        finally:
            self.record = record
        self.warm = True

    def _step(self, batch: StepInputs, order: Sequence[int] | None = None) -> Tensor | None:
        """A step in the order of the Stream, or another one; again where it was in vain."""
        try:
            total = self._once(batch, order)
            while self.is_in_vain():
                total = self._once(batch, order)
        except BaseException:  # an interrupt, too, must not leave modules what stands in
            self.state.fail(begun=self.under_way)
            raise
        return total

    def _once(self, batch: StepInputs, order: Sequence[int] | None) -> Tensor | None:
        self.begin(batch)
        with self.draws.kept(), torch.set_grad_enabled(self.program.trains):
            if order or self.record or self.profiled:
                for k in order or range(len(self.calls)):
                    self.call(k)
            else:
                self._run()
        return self.finish()

    def _run(self) -> None:
        """Every call in order, and nothing else."""
        self.under_way, at, clock = True, self.at, monotonic_ns
        try:
            for k, (wait, run) in enumerate(self.calls):
                at[AT], at[SINCE] = k, clock()
                if wait is not None:
                    wait()
                run()
        except Exception as error:
            raise self.state.failed(self.position, error) from error

    def begin(self, batch: StepInputs) -> None:
        """Make ready for a step; then every call is made once, in a legal order."""
        state = self.state
        self._expect_whole()
        self.held.unchanged.expect(self.program.name)
        state.expect(batch)
        self.profiled = self.warm and torch.autograd.profiler._is_profiler_enabled
        if state.ahead is not None and state.ahead.begin():
            noted = RecordedState(state, batch, self.unstepped)
            batch, state.ahead.put_back = noted.batch, noted.put_back
        self.at[AT] = 0
        state.begin(batch)

    def is_in_vain(self) -> bool:
        """Whether the step that has ended was run on wrong weights, on all ranks: these are right
        now, all else is as it was, and it must be run again."""
        ahead, self.under_way = self.state.ahead, True  # who fails here has failed in the step
        try:
            in_vain = ahead is not None and ahead.ended()
        except Exception as error:
            raise self.state.failed(self.position, error) from error
        self.under_way = False
        return in_vain

    def _expect_whole(self) -> None:
        """Raise ExecutionError after a step that has failed."""
        if self.under_way:
            raise ExecutionError(
                f"rank {self.rank} has failed in the step before, and left messages on their way",
                program=self.program.name,
                hint="make the executor and its transport anew",
            )

    @cached_property
    def _marks(self) -> list[str]:
        """The names of the ranges that instructions are under torch.profiler, by their index."""
        return marks_of(self.state.stream)

    def call(self, k: int) -> None:
        """Run the instruction at index k of the Stream; `step` has set whether gradients flow."""
        self.under_way, self.at[AT], self.at[SINCE] = True, k, monotonic_ns()
        wait, run = self.calls[k]
        stamps = self.stamps if self.record else None
        try:
            if wait is not None:
                wait()
            if stamps is not None:
                stamps.begins(k)
            if self.profiled:
                with record_function(self._marks[k]):
                    run()
            else:
                run()
            if stamps is not None:
                stamps.ends(k)
        except Exception as error:
            raise self.state.failed(self.position, error) from error

    def finish(self) -> Tensor | None:
        """End a step: everything that is still on its way out is waited for."""
        self.at[AT], self.at[SINCE] = len(self.calls), monotonic_ns()
        total, self.under_way = self.state.finish(), False
        if self.stamps is not None and self.record:
            self.stamps.close()
        return total
