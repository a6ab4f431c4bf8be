"""Transformer blocks of bert.py and encoder_decoder.py, each with a residual connection.

Tensor-parallel ranks shard heads and feed-forward width as in Megatron-LM (arXiv 1909.08053,
section 3). Masks are bool (b, S), and true for tokens to which other tokens can attend.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedir.kernels.gelu import bias_gelu
from schedir.models.language_model import ParameterPlacement
from schedir.models.parameter_init import LayerParameters

PARAMETER_PLACEMENT: Final[ParameterPlacement] = {"device": "cpu", "dtype": torch.float32}


class SelfAttention(nn.Module):
    """Return x + self-attention(norm(x)), (b, T, hidden)."""

    def __init__(self, weights: LayerParameters, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.width, self.causal = weights.hidden // heads, causal
        self.norm = weights.make_norm()
        # Row order: head, then q, k and v, then width. So the slice of a rank has complete heads.
        self.qkv = weights.make_column_linear("qkv", 3 * weights.hidden)
        self.proj = weights.make_row_linear("proj", weights.hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = _split_heads(self.qkv(self.norm(x)), 3, self.width)
        x = x + self.proj(_attend(q, k, v, mask, self.causal))
        return x


class CrossAttention(nn.Module):
    """Return x + attention of norm(x), (b, T, hidden), to the memory, (b, S, hidden)."""

    def __init__(self, weights: LayerParameters, heads: int) -> None:
        super().__init__()
        self.width = weights.hidden // heads
        self.norm = weights.make_norm()
        self.q = weights.make_column_linear("q", weights.hidden)
        # Row order: head, then k and v, then width.
        self.kv = weights.make_column_linear("kv", 2 * weights.hidden)
        self.proj = weights.make_row_linear("proj", weights.hidden)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        (q,) = _split_heads(self.q(self.norm(x)), 1, self.width)
        k, v = _split_heads(self.kv(memory), 2, self.width)
        x = x + self.proj(_attend(q, k, v, mask, False))
        return x


class FeedForward(nn.Module):
    """Return x + down(gelu(up(norm(x)))), (b, T, hidden). The inner width is 4 * hidden."""

    def __init__(self, weights: LayerParameters) -> None:
        super().__init__()
        self.norm = weights.make_norm()
        self.up = weights.make_column_linear("up", 4 * weights.hidden)
        self.down = weights.make_row_linear("down", 4 * weights.hidden)

    def forward(self, x: Tensor) -> Tensor:
        assert self.up.bias is not None
        x = x + self.down(bias_gelu(self.up.project(self.norm(x)), self.up.bias))
        return x


def _split_heads(x: Tensor, tensors: int, width: int) -> tuple[Tensor, ...]:
    """Split (b, T, heads * tensors * width) into tensors of shape (b, heads, T, width)."""
    stacked = x.view(*x.shape[:2], -1, tensors, width).permute(3, 0, 2, 1, 4)
    return tuple(stacked.unbind(0))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the outputs of the attention heads, (b, T, heads * width)."""
    attention_mask = None if mask is None else mask[:, None, None, :]
    outputs = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal)
    return outputs.transpose(1, 2).flatten(2)
