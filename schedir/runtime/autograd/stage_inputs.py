"""Give a stage inputs that its module may change in place, as `nn.ReLU(inplace=True)` does.

The module may overwrite a received input. But it must not get this input as an autograd leaf,
because autograd refuses a write to a leaf.

The module must not overwrite an input from a stage of the same rank, because that stage may need it
for its backward. It must not overwrite an input of the model, because that input belongs to the
caller. If a layer of the module has `inplace=True`, the module gets copies of these inputs in its
first call. In later calls it gets copies only if the first call wrote to its inputs. Modules
without such a layer get the input itself, or with `as_views` a view of it.
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
from schedir.runtime.model_checks.tensor_fingerprint import get_versions

CACHE_LINE_BYTES: Final = 64  # kernels may round differently at other alignments

# `_has_numbers_of` searches this number of elements of one input in another input. A tensor is
# unlikely to contain 8 elements of another tensor by chance.
_MAX_COMPARED_NUMBERS: Final = 8


class StageInputAdapter:
    """Calls the module of a stage, with inputs that it may change in place.

    Attributes:
        writes_inputs: Value of `module.training` -> True if the module wrote to its inputs in its
            first call in this mode.
    """

    def __init__(self) -> None:
        # The key is `module.training`, because an in-place dropout writes to its input only in
        # training.
        self.writes_inputs: dict[bool, bool] = {}

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
        """Call the module, and return its output and the leaves that collect the gradients.

        Args:
            module: The module of the stage.
            inputs: The inputs. An input that requires a gradient must be a leaf.
            keywords: The keyword arguments. All stages share these arguments, so they are never
                copied.
            is_exclusive: True if no other code reads the memory of the inputs.
            as_views: True to give the module views of the inputs, so that it cannot keep references
                to the leaves.
            skip_input_count: The number of inputs from a skip connection, which come last. The
                module gets several such inputs as one tuple.

        Returns:
            The output of the module, and for each input the leaf whose `grad` is its gradient. The
            leaf of a copied input uses no memory.

        Raises:
            ModelError: The module writes to an input that it got without a copy, to one of two
                inputs with the same values, or to a keyword argument.
        """
        module_inputs = leaves = inputs
        writes_inputs = self.writes_inputs.get(module.training)
        if writes_inputs is None and not (is_exclusive or _has_inplace_layer(module)):
            writes_inputs = False
        if writes_inputs is not False and inputs:
            module_inputs, leaves = zip(
                *(_prepare_input(x, is_exclusive) for x in inputs), strict=True
            )
        elif as_views:
            module_inputs = [x.view_as(x) for x in inputs]
        old_versions = get_versions(module_inputs)
        view_pairs = _find_possible_views(inputs) if writes_inputs is None else ()
        keyword_tensors = (
            [x for x in tree_leaves(dict(keywords)) if isinstance(x, Tensor)] if keywords else ()
        )
        keyword_versions = get_versions(keyword_tensors)
        try:
            args: Sequence[Any] = module_inputs
            if skip_input_count > 1:
                skip_inputs = tuple(module_inputs[-skip_input_count:])
                args = (*module_inputs[:-skip_input_count], skip_inputs)
            y = module(*args, **keywords)
        except RuntimeError as error:
            tensors = (*leaves, *keyword_tensors)
            if "leaf Variable" in str(error) and any(
                x.is_leaf and x.requires_grad for x in tensors
            ):
                raise _unexpected_write_error() from error
            raise
        new_versions = get_versions(module_inputs)
        has_written = new_versions != old_versions
        if has_written and writes_inputs is False:
            raise _unexpected_write_error()
        for k, n in view_pairs:
            if new_versions[k] != old_versions[k] or new_versions[n] != old_versions[n]:
                raise ModelError(
                    f"a stage changes input {k} or {n} in place, but these inputs have common "
                    "values: without a pipeline they may share memory, and the change would then "
                    "affect both",
                    hint="begin the forward with x = x.clone()",
                )
        if keyword_versions and get_versions(keyword_tensors) != keyword_versions:
            raise ModelError(
                "a stage changes a keyword argument in place, but all stages get the same tensor",
                hint="begin the forward with mask = mask.clone()",
            )
        self.writes_inputs.setdefault(module.training, has_written)
        return y, leaves


def _find_possible_views(inputs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return pairs of inputs, as indices, that may be views of one tensor in the previous stage.

    If a stage returns `y, y[:, 0]` or `y, y`, each tensor arrives in separate memory. So this
    function compares values: the larger input must contain the first elements of the smaller one.
    """
    pairs = combinations(range(len(inputs)), 2)
    return [
        (k, n)
        for k, n in pairs
        if _has_numbers_of(*sorted((inputs[k], inputs[n]), key=Tensor.numel))
    ]


def _has_numbers_of(small: Tensor, large: Tensor) -> bool:
    """Return whether the first elements of `small` occur in `large`, at any position."""
    if small.dtype != large.dtype or not small.is_floating_point() or small.itemsize < 2:
        return False
    numbers = small.detach().reshape(-1)[:_MAX_COMPARED_NUMBERS].unique()
    return len(numbers) > 1 and all(bool((large.detach() == number).any()) for number in numbers)


def _prepare_input(x: Tensor, is_exclusive: bool) -> tuple[Tensor, Tensor]:
    """Prepare an input so that the module may overwrite it.

    Returns:
        The tensor to pass to the module, and the leaf that gets the gradient of the input.
    """
    if not x.requires_grad:
        module_input = x if is_exclusive else _copy_aligned(x)
        return module_input, module_input
    if is_exclusive:
        # For autograd, the returned tensor is computed from x. So the tensor is not a leaf.
        return torch.ops.aten._unsafe_view(x, x.shape), x
    leaf = x.detach().new_empty(()).expand(x.shape).requires_grad_()
    return _InputCopy.apply(leaf, x.detach()), leaf  # type: ignore[no-untyped-call]


def _unexpected_write_error() -> ModelError:
    return ModelError(
        "a stage changes its input in place, but has no copy of it. The first forward of the "
        "stage did not change the input, or other code may read it",
        hint="begin the forward with x = x.clone(), or set inplace=True on the layer",
    )


class _InputCopy(torch.autograd.Function):
    """A copy of a tensor, whose gradient goes to a leaf of the same shape."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return _copy_aligned(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return dys[0], None


def _copy_aligned(x: Tensor) -> Tensor:
    """Return a copy with the same offset in its cache line. The offset may affect rounding."""
    offset = x.data_ptr() % CACHE_LINE_BYTES // x.element_size()
    memory = x.new_empty(offset + x.numel()).untyped_storage()
    strides = torch.empty_like(x, device="meta").stride()
    return x.new_empty(0).set_(memory, offset, x.shape, strides).copy_(x)


def _has_inplace_layer(module: nn.Module) -> bool:
    return any(getattr(layer, "inplace", False) is True for layer in module.modules())
