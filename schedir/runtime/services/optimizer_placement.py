"""OptimizerPlacement: the optimizer state of a rank on the host or on the disk."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from schedir.errors import ModelError
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.rank_resources import RankResources, RankService
from schedir.runtime.step_inputs import StepInputs


class OptimizerPlacement(RankService):
    """Moves the optimizer state of a rank to the tier that the program sets, between steps.

    Args:
        resources: The resources of the rank.

    Attributes:
        optimizer_state: The object that moves the state and runs the optimizer step. None if the
            rank has no optimizer.

    Raises:
        ModelError: Parameters or state tensors share memory, so an optimizer step of one stage
            changes another stage.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        program, optimizer = resources.program, resources.optimizer
        parameters = {
            s: [resources.ties.parameter_copies.get(p, p) for p in stage.module.parameters()]
            for s, stage in resources.stages.items()
            if s >= program.frozen_stages
        }
        self.optimizer_state: HostOptimizerState | None = None
        if optimizer is None:
            return
        names: dict[Tensor, str] = {
            p: f"{name} of stage {s}"
            for s, stage in resources.stages.items()
            for p, name in stage.gradients.names.items()
        }
        arguments = parameters, optimizer, resources.service(CopyLanes), resources.device, names
        try:
            if program.optimizer_placement == "disk":
                tiers = resources.service(MemoryTiers)
                file = tiers.open_spill_file(program.name)
                self.optimizer_state = DiskOptimizerState(*arguments, tiers, file)
            elif program.optimizer_placement == "cpu_step":
                self.optimizer_state = CpuOptimizer(*arguments, resources.stages)
            else:
                self.optimizer_state = HostOptimizerState(*arguments)
        except ModelError as error:
            error.program = program.name
            raise

    def prepare_step(self, batch: StepInputs) -> StepInputs:
        """Move all state to the tier in which it stays between steps.

        Args:
            batch: The inputs of the step. The method returns them unchanged.
        """
        if self.optimizer_state is not None:
            self.optimizer_state.to_resting_state()
        return batch

    def fail(self, *, has_begun: bool) -> None:
        """Wait until all running copies have ended, and ignore their errors.

        Args:
            has_begun: True if an instruction of the step had begun before the error.
        """
        if self.optimizer_state is not None:
            self.optimizer_state.fail()

    def list_host_tensors(self) -> Iterable[Tensor]:
        """Return the host memory of the state."""
        return () if self.optimizer_state is None else self.optimizer_state.list_host_memory()
