"""Read the batch of the next step during a step.

A thread reads the batch into pinned memory. A copy from pinned memory to the GPU does not block the
host. All pinned memory is allocated before the first step. An allocation during a step would
synchronize the CUDA streams (CUDA C++ Programming Guide, "Implicit Synchronization").
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Final, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from schedir.runtime.recording.stream_events import make_event
from schedir.training.batches.samples import Batches

# One slot has the batch of the current step. The thread reads the next batch into the second slot.
# The third slot keeps the batch of the previous step. The host reads the loss of that step late,
# and runs the step again if the loss is not finite.
BATCH_SLOTS: Final = 3
# At the end of a run, the process waits this many seconds for the prefetch thread.
JOIN_TIMEOUT: Final = 1.0


class TrainingBatch(NamedTuple):
    """The batch of a step on one replica.

    Args:
        inputs: The inputs, int64 (samples, context), on the device.
        targets: The targets, int64 (samples, context), on the device.
        tokens: The number of targets that the loss includes, in the batch of all replicas.
        data_crc: The CRC-32 of the samples of all replicas so far. It must be the same on all
            processes.
    """

    inputs: Tensor
    targets: Tensor
    tokens: int
    data_crc: int


class Prefetch:
    """Context manager: a thread reads the batches of a run, one step ahead.

    The batch of step n remains valid until the batch of step n + `BATCH_SLOTS` is taken.

    Args:
        batches: The training samples.
        steps: The number of steps of the run. The last batch is for step `steps` - 1.
        device: The device of the batches.
        replica: The replica whose share of each batch is returned.
        replicas: The number of replicas.
        count_tokens: A function that returns the number of targets that the loss includes.
        first_step: The first step, from 0.
        first_sample: The number of samples that were used before `first_step`.
    """

    def __init__(
        self,
        batches: Batches,
        steps: int,
        device: torch.device,
        *,
        replica: int,
        replicas: int,
        count_tokens: Callable[[Tensor], int],
        first_step: int = 0,
        first_sample: int = 0,
    ) -> None:
        self.batches = batches
        self.steps = steps
        self.count_tokens = count_tokens
        self.first_step = first_step
        self.first_sample = first_sample
        share = batches.batch_size // replicas
        self.replica_range = replica * share, (replica + 1) * share
        self.slots: list[_Slot] = []  # Created with the first batch, from its shapes.
        self.device = device
        self.data_crc = 0
        self.next_batch: Future[tuple[int, int]] | None = None
        self.requests: SimpleQueue[tuple[int, Future[tuple[int, int]]] | None] = SimpleQueue()
        # The thread is a daemon, because it may wait forever for a data source or a GPU. Such a
        # wait must not prevent an error report, or the exit of the process.
        self.thread = Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetch:
        self.thread.start()
        self._request_batch(self.first_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.requests.put(None)
        self.thread.join(JOIN_TIMEOUT)

    def count_samples(self, steps: int) -> int:
        """Return the number of samples that the first `steps` steps of the run use.

        Args:
            steps: The number of steps.
        """
        return self.first_sample + (steps - self.first_step) * self.batches.batch_size

    def take(self, step: int) -> TrainingBatch:
        """Return the batch of a step. Call this once for each step, in order.

        Args:
            step: The step, from 0.

        Raises:
            Exception: Any error that occurred when the batch was read, such as UsageError for an
                invalid token.
        """
        assert self.next_batch is not None, "the step is after the last one"
        tokens, data_crc = self.next_batch.result()
        self._request_batch(step + 1)
        slot = self.slots[step % BATCH_SLOTS]
        for device_tensor, host_tensor in zip(slot.device_tensors, slot.host_tensors, strict=True):
            device_tensor.copy_(host_tensor, non_blocking=True)
        slot.copy_event.record()
        return TrainingBatch(*slot.device_tensors, tokens, data_crc)

    def _request_batch(self, step: int) -> None:
        self.next_batch = None
        if step < self.steps:
            self.next_batch = Future()
            self.requests.put((step, self.next_batch))

    def _run(self) -> None:
        while (request := self.requests.get()) is not None:
            step, future = request
            try:
                future.set_result(self._draw(step))
            except BaseException as error:
                future.set_exception(error)

    def _draw(self, step: int) -> tuple[int, int]:
        if self.device.type == "cuda":  # By default, a thread uses the first GPU.
            torch.cuda.set_device(self.device)
        # Every rank reads the batch of all replicas, so that it can count the tokens of the batch.
        inputs, targets = self.batches.read_batch(self.count_samples(step), self.batches.batch_size)
        begin, end = self.replica_range
        local_batch = inputs[begin:end], targets[begin:end]
        if not self.slots:
            self.slots = [_Slot(local_batch, self.device) for _ in range(BATCH_SLOTS)]
        slot = self.slots[step % BATCH_SLOTS]
        slot.copy_event.synchronize()  # A copy may still read the previous batch of this slot.
        for host_tensor, tensor in zip(slot.host_tensors, local_batch, strict=True):
            host_tensor.copy_(tensor)
        for tensor_of_all in (inputs, targets):
            self.data_crc = crc32(tensor_of_all.contiguous().numpy().data, self.data_crc)
        return self.count_tokens(targets), self.data_crc


class _Slot:
    def __init__(self, example: tuple[Tensor, Tensor], device: torch.device) -> None:
        pinned = device.type == "cuda"

        def host(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

        inputs, targets = example
        self.host_tensors = host(inputs), host(targets)
        self.device_tensors = (
            torch.zeros_like(inputs, device=device),
            torch.zeros_like(targets, device=device),
        )
        self.copy_event = make_event(device)
