"""Tests of checkpoints with wrong calls, names, modules or files.

No wrong data are saved or loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
from tests.cpu.layouts import Layout, Model, executor_of, steps
from tests.cpu.spawn import run

ADAM = partial(torch.optim.AdamW, lr=1e-2)
LINEAR = partial(nn.Linear, 4, 4)


def two(seed: int = 0, kind: Any = None, **how: Any) -> InProcessExecutor:
    torch.manual_seed(seed)
    usual: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, 4)}
    usual |= {"optimizer": ADAM} | how
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), checkpoint_snapshots=True)
    return InProcessExecutor(program, [(kind or LINEAR)() for _ in range(2)], **usual)


def step(ranks: InProcessExecutor, k: int) -> None:
    ranks.step(*torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(k)))


def numbers(ranks: InProcessExecutor) -> list[Tensor]:
    stages = [s for rank in ranks.executors for s in rank.stages.values()]
    return [t.clone() for s in stages for t in (*s.module.parameters(), *s.module.buffers())]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Scaled(nn.Module):
    """A loss with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return ((y - target).square() * self.scale).mean()


class Inner(nn.Linear):
    """A stage that contains such a loss, but does not use it as its loss."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loss = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.loss.scale


def test_a_name_is_one_weights_also_within_a_stage(tmp_path: Path) -> None:
    of_loss = two(kind=Inner, loss=Scaled())
    with pytest.raises(CheckpointError, match=r"stage 1 has two weights named loss\.scale"):
        save(of_loss, tmp_path, step=1, name_map=lambda s, n: n if s else f"first.{n}")
    assert not CheckpointDirectory(tmp_path).list_steps()


def told(rank: int, folder: Path) -> None:
    """Save from a process, of which the second has no names."""
    names: dict[str, str] = {}
    executor = executor_of(Layout(one_f_one_b, PipelineShape(2, 2)), Model())
    own: Callable[[int, str], str] = (lambda s, n: names[n]) if rank else (lambda s, n: n)
    with pytest.raises(CheckpointError, match="process 1: KeyError"):
        save(executor, folder, step=1, name_map=own)


def test_another_division_into_stages_needs_a_name_map(tmp_path: Path) -> None:
    save(two(), tmp_path, step=1)
    program = schedir.compile(one_f_one_b, PipelineShape(3, 2))
    usual: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, 4), "optimizer": ADAM}
    three = InProcessExecutor(program, [LINEAR() for _ in range(3)], **usual)
    with pytest.raises(CheckpointError, match=r"it has no weights/stages\.2\.weight") as refused:
        load(three, tmp_path)
    assert "save and load with name_map=lambda stage, name: ..." in refused.value.hint
    with pytest.raises(CheckpointError, match="has no weights") as refused:
        load(two(), tmp_path, name_map=lambda stage, name: f"layers.{stage}.{name}")
    assert refused.value.hint == ""


@pytest.mark.parametrize("call", [save, load])
def test_a_name_map_is_a_function(call: Callable[..., object], tmp_path: Path) -> None:
    save(two(), tmp_path, step=1)
    step = {"step": 1}
    with pytest.raises(CheckpointError, match="name_map must be a function of a stage and a name"):
        call(two(), tmp_path, name_map={"weight": "weight"}, **step)


def test_who_has_no_names_does_not_let_others_wait(tmp_path: Path) -> None:
    run(told, 2, tmp_path)


def test_what_is_due_is_not_forgotten(tmp_path: Path) -> None:
    ranks = two()
    saver = Saver(ranks, tmp_path)
    saver.schedule_save(0)
    step(ranks, 0)
    with pytest.raises(ModelError, match="the save of step 0 is scheduled"):
        saver.schedule_save(1)
    saver.write()
    saver.wait()
    assert CheckpointDirectory(tmp_path).list_steps() == [0]


def test_what_a_load_has_changed_is_not_saved_as_what_was_due(tmp_path: Path) -> None:
    ranks = two()
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
    now = numbers(ranks)
    step(ranks, 1)
    saver.write()
    saver.wait()
    other = two(1)
    load(other, tmp_path / "due")
    assert alike(numbers(other), now)


def test_two_savers_do_not_take_what_the_other_has_not_copied(tmp_path: Path) -> None:
    ranks = two()
    one, other = (Saver(ranks, tmp_path / name) for name in ("one", "other"))
    one.schedule_save(0)
    other.schedule_save(0)
    step(ranks, 0)
    with pytest.raises(ModelError, match="step 0 cannot be saved"):
        one.write()
    other.write()
    other.wait()
    assert CheckpointDirectory(tmp_path / "other").find_newest_step() == 0


def test_a_save_does_not_tidy_away_what_a_saver_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go_on, write = Event(), Event(), dcp_storage.write

    def slow(*args: Any) -> Any:
        made = write(*args)
        if current_thread().name == "checkpoint":
            written.set()
            assert go_on.wait(60)
        return made

    monkeypatch.setattr(dcp_storage, "write", slow)
    ranks = two()
    saver = Saver(ranks, tmp_path)
    saver.schedule_save(0)
    step(ranks, 0)
    saver.write()
    assert written.wait(60)
    with pytest.raises(CheckpointError, match="this process still writes step 0") as caught:
        save(ranks, tmp_path, step=1)
    assert "saver.wait()" in caught.value.hint
    go_on.set()
    saver.wait()
    save(ranks, tmp_path, step=1)
    assert CheckpointDirectory(tmp_path).list_steps() == [0, 1]


def test_nobody_goes_on_from_what_is_partly_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(two(), tmp_path, step=0)
    ranks, read = two(1), dcp_storage.read

    def fails(folder: Path, manifest: Any, wanted: Any) -> None:
        read(folder, manifest, [*wanted][:2])
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(dcp_storage, "read", fails)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        load(ranks, tmp_path)
    assert "create a new executor" in caught.value.hint
    with pytest.raises(ExecutionError):
        step(ranks, 0)
    with pytest.raises(CheckpointError, match="an earlier step or load failed"):
        save(ranks, tmp_path, step=1)


class Odd(nn.Linear):
    """A stage with tensors whose memory layout differs from their order."""

    def __init__(self, *, expanded: bool = False) -> None:
        super().__init__(4, 4)
        self.turned = nn.Parameter(torch.randn(2, 4).t())
        self.register_buffer("conj", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("wide", torch.randn(1).expand(3) if expanded else torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.turned.sum(1)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("fused", [False, True])
def test_what_lies_in_another_order_goes_on_with_its_bits(fused: bool, tmp_path: Path) -> None:
    one, other = (two(k, Odd, optimizer=partial(ADAM, fused=fused)) for k in (0, 1))
    step(one, 0)
    save(one, tmp_path, step=1)
    load(other, tmp_path)
    assert alike(numbers(one), numbers(other))
    for ranks in (one, other):
        step(ranks, 1)
    assert alike(numbers(one), numbers(other))


def test_numbers_that_are_one_in_memory_are_refused_before_any_is_read(tmp_path: Path) -> None:
    save(two(0, Odd), tmp_path, step=1)
    ranks = two(1, partial(Odd, expanded=True))
    before = numbers(ranks)
    with pytest.raises(CheckpointError, match=r"stages\.0\.wide is expanded here"):
        load(ranks, tmp_path)
    assert alike(before, numbers(ranks))


def test_it_is_said_that_a_frozen_weight_leaves_its_moments(tmp_path: Path) -> None:
    ranks = two()
    step(ranks, 0)
    save(ranks, tmp_path, step=1)
    parts = iter([nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)])
    frozen = two(1, lambda: next(parts))
    with pytest.warns(UserWarning, match="frozen here"):
        load(frozen, tmp_path)


def written_by_one(rank: int, folder: Path) -> str:
    """Save from a process, of which only the first has weights changed without the Saver."""
    layout = Layout(one_f_one_b, PipelineShape(2, 2), options={"checkpoint_snapshots": True})
    executor = executor_of(layout, Model(tied=False))
    saver = Saver(executor, folder)
    saver.schedule_save(0)
    steps(executor, 0, 1)
    if rank == 0:
        executor.state.service(SnapshotCopies).request({})
    with pytest.raises(ModelError) as caught:
        saver.write()
    saver.wait()
    return caught.value.fact


def test_all_processes_refuse_to_write_what_one_has_not_copied(tmp_path: Path) -> None:
    said = run(written_by_one, 2, tmp_path)
    assert len({*said}) == 1 and "step 0 cannot be saved: the weights changed" in said[0]
    assert not CheckpointDirectory(tmp_path).list_steps()


def left_alone(rank: int) -> str:
    """Destroy the group of a process while the other one would exchange data with it."""
    group = dist.new_group(backend="gloo")
    dist.barrier()  # both have created the group
    if rank:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(CheckpointError) as caught:
        CheckpointGroup(group).gather_results(lambda: None)
    assert "all processes must call save and load, not only rank 0" in caught.value.hint
    return caught.value.fact


def test_where_one_has_ended_the_others_say_so() -> None:
    assert (
        run(left_alone, 2)[0]
        == "while processes saved or loaded, the connection to another process was lost"
    )


def test_what_is_due_and_never_written_is_said(tmp_path: Path) -> None:
    ranks = two()
    saver = Saver(ranks, tmp_path)
    saver.schedule_save(0)
    step(ranks, 0)
    with pytest.raises(
        ModelError, match="the save of step 0 is scheduled, and has not been written"
    ):
        saver.wait()
    saver.write()
    saver.wait()
    assert CheckpointDirectory(tmp_path).list_steps() == [0]


def not_whole(rank: int, folder: Path) -> tuple[list[str], int | None, str]:
    """Load this process's part of a checkpoint, whose errors are reported by all processes."""
    executor = executor_of(Layout(one_f_one_b, PipelineShape(2, 2)), Model(tied=False))
    for number in (1, 2):
        save(executor, folder, step=number, name_map=lambda s, n: n)
    dist.barrier()
    if rank == 0:
        file = folder / "step-00000002" / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    read: list[str] = []
    check = CheckpointDirectory.check_files

    def noted(self: CheckpointDirectory, manifest: Any, names: Any) -> None:
        read.extend(names)
        check(self, manifest, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointDirectory, "check_files", noted)
        with pytest.raises(IncompleteCheckpointError) as caught:
            load(executor, folder, step=2, name_map=lambda s, n: n)
    found = load(executor, folder, name_map=lambda s, n: n) if rank else _warned(executor, folder)
    assert found == {"step": 1, "extra": {}}
    return read, caught.value.step, caught.value.file


