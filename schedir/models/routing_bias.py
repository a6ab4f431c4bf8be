"""The routing bias of experts, which balances them without changing other gradients.

The router adds the bias to the probabilities only to choose experts (DeepSeek-V3, arXiv 2412.19437,
section 2.1.2). After an update, the bias of an expert with more tokens than the mean decreases by a
fixed rate, and that of an expert with fewer tokens increases.

The excess of tokens is the gradient of the bias. So a program sums it over microbatches and
replicas as all other gradients, and the optimizer steps by its sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from schedir.models.language_model import ParameterPlacement

# The factor of the gradient. It is so small that the bias adds less than 1e-12 to the norm of all
# gradients. Its square, divided by the square of the tokens of a step, must be a float32 number.
_GRADIENT_SCALE: Final = 2.0**-33
# AdamW adds this to the absolute value of the gradient. The step is then never above the rate.
_ADAMW_EPS: Final = 1e-19


def make_routing_bias(experts: int, rate: float, placement: ParameterPlacement) -> nn.Parameter:
    """Return the bias of a layer, which is zero. It has at least 32 bits.

    Args:
        experts: The number of experts.
        rate: The step of the bias after an update. It is the attribute `balance_rate`.
        placement: The device and the type of the parameter.
    """
    dtype = torch.promote_types(placement["dtype"], torch.float32)
    bias = nn.Parameter(torch.zeros(experts, device=placement["device"], dtype=dtype))
    vars(bias)["balance_rate"] = rate
    return bias


def make_load_term(bias: Tensor, counts: Tensor) -> Tensor:
    """Return 0, with the excess of tokens of each expert as the gradient of its bias.

    Args:
        bias: The bias.
        counts: The number of tokens of each expert.
    """
    excess = (counts * len(counts) - counts.sum()).to(bias.dtype)
    return ((bias - bias.detach()) * (_GRADIENT_SCALE * excess)).sum()


def make_adamw_groups(
    parameters: Sequence[nn.Parameter], model_parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return the parameters without routing biases, and the groups of AdamW for the biases.

    Without momentum, the step of AdamW is the sign of the gradient.

    Args:
        parameters: The parameters that the optimizer steps.
        model_parameters: Those of the model, in the same order. They have the attribute
            `balance_rate`.

    Returns:
        The other parameters. The groups have the key `balance_rate`, which is their learning rate.
    """
    others: list[nn.Parameter] = []
    biases: dict[float, list[nn.Parameter]] = {}
    for p, of_model in zip(parameters, model_parameters, strict=True):
        rate = getattr(of_model, "balance_rate", None)
        (others if rate is None else biases.setdefault(rate, [])).append(p)
    how = {"betas": (0.0, 0.0), "eps": _ADAMW_EPS, "weight_decay": 0.0}
    return others, [
        {"params": some, "lr": rate, "balance_rate": rate, **how} for rate, some in biases.items()
    ]
