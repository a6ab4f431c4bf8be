"""Calibrate five constants of a cluster with a few measured runs of training software.

The logarithms of the constants are fitted to the logarithms of step times. A normal prior keeps
the constants near the values of the cluster. Cauchy weights reduce the influence of runs with large
errors. The result is the mode of the posterior and the covariance at the mode (Laplace
approximation). The intervals of the constants and of step times follow from this result.

Repeated runs of one model and plan are one point of the fit. Each point has two independent errors:
the error of the prediction, which all repetitions share, and the mean of the noise of its runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.units import get_physical_bounds
from schedir.planner.hardware.cluster_size import resize_cluster
from schedir.planner.hardware.software_stacks import Stack
from schedir.planner.hardware.step_time_errors import INTERVAL_QUANTILE, INTERVAL_SHARE
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate
from schedir.planner.plan_search import all_plans, estimate_step
from schedir.planner.transformer.transformer_spec import TransformerSpec

Floats = NDArray[np.float64]

MAX_RUNS: Final = 20
# No trainer differs from the planner by this factor, but milliseconds differ from seconds by more.
MAX_STEP_RATIO: Final = 100.0
# Standard deviations of the logarithm of a step time. Repeated runs of one plan on H100 differ by 3
# to 5 %. The error of the prediction is an assumption.
_REPEAT_NOISE: Final = 0.04
_PLAN_ERROR: Final = 0.03
_RUN_NOISE: Final = (_REPEAT_NOISE**2 + _PLAN_ERROR**2) ** 0.5  # 0.05, for a single run.
# A run is reported if the logarithms of its measured and its predicted step differ by more.
_MISFIT_BOUND: Final = 3 * _RUN_NOISE
_CAUCHY_SCALE: Final = 2.0  # The scale of the Cauchy weights, in standard deviations of the noise.
_ITERATIONS: Final = 8
_STEP: Final = 0.05  # Derivatives use this change of the logarithm of a constant.


class _ConstantRow(NamedTuple):
    """The prior and the bounds of a fitted constant.

    Attributes:
        meaning: A description with the unit.
        prior_deviation: The standard deviation of the constant's logarithm in the prior.
        min_value: The lower bound of the fitted value.
        max_value: The upper bound of the fitted value.
        start: The value before the fit if the cluster lacks the constant.
    """

    meaning: str
    prior_deviation: float
    min_value: float
    max_value: float
    start: float = 0.0


# The prior deviations are assumptions. `a100.toml`, `h100.toml` and `h100-efa.toml` show how much
# the constants of clusters can differ.
CONSTANTS: Final = {
    name: _ConstantRow(meaning, prior_deviation, *get_physical_bounds(name), *start)
    for name, meaning, prior_deviation, *start in (
        ("flops", "operations per second of matrix products; the bandwidth of memory changes by "
         "the same factor", 0.15),
        ("kernel_us", "microseconds in which the host issues a kernel", 0.3, 10.0),
        ("network_bandwidth", "bytes per second of a GPU to other nodes", 0.5),
        ("network_latency", "seconds of an empty message between nodes", 0.5, 1e-5),
        ("jitter", "standard deviation of a replica's step time, as a share of the mean",
         0.5, 0.02),
    )
}  # fmt: skip


class MeasuredRun(NamedTuple):
    """A measured run: the model, the plan and the measured step time.

    Attributes:
        model: The model.
        plan: The plan. The plan has the GPUs of one or more complete nodes, or fewer GPUs than a
            node.
        step_time: Seconds of a step.
        memory: Peak bytes of the GPU with the highest peak, or None if not measured.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.load_model("gpt-22b")
        >>> planner.MeasuredRun(gpt, planner.ParallelPlan(tp=8, microbatches=4), 5.1).step_time
        5.1
    """

    model: TransformerSpec
    plan: ParallelPlan
    step_time: float
    memory: float | None = None


class CalibratedConstant(NamedTuple):
    """A constant before and after the calibration.

    Attributes:
        name: The name of its field in `Cluster`.
        meaning: A description with the unit.
        prior: The value before the calibration.
        value: The fitted value.
        low: The lower end of the 90 % interval.
        high: The upper end of the 90 % interval.

    Example:
        >>> from schedir import planner
        >>> jitter = planner.CalibratedConstant("jitter", "a share", 0.02, 0.03, 0.01, 0.05)
        >>> jitter.low < jitter.value < jitter.high
        True
    """

    name: str
    meaning: str
    prior: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """A cluster that was fitted to measured runs, and the uncertainty of its constants.

    Args:
        cluster: The fitted cluster.
        stack: The training software of the runs.
        runs: The measured runs.
        constants: The fitted constants.
        estimates: The prediction of each run with the fitted cluster.
        covariance: The covariance of the logarithms of the constants, of shape (5, 5).
        residual: The 90 % quantile of the residuals. A residual is the absolute difference of the
            logarithms of a predicted and a measured step time.

    Example:
        >>> from schedir import planner
        >>> gpt, node = planner.load_model("gpt-22b"), planner.cluster_preset("h100")
        >>> one = planner.ParallelPlan(tp=8, microbatches=4, microbatch_size=4)
        >>> found = planner.calibrate(node, planner.stack_preset("megatron"),
        ...     [planner.MeasuredRun(gpt, one, 1.4)])
        >>> low, high = found.find_interval(gpt, one)
        >>> low < 1.4 < high
        True
    """

    cluster: Cluster
    stack: Stack
    runs: tuple[MeasuredRun, ...]
    constants: tuple[CalibratedConstant, ...]
    estimates: tuple[PlanEstimate, ...]
    covariance: Floats
    residual: float = 0.0

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative error of each run: predicted step time / measured step time - 1."""
        return tuple(
            estimate.step_time / run.step_time - 1
            for estimate, run in zip(self.estimates, self.runs, strict=True)
        )

    def find_interval(self, model: TransformerSpec, plan: ParallelPlan) -> tuple[float, float]:
        """Return both ends of the 90 % interval of the step time of a plan, in seconds.

        The interval covers the uncertainty of the constants and the noise of a run. It is at least
        as wide as `residual`.

        Args:
            model: The model.
            plan: The plan.
        """
        seconds, slopes = _differentiate(
            self.cluster,
            lambda cluster: np.array([predict(cluster, self.stack, model, plan).step_time]),
        )
        deviation = _compute_log_deviations(slopes, self.covariance, _RUN_NOISE)[0]
        spread = max(INTERVAL_QUANTILE * deviation, self.residual)
        return float(seconds[0] * np.exp(-spread)), float(seconds[0] * np.exp(spread))

    def list_misfits(self) -> list[str]:
        """Return a sentence for each run that the fitted constants do not reproduce.

        The error of such a run is more than three standard deviations of the noise, about 15 %.

        Example:
            >>> from schedir import planner
            >>> gpt, node = planner.load_model("gpt-22b"), planner.cluster_preset("h100")
            >>> one = planner.ParallelPlan(tp=8, microbatches=4, microbatch_size=4)
            >>> runs = [planner.MeasuredRun(gpt, one, seconds) for seconds in (1.0, 3.0)]
            >>> stack = planner.stack_preset("megatron")
            >>> len(planner.calibrate(node, stack, runs).list_misfits())
            2
        """
        residuals = np.log1p(self.errors)
        return [
            f"run {k}: the fitted constants predict {estimate.step_time:.3g} s instead of "
            f"{run.step_time:.3g} s ({error:+.1%})"
            for k, (run, estimate, error, residual) in enumerate(
                zip(self.runs, self.estimates, self.errors, residuals, strict=True), 1
            )
            if abs(residual) > _MISFIT_BOUND
        ]

    def list_extrapolations(self, plan: ParallelPlan) -> list[str]:
        """Return a sentence for each field of a plan whose value is outside the range of the runs.

        Args:
            plan: The plan.
        """
        extrapolations = []
        for name in ("gpus", "pp", "tp", "dp", "microbatch_size"):
            values = [getattr(run.plan, name) for run in self.runs]
            if not min(values) <= getattr(plan, name) <= max(values):
                extrapolations.append(
                    f"{name} {getattr(plan, name)} is outside of the runs, which have "
                    f"{min(values)} to {max(values)}"
                )
        return extrapolations

    def suggest_run(self, max_gpus: int | None = None) -> ParallelPlan | None:
        """Return the plan whose measurement would make the constants most certain.

        The candidates have the model and the batch of the run with the most GPUs, fit in memory,
        and have not been measured. The result is the candidate with the least certain prediction of
        the step time. Its measurement gives the most information (D-optimality: Atkinson and Donev
        1992, section 10.2).

        Args:
            max_gpus: The number of GPUs of the plan. None means the number of GPUs of the run with
                the most GPUs.

        Returns:
            The plan, or None if there is no candidate.
        """
        largest = max(self.runs, key=lambda run: run.plan.gpus)
        gpus = largest.plan.gpus if max_gpus is None else max_gpus
        cluster = resize_cluster(self.cluster, gpus)
        options = self.stack.options | {"recompute": largest.plan.recompute}
        options |= {"schedules": "one_f_one_b", "zero": (0, 1)}

        def estimate(candidate: Cluster) -> Any:
            return all_plans(largest.model, candidate, largest.plan.batch, **options)

        with warnings.catch_warnings(action="ignore", category=UserWarning):
            plan_table = estimate(cluster)
            _, slopes = _differentiate(cluster, lambda candidate: estimate(candidate).step_times)
        fits = plan_table.total_memory <= cluster.memory
        for run in self.runs:
            names = ("pp", "tp", "dp", "microbatch_size", "zero")
            same = [getattr(plan_table.plans, name) == getattr(run.plan, name) for name in names]
            fits &= ~np.logical_and.reduce(same)
        if not fits.any():
            return None
        deviation = np.where(fits, _compute_log_deviations(slopes, self.covariance, 0.0), -1.0)
        found: ParallelPlan = plan_table.plans.plan_at(largest.model, int(deviation.argmax()))
        return found


