"""Tests of every Triton kernel, interpreted on the CPU, against its plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")  # not available on every system

from schedir.errors import UsageError
from schedir.kernels import backend_choice, cross_entropy, gelu, layer_norm, weight_gradient
from tests.cpu.triton_interpreter import interpret_kernels
from tests.cpu.triton_interpreter import load_kernels as load_new_kernels

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 99)
FEW = settings(max_examples=12)
load_kernels = cache(load_new_kernels)  # each new copy is translated again for the interpreter


@pytest.fixture(autouse=True, scope="module")
def _interpreted_kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    with interpret_kernels():
        yield
    torch.use_deterministic_algorithms(before)


def make_random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, *, roundings: float = 4) -> None:
    """Assert equality up to a few roundings of the dtype.

    The interpreter truncates instead of rounding, which doubles the error.
    """
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    largest = max([1.0, *expected.abs().flatten().tolist()])
    tolerance = 2 * roundings * torch.finfo(actual.dtype).eps * largest
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@FEW
@given(st.integers(1, 3), st.integers(1, 100), st.sampled_from([1, 3]), FLOATS, SEEDS)
def test_cross_entropy_kernels_equal_reference(
    n: int, k: int, t: int, dtype: torch.dtype, seed: int
) -> None:
    # A row takes several iterations.
    kernels, ignore = load_kernels("cross_entropy_triton", MAX_BLOCK_COLUMNS=32), -1
    targets = (t * k * make_random(seed, n).sigmoid()).long()
    targets[make_random(seed + 1, n) > 0.5] = ignore
    shards = list(3 * make_random(seed, t, n, k, dtype=dtype))
    shards[-1][:, k // 2 :] = float("-inf")  # padding, which for k = 1 is the whole shard
    parts = []
    for rank, logits in enumerate(shards):
        statistics = kernels.compute_statistics(logits, targets, rank * k)
        expected = cross_entropy.compute_statistics_reference(logits, targets, rank * k)
        torch.testing.assert_close(statistics, expected, rtol=1e-6, atol=1e-6)
        parts.append(statistics)
    all_statistics, dloss = torch.stack(parts), torch.tensor(0.5)
    if bool((all_statistics[:, cross_entropy.MAXIMUM].amax(0) == float("-inf")).any()):
        return  # only padding on every rank, which no head has
    for rank, logits in enumerate(shards):
        arguments = targets, all_statistics, dloss, rank * k, ignore
        expected = cross_entropy.write_gradient_reference_(logits.clone(), *arguments)
        assert_close(kernels.write_gradient_(logits, *arguments), expected)


def compute_gradients(output: Tensor, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return the gradients of the inputs from autograd."""
    return [*torch.autograd.grad(output, inputs, gradient)]


@FEW
@example(0, 5, torch.float32, 1, 0)
@given(st.integers(1, 9), st.sampled_from([1, 511, 600]), FLOATS, st.integers(1, 5), SEEDS)
def test_bias_gelu_kernels_equal_reference(
    rows: int, n: int, dtype: torch.dtype, programs: int, seed: int
) -> None:
    kernels = load_kernels("gelu_triton")
    x, bias, dy = (
        make_random(seed + i, *s, dtype=dtype) for i, s in enumerate([(rows, n), (n,), (1, n)])
    )
    dy = dy.expand(rows, n)  # of stride 0, like the gradient of a sum
    float32_sum = x.float() + bias.float()  # the reference rounds x + bias, the kernel does not
    expected = gelu.bias_gelu_reference(float32_sum, torch.zeros(n)).to(dtype)
    assert_close(kernels.forward(x, bias), expected)
    dx, dbias = kernels.backward(dy, x, bias, programs)
    inputs = [float32_sum.requires_grad_(), torch.zeros(n, requires_grad=True)]
    expected_dx, expected_dbias = compute_gradients(
        gelu.bias_gelu_reference(*inputs), inputs, dy.float()
    )
    assert_close(dx, expected_dx.to(dtype))
    assert_close(dbias, expected_dbias.to(dtype))


