"""Intervals of predicted step times, from the measured errors of predictions.

`MEASURED_ERRORS` is the only place with these errors. `python benchmarks/planner_errors.py
intervals` measures them. No constant of a prediction is fitted to a run with which the command
compares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Final, NamedTuple

from schedir.ir.cost.cluster import Cluster
from schedir.planner.hardware.cluster_presets import cluster_preset, cluster_presets
from schedir.planner.parallel_plan import PlanEstimate
from schedir.planner.plan_simplicity import measure_complexity

INTERVAL_SHARE: Final = 0.9  # The share of the measured steps that are within the interval.
INTERVAL_QUANTILE: Final = 1.645  # A 90 % interval is the mean +- 1.645 standard deviations.
_MEGATRON: Final = ("megatron", "megatron-2021", "megatron-fp4", "megatron-fp8")
# The fields of a cluster that do not change step times, or only by the number of GPUs.
_SIZE_FIELDS: Final = ("nodes", "gpus_per_node", "memory", "host_memory", "data_loading_us")


class StepErrors(NamedTuple):
    """Measured errors of the step times that the planner predicts.

    Attributes:
        low: The 5 % quantile of measured / predicted - 1.
        high: The 95 % quantile of measured / predicted - 1.
        resolution: If the predicted steps of two plans differ by this share of the shorter step,
            the order of their measured steps is the predicted order in 90 % of cases.
        source: The runs that were compared with predictions.

    Example:
        >>> from schedir import planner
        >>> errors = planner.find_step_errors(planner.cluster_preset("h100-efa"), "nanotron")
        >>> low, high = errors.find_interval(2.0)
        >>> low < 2.0 < high
        True
    """

    low: float
    high: float
    resolution: float
    source: str

    def find_interval(self, step_time: float) -> tuple[float, float]:
        """Return both ends of the interval that has 90 % of the measured steps, in seconds.

        Args:
            step_time: The predicted step time in seconds.
        """
        return step_time * (1 + self.low), step_time * (1 + self.high)

    def find_indistinct_plans(self, plans: Sequence[PlanEstimate]) -> list[int]:
        """Return the positions of the plans that may be as fast as the fastest, the simplest first.

        Args:
            plans: The plans, in any order.
        """
        longest = (1 + self.resolution) * min(plan.step_time for plan in plans)
        positions = [k for k, plan in enumerate(plans) if plan.step_time <= longest]
        return sorted(positions, key=lambda k: (*measure_complexity(plans[k]), k))


class _MeasuredErrors(NamedTuple):
    """Errors of predicted steps for some software on some clusters.

    Attributes:
        stacks: The names of the software. () means any software.
        cluster: The name of the cluster preset. "" means any cluster, "cpus" a cluster of CPUs.
        errors: The errors.
    """

    stacks: tuple[str, ...]
    cluster: str
    errors: StepErrors


# The first entry with the software and the machine of a plan applies.
MEASURED_ERRORS: Final = {
    "nanotron on h100-efa": _MeasuredErrors(
        ("nanotron",), "h100-efa",
        StepErrors(-0.116, 0.197, 0.166, "221 published steps of nanotron on H100"),
    ),
    "Megatron-LM on a100": _MeasuredErrors(
        _MEGATRON, "a100",
        StepErrors(-0.141, 0.256, 0.287, "154 published steps of Megatron-LM on A100"),
    ),
    "schedir train on CPUs": _MeasuredErrors(
        (), "cpus", StepErrors(-0.010, 0.280, 0.174, "36 steps of schedir train on CPUs")
    ),
    "Megatron-LM on other machines": _MeasuredErrors(
        _MEGATRON, "",
        StepErrors(
            -0.077, 0.669, 0.110,
            "18 published steps of Megatron-LM on H100 and B200, predicted with the speeds of data "
            "sheets",
        ),
    ),
    "others": _MeasuredErrors(
        (), "",
        StepErrors(
            -0.181, 1.712, 0.835,
            "302 published steps of nanotron on H100, predicted with the constants of Megatron-LM",
        ),
    ),
}  # fmt: skip


def find_step_errors(cluster: Cluster, stack: str = "") -> StepErrors:
    """Return the measured errors of the predicted step times of a cluster.

    For a calibrated cluster, these are the errors of its calibration. For other clusters, they are
    the errors of published runs to which no constant of the prediction is fitted. They are smallest
    if the planner has measured constants of the software and of the machine.

    Args:
        cluster: The cluster.
        stack: The name of the training software, as in `stack_preset`. "" means that it is unknown.

    Example:
        >>> from schedir import planner
        >>> node = planner.cluster_preset("a100")
        >>> [planner.find_step_errors(node, name).high for name in ("megatron", "")]
        [0.256, 1.712]
    """
    if cluster.uncertainty:
        factor = exp(INTERVAL_QUANTILE * cluster.uncertainty)
        return StepErrors(1 / factor - 1, factor - 1, factor - 1, "the calibrated runs")
    machine = "cpus" if cluster.processors is not None else _find_preset(cluster)
    return next(
        row.errors
        for row in MEASURED_ERRORS.values()
        if (not row.stacks or stack in row.stacks) and row.cluster in ("", machine)
    )


def _find_preset(cluster: Cluster) -> str:
    """Return the name of the preset with the speeds of a cluster, or ""."""
    values = {name: getattr(cluster, name) for name in _SIZE_FIELDS}
    names = {row.cluster for row in MEASURED_ERRORS.values()} & {*cluster_presets()}
    return next((name for name in names if replace(cluster_preset(name), **values) == cluster), "")