def predict(
    cluster: Cluster, stack: Stack, model: TransformerSpec, plan: ParallelPlan
) -> PlanEstimate:
    """Estimate a plan in closed form, with the constants of training software.

    Args:
        cluster: The cluster. `resize_cluster` gives the cluster the number of nodes that the plan
            needs.
        stack: The training software.
        model: The model.
        plan: The plan.

    Raises:
        UsageError: See `estimate_step` and `resize_cluster`.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return estimate_step(
            model, resize_cluster(cluster, plan.gpus), stack.complete(model, plan),
            closed_form_only=True, constants=stack.constants, state_bytes=stack.state_bytes,
        )  # fmt: skip


def calibrate(cluster: Cluster, stack: Stack, runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit five constants of a cluster to measured runs.

    `CONSTANTS` lists the constants. Each constant stays within its bounds. A constant that the runs
    do not determine stays near its value in `cluster`. Repeated runs of one model and plan count as
    one run with less noise.

    Args:
        cluster: The cluster before the calibration, such as a preset.
        stack: The training software of the runs.
        runs: 1 to 20 runs.

    Returns:
        The fitted constants, the cluster with these constants, and the prediction of each run.

    Raises:
        UsageError: There are too few or too many runs, a step time is not positive or differs from
            its prediction by a factor above `MAX_STEP_RATIO`, or `predict` cannot estimate a plan.

    Example:
        >>> from schedir import planner
        >>> gpt, node = planner.load_model("gpt-22b"), planner.cluster_preset("h100")
        >>> one = planner.ParallelPlan(tp=8, microbatches=4, microbatch_size=4)
        >>> found = planner.calibrate(node, planner.stack_preset("megatron"),
        ...     [planner.MeasuredRun(gpt, one, 1.4)])
        >>> abs(found.errors[0]) < 0.05, len(found.constants)
        (True, 5)
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise UsageError(f"a calibration needs 1 to {MAX_RUNS} runs, not {len(runs)}")
    for number, run in enumerate(runs, 1):
        if not 0 < run.step_time < np.inf:
            raise UsageError(
                f"run {number}: step_time must be above 0 and finite, not {run.step_time:g}",
                fields=["step_time"],
            )
    point_of_run, points = _group_repeated_runs(runs)

    def estimate(candidate: Cluster) -> Floats:
        step_times = [predict(candidate, stack, *point).step_time for point in points]
        return np.array(step_times)

    start = _fill_constants(cluster)
    _require_plausible_times(runs, estimate(start)[point_of_run])
    log_seconds = np.log([run.step_time for run in runs])
    measured = np.array([np.median(log_seconds[point_of_run == k]) for k in range(len(points))])
    noise = np.sqrt(_PLAN_ERROR**2 + _REPEAT_NOISE**2 / np.bincount(point_of_run))
    fitted, covariance = fit_constants(start, estimate, measured, noise)
    point_estimates = [predict(fitted, stack, *point) for point in points]
    estimates = tuple(point_estimates[k] for k in point_of_run)
    _require_plausible_memory(runs, estimates)
    squares = (log_seconds - np.log([one.step_time for one in estimates])) ** 2
    residuals = np.sqrt(np.bincount(point_of_run, squares) / np.bincount(point_of_run))
    residual = float(np.quantile(residuals, INTERVAL_SHARE, method="higher"))
    covariance = _widen_covariance(covariance, residual)
    values = _get_constants(fitted)
    priors = _get_constants(start)
    spread = np.exp(INTERVAL_QUANTILE * np.sqrt(np.diag(covariance)))
    constants = tuple(
        CalibratedConstant(
            name, row.meaning, float(prior), float(value),
            max(float(value / factor), row.min_value), min(float(value * factor), row.max_value),
        )
        for (name, row), prior, value, factor in zip(
            CONSTANTS.items(), priors, values, spread, strict=True
        )
    )  # fmt: skip
    slopes = _differentiate(fitted, estimate)[1]
    deviation = float(np.median(_compute_log_deviations(slopes, covariance, _RUN_NOISE)))
    uncertainty = max(deviation, residual / INTERVAL_QUANTILE)
    rounded: dict[str, Any] = {
        name: float(f"{getattr(fitted, name):.4g}") for name in (*CONSTANTS, "hbm_bandwidth")
    }
    fitted = replace(
        fitted, **rounded, uncertainty=float(f"{uncertainty:.2g}"),
        calibrated_gpus=max(run.plan.gpus for run in runs),
    )  # fmt: skip
    return Calibration(fitted, stack, tuple(runs), constants, estimates, covariance, residual)


def _group_repeated_runs(
    runs: Sequence[MeasuredRun],
) -> tuple[NDArray[np.int64], list[tuple[TransformerSpec, ParallelPlan]]]:
    """Return the number of the point of each run, and the model and the plan of each point."""
    points = [*dict.fromkeys((run.model, run.plan) for run in runs)]
    numbers = [points.index((run.model, run.plan)) for run in runs]
    return np.array(numbers, np.int64), points


def _build_prior_precision() -> Floats:
    """Return the inverse of the covariance of the logarithms of the constants in the prior."""
    return np.diag([1 / row.prior_deviation**2 for row in CONSTANTS.values()])


def _widen_covariance(covariance: Floats, residual: float) -> Floats:
    """Return the covariance if the noise of the runs is as large as their residual.

    A residual within the 90 % interval of the noise of a run changes nothing. The prior keeps its
    weight, so the intervals of the constants become at most as wide as those of the prior.
    """
    factor = max(1.0, residual / (INTERVAL_QUANTILE * _RUN_NOISE))
    prior = _build_prior_precision()
    return np.array(np.linalg.inv((np.linalg.inv(covariance) - prior) / factor**2 + prior), float)


def _require_plausible_times(runs: Sequence[MeasuredRun], estimates: Floats) -> None:
    """Refuse step times that are probably in another unit, such as milliseconds."""
    for number, (run, estimate) in enumerate(zip(runs, estimates, strict=True), 1):
        ratio = run.step_time / float(estimate)
        if not 1 / MAX_STEP_RATIO < ratio < MAX_STEP_RATIO:
            raise UsageError(
                f"run {number}: step_time is {run.step_time:g} s, but the prediction is "
                f"{float(estimate):.3g} s",
                hint="give step_time in seconds, and check the model and the plan of this run",
                fields=["step_time"],
            )


def _require_plausible_memory(
    runs: Sequence[MeasuredRun], estimates: Sequence[PlanEstimate]
) -> None:
    """Refuse memory that is probably in another unit, such as gigabytes."""
    for number, (run, estimate) in enumerate(zip(runs, estimates, strict=True), 1):
        predicted = estimate.memory.total
        if run.memory is not None and not (
            1 / MAX_STEP_RATIO < run.memory / predicted < MAX_STEP_RATIO
        ):
            raise UsageError(
                f"run {number}: memory is {format_bytes(run.memory)}, but the prediction is "
                f"{format_bytes(predicted)}",
                hint="give memory in bytes or with its unit, such as 40GB",
                fields=["memory"],
            )


def fit_constants(
    cluster: Cluster,
    estimate: Callable[[Cluster], Floats],
    measured: Floats,
    noise: Floats | float = _RUN_NOISE,
) -> tuple[Cluster, Floats]:
    """Return the cluster with the most likely constants, and the covariance of their logarithms.

    The function takes Gauss-Newton steps (iteratively reweighted least squares: Holland and Welsch
    1977). A run has the weight 1 / (1 + (error / (c s))^2), where s is the noise of the run and
    c is `_CAUCHY_SCALE`.

    Args:
        cluster: The cluster before the fit, with all constants.
        estimate: A function from a cluster to the predicted step times of the runs, in seconds.
        measured: The logarithms of the measured step times.
        noise: The standard deviation of each of these logarithms.
    """
    precision = _build_prior_precision()
    prior = current = np.log(_get_constants(cluster))
    seconds, slopes = _differentiate(cluster, estimate)
    for _ in range(_ITERATIONS):
        error = measured - np.log(seconds)
        weights = 1 / (1 + (error / (_CAUCHY_SCALE * noise)) ** 2) / noise**2
        information = slopes.T @ (slopes * weights[:, None]) + precision
        gradient = slopes.T @ (weights * error) - precision @ (current - prior)
        step = np.clip(np.linalg.solve(information, gradient), -0.5, 0.5)
        cluster = _set_constants(cluster, np.exp(current + step))
        current = np.log(_get_constants(cluster))
        largest = np.abs(step).max()
        if largest < 5e-3:  # A tenth of the noise of a run.
            break
        if largest > 0.1:
            seconds, slopes = _differentiate(cluster, estimate)
        else:  # The step was small, so the slopes are still accurate.
            seconds = estimate(cluster)
    return cluster, np.array(np.linalg.inv(information), float)


def _differentiate(
    cluster: Cluster, estimate: Callable[[Cluster], Floats]
) -> tuple[Floats, Floats]:
    """Return the step times, and their log-log derivatives with respect to the constants.

    The derivatives have the shape (step times, constants).
    """
    values = _get_constants(_fill_constants(cluster))
    seconds = estimate(cluster)
    slopes = []
    for k in range(len(values)):
        moved = values.copy()
        # The change is negative, because `flops` cannot be above the peak.
        moved[k] *= np.exp(-_STEP)
        moved_values = estimate(_set_constants(cluster, moved))
        slopes.append(np.log(seconds / moved_values) / _STEP)
    return seconds, np.stack(slopes, axis=-1)


def _compute_log_deviations(slopes: Floats, covariance: Floats, noise: float) -> Floats:
    """Return the standard deviation of the logarithm of each step time.

    `noise` is the standard deviation that the noise of a run adds to the logarithm.
    """
    deviation: Floats = np.sqrt(np.einsum("ri,ij,rj->r", slopes, covariance, slopes) + noise**2)
    return deviation


def _fill_constants(cluster: Cluster) -> Cluster:
    """Return the cluster with a start value for each constant that the cluster lacks."""
    missing: dict[str, Any] = {
        name: row.start for name, row in CONSTANTS.items() if not getattr(cluster, name)
    }
    if "network_latency" in missing and cluster.latency:
        missing["network_latency"] = cluster.latency
    return replace(cluster, **missing)


def _get_constants(cluster: Cluster) -> Floats:
    return np.array([getattr(cluster, name) for name in CONSTANTS], float)


def _set_constants(cluster: Cluster, values: Floats) -> Cluster:
    """Return the cluster with these constants, after clipping each to its bounds.

    `hbm_bandwidth` changes by the same factor as `flops`.
    """
    rows = CONSTANTS.values()
    low = np.array([row.min_value for row in rows])
    high = np.array([row.max_value for row in rows])
    clipped = dict(zip(CONSTANTS, np.clip(values, low, high).tolist(), strict=True))
    clipped["flops"] = min(clipped["flops"], cluster.peak or clipped["flops"])
    clipped["hbm_bandwidth"] = cluster.hbm_bandwidth * clipped["flops"] / cluster.flops
    return replace(cluster, **clipped)
