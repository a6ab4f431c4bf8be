"""The inputs of a step: microbatches, targets, and keyword arguments of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from schedir.errors import ExecutionError, ModelError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import require_all_microbatches

# A tensor or a tuple of tensors for each microbatch, or a tensor that stacks the microbatches.
Microbatches = Sequence[Any] | Tensor
# For each microbatch, its keyword arguments. Empty if no microbatch has keyword arguments.
Keywords = Sequence[Mapping[str, Any]]


class StepInputs(NamedTuple):
    """The arguments of a step.

    Args:
        inputs: The input of the first stage, for each microbatch.
        targets: The target of the loss, for each microbatch.
        grad_scale: A factor. The step computes the gradients of this factor times the losses.
        keywords: The keyword arguments of all stages, for each microbatch.
    """

    inputs: Microbatches = ()
    targets: Microbatches = ()
    grad_scale: float | Tensor = 1.0
    keywords: Keywords = ()

    def require_complete(
        self, program: Program, rank: int, *, has_first_stage: bool, has_last_stage: bool
    ) -> None:
        """Check that a rank has all the inputs that it needs.

        Args:
            program: The program that will run.
            rank: The pipeline rank.
            has_first_stage: True if the rank has the first stage, so that it needs all inputs.
            has_last_stage: True if the rank has the last stage, so that it needs all targets.

        Raises:
            ExecutionError: Inputs or targets that the rank needs are missing. Or `grad_scale` is
                not a finite number, or is 0. Or `keywords` is neither empty nor a list with a
                mapping for each microbatch.
        """
        for name, values, is_needed in (
            ("inputs", self.inputs, has_first_stage),
            ("targets", self.targets, has_last_stage),
        ):
            if is_needed:
                require_all_microbatches(values, name, program, rank)
        scale = self.grad_scale
        is_number = (isinstance(scale, Real) and math.isfinite(scale)) or (
            isinstance(scale, Tensor) and not scale.dim()
        )
        if not is_number:
            raise ExecutionError(
                "grad_scale must be a finite number or a 0-dimensional tensor, not "
                f"{describe(scale)}",
                program=program.name,
                hint=f"grad_scale=1/{program.shape.microbatches} gives the gradient of the mean of "
                "the losses",
            )
        if isinstance(scale, Real) and not scale:  # as 1 // microbatches
            raise ExecutionError(
                "grad_scale is 0, so all gradients would be 0",
                program=program.name,
                hint=f"grad_scale=1/{program.shape.microbatches}; `//` rounds to an integer",
            )
        require_keywords(self.keywords, program)
        if len(self.keywords):
            require_all_microbatches(self.keywords, "keywords", program, rank)

    def view(self, kind: Callable[[Microbatches], Sequence[Any]]) -> StepInputs:
        """Wrap the inputs, targets and keywords in views.

        Args:
            kind: A subclass of `MicrobatchView`, or a function that creates a view from one
                argument.
        """
        inputs, targets, keywords = map(kind, (self.inputs, self.targets, self.keywords))
        return self._replace(inputs=inputs, targets=targets, keywords=keywords)

    def get_keywords(self, mb: int) -> Mapping[str, Any]:
        """Return the keyword arguments of a microbatch, which all stages get.

        Args:
            mb: The microbatch.
        """
        return self.keywords[mb] if self.keywords else _NO_KEYWORDS


class MicrobatchView(Sequence[Any]):
    """Base class of views of microbatches. Subclasses act on a microbatch when a step reads it.

    Args:
        source: The inputs, targets or keywords of a step.
    """

    def __init__(self, source: Microbatches) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


_NO_KEYWORDS: Mapping[str, Any] = {}


def require_input_tensors(value: object, mb: int) -> tuple[Tensor, ...]:
    """Return the input tensors of a microbatch as a tuple.

    Args:
        value: A tensor, or a tuple or list of tensors.
        mb: The microbatch, for the error message.

    Raises:
        ModelError: `value` is anything else.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(x, Tensor) for x in value):
        return tuple(value)
    raise ModelError(
        f"inputs[{mb}] must be a tensor or a tuple of tensors, not {describe(value)}",
        hint="convert an array to a tensor: torch.as_tensor(inputs)"
        if hasattr(value, "__array__")
        else "pass named arguments, and values that are not tensors, in keywords",
    )


def require_keywords(value: object, program: Program | None = None) -> None:
    """Check that keywords are a sequence of mappings with string keys.

    Args:
        value: The keyword arguments of each microbatch.
        program: The program, for the error. By default the error names no program.

    Raises:
        ExecutionError: `value` is anything else.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        invalid_entries = [entry for entry in value if not _has_string_keys(entry)]
    else:
        invalid_entries = [value]
    if invalid_entries:
        raise ExecutionError(
            "keywords must be a list with a mapping from names to values for each microbatch, not "
            f"{describe(invalid_entries[0])}",
            program=program.name if program else "",
            hint='keywords=[{"mask": mask} for mask in masks]',
        )


def _has_string_keys(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry)
