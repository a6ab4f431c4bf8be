"""Draw the ranks of a program that cannot finish, and which waits for which.

A column for each rank, with the part of its Stream that matters; arrows lead from what waits to
what it waits for.  An SVG written by hand, as a page or a README shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import DeadlockError, GroupError, SchedirError
from schedir.ir.isa.instructions import RECEIVES, SENDS, Instr
from schedir.ir.program import Program
from schedir.viz.palette import ACCENT

_LETTER, _LINE = 7.3, 20.0  # pixels of a letter and of a line
_GAP: Final = 76.0  # between columns, for the arrows
_EDGE: Final = 14.0
_TOP: Final = 34.0
_AROUND: Final = 2  # instructions that are shown before and behind what matters
_ALL: Final = 8  # ranks, of which all are shown; of more, those that the error speaks of
_INK, _PALE, _GONE = "#1a1a1a", "#fbe3ee", "#9a9a9a"


class _InstructionPosition(NamedTuple):
    """An instruction of the picture: its rank, and where it stands in the Stream."""

    rank: int
    at: int


def standstill(program: Program, error: SchedirError) -> str:
    """What an error says of a program, as an SVG: the lists of the ranks, side by side.

    Of a DeadlockError what has ended is grey, what waits is filled, and an arrow leads to what it
    waits for.  Where messages cross, arrows lead from each send to the receive that gets it.  Of
    another error the instructions that it names are filled.
    """
    ended = np.zeros(len(program), bool)
    at, to = (
        [_InstructionPosition(site.rank, site.index) for site in error.sites],
        list[_InstructionPosition](),
    )
    if isinstance(error, DeadlockError):
        at = [_InstructionPosition(wait.rank, wait.index) for wait in error.cycle]
        to = [_InstructionPosition(wait.needs_rank, wait.needs_index) for wait in error.cycle]
        ended = _ended(program, error)
    elif isinstance(error, GroupError) and _crossed(error):
        at, to = at[2:], at[:2]
    ranks = program.shape.ranks
    shown = [*range(ranks)] if ranks <= _ALL else sorted({place.rank for place in (*at, *to)})
    columns: dict[int, _RankColumn] = {}
    left = _EDGE
    for rank in shown:
        columns[rank] = _RankColumn(program, rank, left, [*at, *to], ended)
        left = columns[rank].right + _GAP
    low = max(column.bottom for column in columns.values())
    far = [k for k, (a, b) in enumerate(zip(at, to, strict=False)) if _apart(shown, a, b) > 1]
    parts = [column.drawn({*at}, {*to}) for column in columns.values()]
    for k, (one, other) in enumerate(zip(at, to, strict=False)):
        if one != other:
            lane = low + 8 + 9 * far.index(k) if k in far else 0.0
            parts.append(_arrow(columns[one.rank], one, columns[other.rank], other, lane))
    wide, high = left - _GAP + _EDGE, low + 12 + 9 * len(far)
    fact = escape(f"{error.program}: {error.fact}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" '
        f'width="{wide:.0f}" height="{high:.0f}" role="img" font-size="12" '
        f'font-family="ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace">'
        f"\n<title>{fact}</title>\n"
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ACCENT}"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _ended(program: Program, error: DeadlockError) -> NDArray[np.bool_]:
    """What has ended; where hosts wait and messages would not, what these hosts have issued."""
    graph = Graph.of(program, cast(ProgressModel, error.progress_model))
    ended = walk(graph).done
    if ended.all():
        ended = np.zeros(len(program), bool)
        for wait in error.cycle:
            begin = int(program.offsets[wait.rank])
            ended[begin : begin + wait.index] = True
    return ended


def _crossed(error: GroupError) -> bool:
    """Whether it names two receives, in their order, and the two sends that they get, in theirs."""
    ops = [site.instr.op for site in error.sites if isinstance(site.instr, Instr)]
    return len(ops) == 4 and {*ops[:2]} <= {*RECEIVES} and {*ops[2:]} <= {*SENDS}


def _apart(shown: Sequence[int], one: _InstructionPosition, other: _InstructionPosition) -> int:
    return abs(shown.index(one.rank) - shown.index(other.rank))


class _RankColumn:
    """One rank's list, or the part of it around what matters."""

    def __init__(
        self,
        program: Program,
        rank: int,
        left: float,
        places: Sequence[_InstructionPosition],
        ended: NDArray[np.bool_],
    ) -> None:
        stream, first = program.streams[rank], int(program.offsets[rank])
        self.rank, self.left, size = rank, left, len(stream)
        self.ended = ended[first : first + size]
        matters = [place.at for place in places if place.rank == rank]
        if not matters:
            still = np.flatnonzero(~self.ended)
            matters = [int(still[0]) if len(still) else size - 1]
        self.low = max(min(matters) - _AROUND, 0)
        self.high = min(max(matters) + _AROUND + 1, size)
        # One that is left out takes as much room as the line that says so.
        self.low, self.high = (
            self.low * (self.low > 1),
            max(self.high, size * (self.high + 2 > size)),
        )
        joined = stream.joined.tolist()
        self.lines = {
            k: f"{'& ' if joined[k] else ''}{stream[k]}" for k in range(self.low, self.high)
        }
        self.before, self.behind = self.low, size - self.high
        longest = max([len(line) for line in self.lines.values()] + [9])
        self.right = left + longest * _LETTER + 14
        rows = len(self.lines) + (self.before > 0) + (self.behind > 0)
        self.bottom = _TOP + rows * _LINE + 4

    def middle(self, index: int) -> float:
        """How far down an instruction stands."""
        return _TOP + (index - self.low + (self.before > 0) + 0.5) * _LINE

    def drawn(self, at: set[_InstructionPosition], to: set[_InstructionPosition]) -> str:
        """The list: what has ended is grey, what waits is filled, what is waited for is framed."""
        parts = [f'<text x="{self.left + 7:.1f}" y="20" font-weight="bold">rank {self.rank}</text>']
        for index, line in self.lines.items():
            here, y, wide = (
                _InstructionPosition(self.rank, index),
                self.middle(index),
                self.right - self.left,
            )
            ink = _GONE if self.ended[index] else _INK
            if here in at or here in to:
                fill, ink = (ACCENT, "#ffffff") if here in at else (_PALE, _INK)
                parts.append(
                    f'<rect x="{self.left:.1f}" y="{y - 9:.1f}" width="{wide:.1f}" '
                    f'height="18" rx="4" fill="{fill}" stroke="{ACCENT}"/>'
                )
            parts.append(
                f'<text x="{self.left + 7:.1f}" y="{y + 4:.1f}" fill="{ink}">{escape(line)}</text>'
            )
        above, below = self.middle(self.low - 1), self.middle(self.high)
        for number, y, word in ((self.before, above, "before"), (self.behind, below, "more")):
            if number:
                parts.append(
                    f'<text x="{self.left + 7:.1f}" y="{y + 4:.1f}" fill="{_GONE}">'
                    f"({number} {word})</text>"
                )
        return "\n".join(parts)


def _arrow(
    a: _RankColumn,
    one: _InstructionPosition,
    b: _RankColumn,
    other: _InstructionPosition,
    lane: float,
) -> str:
    """From what waits to what it waits for; between columns that are far apart, below all."""
    y, end = a.middle(one.at), b.middle(other.at)
    if a is b:
        x = a.right
        path = f"M{x:.1f} {y:.1f}C{x + 34:.1f} {y:.1f} {x + 34:.1f} {end:.1f} {x + 2:.1f} {end:.1f}"
    elif not lane:
        x, stop, bend = (
            (a.right, b.left - 2, _GAP / 2) if a.left < b.left else (a.left, b.right + 2, -_GAP / 2)
        )
        path = (
            f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {stop - bend:.1f} {end:.1f} "
            f"{stop:.1f} {end:.1f}"
        )
    else:
        x, stop, off = (a.left, b.right + 2, -14) if a.left > b.left else (a.right, b.left - 2, 14)
        path = f"M{x:.1f} {y:.1f}H{x + off:.1f}V{lane:.1f}H{stop - off:.1f}V{end:.1f}H{stop:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{ACCENT}" stroke-width="1.6" '
        f'stroke-linejoin="round" marker-end="url(#tip)"/>'
    )
