"""Figures of the zero-bubble paper (arXiv 2401.10241), for tests and benchmarks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from schedir import Costs, PipelineShape, Sizes
from schedir.ir.isa.instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

FILE = Path(__file__).parent / "golden" / "zero_bubble_rates.csv"
WORK = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
SEQUENCE = 1024  # tokens of a microbatch's sequences
PRINTED = 1e-4  # rates have four digits


class Row(NamedTuple):
    """One row of tables 5 and 9.

    The unit of `sizes` is the saved memory of an F. The paper counts sbh (34 + 5as/h) for a layer,
    of which W needs 32sbh (Table 1).
    """

    model: str
    shape: PipelineShape
    costs: Costs
    sizes: Sizes
    rates: dict[str, float]  # by the column's name

    def rate(self, own_span: float) -> float:
        """Return the bubble rate of a schedule from its longest active span."""
        costs = self.costs
        work = sum(float(costs.for_opcode(op, self.shape)[0, 0]) for op in WORK)
        return 1 - self.shape.microbatches * work / own_span


def read_rows() -> list[Row]:
    found = []
    with FILE.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            F, I, W, send = (float(row[f"T_{name}"]) for name in ("F", "I", "W", "comm"))
            hidden, heads = int(row["hidden"]), int(row["heads"])
            tape = 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)
            rates = {name: float(rate) for name, rate in row.items() if name.startswith("rate_")}
            found.append(
                Row(
                    row["model"], PipelineShape(int(row["p"]), int(row["m"])),
                    Costs(F=F, I=I, W=W, send=send), Sizes(saved=1, deferred_wgrad=tape), rates,
                )
            )  # fmt: skip
    return found
