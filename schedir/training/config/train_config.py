"""The section [train] of a configuration. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.training.config.setting_types import NumberRange, require_known
from schedir.transports.registry import AUTO, DEVICES, TRANSPORTS, list_transports

PositiveInteger = Annotated[int, NumberRange(1)]
Fraction = Annotated[float, NumberRange(0, below=1)]
NonNegativeNumber = Annotated[float, NumberRange(0)]

# The values of settings of all sections that have a list of values.
SETTING_CHOICES = {
    "buffer_sharing": (AUTO, "none", "minimal", "latency_preserving"),
    "packing": ("concatenate", "best_fit"),
    "device": (*DEVICES,),
    "transport": (AUTO, *TRANSPORTS),
    "precision": ("float32", "bfloat16", "float16"),
    "on_nonfinite": ("stop", "skip"),
    "resume": ("auto", "must", "no"),
}


def _describe_transports(device: str) -> str:
    """Return the transports of a device, and those that need another device."""
    names = [AUTO, *(row.name for row in TRANSPORTS.values() if row.device == device)]
    parts = [" or ".join(names)]
    for other in DEVICES:
        if other != device:
            names = [row.name for row in TRANSPORTS.values() if row.device == other]
            parts.append(f"with device = {other!r}: {' or '.join(names)}")
    return "; ".join(parts)


@dataclass(frozen=True)
class TrainConfig:
    """The steps, the optimizer, the processes and the checkpoints of a run.

    The optimizer is AdamW. The learning rate rises linearly during `warmup`, then falls from `lr`
    to `min_lr` along half a cosine.

    - `steps`: the number of steps of the run, including the steps before a resume.
    - `lr`: the learning rate after the warm-up.
    - `min_lr`: the learning rate at the end.
    - `warmup`: the number of steps in which the learning rate rises to `lr`.
    - `weight_decay`: the weight decay of AdamW. It applies to matrices only.
    - `betas`: the two betas of AdamW.
    - `clip_grad_norm`: the largest global gradient norm. 0 disables clipping.
    - `log_every`: the number of steps between two reports of the loss.
    - `timeout`: the time limit of an instruction, including its wait for other ranks, in seconds.
      It is also the limit of waits for other processes at the start of the run.
    - `threads`: the number of torch threads of a process.
    - `device`: "cpu", or "cuda" for one GPU per process.
    - `transport`: the transport of messages. "auto" selects the first transport of the table
      "Transports" that fits the device and the program.
    - `precision`: the type of the weights: "float32", "bfloat16" or "float16". Gradients and the
      optimizer state are float32. With "float16", the run scales the loss. This needs the gradient
      norm, so `clip_grad_norm` must not be 0.
    - `on_nonfinite`: the reaction to a loss or a gradient that is infinite or NaN. "stop" ends the
      run and reports the first instruction that computed such a value. "skip" skips the update.
      This needs the gradient norm, so `clip_grad_norm` must not be 0. If the scale of float16
      causes an overflow, the run always skips the update.
    - `checkpoint_dir`: a directory for checkpoints. By default, the run writes none.
    - `checkpoint_every`: the number of steps between two checkpoints. The run writes a checkpoint
      while the next steps run, or between steps if a `FILE.sched` was compiled without
      `checkpoint_snapshots`. The last step has a checkpoint, too.
    - `checkpoint_keep`: the number of newest checkpoints that the run keeps.
    - `resume`: "auto" resumes from the newest complete checkpoint, if there is one. "must" refuses
      to start without a checkpoint. "no" begins a new run. With `output.overwrite = true`, this run
      removes old checkpoints. Otherwise, it refuses to start if there are any.
    - `shutdown_grace`: the number of seconds after SIGTERM in which all processes must finish and
      save the same step.
    - `evaluate_every`: the number of steps between two evaluations on `data.validation`, without
      dropout. The last step is evaluated, too. 0 disables evaluation.
    - `evaluate_batches`: the number of batches of an evaluation. A batch has as many windows as a
      training step. Each evaluation reads the same windows.
    """

    steps: PositiveInteger = 100
    lr: NonNegativeNumber = 1e-3
    min_lr: NonNegativeNumber = 1e-4
    warmup: Annotated[int, NumberRange(0)] = 10
    weight_decay: NonNegativeNumber = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip_grad_norm: NonNegativeNumber = 1.0
    log_every: PositiveInteger = 10
    timeout: Annotated[float, NumberRange(1, below=1e7)] = 120.0
    threads: Annotated[int, NumberRange(1, below=1025)] = 1
    device: str = "cpu"
    transport: str = AUTO
    precision: str = "float32"
    on_nonfinite: str = "stop"
    checkpoint_dir: str | None = None
    checkpoint_every: PositiveInteger = 500
    checkpoint_keep: PositiveInteger = 2
    resume: str = "auto"
    shutdown_grace: Annotated[float, NumberRange(0, below=1e7)] = 25.0
    evaluate_every: Annotated[int, NumberRange(0)] = 0
    evaluate_batches: PositiveInteger = 10

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise UsageError(
                f"min_lr {self.min_lr:g} is above lr {self.lr:g}", fields=["min_lr", "lr"]
            )
        for name in ("device", "transport", "precision", "on_nonfinite", "resume"):
            hint = _describe_transports(self.device) if name == "transport" else ""
            require_known(name, getattr(self, name), SETTING_CHOICES[name], hint)
        if self.checkpoint_dir == "" or (self.checkpoint_dir is None and self.resume == "must"):
            raise UsageError(
                "resume = 'must' needs checkpoint_dir, which is not set"
                if self.checkpoint_dir is None
                else "checkpoint_dir is empty",
                hint='checkpoint_dir = "checkpoints"',
                fields=["resume"] if self.checkpoint_dir is None else ["checkpoint_dir"],
            )
        if not list_transports(self.device, self.transport):
            raise UsageError(
                f"transport {self.transport!r} does not support device {self.device!r}",
                hint=" or ".join(r.name for r in TRANSPORTS.values() if r.device == self.device),
                fields=["transport", "device"],
            )
        if not self.clip_grad_norm:
            for name, value in (("precision", "float16"), ("on_nonfinite", "skip")):
                if getattr(self, name) == value:
                    raise UsageError(
                        f"{name} = {value!r} needs the gradient norm, which clip_grad_norm = 0 "
                        "does not compute",
                        hint="clip_grad_norm = 1e9 computes it and clips nothing",
                        fields=["clip_grad_norm", name],
                    )

    @property
    def progress_model(self) -> ProgressModel:
        """Return the progress model of the transport, for the deadlock check of programs."""
        return list_transports(self.device, self.transport)[0].progress_model
