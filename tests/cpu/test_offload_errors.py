"""Tests that offload refuses unsupported uses and names failed instructions.

Further tests leave out waits, and check that the results show it.
"""

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
from tests.cpu.activation_offload_programs import offload_randomly
from tests.cpu.test_activation_offload import checked, compared
from tests.cpu.test_recompute import WIDTH, batch, make_executor, noisy

torch.set_num_threads(1)
PLAN = PipelineShape(2, 4)


def make_offloaded_program(spilled: float = 0.0) -> Program:
    return checked(offload_randomly(compile(gpipe, PLAN), 5, spilled=spilled, late=1), "minimal")


def make_ranks(
    program: Program, layer: Any = None, spill_dir: Any = None, **options: Any
) -> InProcessExecutor:
    make_layer = layer or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    execution = ExecutionOptions(spill_dir=spill_dir)
    return make_executor(program, noisy(PLAN.stages, make_layer), execution=execution, **options)


def test_released_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is poisoned after the offload, and a host buffer after the reload."""
    offloaded: list[Tensor] = []
    release_device_memory = SavedActivations.release_device_memory

    def record_and_release(value: SavedActivations) -> None:
        if value.offload_job is not None:
            value.offload_job.finish()
            offloaded.extend(value.offload_sources)
        release_device_memory(value)

    monkeypatch.setattr(SavedActivations, "release_device_memory", record_and_release)
    world = make_ranks(make_offloaded_program())
    world.step(*batch(4))
    are_poisoned = [bool(tensor.view(torch.float32).isnan().all()) for tensor in offloaded]
    assert sum(are_poisoned) >= len(are_poisoned) - 4  # a message may hold outputs of a first stage
    for rank in world.executors:
        free_blocks = rank.resources.service(MemoryTiers).host_arena.free_blocks
        assert free_blocks and all((block.location == 0xFF).all() for block in free_blocks)


def test_reload_before_its_offload_reads_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    start, last = CopyLanes.start, 3  # a microbatch whose slot no forward waits for
    done = defaultdict[tuple[CopyLanes, Lane], list[None]](list)
    has_reloaded = defaultdict[CopyLanes, Event](Event)

    def start_without_wait(
        lanes: CopyLanes, lane: Lane, run: Callable[[], None], *arguments: Any
    ) -> Any:
        def run_late() -> None:
            if lane is Lane.D2H and len(done[lanes, lane]) == last:
                has_reloaded[lanes].wait(5)  # the reload runs before the offload
            run()
            if lane is Lane.H2D and len(done[lanes, lane]) == last:
                has_reloaded[lanes].set()
            done[lanes, lane].append(None)

        size, _, marks = arguments
        return start(lanes, lane, run_late, size, (), marks)

    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    world = make_ranks(make_offloaded_program(), **sgd)
    world.step(*batch(4))
    assert all(rank.finite_updates.all() for rank in world.executors)
    monkeypatch.setattr(CopyLanes, "start", start_without_wait)
    monkeypatch.setattr(SavedActivations, "release_device_memory", lambda value: None)
    world.step(*batch(4, 1))
    assert not any(rank.finite_updates.all() for rank in world.executors)


def test_backward_before_its_reload_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedActivations, "finish_reload", lambda value: None)
    with pytest.raises(ExecutionError, match=r"B 1\.0 +failed"):
        make_ranks(make_offloaded_program()).step(*batch(4))


def test_offload_to_disk_needs_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, problem in (
        (None, "but spill_dir is not set"),
        (tmp_path / "gone", "No such file or directory"),
        (tmp_path / "file", "Not a directory"),
        ("\0", "embedded null byte"),
        (3, "spill_dir must be a path, not 3"),
    ):
        with pytest.raises(ModelError, match=problem) as caught:
            make_ranks(make_offloaded_program(1.0), spill_dir=folder)
        assert folder or "spill_dir" in caught.value.hint
    make_ranks(make_offloaded_program(), spill_dir=tmp_path / "gone")  # not needed


def test_spill_folder_on_tmpfs_causes_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spill_file.find_file_system_type(Path("/proc")) == "proc"
    monkeypatch.setattr(spill_file, "find_file_system_type", lambda folder: "tmpfs")
    with pytest.warns(UserWarning, match="is a tmpfs"):
        SpillFile(tmp_path)


def test_spill_file_has_no_name_and_needs_no_folder_later(tmp_path: Path) -> None:
    folder = tmp_path / "spills"
    folder.mkdir()
    world = make_ranks(make_offloaded_program(1.0), spill_dir=folder)
    assert not [*folder.iterdir()]
    folder.rmdir()  # the folder is no longer needed
    for k in range(2):
        world.step(*batch(4, k))
    arenas = [
        file.arena
        for rank in world.executors
        if (file := rank.resources.service(MemoryTiers).spill_file)
    ]
    arena_sizes = [(arena.allocated_bytes, len(arena.free_blocks)) for arena in arenas]
    for rank, (_, block_count) in zip(world.executors, arena_sizes, strict=True):
        ops = [i.op for i in rank.state.stream]
        on_disk = [
            ops[:k].count(Opcode.OffloadToDisk) - ops[:k].count(Opcode.ReloadFromDisk)
            for k in range(len(ops))
        ]
        assert block_count == max(on_disk) == 2
    assert all(arena.used_bytes == 0 for arena in arenas)
    world.step(*batch(4))
    assert [(arena.allocated_bytes, len(arena.free_blocks)) for arena in arenas] == arena_sizes


def test_full_disk_fails_before_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_offsets: list[int] = []
    write, reserve = SpillFile.write, os.posix_fallocate

    def reserve_100_bytes(number: int, offset: int, size: int) -> None:
        if offset + size > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(number, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_100_bytes)

    def record_and_write(file: SpillFile, offset: int, memory: Tensor) -> None:
        written_offsets.append(offset)
        write(file, offset, memory)

    monkeypatch.setattr(SpillFile, "write", record_and_write)
    with pytest.raises(ExecutionError, match="No space left on device") as caught:
        make_ranks(make_offloaded_program(1.0), spill_dir=tmp_path).step(*batch(4))
    (site,) = caught.value.sites
    assert str(site.instr).startswith("offload_to_disk")
    assert site.rank in (0, 1) and not written_offsets


@pytest.mark.parametrize(
    ("verb", "instruction"), [("write", "offload_to_disk"), ("read", "reload_from_disk")]
)
def test_disk_error_names_its_instruction(
    verb: str, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised at a wait, and names the write to or read from the disk."""
    operation, calls = getattr(SpillFile, verb), iter(range(100))

    def fail_third_time(*args: Any) -> None:
        if next(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        operation(*args)

    monkeypatch.setattr(SpillFile, verb, fail_third_time)
    world = make_ranks(make_offloaded_program(1.0), spill_dir=tmp_path)
    with pytest.raises(ExecutionError, match="Input/output error") as caught:
        world.step(*batch(4))
    (site,) = caught.value.sites
    assert str(site.instr).split()[0] == instruction
    with pytest.raises(ExecutionError, match="create a new executor"):
        world.step(*batch(4))


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class SparseLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(torch.eye(2).to_sparse().requires_grad_(), super().forward(x))
        return y


class SubclassLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        subclass_tensor: Any = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
        zero: Tensor = subclass_tensor.exp().sum().a.detach() * 0
        return y + zero


@pytest.mark.parametrize(
    ("layer", "what"), [(SparseLayer, "sparse_coo"), (SubclassLayer, "TwoTensor")]
)
def test_sparse_and_subclass_tensors_are_refused(layer: Any, what: str) -> None:
    message = f"saves a .*{what}.*only plain strided tensors can be offloaded"
    with pytest.raises(ExecutionError, match=message):
        make_ranks(make_offloaded_program(), layer).step(*batch(4))


class InPlaceLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x).exp()
        y.add_(1)
        return y * 2


