"""Tests of gradient buffers: their buckets, and the sum of squares of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.parameters.gradient_buffers import GradientBuffers, compute_sum_of_squares
from schedir.runtime.parameters.overlapped_reduction import GradientReduction


class ParametersOfSizes(nn.Module):
    """A module with parameters of given sizes, some with another dtype."""

    def __init__(self, sizes: list[tuple[int, bool]]) -> None:
        super().__init__()
        for k, (size, wide) in enumerate(sizes):
            dtype = torch.float64 if wide else torch.float32
            self.register_parameter(f"p{k}", nn.Parameter(torch.zeros(size, dtype=dtype)))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())), st.integers(1, 60))
def test_buckets_respect_size_limit_and_parameter_order(
    sizes: list[tuple[int, bool]], most: int
) -> None:
    module = ParametersOfSizes(sizes)
    gradients = GradientBuffers(module, most)
    for flat, views in zip(gradients.flat, gradients.views, strict=True):
        assert flat.nbytes <= most or sum(p.numel() > 0 for p, _ in views) == 1
        assert [p.numel() for p, _ in views] == [g.numel() for _, g in views]
        assert sum(p.numel() for p, _ in views) == flat.numel()
        assert all(p.grad is g and p.dtype == flat.dtype for p, g in views)
    for dtype in (torch.float32, torch.float64):
        of_dtype = [p for p, _ in gradients.bound_views if p.dtype == dtype]
        assert all(a is b for a, b in zip(of_dtype, _list_parameters(module, dtype), strict=True))
    reduced = GradientReduction(gradients, lambda k: [])
    index_of_parameter = {p: k for k, p in enumerate(gradients.parameters)}
    first_parameters = [index_of_parameter[gradients.views[k][0][0]] for k in reduced.bucket_order]
    assert first_parameters == sorted(first_parameters, reverse=True) and sorted(
        reduced.bucket_order
    ) == [*range(len(first_parameters))]
    plain = GradientBuffers(module)
    assert len(plain.flat) == len({p.dtype for p in module.parameters()})


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"memory_format": torch.channels_last}])
def test_moved_gradients_are_refused(how: Any) -> None:
    module = nn.Conv2d(2, 3, 2)
    gradients = GradientBuffers(module)
    module.share_memory()  # shares the full buffer
    gradients.zero()
    module.to(**how)
    with pytest.raises(ModelError, match=r"^the gradient of weight of stage 3 was moved"):
        gradients.zero(" of stage 3")


def test_sum_of_squares_is_float64_without_copies() -> None:
    torch.manual_seed(0)
    gradients: list[Tensor] = [torch.randn(7, 5), torch.randn(300).bfloat16(), torch.randn(0)]
    gradients += [torch.randn(9, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.float64)]
    largest = 0

    class Float64Observer(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            largest = max([largest, *(t.numel() for t in tensors if t.dtype == torch.float64)])
            return out

    with Float64Observer():  # type: ignore[no-untyped-call]
        actual = compute_sum_of_squares(gradients)
    assert actual is not None and actual.dtype == torch.float64 and not actual.dim()
    numbers = [complex(n) for g in gradients for n in g.flatten().tolist()]
    assert float(actual) == pytest.approx(math.fsum(abs(n) ** 2 for n in numbers), rel=1e-13)
    assert largest <= len(gradients)
    assert compute_sum_of_squares([]) is compute_sum_of_squares([torch.zeros(0)]) is None
    infinite = compute_sum_of_squares([torch.tensor([torch.inf, 1.0])])
    assert infinite is not None and infinite.isinf()


def _list_parameters(module: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dtype == dtype]
