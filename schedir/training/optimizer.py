"""Build the optimizer of a rank."""

from __future__ import annotations

from functools import partial

import torch

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
    make = partial(_build_adamw, train=train)
    needs_no_main_parameters = train.precision == "float32" or not any(
        p.requires_grad for p in parameters
    )
    return make(parameters) if needs_no_main_parameters else MainOptimizer(parameters, make)


def _build_adamw(parameters: list[torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.lr,
        betas=train.betas,
        # A fused optimizer can skip an update without the host.
        fused=train.device == "cuda" or train.precision == "float16" or None,
    )