def test_in_place_writes_to_saved_tensors_are_refused() -> None:
    for program in (compile(gpipe, PLAN), make_offloaded_program()):
        with pytest.raises(ExecutionError, match="modified by an inplace operation"):
            make_ranks(program, InPlaceLayer).step(*batch(4))


class PackingLayer(Layer):
    """Has its own saved-tensor hooks, keeps activations, and has one mask for all microbatches."""

    how = 0

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.seen = torch.arange(WIDTH) / WIDTH, list[Tensor]()

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == 0 or not x.requires_grad:
            with save_on_cpu():
                y = self.compute(x)
        else:
            y = checkpoint(self.compute, x, use_reentrant=self.how == 1)
        self.seen.append(y)
        return torch.relu(y * self.mask)


@pytest.mark.parametrize("how", range(3))
def test_modules_with_saved_tensor_hooks_equal_plain_offload(
    how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackingLayer, "how", how)
    world = compared(compile(gpipe, PLAN), lambda: noisy(2, PackingLayer))
    for rank in world.executors:
        for stage in rank.stages.values():
            module = stage.module
            assert isinstance(module, PackingLayer)
            assert all(x.isfinite().all() for x in module.seen)
            assert torch.equal(module.mask, torch.arange(WIDTH) / WIDTH)
