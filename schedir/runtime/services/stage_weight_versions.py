"""StageWeightVersions: the weight versions of all stages of a program with several updates."""

from __future__ import annotations

from schedir.ir.isa.instructions import Instr
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.runtime.program_state import ProgramService, ProgramState


class StageWeightVersions(ProgramService):
    """The weight versions of a rank's trained stages in a program with several updates.

    Args:
        state: The state of the program.

    Attributes:
        by_stage: Trained stage -> its weight versions.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.by_stage: dict[int, WeightVersions] = {}
        for s, stage in state.stages.items():
            if s >= state.program.frozen_stages:
                stage_instructions = ((k, i) for k, i in enumerate(state.stream) if i.stage == s)
                stage.local_ties.install_substitutes()
                self.by_stage[s] = WeightVersions(stage.module, state.shape, stage_instructions)
                stage.local_ties.restore()

    def begin_step(self) -> None:
        """Keep a copy of the weights before the first update."""
        for versions in self.by_stage.values():
            versions.begin_step()

    def keep_next(self, step: Instr) -> None:
        """Keep a copy of the weights after an optimizer step, for later compute instructions.

        Args:
            step: The OptimizerStep. The `mb` of this instruction is the index of the update.
        """
        for versions in self.by_stage.values():
            versions.keep_version(step.mb + 1, self.state.index_of[step])

    def finish_step(self) -> None:
        """Check that the step wrote to no copy of the weights.

        Raises:
            ModelError: A stage wrote to a copy of its weights.
        """
        for versions in self.by_stage.values():
            versions.end_step()

    def restore(self) -> None:
        """Put the original parameters back into all modules."""
        for versions in self.by_stage.values():
            versions.restore()


def find_weight_versions(state: ProgramState, stage: int) -> WeightVersions | None:
    """Return the weight versions of a stage, or None if the stage needs none.

    Args:
        state: The state of the program.
        stage: The number of the stage.
    """
    if not state.program.has_backward or state.shape.optimizer_steps == 1:
        return None
    return state.service(StageWeightVersions).by_stage.get(stage)
