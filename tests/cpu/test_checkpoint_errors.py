"""Tests of checkpoints with wrong calls, names, modules or files.

No wrong data are saved or loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.checkpoints import Saver, dcp_storage, load, save
from schedir.checkpoints.checkpoint_directory import (
    MANIFEST_NAME,
    CheckpointDirectory,
    IncompleteCheckpointError,
)
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.errors import CheckpointError, ExecutionError, ModelError, UsageError
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.snapshot_copies import SnapshotCopies
from schedir.schedules import one_f_one_b
from tests.cpu.checkpoint_layouts import Layout, Model, create_executor, run_steps
from tests.cpu.gloo_processes import run
from tests.cpu.test_delayed_loss_reads import call_before

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def make_two_ranks(
    seed: int = 0, kind: Any = None, width: int = 4, **changes: Any
) -> InProcessExecutor:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, width)}
    options |= {"optimizer": ADAM} | changes
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), checkpoint_snapshots=True)
    return InProcessExecutor(
        program, [(kind or partial(nn.Linear, width, width))() for _ in range(2)], **options
    )


def step(ranks: InProcessExecutor, k: int) -> None:
    ranks.step(*torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(k)))


def schedule_save(folder: Path) -> tuple[InProcessExecutor, Saver]:
    """Schedule a save of the initial state, and run a step."""
    ranks = make_two_ranks()
    saver = Saver(ranks, folder)
    saver.schedule_save(0)
    step(ranks, 0)
    return ranks, saver


def copy_values(ranks: InProcessExecutor) -> list[Tensor]:
    stages = [s for rank in ranks.executors for s in rank.stages.values()]
    return [t.clone() for s in stages for t in (*s.module.parameters(), *s.module.buffers())]


def values_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LossWithWeight(nn.Module):
    """A loss with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return ((y - target).square() * self.scale).mean()


