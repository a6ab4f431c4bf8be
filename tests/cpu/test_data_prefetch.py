"""Tests of batches that a thread reads into reused memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

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


def make_observed_batches(observe: Callable[[int], object]) -> Batches:
    """Return batches that call `observe` with the number of a step before they read its batch."""

    class ObservedBatches(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            observe(first // count)
            return super().read_batch(first, count)

    return ObservedBatches(np.arange(200, dtype=np.uint8), 8, 4)


def start_prefetch(source: Batches, steps: int, replica: int = 0, replicas: int = 1) -> Prefetch:
    count_tokens = gpt.count_tokens
    return Prefetch(
        source, steps, CPU, replica=replica, replicas=replicas, count_tokens=count_tokens
    )


def read_batch_of_step(source: Batches, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step of a run that began with step 0."""
    return source.read_batch(step * source.batch_size, source.batch_size)


@given(steps=st.integers(1, 9), replicas=st.integers(1, 3), share=st.integers(1, 2))
def test_each_replica_gets_its_part_of_each_batch(steps: int, replicas: int, share: int) -> None:
    source = make_batches(replicas * share)
    for replica in range(replicas):
        with start_prefetch(source, steps, replica, replicas) as prefetched:
            taken = []
            for step in range(steps):
                taken.append(prefetched.take(step))
                assert taken[-1].tokens == replicas * share * 8
                # A wrong step is repeated after the next one has run.
                for k in range(max(0, step - 1), step + 1):
                    part = slice(replica * share, (replica + 1) * share)
                    expected = [x[part] for x in read_batch_of_step(source, k)]
                    assert all(map(torch.equal, taken[k][:2], expected))
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_next_batch_is_read_during_step() -> None:
    was_read = threading.Event()

    def record_step_1(step: int) -> None:
        if step == 1:
            was_read.set()

    source = make_observed_batches(record_step_1)
    with start_prefetch(source, 3) as prefetched:
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
    with start_prefetch(source, BATCH_SLOTS + 1) as prefetched:
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
    def fail_at_step_2(step: int) -> None:
        if step == 2:
            raise UsageError("no such token")

    with start_prefetch(make_observed_batches(fail_at_step_2), 9) as prefetched:
        prefetched.take(0)
        prefetched.take(1)
        with pytest.raises(UsageError, match="no such token"):
            prefetched.take(2)


def test_blocked_read_does_not_block_exit() -> None:
    is_blocked, unblock, has_returned = (threading.Event() for _ in range(3))

    def block_at_step_1(step: int) -> None:
        if step == 1:
            is_blocked.set()
            unblock.wait(20)
            has_returned.set()

    with start_prefetch(make_observed_batches(block_at_step_1), 3) as prefetched:
        prefetched.take(0)
        assert is_blocked.wait(60)
    assert not has_returned.is_set() and prefetched.thread.daemon
    unblock.set()
    prefetched.thread.join(60)
    assert not prefetched.thread.is_alive()
