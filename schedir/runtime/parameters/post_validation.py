"""Post-validation: update the weights before the gradient norm arrives, and redo wrong updates.

A rank makes an update as if the norm of all gradients were finite and not above the limit. The norm
is computed later. In the next step, before that step's own update, each rank checks whether the
previous update was right. If it was wrong, all ranks have run this step on wrong weights. Each rank
then restores the state before the previous update, makes the previous update again with the actual
norm, and runs the step again.

The paper reverses an update by computation (appendix C). schedir restores copies instead, because a
division in floating point cannot be reversed exactly.

After a wrong update, the next update is likely to need clipping, too. So the next update waits for
its norm at the end of its step. All later updates wait, too, until an update needs no clipping.

References:
    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.model_checks.optimizer_requirements import require_known_optimizer
from schedir.runtime.parameters.optimizer_inspection import unwrap_optimizer
from schedir.runtime.parameters.unvalidated_update_guard import (
    UnvalidatedUpdateGuard,
    list_optimizer_tables,
)
from schedir.runtime.program_state import ProgramService, ProgramState
from schedir.runtime.recording.async_scalars import AsyncScalarBuffer, AsyncScalars
from schedir.runtime.services.update_checks import NormVerdict, UpdateChecks, compute_clip_factor
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.step_rollback import UnsteppedParameters, preserve_step
from schedir.transports.transport import Work


class PostValidation(ProgramService):
    """Makes the updates of a rank before their norms are known, and validates them later.

    All updates before the last update are validated.

    Instruction handlers call `step`, `track_norm` and `wait_for_previous_norm`. `needs_rerun`
    returns the same result on all ranks.

    Args:
        state: The state of the program.

    Attributes:
        judge_norm: Returns the `NormVerdict`, (is finite, clip factor), for the sum of the squares
            of all gradients.
        apply_update: Makes an update with the clip factor in `verdict`. The handler of the
            optimizer step sets this function.
        restore_step_state: Restores all state that a step has changed, except for weights and
            optimizer state.
        verdict: The `NormVerdict` of the next update.
        pending_update: The update that is not validated yet, or None.
        is_warm_up: True in steps that will be undone. Their updates are not validated.
        repeated_steps: The number of steps that were run again.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        resources = state.resources
        self.gradients = [stage.gradients for stage in state.stages.values()]
        self.modules = [stage.module for stage in state.stages.values()]
        self.optimizer = resources.optimizer
        self.loss_scale = resources.options.gradients.loss_scale
        self.random_streams = resources.random_streams
        self.device = state.device
        self.unstepped_parameters = UnsteppedParameters(state)
        self.judge_norm = partial(compute_clip_factor, resources.options.gradients.norm_limit)
        checks = state.service(UpdateChecks)
        checks.judge = lambda update: self.verdict
        checks.read_result = self.read_result
        self.apply_update: Callable[[], None] = lambda: None
        self.restore_step_state: Callable[[], None] = lambda: None
        one = torch.ones((), dtype=torch.float64, device=self.device)
        self.unit_factor = one
        self.verdict: NormVerdict = one > 0, one
        # Tensor -> the memory of its copy, which each update reuses.
        self.saved_copies: dict[Tensor, Tensor] = {}
        self.pending_update: _UnvalidatedUpdate | None = None
        self.norm: _Norm | None = None  # the norm of the current or last step
        self.must_repeat = self.waits_for_norm = self.is_warm_up = False
        self.repeated_steps = 0
        self.guard: UnvalidatedUpdateGuard | None = None
        self.scalar_buffer = AsyncScalarBuffer(self.device, 1)
        self.side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # ------------------------------------------------------------ within a step

    def wait_for_previous_norm(self) -> None:
        """Wait for the norm of the last update.

        If that update was wrong, this step must be run again.
        """
        if self.pending_update is not None:
            self.must_repeat = not self.is_update_valid()
            if not self.must_repeat:
                self.pending_update = None

    def step(self, local_sum_of_squares: Tensor) -> None:
        """Make an update before its norm arrives.

        The method makes no update if this step must run again. After a wrong update, the method
        does not make the next update either: `needs_rerun` makes that update later, with the actual
        norm.

        Args:
            local_sum_of_squares: The sum of squares of the rank's gradients. If it is already too
                large, so is the global sum, and the optimizer does not step.
        """
        if self.must_repeat or (self.waits_for_norm and not self.is_warm_up):
            return
        self.pending_update = self._save_state()
        finite, clip_factor = self.judge_norm(local_sum_of_squares)
        self.verdict = finite & (clip_factor == 1.0), self.unit_factor
        self.apply_update()

    def track_norm(self, sum_of_squares: Tensor, work: Work) -> None:
        """Keep the global sum of squares of this step, before `work` has completed.

        Args:
            sum_of_squares: The sum of squares of all gradients. It is valid when `work` has
                completed.
            work: The Work of the sum.
        """
        self.norm = _Norm(sum_of_squares, work, self.scalar_buffer, self.side_stream)

    # ------------------------------------------------------------ between steps

    def prepare_inputs(self, batch: StepInputs) -> StepInputs:
        """Save the state before a step that may have to run again.

        A step may have to run again if the last update is not validated yet.

        Args:
            batch: The inputs of the step.

        Returns:
            Inputs with the same values, which the step must use instead of `batch`.

        Raises:
            ModelError: Weights or optimizer state were written to before validation, or the
                optimizer's step may change other state.
        """
        require_known_optimizer(self.optimizer)
        self.allow_weight_access()
        if self.pending_update is None:
            return batch
        preserved, batch = preserve_step(self.state, batch, self.unstepped_parameters)
        self.restore_step_state = preserved.close
        return batch

    def fail(self, *, has_begun: bool) -> None:
        """Handle an error in a step.

        If the step had begun, undo the update that is not validated, and do not make it again.
        Otherwise keep the update, and guard it again.

        Args:
            has_begun: True if the step had begun before the error.
        """
        if self.pending_update is None:
            return
        if not has_begun:
            self.guard = self.guard or self._make_guard()
            return
        with torch.no_grad():
            self._undo_update()
        self.pending_update = None

    def needs_rerun(self) -> bool:
        """Return whether the step must be run again, because its weights were wrong.

        If the result is True, the method has corrected the weights and restored all other state
        from before the step.
        """
        norm = self.norm
        assert norm is not None, "every step has a norm"
        if self.is_warm_up:
            norm.read()
            self.pending_update = None
        elif self.must_repeat:
            norm.read()  # End this step's reduction of the norm before the step runs again.
            self._redo_update()
            self.restore_step_state()
            self.random_streams.step -= 1
            self.must_repeat = False
            self.repeated_steps += 1
            return True
        elif self.waits_for_norm:
            self.pending_update = _UnvalidatedUpdate(PreservedState(), norm)
            self.waits_for_norm = not self.is_update_valid()
            self.update_by_norm()
            self.pending_update = None
        else:
            assert self.pending_update is not None
            self.pending_update.norm = norm
            self.guard = self._make_guard()
        return False

    def undo_steps(self, preserved: PreservedState, *, makes_update: bool) -> None:
        """Mark the next steps as warm-up steps, whose updates are not validated.

        Args:
            preserved: Restores `is_warm_up` when it is closed.
            makes_update: See `Service.undo_steps`.
        """
        preserved.add_fields(self, "is_warm_up")
        self.is_warm_up = True

    def validate(self) -> None:
        """Validate the last update, and make it again if it was wrong.

        Raises:
            ModelError: Weights or optimizer state were written to before validation, or the
                processes call the method after different steps.
            ExecutionError: An earlier step failed.
        """
        self.state.require_no_failed_step()
        self.state.transport.check_agreement(
            {"the step of the last update": str(self.random_streams.step)}
        )
        # The guard stays if the norm does not arrive, because the update is not validated then.
        is_valid = self.pending_update is None or self.is_update_valid()
        self.allow_weight_access()
        if is_valid:
            self.pending_update = None
        else:
            self._redo_update()

    def is_update_valid(self) -> bool:
        """Wait for the norm of the pending update, and return whether the update was right."""
        assert self.pending_update is not None and self.pending_update.norm is not None
        sum_of_squares = self.pending_update.norm.read()
        finite, clip_factor = self.judge_norm(torch.tensor(sum_of_squares, dtype=torch.float64))
        return bool(finite & (clip_factor == 1.0))

    def read_result(self) -> tuple[Tensor, Tensor]:
        """Wait for the norm that the last step's gradients had before clipping, and return it.

        Returns:
            The norm, a 0-dim float64 tensor, which is 0 before the first step. And a bool tensor of
            shape (1,): True if the norm is finite.
        """
        norm = torch.zeros_like(self.unit_factor)
        if self.norm is not None:
            self.norm.read()
            norm = self.norm.sum_of_squares.sqrt()
        return norm, norm.isfinite().view(1)

    def allow_weight_access(self) -> None:
        """Allow access to weights and optimizer again.

        Raises:
            ModelError: While the guard was active, a user changed weights, the optimizer state, or
                the set of parameters that the optimizer steps.
        """
        if self.guard is not None:
            self.guard.lift()
            self.guard = None

    def _make_guard(self) -> UnvalidatedUpdateGuard:
        compares_values = self.state.options.execution.debug or self.device.type == "cpu"
        return UnvalidatedUpdateGuard(
            self.modules, self.optimizer, self.loss_scale, compares_values=compares_values
        )

    # ------------------------------------------------------------ undo and redo an update

    def _save_state(self) -> _UnvalidatedUpdate:
        """Copy the gradients, and all state that an update changes."""
        tensors = dict.fromkeys(self._list_changed_tensors())
        preserved = PreservedState()
        preserved.add_tables(list_optimizer_tables(self.optimizer))
        self.saved_copies = {
            t: self.saved_copies[t] if t in self.saved_copies else torch.empty_like(t)
            for t in tensors
        }
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for t in tensors:
            groups.setdefault((t.device, t.dtype), []).append(t)
        with torch.no_grad():
            for group in groups.values():  # one kernel copies tensors of one device and type
                torch._foreach_copy_([self.saved_copies[t] for t in group], group)
        preserved.callback(_copy_values, self.saved_copies)
        return _UnvalidatedUpdate(preserved)

    def _list_changed_tensors(self) -> Iterator[Tensor]:
        """Yield the gradients and the tensors that an update changes."""
        for gradients in self.gradients:
            yield from gradients.flat
        if self.loss_scale is not None:
            yield from (self.loss_scale.value, self.loss_scale.good_steps)
        yield from getattr(self.optimizer, "parameters", ())  # 16-bit parameters of a MainOptimizer
        for leaf in tree_leaves(list_optimizer_tables(self.optimizer)):
            if isinstance(leaf, Tensor):
                yield leaf

    def _redo_update(self) -> None:
        """Restore the state before the update, and make the update again with its actual norm.

        Options that a user set after the update, such as a learning rate, apply to the next update.
        """
        pending_update, inner = self.pending_update, unwrap_optimizer(self.optimizer)
        assert pending_update is not None
        groups = [] if inner is None else inner.param_groups
        options = [{**group, "params": ()} for group in groups]
        with torch.no_grad(), PreservedState() as preserved:
            preserved.add_values(t for t in tree_leaves(options) if isinstance(t, Tensor))
            preserved.add_tables(groups)
            self._undo_update()
            self.update_by_norm()
        self.pending_update = None
        self.waits_for_norm = True

    def _undo_update(self) -> None:
        assert self.pending_update is not None
        self.pending_update.preserved.close()

    def update_by_norm(self) -> None:
        """Make the pending update with its norm.

        The random generators are restored afterwards.
        """
        assert self.pending_update is not None and self.pending_update.norm is not None
        self.verdict = self.judge_norm(self.pending_update.norm.sum_of_squares)
        for gradients in self.gradients:
            gradients.bind_gradients()  # an optimizer's zero_grad may have unbound them
        with self.random_streams.preserve_generators():
            self.apply_update()


