"""Offload the tensors that autograd saved during a forward, and reload them before the backward.

What autograd keeps of the forward is noted by hooks as it is packed.  When it leaves, the storages
behind it are copied, each once, and nobody here keeps them any longer; when it comes back there are
new ones, and each tensor is again a view of its own where it was before, with the stride and offset
that it had.  What the rank has anyway stays: Parameters and buffers, gathered weights among them,
and what the step was given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedir.errors import ModelError
from schedir.runtime.offload.arena import ArenaBlock
from schedir.runtime.offload.copy_lanes import LaneJob

BLOCK_ALIGNMENT = 64  # bytes: where storages begin in a room
_PLAIN_TYPES = (Tensor, nn.Parameter)
_STRIDED = torch.strided
POISON_BYTE = 0xFF  # a byte; of these numbers of any floating type are NaN


class StorageLayout(NamedTuple):
    """How a storage moves: as a tensor that is all of it."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor lies so."""
        same = self.shape == tensor.shape and self.dtype is tensor.dtype
        return same and self.stride == tensor.stride()


class StorageView(NamedTuple):
    """How a tensor lies in a storage of which it is not all, in its order."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    def as_tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies so in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        found = empty.set_(storage, self.offset, self.shape, self.stride)
        found = torch._conj(found) if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found


class TensorLocation(NamedTuple):
    """Where a tensor is that is away: in the storage of that number, which it is all of, or how."""

    storage_index: int
    view: StorageView | None

    def as_tensor(self, storages: Sequence[Tensor]) -> Tensor:
        """The tensor, of all storages as they have moved."""
        whole = storages[self.storage_index]
        return whole if self.view is None else self.view.as_tensor(whole.untyped_storage())


class SavedTensor:
    """A tensor that autograd keeps, unless it is away."""

    __slots__ = ("__weakref__", "is_resident", "location", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, is_resident: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.version, self.is_resident = version, is_resident
        self.location: TensorLocation | None = None

    def unpack(self) -> Tensor:
        """The tensor.  Raises RuntimeError where somebody has written to it: with hooks, torch
        itself does not look."""
        tensor = self.tensor
        assert tensor is not None, "the checker proves that it is back"
        if self.version != tensor._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tensor.type()} {[*tensor.shape]} of what is "
                f"offloaded is at version {tensor._version}, expected {self.version}"
            )
        return tensor


class SavedActivations:
    """What a forward saved of one microbatch, of one stage."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.saved_tensors: list[ref[SavedTensor]] = []
        self.offloaded: list[tuple[Tensor, TensorLocation]] = []  # tensors themselves that are away
        self.reloaded: list[ref[Tensor]] = []  # and that have come back
        self.layouts: list[StorageLayout] = []  # how each storage moves
        self.block_size = self.nbytes = 0
        self.offload_sources: list[
            Tensor
        ] = []  # these, of the storages on the device that are copied
        self.reload_targets: list[Tensor] = []  # and of those that come
        self.offload_job: LaneJob | None = None
        self.reload_job: LaneJob | None = None
        self.arrival_job: LaneJob | None = None  # what brought it to where it is
        self.block: ArenaBlock[Any] | None = None

    # ------------------------------------------------------------ noting

    def record_saved(self) -> saved_tensors_hooks:
        """Within this context what autograd keeps is noted."""
        self.saved_tensors = []
        return saved_tensors_hooks(self._pack, SavedTensor.unpack)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        own = type(tensor) is nn.Parameter
        if (not own and type(tensor) is not Tensor) or tensor.layout is not _STRIDED:
            plain = type(tensor) in _PLAIN_TYPES
            raise ModelError(
                f"stage {self.stage} saves a {tensor.layout if plain else type(tensor).__name__} "
                "for its backward, and what is no plain memory cannot be offloaded",
                hint="leave the stage out of what is offloaded",
            )
        # Detached: what a node saves of its own output would keep the node, for ever.  A Parameter
        # is what it is when it is looked at.  Nothing of inference mode is here, which has no
        # version: torch lets nobody save that.
        one = SavedTensor(tensor if own else tensor.detach(), tensor._version, own)
        self.saved_tensors.append(ref(one))
        return one

    def mark_resident(self, resident_storages: Collection[int]) -> None:
        """Note what of it stays: of these storages, which the rank has anyway."""
        for one in self._list_saved_tensors():
            if not one.is_resident and (tensor := one.tensor) is not None:
                one.is_resident = self._is_resident(tensor, resident_storages)

    def _list_saved_tensors(self) -> Iterator[SavedTensor]:
        """What autograd has not let go."""
        return (one for each in self.saved_tensors if (one := each()) is not None)

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
        """Let nobody but the storages of this keep what leaves: of what autograd keeps, and of
        tensors that are `extra_tensors` beside it."""
        found: dict[int, TensorLocation] = {}
        self.offload_sources, self.offloaded, self.reloaded = [], [], []
        was, laid, room, nbytes = self.layouts, list[StorageLayout](), 0, 0

        def place_of(tensor: Tensor) -> TensorLocation:
            nonlocal room, nbytes
            storage = tensor.untyped_storage()
            first = found.get(storage._cdata)
            if first is not None:
                return TensorLocation(first.storage_index, _make_storage_view(tensor))
            number, size = len(laid), storage.nbytes()
            room, nbytes = room + size + -size % BLOCK_ALIGNMENT, nbytes + size
            whole = tensor.nbytes == size and tensor.is_contiguous() and not _is_lazy_view(tensor)
            moves = tensor if whole else _as_bytes(storage)
            self.offload_sources.append(moves)
            # What steps make anew and keep is work for the garbage collector.
            as_before = number < len(was) and was[number].matches(moves)
            laid.append(
                was[number]
                if as_before
                else StorageLayout(moves.dtype, moves.shape, moves.stride())
            )
            place = found[storage._cdata] = TensorLocation(
                number, None if whole else _make_storage_view(tensor)
            )
            return place

        for one in self._list_saved_tensors():
            if not one.is_resident and (tensor := one.tensor) is not None:
                one.location, one.tensor = place_of(tensor), None
                one.version = 0 if one.version == tensor._version else -1
        for own in extra_tensors:
            if type(own) is not nn.Parameter and not self._is_resident(own, resident_storages):
                self.offloaded.append((own, place_of(own.detach())))
                own.data = _make_placeholder(own)
        self.layouts, self.block_size, self.nbytes = laid, max(room, BLOCK_ALIGNMENT), nbytes

    def copy_to_block(
        self, block: ArenaBlock[Tensor], poison: bool, *, is_synchronous: bool
    ) -> None:
        """Copy what leaves to a room; with `poison` let nothing be left of it, unless somebody else
        has it, too.  Where that is not only issued, but made `is_synchronous`, it is let go."""
        if self.offload_sources:
            torch._foreach_copy_(
                self._get_block_views(block), self.offload_sources, non_blocking=True
            )
        if poison:
            _poison([one for one in self.offload_sources if _is_only_reference(one)])
        if is_synchronous:
            self.offload_sources = []

    def release_device_memory(self) -> None:
        """Let go of the device's memory: whatever comes next there comes after the copy.

        Raises what that has raised.
        """
        if self.offload_job is not None:
            leaving, self.offload_job = self.offload_job, None
            leaving.wait()
            self.offload_sources = []

    @property
    def is_offloaded(self) -> bool:
        """Whether what was to leave has, or nothing was to."""
        return self.offload_job is None or self.offload_job.is_done

    def allocate_reload_targets(self) -> None:
        """Make memory on the device for what comes back."""
        self.reload_targets = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for dtype, shape, stride in self.layouts
        ]

    def copy_from_block(self, block: ArenaBlock[Tensor], poison: bool) -> None:
        """Copy what comes back from its room; with `poison` leave nothing of it there."""
        if self.reload_targets:
            torch._foreach_copy_(
                self.reload_targets, self._get_block_views(block), non_blocking=True
            )
        if poison:
            block.location[: self.block_size].fill_(POISON_BYTE)

    def finish_reload(self) -> None:
        """Wait until it is back, and let everybody have it.  Raises what a copy has raised."""
        if self.reload_job is None:
            return
        coming, self.reload_job = self.reload_job, None
        coming.wait()
        moved = self.reload_targets
        for one in self._list_saved_tensors():
            if (place := one.location) is not None:
                one.tensor = tensor = place.as_tensor(moved)
                one.location, one.version = None, tensor._version if one.version == 0 else -1
        for own, place in self.offloaded:
            own.data = place.as_tensor(moved)
        self.reloaded = [ref(own) for own, _ in self.offloaded]
        self.reload_targets, self.offloaded, self.arrival_job = [], [], None

    def _get_block_views(self, block: ArenaBlock[Tensor]) -> list[Tensor]:
        """The part of a room that each storage has, as the tensor that moves; as they were made for
        the value that was in that room before, if that was laid so."""
        if block.layouts != self.layouts:
            parts, begin = [], 0
            for one in self.layouts:
                size = one.shape.numel() * one.dtype.itemsize
                part = block.location[begin : begin + size]
                parts.append(part.view(one.dtype).view(one.shape))
                begin += size + -size % BLOCK_ALIGNMENT
            block.layouts, block.views = self.layouts, parts
        return block.views

    def list_device_tensors(self) -> Iterable[Tensor]:
        """What of it has memory on the device, for who counts that."""
        yield from (*self.offload_sources, *self.reload_targets)
        yield from (own for each in self.reloaded if (own := each()) is not None)
        for one in self._list_saved_tensors():
            if one.tensor is not None and not one.is_resident:
                yield one.tensor


