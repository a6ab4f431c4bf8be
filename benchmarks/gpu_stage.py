"""One stage on a GPU: the rate at which it runs, and the one that its shapes allow."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedir.kernels.weight_gradient import accumulate_
from schedir.runtime.precision import float32_gradients
from schedir.training import gpt

DEVICE = "cuda"


def seconds(run: Callable[[], object], times: int = 10, warm: int = 3) -> float:
    """The median of how long the GPU takes from the first to the last that a run issues."""
    taken: list[float] = []
    for _ in range(warm + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[warm:])


def product_rate(side: int) -> float:
    """FLOP/s of a square product in bfloat16."""
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b)


def layer_flop(hidden: int, context: int) -> int:
    """Of the products in one layer's forward over one sequence.

    24 T h^2 + 4 T^2 h (Narayanan et al., arXiv 2104.04473, appendix), with all of the attention
    matrix counted, as is the custom, although half of it is masked.
    """
    return 24 * context * hidden**2 + 4 * context**2 * hidden


def gpt_stage(config: gpt.GPTConfig, stage: int, stages: int) -> nn.Module:
    """A stage in bfloat16, with gradients in float32, on the GPU."""
    device = torch.device(DEVICE)
    module = gpt.build_stage(config, stage, stages, device=device, dtype=torch.bfloat16)
    float32_gradients(module)
    return module


def stage_rate(hidden: int, context: int, layers: int) -> float:
    """Model FLOP/s of a middle stage, forward and backward; a backward is two forwards."""
    stage = gpt_stage(gpt.GPTConfig(256, 3 * layers, hidden, hidden // 128, context), 1, 3)
    x = torch.randn(1, context, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    flop = 3 * layers * layer_flop(hidden, context)
    return flop / seconds(lambda: stage(x).backward(dy))


def allowed_rate(hidden: int, context: int, layers: int) -> float:
    """The rate that the shapes of a stage allow: model FLOP/s of its products and its attention
    alone, forward and backward, one after the other, with nothing between them.

    Each product runs as in the stage: y = x W', dx = dy W, and dW added up in float32.
    """

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    products = [
        (new(context, n), new(k, n), new(context, k),
         torch.zeros(k, n, device=DEVICE))
        for k, n in shapes
    ]  # fmt: skip
    q, k, v, dy = (new(1, hidden // 128, context, 128) for _ in range(4))
    qkv = [part.requires_grad_() for part in (q, k, v)]

    def run() -> None:
        for _ in range(layers):
            for x, weight, _, _ in products:
                F.linear(x, weight)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(heads, qkv, dy)
            for x, weight, gradient, main in products:
                torch.mm(gradient, weight)
                accumulate_(main, gradient, x)

    return 3 * layers * layer_flop(hidden, context) / seconds(run)