@dataclass(eq=False)
class _UnvalidatedUpdate:
    """An update that the executor has made and not yet validated.

    Args:
        preserved: The state before the update.
        norm: The norm of the update. It is set at the end of the step.
    """

    preserved: PreservedState
    norm: _Norm | None = None


def _copy_values(copies: dict[Tensor, Tensor]) -> None:
    for t, values in copies.items():
        t.copy_(values)


class _Norm:
    """The sum of squares of all gradients, 0-dim float64. Its reduction may still be running.

    On a GPU a side stream copies the sum to the host. So `read` does not wait for other kernels.
    """

    def __init__(
        self,
        sum_of_squares: Tensor,
        work: Work,
        scalar_buffer: AsyncScalarBuffer,
        side_stream: torch.cuda.Stream | None,
    ) -> None:
        self.sum_of_squares = sum_of_squares
        self.work = work
        self.host_value: float | None = None
        self.scalar_copy: AsyncScalars | None = None
        if side_stream is not None:
            with torch.cuda.stream(side_stream):
                work.wait()
                self.scalar_copy = scalar_buffer.copy(sum_of_squares.view(1))

    def read(self) -> float:
        """Wait for the sum of squares, and return it on the host."""
        if self.host_value is None:
            if self.scalar_copy is None:
                self.work.wait()
                self.host_value = self.sum_of_squares.item()
            else:
                (self.host_value,) = self.scalar_copy.read()
        return self.host_value
