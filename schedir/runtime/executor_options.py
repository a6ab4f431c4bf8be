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
    """Options for the scale, the clipping and the accumulation of gradients.

    Args:
        max_norm: The largest global norm of the gradients. None means 1.0 if the program clips
            gradients. If the program does not clip, only None is allowed.
        loss_scale: The loss scale of float16 training. The backwards compute gradients that are
            multiplied by this scale. The executor removes the scale before it reduces the
            gradients. By default the loss is not scaled. Each rank of an `InProcessExecutor` has a
            copy of the loss scale.
        accumulate_grads: True to add gradients to the existing ones, as autograd does. Then the
            executor does not step the optimizer, compute the global norm, sum gradients over
            replicas, or check gradients for inf and NaN. The caller must do all of this.

    Example:
        >>> from schedir.runtime import GradientOptions
        >>> GradientOptions(max_norm=0.5).max_norm
        0.5
    """

    max_norm: float | None = None
    loss_scale: LossScale | None = None
    accumulate_grads: bool = False

    def resolve(self, program: Program) -> GradientOptions:
        """Check the options, and replace `max_norm=None` by the default 1.0.

        Args:
            program: The program of the executor.

        Raises:
            ModelError: `max_norm` is not a number above 0, or it is set for a program that does not
                clip gradients.
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
        """The largest allowed norm: `max_norm`, or its default 1.0."""
        return 1.0 if self.max_norm is None else self.max_norm


@explain_wrong_calls("ExecutionOptions(spill_dir='/nvme')")
@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """Options of an executor for recordings, for checks, and for the folder of offloaded values.

    None of these options changes a result.

    Args:
        record_timestamps: True to record in `Executor.timestamps` when each instruction begins and
            ends. Between steps, `Executor.record_timestamps` may be set to False and back to True.
        debug: True to also run the checks in which the host must wait for the GPU.
        spill_dir: A folder on a disk. The executor creates a file in it for the values that the
            program moves to the disk. A program that uses the disk requires this folder. The file
            is unlinked, so it disappears when the process ends. The first step extends the file to
            its full length, and raises an error if the disk is full. A folder in memory (tmpfs)
            causes a warning.
        allow_identical_stages: True to allow equal trained parameters in different stages, for
            example because of equal seeds. By default such parameters are an error, because they
            may be a tied weight that is not declared. Parameters with a constant value are always
            allowed.

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
        """Check the options, and convert `spill_dir` to a `Path`.

        Args:
            programs: The programs that a rank runs.

        Raises:
            ModelError: `spill_dir` is not a path, or it is None although a program uses the disk.
            UsageError: An option has a wrong type.
        """
        flags = ("record_timestamps", "debug", "allow_identical_stages")
        return replace(
            self,
            spill_dir=require_spill_dir(self.spill_dir, programs),
            **{name: require_bool(getattr(self, name), name) for name in flags},
        )
