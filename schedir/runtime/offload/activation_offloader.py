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

LINE = 64  # bytes: where storages begin in a room
_PLAIN = (Tensor, nn.Parameter)
_STRIDED = torch.strided
POISON = 0xFF  # a byte; of these numbers of any floating type are NaN


class StorageLayout(NamedTuple):
    """How a storage moves: as a tensor that is all of it."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def says(self, tensor: Tensor) -> bool:
        """Whether a tensor lies so."""
        same = self.shape == tensor.shape and self.dtype is tensor.dtype
        return same and self.stride == tensor.stride()


class StorageView(NamedTuple):
    """How a tensor lies in a storage of which it is not all, in its order."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies so in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        found = empty.set_(storage, self.offset, self.shape, self.stride)
        found = torch._conj(found) if self.conj else found
        return torch._neg_view(found) if self.neg else found


class TensorLocation(NamedTuple):
    """Where a tensor is that is away: in the storage of that number, which it is all of, or how."""

    storage: int
    view: StorageView | None

    def of(self, moved: Sequence[Tensor]) -> Tensor:
        """The tensor, of all storages as they have moved."""
        whole = moved[self.storage]
        return whole if self.view is None else self.view.of(whole.untyped_storage())


class SavedTensor:
    """A tensor that autograd keeps, unless it is away."""

    __slots__ = ("__weakref__", "place", "stays", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, stays: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.version, self.stays = version, stays
        self.place: TensorLocation | None = None

    def look(self) -> Tensor:
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
        self.saved: list[ref[SavedTensor]] = []
        self.kept: list[tuple[Tensor, TensorLocation]] = []  # tensors themselves that are away
        self.back: list[ref[Tensor]] = []  # and that have come back
        self.laid: list[StorageLayout] = []  # how each storage moves
        self.room_size = self.nbytes = 0
        self.going: list[Tensor] = []  # these, of the storages on the device that are copied
        self.coming_in: list[Tensor] = []  # and of those that come
        self.leaving: LaneJob | None = None
        self.coming: LaneJob | None = None
        self.there: LaneJob | None = None  # what brought it to where it is
        self.room: ArenaBlock[Any] | None = None

    # ------------------------------------------------------------ noting

    def noting(self) -> saved_tensors_hooks:
        """Within this context what autograd keeps is noted."""
        self.saved = []
        return saved_tensors_hooks(self._pack, SavedTensor.look)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        own = type(tensor) is nn.Parameter
        if (not own and type(tensor) is not Tensor) or tensor.layout is not _STRIDED:
            plain = type(tensor) in _PLAIN
            raise ModelError(
                f"stage {self.stage} saves a {tensor.layout if plain else type(tensor).__name__} "
                "for its backward, and what is no plain memory cannot be offloaded",
                hint="leave the stage out of what is offloaded",
            )
        # Detached: what a node saves of its own output would keep the node, for ever.  A Parameter
        # is what it is when it is looked at.  Nothing of inference mode is here, which has no
        # version: torch lets nobody save that.
        one = SavedTensor(tensor if own else tensor.detach(), tensor._version, own)
        self.saved.append(ref(one))
        return one

    def noted(self, always: Collection[int]) -> None:
        """Note what of it stays: of these storages, which the rank has anyway."""
        for one in self._saved():
            if not one.stays and (tensor := one.tensor) is not None:
                one.stays = self._stays(tensor, always)

    def _saved(self) -> Iterator[SavedTensor]:
        """What autograd has not let go."""
        return (one for each in self.saved if (one := each()) is not None)

    def _stays(self, tensor: Tensor, always: Collection[int]) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata in always or not storage.nbytes() or tensor.device != self.device

    # ------------------------------------------------------------ moving

    def leave(self, held: Iterable[Tensor], always: Collection[int]) -> None:
        """Let nobody but the storages of this keep what leaves: of what autograd keeps, and of
        tensors that are `held` beside it."""
        found: dict[int, TensorLocation] = {}
        self.going, self.kept, self.back = [], [], []
        was, laid, room, nbytes = self.laid, list[StorageLayout](), 0, 0

        def place_of(tensor: Tensor) -> TensorLocation:
            nonlocal room, nbytes
            storage = tensor.untyped_storage()
            first = found.get(storage._cdata)
            if first is not None:
                return TensorLocation(first.storage, _view_of(tensor))
            number, size = len(laid), storage.nbytes()
            room, nbytes = room + size + -size % LINE, nbytes + size
            whole = tensor.nbytes == size and tensor.is_contiguous() and not _is_lazy(tensor)
            moves = tensor if whole else _bytes(storage)
            self.going.append(moves)
            # What steps make anew and keep is work for the garbage collector.
            as_before = number < len(was) and was[number].says(moves)
            laid.append(
                was[number]
                if as_before
                else StorageLayout(moves.dtype, moves.shape, moves.stride())
            )
            place = found[storage._cdata] = TensorLocation(
                number, None if whole else _view_of(tensor)
            )
            return place

        for one in self._saved():
            if not one.stays and (tensor := one.tensor) is not None:
                one.place, one.tensor = place_of(tensor), None
                one.version = 0 if one.version == tensor._version else -1
        for own in held:
            if type(own) is not nn.Parameter and not self._stays(own, always):
                self.kept.append((own, place_of(own.detach())))
                own.data = _nothing_of(own)
        self.laid, self.room_size, self.nbytes = laid, max(room, LINE), nbytes

    def copy_out(self, room: ArenaBlock[Tensor], poison: bool, *, at_once: bool) -> None:
        """Copy what leaves to a room; with `poison` let nothing be left of it, unless somebody else
        has it, too.  Where that is not only issued, but made `at_once`, it is let go."""
        if self.going:
            torch._foreach_copy_(self._parts(room), self.going, non_blocking=True)
        if poison:
            _poison([one for one in self.going if _is_alone(one)])
        if at_once:
            self.going = []

    def let_go(self) -> None:
        """Let go of the device's memory: whatever comes next there comes after the copy.

        Raises what that has raised.
        """
        if self.leaving is not None:
            leaving, self.leaving = self.leaving, None
            leaving.wait()
            self.going = []

    @property
    def has_left(self) -> bool:
        """Whether what was to leave has, or nothing was to."""
        return self.leaving is None or self.leaving.ended

    def make_room(self) -> None:
        """Make memory on the device for what comes back."""
        self.coming_in = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for dtype, shape, stride in self.laid
        ]

    def copy_back(self, room: ArenaBlock[Tensor], poison: bool) -> None:
        """Copy what comes back from its room; with `poison` leave nothing of it there."""
        if self.coming_in:
            torch._foreach_copy_(self.coming_in, self._parts(room), non_blocking=True)
        if poison:
            room.place[: self.room_size].fill_(POISON)

    def arrive(self) -> None:
        """Wait until it is back, and let everybody have it.  Raises what a copy has raised."""
        if self.coming is None:
            return
        coming, self.coming = self.coming, None
        coming.wait()
        moved = self.coming_in
        for one in self._saved():
            if (place := one.place) is not None:
                one.tensor = tensor = place.of(moved)
                one.place, one.version = None, tensor._version if one.version == 0 else -1
        for own, place in self.kept:
            own.data = place.of(moved)
        self.back = [ref(own) for own, _ in self.kept]
        self.coming_in, self.kept, self.there = [], [], None

    def _parts(self, room: ArenaBlock[Tensor]) -> list[Tensor]:
        """The part of a room that each storage has, as the tensor that moves; as they were made for
        the value that was in that room before, if that was laid so."""
        if room.laid != self.laid:
            parts, begin = [], 0
            for one in self.laid:
                size = one.shape.numel() * one.dtype.itemsize
                part = room.place[begin : begin + size]
                parts.append(part.view(one.dtype).view(one.shape))
                begin += size + -size % LINE
            room.laid, room.parts = self.laid, parts
        return room.parts

    def tensors(self) -> Iterable[Tensor]:
        """What of it has memory on the device, for who counts that."""
        yield from (*self.going, *self.coming_in)
        yield from (own for each in self.back if (own := each()) is not None)
        for one in self._saved():
            if one.tensor is not None and not one.stays:
                yield one.tensor


