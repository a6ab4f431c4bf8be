"""Issue steps to the device, and read their losses one step later.

If the loss or a gradient of a step is not finite, the run may have to end. The host reads the loss
and the gradient norm only after it has issued the next step. So the device skips the update of the
next step, without a request from the host. The weights and the optimizer state then do not change
after the failed step, so the failed step can run again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import NonFiniteError
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.recording.async_scalars import AsyncScalarBuffer, AsyncScalars
from schedir.runtime.recording.nan_origin import StepResidue, find_origin, make_nonfinite_error
from schedir.runtime.services.loss_gradients import LossGradients
from schedir.training.batches.prefetch import TrainingBatch
from schedir.transports.process_transport import ProcessTransport


class IssuedStep(NamedTuple):
    """The results of a step on one rank.

    Args:
        loss: This rank's part of the mean loss over all tokens.
        learning_rate: The learning rate of the step.
        gradient_norm: The global gradient norm before clipping. None if the program does not clip.
        skipped_updates: The number of updates that were skipped.
        seconds: The time from the begin of this step to the begin of the next step.
    """

    loss: float
    learning_rate: float
    gradient_norm: float | None
    skipped_updates: int
    seconds: float


class _PendingStep(NamedTuple):
    """A step that the host has issued, but whose results the host has not read.

    `step_inputs` has inputs, targets and scale. `inverse_tokens` is 1 / the number of tokens of the
    step. `start_time` is in seconds of `perf_counter`.
    """

    step_inputs: tuple[Sequence[Tensor], Sequence[Tensor], float]
    inverse_tokens: float
    learning_rate: float
    start_time: float
    scalars: AsyncScalars


class _StepNumbers(NamedTuple):
    """The numbers of a step that the device copies to the host.

    `scale_after` is the scale of a float16 loss after the step. `inverse_scale` is 1 / the scale
    within the step.
    """

    loss_sum: float
    gradient_norm: float
    skipped_updates: float
    scale_after: float
    inverse_scale: float


class StepQueue:
    """Issues the steps of a rank, and reads their numbers (loss, gradient norm) later.

    If the program clips gradients, the numbers of a step can be read after the next step was issued
    (`can_read_late`). The devices of all ranks then detect a failure by the global norm. Without
    the norm, each rank checks only its own gradients. Other ranks would continue to update until
    the hosts communicate.

    Args:
        executor: The executor of this rank.
        transport: The transport of this rank.
        microbatch_size: The number of samples in a microbatch.
        stops_on_nonfinite: If true, a loss or a gradient that is not finite ends the run.
        loss_scale: The scale of a float16 loss. None if the weights are not float16.

    Attributes:
        can_read_late: True if the numbers of a step can be read after the next step was issued.
        last_issued_step: The step that was issued last, from 1.
        pending_steps: The steps that were issued, but whose numbers were not read.
    """

    def __init__(
        self,
        executor: Executor,
        transport: ProcessTransport,
        *,
        microbatch_size: int,
        stops_on_nonfinite: bool,
        loss_scale: LossScale | None,
    ) -> None:
        self.executor = executor
        self.transport = transport
        self.microbatch_size = microbatch_size
        self.stops_on_nonfinite = stops_on_nonfinite
        self.loss_scale = loss_scale
        self.can_read_late = executor.program.clip_grad_norm
        self.last_issued_step = 0
        self.pending_steps: deque[_PendingStep] = deque()
        self.failed_step: tuple[_PendingStep, list[float]] | None = None
        device, shape = executor.state.device, executor.program.shape
        self.has_loss = shape.stages - 1 in executor.stages
        self.residue = StepResidue(executor)
        count = len(_StepNumbers._fields) + stops_on_nonfinite * len(self.residue)
        self.scalar_buffer = AsyncScalarBuffer(device, count)
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        # The next step adds this offset to the scale of its loss. If the offset is NaN, the next
        # step makes no update.
        self.scale_offset = self.zero.float() if stops_on_nonfinite and self.can_read_late else None

    def issue(self, batch: TrainingBatch, learning_rate: float, start_time: float) -> None:
        """Issue a step to the device. The host does not wait for any part of the step.

        Args:
            batch: The batch of the step.
            learning_rate: The learning rate, for the report. The optimizer must have this rate
                already.
            start_time: The time by `perf_counter` when the step began, before it waited for its
                batch.
        """
        executor = self.executor
        self.last_issued_step += 1
        mean_factor = 1 / batch.tokens
        inputs = batch.inputs.split(self.microbatch_size)
        targets = batch.targets.split(self.microbatch_size)
        # Each update has an equal share of the tokens.
        scale = mean_factor * executor.program.shape.optimizer_steps
        step_inputs = (inputs, targets, scale)
        issued_scale = scale if self.scale_offset is None else self.scale_offset + scale
        total = executor.step(inputs, targets, issued_scale)
        if self.scale_offset is not None:
            self.scale_offset = self._compute_scale_offset(total)
        numbers = self.scalar_buffer.copy(self._stack_scalars(total))
        self.pending_steps.append(
            _PendingStep(step_inputs, mean_factor, learning_rate, start_time, numbers)
        )

    def read_oldest_step(self) -> IssuedStep | None:
        """Wait for the numbers of the oldest pending step, and return them.

        All processes must call this, and all make the same decision.

        Returns:
            The numbers. None if the step ends the run; then `diagnose_failure` returns the reason.
        """
        step = self.pending_steps.popleft()
        read = step.scalars.read()
        count = len(_StepNumbers._fields)
        numbers, residue_flags = _StepNumbers(*read[:count]), read[count:]
        if self._should_stop(numbers):
            self._roll_back(numbers)
            self.failed_step = step, residue_flags
            return None
        # All tensor-parallel ranks compute the same loss, so only the first of them adds its loss.
        counts = self.has_loss and self.transport.tp_rank == 0
        return IssuedStep(
            numbers.loss_sum * step.inverse_tokens if counts else 0.0,
            step.learning_rate,
            numbers.gradient_norm if self.executor.program.clip_grad_norm else None,
            int(numbers.skipped_updates),
            (self.pending_steps[0].start_time if self.pending_steps else perf_counter())
            - step.start_time,
        )

    def diagnose_failure(self) -> NonFiniteError:
        """Run the failed step again, and return the error that ends the run.

        All processes must call this, after `read_oldest_step` returned None.

        Returns:
            The error. If the second run shows which instruction first computed an infinite or NaN
            value, the error names this instruction.
        """
        assert self.failed_step is not None
        step, residue_flags = self.failed_step
        origin = find_origin(
            self.executor,
            self.transport,
            self.residue.find_nonfinite(residue_flags),
            *step.step_inputs,
        )
        return make_nonfinite_error(origin, self.executor.program, self.last_issued_step)

    def _stack_scalars(self, total: Tensor | None) -> Tensor:
        """Return the values of `_StepNumbers` as one float64 tensor.

        If a value that is not finite can end the run, the result of `StepResidue.check_finite`
        follows.
        """
        scale = self.loss_scale
        numbers = [  # In the order of the fields of `_StepNumbers`.
            self.zero if total is None else total,
            self.executor.grad_norm,
            self.executor.finite_updates.logical_not().sum(),
            self.zero if scale is None else scale.value,
            self.zero if scale is None else torch.as_tensor(self._read_grad_scale()),
        ]
        stacked = torch.stack([number.double() for number in numbers])
        return (
            torch.cat([stacked, self.residue.check_finite().double()])
            if self.stops_on_nonfinite
            else stacked
        )

    def _compute_scale_offset(self, total: Tensor | None) -> Tensor:
        """Return NaN if the step ends the run, else 0, on the device.

        The next step adds the result to its scale. If the result is NaN, all gradients of the next
        step are NaN. If this occurs on any rank, the global norm is NaN, and no rank makes an
        update.
        """
        fails = self.executor.finite_updates.logical_not().any()
        if self.loss_scale is not None:
            is_scale_minimal = torch.as_tensor(self._read_grad_scale()) >= 1.0
            fails &= (
                is_scale_minimal
                if total is None
                else is_scale_minimal | total.isfinite().logical_not()
            )
        return self.zero.float().masked_fill(fails, math.nan)

    def _read_grad_scale(self) -> float | Tensor:
        return self.executor.state.service(LossGradients).grad_scale

    def _should_stop(self, numbers: _StepNumbers) -> bool:
        """Return whether a step ends the run. All processes get the same result."""
        if not self.stops_on_nonfinite:
            return False
        skipped = int(numbers.skipped_updates)
        if not self.can_read_late:  # Without the norm, each rank has checked its own gradients.
            skipped = _all_reduce_max(skipped)
        if not skipped or self.loss_scale is None:
            return skipped > 0
        # Gradients may overflow because the scale is too large. This is normal, and the scale is
        # then halved. If the loss is not finite, or the scale is at most 1, the scale is not the
        # reason, and the run ends.
        return bool(
            _all_reduce_max(numbers.inverse_scale >= 1.0 or not math.isfinite(numbers.loss_sum))
        )

    def _roll_back(self, numbers: _StepNumbers) -> None:
        """Restore the state that the host had after the step of `numbers`, and drop later steps."""
        self.last_issued_step -= len(self.pending_steps)
        self.executor.random_streams.step -= len(self.pending_steps)
        self.pending_steps.clear()
        if self.loss_scale is not None:
            self.loss_scale.value.fill_(numbers.scale_after)


def _all_reduce_max(number: int) -> int:
    """Return the largest of the numbers of all processes, on all processes."""
    maximum = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)
