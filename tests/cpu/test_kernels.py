"""Every Triton kernel, interpreted on the CPU, against its plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")  # not there on every system

from schedir.errors import UsageError
from schedir.kernels import boundary, choice, cross_entropy, gelu, layer_norm, weight_gradient
from tests.cpu.interpreted import interpreting, load

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 99)
FEW = settings(max_examples=12)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    with interpreting():
        yield
    torch.use_deterministic_algorithms(before)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, want: Tensor, *, roundings: float = 4) -> None:
    """Equal but for a few roundings of the type; the interpreter's are cut off, so twice as far."""
    assert got.shape == want.shape and got.dtype == want.dtype
    most = 2 * roundings * torch.finfo(got.dtype).eps * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got, want, rtol=0, atol=most)


@FEW
@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([1, 3, 4]), FLOATS, SEEDS)
def test_cross_entropy(n: int, k: int, t: int, dtype: torch.dtype, seed: int) -> None:
    kernels, ignore = load("cross_entropy_triton", MOST=64), -1  # a row takes several turns
    targets = (t * k * random(seed, n).sigmoid()).long()
    targets[random(seed + 1, n) > 0.5] = ignore
    shards = list(3 * random(seed, t, n, k, dtype=dtype))
    shards[-1][:, k // 2 :] = float("-inf")  # padding, for k = 1 all of a shard
    parts = []
    for rank, logits in enumerate(shards):
        part = kernels.statistics(logits, targets, rank * k)
        want = cross_entropy.statistics_reference(logits, targets, rank * k)
        torch.testing.assert_close(part, want, rtol=1e-6, atol=1e-6)
        parts.append(part)
    everyone, dloss = torch.stack(parts), torch.tensor(0.5)
    if bool((everyone[:, cross_entropy.TOP].amax(0) == float("-inf")).any()):
        return  # nothing but padding, anywhere: there is no such head
    for rank, logits in enumerate(shards):
        rest = targets, everyone, dloss, rank * k, ignore
        want = cross_entropy.gradient_reference_(logits.clone(), *rest)
        assert_near(kernels.gradient_(logits, *rest), want)


def test_losses_are_torchs() -> None:
    logits, targets = random(0, 5, 12), torch.tensor([0, 3, -1, 11, 7])
    parts = [
        cross_entropy.statistics_reference(part, targets, 4 * rank)
        for rank, part in enumerate(logits.chunk(3, dim=1))
    ]
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(cross_entropy.losses(torch.stack(parts), targets, -1), want)


@FEW
@given(st.integers(1, 9), st.sampled_from([1, 511, 600]), FLOATS, st.integers(1, 5), SEEDS)
def test_bias_gelu(rows: int, n: int, dtype: torch.dtype, programs: int, seed: int) -> None:
    kernels = load("gelu_triton")
    x, bias, dy = (
        random(seed + i, *s, dtype=dtype) for i, s in enumerate([(rows, n), (n,), (1, n)])
    )
    dy = dy.expand(rows, n)  # of stride 0, as the gradient of a sum is
    wide = x.float() + bias.float()  # the reference rounds x + bias, the kernel does not
    want = gelu.bias_gelu_reference(wide, torch.zeros(n)).to(dtype)
    assert_near(kernels.forward(x, bias), want)
    dx, dbias = kernels.backward(dy, x, bias, programs)
    want_dx, want_dbias = gelu.backward_reference(dy.float(), wide, torch.zeros(n))
    assert_near(dx, want_dx.to(dtype))
    assert_near(dbias, want_dbias.to(dtype))


@FEW
@given(st.integers(1, 7), st.sampled_from([1, 5, 300]), FLOATS, st.integers(1, 4), SEEDS)
def test_add_layer_norm(rows: int, n: int, dtype: torch.dtype, programs: int, seed: int) -> None:
    kernels = load("layer_norm_triton")
    x, residual, dh, dy = random(seed, 4, rows, n, dtype=dtype)
    weight, bias = random(seed + 1, 2, n, dtype=dtype)
    h, y, moments = kernels.forward(x, residual, weight, bias, 1e-5)
    want_h, _ = layer_norm.add_layer_norm_reference(x, residual, weight, bias)
    assert_near(h, want_h, roundings=1)
    wide = [tensor.double() for tensor in (h, weight, bias)]
    want_y = torch.nn.functional.layer_norm(wide[0], (n,), *wide[1:])
    assert_near(y, want_y.to(dtype))
    got = kernels.backward(dh, dy, h, weight, moments, programs)
    want = layer_norm.backward_reference(dh.double(), dy.double(), *wide)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other.to(dtype), roundings=8)


LAYOUTS = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),  # more take the reference
    st.permutations(range(4)),
    st.integers(1, 2),
)


def strided(seed: int, layout: Any, times: int = 1) -> Tensor:
    """A tensor of any order of dimensions, perhaps with gaps; `times` divides its size."""
    sizes, order, gap = layout
    sizes = [times * sizes[0], *sizes[1:], *[1] * (4 - len(sizes))]
    return random(seed, *sizes[:-1], gap * sizes[-1])[..., ::gap].permute(*order)


@FEW
@given(LAYOUTS, st.sampled_from([1, 2, 3]), st.integers(0, 2), st.booleans(), SEEDS)
def test_pack(layout: Any, t: int, rank: int, cast: bool, seed: int) -> None:
    value, rank = strided(seed, layout, times=t), rank % t
    out = torch.empty(value.numel() // t, dtype=torch.float16 if cast else torch.float32)
    want = boundary.pack_reference(value, t, rank, torch.empty_like(out))
    assert load("boundary_triton").pack(value, boundary.layout(value), rank, out) is out
    assert torch.equal(out, want)
    assert torch.equal(want, value.flatten()[rank * len(out) :][: len(out)].to(out.dtype))


@FEW
@given(st.integers(1, 130), st.integers(1, 140), st.integers(1, 140), FLOATS, SEEDS)
def test_weight_gradient(tokens: int, k: int, n: int, dtype: torch.dtype, seed: int) -> None:
    kernels, main = load("weight_gradient_triton"), random(seed, k, n)
    dy, x = random(seed + 1, tokens, k, dtype=dtype), random(seed + 2, tokens, n, dtype=dtype)
    want = weight_gradient.accumulate_reference_(main.clone(), dy, x)
    torch.testing.assert_close(kernels.accumulate_(main, dy, x), want, rtol=1e-5, atol=1e-4)


def test_a_cpu_tensor_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choice.on_triton(torch.zeros(1))
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(UsageError):
        choice.on_triton(torch.zeros(1))
