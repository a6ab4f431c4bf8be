"""Service: the state of one feature on a rank, and what the feature adds to each step.

The executor links each instruction to a call before the first step. The handler that does this asks
for a service, as in `state.service(PendingReductions)`. The first request creates the service, so a
program without the feature has no such object. Two base classes define the owner, and with it the
lifetime:

- `ProgramService`: one for each program on a rank (`rank_state.py`).
- `RankService`: one for each rank, which all its programs share (`rank_resources.py`).

The step loop, warm-up steps, evaluations, checkpoints and the count of live memory call the methods
below for all services of a program and its rank. They name no service.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from torch import Tensor

from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.step_inputs import StepInputs


class Service:
    """The state of one feature. Each of these methods does nothing by default.

    Args:
        owner: The `State` of the program, or the `RankResources` of the rank.
    """

    def __init__(self, owner: Any) -> None:
        pass

    @classmethod
    def create(cls, owner: Any) -> Self:
        """Create the service.

        Args:
            owner: The `State` of the program, or the `RankResources` of the rank.
        """
        return cls(owner)

    def finish_setup(self) -> None:
        """End the construction of an executor, by what cannot be undone.

        Only the services of the first program and of the rank get this call.
        """

    def prepare_step(self, batch: StepInputs) -> StepInputs:
        """Prepare a step or an evaluation, before anything else of it changes.

        Args:
            batch: The inputs of the step.

        Returns:
            The inputs that the step must read.
        """
        return batch

    def begin_update(self) -> None:
        """Begin an update of a step, before its gradients are set to zero."""

    def begin_step(self) -> None:
        """Begin a step or an evaluation, after its inputs, weights and gradients are prepared."""

    def begin_optimizer_step(self) -> None:
        """Prepare the parameters for the optimizer. The gradients are checked and clipped."""

    def finish_step(self) -> None:
        """End a step or an evaluation after its last instruction, before `restore`."""

    def restore(self) -> None:
        """Restore the modules to their state between steps, also after an error."""

    def fail(self, *, has_begun: bool) -> None:
        """Clean up after an error in a step.

        Args:
            has_begun: True if an instruction of the step had begun.
        """

    def needs_rerun(self) -> bool:
        """Return whether the step, which has ended, must run again."""
        return False

    def lift_guard(self) -> None:
        """Allow writes to the memory that several ranks of this process share."""

    def validate(self) -> None:
        """Make the weights and the optimizer state those of the last update.

        All processes call this after the same step.
        """

    def preserve(self, preserved: PreservedState) -> None:
        """Add the state that one step changes and a later step reads.

        It is restored after warm-up steps, and before a step runs again. A checkpoint does not
        contain it, so a service that has such state must refuse in `require_savable`, or begin anew
        in `on_load`.

        Args:
            preserved: The state that is restored.
        """

    def undo_steps(self, preserved: PreservedState, *, makes_update: bool) -> None:
        """Begin steps that are undone, such as warm-up steps, after `preserve`.

        Args:
            preserved: The state that is restored after these steps. A service adds the fields that
                it sets here.
            makes_update: True if the optimizer may step, because the caller restores its state.
        """

    def require_savable(self) -> None:
        """Raise `CheckpointError` if a checkpoint cannot save or load the present state."""

    def on_load(self) -> None:
        """React to a checkpoint that is about to be loaded, or that was loaded."""

    def list_device_tensors(self) -> Iterable[Tensor]:
        """Return tensors on the device that the service keeps, to count their memory."""
        return ()

    def list_host_tensors(self) -> Iterable[Tensor]:
        """Return host memory that replaces device memory on a CPU. It must not be counted."""
        return ()

    def count_bytes(self, tier: str) -> int:
        """Return the bytes of the values that the service keeps in a memory tier.

        Args:
            tier: "host" or "disk".
        """
        return 0


_Kind = TypeVar("_Kind", bound=Service)


def find_or_create(services: dict[type[Service], Service], kind: type[_Kind], owner: Any) -> _Kind:
    """Return the service of a kind, and create it if there is none.

    Args:
        services: The services of the owner by kind, to which a new one is added.
        kind: The class of the service.
        owner: The owner of the services.
    """
    if kind not in services:
        services[kind] = kind.create(owner)
    service = services[kind]
    assert isinstance(service, kind)
    return service
