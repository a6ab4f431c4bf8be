"""Compare the gradients of a pipeline step and of a plain loop, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Final, NamedTuple

import torch
from torch import Tensor

from schedir.errors import UsageError
from schedir.testing.unpipelined_model import (
    ExpectedGradient,
    UnpipelinedModel,
    find_parameter_names,
    flatten_to_float64,
)

# Largest error of a correct gradient by data type. The error is relative to the sum, over all
# microbatches, of the norm of the microbatch's gradient.
TOLERANCES: Final = {torch.float32: 1e-6, torch.float64: 1e-12}
MAX_NAMES: Final = 3  # parameter names in one line of the error; longer lines are hard to read
MISSING: Final = "no gradient"
NOT_EXPECTED: Final = "a gradient, but none is expected"
NOT_FINITE: Final = "not finite"
DIFFERENT: Final = "different"


@dataclass(frozen=True)
class GradientDump:
    """The gradients that a rank has after the step.

    Args:
        gradients: Gradients by the names of their parameters.  None means that the rank has no
            gradient for a parameter.
        stages: The names of the parameters of each stage, by stage number.  Empty if the stages are
            not known.
    """

    gradients: Mapping[str, Tensor | None]
    stages: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def infer_stages(self) -> GradientDump:
        """Return a copy that has `stages`, for a model that was given as a list of its stages.

        The number before the first dot of a parameter name is the number of its stage.

        Returns:
            The copy, or the same object if it has stages already.
        """
        if self.stages:
            return self
        stages: dict[int, list[str]] = {}
        for name in self.gradients:
            stages.setdefault(int(name.partition(".")[0]), []).append(name)
        return replace(self, stages={s: tuple(names) for s, names in sorted(stages.items())})


class StageLocation(NamedTuple):
    """A stage on a rank.

    Attributes:
        stage: The number of the stage, or None if it is not known.
        rank: The rank. None if the gradient is missing: it is on no rank, or on fewer ranks than
            there are replicas.
    """

    stage: int | None
    rank: int | None


class GradientDifference(NamedTuple):
    """Several gradients that differ in the same way from the gradients of the plain loop.

    Args:
        locations: The stages and ranks that have these gradients.
        names: The names of the parameters.
        has_all_parameters: True if the locations have no other parameters.
        problem: A description of the difference.
        error: The largest relative error of these parameters: the norm of the difference over the
            norm of the expected gradient.
    """

    locations: tuple[StageLocation, ...]
    names: tuple[str, ...]
    has_all_parameters: bool
    problem: str
    error: float

    @property
    def stages(self) -> tuple[int | None, ...]:
        """The stages, in the order of `locations`. Each stage occurs once."""
        return tuple(dict.fromkeys(location.stage for location in self.locations))

    def __str__(self) -> str:
        count = len(self.names)
        if self.has_all_parameters and count > 1:
            subject = f"all {count} parameters"
        else:
            suffix = f" and {count - MAX_NAMES} more" if count > MAX_NAMES else ""
            subject = f"{', '.join(self.names[:MAX_NAMES])}{suffix}"
        return f"{_describe_locations(self.locations)}, {subject}: {self.problem}"


def _describe_locations(locations: Sequence[StageLocation]) -> str:
    """Return locations as text, such as "stages 0, 1 (ranks 0, 1)", or the ranks alone."""

    def list_numbers(unit: str, numbers: Sequence[int]) -> str:
        numbers = sorted({*numbers})
        return f"{unit}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" * bool(numbers)

    stage_numbers = [p.stage for p in locations if p.stage is not None]
    rank_numbers = [p.rank for p in locations if p.rank is not None]
    stages = list_numbers("stage", stage_numbers)
    ranks = list_numbers("rank", rank_numbers) or "on no rank"
    return f"{stages} ({ranks})" if stages else ranks


class WrongGradients(AssertionError):
    """Gradients differ from the gradients of the plain loop.

    Args:
        differences: The differences, the lowest stage first.
        weight_names: The names of each weight that has or should have a gradient.
        correct_locations: The stages and ranks where all gradients are correct.
    """

    def __init__(
        self,
        differences: Sequence[GradientDifference],
        weight_names: Sequence[tuple[str, ...]],
        correct_locations: Sequence[StageLocation],
    ) -> None:
        names = {name for difference in differences for name in difference.names}
        num_wrong = sum(not names.isdisjoint(aliases) for aliases in weight_names)
        lines = [f"{num_wrong} of {len(weight_names)} gradients differ from those of a plain loop"]
        lines += [f"  {difference}" for difference in differences]
        if correct_locations:
            lines.append(f"  correct: {_describe_locations(correct_locations)}")
        hint = _suggest_first_stage(differences, correct_locations)
        super().__init__("\n".join([*lines, *([f"  hint: {hint}"] if hint else [])]))
        self.differences = tuple(differences)


def _suggest_first_stage(
    differences: Sequence[GradientDifference], correct_locations: Sequence[StageLocation]
) -> str:
    """Return a hint with the stage in which the error begins, or "" if this stage is not clear.

    Backwards run from the last stage to the first, so an error spreads to the lower stages.  If
    stages 0 to k are wrong and the stages after k are correct, the error begins in stage k.
    """
    stages = {stage for difference in differences for stage in difference.stages}
    correct_stages = {location.stage for location in correct_locations}
    known_stages = [stage for stage in stages if stage is not None]
    if not correct_stages or None in correct_stages or len(known_stages) < len(stages):
        return ""
    if any(difference.problem in (MISSING, NOT_EXPECTED) for difference in differences):
        return ""
    last = max(known_stages)
    has_correct_before = any(s is not None and s < last for s in correct_stages)
    if stages != {*range(last + 1)} or has_correct_before:
        return ""
    return f"the error begins in a backward of stage {last}, or the gradient from stage {last + 1}"


def compare_gradients(
    loop: UnpipelinedModel,
    dumps: Sequence[GradientDump],
    *,
    replicas: int = 1,
    tolerance: float | None = None,
) -> float:
    """Compare the ranks' gradients after a step with the gradients of the plain loop.

    Args:
        loop: The plain loop.
        dumps: The gradients of each rank.
        replicas: The number of data-parallel replicas.
        tolerance: The largest relative difference, as for `assert_same_gradients`.

    Returns:
        The largest relative error: the norm of a difference over the norm of the expected gradient.

    Raises:
        WrongGradients: A gradient differs by more than the tolerance.
        UsageError: No rank has a gradient, or a gradient has a wrong shape.
    """
    if not any(g is not None for dump in dumps for g in dump.gradients.values()):
        raise UsageError(
            "no rank has a gradient of `model` after the step",
            hint="a step that trains copies of `model` must return {name: gradient} with the "
            "parameter names of `model`",
        )
    expected = loop.expected_gradients
    all_weight_names = find_parameter_names(loop.model).values()
    weight_names = [names for names in all_weight_names if names[0] in expected]
    actual_gradients = [*_list_gradients(dumps, weight_names, replicas)]
    ranks_by_name: dict[str, set[int | None]] = {name: set() for name in expected}
    for location, name, gradient in actual_gradients:
        if name in expected and gradient is not None:
            ranks_by_name[name].add(location.rank)
    wrong_errors: dict[StageLocation, dict[str, _GradientError]] = {}
    max_error = 0.0
    for location, name, gradient in actual_gradients:
        error = _measure_error(name, gradient, expected.get(name), tolerance)
        max_error = max(max_error, error.error)
        if error.is_within_tolerance:
            continue
        if location.rank is None and ranks_by_name[name]:
            problem = f"a gradient on only {len(ranks_by_name[name])} rank, for {replicas} replicas"
            error = error._replace(problem=problem)
        wrong_errors.setdefault(location, {})[name] = error
    if not wrong_errors:
        return max_error
    all_names: dict[StageLocation, set[str]] = {}
    for location, name, _ in actual_gradients:
        all_names.setdefault(location, set()).add(name)
    wrong_names = {name for errors in wrong_errors.values() for name in errors}
    correct_locations = [
        location
        for location in all_names
        if location not in wrong_errors and location.rank is not None
    ]
    unexpected_weights = [
        names
        for names in all_weight_names
        if names not in weight_names and not wrong_names.isdisjoint(names)
    ]
    raise WrongGradients(
        _group_differences(wrong_errors, all_names),
        [*weight_names, *unexpected_weights],
        correct_locations,
    )


def _list_gradients(
    dumps: Sequence[GradientDump], weight_names: Sequence[tuple[str, ...]], replicas: int
) -> Iterator[tuple[StageLocation, str, Tensor | None]]:
    """Yield the location, name and gradient of each gradient that a rank has or should have.

    If fewer ranks than replicas have a weight, the weight also gets a location without a rank.
    """
    result = []
    staged_names = {name for dump in dumps for names in dump.stages.values() for name in names}
    for rank, dump in enumerate(dumps):
        stage_by_name = {name: s for s, names in dump.stages.items() for name in names}
        for name in dict.fromkeys([*stage_by_name, *dump.gradients]):
            gradient = dump.gradients.get(name)
            if (
                name not in stage_by_name
                and name in staged_names
                and gradient is not None
                and not bool(gradient.any())
            ):
                gradient = None  # A step may return zeros for parameters of other ranks.
            # A rank has a parameter if the rank has a gradient of the parameter, or a stage with
            # the parameter.
            if gradient is not None or name in stage_by_name:
                result.append((StageLocation(stage_by_name.get(name), rank), name, gradient))
    for names in weight_names:
        ranks = {location.rank for location, name, _ in result if name in names}
        # A gradient of None means that another rank has the weight.
        is_elsewhere = any(dump.gradients.get(name, 0) is None for dump in dumps for name in names)
        if not ranks or (len(ranks) < replicas and not is_elsewhere):
            result.append((StageLocation(None, None), names[0], None))
    yield from sorted(result, key=lambda f: (f[0].stage is None, f[0].stage or 0))


class _GradientError(NamedTuple):
    """The difference of one gradient from the expected gradient.

    Args:
        error: The norm of the difference over the norm of the expected gradient.
        is_within_tolerance: True if the difference is within the tolerance.
        problem: The kind of the difference.
        ratio: The norm of the gradient over the norm of the expected gradient.
    """

    error: float
    is_within_tolerance: bool
    problem: str
    ratio: float = 1.0

    def describe(self) -> str:
        """Return the problem, with the relative error if the gradients have different values."""
        if self.problem != DIFFERENT:
            return self.problem
        return f"relative error {self.error:.2g}, norm {self.ratio:.2g} times the expected norm"


def _measure_error(
    name: str, actual: Tensor | None, expected: ExpectedGradient | None, tolerance: float | None
) -> _GradientError:
    """Return the difference of a gradient from the expected gradient."""
    if actual is None or expected is None:
        value = actual if expected is None else expected.value
        is_wrong = value is not None and bool(value.any())
        problem = MISSING if actual is None else NOT_EXPECTED
        return _GradientError(float(is_wrong), not is_wrong, problem)
    if actual.shape != expected.value.shape:
        raise UsageError(
            f"the gradient of {name} must have the shape of its weight, "
            f"{[*expected.value.shape]}, not {[*actual.shape]}",
            hint="gather sharded gradients before you return them",
        )
    types = {actual.dtype, expected.value.dtype}
    max_error = max(map(_find_tolerance, types)) if tolerance is None else tolerance
    expected_norm = float(flatten_to_float64(expected.value).norm())
    actual_norm = float(flatten_to_float64(actual).norm())
    error = float((flatten_to_float64(actual) - flatten_to_float64(expected.value)).norm())
    return _GradientError(
        error / expected_norm if expected_norm else float(error > 0),
        error <= max_error * expected.size,
        DIFFERENT if isfinite(actual_norm) else NOT_FINITE,
        actual_norm / expected_norm if expected_norm else inf,
    )


def _find_tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, 8 * torch.finfo(dtype).eps)


def _group_differences(
    wrong_errors: Mapping[StageLocation, Mapping[str, _GradientError]],
    all_names: Mapping[StageLocation, Set[str]],
) -> list[GradientDifference]:
    """Group the wrong gradients of each location by problem.

    Groups of several locations are merged if they have the same problem and the same parameters, or
    the same problem and all parameters of their location.
    """
    differences: dict[object, GradientDifference] = {}
    for location, errors in wrong_errors.items():
        for problem in dict.fromkeys(error.problem for error in errors.values()):
            group = {
                name: gradient_error
                for name, gradient_error in errors.items()
                if gradient_error.problem == problem
            }
            worst_error = max(group.values(), key=lambda error: error.error)
            names, has_all = tuple(group), {*group} == all_names[location]
            key = worst_error.describe(), has_all, None if has_all else names
            difference = differences.get(
                key, GradientDifference((), (), has_all, worst_error.describe(), 0.0)
            )
            differences[key] = difference._replace(
                locations=(*difference.locations, location),
                names=tuple(dict.fromkeys(difference.names + names)),
                error=max(difference.error, worst_error.error),
            )
    return [*differences.values()]
