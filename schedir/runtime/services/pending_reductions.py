"""PendingReductions: the reductions of gradients that a rank has started."""

from __future__ import annotations

from collections import deque

from schedir.ir.isa.instructions import Instr, Value
from schedir.runtime.parameters.overlapped_reduction import (
    GradientReduction,
    find_last_accumulations,
)
from schedir.runtime.program_state import ProgramService, ProgramState
from schedir.runtime.value_slots import find_freeing_instructions
from schedir.transports.transport import Work


class PendingReductions(ProgramService):
    """The reductions of a program's gradients that may still be running.

    Args:
        state: The state of the program.

    Attributes:
        works: The pending works, except for reduce-scatters.
        reduce_scatters: Pending reduce-scatters, oldest first: the index of the instruction, and
            its works.
        by_instruction: Instruction -> its reduction over replicas.
        overlapped: Instruction of a backward -> instruction of the reduction that overlaps with it.
        starts_after_backward: True to start all reductions after their backward.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.works: list[Work] = []
        self.reduce_scatters: deque[tuple[int, list[Work]]] = deque()
        self.by_instruction: dict[Instr, GradientReduction] = {}
        self.overlapped = find_last_accumulations(state.stream) if state.program.dp > 1 else {}
        self.starts_after_backward = False
        # Index of an instruction that is the first to add to a full gradient -> index of the
        # reduction that freed the slot of this gradient.
        self.freed_by = find_freeing_instructions(state.program, state.rank, Value.WGRAD)

    def wait(self) -> None:
        """Wait for all pending reductions."""
        while self.reduce_scatters:
            self._wait_for_reduce_scatter()
        for work in self.works:
            work.wait()
        self.works.clear()

    def allocate_gradient(self, stage: int, index: int) -> None:
        """Allocate the full gradient of a stage, after the reduction that frees its slot.

        If the full gradient already exists, the method does nothing.

        Args:
            stage: The number of the stage.
            index: The index in the stream of the instruction that adds to the gradient.
        """
        gradients = self.state.stages[stage].gradients
        if gradients.is_allocated:
            return
        freed_by = self.freed_by.get(index, -1)
        while self.reduce_scatters and self.reduce_scatters[0][0] <= freed_by:
            self._wait_for_reduce_scatter()
        gradients.allocate()

    def _wait_for_reduce_scatter(self) -> None:
        """Wait for the oldest pending reduce-scatter."""
        _, works = self.reduce_scatters.popleft()
        for work in works:
            work.wait()
