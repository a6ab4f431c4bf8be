"""The learning-rate schedule of a run. Needs no torch."""

from __future__ import annotations

import math

from schedir.training.config.train_config import TrainConfig


def describe_short_warmup(train: TrainConfig) -> str:
    """Return a note if a run ends before the warm-up that its user set, or an empty string.

    Args:
        train: The section [train] of the configuration.

    Example:
        >>> config = TrainConfig(steps=2, lr=1.0, warmup=8)
        >>> print(describe_short_warmup(config))  # doctest: +NORMALIZE_WHITESPACE
        train.warmup is 8 steps, but the run has 2: its learning rate rises only to 0.25, not to
        train.lr 1
    """
    if train.warmup <= train.steps or train.warmup == TrainConfig.warmup:
        return ""
    return (
        f"train.warmup is {train.warmup} steps, but the run has {train.steps}: its learning rate "
        f"rises only to {compute_learning_rate(train, train.steps - 1):g}, not to train.lr "
        f"{train.lr:g}"
    )


def compute_learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        train: The section [train] of the configuration.
        step: The step, from 0.

    Example:
        >>> config = TrainConfig(steps=10, lr=1.0, min_lr=0.5, warmup=2)
        >>> [round(compute_learning_rate(config, step), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    progress = (step - train.warmup) / max(1, train.steps - train.warmup)
    return train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(math.pi * progress)) / 2
