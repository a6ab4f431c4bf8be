"""The routing bias of experts, which balances their load without changing other gradients.

The router adds the bias to the probabilities only to choose experts (DeepSeek-V3, arXiv 2412.19437,
section 2.1.2). After an update, the bias of an expert with more tokens than the mean decreases by a
fixed rate. The bias of an expert with fewer tokens increases by this rate.

The gradient of the bias is the excess of tokens times a small factor. So a program sums the excess
over microbatches and replicas like all other gradients, and the optimizer changes the bias by the
fixed rate: down if the sum is positive, and up if the sum is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from schedir.models.language_model import ParameterPlacement

# The factor of the gradient. It is so small that the bias adds less than 1e-12 to the norm of all
# gradients. The square of the factor, divided by the square of a step's number of tokens, must not
# underflow in float32.
_GRADIENT_SCALE: Final = 2.0**-33
# AdamW divides the gradient by its absolute value plus this number. So no step is above the rate.
_ADAMW_EPS: Final = 1e-19


def make_routing_bias(experts: int, rate: float, placement: ParameterPlacement) -> nn.Parameter:
    """Return the routing bias of a layer, filled with zeros, in float32 or a wider type.

    Args:
        experts: The number of experts.
        rate: The change of the bias per update. It is also the parameter's attribute
            `balance_rate`.
        placement: The device and the type of the parameter.
    """
    dtype = torch.promote_types(placement["dtype"], torch.float32)
    bias = nn.Parameter(torch.zeros(experts, device=placement["device"], dtype=dtype))
    vars(bias)["balance_rate"] = rate
    return bias


def make_load_term(bias: Tensor, counts: Tensor) -> Tensor:
    """Return a loss term of 0 with a gradient proportional to the excess of tokens per expert.

    Args:
        bias: The bias.
        counts: The number of tokens of each expert.
    """
    excess = (counts * len(counts) - counts.sum()).to(bias.dtype)
    return ((bias - bias.detach()) * (_GRADIENT_SCALE * excess)).sum()


def make_adamw_groups(
    parameters: Sequence[nn.Parameter], model_parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return the parameters without the routing biases, and AdamW groups for the routing biases.

    Without momentum, the step of AdamW is the sign of the gradient.

    Args:
        parameters: The parameters that the optimizer steps.
        model_parameters: The parameters of the model, in the same order. Routing biases have the
            attribute `balance_rate`.

    Returns:
        The parameters that are no routing biases, and the groups of the routing biases. A group has
        the key `balance_rate`, which is its learning rate.
    """
    other_parameters: list[nn.Parameter] = []
    biases: dict[float, list[nn.Parameter]] = {}
    for p, model_parameter in zip(parameters, model_parameters, strict=True):
        rate = getattr(model_parameter, "balance_rate", None)
        group = other_parameters if rate is None else biases.setdefault(rate, [])
        group.append(p)
    adamw_options = {"betas": (0.0, 0.0), "eps": _ADAMW_EPS, "weight_decay": 0.0}
    return other_parameters, [
        {"params": group, "lr": rate, "balance_rate": rate, **adamw_options}
        for rate, group in biases.items()
    ]
