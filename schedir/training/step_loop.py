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
from schedir.runtime.recording.nan_origin import StepResidue, find_origin, not_finite
from schedir.training.batches.prefetch import TrainingBatch
from schedir.transports.gloo import ProcessTransport


class IssuedStep(NamedTuple):
    """A step as one rank knows it: `loss` is its part of the mean over all tokens."""

    loss: float
    learning_rate: float
    norm: float | None
    skipped: int  # updates
    seconds: float


class _PendingStep(NamedTuple):
    """A step that the host has issued, and of which it has seen nothing; `mean` is one over its
    number of tokens."""

    given: tuple[Sequence[Tensor], Sequence[Tensor], float]
    mean: float
    learning_rate: float
    began: float
    numbers: AsyncScalars


class _StepNumbers(NamedTuple):
    """What the host is told of a step; `value` is the scale of a float16 loss after it, `inverse`
    one over that within it."""

    total: float
    norm: float
    skipped: float
    value: float
    inverse: float


class StepLoop:
    """The steps of a rank: as many are `issued` as have not been settled.

    Only where the program clips can a step be settled after the next one is issued (`may_be_late`):
    all ranks then know of it by the norm, on their devices.  Without the norm each judges by its
    own gradients; others would go on, and step, until the hosts have met.
    """

    def __init__(
        self,
        executor: Executor,
        transport: ProcessTransport,
        *,
        microbatch_size: int,
        stops: bool,
        loss_scale: LossScale | None,
    ) -> None:
        self.executor, self.transport, self.size = executor, transport, microbatch_size
        self.stops, self.loss_scale = stops, loss_scale
        self.may_be_late = executor.program.clip_grad_norm
        self.number = 0  # of the step that was issued last, from 1
        self.issued: deque[_PendingStep] = deque()
        self.failed: tuple[_PendingStep, list[float]] | None = None
        device, shape = executor.state.device, executor.program.shape
        self.has_loss = shape.stages - 1 in executor.stages
        self.left = StepResidue(executor)
        count = len(_StepNumbers._fields) + stops * len(self.left)
        self.readings = AsyncScalarBuffer(device, count, 2)
        self.none = torch.zeros((), dtype=torch.float64, device=device)
        # What is added to the scale of the next step: NaN lets it make no update.
        self.hold = self.none.float() if stops and self.may_be_late else None

    def issue(self, batch: TrainingBatch, learning_rate: float, began: float) -> None:
        """Let the device run a step on a batch; the host waits for nothing of it.

        `began` is when the step did, which has waited for its batch, by `perf_counter`.
        """
        executor = self.executor
        self.number += 1
        mean = 1 / batch.tokens
        inputs, targets = batch.inputs.split(self.size), batch.targets.split(self.size)
        scale = mean * executor.program.shape.optimizer_steps  # each has its share of the tokens
        given = (inputs, targets, scale)
        held = scale if self.hold is None else self.hold + scale
        total = executor.step(inputs, targets, held)
        if self.hold is not None:
            self.hold = self._next_hold(total)
        numbers = self.readings.copy(self._numbers(total))
        self.issued.append(_PendingStep(given, mean, learning_rate, began, numbers))

    def settle(self) -> IssuedStep | None:
        """Look at the numbers of the first step that was issued, which the host waits for.

        None if it ends the run, for the reason that `error` then says.  All processes must call
        this, and come to the same.
        """
        step = self.issued.popleft()
        read, count = step.numbers.read(), len(_StepNumbers._fields)
        numbers, left = _StepNumbers(*read[:count]), read[count:]
        if self._fails(numbers):
            self._go_back(numbers)
            self.failed = step, left
            return None
        # Tensor-parallel ranks all know the loss: the first counts.
        counts = self.has_loss and self.transport.tp_rank == 0
        return IssuedStep(
            numbers.total * step.mean if counts else 0.0,
            step.learning_rate,
            numbers.norm if self.executor.program.clip_grad_norm else None,
            int(numbers.skipped),
            (self.issued[0].began if self.issued else perf_counter()) - step.began,
        )

    def error(self) -> NonFiniteError:
        """Why the step that was settled last ends the run, and where it went wrong; it is run
        again.  All processes must call this."""
        assert self.failed is not None
        step, left = self.failed
        found = find_origin(self.executor, self.transport, self.left.spoilt(left), *step.given)
        return not_finite(found, self.executor.program, self.number)

    def _numbers(self, total: Tensor | None) -> Tensor:
        """`_StepNumbers`, and for a run that may stop `StepResidue.finite`: float64, on the
        device."""
        scale = self.loss_scale
        numbers = [  # in the order of their names
            self.none if total is None else total,
            self.executor.norm,
            self.executor.finite.logical_not().sum(),
            self.none if scale is None else scale.value,
            self.none if scale is None else torch.as_tensor(self.executor.state.scale),
        ]
        all_of = torch.stack([number.double() for number in numbers])
        return torch.cat([all_of, self.left.finite().double()]) if self.stops else all_of

    def _next_hold(self, total: Tensor | None) -> Tensor:
        """NaN if the step ends the run, which the host will know when it has issued the next.

        Then all gradients of that one are NaN, and no rank updates.  It is enough that some ranks
        know.
        """
        fails = self.executor.finite.logical_not().any()
        if self.loss_scale is not None:
            useless = torch.as_tensor(self.executor.state.scale) >= 1.0
            fails &= useless if total is None else useless | total.isfinite().logical_not()
        return self.none.float().masked_fill(fails, math.nan)

    def _fails(self, numbers: _StepNumbers) -> bool:
        """Whether a step that was not finite ends the run; all processes come to the same."""
        if not self.stops:
            return False
        skipped = int(numbers.skipped)
        if not self.may_be_late:  # each rank knows of its own gradients only
            skipped = _most(skipped)
        if not skipped or self.loss_scale is None:
            return skipped > 0
        # The scale is there to be too large, and is halved; but it makes no loss, and below 1 no
        # gradient larger.
        return bool(_most(numbers.inverse >= 1.0 or not math.isfinite(numbers.total)))

    def _go_back(self, numbers: _StepNumbers) -> None:
        """Be as after the step of these numbers, and not after those that were issued since."""
        self.number -= len(self.issued)
        self.executor.draws.step -= len(self.issued)
        self.issued.clear()
        if self.loss_scale is not None:
            self.loss_scale.value.fill_(numbers.value)


def _most(number: int) -> int:
    """The largest of a number of each process, known to all."""
    most = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
