"""Offload the tensors that autograd saved in a forward, and reload them for the backward.

Hooks record the tensors that autograd packs in a forward. The offload copies each storage of these
tensors once, and drops the references to the device memory. The reload allocates new storages. Each
tensor becomes a view of its new storage, with the same stride and offset as before.

Parameters, buffers, gathered weights and the inputs of the step stay on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Value
from schedir.ir.program import UNSHARED_SLOTS
from schedir.runtime.offload.arena import ArenaBlock
from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.program_state import ProgramService, ProgramState
from schedir.runtime.step_inputs import Microbatches, MicrobatchView
from schedir.runtime.value_slots import find_freeing_instructions

BLOCK_ALIGNMENT = 64  # bytes; each storage in a block begins at a multiple of this
_PLAIN_TYPES = (Tensor, nn.Parameter)
_STRIDED = torch.strided
POISON_BYTE = 0xFF  # a floating-point number of such bytes is NaN


class StorageLayout(NamedTuple):
    """The dtype, shape and stride of a tensor that covers a full storage.

    Attributes:
        dtype: The dtype.
        shape: The shape of the tensor.
        stride: Its stride, in elements.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def matches(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this dtype, shape and stride."""
        has_shape_and_dtype = self.shape == tensor.shape and self.dtype is tensor.dtype
        return has_shape_and_dtype and self.stride == tensor.stride()


class StorageView(NamedTuple):
    """The layout of a tensor that is a part or a reordered view of a storage.

    Attributes:
        dtype: The dtype.
        offset: The offset in the storage, in elements.
        shape: The shape of the tensor.
        stride: Its stride, in elements.
        is_conj: True if the tensor is a lazy conjugate of its memory.
        is_neg: True if the tensor is a lazy negative of its memory.
    """

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    def as_tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor with this layout in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        result = empty.set_(storage, self.offset, self.shape, self.stride)
        result = torch._conj(result) if self.is_conj else result
        return torch._neg_view(result) if self.is_neg else result


class TensorLocation(NamedTuple):
    """The location of an offloaded tensor in the storages of its microbatch.

    Attributes:
        storage_index: The index of the storage in `SavedActivations.layouts`.
        view: The layout in the storage. None if the tensor is contiguous and covers the storage.
    """

    storage_index: int
    view: StorageView | None

    def as_tensor(self, storages: Sequence[Tensor]) -> Tensor:
        """Return the tensor, as a view of one of the reloaded storages.

        Args:
            storages: A tensor for each storage, in the order of `SavedActivations.layouts`.
        """
        storage = storages[self.storage_index]
        return storage if self.view is None else self.view.as_tensor(storage.untyped_storage())


class SavedTensor:
    """A tensor that autograd saved, or its location while it is offloaded.

    Args:
        tensor: The tensor.
        version: Its version counter when it was saved.
        is_resident: True if the tensor stays on the device.
    """

    __slots__ = ("__weakref__", "is_resident", "location", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, is_resident: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version
        self.is_resident = is_resident
        self.location: TensorLocation | None = None

    def unpack(self) -> Tensor:
        """Return the tensor for the backward.

        Raises:
            RuntimeError: The tensor was written to since it was saved. Torch does not check this if
                saved-tensor hooks are used.
        """
        tensor = self.tensor
        assert tensor is not None, "the checker proves that it is back"
        if self.version != tensor._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tensor.type()} {[*tensor.shape]}, which is offloaded, "
                f"is at version {tensor._version}, expected {self.version}"
            )
        return tensor


class SavedActivations:
    """The saved tensors of one stage and microbatch, and the copies that move them.

    Args:
        stage: The number of the stage, for errors.
        device: The device of the rank.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self.saved_tensors: list[ref[SavedTensor]] = []
        # Tensors that autograd does not save, such as the inputs of the stage. They are in
        # `offloaded` until the reload, and in `reloaded` after it.
        self.offloaded: list[tuple[Tensor, TensorLocation]] = []
        self.reloaded: list[ref[Tensor]] = []
        self.layouts: list[StorageLayout] = []  # of each storage in the block
        self.block_size = self.nbytes = 0
        # Tensors on the device, one for each entry of `layouts`: the sources of an offload, and the
        # targets of a reload.
        self.offload_sources: list[Tensor] = []
        self.reload_targets: list[Tensor] = []
        self.offload_job: LaneJob | None = None
        self.reload_job: LaneJob | None = None
        self.arrival_job: LaneJob | None = None  # the latest copy between tiers
        self.block: ArenaBlock[Any] | None = None

    def get_copy(self) -> tuple[ArenaBlock[Any], LaneJob]:
        """Return the block with the copy on the host or the disk, and the job that writes it."""
        assert self.block is not None and self.arrival_job is not None, (
            "the checker proves that it is in this tier"
        )
        return self.block, self.arrival_job

    # ------------------------------------------------------------ recording

    def record_saved(self) -> saved_tensors_hooks:
        """Return a context that records the tensors that autograd saves.

        The context raises ModelError if autograd saves a sparse tensor or a tensor subclass.
        """
        self.saved_tensors = []
        return saved_tensors_hooks(self._pack, SavedTensor.unpack)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        is_parameter = type(tensor) is nn.Parameter
        if (not is_parameter and type(tensor) is not Tensor) or tensor.layout is not _STRIDED:
            is_plain = type(tensor) in _PLAIN_TYPES
            description = tensor.layout if is_plain else type(tensor).__name__
            raise ModelError(
                f"stage {self.stage} saves a {description} "
                "for its backward, but only plain strided tensors can be offloaded",
                hint="do not offload the activations of this stage",
            )
        # Detach, because a node that saves its output would keep itself alive. A parameter stays
        # the same object. Autograd refuses to save an inference tensor, so `_version` always
        # exists.
        saved_tensor = SavedTensor(
            tensor if is_parameter else tensor.detach(), tensor._version, is_parameter
        )
        self.saved_tensors.append(ref(saved_tensor))
        return saved_tensor

    def mark_resident(self, resident_storages: Collection[int]) -> None:
        """Mark the recorded tensors that stay on the device.

        Args:
            resident_storages: The keys, from `get_storage_keys`, of storages that stay on the
                device.
        """
        for saved_tensor in self._list_saved_tensors():
            if not saved_tensor.is_resident and (tensor := saved_tensor.tensor) is not None:
                saved_tensor.is_resident = self._is_resident(tensor, resident_storages)

    def _list_saved_tensors(self) -> Iterator[SavedTensor]:
        """Yield the saved tensors that autograd still references."""
        return (
            saved_tensor
            for reference in self.saved_tensors
            if (saved_tensor := reference()) is not None
        )

    def _is_resident(self, tensor: Tensor, resident_storages: Collection[int]) -> bool:
        storage = tensor.untyped_storage()
        return (
            storage._cdata in resident_storages
            or not storage.nbytes()
            or tensor.device != self.device
        )

    # ------------------------------------------------------------ moving

    def prepare_offload(
        self, extra_tensors: Iterable[Tensor], resident_storages: Collection[int]
    ) -> None:
        """List the storages of the tensors to offload, and drop the references to these tensors.

        Args:
            extra_tensors: Tensors to offload that autograd does not save, such as the inputs of the
                stage or of a checkpoint. Their `data` becomes a placeholder.
            resident_storages: The keys, from `get_storage_keys`, of storages that stay on the
                device.
        """
        location_by_storage: dict[int, TensorLocation] = {}
        self.offload_sources = []
        self.offloaded = []
        self.reloaded = []
        old_layouts, layouts, block_size, nbytes = self.layouts, list[StorageLayout](), 0, 0

        def assign_location(tensor: Tensor) -> TensorLocation:
            nonlocal block_size, nbytes
            storage = tensor.untyped_storage()
            storage_location = location_by_storage.get(storage._cdata)
            if storage_location is not None:
                return TensorLocation(storage_location.storage_index, _make_storage_view(tensor))
            storage_index, size = len(layouts), storage.nbytes()
            block_size = block_size + size + -size % BLOCK_ALIGNMENT
            nbytes = nbytes + size
            is_full = tensor.nbytes == size and tensor.is_contiguous() and not _is_lazy_view(tensor)
            source = tensor if is_full else _as_bytes(storage)
            self.offload_sources.append(source)
            # Reuse an equal layout of the last step, to create fewer objects for the garbage
            # collector.
            if storage_index < len(old_layouts) and old_layouts[storage_index].matches(source):
                layout = old_layouts[storage_index]
            else:
                layout = StorageLayout(source.dtype, source.shape, source.stride())
            layouts.append(layout)
            location = location_by_storage[storage._cdata] = TensorLocation(
                storage_index, None if is_full else _make_storage_view(tensor)
            )
            return location

        for saved_tensor in self._list_saved_tensors():
            if not saved_tensor.is_resident and (tensor := saved_tensor.tensor) is not None:
                saved_tensor.location = assign_location(tensor)
                saved_tensor.tensor = None
                saved_tensor.version = 0 if saved_tensor.version == tensor._version else -1
        for extra_tensor in extra_tensors:
            if type(extra_tensor) is nn.Parameter:
                continue
            if not self._is_resident(extra_tensor, resident_storages):
                self.offloaded.append((extra_tensor, assign_location(extra_tensor.detach())))
                extra_tensor.data = _make_placeholder(extra_tensor)
        self.layouts = layouts
        self.block_size = max(block_size, BLOCK_ALIGNMENT)
        self.nbytes = nbytes

    def copy_to_block(
        self, block: ArenaBlock[Tensor], poison: bool, *, is_synchronous: bool
    ) -> None:
        """Copy the storages of the offloaded tensors to a block of host memory.

        Args:
            block: The block.
            poison: True to overwrite the sources with NaN, except sources whose memory other
                tensors use.
            is_synchronous: True if the copies end before this method returns. Then this method also
                releases the device memory.
        """
        if self.offload_sources:
            torch._foreach_copy_(
                self._get_block_views(block), self.offload_sources, non_blocking=True
            )
        if poison:
            _poison([source for source in self.offload_sources if _is_only_reference(source)])
        if is_synchronous:
            self.offload_sources = []

    def release_device_memory(self) -> None:
        """Release the device memory of an offload that has been started.

        Work that later reuses this memory on the device waits for the copy. If the copy failed,
        this method raises the error of the copy.
        """
        if self.offload_job is not None:
            job, self.offload_job = self.offload_job, None
            job.wait()
            self.offload_sources = []

    @property
    def is_offloaded(self) -> bool:
        """Return whether no copy to the host is running."""
        return self.offload_job is None or self.offload_job.is_done

    def allocate_reload_targets(self) -> None:
        """Allocate device memory for the reload."""
        self.reload_targets = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for dtype, shape, stride in self.layouts
        ]

    def copy_from_block(self, block: ArenaBlock[Tensor], poison: bool) -> None:
        """Copy the storages of the offloaded tensors from a block of host memory to the device.

        Args:
            block: The block.
            poison: True to overwrite the block with NaN afterwards.
        """
        if self.reload_targets:
            torch._foreach_copy_(
                self.reload_targets, self._get_block_views(block), non_blocking=True
            )
        if poison:
            block.location[: self.block_size].fill_(POISON_BYTE)

    def finish_reload(self) -> None:
        """Wait for the reload, and give the saved tensors their new memory.

        If the copy failed, this method raises the error of the copy. If no reload has been started,
        it does nothing.
        """
        if self.reload_job is None:
            return
        job, self.reload_job = self.reload_job, None
        job.wait()
        storages = self.reload_targets
        for saved_tensor in self._list_saved_tensors():
            if (location := saved_tensor.location) is not None:
                saved_tensor.tensor = tensor = location.as_tensor(storages)
                saved_tensor.location = None
                saved_tensor.version = tensor._version if saved_tensor.version == 0 else -1
        for offloaded_tensor, location in self.offloaded:
            offloaded_tensor.data = location.as_tensor(storages)
        self.reloaded = [ref(offloaded_tensor) for offloaded_tensor, _ in self.offloaded]
        self.reload_targets = []
        self.offloaded = []
        self.arrival_job = None

    def _get_block_views(self, block: ArenaBlock[Tensor]) -> list[Tensor]:
        """Return the part of a block for each storage, in the storage's layout.

        The block keeps the views for the next value with equal layouts.
        """
        if block.layouts != self.layouts:
            views, begin = [], 0
            for layout in self.layouts:
                size = layout.shape.numel() * layout.dtype.itemsize
                region = block.location[begin : begin + size]
                views.append(region.view(layout.dtype).view(layout.shape))
                begin += size + -size % BLOCK_ALIGNMENT
            block.layouts = self.layouts
            block.views = views
        return block.views

    def list_device_tensors(self) -> Iterable[Tensor]:
        """Yield the tensors that use device memory, to count that memory."""
        yield from (*self.offload_sources, *self.reload_targets)
        yield from (tensor for reference in self.reloaded if (tensor := reference()) is not None)
        for saved_tensor in self._list_saved_tensors():
            if saved_tensor.tensor is not None and not saved_tensor.is_resident:
                yield saved_tensor.tensor


