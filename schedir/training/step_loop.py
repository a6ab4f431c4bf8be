"""Issue steps to the device, and read their losses one step later.

A step that is not finite may end the run, and the host has issued the next one before it knows.
The device holds that one by itself: it makes no update, so weights, and what the optimizer keeps,
are those of the step that went wrong, which can be run again.
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
from schedir.training.batches.prefetch import TrainingBatch
from schedir.transports.gloo import ProcessTransport


class IssuedStep(NamedTuple):
    """A step as one rank knows it: `loss` is its part of the mean over all tokens."""

    loss: float
    learning_rate: float
    gradient_norm: float | None
    skipped_updates: int  # updates
    seconds: float


class _PendingStep(NamedTuple):
    """A step that the host has issued, and of which it has seen nothing; `inverse_tokens` is one
    over its number of tokens."""

    step_inputs: tuple[Sequence[Tensor], Sequence[Tensor], float]
    inverse_tokens: float
    learning_rate: float
    start_time: float
    scalars: AsyncScalars


class _StepNumbers(NamedTuple):
    """What the host is told of a step; `scale_after` is the scale of a float16 loss after it,
    `inverse_scale` one over that within it."""

    loss_sum: float
    gradient_norm: float
    skipped_updates: float
    scale_after: float
    inverse_scale: float


class StepLoop:
    """The steps of a rank: as many are `pending_steps` as have not been settled.

    Only where the program clips can a step be settled after the next one is issued
    (`can_read_late`): all ranks then know of it by the norm, on their devices.  Without the norm
    each judges by its own gradients; others would go on, and step, until the hosts have met.
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
        self.executor, self.transport, self.microbatch_size = executor, transport, microbatch_size
        self.stops_on_nonfinite, self.loss_scale = stops_on_nonfinite, loss_scale
        self.can_read_late = executor.program.clip_grad_norm
        self.last_issued_step = 0  # of the step that was issued last, from 1
        self.pending_steps: deque[_PendingStep] = deque()
        self.failed_step: tuple[_PendingStep, list[float]] | None = None
        device, shape = executor.state.device, executor.program.shape
        self.has_loss = shape.stages - 1 in executor.stages
        self.residue = StepResidue(executor)
        count = len(_StepNumbers._fields) + stops_on_nonfinite * len(self.residue)
        self.scalar_buffer = AsyncScalarBuffer(device, count, 2)
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        # What is added to the scale of the next step: NaN lets it make no update.
        self.scale_offset = self.zero.float() if stops_on_nonfinite and self.can_read_late else None

    def issue(self, batch: TrainingBatch, learning_rate: float, start_time: float) -> None:
        """Let the device run a step on a batch; the host waits for nothing of it.

        `start_time` is when the step did, which has waited for its batch, by `perf_counter`.
        """
        executor = self.executor
        self.last_issued_step += 1
        mean = 1 / batch.tokens
        inputs, targets = (
            batch.inputs.split(self.microbatch_size),
            batch.targets.split(self.microbatch_size),
        )
        scale = mean * executor.program.shape.optimizer_steps  # each has its share of the tokens
        given = (inputs, targets, scale)
        held = scale if self.scale_offset is None else self.scale_offset + scale
        total = executor.step(inputs, targets, held)
        if self.scale_offset is not None:
            self.scale_offset = self._compute_scale_offset(total)
        numbers = self.scalar_buffer.copy(self._stack_scalars(total))
        self.pending_steps.append(_PendingStep(given, mean, learning_rate, start_time, numbers))

    def read_oldest_step(self) -> IssuedStep | None:
        """Look at the numbers of the first step that was issued, which the host waits for.

        None if it ends the run, for the reason that `diagnose_failure` then says.  All processes
        must call this, and come to the same.
        """
        step = self.pending_steps.popleft()
        read, count = step.scalars.read(), len(_StepNumbers._fields)
        numbers, left = _StepNumbers(*read[:count]), read[count:]
        if self._should_stop(numbers):
            self._roll_back(numbers)
            self.failed_step = step, left
            return None
        # Tensor-parallel ranks all know the loss: the first counts.
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
        """Why the step that was settled last ends the run, and where it went wrong; it is run
        again.  All processes must call this."""
        assert self.failed_step is not None
        step, left = self.failed_step
        found = find_origin(
            self.executor, self.transport, self.residue.find_nonfinite(left), *step.step_inputs
        )
        return make_nonfinite_error(found, self.executor.program, self.last_issued_step)

    def _stack_scalars(self, total: Tensor | None) -> Tensor:
        """`_StepNumbers`, and for a run that may stop `StepResidue.finite`: float64, on the
        device."""
        scale = self.loss_scale
        numbers = [  # in the order of their names
            self.zero if total is None else total,
            self.executor.grad_norm,
            self.executor.finite_updates.logical_not().sum(),
            self.zero if scale is None else scale.value,
            self.zero if scale is None else torch.as_tensor(self.executor.state.grad_scale),
        ]
        all_of = torch.stack([number.double() for number in numbers])
        return (
            torch.cat([all_of, self.residue.check_finite().double()])
            if self.stops_on_nonfinite
            else all_of
        )

    def _compute_scale_offset(self, total: Tensor | None) -> Tensor:
        """NaN if the step ends the run, which the host will know when it has issued the next.

        Then all gradients of that one are NaN, and no rank updates.  It is enough that some ranks
        know.
        """
        fails = self.executor.finite_updates.logical_not().any()
        if self.loss_scale is not None:
            useless = torch.as_tensor(self.executor.state.grad_scale) >= 1.0
            fails &= useless if total is None else useless | total.isfinite().logical_not()
        return self.zero.float().masked_fill(fails, math.nan)

    def _should_stop(self, numbers: _StepNumbers) -> bool:
        """Whether a step that was not finite ends the run; all processes come to the same."""
        if not self.stops_on_nonfinite:
            return False
        skipped = int(numbers.skipped_updates)
        if not self.can_read_late:  # each rank knows of its own gradients only
            skipped = _all_reduce_max(skipped)
        if not skipped or self.loss_scale is None:
            return skipped > 0
        # The scale is there to be too large, and is halved; but it makes no loss, and below 1 no
        # gradient larger.
        return bool(
            _all_reduce_max(numbers.inverse_scale >= 1.0 or not math.isfinite(numbers.loss_sum))
        )

    def _roll_back(self, numbers: _StepNumbers) -> None:
        """Be as after the step of these numbers, and not after those that were issued since."""
        self.last_issued_step -= len(self.pending_steps)
        self.executor.random_streams.step -= len(self.pending_steps)
        self.pending_steps.clear()
        if self.loss_scale is not None:
            self.loss_scale.value.fill_(numbers.scale_after)


def _all_reduce_max(number: int) -> int:
    """The largest of a number of each process, known to all."""
    most = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