@FEW
@example(0, 5, torch.float32, 1, 0)
@given(st.integers(1, 5), st.sampled_from([1, 5, 75]), FLOATS, st.integers(1, 3), SEEDS)
def test_add_layer_norm_kernels_equal_reference(
    rows: int, n: int, dtype: torch.dtype, programs: int, seed: int
) -> None:
    # 75 numbers are 3 tiles, or 5 in float32.
    kernels = load_kernels("layer_norm_triton", MAX_TILE_BYTES=64, MIN_ROWS=2)
    x, residual, dh, dy = make_random(seed, 4, rows, n, dtype=dtype)
    weight, bias = make_random(seed + 1, 2, n, dtype=dtype)
    h, y, moments = kernels.forward(x, residual, weight, bias, 1e-5)
    expected_h, _ = layer_norm.add_layer_norm_reference(x, residual, weight, bias)
    assert_close(h, expected_h, roundings=1)
    float64_inputs = [tensor.double().requires_grad_() for tensor in (h, weight, bias)]
    expected_y = torch.nn.functional.layer_norm(float64_inputs[0], (n,), *float64_inputs[1:])
    assert_close(y, expected_y.detach().to(dtype))
    actual = kernels.backward(dh, dy, h, weight, moments, limits=(programs, 0))
    dx, *parameter_gradients = compute_gradients(expected_y, float64_inputs, dy.double())
    expected = [dx + dh.double(), *parameter_gradients]
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        assert_close(gradient, expected_gradient.to(dtype), roundings=8)


class OutputInterceptor(TorchDispatchMode):
    """Records each operation with an `out` argument, and does not run it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs or "out" not in kwargs:
            return op(*args, **kwargs or {})
        self.seen.append((op, args, kwargs))
        return kwargs["out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_on_gpu_is_one_operation(dtype: torch.dtype) -> None:
    """Fake GPU tensors record the operation. It must not be replaced by another computation."""
    with FakeTensorMode(), OutputInterceptor() as recorder:
        main = torch.empty(4, 8, device="cuda")
        dy, x = (torch.empty(3, n, device="cuda", dtype=dtype) for n in (4, 8))
        assert weight_gradient.accumulate_(main, dy, x) is main
    ((op, (addend, a, b, result), kwargs),) = recorder.seen
    assert op is torch.ops.aten.addmm.dtype_out and result == torch.float32
    assert addend is main and kwargs == {"out": main}
    assert b is x and a.shape == (4, 3)


ROW_STRIDE = 2**30 + 16  # twice this overflows an int32


def make_distant_rows() -> Tensor:
    """Return three equal rows of 64 random numbers. In memory the rows are `ROW_STRIDE` apart.

    Most of the 8 GiB of virtual memory is never written.
    """
    storage = torch.from_numpy(np.zeros(4 * ROW_STRIDE + 64, np.uint16)).view(torch.bfloat16)
    x = storage.as_strided((3, 64), (ROW_STRIDE, 1), 2 * ROW_STRIDE)
    return x.copy_(make_random(0, 64))


def assert_rows_equal(*tensors: Tensor) -> None:
    for x in tensors:
        assert float(x[0].abs().sum()) > 0
        assert torch.equal(x, x[:1].expand_as(x))


def test_cross_entropy_kernels_use_64_bit_offsets() -> None:
    kernels, logits = load_kernels("cross_entropy_triton"), make_distant_rows()
    targets, dloss = torch.tensor([5, 5, 5]), torch.tensor(0.5)
    parts = kernels.compute_statistics(logits, targets, 0)
    assert_rows_equal(parts.t())
    assert_rows_equal(kernels.write_gradient_(logits, targets, parts.unsqueeze(0), dloss, 0, -1))


def test_gelu_and_layer_norm_kernels_use_64_bit_offsets() -> None:
    """The kernels get `ROW_STRIDE` as the number of columns, and read the first 64 of a row."""
    gelu_kernels, norm = load_kernels("gelu_triton"), load_kernels("layer_norm_triton")
    x, y, dx, dy = (make_distant_rows() for _ in range(4))
    vector, moments = make_random(1, 64).bfloat16(), torch.empty(2, 3)
    tile = {"ROWS": 4, "COLUMNS": 64}
    gelu_kernels.forward_kernel[(1, 1)](x, vector, y, 3, ROW_STRIDE, **tile)
    gelu_kernels.backward_kernel[(1, 1)](
        dy, x, vector, dx, torch.empty(64), 3, ROW_STRIDE, 4, **tile
    )
    assert_rows_equal(y, dx)
    norm.forward_kernel[(3,)](x, x, vector, vector, dx, y, moments, 3, ROW_STRIDE, 1e-5, COLUMNS=64)
    assert_rows_equal(dx, y, moments.t())
    sums = torch.from_numpy(np.zeros(ROW_STRIDE + 64, np.float32))
    norm.backward_kernel[(1, 1)](
        dy, dy, x, vector, moments, dx, sums, 3, ROW_STRIDE, 64, 3, TILES=1, COLUMNS=64, STAGES=1
    )
    assert_rows_equal(dx)


def test_cpu_tensors_use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not backend_choice.uses_triton(torch.zeros(1))
    monkeypatch.setenv(backend_choice.BACKEND_VARIABLE, "cuda")
    with pytest.raises(UsageError):
        backend_choice.uses_triton(torch.zeros(1))