class StageWithLossWeight(nn.Linear):
    """A stage that contains such a loss, and uses only its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loss = LossWithWeight()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.loss.scale


def test_one_name_for_two_weights_of_stage_is_refused(tmp_path: Path) -> None:
    ranks = make_two_ranks(kind=StageWithLossWeight, loss=LossWithWeight())
    with pytest.raises(CheckpointError, match=r"stage 1 has two weights named loss\.scale"):
        save(ranks, tmp_path, step=1, name_map=lambda s, n: n if s else f"first.{n}")
    assert not CheckpointDirectory(tmp_path).list_steps()


def save_with_failing_name_map(rank: int, folder: Path) -> None:
    """Save on a rank. The name map of the second rank raises an error."""
    names: dict[str, str] = {}
    executor = create_executor(Layout(one_f_one_b, PipelineShape(2, 2)), Model())
    name_map: Callable[[int, str], str] = (lambda s, n: names[n]) if rank else (lambda s, n: n)
    with pytest.raises(CheckpointError, match="process 1: KeyError"):
        save(executor, folder, step=1, name_map=name_map)


def test_failing_name_map_of_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    run(save_with_failing_name_map, 2, tmp_path)


def test_save_scheduled_before_load_is_refused(tmp_path: Path) -> None:
    ranks = make_two_ranks()
    save(ranks, tmp_path / "first", step=0)
    step(ranks, 0)
    saver = Saver(ranks, tmp_path / "due")
    saver.schedule_save(1)
    load(ranks, tmp_path / "first")
    step(ranks, 0)
    with pytest.raises(ModelError, match="step 1 cannot be saved"):
        saver.write()
    assert not CheckpointDirectory(tmp_path / "due").list_steps()
    saver.schedule_save(1)  # the run continues
    expected = copy_values(ranks)
    step(ranks, 1)
    saver.write()
    saver.wait()
    loaded = make_two_ranks(1)
    load(loaded, tmp_path / "due")
    assert values_equal(copy_values(loaded), expected)


def test_scheduled_save_of_another_saver_is_invalid(tmp_path: Path) -> None:
    ranks = make_two_ranks()
    first, second = (Saver(ranks, tmp_path / name) for name in ("one", "other"))
    first.schedule_save(0)
    second.schedule_save(0)
    step(ranks, 0)
    with pytest.raises(ModelError, match="step 0 cannot be saved"):
        first.write()
    second.write()
    second.wait()
    assert CheckpointDirectory(tmp_path / "other").find_newest_step() == 0


def test_save_during_background_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, may_continue, write = Event(), Event(), dcp_storage.write

    def write_and_wait(*args: Any) -> Any:
        result = write(*args)
        if current_thread().name == "checkpoint":
            written.set()
            assert may_continue.wait(60)
        return result

    monkeypatch.setattr(dcp_storage, "write", write_and_wait)
    ranks, saver = schedule_save(tmp_path)
    saver.write()
    assert written.wait(60)
    with pytest.raises(CheckpointError, match="this process still writes step 0") as caught:
        save(ranks, tmp_path, step=1)
    assert "saver.wait()" in caught.value.hint
    may_continue.set()
    saver.wait()
    save(ranks, tmp_path, step=1)
    assert CheckpointDirectory(tmp_path).list_steps() == [0, 1]


def test_step_or_save_after_partial_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_two_ranks(), tmp_path, step=0)
    ranks, read = make_two_ranks(1), dcp_storage.read

    def read_two_slices(folder: Path, reads: Any) -> None:
        file, slices = next(iter(reads.items()))
        read(folder, {file: slices[:2]})
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(dcp_storage, "read", read_two_slices)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        load(ranks, tmp_path)
    assert "create a new executor" in caught.value.hint
    with pytest.raises(ExecutionError):
        step(ranks, 0)
    with pytest.raises(CheckpointError, match="an earlier step or load failed"):
        save(ranks, tmp_path, step=1)


class NonContiguousStage(nn.Linear):
    """A stage with a transposed, a conjugated and optionally an expanded tensor."""

    def __init__(self, *, expanded: bool = False) -> None:
        super().__init__(4, 4)
        self.turned = nn.Parameter(torch.randn(2, 4).t())
        self.register_buffer("conj", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("wide", torch.randn(1).expand(3) if expanded else torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.turned.sum(1)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("fused", [False, True])
def test_non_contiguous_tensors_resume_bit_for_bit(fused: bool, tmp_path: Path) -> None:
    saved, loaded = (
        make_two_ranks(k, NonContiguousStage, optimizer=partial(ADAM, fused=fused)) for k in (0, 1)
    )
    step(saved, 0)
    save(saved, tmp_path, step=1)
    load(loaded, tmp_path)
    assert values_equal(copy_values(saved), copy_values(loaded))
    for ranks in (saved, loaded):
        step(ranks, 1)
    assert values_equal(copy_values(saved), copy_values(loaded))


def test_expanded_tensor_is_refused_before_any_read(tmp_path: Path) -> None:
    save(make_two_ranks(0, NonContiguousStage), tmp_path, step=1)
    ranks = make_two_ranks(1, partial(NonContiguousStage, expanded=True))
    before = copy_values(ranks)
    with pytest.raises(CheckpointError, match=r"stages\.0\.wide is expanded here"):
        load(ranks, tmp_path)
    assert values_equal(before, copy_values(ranks))


def test_load_into_frozen_stage_warns(tmp_path: Path) -> None:
    ranks = make_two_ranks()
    step(ranks, 0)
    save(ranks, tmp_path, step=1)
    modules = iter([nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)])
    frozen = make_two_ranks(1, lambda: next(modules))
    with pytest.warns(UserWarning, match="frozen here"):
        load(frozen, tmp_path)


def write_after_lost_copy(rank: int, folder: Path) -> str:
    """Return the error of a write. On the first rank another request replaced the Saver's copy."""
    layout = Layout(one_f_one_b, PipelineShape(2, 2), options={"checkpoint_snapshots": True})
    executor = create_executor(layout, Model(tied=False))
    saver = Saver(executor, folder)
    saver.schedule_save(0)
    run_steps(executor, 0, 1)
    if rank == 0:
        executor.state.service(SnapshotCopies).request({})
    with pytest.raises(ModelError) as caught:
        saver.write()
    saver.wait()
    return caught.value.fact


def test_missing_copy_of_one_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    errors = run(write_after_lost_copy, 2, tmp_path)
    assert len({*errors}) == 1 and "step 0 cannot be saved: the weights changed" in errors[0]
    assert not CheckpointDirectory(tmp_path).list_steps()


def gather_after_peer_exit(rank: int) -> str:
    """Return the error of the first rank. The second rank destroys its process group."""
    group = dist.new_group(backend="gloo")
    dist.barrier()  # both have created the group
    if rank:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(CheckpointError) as caught:
        CheckpointGroup(group).gather_results(lambda: None)
    assert "all processes must call save and load, not only rank 0" in caught.value.hint
    return caught.value.fact


