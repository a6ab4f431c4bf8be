"""Tests of every Triton kernel, interpreted on the CPU, against its plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.cpu.triton_interpreter import interpreting, load

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 99)
FEW = settings(max_examples=12)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    with interpreting():
        yield
    torch.use_deterministic_algorithms(before)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, want: Tensor, *, roundings: float = 4) -> None:
    """Assert equality up to a few roundings of the dtype.

    The interpreter truncates instead of rounding, which doubles the error.
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    most = 2 * roundings * torch.finfo(got.dtype).eps * max([1.0, *want.abs().flatten().tolist()])
    torch.testing.assert_close(got, want, rtol=0, atol=most)


@FEW
@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([1, 3, 4]), FLOATS, SEEDS)
def test_cross_entropy(n: int, k: int, t: int, dtype: torch.dtype, seed: int) -> None:
    kernels, ignore = (
        load("cross_entropy_triton", MAX_BLOCK_COLUMNS=64),
        -1,
    )  # a row takes several iterations
    targets = (t * k * random(seed, n).sigmoid()).long()
    targets[random(seed + 1, n) > 0.5] = ignore
    shards = list(3 * random(seed, t, n, k, dtype=dtype))
    shards[-1][:, k // 2 :] = float("-inf")  # padding, which for k = 1 is the whole shard
    parts = []
    for rank, logits in enumerate(shards):
        part = kernels.compute_statistics(logits, targets, rank * k)
        want = cross_entropy.compute_statistics_reference(logits, targets, rank * k)
        torch.testing.assert_close(part, want, rtol=1e-6, atol=1e-6)
        parts.append(part)
    everyone, dloss = torch.stack(parts), torch.tensor(0.5)
    if bool((everyone[:, cross_entropy.MAXIMUM].amax(0) == float("-inf")).any()):
        return  # only padding on every rank, which no head has
    for rank, logits in enumerate(shards):
        rest = targets, everyone, dloss, rank * k, ignore
        want = cross_entropy.write_gradient_reference_(logits.clone(), *rest)
        assert_near(kernels.write_gradient_(logits, *rest), want)


def test_losses_are_torchs() -> None:
    logits, targets = random(0, 5, 12), torch.tensor([0, 3, -1, 11, 7])
    parts = [
        cross_entropy.compute_statistics_reference(part, targets, 4 * rank)
        for rank, part in enumerate(logits.chunk(3, dim=1))
    ]
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(cross_entropy.compute_losses(torch.stack(parts), targets, -1), want)


@FEW
@example(0, 5, torch.float32, 1, 0)
@given(st.integers(1, 9), st.sampled_from([1, 511, 600]), FLOATS, st.integers(1, 5), SEEDS)
def test_bias_gelu(rows: int, n: int, dtype: torch.dtype, programs: int, seed: int) -> None:
    kernels = load("gelu_triton")
    x, bias, dy = (
        random(seed + i, *s, dtype=dtype) for i, s in enumerate([(rows, n), (n,), (1, n)])
    )
    dy = dy.expand(rows, n)  # of stride 0, like the gradient of a sum
    wide = x.float() + bias.float()  # the reference rounds x + bias, the kernel does not
    want = gelu.bias_gelu_reference(wide, torch.zeros(n)).to(dtype)
    assert_near(kernels.forward(x, bias), want)
    dx, dbias = kernels.backward(dy, x, bias, programs)
    want_dx, want_dbias = gelu.backward_reference(dy.float(), wide, torch.zeros(n))
    assert_near(dx, want_dx.to(dtype))
    assert_near(dbias, want_dbias.to(dtype))


@FEW
@example(0, 5, torch.float32, 1, 0)
@given(st.integers(1, 7), st.sampled_from([1, 5, 300]), FLOATS, st.integers(1, 4), SEEDS)
def test_add_layer_norm(rows: int, n: int, dtype: torch.dtype, programs: int, seed: int) -> None:
    # 300 numbers are 3 tiles, or 5 in float32.
    kernels = load("layer_norm_triton", MAX_TILE_BYTES=256, MIN_ROWS=2)
    x, residual, dh, dy = random(seed, 4, rows, n, dtype=dtype)
    weight, bias = random(seed + 1, 2, n, dtype=dtype)
    h, y, moments = kernels.forward(x, residual, weight, bias, 1e-5)
    want_h, _ = layer_norm.add_layer_norm_reference(x, residual, weight, bias)
    assert_near(h, want_h, roundings=1)
    wide = [tensor.double() for tensor in (h, weight, bias)]
    want_y = torch.nn.functional.layer_norm(wide[0], (n,), *wide[1:])
    assert_near(y, want_y.to(dtype))
    got = kernels.backward(dh, dy, h, weight, moments, limits=(programs, 0))
    want = layer_norm.backward_reference(dh.double(), dy.double(), *wide)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other.to(dtype), roundings=8)


