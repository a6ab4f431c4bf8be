"""Tests that a Saver, which copies and writes during steps, writes the same bits as `save`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn

import schedir
from schedir import PipelineShape
from schedir.checkpoints import Saver, save
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.errors import CheckpointError, ModelError
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload import snapshot_copies
from schedir.runtime.offload.snapshot_copies import SnapshotCopies
from schedir.schedules import dualpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from tests.cases import cases, each_value
from tests.cpu.checkpoint_layouts import (
    Layout,
    Model,
    create_executor,
    create_in_process_executor,
    keep_name,
    read_checkpoint_tensors,
    run_steps,
)
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

ON = {"checkpoint_snapshots": True}
IN_PROCESS_LAYOUTS = {
    "one_f_one_b": Layout(one_f_one_b, PipelineShape(2, 4), options=ON),
    "interleaved": Layout(interleaved, PipelineShape(2, 4, 2), options=ON),
    "zb_h1": Layout(zb_h1, PipelineShape(2, 4), options=ON),
    "two holders": Layout(dualpipe, PipelineShape(2, 4, placement="mirror"), options=ON),
    "recompute": Layout(one_f_one_b, PipelineShape(2, 4), options=ON | {"recompute": "all"}),
}
PROCESS_LAYOUTS = {
    "zero 0": Layout(one_f_one_b, PipelineShape(1, 2), dp=2, options=ON),
    "zero 1": Layout(looped_bfs, PipelineShape(1, 2, 2), dp=2, zero=1, options=ON),
    "zero 2": Layout(looped_bfs, PipelineShape(1, 2, 2), dp=2, zero=2, options=ON),
    "zero 3": Layout(looped_bfs, PipelineShape(1, 2, 2), dp=2, zero=3, options=ON),
    "slices": Layout(one_f_one_b, PipelineShape(1, 2), tp=2, options=ON),
}
MODEL = Model(dropout=0.1, clip=True)


def copy_late(pairs: Any) -> None:
    """Start a copy late, when the step is already running."""
    sleep(0.1)
    COPY(pairs)


COPY = snapshot_copies.copy_pairs


@pytest.fixture
def _late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_copies, "copy_pairs", copy_late)


def checkpoints_equal(first: Path, second: Path, step: int) -> bool:
    """Return whether two checkpoints have the same tensors and the same state."""
    first_state, second_state = (
        CheckpointDirectory(folder).load_manifest(step).state for folder in (first, second)
    )
    first_tensors, second_tensors = (
        read_checkpoint_tensors(folder, step) for folder in (first, second)
    )
    return first_state == second_state and have_same_bits([first_tensors], [second_tensors])


def save_and_schedule_save(executor: Any, folder: Path) -> None:
    """Save after the first step, both at once and during the second step."""
    saver = Saver(executor, folder / "beside", name_map=keep_name)
    run_steps(executor, 0, 1)
    save(executor, folder / "at once", step=1, name_map=keep_name)
    saver.schedule_save(1)
    run_steps(executor, 1, 2)
    saver.write()
    run_steps(executor, 2, 3)
    saver.wait()


@pytest.mark.usefixtures("_late_copies")
@pytest.mark.parametrize(
    ("name", "half"),
    each_value(
        cases(["one_f_one_b", "two holders", "recompute"], ["interleaved", "zb_h1"]), [False, True]
    ),
)
def test_copy_has_state_before_running_step(name: str, half: bool, tmp_path: Path) -> None:
    save_and_schedule_save(
        create_in_process_executor(IN_PROCESS_LAYOUTS[name], MODEL._replace(half=half)), tmp_path
    )
    assert checkpoints_equal(tmp_path / "beside", tmp_path / "at once", 1)


def test_step_without_wait_spoils_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait the copy begins after the step, so the tests above can fail."""
    monkeypatch.setattr(
        snapshot_copies.SnapshotCopies, "wait", lambda self: None
    )  # before executors bind the method
    executor = create_in_process_executor(IN_PROCESS_LAYOUTS["one_f_one_b"], MODEL)
    saver = Saver(executor, tmp_path / "beside", name_map=keep_name)
    run_steps(executor, 0, 2)
    save(executor, tmp_path / "at once", step=2, name_map=keep_name)
    saver.schedule_save(2)
    copies_may_end = Event()
    monkeypatch.setattr(
        snapshot_copies, "copy_pairs", lambda pairs: copies_may_end.wait(60) and COPY(pairs)
    )
    run_steps(executor, 2, 3)
    copies_may_end.set()
    for rank in executor.executors:
        started_copies = rank.state.service(SnapshotCopies).started_copies
        assert started_copies
        for copy in started_copies:
            copy.finish()
    saver.write()
    saver.wait()
    assert not checkpoints_equal(tmp_path / "beside", tmp_path / "at once", 2)


