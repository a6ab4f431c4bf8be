"""Tests that GPU memory allocations after the first step are counted and reported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedir.runtime.recording.allocator_growth import count_allocations
from schedir.training import trainer
from schedir.training.step_queue import StepQueue
from schedir.training.train import run
from tests.cases import cases
from tests.cpu.train_command import ONE_PROCESS


@pytest.mark.parametrize("grows", cases([1, 3], [100]))
def test_allocation_after_first_step_is_reported_once(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grows: int,
) -> None:
    """The memory of a virtual GPU grows in step `grows`."""
    step, issue = 0, StepQueue.issue

    def issue_and_count(self: StepQueue, *arguments: Any) -> None:
        nonlocal step
        issue(self, *arguments)
        step += 1

    monkeypatch.setattr(StepQueue, "issue", issue_and_count)
    monkeypatch.setattr(trainer, "count_allocations", lambda device: 7 + (step >= grows))
    sets = ["train.steps=4", "train.log_every=2", "output.record=false"]
    assert run(config, [*ONE_PROCESS, *sets, f'output.dir="{tmp_path}"']) == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    reports = [line for line in lines if line.startswith("memory: ")]
    assert len(reports) == (grows == 3)
    assert all("1 of 1 processes allocated" in line for line in reports)
    if reports:  # the report precedes the line of its step
        assert lines.index(reports[0]) == lines.index("step 4") - 1


def test_count_allocations_sums_allocator_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_device_alloc": 5, "num_device_free": 2, "num_alloc_retries": 1, "num_ooms": 64}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert count_allocations(torch.device("cuda", 0)) == 8
    assert count_allocations(torch.device("cpu")) == 0
    stats.clear()  # as before torch initializes the GPU
    assert count_allocations(torch.device("cuda", 0)) == 0
