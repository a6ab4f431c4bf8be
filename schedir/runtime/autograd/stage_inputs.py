"""Give a stage inputs that its module may change in place (`nn.ReLU(inplace=True)`).

What was received is this rank's own, and may be written over; autograd alone must not see it as
the leaf that it is.  What the stage before has handed over may be saved there for its backward, and
the model's inputs are the caller's: of these a module gets copies if a layer of it says `inplace`
and its first microbatch shows that it writes.  Any other module is given the
very tensor, or with `aliases` another tensor with the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError

LINE: Final = 64  # bytes
# Numbers of an input that are looked up in another input: this many are hardly there by chance.
_COMPARED: Final = 8


class StageInputAdapter:
    """Gives a module its inputs; `writes` is whether it changes them while training, and else."""

    def __init__(self) -> None:
        self.writes: dict[bool, bool] = {}  # a dropout writes in training alone

    def run(
        self,
        module: nn.Module,
        xs: Sequence[Tensor],
        keywords: Mapping[str, Any] = MappingProxyType({}),
        *,
        ours: bool,
        aliases: bool = False,
        together: int = 0,
    ) -> tuple[Any, Sequence[Tensor]]:
        """What the module makes of xs, and the leaves whose `grad` is that of each.

        The last so many are given `together`, several as a tuple: those of a skip.
        `ours` is memory that nobody else reads.  Of a copy the leaf has no memory.  With `aliases`
        the module is given a view of each leaf, so that it cannot keep the leaf.  Keywords are for
        several stages, and none gets a copy.  Raises ModelError for a module that was not expected
        to write to its inputs and did, and for one that writes to an input if another input may be
        a view of it.
        """
        lent = leaves = xs
        writes = self.writes.get(module.training)
        if writes is None and not (ours or _says_so(module)):
            writes = False
        if writes is not False and xs:
            lent, leaves = zip(*(_lend(x, ours) for x in xs), strict=True)
        elif aliases:
            lent = [x.view_as(x) for x in xs]
        before = [*map(_version, lent)]
        views = _views(xs) if writes is None else ()
        named = (
            [x for x in tree_leaves(dict(keywords)) if isinstance(x, Tensor)] if keywords else ()
        )
        versions = [*map(_version, named)]
        try:
            args: Sequence[Any] = lent
            if together > 1:
                args = (*lent[:-together], tuple(lent[-together:]))
            y = module(*args, **keywords)
        except RuntimeError as error:
            given = (*leaves, *named)
            if "leaf Variable" in str(error) and any(x.is_leaf and x.requires_grad for x in given):
                raise _not_expected() from error
            raise
        after = [*map(_version, lent)]
        wrote = after != before
        if wrote and writes is False:
            raise _not_expected()
        for one, other in views:
            if after[one] != before[one] or after[other] != before[other]:
                raise ModelError(
                    f"a stage changes input {one} or {other} in place, and both have the same "
                    "numbers: without a pipeline, one may be a view of the other",
                    hint="let it begin with x = x.clone()",
                )
        if versions and [*map(_version, named)] != versions:
            raise ModelError(
                "a stage changes a keyword in place, which is every stage's",
                hint="let it begin with mask = mask.clone()",
            )
        self.writes.setdefault(module.training, wrote)
        return y, leaves


def _views(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the indices of each two inputs that may be views of the same memory.

    If a stage returns `y, y[:, 0]` or `y, y`, each tensor arrives in memory of its own.  So this
    compares numbers: the first numbers of the smaller input are all in the larger one.
    """
    pairs = combinations(range(len(xs)), 2)
    return [(k, n) for k, n in pairs if _has_numbers_of(*sorted((xs[k], xs[n]), key=Tensor.numel))]


def _has_numbers_of(small: Tensor, large: Tensor) -> bool:
    """Return whether the first numbers of `small` are in `large`, in any place."""
    if small.dtype != large.dtype or not small.is_floating_point() or small.itemsize < 2:
        return False
    numbers = small.detach().reshape(-1)[:_COMPARED].unique()
    return len(numbers) > 1 and all(bool((large.detach() == number).any()) for number in numbers)


def _lend(x: Tensor, ours: bool) -> tuple[Tensor, Tensor]:
    """What a module that may write to x is given, and the leaf whose `grad` is that of x."""
    if not x.requires_grad:
        lent = x if ours else _copy(x)
        return lent, lent
    if ours:
        return torch.ops.aten._unsafe_view(x, x.shape), x  # x for autograd, and no leaf
    leaf = x.detach().new_empty(()).expand(x.shape).requires_grad_()
    return _InputCopy.apply(leaf, x.detach()), leaf  # type: ignore[no-untyped-call]


def _not_expected() -> ModelError:
    return ModelError(
        "a stage changes its input in place, which others read or it had left alone",
        hint="let it begin with x = x.clone(), or say inplace=True as layers of torch do",
    )


class _InputCopy(torch.autograd.Function):
    """A copy of a tensor, whose gradient goes to a leaf of its shape."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return _copy(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return dys[0], None


def _copy(x: Tensor) -> Tensor:
    """A copy that begins where x does in its cache line: by that, too, products round."""
    ahead = x.data_ptr() % LINE // x.element_size()
    memory = x.new_empty(ahead + x.numel()).untyped_storage()
    strides = torch.empty_like(x, device="meta").stride()
    return x.new_empty(0).set_(memory, ahead, x.shape, strides).copy_(x)


def _says_so(module: nn.Module) -> bool:
    """Whether a layer of a module is set to write to what it takes, as `nn.ReLU(inplace=True)`."""
    return any(getattr(layer, "inplace", False) is True for layer in module.modules())


def _version(x: Tensor) -> int:
    """How often a tensor has been written to; nobody writes to those of inference mode."""
    return 0 if x.is_inference() else x._version