def save_all_layouts(rank: int, layouts: dict[str, Layout], folder: Path) -> None:
    """Save in all layouts in a process."""
    snapshot_copies.copy_pairs = copy_late
    for name, layout in layouts.items():
        save_and_schedule_save(create_executor(layout, MODEL), folder / name)


def test_each_replica_and_tensor_parallel_rank_copies_its_state(tmp_path: Path) -> None:
    run(save_all_layouts, 2, PROCESS_LAYOUTS, tmp_path)
    for name in PROCESS_LAYOUTS:
        assert checkpoints_equal(tmp_path / name / "beside", tmp_path / name / "at once", 1), name


class BatchNormStage(nn.Module):
    """A stage whose forwards write to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_late_copies")
def test_saved_buffers_have_values_before_forwards(tmp_path: Path) -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), checkpoint_snapshots=True)
    executor = InProcessExecutor(
        program, [BatchNormStage(), BatchNormStage()],
        loss=nn.functional.mse_loss, boundary=(3, 4), optimizer=partial(torch.optim.Adam, lr=0.1),
    )  # fmt: skip
    x = torch.randn(2, 3, 4)
    saver = Saver(executor, tmp_path / "beside")
    executor.step(x, x)
    save(executor, tmp_path / "at once", step=1)
    saver.schedule_save(1)
    executor.step(x, x)
    saver.write()
    saver.wait()
    assert "buffers/stages.0.norm.running_mean" in read_checkpoint_tensors(tmp_path / "beside", 1)
    assert checkpoints_equal(tmp_path / "beside", tmp_path / "at once", 1)


def test_step_without_scheduled_save_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = create_in_process_executor(IN_PROCESS_LAYOUTS["one_f_one_b"], MODEL)
    monkeypatch.setattr(snapshot_copies, "copy_pairs", pytest.fail)
    run_steps(executor, 0, 2)


def schedule_save(folder: Path) -> tuple[InProcessExecutor, Saver]:
    """Run a step, and schedule a save of its state."""
    executor = create_in_process_executor(IN_PROCESS_LAYOUTS["one_f_one_b"], MODEL)
    saver = Saver(executor, folder, name_map=keep_name)
    run_steps(executor, 0, 1)
    saver.schedule_save(1)
    return executor, saver


def test_canceled_save_is_not_written(tmp_path: Path) -> None:
    executor, saver = schedule_save(tmp_path)
    run_steps(executor, 1, 2)
    saver.cancel()
    saver.write()
    saver.wait()
    assert CheckpointDirectory(tmp_path).find_newest_step() is None


def test_saver_without_snapshots_or_copy_is_refused(tmp_path: Path) -> None:
    without_snapshots = create_in_process_executor(Layout(one_f_one_b, PipelineShape(2, 4)), MODEL)
    with pytest.raises(ModelError) as caught:
        Saver(without_snapshots, tmp_path)
    assert "snapshots=True" in caught.value.hint
    _, saver = schedule_save(tmp_path)
    with pytest.raises(ModelError) as caught:
        saver.write()
    assert "has not been copied" in caught.value.fact


def test_failed_write_is_raised_at_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    executor, saver = schedule_save(tmp_path / "file")
    run_steps(executor, 1, 2)
    saver.write()
    with pytest.raises(CheckpointError):
        saver.schedule_save(2)
