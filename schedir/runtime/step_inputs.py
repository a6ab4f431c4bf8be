"""The inputs of a step: microbatches, targets, and keyword arguments of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from schedir.errors import ExecutionError, ModelError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import expect_all

Microbatches = Sequence[Any] | Tensor  # a tensor or a tuple of tensors each, or stacked
Keywords = Sequence[Mapping[str, Any]]  # of each microbatch; empty where there are none


class StepInputs(NamedTuple):
    """What a step is given; by index, what is there of each microbatch."""

    inputs: Microbatches = ()
    targets: Microbatches = ()
    scale: float | Tensor = 1.0
    keywords: Keywords = ()

    def expect(self, program: Program, rank: int, *, first: bool, last: bool) -> None:
        """Raise ExecutionError where a rank takes microbatches, and is not given all: inputs if it
        has the `first` stage, targets if it has the `last`, keywords in any case, if at all."""
        for name, given, takes in (("inputs", self.inputs, first), ("targets", self.targets, last)):
            if takes:
                expect_all(given, name, program, rank)
        expect_keywords(self.keywords, program)
        if len(self.keywords):
            expect_all(self.keywords, "keywords", program, rank)

    def keywords_of(self, mb: int) -> Mapping[str, Any]:
        """What every stage is given by name for a microbatch."""
        return self.keywords[mb] if self.keywords else _NONE


_NONE: Mapping[str, Any] = {}


def tensors_of(given: object, mb: int) -> tuple[Tensor, ...]:
    """What the first stage takes of a microbatch: a tensor, or a tuple or list of them.

    Raises ModelError for anything else.
    """
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, tuple | list) and all(isinstance(x, Tensor) for x in given):
        return tuple(given)
    raise ModelError(
        f"inputs[{mb}] is {describe(given)}, and no tensor or tuple of tensors",
        hint="what a stage takes by name, or what is no tensor, goes into keywords",
    )


def expect_keywords(given: object, program: Program | None = None) -> None:
    """Raise ExecutionError for what is not a mapping of names for each microbatch."""
    whole = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    wrong = [each for each in given if not _named(each)] if whole else [given]  # type: ignore[attr-defined]
    if wrong:
        raise ExecutionError(
            "keywords are for each microbatch a mapping whose keys are names, and "
            f"{describe(wrong[0])} is given",
            program=program.name if program else "",
            hint='keywords=[{"mask": mask} for mask in masks]',
        )


def _named(each: object) -> bool:
    return isinstance(each, Mapping) and all(isinstance(name, str) for name in each)
