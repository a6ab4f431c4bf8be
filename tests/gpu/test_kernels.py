"""Tests of the kernel of every operation of schedir.kernels on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.kernels import backend_choice, cross_entropy, weight_gradient
from schedir.kernels.embedding_gradient import accumulate_rows_
from schedir.kernels.gelu import bias_gelu
from schedir.kernels.layer_norm import add_layer_norm
from schedir.models import gpt
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.parameters.mixed_precision import use_float32_gradients
from schedir.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy
from tests.cpu.tiny_stages import gpt_stages, make_batch

pytestmark = pytest.mark.usefixtures("real_gpu")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def fill_empty_with_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that numbers no kernel wrote fail the test."""
    pytest.importorskip("triton")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    assert backend_choice.uses_triton(x)
    return x


def assert_near(
    got: Tensor | None, want: Tensor | None, dtype: torch.dtype, min_limit: float = 1e-5
) -> None:
    """Assert that the relative error is at most a rounding to the dtype, or of float32 sums."""
    assert got is not None and want is not None and got.shape == want.shape
    got, want = got.detach(), want.detach()
    error = (got.double() - want).norm() / want.norm()
    assert float(error) <= max(min_limit, float(torch.finfo(dtype).eps))


class RecordOperations(TorchDispatchMode):
    """Records which operations have run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[Any] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(op)
        return op(*args, **kwargs or {})


def make_leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


@FLOATS
@pytest.mark.parametrize(("n", "k"), [(64, 6400), (3, 50257), (1, 1)])
def test_cross_entropy_matches_float64(n: int, k: int, dtype: torch.dtype) -> None:
    logits = 3 * make_random(n, k, dtype=dtype)
    targets = torch.arange(n, device="cuda") * 97 % k
    targets[::7] = -1
    (ours,), (expected_logits,) = make_leaves(logits), make_leaves(logits, dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(ours, targets)
    expected = F.cross_entropy(expected_logits, targets, ignore_index=-1, reduction="sum")
    torch.autograd.backward(0.5 * loss)
    torch.autograd.backward(0.5 * expected)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    if k > 1:
        assert_near(ours.grad, expected_logits.grad, dtype)


@FLOATS
@pytest.mark.parametrize(("rows", "n"), [(2048, 4096), (5, 1000)])
def test_bias_gelu_matches_float64(rows: int, n: int, dtype: torch.dtype) -> None:
    inputs = make_random(rows, n, dtype=dtype), make_random(n, dtype=dtype, seed=1)
    dy = make_random(rows, n, dtype=dtype, seed=2)
    ours, expected_inputs = make_leaves(*inputs), make_leaves(*inputs, dtype=torch.float64)
    y, expected = bias_gelu(*ours), F.gelu(expected_inputs[0] + expected_inputs[1])
    torch.autograd.backward(y, dy)
    torch.autograd.backward(expected, dy.double())
    assert_near(y, expected, dtype)
    for actual, wanted in zip(ours, expected_inputs, strict=True):
        assert_near(actual.grad, wanted.grad, dtype)


@FLOATS
@pytest.mark.parametrize(("rows", "n"), [(2048, 12288), (2048, 8192), (2048, 1024), (5, 1000)])
def test_add_layer_norm_matches_float64(rows: int, n: int, dtype: torch.dtype) -> None:
    wide = [make_random(rows, n, dtype=dtype, seed=s) for s in range(4)]
    inputs = [*wide[:2], make_random(n, dtype=dtype, seed=4), make_random(n, dtype=dtype, seed=5)]
    ours, expected_inputs = make_leaves(*inputs), make_leaves(*inputs, dtype=torch.float64)
    h, y = add_layer_norm(ours[0], ours[1], ours[2], ours[3])
    expected_h = expected_inputs[0] + expected_inputs[1]
    expected = F.layer_norm(expected_h, (n,), expected_inputs[2], expected_inputs[3])
    torch.autograd.backward((h, y), (wide[2], wide[3]))
    torch.autograd.backward((expected_h, expected), (wide[2].double(), wide[3].double()))
    # The kernel normalises the sum as stored, which the backward uses too. This is 2 roundings.
    grads = [(a.grad, b.grad) for a, b in zip(ours, expected_inputs, strict=True)]
    for actual, wanted in [(h, expected_h), (y, expected), *grads]:
        assert_near(actual, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "k", "n"), [(2048, 1024, 512), (100, 72, 40)])
def test_weight_gradient_matches_float64(tokens: int, k: int, n: int, dtype: torch.dtype) -> None:
    dy, x = make_random(tokens, k, dtype=dtype), make_random(tokens, n, dtype=dtype, seed=1)
    main = make_random(k, n, dtype=torch.float32, seed=2)
    expected = main.double() + dy.double().t() @ x.double()
    with RecordOperations() as operations:
        weight_gradient.accumulate_(main, dy, x)
    # Tensor cores truncate to float32 at each of some hundred additions.
    assert_near(main, expected, torch.float32, min_limit=3e-5)
    assert torch.ops.aten.addmm.dtype_out in operations.names
    assert not {torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor} & operations.names


def test_stage_accumulates_weight_gradients_in_gemm() -> None:
    """Each GEMM accumulates into its weight gradient. No GEMM writes a 16-bit product first."""
    stage, (inputs, targets, _) = gpt_stages(1)[0].to("cuda", torch.bfloat16), make_batch(1)
    use_float32_gradients(stage)
    for p in stage.parameters():
        p.grad = torch.zeros_like(p, dtype=torch.float32)
    tape = DeferredGradients()
    with defer_weight_gradients(tape):
        gpt.loss(stage(inputs[0].cuda()), targets[0].cuda()).backward()
    assert len(tape) > 4
    with RecordOperations() as operations:
        tape.run()
    assert torch.ops.aten.addmm.dtype_out in operations.names
    assert torch.ops.aten.mm.default not in operations.names


def test_cross_entropy_of_more_logits_than_int32() -> None:
    """With 4.3 GB of logits, the last tokens have the same results as alone."""
    k, num_last = 151_936, 8
    n = 2**31 // k + num_last
    if torch.cuda.mem_get_info()[0] < 3 * 2 * n * k:
        pytest.skip("needs 13 GB of free memory")
    logits = torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_()
    targets = torch.arange(n, device="cuda") * 97 % k
    dloss = torch.ones((), device="cuda")
    last = logits[-num_last:].clone()
    statistics = cross_entropy.compute_statistics(logits, targets, 0)
    alone = cross_entropy.compute_statistics_reference(last, targets[-num_last:], 0)
    torch.testing.assert_close(statistics[:, -num_last:], alone, rtol=1e-5, atol=1e-5)
    cross_entropy.write_gradient_(logits, targets, statistics.unsqueeze(0), dloss, 0, -1)
    arguments = targets[-num_last:], alone.unsqueeze(0), dloss, 0, -1
    expected = cross_entropy.write_gradient_reference_(last.double(), *arguments)
    assert_near(logits[-num_last:], expected, torch.bfloat16)


def test_cuda_graph_replays_kernels() -> None:
    """No kernel needs the host, so a captured graph gives the right results for other inputs."""
    n = 4096
    x, residual, dh, dy = (make_random(64, n, dtype=torch.bfloat16, seed=s) for s in range(4))
    weight, bias = (make_random(n, dtype=torch.bfloat16, seed=s) for s in (4, 5))
    targets = torch.arange(64, device="cuda") * 7 % n

    def run_kernels() -> list[Tensor]:
        inputs = make_leaves(x, residual, weight, bias)
        h, y = add_layer_norm(inputs[0], inputs[1], inputs[2], inputs[3])
        z = bias_gelu(y, inputs[3])
        loss = vocab_parallel_cross_entropy(2 * z, targets)
        torch.autograd.backward((h, z, loss), (dh, dy, torch.ones_like(loss)))
        return [h.detach(), loss.detach(), *(t.grad for t in inputs if t.grad is not None)]

    run_kernels()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_kernels()
    x.copy_(make_random(64, n, dtype=torch.bfloat16, seed=9))
    graph.replay()
    for replayed, recomputed in zip(captured, run_kernels(), strict=True):
        assert torch.equal(replayed, recomputed)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("tokens", [2048, 8192])  # torch has two ways to sum equal indices
def test_accumulate_rows_is_deterministic(tokens: int) -> None:
    torch.use_deterministic_algorithms(False)  # torch then uses atomics
    rows = torch.arange(tokens, device="cuda") ** 2 % 1000
    dy = make_random(tokens, 256, dtype=torch.bfloat16)
    before = make_random(1000, 256, dtype=torch.float32, seed=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = [accumulate_rows_(before.clone(), rows, dy, padding_index=1) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(sums[0], other_sum) for other_sum in sums)
    counted = dy.double().masked_fill((rows == 1).unsqueeze(-1), 0)
    assert_near(sums[0], before.double().index_add(0, rows, counted), torch.float32)
