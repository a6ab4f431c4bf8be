"""Build the optimizer of a rank."""

from __future__ import annotations

from functools import partial

import torch

from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.training.config.train_config import TrainConfig


def build_optimizer(
    parameters: list[torch.nn.Parameter], train: TrainConfig
) -> MainOptimizer | torch.optim.Optimizer:
    """AdamW, and of parameters in 16 bits that of float32 copies."""
    make = partial(_build_adamw, train=train)
    whole = train.precision == "float32" or not any(p.requires_grad for p in parameters)
    return make(parameters) if whole else MainOptimizer(parameters, make)


def _build_adamw(parameters: list[torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.lr,
        betas=train.betas,
        # A fused one skips without the host.
        fused=train.device == "cuda" or train.precision == "float16" or None,
    )
