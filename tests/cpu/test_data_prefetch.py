"""Tests of batches that a thread draws into reused memory."""

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


def batches(size: int = 4) -> Batches:
    return Batches(np.arange(200, dtype=np.uint8), 8, size, seed=3)


def drawn(source: Batches, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step, in a run that began with step 0."""
    return source.read_batch(step * source.batch_size, source.batch_size)


@given(steps=st.integers(1, 9), replicas=st.integers(1, 3), share=st.integers(1, 2))
def test_each_replica_has_its_part_of_the_same_batches(
    steps: int, replicas: int, share: int
) -> None:
    source = batches(replicas * share)
    for replica in range(replicas):
        with Prefetch(
            source, steps, CPU, replica=replica, replicas=replicas, count_tokens=gpt.count_tokens
        ) as ours:
            kept = []
            for step in range(steps):
                kept.append(ours.take(step))
                wants = [x[replica * share : (replica + 1) * share] for x in drawn(source, step)]
                assert all(map(torch.equal, kept[-1][:2], wants))
                assert kept[-1].tokens == replicas * share * 8
                if step:  # a wrong step is repeated after the next one has run
                    before = drawn(source, step - 1)[0][replica * share : (replica + 1) * share]
                    assert torch.equal(kept[-2].inputs, before)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_a_batch_is_drawn_while_the_step_before_runs() -> None:
    drawn = threading.Event()

    class Seen(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == count:
                drawn.set()
            return super().read_batch(first, count)

    source = Seen(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(source, 3, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens) as ours:
        ours.take(0)
        assert drawn.wait(60)


class Copied:
    """An event after a copy that ends only on request."""

    def __init__(self, device: torch.device) -> None:
        self.over, self.asked = threading.Event(), threading.Event()
        self.over.set()

    def record(self) -> None:
        self.over.clear()

    def synchronize(self) -> None:
        if not self.over.is_set():
            self.asked.set()
        assert self.over.wait(60)


def test_memory_that_a_copy_still_reads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "make_event", Copied)
    source = batches()
    with Prefetch(
        source, BATCH_SLOTS + 1, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens
    ) as ours:
        for step in range(BATCH_SLOTS):
            ours.take(step)
        first: Copied = ours.slots[0].copy_event  # type: ignore[assignment]
        assert first.asked.wait(60)  # the next step's batch waits for the event
        assert torch.equal(ours.slots[0].host_tensors[0], drawn(source, 0)[0])
        first.over.set()
        assert torch.equal(ours.take(BATCH_SLOTS).inputs, drawn(source, BATCH_SLOTS)[0])


def test_an_error_is_that_of_the_step_that_needs_the_batch() -> None:
    class Fails(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == 2 * count:
                raise UsageError("no such token")
            return super().read_batch(first, count)

    source = Fails(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(source, 9, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens) as ours:
        ours.take(0)
        ours.take(1)
        with pytest.raises(UsageError, match="no such token"):
            ours.take(2)


def test_a_source_that_does_not_answer_holds_up_no_end() -> None:
    asked, answer, answered = (threading.Event() for _ in range(3))

    class Stuck(Batches):
        def read_batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if first == count:
                asked.set()
                answer.wait(20)
                answered.set()
            return super().read_batch(first, count)

    source = Stuck(np.arange(200, dtype=np.uint8), 8, 4)
    with Prefetch(source, 3, CPU, replica=0, replicas=1, count_tokens=gpt.count_tokens) as ours:
        ours.take(0)
        assert asked.wait(60)
    assert not answered.is_set() and ours.thread.daemon
    answer.set()
    ours.thread.join(60)
    assert not ours.thread.is_alive()