class Intercept(TorchDispatchMode):
    """Records every operation, and does not run those that write a result."""

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
def test_weight_gradients_on_a_gpu_are_one_product(dtype: torch.dtype) -> None:
    """Fake tensors of a GPU show that no other computation is chosen silently."""
    with FakeTensorMode(), Intercept() as ran:
        main = torch.empty(4, 8, device="cuda")
        dy, x = (torch.empty(3, n, device="cuda", dtype=dtype) for n in (4, 8))
        assert weight_gradient.accumulate_(main, dy, x) is main
    ((op, (addend, a, b, result), kwargs),) = ran.seen
    assert op is torch.ops.aten.addmm.dtype_out and result == torch.float32
    assert addend is main and kwargs == {"out": main}
    assert b is x and a.shape == (4, 3)


FAR = 2**30 + 16  # twice this overflows an int32


def far() -> Tensor:
    """Return three rows of 64 random numbers that are FAR apart in memory.

    Of the 8 GiB of virtual memory hardly any is ever touched.
    """
    room = torch.from_numpy(np.zeros(4 * FAR + 64, np.uint16)).view(torch.bfloat16)
    x = room.as_strided((3, 64), (FAR, 1), 2 * FAR)
    return x.copy_(random(0, 64))


def assert_rows_alike(*tensors: Tensor) -> None:
    for x in tensors:
        assert float(x[0].abs().sum()) > 0
        assert torch.equal(x, x[:1].expand_as(x))


def test_logits_past_an_int32() -> None:
    kernels, logits = load("cross_entropy_triton"), far()
    targets, dloss = torch.tensor([5, 5, 5]), torch.tensor(0.5)
    parts = kernels.compute_statistics(logits, targets, 0)
    assert_rows_alike(parts.t())
    assert_rows_alike(kernels.write_gradient_(logits, targets, parts.unsqueeze(0), dloss, 0, -1))


def test_rows_past_an_int32() -> None:
    """Kernels of contiguous rows are told that a row has FAR numbers, and read the first 64."""
    gelu_kernels, norm = load("gelu_triton"), load("layer_norm_triton")
    x, y, dx, dy = (far() for _ in range(4))
    vector, moments = random(1, 64).bfloat16(), torch.empty(2, 3)
    tile = {"ROWS": 4, "COLUMNS": 64}
    gelu_kernels.forward_kernel[(1, 1)](x, vector, y, 3, FAR, **tile)
    gelu_kernels.backward_kernel[(1, 1)](dy, x, vector, dx, torch.empty(64), 3, FAR, 4, **tile)
    assert_rows_alike(y, dx)
    norm.forward_kernel[(3,)](x, x, vector, vector, dx, y, moments, 3, FAR, 1e-5, COLUMNS=64)
    assert_rows_alike(dx, y, moments.t())
    sums = torch.from_numpy(np.zeros(FAR + 64, np.float32))
    norm.backward_kernel[(1, 1)](
        dy, dy, x, vector, moments, dx, sums, 3, FAR, 64, 3, TILES=1, COLUMNS=64, STAGES=1
    )
    assert_rows_alike(dx)


def test_a_cpu_tensor_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not backend_choice.uses_triton(torch.zeros(1))
    monkeypatch.setenv(backend_choice.BACKEND_VARIABLE, "cuda")
    with pytest.raises(UsageError):
        backend_choice.uses_triton(torch.zeros(1))