def test_lost_connection_is_reported_by_other_ranks() -> None:
    assert (
        run(gather_after_peer_exit, 2)[0]
        == "while processes saved or loaded, the connection to another process was lost"
    )


def test_second_schedule_or_wait_before_write_is_refused(tmp_path: Path) -> None:
    _, saver = schedule_save(tmp_path)
    calls: list[Callable[[], object]] = [lambda: saver.schedule_save(1), saver.wait]
    for call in calls:
        with pytest.raises(ModelError, match="the save of step 0 is scheduled"):
            call()
    saver.write()
    saver.wait()
    assert CheckpointDirectory(tmp_path).list_steps() == [0]


def load_damaged_checkpoint(rank: int, folder: Path) -> tuple[list[str], int | None, str]:
    """Load a damaged checkpoint, then the newest complete one.

    Return the files that this rank verified, and the step and file of the error.
    """
    executor = create_executor(Layout(one_f_one_b, PipelineShape(2, 2)), Model(tied=False))
    for number in (1, 2):
        save(executor, folder, step=number, name_map=lambda s, n: n)
    dist.barrier()
    if rank == 0:
        file = folder / "step-00000002" / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    checked_files: list[str] = []

    def record(directory: CheckpointDirectory, manifest: Any, names: Any) -> None:
        checked_files.extend(names)

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, CheckpointDirectory, "check_files", record)
        with pytest.raises(IncompleteCheckpointError) as caught:
            load(executor, folder, step=2, name_map=lambda s, n: n)
    skipped = r"skipped: step-00000002 is not complete"
    with nullcontext() if rank else pytest.warns(UserWarning, match=skipped):
        state = load(executor, folder, name_map=lambda s, n: n)
    assert state == {"step": 1, "extra": {}}
    return checked_files, caught.value.step, caught.value.file


def test_each_rank_verifies_part_of_files(tmp_path: Path) -> None:
    (first_files, *first_error), (second_files, *second_error) = run(
        load_damaged_checkpoint, 2, tmp_path
    )
    assert first_error == second_error == [2, "__1_0.distcp"]
    files = {path.name for path in (tmp_path / "step-00000001").iterdir()} - {"manifest.jsonl"}
    assert {*first_files} | {*second_files} == files and not {*first_files} & {*second_files}


@pytest.mark.parametrize(
    ("key", "value"),
    [("next", "1"), ("seed", 0.5), ("world", 2), ("loss_scale", [0, 1]), ("also", {"a": 1}),
     ("optimizers", {"AdamW": [[]]}), ("extra", None)],
)  # fmt: skip
def test_invalid_manifest_state_is_refused(tmp_path: Path, key: str, value: object) -> None:
    manifest = save(make_two_ranks(), tmp_path, step=1) / MANIFEST_NAME
    first, *lines, _ = manifest.read_bytes().splitlines(keepends=True)
    head = json.loads(first)
    head["state"][key] = value
    text = b"".join([json.dumps(head).encode() + b"\n", *lines])
    manifest.write_bytes(text + b'{"sha256": "%s"}\n' % sha256(text).hexdigest().encode())
    ranks = make_two_ranks(seed=1)
    before = copy_values(ranks)
    with pytest.raises(CheckpointError, match=f"was not written by a run: its state has {key} "):
        load(ranks, tmp_path)
    assert values_equal(before, copy_values(ranks))


def test_empty_directory_name_is_refused() -> None:
    with pytest.raises(UsageError, match="directory is '', not a path"):
        CheckpointDirectory("")


def test_incomplete_checkpoint_is_skipped_with_warning(tmp_path: Path) -> None:
    """If all checkpoints of the folder are incomplete, `load` raises an error."""
    ranks = make_two_ranks()
    assert load(ranks, tmp_path) is None
    for step in (1, 2):
        save(ranks, tmp_path, step=step, keep=2)
    (tmp_path / "step-00000002" / "manifest.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match=r"^skipped: step-00000002 is not complete: its manifest"):
        state = load(make_two_ranks(), tmp_path)
    assert state is not None and state["step"] == 1
    for file in (tmp_path / "step-00000001").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        load(make_two_ranks(), tmp_path)
    assert str(tmp_path) in error.value.fact and error.value.hint
    assert "is complete: step-00000002 is not" in error.value.fact
    assert "; step-00000001 is not complete: " in error.value.fact
