"""UpdateChecks and RankOptimizer: check and clip gradients, and run the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor

from schedir.ir.program import Program
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.parameters.sharded_parameters import guard_shard_step
from schedir.runtime.parameters.step_skipping import are_finite, step_if_finite
from schedir.runtime.program_state import ProgramService, ProgramState
from schedir.runtime.rank_resources import RankResources, RankService

_TIED_RANDOM_WARNING: Final = (
    "an optimizer draws other random numbers for each copy of a tied weight: the copies will differ"
)
# (True if an update is finite, the factor that clips its gradients), as 0-dim tensors.
NormVerdict = tuple[Tensor, Tensor]


class RankOptimizer(RankService):
    """Runs the optimizer of a rank.

    Args:
        resources: The resources of the rank.

    Attributes:
        can_step: False if the optimizer must not step, because the steps will be undone.
        read_last_result: Returns `Executor.grad_norm` and `Executor.finite_updates` of the last
            step. Before the first step the norm is 0, and all updates are finite.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        self.can_step = True
        self.read_last_result: Callable[[], tuple[Tensor, Tensor]] = partial(
            _make_initial_result, resources.program, resources.device
        )

    def run(self, finite: Tensor, step: Callable[[Tensor], object] | None = None) -> None:
        """Run the optimizer step if the update is finite.

        Args:
            finite: True if the update is finite, 0-dim bool.
            step: A function that gets `finite`, and updates some of the stages if it is True. By
                default the optimizer updates all stages.
        """
        resources, optimizer = self.resources, self.resources.optimizer
        finite = finite if self.can_step else torch.zeros_like(finite)
        if optimizer is None:
            return
        draws = (
            resources.random_streams.warn_of_draws(_TIED_RANDOM_WARNING)
            if resources.ties.has_separate_copies
            else nullcontext()
        )
        with draws, guard_shard_step(optimizer, resources.shard_spec.zero):
            if step is None:
                step_if_finite(finite, optimizer)
            else:
                step(finite)

    def undo_steps(self, preserved: PreservedState, *, makes_update: bool) -> None:
        """See `Service.undo_steps`.

        Args:
            preserved: Restores `can_step` and `read_last_result` after the steps.
            makes_update: True if the optimizer may step.
        """
        preserved.add_fields(self, "can_step", "read_last_result")
        self.can_step = self.can_step and makes_update  # stays False in a nested context


class UpdateChecks(ProgramService):
    """Checks and clips the gradients of each update of a program.

    An update is finite if none of its gradients is infinite or NaN.

    Args:
        state: The state of the program.

    Attributes:
        grad_norm: The global norm of the last update's gradients before clipping, 0-dim float64. It
            is 0 if the program has no gradient clipping.
        finite_updates: A bool for each update of the step: True if the update was finite.
        squared_norms: Update -> sum of squares of all gradients. The entry of an update is removed
            when its gradients are clipped. There may be several entries, because a rank without
            gradients may reduce the norm of the next update early.
        checked_updates: Update -> True if its gradients are finite, 0-dim bool. An update has an
            entry from its check to its end.
        judge: Returns whether an update is finite, and the factor that clips its gradients. Without
            clipping the factor is None.
        read_result: Returns `Executor.grad_norm` and `Executor.finite_updates` of the last step.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.grad_norm, self.finite_updates = _make_initial_result(state.program, state.device)
        self.squared_norms: dict[int, Tensor] = {}
        self.checked_updates: dict[int, Tensor] = {}
        self.judge: Callable[[int], tuple[Tensor, Tensor | None]] = (
            self._judge_by_norm if state.program.clip_grad_norm else self._judge_by_numbers
        )
        self.read_result = lambda: (self.grad_norm, self.finite_updates)

    def begin_step(self) -> None:
        """Discard the results of checks that remain after an error in the last step."""
        self.checked_updates.clear()

    def finish_step(self) -> None:
        """Keep the result of this step as the last result of the rank."""
        if not self.state.is_evaluating:
            self.state.service(RankOptimizer).read_last_result = self.read_result

    def read_last_result(self) -> tuple[Tensor, Tensor]:
        """Return `grad_norm` and `finite_updates` of the rank's last training step."""
        return self.state.service(RankOptimizer).read_last_result()

    def check_once(self, update: int) -> Tensor:
        """Return whether an update is finite. The first call checks and clips the gradients.

        Args:
            update: The index of the update in the step.

        Raises:
            ModelError: See `check_and_clip`.
        """
        if update not in self.checked_updates:
            self.checked_updates[update] = self.check_and_clip(update)
        return self.checked_updates[update]

    def finish_update(self, update: int) -> Tensor:
        """Record whether an update is finite, and return the result.

        Args:
            update: The index of the update in the step.

        Raises:
            ModelError: See `check_and_clip`.
        """
        finite = self.finite_updates[update] = self.check_once(update)
        del self.checked_updates[update]
        return finite

    def check_and_clip(self, update: int) -> Tensor:
        """Return whether an update's gradients are finite, and prepare the optimizer step.

        The method clips the gradients if the program has gradient clipping. With ZeRO it sets the
        parameters to their shards.

        Args:
            update: The index of the update in the step.

        Returns:
            A 0-dim bool tensor: True if the gradients are finite. With clipping these are the
            gradients of all ranks. Without clipping they are the gradients of the rank's stages.

        Raises:
            ModelError: A sharded weight was written to, or the optimizer's state is not sharded.
        """
        state = self.state
        finite, clip_factor = self.judge(update)
        for stage in state.stages.values():
            if clip_factor is not None:
                stage.gradients.scale(clip_factor)
        for service in state.list_services():
            service.begin_optimizer_step(finite, clip_factor)
        return finite

    def _judge_by_norm(self, update: int) -> NormVerdict:
        squared_norm = self.squared_norms.pop(update)
        verdict = compute_clip_factor(
            self.state.resources.options.gradients.norm_limit, squared_norm
        )
        self.grad_norm = squared_norm.sqrt()
        return verdict

    def _judge_by_numbers(self, update: int) -> tuple[Tensor, None]:
        state = self.state
        finite = are_finite(
            flat for s in state.stages.values() for flat in s.gradients.reduced_flat
        )
        # With ZeRO a replica checks only its shard, and with expert parallelism only its experts.
        # So the replicas combine their results.
        if (state.program.zero and state.program.dp > 1) or state.program.ep > 1:
            nonfinite = finite.logical_not().to(torch.int32)
            state.transport.start_collective("all_reduce", "dp", nonfinite, nonfinite).wait()
            finite = nonfinite == 0
        return finite, None


def _make_initial_result(program: Program, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the norm and the finite updates before the first step: 0, and True for each update."""
    norm = torch.zeros((), dtype=torch.float64, device=device)
    return norm, torch.ones(program.shape.optimizer_steps, dtype=torch.bool, device=device)


def compute_clip_factor(max_norm: float, squared_norm: Tensor) -> NormVerdict:
    """Return whether the norm of all gradients is finite, and the factor that clips them.

    The results stay on the device. To read them, the host would have to wait for the GPU.

    Args:
        max_norm: The largest allowed norm.
        squared_norm: The sum of squares of all gradients, 0-dim.

    Returns:
        A 0-dim bool tensor, and a 0-dim factor of at most 1.
    """
    norm = squared_norm.sqrt()
    finite = norm.isfinite()
    # The factor is 1 for a norm that is not finite, so that the finite gradients stay unchanged.
    return finite, torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