class OffloadMoves:
    """What a program moves on a rank, by stage and microbatch.

    `has_fixed_slots` is whether the number of slots on the device is: then who takes one lets go of
    what was in it.  Otherwise that goes when it is seen that it has been copied.
    """

    def __init__(self, *, has_fixed_slots: bool) -> None:
        self.has_fixed_slots = has_fixed_slots
        self.values: dict[tuple[int, int], SavedActivations] = {}
        self.slot_values: dict[tuple[int, int], Any] = {}  # what the slot had, and will have again
        self.offloading: list[SavedActivations] = []

    def release_copied(self) -> None:
        """Let go of what has been copied, where nobody needs to."""
        for value in self.offloading:
            if value.offload_job is not None and value.offload_job.is_done:
                value.release_device_memory()
        self.offloading = [value for value in self.offloading if value.offload_job is not None]


class UnpackedMicrobatches(Sequence[Any]):
    """Microbatches, each of which is looked at once: `unpacked` has those that were."""

    def __init__(self, source: Sequence[Any] | Tensor) -> None:
        self.source, self.unpacked = source, dict[int, Any]()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, mb: Any) -> Any:
        if mb not in self.unpacked:
            self.unpacked[mb] = self.source[mb]
        return self.unpacked[mb]


def get_storage_keys(values: Iterable[object]) -> set[int]:
    """What the storages of those that are tensors are known by."""
    return {
        x.untyped_storage()._cdata for x in values
        if isinstance(x, Tensor) and type(x) in _PLAIN_TYPES and x.layout is _STRIDED
    }  # fmt: skip


def _make_placeholder(tensor: Tensor) -> Tensor:
    """What a tensor is while it is away: of its shape, in memory of one number, which is none."""
    nan = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), nan).expand(tensor.shape)


def _make_storage_view(tensor: Tensor) -> StorageView:
    return StorageView(
        tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _is_lazy_view(tensor: Tensor) -> bool:
    """Whether its numbers are the conjugates, or the negatives, of those in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_only_reference(tensor: Tensor) -> bool:
    """Whether no other tensor has its memory."""
    storage = tensor.untyped_storage()  # one who looks, beside the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def _poison(tensors: Sequence[Tensor]) -> None:
    """Make NaN of tensors that are all of their storages; of what knows no NaN its bytes."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for one in tensors:
        floating = (one.is_floating_point() or one.is_complex()) and one.itemsize > 1
        as_it_is = floating or one.dtype is torch.uint8
        kinds[floating].append(one if as_it_is else _as_bytes(one.untyped_storage()))
    if kinds[True]:
        torch._foreach_mul_(kinds[True], float("nan"))
    if kinds[False]:
        torch._foreach_clamp_min_(kinds[False], POISON_BYTE)  # no byte is more
