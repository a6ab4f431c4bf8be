"""Draw the instructions that an error of `check` names, as an SVG.

Each rank in the picture has a column with the relevant part of its Stream. In a deadlock, arrows
lead from the instructions that wait to the instructions for which they wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import DeadlockError, GroupError, SchedirError
from schedir.ir.isa.instructions import RECV_OPS, SEND_OPS, Instr
from schedir.ir.program import Program
from schedir.viz.palette import ACCENT_COLOR

# Pixels.
_LETTER_WIDTH, _LINE_HEIGHT = 7.3, 20.0
_COLUMN_GAP: Final = 76.0  # between two columns, for the arrows
_MARGIN: Final = 14.0
_HEADER_HEIGHT: Final = 34.0
_CONTEXT_INSTRUCTIONS: Final = 2  # instructions shown before and after the relevant ones
_MAX_RANKS: Final = 8  # a program with more ranks shows only the ranks that the error names
_TEXT_COLOR, _AWAITED_COLOR, _ENDED_COLOR = "#1a1a1a", "#fbe3ee", "#9a9a9a"


class _InstructionPosition(NamedTuple):
    """The rank of an instruction, and its index in the Stream."""

    rank: int
    stream_index: int


def draw_deadlock(program: Program, error: SchedirError) -> str:
    """Return an SVG of the instruction lists of the ranks, and mark the instructions of an error.

    For a DeadlockError, ended instructions are grey and waiting instructions are filled. An arrow
    leads from each waiting instruction to the instruction that it waits for. If two messages of a
    group cross, an arrow leads from each send to the receive that gets its message. For other
    errors, the instructions that the error names are filled.

    Args:
        program: The program.
        error: The error that `check` raised for the program.

    Returns:
        The text of the SVG.
    """
    has_ended = np.zeros(len(program), bool)
    waiting = [_InstructionPosition(site.rank, site.index) for site in error.sites]
    awaited = list[_InstructionPosition]()
    if isinstance(error, DeadlockError):
        waiting = [_InstructionPosition(wait.rank, wait.index) for wait in error.cycle]
        awaited = [
            _InstructionPosition(wait.needed_rank, wait.needed_index) for wait in error.cycle
        ]
        has_ended = _find_ended(program, error)
    elif isinstance(error, GroupError) and _is_crossing(error):
        waiting, awaited = waiting[2:], waiting[:2]
    ranks = program.shape.ranks
    shown_ranks = [*range(ranks)]
    if ranks > _MAX_RANKS:
        shown_ranks = sorted({position.rank for position in (*waiting, *awaited)})
    columns: dict[int, _RankColumn] = {}
    left = _MARGIN
    for rank in shown_ranks:
        columns[rank] = _RankColumn(program, rank, left, [*waiting, *awaited], has_ended)
        left = columns[rank].right + _COLUMN_GAP
    lists_bottom = max(column.bottom for column in columns.values())
    detours = [
        k
        for k, (a, b) in enumerate(zip(waiting, awaited, strict=False))
        if _count_columns_between(shown_ranks, a, b) > 1
    ]
    parts = [column.draw({*waiting}, {*awaited}) for column in columns.values()]
    for k, (source, target) in enumerate(zip(waiting, awaited, strict=False)):
        if source != target:
            detour_height = lists_bottom + 8 + 9 * detours.index(k) if k in detours else 0.0
            from_column, to_column = columns[source.rank], columns[target.rank]
            parts.append(_draw_arrow(from_column, source, to_column, target, detour_height))
    width = left - _COLUMN_GAP + _MARGIN
    height = lists_bottom + 12 + 9 * len(detours)
    fact = escape(f"{error.program}: {error.fact}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" font-size="12" '
        f'font-family="ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace">'
        f"\n<title>{fact}</title>\n"
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ACCENT_COLOR}"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _find_ended(program: Program, error: DeadlockError) -> NDArray[np.bool_]:
    """Return a mask of the instructions that have ended.

    The dependency graph in this function contains no waits of hosts. If the program finishes
    without these waits, the mask contains the instructions before the waiting instruction of each
    rank in the cycle.
    """
    graph = Graph.from_program(program, cast(ProgressModel, error.progress_model))
    has_ended = compute_earliest_times(graph).is_done
    if has_ended.all():
        has_ended = np.zeros(len(program), bool)
        for wait in error.cycle:
            begin = int(program.offsets[wait.rank])
            has_ended[begin : begin + wait.index] = True
    return has_ended


def _is_crossing(error: GroupError) -> bool:
    """Return whether an error names two receives, and the two sends whose messages they get."""
    ops = [site.instr.op for site in error.sites if isinstance(site.instr, Instr)]
    return len(ops) == 4 and {*ops[:2]} <= {*RECV_OPS} and {*ops[2:]} <= {*SEND_OPS}


def _count_columns_between(
    shown_ranks: Sequence[int], first: _InstructionPosition, second: _InstructionPosition
) -> int:
    return abs(shown_ranks.index(first.rank) - shown_ranks.index(second.rank))


class _RankColumn:
    """The instruction list of one rank, or the part around its relevant instructions."""

    def __init__(
        self,
        program: Program,
        rank: int,
        left: float,
        positions: Sequence[_InstructionPosition],
        has_ended: NDArray[np.bool_],
    ) -> None:
        stream, offset = program.streams[rank], int(program.offsets[rank])
        self.rank, self.left, size = rank, left, len(stream)
        self.has_ended = has_ended[offset : offset + size]
        relevant_indices = [
            position.stream_index for position in positions if position.rank == rank
        ]
        if not relevant_indices:
            unfinished = np.flatnonzero(~self.has_ended)
            relevant_indices = [int(unfinished[0]) if len(unfinished) else size - 1]
        self.begin_index = max(min(relevant_indices) - _CONTEXT_INSTRUCTIONS, 0)
        self.end_index = min(max(relevant_indices) + _CONTEXT_INSTRUCTIONS + 1, size)
        # If only one instruction would be hidden, it is shown: "(1 more)" takes the same space.
        self.begin_index, self.end_index = (
            self.begin_index * (self.begin_index > 1),
            max(self.end_index, size * (self.end_index + 2 > size)),
        )
        is_joined = stream.joined.tolist()
        self.lines = {
            k: f"{'& ' if is_joined[k] else ''}{stream[k]}"
            for k in range(self.begin_index, self.end_index)
        }
        self.hidden_before = self.begin_index
        self.hidden_after = size - self.end_index
        line_length = max([len(line) for line in self.lines.values()] + [9])
        self.right = left + line_length * _LETTER_WIDTH + 14
        rows = len(self.lines) + (self.hidden_before > 0) + (self.hidden_after > 0)
        self.bottom = _HEADER_HEIGHT + rows * _LINE_HEIGHT + 4

    def find_middle(self, index: int) -> float:
        """Return the y coordinate of the middle of an instruction."""
        return (
            _HEADER_HEIGHT
            + (index - self.begin_index + (self.hidden_before > 0) + 0.5) * _LINE_HEIGHT
        )

    def draw(self, waiting: set[_InstructionPosition], awaited: set[_InstructionPosition]) -> str:
        """Return the SVG of the list.

        Ended instructions are grey. Waiting instructions have a dark background, and awaited ones a
        light background.
        """
        parts = [f'<text x="{self.left + 7:.1f}" y="20" font-weight="bold">rank {self.rank}</text>']
        for index, line in self.lines.items():
            position = _InstructionPosition(self.rank, index)
            y = self.find_middle(index)
            width = self.right - self.left
            color = _ENDED_COLOR if self.has_ended[index] else _TEXT_COLOR
            if position in waiting or position in awaited:
                fill, color = (
                    (ACCENT_COLOR, "#ffffff")
                    if position in waiting
                    else (_AWAITED_COLOR, _TEXT_COLOR)
                )
                parts.append(
                    f'<rect x="{self.left:.1f}" y="{y - 9:.1f}" width="{width:.1f}" '
                    f'height="18" rx="4" fill="{fill}" stroke="{ACCENT_COLOR}"/>'
                )
            parts.append(
                f'<text x="{self.left + 7:.1f}" y="{y + 4:.1f}" fill="{color}">'
                f"{escape(line)}</text>"
            )
        above = self.find_middle(self.begin_index - 1)
        below = self.find_middle(self.end_index)
        for number, y, label in (
            (self.hidden_before, above, "before"),
            (self.hidden_after, below, "more"),
        ):
            if number:
                parts.append(
                    f'<text x="{self.left + 7:.1f}" y="{y + 4:.1f}" fill="{_ENDED_COLOR}">'
                    f"({number} {label})</text>"
                )
        return "\n".join(parts)


def _draw_arrow(
    from_column: _RankColumn,
    from_position: _InstructionPosition,
    to_column: _RankColumn,
    to_position: _InstructionPosition,
    detour_height: float,
) -> str:
    """Return the SVG of an arrow from a waiting instruction to the awaited one.

    If the two columns are not adjacent, the arrow passes below all columns. `detour_height` is the
    y coordinate of this part of the arrow, or 0 for a direct arrow.
    """
    y = from_column.find_middle(from_position.stream_index)
    end_y = to_column.find_middle(to_position.stream_index)
    if from_column is to_column:
        x = from_column.right
        path = (
            f"M{x:.1f} {y:.1f}C{x + 34:.1f} {y:.1f} {x + 34:.1f} {end_y:.1f} "
            f"{x + 2:.1f} {end_y:.1f}"
        )
    else:
        x, end_x, direction = (
            (from_column.right, to_column.left - 2, 1)
            if from_column.left < to_column.left
            else (from_column.left, to_column.right + 2, -1)
        )
        bend, shift = direction * _COLUMN_GAP / 2, direction * 14
        path = (
            f"M{x:.1f} {y:.1f}H{x + shift:.1f}V{detour_height:.1f}"
            f"H{end_x - shift:.1f}V{end_y:.1f}H{end_x:.1f}"
            if detour_height
            else f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {end_x - bend:.1f} {end_y:.1f} "
            f"{end_x:.1f} {end_y:.1f}"
        )
    return (
        f'<path d="{path}" fill="none" stroke="{ACCENT_COLOR}" stroke-width="1.6" '
        f'stroke-linejoin="round" marker-end="url(#tip)"/>'
    )
