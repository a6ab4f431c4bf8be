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

from schedir.runtime.recording.stream_events import event_on
from schedir.training.batches.samples import Batches

# A step that runs, the one before it, whose numbers may not have been read, and the one drawn.
SLOTS: Final = 3
MOMENT: Final = 1.0  # seconds that the end of a run waits for a batch that nobody takes


class TrainingBatch(NamedTuple):
    """What a step is given: `inputs` and `targets` of one replica, on its device, and how many
    `tokens` count in the batch of all replicas.  `read` is a crc32 of all that was drawn of the run
    up to here, of all replicas: every process must have the same."""

    inputs: Tensor
    targets: Tensor
    tokens: int
    read: int


class Prefetch:
    """The batches of steps `begin` to `steps` - 1, one after the other; a context, with its thread.

    `replica` is which one's share of a batch is wanted, of `replicas`; `count` says how many of
    its targets count; `taken` is how many samples were taken before step `begin`, by whatever
    number of replicas.  A Batch keeps its numbers until the one `SLOTS` steps later is taken.
    """

    def __init__(
        self,
        batches: Batches,
        steps: int,
        device: torch.device,
        *,
        replica: int,
        replicas: int,
        count: Callable[[Tensor], int],
        begin: int = 0,
        taken: int = 0,
    ) -> None:
        self.batches, self.steps, self.count = batches, steps, count
        self.begin, self.before = begin, taken
        share = batches.size // replicas
        self.mine = replica * share, (replica + 1) * share
        self.slots: list[_Slot] = []  # made when it is known what there is in a batch
        self.device = device
        self.read = 0
        self.next: Future[tuple[int, int]] | None = None
        self.wanted: SimpleQueue[tuple[int, Future[tuple[int, int]]] | None] = SimpleQueue()
        # What it waits for, a source or a GPU, may never come, and must not keep an error from
        # being said, nor the process from ending.
        self.thread = Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetch:
        self.thread.start()
        self._begin(self.begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.wanted.put(None)
        self.thread.join(MOMENT)

    def taken(self, steps: int) -> int:
        """How many samples of the run are taken when so many of its steps are done."""
        return self.before + (steps - self.begin) * self.batches.size

    def take(self, step: int) -> TrainingBatch:
        """The batch of a step: of each once, in order.

        Raises whatever drawing it does, as UsageError for a token that is none.
        """
        assert self.next is not None, "there are so many steps"
        tokens, read = self.next.result()
        self._begin(step + 1)
        slot = self.slots[step % SLOTS]
        for there, here in zip(slot.device, slot.host, strict=True):
            there.copy_(here, non_blocking=True)
        slot.copied.record()
        return TrainingBatch(*slot.device, tokens, read)

    def _begin(self, step: int) -> None:
        self.next = None
        if step < self.steps:
            self.next = Future()
            self.wanted.put((step, self.next))

    def _run(self) -> None:
        while (wanted := self.wanted.get()) is not None:
            step, drawn = wanted
            try:
                drawn.set_result(self._draw(step))
            except BaseException as error:
                drawn.set_exception(error)

    def _draw(self, step: int) -> tuple[int, int]:
        if self.device.type == "cuda":  # a thread uses the first GPU unless told
            torch.cuda.set_device(self.device)
        # Every rank draws the batch of all replicas, so that each can count its tokens.
        inputs, targets = self.batches.batch(self.taken(step), self.batches.size)
        begin, end = self.mine
        own = inputs[begin:end], targets[begin:end]
        if not self.slots:
            self.slots = [_Slot(own, self.device) for _ in range(SLOTS)]
        slot = self.slots[step % SLOTS]
        slot.copied.synchronize()  # what was here before: a copy may still read it
        for here, mine in zip(slot.host, own, strict=True):
            here.copy_(mine)
        for drawn in (inputs, targets):
            self.read = crc32(drawn.contiguous().numpy().data, self.read)
        return self.count(targets), self.read


class _Slot:
    def __init__(self, like: tuple[Tensor, Tensor], device: torch.device) -> None:
        pinned = device.type == "cuda"

        def host(one: Tensor) -> Tensor:
            return torch.zeros(one.shape, dtype=one.dtype, pin_memory=pinned)

        inputs, targets = like
        self.host = host(inputs), host(targets)
        self.device = (
            torch.zeros_like(inputs, device=device),
            torch.zeros_like(targets, device=device),
        )
        self.copied = event_on(device)