class OffloadMoves(ProgramService):
    """The saved activations that a program moves between the memory tiers of a rank.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        # `has_fixed_slots` is True if the program fixes the number of slots for saved activations.
        # Then an instruction that fills a slot first releases the memory of the slot's earlier
        # value. Otherwise `release_copied` releases this memory after the copy.
        slots = state.program.slots
        self.has_fixed_slots = bool(slots) and slots[state.rank].saved != UNSHARED_SLOTS
        # Index of an instruction that fills a slot -> index of the instruction that freed the slot.
        self.freed_by = find_freeing_instructions(state.program, state.rank, Value.SAVED)
        self.values: dict[tuple[int, int], SavedActivations] = {}
        # (Stage, microbatch) -> content of the slot before the offload, which the reload restores.
        self.slot_values: dict[tuple[int, int], Any] = {}
        self.offloading: list[SavedActivations] = []

    def release_copied(self) -> None:
        """Release the device memory of offloads with completed copies, without waiting."""
        for value in self.offloading:
            if value.offload_job is not None and value.offload_job.is_done:
                value.release_device_memory()
        self.offloading = [value for value in self.offloading if value.offload_job is not None]

    def list_device_tensors(self) -> Iterable[Tensor]:
        """Yield the tensors that use device memory, even if a lane's thread allocated them."""
        for value in self.values.values():
            yield from value.list_device_tensors()


