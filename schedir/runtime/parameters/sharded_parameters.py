"""Shard the weights of a stage over replicas, by bucket (ZeRO).

Between steps a parameter's `data` is the replica's own piece of it, 1-dim and perhaps empty, and so
is its `grad`: an optimizer that was made of the stage's parameters steps pieces, and nobody can
take old weights for whole ones.  Within a step `data` is whole, in the bucket's flat tensor, which
is gathered by `gather` and of use from `whole` until `let_go`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError, in_words
from schedir.runtime.model_checks.storage_references import StorageReferences
from schedir.runtime.model_checks.tensor_fingerprint import sums_of
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.mixed_precision import (
    MainOptimizer,
    all_within,
    has_hooks,
    innermost,
    is_torchs,
)
from schedir.transports.collectives import Group, Kind
from schedir.transports.transport import Work

Collective = Callable[[Kind, Group, Tensor, Tensor], Work]
_OWNER: Final = "_schedir_parts"  # an attribute of parameters
_ALL: Final = WeakSet["ShardedParameters"]()  # of this process


class ShardedParameters:
    """The trained weights of a stage, in the buckets of its gradients.

    Up to level 2 of ZeRO the flat tensors stay, and the own part lies in its place there; at level
    3 it has memory of its own, and theirs is there while the weights are whole.  `aliases` are
    parameters of the stage in the memory of another stage's: they are gathered from its part.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        share: ShardSpec,
        aliases: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.gradients, self.share, self.aliases = gradients, share, aliases
        self.buckets, self.stays = gradients.buckets, not share.cuts("params")
        self.flat: list[Tensor] = []
        self.own: list[Tensor] = []  # the replica's part of each
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        self.pieces: dict[nn.Parameter, Tensor] = {}
        self.gathering: list[Work] = []
        self.is_whole = self.within = False
        self.shown: list[Tensor] = []  # flat tensors that are shown whole between steps
        self.versions: list[int] = []  # of each parameter when a step began
        self.references = StorageReferences(())  # to full weights, before the first step
        self.steps = 0  # that have begun, and train
        self.sums: list[int] = []  # of the bits that were gathered, in the first step

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a parameter, or one that is pickled, is nobody's piece."""
        return type(None), ()

    @torch.no_grad()
    def cut(self, of: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the weights, and let each parameter be its own piece; `of` are the parts of buckets
        of one parameter that other stages have."""
        k = self.share.replica
        for bucket in self.buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            views = bucket.views(flat)
            for p, view in zip(bucket.parameters, views, strict=True):
                view.copy_(p)
            own = bucket.part(flat, k)
            if self.aliases.get(bucket.parameters[0]) in of:
                own = of[self.aliases[bucket.parameters[0]]]
            elif not self.stays:
                own = own.clone()
            if not self.stays:
                flat.untyped_storage().resize_(0)
            self.flat.append(flat)
            self.own.append(own)
            self.views += zip(bucket.parameters, views, strict=True)
            self.pieces |= zip(bucket.parameters, bucket.pieces(own, k), strict=True)
            for p in bucket.parameters:  # one after the other, so that the rest may go
                p.grad = None
                p.data = self.pieces[p]
                vars(p)[_OWNER] = self
        for owner in self.gradients.module.modules():
            if any(p in self.pieces for p in owner.parameters(recurse=False)):
                owner.register_state_dict_pre_hook(_tell_of_pieces)
        self.within = True
        self.rest()
        _ALL.add(self)

    def storages_of_others(self) -> frozenset[int]:
        """Return the storages, by `_cdata`, of the full weights of all other stages."""
        return frozenset(
            flat.untyped_storage()._cdata
            for parts in _ALL
            if parts is not self and not parts.stays
            for flat in parts.flat
        )

    def begin(self, *, trains: bool) -> None:
        """Begin a step: parameters are of their shapes, and whole when they are gathered.

        Raises ModelError for one whose `data` is not its piece any more.
        """
        self._expect_pieces()
        self.within, self.steps = True, self.steps + trains
        for p, view in self.views:
            p.grad = None
            p.data = view
        self.versions = [p._version for p, _ in self.views]

    def _expect_pieces(self) -> None:
        if self.shown:
            raise ModelError(
                "weights are shown whole, and a step keeps them in parts",
                hint="leave `with executor.whole():` before the next step",
            )
        for p, piece in self.pieces.items():
            if p.data_ptr() != piece.data_ptr() or p.shape != piece.shape:
                raise ModelError(
                    f"{self.gradients.names[p]} is not the piece that this replica keeps of it: "
                    "it has been moved, or its data set",
                    hint="write to weights within `with executor.whole():`",
                )

    def gather(self, collective: Collective) -> None:
        """Begin to make the weights whole."""
        for flat, own in zip(self.flat, self.own, strict=True):
            if not self.stays:
                flat.untyped_storage().resize_(flat.nbytes)
            if self.share.replicas > 1 and flat.numel():
                self.gathering.append(collective("all_gather", "params", flat, own))
            elif flat.data_ptr() != own.data_ptr():
                flat.copy_(own)
        self.is_whole = True

    def whole(self) -> None:
        """Wait until they are."""
        assert self.is_whole, "the checker proves that whoever needs them comes behind an unshard"
        for work in self.gathering:
            work.wait()
        if self.steps == 1 and not self.stays and not self.sums:
            self.sums = sums_of(self.flat)
        self.gathering.clear()

    def apart(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values that outlive the whole weights: copies of those in memory that is let go."""
        flats = () if self.stays else self.flat
        places = {flat.untyped_storage().data_ptr() for flat in flats}
        return [v.clone() if v.untyped_storage().data_ptr() in places else v for v in values]

    def let_go(self) -> None:
        """Keep the own part only.

        What somebody wrote elsewhere would be lost.  Versions do not tell of a write to `data`, so
        in the first step the bits are looked at.
        """
        self.whole()
        self.is_whole = False
        if self.sums and self.sums != (now := sums_of(self.flat)):
            k = next(k for k, before in enumerate(self.sums) if before != now[k])
            self.expect_unwritten()
            names = [self.gradients.names[p] for p in self.buckets[k].parameters]
            raise _written(f"one of {names[0]} to {names[-1]}" if names[1:] else names[0])
        self.sums = []
        for flat in () if self.stays else self.flat:
            flat.untyped_storage().resize_(0)

    def rest(self) -> None:
        """Let each parameter be its piece, with the piece of the reduced gradient."""
        if not self.within or self.shown:
            return
        self.within = False
        kept = self.gradients.pieces[self.share.replica]
        for p, piece in self.pieces.items():
            p.grad = None
            p.data = piece
            p.grad = kept[p] if piece.numel() else None

    def expect_unwritten(self) -> None:
        """Raise ModelError if a step wrote to a weight or replaced its `data`.

        Each replica keeps a shard only, and would lose what was written to the rest.
        """
        now = [p._version for p, _ in self.views]
        for (p, view), before, after in zip(self.views, self.versions, now, strict=True):
            if before != after:
                raise _written(self.gradients.names[p])
            if self.within and p.data_ptr() != view.data_ptr():
                raise _written(f"the data of {self.gradients.names[p]}")

    def count_references(self) -> None:
        """Count the references to the memory of full weights, before weights are gathered."""
        self.references = StorageReferences(() if self.stays else self.flat)

    def require_released(self) -> None:
        """Raise ModelError if a stage keeps references to full weights, whose memory is freed."""
        for k in self.references.increased():
            raise ModelError(
                "a stage keeps a reference to the full weight "
                f"{self.gradients.names[self.buckets[k].parameters[0]]}, or to another weight of "
                "its bucket, and ZeRO level 3 frees full weights after the step",
                hint="keep a copy without its graph: weight.detach().clone(); or zero=2",
            )

    def show(self, collective: Collective) -> None:
        """Let parameters be whole until they are taken; in memory of their own, of which somebody
        may keep hold, as `numpy()` does."""
        self._expect_pieces()
        self.shown = [
            own.new_zeros(bucket.numel) for bucket, own in zip(self.buckets, self.own, strict=True)
        ]
        for flat, own in zip(self.shown, self.own, strict=True):
            if self.share.replicas > 1 and flat.numel():
                collective("all_gather", "params", flat, own).wait()
            else:
                flat.copy_(own)
        for bucket, flat in zip(self.buckets, self.shown, strict=True):
            for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                p.grad = None
                p.data = view

    @torch.no_grad()
    def take(self) -> None:
        """Keep the own part of what parameters are now."""
        shown, self.shown, self.within = self.shown, [], True
        try:
            for p, view in self.views:
                if p.shape != view.shape or p.dtype != view.dtype or p.device != view.device:
                    raise ModelError(
                        f"{self.gradients.names[p]} was {list(view.shape)} of {view.dtype} on "
                        f"{view.device}, and is {list(p.shape)} of {p.dtype} on {p.device}",
                        hint="make the executor after the last such change",
                    )
            for bucket, flat, own in zip(self.buckets, shown, self.own, strict=True):
                for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                    if p.data_ptr() != view.data_ptr():
                        view.copy_(p)
                if bucket.parameters[0] not in self.aliases:  # whose part is another stage's
                    own.copy_(bucket.part(flat, self.share.replica))
        finally:
            self.rest()


def _tell_of_pieces(module: nn.Module, *_: object) -> None:
    """Warn whoever takes the state of a module between steps, as to save it."""
    for name, p in module.named_parameters(recurse=False):
        owner = owner_of(p)
        if owner is not None and not owner.shown and not owner.within:
            warnings.warn(
                f"a state_dict has the piece of {name} that this replica keeps (zero "
                f"{owner.share.zero}), and nobody else's; within `with executor.whole():` it has "
                "whole weights",
                stacklevel=2,
            )
            return


def _written(what: str) -> ModelError:
    return ModelError(
        f"a forward or a backward writes to {what}, of which each replica keeps its own part",
        hint="let it be a buffer, or zero=0",
    )


def owner_of(p: nn.Parameter) -> ShardedParameters | None:
    """Whose piece a parameter is, or whose whole weight that is shown; None of any other."""
    owner = vars(p).get(_OWNER)
    return owner if isinstance(owner, ShardedParameters) and p in owner.pieces else None


def cut_state(optimizer: Any, pieces: Mapping[nn.Parameter, tuple[torch.Size, int, int]]) -> None:
    """Let an optimizer that has been made of whole parameters step pieces: of what it keeps for
    each, and of a MainOptimizer's copies, leave the numbers from and to."""
    for one in all_within(optimizer):
        main = {}
        if isinstance(one, MainOptimizer):
            main = {m: p for p, m in zip(one.parameters, one.main, strict=True)}
        for m, p in main.items():
            if p in pieces:
                m.grad, m.data = None, _piece(m.data, *pieces[p])
        state = getattr(innermost(one), "state", {})
        for p in [*state]:
            if (of := pieces.get(main.get(p, p))) is None:
                continue
            for name, value in [*state[p].items()]:
                state[p][name] = tree_map_only(Tensor, partial(_cut_like, of), value)


def _cut_like(of: tuple[torch.Size, int, int], value: Tensor) -> Tensor:
    """Cut what an optimizer keeps for each number of a weight as the weight is cut."""
    return _piece(value, *of) if value.shape == of[0] else value


def expect_state_of_pieces(optimizer: Any, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise ModelError if an optimizer keeps tensors of another shape for a piece of a weight, such
    as the shape of the weight: torch's fused ones would take the first numbers."""
    for one in all_within(optimizer):
        main: dict[Any, Any] = {}
        if isinstance(one, MainOptimizer):
            main = dict(zip(one.main, one.parameters, strict=True))
        inner = innermost(one)
        for p, kept in getattr(inner, "state", {}).items():
            shape = shapes.get(main.get(p, p))
            if shape is None:
                continue
            for name, value in tensors_of_state(kept):
                if value.shape != p.shape:
                    raise ModelError(
                        f"{type(inner).__name__} keeps {name} of {list(value.shape)} for a piece "
                        f"of {list(p.shape)} of a weight",
                        hint="load what a replica has saved itself, or load whole state before the "
                        "executor is made",
                    )


@contextmanager
def stepping_pieces(optimizer: object, zero: int) -> Iterator[None]:
    """Within this an optimizer steps, on pieces of weights if `zero` is not 0.

    Raises ModelError if the optimizer's step has hooks, because they would see pieces, too.  Raises
    ModelError if the step fails on pieces and the optimizer is not torch's.
    """
    for one in map(innermost, all_within(optimizer) if zero else ()):
        if has_hooks(one) and not getattr(one, "elementwise", False):
            raise ModelError(
                f"{type(one).__name__} has hooks on its step, and they would see the pieces of "
                f"weights and gradients that a replica keeps (zero {zero})",
                hint="zero=0; or optimizer.elementwise = True, if the hooks are elementwise",
            )
    try:
        yield
    except RuntimeError as error:
        inner = innermost(optimizer)
        if not zero or is_torchs(inner):
            raise
        raise ModelError(
            f"{type(inner).__name__} fails to step the pieces of weights that a replica keeps, "
            f"which are 1-dim (zero {zero}): {in_words(error)}",
            hint="let its tensors have the shape that p has in `step`; or zero=0",
        ) from error


def tensors_of_state(kept: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of several numbers that an optimizer keeps for a parameter, by name."""
    for name, value in kept.items():
        for one in tree_leaves(value):
            if isinstance(one, Tensor) and one.numel() > 1:
                yield name, one


def _piece(whole: Tensor, shape: torch.Size, low: int, high: int) -> Tensor:
    assert whole.shape == shape
    return whole.detach().reshape(-1)[low:high].clone()
