"""The inputs of a step: microbatches, targets, and keyword arguments of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from schedir.errors import ExecutionError, ModelError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import require_all_microbatches

Microbatches = Sequence[Any] | Tensor  # a tensor or a tuple of tensors each, or stacked
Keywords = Sequence[Mapping[str, Any]]  # of each microbatch; empty where there are none


class StepInputs(NamedTuple):
    """What a step is given; by index, what is there of each microbatch."""

    inputs: Microbatches = ()
    targets: Microbatches = ()
    grad_scale: float | Tensor = 1.0
    keywords: Keywords = ()

    def require_complete(
        self, program: Program, rank: int, *, has_first_stage: bool, has_last_stage: bool
    ) -> None:
        """Raise ExecutionError where a rank takes microbatches, and is not given all: inputs if it
        has the `has_first_stage` stage, targets if it has the `has_last_stage`, keywords in any
        case, if at all."""
        for name, given, takes in (
            ("inputs", self.inputs, has_first_stage),
            ("targets", self.targets, has_last_stage),
        ):
            if takes:
                require_all_microbatches(given, name, program, rank)
        require_keywords(self.keywords, program)
        if len(self.keywords):
            require_all_microbatches(self.keywords, "keywords", program, rank)

    def get_keywords(self, mb: int) -> Mapping[str, Any]:
        """What every stage is given by name for a microbatch."""
        return self.keywords[mb] if self.keywords else _NO_KEYWORDS


_NO_KEYWORDS: Mapping[str, Any] = {}


def require_input_tensors(value: object, mb: int) -> tuple[Tensor, ...]:
    """What the first stage takes of a microbatch: a tensor, or a tuple or list of them.

    Raises ModelError for anything else.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(x, Tensor) for x in value):
        return tuple(value)
    raise ModelError(
        f"inputs[{mb}] is {describe(value)}, and no tensor or tuple of tensors",
        hint="what a stage takes by name, or what is no tensor, goes into keywords",
    )


def require_keywords(value: object, program: Program | None = None) -> None:
    """Raise ExecutionError for what is not a mapping of names for each microbatch."""
    whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    wrong = [each for each in value if not _has_string_keys(each)] if whole else [value]  # type: ignore[attr-defined]
    if wrong:
        raise ExecutionError(
            "keywords are for each microbatch a mapping whose keys are names, and "
            f"{describe(wrong[0])} is given",
            program=program.name if program else "",
            hint='keywords=[{"mask": mask} for mask in masks]',
        )


def _has_string_keys(each: object) -> bool:
    return isinstance(each, Mapping) and all(isinstance(name, str) for name in each)