class UnpackedMicrobatches(MicrobatchView):
    """A view of microbatches that reads each microbatch from its source once, and keeps it.

    The attribute `unpacked` is a dict: index of a microbatch -> the microbatch that was read.

    Args:
        source: The microbatches.
    """

    def __init__(self, source: Microbatches) -> None:
        super().__init__(source)
        self.unpacked = dict[int, Any]()

    def __getitem__(self, mb: Any) -> Any:
        if mb not in self.unpacked:
            self.unpacked[mb] = self.source[mb]
        return self.unpacked[mb]


def get_storage_keys(values: Iterable[object]) -> set[int]:
    """Return the storages of all plain dense tensors in `values`, as a set of `_cdata` addresses.

    Args:
        values: Tensors and other objects. Other objects are ignored.
    """
    return {
        x.untyped_storage()._cdata for x in values
        if isinstance(x, Tensor) and type(x) in _PLAIN_TYPES and x.layout is _STRIDED
    }  # fmt: skip


def _make_placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with memory for a single element, which is NaN or 0."""
    nan = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), nan).expand(tensor.shape)


def _make_storage_view(tensor: Tensor) -> StorageView:
    return StorageView(
        tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _is_lazy_view(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_only_reference(tensor: Tensor) -> bool:
    """Return whether no other tensor uses the memory of a tensor."""
    storage = tensor.untyped_storage()  # 2 references: of `tensor` and of `storage`
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def _poison(tensors: Sequence[Tensor]) -> None:
    """Overwrite storages with NaN, or with bytes 0xFF if they have integers or 8-bit floats.

    Each of the tensors covers its storage.
    """
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for tensor in tensors:
        is_floating = (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1
        has_matching_type = is_floating or tensor.dtype is torch.uint8
        groups[is_floating].append(
            tensor if has_matching_type else _as_bytes(tensor.untyped_storage())
        )
    if groups[True]:
        torch._foreach_mul_(groups[True], float("nan"))
    if groups[False]:
        # This sets every byte to POISON_BYTE, because no byte is larger.
        torch._foreach_clamp_min_(groups[False], POISON_BYTE)