def _warned(executor: Any, folder: Path) -> Any:
    with pytest.warns(UserWarning, match=r"skipped: step-00000002 is not complete"):
        return load(executor, folder, name_map=lambda s, n: n)


def test_each_process_verifies_its_share(tmp_path: Path) -> None:
    (one, *wrong), (other, *also) = run(not_whole, 2, tmp_path)
    assert wrong == also == [2, "__1_0.distcp"]
    files = {path.name for path in (tmp_path / "step-00000001").iterdir()} - {"manifest.jsonl"}
    assert {*one} | {*other} == files and not {*one} & {*other}


@pytest.mark.parametrize(
    ("key", "value"),
    [("next", "1"), ("seed", 0.5), ("world", 2), ("loss_scale", [0, 1]), ("also", {"a": 1}),
     ("optimizers", {"AdamW": [[]]}), ("extra", None)],
)  # fmt: skip
def test_a_state_that_no_save_writes_is_refused(tmp_path: Path, key: str, value: object) -> None:
    manifest = save(two(), tmp_path, step=1) / MANIFEST_NAME
    first, *lines, _ = manifest.read_bytes().splitlines(keepends=True)
    head = json.loads(first)
    head["state"][key] = value
    text = b"".join([json.dumps(head).encode() + b"\n", *lines])
    manifest.write_bytes(text + b'{"sha256": "%s"}\n' % sha256(text).hexdigest().encode())
    other = two(seed=1)
    before = numbers(other)
    with pytest.raises(CheckpointError, match=f"was not written by a run: its state has {key} "):
        load(other, tmp_path)
    assert alike(before, numbers(other))


def test_no_folder_is_named_by_nothing() -> None:
    with pytest.raises(UsageError, match="directory is '', not a path"):
        CheckpointDirectory("")
