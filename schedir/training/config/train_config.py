"""The section [train] of a configuration.  Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.training.config.setting_types import NumberRange
from schedir.transports.registry import AUTO, DEVICES, TRANSPORTS, transports_of

Count = Annotated[int, NumberRange(1)]
Share = Annotated[float, NumberRange(0, below=1)]
NotNegative = Annotated[float, NumberRange(0)]

CHOICES = {
    "device": (*DEVICES,),
    "transport": (AUTO, *TRANSPORTS),
    "precision": ("float32", "bfloat16", "float16"),
    "nonfinite": ("stop", "skip"),
    "resume": ("auto", "must", "no"),
}


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained: AdamW, a linear warm-up, then half a cosine from `lr` to `min_lr`.

    `clip` is the largest global gradient norm, 0 for no clipping; `timeout` how many seconds an
    instruction may take, with its wait for other ranks; `threads` those of torch in a process.

    `device` is cpu, or cuda for a GPU each.  `transport` is how messages travel, as the table of
    transports says; `auto` takes the first of the device that fits.

    `precision` is the type of the weights, float32, bfloat16 or float16; gradients and the
    optimizer's numbers are float32 in any case.  In float16 the loss is scaled, led by the gradient
    norm, which `clip` takes.

    `nonfinite` is what becomes of an update whose loss or gradient is infinite or NaN, and which
    is never made: the run shall `stop`, and say where it began, or `skip` it, led by the gradient
    norm.  What the scale of float16 makes too large is skipped in any case.

    `checkpoint` is a folder for checkpoints, none unless told: of `every` so many steps, written
    beside the next ones, and of the last; the newest `keep` stay. A run goes on from the newest
    whole one there, if there is any: so with resume "auto"; with "must" it is refused where there
    is none, and with "no" where there is one, unless `output.replace` lets it be removed at the
    first step. `steps` counts from the first one ever. Told to end (SIGTERM), all processes finish
    the same step and save it, in at most `grace` seconds.

    After every `evaluate_every` steps, and the last, the loss is taken on what `data.held_out`
    keeps, with dropout off: on as many windows as `evaluate_batches` steps take, the same each
    time; with 0, never.
    """

    steps: Count = 100
    lr: NotNegative = 1e-3
    min_lr: NotNegative = 1e-4
    warmup: Annotated[int, NumberRange(0)] = 10
    weight_decay: NotNegative = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: NotNegative = 1.0
    log_every: Count = 10
    timeout: Annotated[float, NumberRange(1, below=1e7)] = 120.0
    threads: Annotated[int, NumberRange(1, below=1025)] = 1
    device: str = "cpu"
    transport: str = AUTO
    precision: str = "float32"
    nonfinite: str = "stop"
    checkpoint: str | None = None
    every: Count = 500
    keep: Count = 2
    resume: str = "auto"
    grace: Annotated[float, NumberRange(0, below=1e7)] = 25.0
    evaluate_every: Annotated[int, NumberRange(0)] = 0
    evaluate_batches: Count = 10

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise UsageError(
                f"min_lr {self.min_lr:g} is above lr {self.lr:g}", fields=["min_lr", "lr"]
            )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is not known",
                    hint=" or ".join(known),
                    fields=[name],
                )
        if self.checkpoint == "" or (self.checkpoint is None and self.resume == "must"):
            raise UsageError(
                "resume must go on from a checkpoint, and no folder of them is given"
                if self.checkpoint is None
                else "checkpoint names no folder",
                hint='checkpoint = "checkpoints"',
                fields=["resume"] if self.checkpoint is None else ["checkpoint"],
            )
        if not transports_of(self.device, self.transport):
            raise UsageError(
                f"transport {self.transport} is none of device {self.device}",
                hint=" or ".join(r.name for r in TRANSPORTS.values() if r.device == self.device),
                fields=["transport", "device"],
            )
        if not self.clip:
            for name, value, why in (
                ("precision", "float16", "float16 scales the loss by"),
                ("nonfinite", "skip", "nonfinite skip leaves out updates by"),
            ):
                if getattr(self, name) == value:
                    raise UsageError(
                        f"{why} what the gradient norm says, and clip 0 takes none",
                        hint="clip = 1e9 takes it and clips nothing",
                        fields=["clip", name],
                    )

    @property
    def model(self) -> ProgressModel:
        """The progress model of the transport, under which a program must be proven."""
        return transports_of(self.device, self.transport)[0].model

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> config = TrainConfig(steps=10, lr=1.0, min_lr=0.5, warmup=2)
        >>> [round(config.learning_rate(step), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.75, 0.5]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2
