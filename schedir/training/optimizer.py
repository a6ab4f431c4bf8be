"""Build the optimizer of a rank."""

from __future__ import annotations

import torch

from schedir.models.routing_bias import make_adamw_groups
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.training.config.train_config import TrainConfig


def build_optimizer(
    parameters: list[torch.nn.Parameter], train: TrainConfig
) -> MainOptimizer | torch.optim.Optimizer:
    """Return AdamW for the parameters of a rank.

    Args:
        parameters: The parameters of all stages of the rank.
        train: The section [train] of the configuration.

    Returns:
        AdamW. If `train.precision` is a 16-bit type, a `MainOptimizer` that runs AdamW on float32
        main parameters.
    """
    needs_no_main_parameters = train.precision == "float32" or not any(
        p.requires_grad for p in parameters
    )
    if needs_no_main_parameters:
        return _build_adamw(parameters, parameters, train)
    trained_parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    return MainOptimizer(parameters, lambda main: _build_adamw(main, trained_parameters, train))


def _build_adamw(
    parameters: list[torch.nn.Parameter],
    model_parameters: list[torch.nn.Parameter],
    train: TrainConfig,
) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    parameters, bias_groups = make_adamw_groups(parameters, model_parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]] + bias_groups,
        lr=train.lr,
        betas=train.betas,
        # A fused optimizer can skip an update without the host.
        fused=train.device == "cuda" or train.precision == "float16" or None,
    )
