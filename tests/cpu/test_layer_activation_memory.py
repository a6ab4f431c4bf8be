"""Tests of the saved bytes of a transformer layer: terms of arXiv 2205.05198 and real storages.

The paper's layer, written in plain torch, saves exactly the terms of the paper. The layer of our
GPT differs only in listed terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from schedir.models.gpt import Layer
from schedir.models.gpt_config import GPTConfig
from schedir.models.language_model import ParameterPlacement
from schedir.models.parameter_init import LayerParameters
from schedir.predict.layer_activation_bytes import (
    ACTIVATION_TERMS,
    Recompute,
    activation_bytes_per_layer,
    compute_layer_terms,
)
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from tests.cpu.gloo_processes import run

SHAPES = [(48, 2, 64, 4), (32, 1, 32, 8), (16, 3, 96, 2)]  # s, b, h, a


class PaperLayer(nn.Module):
    """The layer of section 4.1 of the paper, with the operations of its figure."""

    def __init__(self, hidden: int, heads: int, recompute: Recompute = "none") -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2)])
        self.qkv = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(3)])
        self.proj, self.up = nn.Linear(hidden, hidden), nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1)
        return _apply_dropout(scores) @ v

    def layer(self, x: Tensor) -> Tensor:
        b, length, hidden = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            f(normed).view(b, length, self.heads, -1).transpose(1, 2).flatten(0, 1)
            for f in self.qkv
        )
        if self.recompute == "selective":
            heads = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            heads = self.core(q, k, v)
        heads = heads.view(b, self.heads, length, -1).transpose(1, 2).reshape(b, length, hidden)
        x = x + _apply_dropout(self.proj(heads))
        return x + _apply_dropout(self.down(F.gelu(self.up(self.norms[1](x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "full":
            y: Tensor = checkpoint(self.layer, x, use_reentrant=False)
            return y
        return self.layer(x)


def _apply_dropout(x: Tensor) -> Tensor:
    """Apply dropout with a mask of one byte per number, as on GPUs."""
    return torch.native_dropout(x, 0.1, True)[0]


def list_saved_bytes(layer: nn.Module, x: Tensor) -> list[int]:
    """Return the bytes of the storages that a layer saves, in the order of its operations."""
    parameter_addresses = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    del y
    return [size for address, size in storages.items() if address not in parameter_addresses]


STATISTICS = "mean and deviation"  # two numbers per token of a norm, which the paper omits
NORM = [STATISTICS, STATISTICS]
HALF_TERMS = {"Q": "Q and K", "K": "Q and K"}
# The saved tensors in the order of operations. Names are terms of the paper, or our own.
PAPER_TERMS = [
    "input of the first norm", *NORM, "input of Q, K and V", "Q", "K",
    "output of the softmax", "mask of its dropout", "V", "output of its dropout",
    "input of the projection", "mask of the dropout after attention",
    "input of the second norm", *NORM, "input of the first linear layer", "input of GELU",
    "input of the second linear layer", "mask of the dropout after the MLP",
]  # fmt: skip
GPT_TERMS = [
    "input of the first norm", *NORM, "input of Q, K and V", "Q, K and V", "sums of the softmax",
    "input of the projection", "input of the second norm", *NORM,
    "input of the first linear layer", "input of GELU", "input of the second linear layer",
]  # fmt: skip


def compute_expected_bytes(
    names: list[str], s: int, b: int, h: int, a: int, tp: int = 1, *, sequence: bool = False
) -> list[float]:
    """Return the bytes of each term, by the formula of the paper or by our own."""
    terms = compute_layer_terms(s, b, h, a, tp, sequence_parallel=sequence)
    terms |= {half: terms[whole] / 2 for half, whole in HALF_TERMS.items()}
    terms["Q, K and V"] = terms["Q and K"] + terms["V"]  # one storage
    terms[STATISTICS] = 2 * s * b / (tp if sequence else 1)
    terms["sums of the softmax"] = 4 * a * b * s / tp  # float32, one per row of scores
    return [terms[name] for name in names]


def measure_gpt_layer(
    s: int, b: int, h: int, a: int, tp: Any = None, *, sequence: bool = False
) -> list[int]:
    config = GPTConfig(vocab=8, layers=1, hidden=h, heads=a, context=s)
    placement: ParameterPlacement = {"device": "cpu", "dtype": torch.bfloat16}
    weights = LayerParameters.from_config(config, 0, tp, placement, sequence_parallel=sequence)
    return list_saved_bytes(
        Layer(config, 0, weights), _make_input(s // (tp.size() if sequence else 1), b, h)
    )


def _make_input(s: int, b: int, h: int) -> Tensor:
    return torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_paper_layer_saves_each_term_of_paper(s: int, b: int, h: int, a: int) -> None:
    assert {*PAPER_TERMS} - {*NORM, *HALF_TERMS} | {*HALF_TERMS.values()} == {
        t.name for t in ACTIVATION_TERMS
    }
    saved = list_saved_bytes(PaperLayer(h, a).bfloat16(), _make_input(s, b, h))
    assert saved == compute_expected_bytes(PAPER_TERMS, s, b, h, a)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_recomputation_saves_bytes_of_formula(
    s: int, b: int, h: int, a: int, recompute: Recompute
) -> None:
    """The layer also saves two numbers per token of each norm."""
    x, layer = _make_input(s, b, h).detach(), PaperLayer(h, a, recompute).bfloat16()
    loss: Callable[[Tensor, Tensor], Tensor] = lambda y, _: y.sum()  # noqa: E731
    boundary = Boundary((b, s, h), torch.bfloat16)
    sizes = measure_sizes([nn.Identity(), layer], x, x, loss=loss, boundary=boundary)
    statistics = 0 if recompute == "full" else 4 * 2 * s * b
    expected = activation_bytes_per_layer(s, b, h, a, recompute=recompute) + statistics
    assert sizes.for_stages("saved", 2)[1] == expected


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_gpt_layer_differs_from_paper_in_listed_terms(s: int, b: int, h: int, a: int) -> None:
    """Our layer saves no term as^2b and no masks.

    It saves the sums of the softmax, and the statistics of norms for each token.
    """
    assert measure_gpt_layer(s, b, h, a) == compute_expected_bytes(GPT_TERMS, s, b, h, a)
    masks = sum(
        size for name, size in compute_layer_terms(s, b, h, a).items() if "mask of the" in name
    )
    paper_bytes = activation_bytes_per_layer(s, b, h, a, recompute="selective")
    assert sum(measure_gpt_layer(s, b, h, a)) == paper_bytes - masks + 8 * s * b + 4 * a * b * s


def _measure_tensor_parallel_layers(rank: int) -> list[list[list[int]]]:
    group = dist.group.WORLD
    return [
        [measure_gpt_layer(*shape, group, sequence=sequence) for shape in SHAPES]
        for sequence in (False, True)
    ]


def test_tensor_parallel_ranks_save_bytes_of_paper() -> None:
    """Each of two ranks has half of everything except norms and their outputs (equation 2).

    With sequence parallelism it has half of everything (equation 4).
    """
    for measured in run(_measure_tensor_parallel_layers, 2):
        for sequence, sizes in zip((False, True), measured, strict=True):
            assert sizes == [
                compute_expected_bytes(GPT_TERMS, *shape, tp=2, sequence=sequence)
                for shape in SHAPES
            ]
    for shape in SHAPES:
        half = sum(compute_expected_bytes(GPT_TERMS, *shape)) / 2
        assert sum(compute_expected_bytes(GPT_TERMS, *shape, tp=2, sequence=True)) == half
        assert sum(compute_expected_bytes(GPT_TERMS, *shape, tp=2)) > half
