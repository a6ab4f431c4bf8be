"""Give a stage inputs that its module may change in place (`nn.ReLU(inplace=True)`).

What was received is this rank's own, and may be written over; autograd alone must not see it as
the leaf that it is.  What the stage before has handed over may be saved there for its backward, and
the model's inputs are the caller's: of these a module gets copies if a layer of it says `inplace`
and its first microbatch shows that it writes.  Any other module is given the
very tensor, or with `as_views` another tensor with the same memory.
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

CACHE_LINE_BYTES: Final = 64  # bytes
# Numbers of an input that are looked up in another input: this many are hardly there by chance.
_MAX_COMPARED_NUMBERS: Final = 8


class StageInputAdapter:
    """Gives a module its inputs; `writes_inputs` is whether it changes them while training, and
    else."""

    def __init__(self) -> None:
        self.writes_inputs: dict[bool, bool] = {}  # a dropout writes in training alone

    def run(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        keywords: Mapping[str, Any] = MappingProxyType({}),
        *,
        is_exclusive: bool,
        as_views: bool = False,
        skip_input_count: int = 0,
    ) -> tuple[Any, Sequence[Tensor]]:
        """What the module makes of xs, and the leaves whose `grad` is that of each.

        The last so many are given `skip_input_count`, several as a tuple: those of a skip.
        `is_exclusive` is memory that nobody else reads.  Of a copy the leaf has no memory.  With
        `as_views` the module is given a view of each leaf, so that it cannot keep the leaf.
        Keywords are for several stages, and none gets a copy.  Raises ModelError for a module that
        was not expected to write to its inputs and did, and for one that writes to an input if
        another input may be a view of it.
        """
        lent = leaves = inputs
        writes = self.writes_inputs.get(module.training)
        if writes is None and not (is_exclusive or _has_inplace_layer(module)):
            writes = False
        if writes is not False and inputs:
            lent, leaves = zip(*(_prepare_input(x, is_exclusive) for x in inputs), strict=True)
        elif as_views:
            lent = [x.view_as(x) for x in inputs]
        before = [*map(_get_version, lent)]
        views = _find_possible_views(inputs) if writes is None else ()
        named = (
            [x for x in tree_leaves(dict(keywords)) if isinstance(x, Tensor)] if keywords else ()
        )
        versions = [*map(_get_version, named)]
        try:
            args: Sequence[Any] = lent
            if skip_input_count > 1:
                args = (*lent[:-skip_input_count], tuple(lent[-skip_input_count:]))
            y = module(*args, **keywords)
        except RuntimeError as error:
            given = (*leaves, *named)
            if "leaf Variable" in str(error) and any(x.is_leaf and x.requires_grad for x in given):
                raise _unexpected_write_error() from error
            raise
        after = [*map(_get_version, lent)]
        wrote = after != before
        if wrote and writes is False:
            raise _unexpected_write_error()
        for one, other in views:
            if after[one] != before[one] or after[other] != before[other]:
                raise ModelError(
                    f"a stage changes input {one} or {other} in place, and both have the same "
                    "numbers: without a pipeline, one may be a view of the other",
                    hint="let it begin with x = x.clone()",
                )
        if versions and [*map(_get_version, named)] != versions:
            raise ModelError(
                "a stage changes a keyword in place, which is every stage's",
                hint="let it begin with mask = mask.clone()",
            )
        self.writes_inputs.setdefault(module.training, wrote)
        return y, leaves


def _find_possible_views(inputs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the indices of each two inputs that may be views of the same memory.

    If a stage returns `y, y[:, 0]` or `y, y`, each tensor arrives in memory of its own.  So this
    compares numbers: the first numbers of the smaller input are all in the larger one.
    """
    pairs = combinations(range(len(inputs)), 2)
    return [
        (k, n)
        for k, n in pairs
        if _has_numbers_of(*sorted((inputs[k], inputs[n]), key=Tensor.numel))
    ]


def _has_numbers_of(small: Tensor, large: Tensor) -> bool:
    """Return whether the first numbers of `small` are in `large`, in any place."""
    if small.dtype != large.dtype or not small.is_floating_point() or small.itemsize < 2:
        return False
    numbers = small.detach().reshape(-1)[:_MAX_COMPARED_NUMBERS].unique()
    return len(numbers) > 1 and all(bool((large.detach() == number).any()) for number in numbers)


def _prepare_input(x: Tensor, is_exclusive: bool) -> tuple[Tensor, Tensor]:
    """What a module that may write to x is given, and the leaf whose `grad` is that of x."""
    if not x.requires_grad:
        lent = x if is_exclusive else _copy_aligned(x)
        return lent, lent
    if is_exclusive:
        return torch.ops.aten._unsafe_view(x, x.shape), x  # x for autograd, and no leaf
    leaf = x.detach().new_empty(()).expand(x.shape).requires_grad_()
    return _InputCopy.apply(leaf, x.detach()), leaf  # type: ignore[no-untyped-call]


def _unexpected_write_error() -> ModelError:
    return ModelError(
        "a stage changes its input in place, which others read or it had left alone",
        hint="let it begin with x = x.clone(), or say inplace=True as layers of torch do",
    )


class _InputCopy(torch.autograd.Function):
    """A copy of a tensor, whose gradient goes to a leaf of its shape."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return _copy_aligned(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return dys[0], None


def _copy_aligned(x: Tensor) -> Tensor:
    """A copy that begins where x does in its cache line: by that, too, products round."""
    ahead = x.data_ptr() % CACHE_LINE_BYTES // x.element_size()
    memory = x.new_empty(ahead + x.numel()).untyped_storage()
    strides = torch.empty_like(x, device="meta").stride()
    return x.new_empty(0).set_(memory, ahead, x.shape, strides).copy_(x)


def _has_inplace_layer(module: nn.Module) -> bool:
    """Whether a layer of a module is set to write to what it takes, as `nn.ReLU(inplace=True)`."""
    return any(getattr(layer, "inplace", False) is True for layer in module.modules())


def _get_version(x: Tensor) -> int:
    """How often a tensor has been written to; nobody writes to those of inference mode."""
    return 0 if x.is_inference() else x._version
