"""Simulate all schedules on many shapes, and define rules about the shortest schedule.

    python docs/which_schedule.py          # simulates all, and writes results/which-schedule.csv

`which_schedule_page.py` generates the page.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from schedir import schedules
from schedir.__main__ import main

FILE = Path(__file__).parent / "results" / "which-schedule.csv"
RANKS = (2, 4, 8, 16)
PER_RANK = (0.5, 1, 2, 4, 8)  # microbatches per rank
SENDS = (0.0, 0.05, 0.2)  # time of a message, relative to a forward of all stages of a rank
LIMITS = (0.5, 0.75, 1.0, 1.5, 2.0, None)  # activations of a rank, divided by the number of ranks
ODD = (8, (3, 5, 11, 13, 21))  # ranks, and numbers of microbatches that are no multiples of them
WORK = 3.0  # time of a microbatch on a rank: F = 1, B = 2


class Cell(NamedTuple):
    """A row of the file: a schedule on a shape with a given message time."""

    P: int
    m: int
    send: float
    name: str
    v: int
    span: float
    memory: float
    split: bool
    twice: bool

    @property
    def bubble(self) -> float:
        """Return the idle share of the ranks. All ranks compute for the same time."""
        return 1 - WORK * self.m / self.span

    @property
    def text(self) -> str:
        return f"`{self.name}`" + (f" x {self.v}" if self.v > 1 else "")


def list_shapes() -> Iterator[tuple[int, int]]:
    """Yield the ranks and microbatches of the tables."""
    for P in RANKS:
        for per_rank in PER_RANK:
            yield P, int(P * per_rank)


def simulate_all() -> Iterator[Cell]:
    """Yield all schedules of all shapes, with the numbers of `schedir recommend`."""
    odd = [(ODD[0], m, SENDS[1]) for m in ODD[1]]
    for P, m, send in [*((*shape, send) for shape in list_shapes() for send in SENDS), *odd]:
        yield from run_recommend(P, m, send)


def run_recommend(P: int, m: int, send: float) -> Iterator[Cell]:
    """Yield all schedules of a shape, with the numbers of `schedir recommend`."""
    command = f"recommend --ranks {P} --microbatches {m} --costs F=1,B=2,I=1,W=1,send={send}"
    with redirect_stdout(StringIO()) as out:
        assert main(shlex.split(f"{command} --progress-model per_edge --json")) == 0
    for row in json.loads(out.getvalue()):
        yield Cell(
            P, m, send, row["program"], row["stages_per_rank"], float(f"{row['span']:.9g}"),
            row["peak_activations"], row["has_split_backward"], row["parameter_copies"] > 1,
        )  # fmt: skip


@cache
def read_cells() -> dict[tuple[int, int, float], list[Cell]]:
    """Return the rows of the file, by shape and time of messages."""
    cells: dict[tuple[int, int, float], list[Cell]] = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            cell = Cell(
                int(row["P"]), int(row["m"]), float(row["send"]), row["name"], int(row["v"]),
                float(row["span"]), float(row["memory"]), row["split"] == "1", row["twice"] == "1",
            )  # fmt: skip
            cells.setdefault(cell[:3], []).append(cell)
    return cells


def format_csv() -> str:
    """Return the text of the file."""
    lines = [",".join(Cell._fields)]
    lines += [
        ",".join(f"{x + 0:.9g}" if not isinstance(x, str) else x for x in c) for c in simulate_all()
    ]
    return "\n".join(lines) + "\n"


def find_best(
    P: int, m: int, send: float, limit: float | None, *, full_backward: bool
) -> Cell | None:
    """Return the shortest schedule of a table cell.

    If several take the same time, this is the one with the least memory, then with the fewest
    stages, then with full backwards, then the best known one.
    """
    fitting = [
        cell
        for cell in read_cells()[P, m, send]
        if not cell.twice and not (full_backward and cell.split) and fits(cell, limit)
    ]
    preferred = ["one_f_one_b", "gpipe", "eager_1f1b", "interleaved"]
    names = preferred + [name for name in schedules.__all__ if name not in preferred]
    return min(
        fitting,
        key=lambda c: (round(c.span, 6), c.memory, c.v, c.split, names.index(c.name)),
        default=None,
    )


def fits(cell: Cell, limit: float | None) -> bool:
    """Return whether the activations of a schedule fit into a limit (a share of the ranks)."""
    return limit is None or cell.memory <= limit * cell.P


# ---------------------------------------------------------------- rules


class TableCell(NamedTuple):
    """A cell of the tables: shape, time of messages, memory limit and kind of backwards."""

    P: int
    m: int
    send: float
    limit: float | None
    full_backward: bool

    @property
    def best(self) -> Cell | None:
        return find_best(self.P, self.m, self.send, self.limit, full_backward=self.full_backward)

    def find_row(self, name: str, v: int) -> Cell | None:
        """Return the row of a schedule for this cell, or None if it does not fit into the limit."""
        shape_cells = read_cells()[self.P, self.m, self.send]
        rows = [cell for cell in shape_cells if (cell.name, cell.v) == (name, v)]
        return rows[0] if rows and fits(rows[0], self.limit) else None

    def is_within(self, share: float, *candidates: tuple[str, int]) -> bool:
        """Return whether a candidate takes at most `share` longer than the best schedule."""
        best, rows = self.best, [cell for name, v in candidates if (cell := self.find_row(name, v))]
        if best is None or not rows:
            return False
        return min(cell.span for cell in rows) <= best.span * (1 + share)


def list_table_cells() -> Iterator[TableCell]:
    for P, m in list_shapes():
        for send in SENDS:
            for limit in LIMITS:
                for full_backward in (False, True):
                    yield TableCell(P, m, send, limit, full_backward)


def is_limit_at_least(limit: float | None, least: float) -> bool:
    return limit is None or limit >= least


class Rule(NamedTuple):
    """A rule of thumb.

    Attributes:
        conditions: The conditions in words: backwards, memory limit, messages and microbatches.
        text: The rule in words.
        where: Returns whether a cell satisfies the conditions.
        holds: Returns whether the rule is true in a cell.
    """

    conditions: tuple[str, str, str, str]
    text: str
    where: Callable[[TableCell], bool]
    holds: Callable[[TableCell], bool]


RULES = [
    Rule(
        ("split", "P or more", "short", "m >= P"),
        "`interleaved_zb` with four stages per rank is at most 1 % longer than the best",
        lambda w: (
            not w.full_backward and w.m >= w.P and w.send <= 0.05 and is_limit_at_least(w.limit, 1)
        ),
        lambda w: w.is_within(0.01, ("interleaved_zb", 4)),
    ),
    Rule(
        ("split", "P", "long", "m >= P"),
        "for m >= 2P `zb_v` is the best, and for smaller m `interleaved_zb` with two stages per "
        "rank",
        lambda w: not w.full_backward and w.m >= w.P and w.send == 0.2 and w.limit == 1,
        lambda w: w.is_within(0, ("zb_v", 2) if w.m >= 2 * w.P else ("interleaved_zb", 2)),
    ),
    Rule(
        ("split", "0.75 P or 0.5 P", "any", "m >= P >= 4"),
        "`v_half` is the best at a limit of 0.75 P, and `v_min` at 0.5 P",
        lambda w: not w.full_backward and w.m >= w.P >= 4 and w.limit in (0.5, 0.75),
        lambda w: w.is_within(0, ("v_min" if w.limit == 0.5 else "v_half", 2)),
    ),
    Rule(
        ("split", "1.5 P or more", "short", "any"),
        "the best schedule needs at most P activations",
        lambda w: not w.full_backward and w.send <= 0.05 and is_limit_at_least(w.limit, 1.5),
        lambda w: w.best == w._replace(limit=1).best,
    ),
    Rule(
        ("full", "1.5 P", "any", "m >= 2P"),
        "`interleaved` is the best, with four stages per rank, or two if messages are long",
        lambda w: w.full_backward and w.m >= 2 * w.P and w.limit == 1.5,
        lambda w: w.is_within(0, ("interleaved", 2 if w.send == 0.2 else 4)),
    ),
    Rule(
        ("full", "P", "any", "m >= 8P, or m >= 2P if messages are long"),
        "`one_f_one_b` is the best",
        lambda w: w.full_backward and w.limit == 1 and w.m >= (2 if w.send == 0.2 else 8) * w.P,
        lambda w: w.is_within(0, ("one_f_one_b", 1)),
    ),
    Rule(
        ("full", "none", "more than 0", "m >= 2P"),
        "`looped_bfs` with four stages per rank is the best: messages lengthen the step only by "
        "the time of 2P-2 messages",
        lambda w: w.full_backward and w.send > 0 and w.m >= 2 * w.P and w.limit is None,
        lambda w: w.is_within(0, ("looped_bfs", 4)),
    ),
    Rule(
        ("split", "P or more", "any", "m >= P"),
        "twice as many microbatches make the bubble 40 to 55 % smaller",
        lambda w: not w.full_backward and w.P <= w.m < 8 * w.P and is_limit_at_least(w.limit, 1),
        lambda w: 0.45 <= _compute_bubble_ratio(w) <= 0.6,
    ),
    Rule(
        ("any", "any", "any", "m < P"),
        "the bubble is at least 29 %, and with full backwards at least 50 %",
        lambda w: w.m < w.P and w.best is not None,
        lambda w: w.best is not None and w.best.bubble >= (0.5 if w.full_backward else 0.29),
    ),
]


def _compute_bubble_ratio(w: TableCell) -> float:
    """Return the bubble with twice as many microbatches, divided by the bubble of this cell."""
    best, doubled_best = w.best, w._replace(m=2 * w.m).best
    assert best is not None and doubled_best is not None
    return doubled_best.bubble / best.bubble


if __name__ == "__main__":
    FILE.write_text(format_csv())
    print(f"wrote {FILE.name}")
