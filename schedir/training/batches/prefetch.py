"""Draw the batch of the next step during a step.

A thread draws it and puts it into pinned memory, from where it is copied without the host's
waiting.  All memory is made before the first step: to allocate pinned memory in one would keep
streams from running beside each other (CUDA C++ Programming Guide, "Implicit Synchronization").
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

# A step that runs, the one before it, whose numbers may not have been read, and the one drawn.
BATCH_SLOTS: Final = 3
JOIN_TIMEOUT: Final = 1.0  # seconds that the end of a run waits for a batch that nobody takes


class TrainingBatch(NamedTuple):
    """What a step is given: `inputs` and `targets` of one replica, on its device, and how many
    `tokens` count in the batch of all replicas.  `data_crc` is a crc32 of all that was drawn of the
    run up to here, of all replicas: every process must have the same."""

    inputs: Tensor
    targets: Tensor
    tokens: int
    data_crc: int


class Prefetch:
    """The batches of steps `first_step` to `steps` - 1, one after the other; a context, with its
    thread.

    `replica` is which one's share of a batch is wanted, of `replicas`; `count_tokens` says how many
    of its targets count; `count_samples` is how many samples were taken before step `first_step`,
    by whatever number of replicas.  A Batch keeps its numbers until the one `BATCH_SLOTS` steps
    later is taken.
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
        self.batches, self.steps, self.count_tokens = batches, steps, count_tokens
        self.first_step, self.first_sample = first_step, first_sample
        share = batches.batch_size // replicas
        self.replica_range = replica * share, (replica + 1) * share
        self.slots: list[_Slot] = []  # made when it is known what there is in a batch
        self.device = device
        self.data_crc = 0
        self.next_batch: Future[tuple[int, int]] | None = None
        self.requests: SimpleQueue[tuple[int, Future[tuple[int, int]]] | None] = SimpleQueue()
        # What it waits for, a source or a GPU, may never come, and must not keep an error from
        # being said, nor the process from ending.
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
        """How many samples of the run are taken when so many of its steps are done."""
        return self.first_sample + (steps - self.first_step) * self.batches.batch_size

    def take(self, step: int) -> TrainingBatch:
        """The batch of a step: of each once, in order.

        Raises whatever drawing it does, as UsageError for a token that is none.
        """
        assert self.next_batch is not None, "there are so many steps"
        tokens, read = self.next_batch.result()
        self._request_batch(step + 1)
        slot = self.slots[step % BATCH_SLOTS]
        for there, here in zip(slot.device_tensors, slot.host_tensors, strict=True):
            there.copy_(here, non_blocking=True)
        slot.copy_event.record()
        return TrainingBatch(*slot.device_tensors, tokens, read)

    def _request_batch(self, step: int) -> None:
        self.next_batch = None
        if step < self.steps:
            self.next_batch = Future()
            self.requests.put((step, self.next_batch))

    def _run(self) -> None:
        while (wanted := self.requests.get()) is not None:
            step, drawn = wanted
            try:
                drawn.set_result(self._draw(step))
            except BaseException as error:
                drawn.set_exception(error)

    def _draw(self, step: int) -> tuple[int, int]:
        if self.device.type == "cuda":  # a thread uses the first GPU unless told
            torch.cuda.set_device(self.device)
        # Every rank draws the batch of all replicas, so that each can count its tokens.
        inputs, targets = self.batches.read_batch(self.count_samples(step), self.batches.batch_size)
        begin, end = self.replica_range
        own = inputs[begin:end], targets[begin:end]
        if not self.slots:
            self.slots = [_Slot(own, self.device) for _ in range(BATCH_SLOTS)]
        slot = self.slots[step % BATCH_SLOTS]
        slot.copy_event.synchronize()  # what was here before: a copy may still read it
        for here, mine in zip(slot.host_tensors, own, strict=True):
            here.copy_(mine)
        for drawn in (inputs, targets):
            self.data_crc = crc32(drawn.contiguous().numpy().data, self.data_crc)
        return self.count_tokens(targets), self.data_crc


class _Slot:
    def __init__(self, example: tuple[Tensor, Tensor], device: torch.device) -> None:
        pinned = device.type == "cuda"

        def host(one: Tensor) -> Tensor:
            return torch.zeros(one.shape, dtype=one.dtype, pin_memory=pinned)

        inputs, targets = example
        self.host_tensors = host(inputs), host(targets)
        self.device_tensors = (
            torch.zeros_like(inputs, device=device),
            torch.zeros_like(targets, device=device),
        )
        self.copy_event = make_event(device)
