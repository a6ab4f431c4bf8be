"""Metrics are values that benchmarks measure on a GPU, with their goals. No torch is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple


class Goal(NamedTuple):
    """A goal of a metric: an upper bound, or a lower bound if `at_least` is set."""

    name: str
    bound: float
    unit: str
    at_least: bool = False

    def is_met_by(self, value: float) -> bool:
        """Return whether the value meets the goal. NaN meets no goal."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


WAITS: Final = Goal("host waits in a step", 0, "")
GAP: Final = Goal("gap between ready instructions, eager", 10, "us")
EXPOSED: Final = Goal("exposed transfers", 2, "%")
STAGE: Final = Goal("stage, of the rate that its shapes allow", 90, "%", at_least=True)
STEP: Final = Goal("step, predicted, off by", 5, "%")
MEMORY: Final = Goal("peak memory, predicted, off by", 2, "%")
GOALS: Final = (WAITS, GAP, EXPOSED, STAGE, STEP, MEMORY)


class Metric(NamedTuple):
    """A measured value: one line of a table."""

    name: str
    value: float
    unit: str
    goal: Goal | None = None

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and not self.goal.is_met_by(self.value)

    def __str__(self) -> str:
        goal = "" if self.goal is None else str(self.goal)
        return (
            f"{self.name:44} {self.value:9.2f} {self.unit:8} {goal:>6}{' missed' * self.is_missed}"
        )


def append_metric(path: Path | None, metric: Metric) -> None:
    """Append a metric to a file, or do nothing if `path` is None."""
    if path is not None:
        goal = metric.goal and metric.goal.name
        line = json.dumps([metric.name.strip(), metric.value, metric.unit, goal])
        with path.open("a") as file:
            file.write(f"{line}\n")


def read_metrics(path: Path) -> list[Metric]:
    """Return the metrics of a file. Ignore an incomplete last line."""
    text = path.read_text() if path.exists() else ""
    complete_lines, _, _ = text.rpartition("\n")
    return parse_metrics(map(json.loads, complete_lines.splitlines()))


def parse_metrics(lines: Iterable[list[object]]) -> list[Metric]:
    """Return the metrics of lines that `append_metric` has written."""
    goals = {goal.name: goal for goal in GOALS}
    return [
        Metric(str(name), float(str(value)), str(unit), goals.get(str(goal)))
        for name, value, unit, goal in lines
    ]
