"""Parts: the weights of a stage, of which each replica keeps a part of every bucket (ZeRO).

Between steps a parameter's `data` is the replica's own piece of it, 1-dim and perhaps empty, and so
is its `grad`: an optimizer that was made of the stage's parameters steps pieces, and nobody can
take old weights for whole ones.  Within a step `data` is whole, in the bucket's flat tensor, which
is gathered by `gather` and of use from `whole` until `let_go`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.gradients import Gradients
from schedir.runtime.layout import Share
from schedir.runtime.precision import MainOptimizer, innermost
from schedir.transports.collectives import Group, Kind
from schedir.transports.transport import Work

Collective = Callable[[Kind, Group, Tensor, Tensor], Work]


class Parts:
    """The trained weights of a stage, in the buckets of its gradients.

    Up to level 2 of ZeRO the flat tensors stay, and the own part lies in its place there; at level
    3 it has memory of its own, and theirs is there while the weights are whole.  `aliases` are
    parameters of the stage in the memory of another stage's: they are gathered from its part.
    """

    def __init__(
        self, gradients: Gradients, share: Share, aliases: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self.gradients, self.share, self.aliases = gradients, share, aliases
        self.buckets, self.stays = gradients.buckets, not share.cuts("params")
        self.flat: list[Tensor] = []
        self.own: list[Tensor] = []  # the replica's part of each
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        self.pieces: dict[nn.Parameter, Tensor] = {}
        self.gathering: list[Work] = []
        self.is_whole = self.within = False

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
        self.within = True
        self.rest()

    def begin(self) -> None:
        """Begin a step: parameters are of their shapes, and whole when they are gathered.

        Raises ModelError for one whose `data` is not its piece any more.
        """
        for p, piece in self.pieces.items():
            if p.data_ptr() != piece.data_ptr() or p.shape != piece.shape:
                raise ModelError(
                    f"{self.gradients.names[p]} is not the piece that this replica keeps of it: "
                    "it has been moved, or its data set",
                    hint="write to weights within `with executor.whole():`",
                )
        self.within = True
        for p, view in self.views:
            p.grad = None
            p.data = view

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
        self.gathering.clear()

    def let_go(self) -> None:
        """Keep the own part only."""
        self.whole()
        self.is_whole = False
        for flat in () if self.stays else self.flat:
            flat.untyped_storage().resize_(0)

    def rest(self) -> None:
        """Let each parameter be its piece, with the piece of the reduced gradient."""
        if not self.within:
            return
        self.within = False
        kept = self.gradients.pieces[self.share.replica]
        for p, piece in self.pieces.items():
            p.grad = None
            p.data = piece
            p.grad = kept[p] if piece.numel() else None


def cut_state(optimizer: Any, pieces: Mapping[nn.Parameter, tuple[torch.Size, int, int]]) -> None:
    """Let an optimizer that has been made of whole parameters step pieces: of what it keeps for
    each, and of a MainOptimizer's copies, leave the numbers from and to."""
    main = {}
    if isinstance(optimizer, MainOptimizer):
        main = {m: p for p, m in zip(optimizer.parameters, optimizer.main, strict=True)}
    for m, p in main.items():
        if p in pieces:
            m.grad, m.data = None, _piece(m.data, *pieces[p])
    state = getattr(innermost(optimizer), "state", {})
    for p in [*state]:
        if (of := pieces.get(main.get(p, p))) is None:
            continue
        for name, value in [*state[p].items()]:
            if isinstance(value, Tensor) and value.shape == of[0]:
                state[p][name] = _piece(value, *of)


def _piece(whole: Tensor, shape: torch.Size, low: int, high: int) -> Tensor:
    assert whole.shape == shape
    return whole.detach().reshape(-1)[low:high].clone()