class OffloadMoves:
    """What a program moves on a rank, by stage and microbatch.

    `said` is whether the number of slots on the device is: then who takes one lets go of what was
    in it.  Otherwise that goes when it is seen that it has been copied.
    """

    def __init__(self, *, said: bool) -> None:
        self.said = said
        self.values: dict[tuple[int, int], SavedActivations] = {}
        self.kept: dict[tuple[int, int], Any] = {}  # what the slot had, and will have again
        self.leaving: list[SavedActivations] = []

    def look(self) -> None:
        """Let go of what has been copied, where nobody needs to."""
        for value in self.leaving:
            if value.leaving is not None and value.leaving.ended:
                value.let_go()
        self.leaving = [value for value in self.leaving if value.leaving is not None]


class UnpackedMicrobatches(Sequence[Any]):
    """Microbatches, each of which is looked at once: `found` has those that were."""

    def __init__(self, of: Sequence[Any] | Tensor) -> None:
        self.of, self.found = of, dict[int, Any]()

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, mb: Any) -> Any:
        if mb not in self.found:
            self.found[mb] = self.of[mb]
        return self.found[mb]


def keys_of(values: Iterable[object]) -> set[int]:
    """What the storages of those that are tensors are known by."""
    return {
        x.untyped_storage()._cdata for x in values
        if isinstance(x, Tensor) and type(x) in _PLAIN and x.layout is _STRIDED
    }  # fmt: skip


def _nothing_of(tensor: Tensor) -> Tensor:
    """What a tensor is while it is away: of its shape, in memory of one number, which is none."""
    nan = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), nan).expand(tensor.shape)


def _view_of(tensor: Tensor) -> StorageView:
    return StorageView(
        tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its numbers are the conjugates, or the negatives, of those in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor has its memory."""
    storage = tensor.untyped_storage()  # one who looks, beside the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def _poison(tensors: Sequence[Tensor]) -> None:
    """Make NaN of tensors that are all of their storages; of what knows no NaN its bytes."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for one in tensors:
        floating = (one.is_floating_point() or one.is_complex()) and one.itemsize > 1
        as_it_is = floating or one.dtype is torch.uint8
        kinds[floating].append(one if as_it_is else _bytes(one.untyped_storage()))
    if kinds[True]:
        torch._foreach_mul_(kinds[True], float("nan"))
    if kinds[False]:
        torch._foreach_clamp_min_(kinds[False], POISON)  # no byte is more
