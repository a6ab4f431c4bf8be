"""Search problems with optima that CP-SAT has proved, from `benchmarks/search.py certify`."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem

FILE = Path(__file__).with_suffix(".csv")
Row = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """A search problem, its optimum, and the best built-in schedule within its memory limit.

    Costs and sizes have one number per stage, or one number for all stages.  The limit is
    `in_flight`, or `limit` in bytes if there are sizes, or there is none.  `optimum` and `zoo` are
    lengths without queues of messages.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int
    placement: str
    split: bool
    objective: Objective
    F: Row
    I: Row
    W: Row
    send: float
    in_flight: int | None
    saved: Row | None
    tape: Row | None
    both: Row | None
    limit: float | None
    optimum: float
    zoo: float | None
    schedule: str

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(self.ranks, self.microbatches, self.stages_per_rank, self.placement)

    @property
    def costs(self) -> Costs:
        whole = None if self.split else self.I
        return Costs(F=_each(self.F), I=_each(self.I), W=_each(self.W), B=whole, send=self.send)

    @property
    def sizes(self) -> Sizes | None:
        if self.saved is None:
            return None
        assert self.tape is not None
        both = None if self.both is None else _each(self.both)
        return Sizes(
            saved=_each(self.saved), deferred_wgrad=_each(self.tape), saved_and_deferred=both
        )

    @property
    def problem(self) -> SchedulingProblem:
        return make_problem(
            self.shape, self.costs, self.sizes, self.limit,
            max_in_flight=self.in_flight, objective=self.objective, split_backward=self.split,
        )  # fmt: skip

    @property
    def cells(self) -> int:
        """The number of (stage, microbatch) pairs."""
        return self.ranks * self.stages_per_rank * self.microbatches

    @property
    def tight(self) -> bool:
        """Return whether a rank has memory for fewer microbatches than there are ranks.

        A microbatch counts with the saved activations of all stages of the rank.
        """
        problem = self.problem
        return any(
            room < self.ranks * sum(problem.saved[s] for s in own)
            for room, own in zip(problem.capacity, problem.stages_of_rank, strict=True)
        )

    def line(self) -> dict[str, str]:
        return {f.name: _write(getattr(self, f.name)) for f in fields(self)}

    def __str__(self) -> str:
        held = f"k={self.in_flight}" if self.in_flight is not None else f"limit={self.limit}"
        shape = f"{self.ranks}x{self.microbatches} v={self.stages_per_rank} {self.placement}"
        return f"{shape} {held} {'split' if self.split else 'whole'} {self.objective}"


def _each(row: Row) -> float | Row:
    return row[0] if len(row) == 1 else row


def _write(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(_number, value)) if isinstance(value, tuple) else _number(value)


def _number(value: Any) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


_READ: dict[str, Any] = {
    "int": int,
    "str": str,
    "Objective": str,
    "bool": "True".__eq__,
    "float": float,
    "Row": lambda text: tuple(map(float, text.split())),
}


def read_cases(path: Path = FILE) -> list[Case]:
    """The cases of a file, whose first lines are comments."""
    with path.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Case(**{f.name: _value(str(f.type), row[f.name]) for f in fields(Case)}) for row in rows
        ]


def _value(kind: str, text: str) -> Any:
    kind, optional, _ = kind.partition(" | None")
    return None if optional and not text else _READ[kind](text)


@cache
def load_cases() -> tuple[Case, ...]:
    return tuple(read_cases())
