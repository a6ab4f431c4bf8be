"""Tests that offload refuses unsupported uses, names failed instructions, shows wrong orders."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import Lane, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload import spill_file
from schedir.runtime.offload.activation_offloader import SavedActivations
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.spill_file import SpillFile
from schedir.schedules import gpipe
from tests.cpu.activation_offload_programs import moved
from tests.cpu.test_activation_offload import checked, compared
from tests.cpu.test_recompute import BOUNDARY, WIDTH, batch, noisy, squares

torch.set_num_threads(1)
PLAN = PipelineShape(2, 4)


def away(spilled: float = 0.0) -> Program:
    return checked(moved(compile(gpipe, PLAN), 5, spilled=spilled, late=1), "minimal")


def world_of(program: Program, layer: Any = None, **more: Any) -> InProcessExecutor:
    stages = noisy(
        PLAN.stages, layer or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )
    return InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY, **more)


# ---------------------------------------------------------------- a wrong order


def test_what_is_left_behind_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is poisoned after the copy, and a host buffer after the copy back."""
    left: list[Tensor] = []
    let_go = SavedActivations.release_device_memory

    def noted(value: SavedActivations) -> None:
        if value.offload_job is not None:
            value.offload_job.finish()
            left.extend(value.offload_sources)
        let_go(value)

    monkeypatch.setattr(SavedActivations, "release_device_memory", noted)
    world = world_of(away())
    world.step(*batch(4))
    gone = [bool(one.view(torch.float32).isnan().all()) for one in left]
    assert sum(gone) >= len(gone) - 4  # a message may hold outputs of a first stage
    for rank in world.executors:
        rooms = [
            room.location for room in rank.resources.service(MemoryTiers).host_arena.free_blocks
        ]
        assert rooms and all((room == 0xFF).all() for room in rooms)


def test_who_does_not_wait_for_what_is_offloaded_reads_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, last = CopyLanes.start, 3  # a microbatch whose slot no forward waits for
    done = defaultdict[tuple[CopyLanes, Lane], list[None]](list)
    came_back = defaultdict[CopyLanes, Event](Event)

    def too_early(lanes: CopyLanes, lane: Lane, run: Callable[[], None], *more: Any) -> Any:
        def late() -> None:
            if lane is Lane.D2H and len(done[lanes, lane]) == last:
                came_back[lanes].wait(5)  # the reload runs before the offload
            run()
            if lane is Lane.H2D and len(done[lanes, lane]) == last:
                came_back[lanes].set()
            done[lanes, lane].append(None)

        size, _, marks = more
        return start(lanes, lane, late, size, (), marks)

    sgd = {"optimizer": lambda own: torch.optim.SGD(own, lr=0.1)}
    world = world_of(away(), **sgd)
    world.step(*batch(4))
    assert all(rank.finite_updates.all() for rank in world.executors)
    monkeypatch.setattr(CopyLanes, "start", too_early)
    monkeypatch.setattr(SavedActivations, "release_device_memory", lambda value: None)
    world.step(*batch(4, 1))
    assert not any(rank.finite_updates.all() for rank in world.executors)


def test_who_does_not_wait_until_it_is_back_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedActivations, "finish_reload", lambda value: None)
    with pytest.raises(ExecutionError, match=r"B 1\.0 +failed"):
        world_of(away()).step(*batch(4))


# ---------------------------------------------------------------- the disk


def test_what_spills_wants_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="but spill_dir is not set") as caught:
        world_of(away(1.0))
    assert "spill_dir" in caught.value.hint
    with pytest.raises(ModelError, match="No such file or directory"):
        world_of(away(1.0), execution=ExecutionOptions(spill_dir=tmp_path / "gone"))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="Not a directory"):
        world_of(away(1.0), execution=ExecutionOptions(spill_dir=tmp_path / "file"))
    with pytest.raises(ModelError, match="embedded null byte"):
        world_of(away(1.0), execution=ExecutionOptions(spill_dir="\0"))
    wrong: Any = 3
    with pytest.raises(ModelError, match="spill_dir must be a path, not 3"):
        world_of(away(1.0), execution=ExecutionOptions(spill_dir=wrong))
    world_of(away(), execution=ExecutionOptions(spill_dir=tmp_path / "gone"))  # not needed


def test_a_folder_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spill_file.find_file_system_type(Path("/proc")) == "proc"
    monkeypatch.setattr(spill_file, "find_file_system_type", lambda folder: "tmpfs")
    with pytest.warns(UserWarning, match="is a tmpfs"):
        SpillFile(tmp_path)


