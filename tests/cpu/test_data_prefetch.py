"""Tests of batches that a thread reads into reused memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import UsageError
from schedir.models import gpt
from schedir.training.batches import prefetch
from schedir.training.batches.prefetch import BATCH_SLOTS, Prefetch
from schedir.training.batches.samples import Batches

CPU = torch.device("cpu")


def make_batches(size: int = 4) -> Batches:
    return Batches(np.arange(200, dtype=np.uint8), 8, size, seed=3)


def read_batch_of_step(source: Batches, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step of a run that began with step 0."""
    return source.read_batch(step * source.batch_size, source.batch_size)


@given(steps=st.integers(1, 9), replicas=st.integers(1, 3), share=st.integers(1, 2))
def test_each_replica_gets_its_part_of_each_batch(steps: int, replicas: int, share: int) -> None:
    source = make_batches(replicas * share)
    for replica in range(replicas):
        with Prefetch(
            source, steps, CPU, replica=replica, replicas=replicas, count_tokens=gpt.count_tokens
        ) as prefetched:
            taken = []
            for step in range(steps):
                taken.append(prefetched.take(step))
                expected = [
                    x[replica * share : (replica + 1) * share]
                    for x in read_batch_of_step(source, step)
                ]
                assert all(map(torch.equal, taken[-1][:2], expected))
                assert taken[-1].tokens == replicas * share * 8
                if step:  # a wrong step is repeated after the next one has run
                    before = read_batch_of_step(source, step - 1)[0][
                        replica * share : (replica + 1) * share
                    ]
                    assert torch.equal(taken[-2].inputs, before)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_next_batch_is_read_during_step() -> None:
    was_read = threading.Event()

    class ObservedBatches(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == count:
                was_read.set()
            return super().read_batch(first, count)

    source = ObservedBatches(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(
        source, 3, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens
    ) as prefetched:
        prefetched.take(0)
        assert was_read.wait(60)


class CopyEvent:
    """An event after a copy. The test decides when the copy ends."""

    def __init__(self, device: torch.device) -> None:
        self.over, self.asked = threading.Event(), threading.Event()
        self.over.set()

    def record(self) -> None:
        self.over.clear()

    def synchronize(self) -> None:
        if not self.over.is_set():
            self.asked.set()
        assert self.over.wait(60)


def test_slot_of_running_copy_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "make_event", CopyEvent)
    source = make_batches()
    with Prefetch(
        source, BATCH_SLOTS + 1, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens
    ) as prefetched:
        for step in range(BATCH_SLOTS):
            prefetched.take(step)
        first: CopyEvent = prefetched.slots[0].copy_event  # type: ignore[assignment]
        assert first.asked.wait(60)  # the next step's batch waits for the event
        assert torch.equal(prefetched.slots[0].host_tensors[0], read_batch_of_step(source, 0)[0])
        first.over.set()
        assert torch.equal(
            prefetched.take(BATCH_SLOTS).inputs, read_batch_of_step(source, BATCH_SLOTS)[0]
        )


def test_read_error_is_raised_at_step_of_batch() -> None:
    class FailingBatches(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == 2 * count:
                raise UsageError("no such token")
            return super().read_batch(first, count)

    source = FailingBatches(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(
        source, 9, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens
    ) as prefetched:
        prefetched.take(0)
        prefetched.take(1)
        with pytest.raises(UsageError, match="no such token"):
            prefetched.take(2)


def test_blocked_read_does_not_block_exit() -> None:
    is_blocked, unblock, has_returned = (threading.Event() for _ in range(3))

    class BlockedBatches(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == count:
                is_blocked.set()
                unblock.wait(20)
                has_returned.set()
            return super().read_batch(first, count)

    source = BlockedBatches(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(
        source, 3, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens
    ) as prefetched:
        prefetched.take(0)
        assert is_blocked.wait(60)
    assert not has_returned.is_set() and prefetched.thread.daemon
    unblock.set()
    prefetched.thread.join(60)
    assert not prefetched.thread.is_alive()
