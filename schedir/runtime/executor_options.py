"""The options of executors: GradientOptions and ExecutionOptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from schedir.call_errors import explain_wrong_calls
from schedir.errors import require_bool
from schedir.ir.program import Program
from schedir.runtime.arguments import require_loss_scale, require_max_norm, require_spill_dir
from schedir.runtime.parameters.mixed_precision import LossScale


@explain_wrong_calls("GradientOptions(max_norm=1.0)")
@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How an executor scales, clips and accumulates gradients.

    Args:
        max_norm: The largest global norm of the gradients. None means 1.0 if the program clips
            gradients. If it does not, no other value is allowed.
        loss_scale: The loss scale of float16 training. Gradients are scaled until their reduction
            removes the scale. By default the loss is not scaled. Each virtual rank of an
            `InProcessExecutor` has a copy.
        accumulate_grads: Add to the existing gradients, as autograd does. The step then leaves
            optimizer, norm, sum over replicas and finiteness checks to the caller.

    Example:
        >>> from schedir.runtime import GradientOptions
        >>> GradientOptions(max_norm=0.5).max_norm
        0.5
    """

    max_norm: float | None = None
    loss_scale: LossScale | None = None
    accumulate_grads: bool = False

    def resolve(self, program: Program) -> GradientOptions:
        """Return the options with the default value of `max_norm`.

        Args:
            program: The program that the options are for.

        Raises:
            ModelError: `max_norm` is wrong, or the program does not clip gradients.
            UsageError: An option has a wrong type.
        """
        return replace(
            self,
            max_norm=require_max_norm(self.max_norm, program),
            loss_scale=require_loss_scale(self.loss_scale),
            accumulate_grads=require_bool(self.accumulate_grads, "accumulate_grads"),
        )

    @property
    def norm_limit(self) -> float:
        """The largest norm: `max_norm`, or its default value."""
        return 1.0 if self.max_norm is None else self.max_norm


@explain_wrong_calls("ExecutionOptions(spill_dir='/nvme')")
@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How an executor records and checks its steps, and where it puts files.

    None of these options changes a result.

    Args:
        record_timestamps: Record in `timestamps` when each instruction begins and ends. The
            attribute of the executor with this name may be set to False and back to True between
            steps.
        debug: Run also the checks for which the host waits for results of a GPU.
        spill_dir: The folder of the file for values that the program moves to the disk. A program
            that uses the disk requires it. The file has no name, so nothing remains of it when the
            process ends. The first step extends it to its full length, so a full disk is an error
            then. A folder in memory (tmpfs) gives a warning.
        allow_identical_stages: Allow equal trained parameters in different stages, such as after
            equal seeds. By default they are an error if they are neither constant nor tied, because
            they may be an undeclared tie.

    Example:
        >>> from schedir.runtime import ExecutionOptions
        >>> ExecutionOptions(record_timestamps=False).debug
        False
    """

    record_timestamps: bool = True
    debug: bool = False
    spill_dir: str | Path | None = None
    allow_identical_stages: bool = False

    def resolve(self, programs: Sequence[Program]) -> ExecutionOptions:
        """Return the options with the folder as a `Path`.

        Args:
            programs: The programs that a rank runs.

        Raises:
            ModelError: `spill_dir` is not a path, or it is missing.
            UsageError: An option has a wrong type.
        """
        flags = ("record_timestamps", "debug", "allow_identical_stages")
        return replace(
            self,
            spill_dir=require_spill_dir(self.spill_dir, programs),
            **{name: require_bool(getattr(self, name), name) for name in flags},
        )
