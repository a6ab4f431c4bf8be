"""Away: what a forward saved of a microbatch, while it is moved off the device and back.

What autograd keeps of the forward is noted by hooks as it is packed.  When it leaves, the storages
behind it are copied, each once, and nobody here keeps them any longer; when it comes back there are
new ones, and each tensor is again a view of its own where it was before, with the stride and offset
that it had.  What the rank has anyway stays: Parameters and buffers, gathered weights among them,
and what the step was given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedir.errors import ModelError
from schedir.runtime.arena import Room
from schedir.runtime.lanes import Job

LINE = 64  # bytes: where storages begin in a room
POISON = 0xFF  # a byte; of these numbers of any floating type are NaN


class View(NamedTuple):
    """How a tensor lies in a storage, by the storage's number."""

    storage: int
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


class Saved:
    """A tensor that autograd keeps, unless it is away."""

    __slots__ = ("__weakref__", "stays", "tensor", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: what a node saves of its own output would keep the node, for ever.  A Parameter
        # is what it is when it is looked at.
        self.tensor: Tensor | None = tensor if _is_own(tensor) else tensor.detach()
        # Nothing of inference mode is here, which has no version: torch lets nobody save that.
        self.version, self.stays = tensor._version, False
        self.view: View | None = None

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


class Value:
    """What a forward saved of one microbatch, of one stage."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.saved: list[ref[Saved]] = []
        self.views: list[View] = []  # in the order in which they are made
        self.kept: list[tuple[Tensor, View]] = []  # tensors themselves that are away
        self.back: list[ref[Tensor]] = []  # and that have come back
        self.sizes: list[int] = []  # of storages, in bytes
        self.parts: list[int] = []  # of a room, in bytes: of each storage, and behind it to a LINE
        self.room_size = self.nbytes = 0
        self.going: list[Tensor] = []  # the bytes of those on the device that are copied
        self.coming_in: list[Tensor] = []  # and of those that come
        self.leaving: Job | None = None
        self.coming: Job | None = None
        self.there: Job | None = None  # what brought it to where it is
        self.room: Room[Any] | None = None

    # ------------------------------------------------------------ noting

    def noting(self) -> saved_tensors_hooks:
        """Within this context what autograd keeps is noted."""
        self.saved = []
        return saved_tensors_hooks(self._pack, Saved.look)

    def _pack(self, tensor: Tensor) -> Saved:
        if not _is_plain(tensor) or tensor.layout is not torch.strided:
            kind = type(tensor).__name__ if not _is_plain(tensor) else str(tensor.layout)
            raise ModelError(
                f"stage {self.stage} saves a {kind} for its backward, and what is no plain memory "
                "cannot be offloaded",
                hint="leave the stage out of what is offloaded",
            )
        one = Saved(tensor)
        self.saved.append(ref(one))
        return one

    def noted(self, always: Collection[int]) -> None:
        """Note what of it stays: of these storages, which the rank has anyway."""
        for one in self._saved():
            one.stays = one.stays or self._stays(one.tensor, always)

    def _saved(self) -> Iterator[Saved]:
        """What autograd has not let go."""
        return (one for each in self.saved if (one := each()) is not None)

    def _stays(self, tensor: Tensor | None, always: Collection[int]) -> bool:
        if tensor is None or _is_own(tensor) or tensor.device != self.device:
            return True
        storage = tensor.untyped_storage()
        return not storage.nbytes() or storage._cdata in always

    # ------------------------------------------------------------ moving

    def leave(self, held: Iterable[Tensor], always: Collection[int]) -> None:
        """Let nobody but the storages of this keep what leaves: of what autograd keeps, and of
        tensors that are `held` beside it."""
        found: dict[int, int] = {}
        self.going, self.kept, self.back = [], [], []
        made = count()

        def view_of(tensor: Tensor) -> View:
            storage = tensor.untyped_storage()
            number = found.setdefault(storage._cdata, len(found))
            if number == len(self.going):
                self.going.append(_bytes(storage))
            view = View(
                number, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(),
                tensor.is_conj(), tensor.is_neg(),
            )  # fmt: skip
            return self._as_before(next(made), view)

        for one in self._saved():
            if not one.stays:
                assert one.tensor is not None, "it leaves once"
                one.view = view_of(one.tensor)
                one.version = 0 if one.version == one.tensor._version else -1
                one.tensor = None
        for own in held:
            if not self._stays(own, always):
                self.kept.append((own, view_of(own)))
                own.data = _nothing_of(own)
        self.sizes = [one.nbytes for one in self.going]
        self.parts = [part for size in self.sizes for part in (size, -size % LINE)]
        self.room_size, self.nbytes = max(sum(self.parts), LINE), sum(self.sizes)

    def _as_before(self, k: int, view: View) -> View:
        """The k-th view, which is the one of the step before, if it is equal: what steps make anew
        and keep is work for the garbage collector, which looks at all that a process has."""
        if k == len(self.views):
            self.views.append(view)
        elif self.views[k] != view:
            self.views[k] = view
        return self.views[k]

    def copy_out(self, memory: Tensor, poison: bool, *, at_once: bool) -> None:
        """Copy what leaves to a room; with `poison` let nothing be left of it, unless somebody else
        has it, too.  Where that is not only issued, but made `at_once`, it is let go."""
        if self.going:
            torch._foreach_copy_(self._parts(memory), self.going, non_blocking=True)
        if poison and (alone := [one for one in self.going if _is_alone(one)]):
            torch._foreach_clamp_min_(alone, POISON)  # no byte is more
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

    def make_room(self) -> None:
        """Make memory on the device for what comes back."""
        self.coming_in = [
            torch.empty(size, dtype=torch.uint8, device=self.device) for size in self.sizes
        ]

    def copy_back(self, memory: Tensor, poison: bool) -> None:
        """Copy what comes back from its room; with `poison` leave nothing of it there."""
        if self.coming_in:
            torch._foreach_copy_(self.coming_in, self._parts(memory), non_blocking=True)
        if poison:
            memory.fill_(POISON)

    def arrive(self) -> None:
        """Wait until it is back, and let everybody have it.  Raises what a copy has raised."""
        if self.coming is None:
            return
        coming, self.coming = self.coming, None
        coming.wait()
        storages = [one.untyped_storage() for one in self.coming_in]
        for one in self._saved():
            if one.view is not None:
                one.tensor, one.view = one.view.of(storages[one.view.storage]), None
                one.version = one.tensor._version if one.version == 0 else -1
        for own, view in self.kept:
            own.data = view.of(storages[view.storage])
        self.back = [ref(own) for own, _ in self.kept]
        self.coming_in, self.kept, self.there = [], [], None

    def _parts(self, memory: Tensor) -> list[Tensor]:
        """The part of a room that each storage has."""
        return list(memory[: sum(self.parts)].split_with_sizes(self.parts)[::2])

    def tensors(self) -> Iterable[Tensor]:
        """What of it has memory on the device, for who counts that."""
        yield from (*self.going, *self.coming_in)
        yield from (own for each in self.back if (own := each()) is not None)
        for one in self._saved():
            if one.tensor is not None and not one.stays:
                yield one.tensor


class Moves:
    """What a program moves on a rank, by stage and microbatch.

    `said` is whether the number of slots on the device is: then who takes one lets go of what was
    in it.  Otherwise that goes when it is seen that it has been copied.
    """

    def __init__(self, *, said: bool) -> None:
        self.said = said
        self.values: dict[tuple[int, int], Value] = {}
        self.kept: dict[tuple[int, int], Any] = {}  # what the slot had, and will have again
        self.leaving: list[Value] = []

    def look(self) -> None:
        """Let go of what has been copied, where nobody needs to."""
        for value in self.leaving:
            if value.leaving is not None and value.leaving.ended:
                value.let_go()
        self.leaving = [value for value in self.leaving if value.leaving is not None]


class Looked(Sequence[Any]):
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
        _key(x) for x in values
        if isinstance(x, Tensor) and x.layout is torch.strided and _is_plain(x)
    }  # fmt: skip


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nothing_of(tensor: Tensor) -> Tensor:
    """What a tensor is while it is away: of its shape, in memory of one number, which is none."""
    nan = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), nan).expand(tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _is_own(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor has its memory."""
    storage = tensor.untyped_storage()  # one who looks, beside the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2