def test_a_file_without_a_name_that_folders_may_leave(tmp_path: Path) -> None:
    folder = tmp_path / "spills"
    folder.mkdir()
    world = world_of(away(1.0), execution=ExecutionOptions(spill_dir=folder))
    assert not [*folder.iterdir()]
    folder.rmdir()  # the folder is no longer needed
    for k in range(2):
        world.step(*batch(4, k))
    arenas = [
        file.arena
        for rank in world.executors
        if (file := rank.resources.service(MemoryTiers).spill_file)
    ]
    made = [(arena.allocated_bytes, len(arena.free_blocks)) for arena in arenas]
    for rank, (_, rooms) in zip(world.executors, made, strict=True):
        ops = [i.op for i in rank.state.stream]
        there = [
            ops[:k].count(Opcode.OffloadToDisk) - ops[:k].count(Opcode.ReloadFromDisk)
            for k in range(len(ops))
        ]
        assert rooms == max(there) == 2
    assert all(arena.used_bytes == 0 for arena in arenas)
    world.step(*batch(4))
    assert [(arena.allocated_bytes, len(arena.free_blocks)) for arena in arenas] == made


def test_a_full_disk_is_so_before_anything_is_spilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[int] = []
    write, reserve = SpillFile.write, os.posix_fallocate

    def full(number: int, at: int, size: int) -> None:
        if at + size > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(number, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def noted(own: SpillFile, at: int, memory: Tensor) -> None:
        wrote.append(at)
        write(own, at, memory)

    monkeypatch.setattr(SpillFile, "write", noted)
    with pytest.raises(ExecutionError) as caught:
        world_of(away(1.0), execution=ExecutionOptions(spill_dir=tmp_path)).step(*batch(4))
    (site,) = caught.value.sites
    assert "No space left on device" in str(caught.value) and str(site.instr).startswith(
        "offload_to_disk"
    )
    assert site.rank in (0, 1) and not wrote


@pytest.mark.parametrize("verb", ["write", "read"])
def test_an_error_of_the_disk_names_its_instruction(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised at a wait, and names the write to or read from the disk."""
    did, times = getattr(SpillFile, verb), iter(range(100))

    def broken(*args: Any) -> None:
        if next(times) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        did(*args)

    monkeypatch.setattr(SpillFile, verb, broken)
    world = world_of(away(1.0), execution=ExecutionOptions(spill_dir=tmp_path))
    with pytest.raises(ExecutionError, match="Input/output error") as caught:
        world.step(*batch(4))
    (site,) = caught.value.sites
    assert (
        str(site.instr).split()[0] == {"write": "offload_to_disk", "read": "reload_from_disk"}[verb]
    )
    with pytest.raises(ExecutionError, match="create a new executor"):
        world.step(*batch(4))


# ---------------------------------------------------------------- modules


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Sparse(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(torch.eye(2).to_sparse().requires_grad_(), super().forward(x))
        return y


class Subclass(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        both: Any = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
        zero: Tensor = both.exp().sum().a.detach() * 0
        return y + zero


@pytest.mark.parametrize(("layer", "what"), [(Sparse, "sparse_coo"), (Subclass, "TwoTensor")])
def test_what_is_no_plain_memory_is_refused(layer: Any, what: str) -> None:
    with pytest.raises(
        ExecutionError, match=f"saves a .*{what}.*only plain strided tensors can be offloaded"
    ):
        world_of(away(), layer).step(*batch(4))


class WritesLater(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x).exp()
        y.add_(1)
        return y * 2


def test_what_is_written_to_is_seen_as_without() -> None:
    for program in (compile(gpipe, PLAN), away()):
        with pytest.raises(ExecutionError, match="modified by an inplace operation"):
            world_of(program, WritesLater).step(*batch(4))


class Packs(Layer):
    """Has its own packing hooks, keeps activations, and uses one mask for all microbatches."""

    how = 0

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.seen = torch.arange(WIDTH) / WIDTH, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == 0 or not x.requires_grad:
            with save_on_cpu():
                y = torch.tanh(super().forward(x))
        else:
            y = checkpoint(
                lambda x: torch.tanh(nn.functional.linear(x, self.weight, self.bias)),
                x,
                use_reentrant=self.how == 1,
            )
        self.seen.append(y)
        return torch.relu(y * self.mask)


@pytest.mark.parametrize("how", range(3))
def test_modules_with_hooks_of_their_own(how: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packs, "how", how)
    world = compared(compile(gpipe, PLAN), lambda: noisy(2, Packs))
    for rank in world.executors:
        for stage in rank.stages.values():
            module = stage.module
            assert isinstance(module, Packs)
            assert all(x.isfinite().all() for x in module.seen)
            assert torch.equal(module.mask, torch.arange(WIDTH) / WIDTH)
