"""Service: the state of one feature on a rank, and what the feature adds to each step.

Before the first step, the handler of each instruction creates a call. The handler gets a service by
`state.service(PendingReductions)`, for example. The first request creates the service, so a program
that does not need the feature has no such service. Two base classes define the owner and the
lifetime of a service:

- `ProgramService`: one for each program on a rank (`program_state.py`).
- `RankService`: one for each rank, which all its programs share (`rank_resources.py`).

The step loop, warm-up steps, evaluations, checkpoints and the count of live memory call the methods
below for all services of a program and its rank. These callers do not depend on particular
services.

If a method raises an error before the first instruction of a step, the executor restores the
state that it had before the step, and can run another step. After a later error in a step, the
executor refuses all further steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.step_inputs import StepInputs


class Service:
    """The state of one feature. By default its methods do nothing.

    Args:
        owner: The `ProgramState` of the program, or the `RankResources` of the rank.
    """

    def __init__(self, owner: Any) -> None:
        pass

    def finish_setup(self) -> None:
        """Finish the construction of an executor, with changes that cannot be undone.

        The executor calls this method only for the services of the first program and of the rank.
        """

    def prepare_inputs(self, batch: StepInputs) -> StepInputs:
        """Prepare a step or an evaluation, before the executor changes any other state.

        Args:
            batch: The inputs of the step.

        Returns:
            The inputs that the step must read.
        """
        return batch

    def begin_update(self) -> None:
        """Begin an update of a step, before the executor sets its gradients to zero.

        An evaluation also calls this method, but keeps the gradients.
        """

    def begin_step(self) -> None:
        """Begin a step or an evaluation, after its inputs, weights and gradients are prepared."""

    def begin_optimizer_step(self, finite: Tensor, clip_factor: Tensor | None) -> None:
        """Prepare the optimizer step of an update, after gradients are checked and clipped.

        Args:
            finite: True if the gradients are finite, 0-dim bool.
            clip_factor: The factor that has clipped the gradients on the device, 0-dim. None
                without clipping.
        """

    def finish_step(self) -> None:
        """End a step or an evaluation after its last instruction, before `restore`."""

    def restore(self) -> None:
        """After a step or an error, restore the state that modules have between steps."""

    def fail(self, *, has_begun: bool) -> None:
        """Clean up after an error in a step.

        Args:
            has_begun: True if an instruction of the step had begun before the error.
        """

    def needs_rerun(self) -> bool:
        """Return whether the step that has just ended must run again."""
        return False

    def allow_weight_access(self) -> None:
        """Allow access to weights. A rank is about to write to weights that other ranks share."""

    def validate(self) -> None:
        """Validate the last update, and correct weights and optimizer state if needed.

        All processes call this method after the same step.
        """

    def preserve(self, preserved: PreservedState) -> None:
        """Add to `preserved` the state that a step changes and that a later step reads.

        The caller restores this state after warm-up steps, and before a step runs again. A
        checkpoint does not contain this state. So a service with such state must raise in
        `require_savable`, or reset the state in `on_load`.

        Args:
            preserved: The object to which the service adds the state.
        """

    def undo_steps(self, preserved: PreservedState, *, makes_update: bool) -> None:
        """Prepare for steps that will be undone, such as warm-up steps.

        The caller has called `preserve` before.

        Args:
            preserved: Restores state after these steps. A service must add the fields that it
                sets in this method.
            makes_update: True if the optimizer may step, because the caller restores its state.
        """

    def require_savable(self) -> None:
        """Raise `CheckpointError` if a checkpoint cannot save or load the present state."""

    def on_load(self) -> None:
        """Reset the service's state. A checkpoint is about to be loaded, or has been loaded."""

    def list_device_tensors(self) -> Iterable[Tensor]:
        """Return tensors on the device that the service keeps, to count their memory."""
        return ()

    def list_host_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that the service keeps in host memory.

        On a CPU, `LiveMemory` must not count these tensors as device memory.
        """
        return ()

    def count_bytes(self, tier: str) -> int:
        """Return the bytes of the values that the service keeps in a memory tier.

        Args:
            tier: "host" or "disk".
        """
        return 0


_Kind = TypeVar("_Kind", bound=Service)


def find_or_create(services: dict[type[Service], Service], kind: type[_Kind], owner: Any) -> _Kind:
    """Return the service of a class, and create it if there is none.

    Args:
        services: Class -> service of the owner. A new service is added.
        kind: The class of the service.
        owner: The owner of the services.
    """
    if kind not in services:
        services[kind] = kind(owner)
    service = services[kind]
    assert isinstance(service, kind)
    return service
