"""Tests of tensor-parallel layers on real ranks against the same layers on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir.errors import UsageError
from schedir.runtime.parameters.gradient_buffers import is_tp_sharded
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import get_shard_dim, shard
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    fused_cross_entropy,
    shard_vocab,
    vocab_parallel_cross_entropy,
)
from tests.cpu.gloo_processes import run
from tests.cpu.largest_tensor import TensorSizeRecorder

torch.set_num_threads(1)


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def get_gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@given(
    vocab=st.integers(1, 9),
    targets=st.lists(st.integers(-1, 8), min_size=1, max_size=6),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_equals_torch(
    vocab: int, targets: list[int], scale: float, seed: int
) -> None:
    target = torch.tensor(targets).clamp(max=vocab - 1)
    ours = (scale * draw_normal(len(targets), vocab, seed=seed)).requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, target)
    want = F.cross_entropy(plain, target, ignore_index=-1, reduction="sum")
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, want)
    torch.autograd.backward(3 * loss)
    torch.autograd.backward(3 * want)
    torch.testing.assert_close(get_gradient(ours), get_gradient(plain))


CROSS_ENTROPIES = {"plain": vocab_parallel_cross_entropy, "fused": fused_cross_entropy}


def run_sharded_cross_entropy(
    rank: int, vocab: int, dtype: torch.dtype, kind: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of the hidden states, for a head divided among all ranks."""
    group = dist.group.WORLD
    head = VocabParallelHead(shard_vocab(draw_normal(vocab, 6).to(dtype), group), vocab, group)
    x = draw_normal(3, 5, 6, seed=1).to(dtype).requires_grad_()
    targets = torch.arange(15).view(3, 5) % (vocab + 1) - 1
    loss = CROSS_ENTROPIES[kind](head(x), targets, group)
    torch.autograd.backward(loss)
    return loss.detach(), get_gradient(x)


@pytest.mark.parametrize(
    ("ranks", "vocab", "kind"),
    [(2, 8, "plain"), (3, 10, "plain"), (4, 5, "plain"), (3, 10, "fused"), (4, 5, "fused")],
)
def test_sharded_cross_entropy_handles_padding_and_ignored_targets(
    ranks: int, vocab: int, kind: str
) -> None:
    w, x = draw_normal(vocab, 6), draw_normal(3, 5, 6, seed=1).requires_grad_()
    targets = torch.arange(15) % (vocab + 1) - 1
    want = F.cross_entropy((x @ w.t()).flatten(0, 1), targets, ignore_index=-1, reduction="sum")
    torch.autograd.backward(want)
    results = run(run_sharded_cross_entropy, ranks, vocab, torch.float32, kind)
    for loss, dx in results:
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(dx, get_gradient(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(loss, results[0][0]) and torch.equal(dx, results[0][1])


def test_fused_cross_entropy_overwrites_only_logits() -> None:
    x, targets = draw_normal(3, 4).requires_grad_(), torch.tensor([0, -1, 3])
    before, logits = x.detach().clone(), 2 * x
    loss = fused_cross_entropy(logits, targets)
    torch.autograd.backward(loss, retain_graph=True)
    torch.testing.assert_close(get_gradient(x), 2 * logits)
    with pytest.raises(RuntimeError):
        torch.autograd.backward(loss)
    torch.autograd.backward(fused_cross_entropy(x, targets))  # a leaf tensor is copied
    assert torch.equal(x, before)


def test_low_precision_logits_give_a_float32_loss() -> None:
    ((loss, dx), *_) = run(run_sharded_cross_entropy, 2, 8, torch.bfloat16)
    assert loss.dtype == torch.float32 and dx.dtype == torch.bfloat16


def run_layers(rank: int) -> dict[str, tuple[Tensor, int | None]]:
    """Return outputs and gradients of three layers in a row, with their shard dimensions."""
    group = dist.group.WORLD
    net = nn.Sequential(
        VocabParallelEmbedding(shard_vocab(draw_normal(7, 4), group), group),
        ColumnParallelLinear(draw_normal(6, 4, seed=1), draw_normal(6, seed=2), group),
        RowParallelLinear(draw_normal(5, 6, seed=3), draw_normal(5, seed=4), group),
    )
    y = net(torch.arange(7).repeat(2, 1))
    torch.autograd.backward(y, torch.ones_like(y))
    got: dict[str, tuple[Tensor, int | None]] = {"output": (y.detach(), None)}
    return got | {name: (get_gradient(p), get_shard_dim(p)) for name, p in net.named_parameters()}


def test_parallel_layers_equal_plain_layers() -> None:
    table, up, down = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 5)
    net = nn.Sequential(table, up, down)
    for seed, p in enumerate(net.parameters()):
        p.data = draw_normal(*p.shape, seed=seed)
    y = net(torch.arange(7).repeat(2, 1))
    torch.autograd.backward(y, torch.ones_like(y))
    expected = {name: get_gradient(p) for name, p in net.named_parameters()}
    expected["output"] = y.detach()

    results = run(run_layers, 2)
    shard_dims = {"0.weight": 0, "1.weight": 0, "1.bias": 0, "2.weight": 1}
    for name, tensor in expected.items():
        shards = [result[name][0] for result in results]
        assert results[0][name][1] == shard_dims.get(name)
        if name in shard_dims:
            shards = [torch.cat(shards, shard_dims[name])]
        for full in shards:
            torch.testing.assert_close(full[: len(tensor)], tensor, rtol=1e-5, atol=1e-5)
        assert not shards[0][len(tensor) :].any()  # padding has no gradient


def count_output_sized_tensors(rank: int) -> list[int]:
    """Return how many tensors of its output's size each layer creates in its forward."""
    group, counts = dist.group.WORLD, []
    table = shard_vocab(draw_normal(7, 4), group)
    layers = [
        (VocabParallelEmbedding(table, group), torch.arange(70) % 7),
        (VocabParallelHead(table, 7, group), draw_normal(70, 4)),
        (RowParallelLinear(draw_normal(5, 6), draw_normal(5), group), draw_normal(70, 3)),
    ]
    for layer, x in layers:
        with TensorSizeRecorder() as largest:
            y = layer(x)
        counts.append(largest.sizes.count(y.numel()))
    return counts


def test_layer_outputs_are_not_copied() -> None:
    assert run(count_output_sized_tensors, 2) == [[1, 1, 2]] * 2  # a bias needs one more


def shard_unevenly(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        shard(torch.zeros(3, 2), 0, dist.group.WORLD)
    assert not is_tp_sharded(nn.Parameter(torch.zeros(1)))
    assert is_tp_sharded(shard(torch.zeros(3, 2), 1, dist.group.WORLD))
    return type(error.value).__name__


def test_uneven_shard_is_refused() -> None:
    assert run(shard_unevenly, 2) == ["UsageError"] * 2
