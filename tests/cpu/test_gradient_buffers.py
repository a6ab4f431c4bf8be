"""Tests of gradient buffers: how they are divided, and the sum of squares of gradients."""

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


class Sizes(nn.Module):
    """A module with parameters of given sizes, some with another dtype."""

    def __init__(self, sizes: list[tuple[int, bool]]) -> None:
        super().__init__()
        for k, (size, wide) in enumerate(sizes):
            dtype = torch.float64 if wide else torch.float32
            self.register_parameter(f"p{k}", nn.Parameter(torch.zeros(size, dtype=dtype)))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())), st.integers(1, 60))
def test_buckets_are_small_whole_and_in_order(sizes: list[tuple[int, bool]], most: int) -> None:
    module = Sizes(sizes)
    gradients = GradientBuffers(module, most)
    for flat, views in zip(gradients.flat, gradients.views, strict=True):
        assert flat.nbytes <= most or sum(p.numel() > 0 for p, _ in views) == 1
        assert [p.numel() for p, _ in views] == [g.numel() for _, g in views]
        assert sum(p.numel() for p, _ in views) == flat.numel()
        assert all(p.grad is g and p.dtype == flat.dtype for p, g in views)
    for dtype in (torch.float32, torch.float64):
        cut = [p for p, _ in gradients.bound_views if p.dtype == dtype]
        assert all(a is b for a, b in zip(cut, _of(module, dtype), strict=True))
    reduced = GradientReduction(gradients, lambda k: [])
    number = {p: k for k, p in enumerate(gradients.parameters)}
    first = [number[gradients.views[k][0][0]] for k in reduced.bucket_order]
    assert first == sorted(first, reverse=True) and sorted(reduced.bucket_order) == [
        *range(len(first))
    ]
    plain = GradientBuffers(module)
    assert len(plain.flat) == len({p.dtype for p in module.parameters()})


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"memory_format": torch.channels_last}])
def test_gradients_that_are_moved_with_their_module_are_refused(how: Any) -> None:
    module = nn.Conv2d(2, 3, 2)
    gradients = GradientBuffers(module)
    module.share_memory()  # shares the whole buffer
    gradients.zero()
    module.to(**how)
    with pytest.raises(ModelError, match=r"^the gradient of weight was moved"):
        gradients.zero()


def test_the_squares_are_summed_in_float64_without_copies() -> None:
    torch.manual_seed(0)
    some: list[Tensor] = [torch.randn(7, 5), torch.randn(300).bfloat16(), torch.randn(0)]
    some += [torch.randn(9, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.float64)]
    largest = 0

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            largest = max([largest, *(t.numel() for t in made if t.dtype == torch.float64)])
            return out

    with Wide():  # type: ignore[no-untyped-call]
        got = compute_sum_of_squares(some)
    assert got is not None and got.dtype == torch.float64 and not got.dim()
    numbers = [complex(n) for g in some for n in g.flatten().tolist()]
    assert float(got) == pytest.approx(math.fsum(abs(n) ** 2 for n in numbers), rel=1e-13)
    assert largest <= len(some)
    assert compute_sum_of_squares([]) is compute_sum_of_squares([torch.zeros(0)]) is None
    bad = compute_sum_of_squares([torch.tensor([torch.inf, 1.0])])
    assert bad is not None and bad.isinf()


def _of(module: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dtype == dtype]
