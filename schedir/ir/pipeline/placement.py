"""Placement: the rank of each stage.  Bidirectional placements have a row for each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ShapeError
from schedir.ir.cost.number_parsing import NO_NUMBERS
from schedir.ir.pipeline.field_schema import FieldType, whole_numbers

Placement = str | tuple[int, ...] | tuple[tuple[int, ...], ...]
Ranks = NDArray[np.int64]  # by stage
Row = Callable[[Ranks, int], Ranks]  # of the numbers of stages, and how many ranks there are


def _loop(stage: Ranks, ranks: int) -> Ranks:
    return stage % ranks


def _vee(stage: Ranks, ranks: int) -> Ranks:
    """Down the ranks and back, again and again: rank r holds r, 2P-1-r, 2P+r, ..."""
    return np.where(stage // ranks % 2, ranks - 1 - stage % ranks, stage % ranks)


def _mirrored(row: Row) -> Row:
    """The same from the last rank on."""
    return lambda stage, ranks: ranks - 1 - row(stage, ranks)


class NamedPlacement(NamedTuple):
    """A placement with a name: its rows, and the stages per rank of a shape that does not say."""

    rows: tuple[Row, ...]
    stages_per_rank: int


PLACEMENTS: Final = {
    "loop": NamedPlacement((_loop,), 1),
    "vee": NamedPlacement((_vee,), 2),
    "mirror": NamedPlacement((_loop, _mirrored(_loop)), 2),
    "mirror-vee": NamedPlacement((_vee, _mirrored(_vee)), 4),
}


def named_of(placement: str) -> NamedPlacement:
    """The placement of a name; ShapeError for a name that none has."""
    if placement not in PLACEMENTS:
        raise _no_placement(placement)
    return PLACEMENTS[placement]


def rows_of(placement: object) -> tuple[tuple[int, ...], ...]:
    """The rows that somebody gives, as one row or several; ShapeError for what is neither."""
    try:
        outer = _items(placement)
        rows = [outer]
        if outer and isinstance(outer[0], Iterable):
            rows = [*map(_items, outer)]
        return tuple(tuple(map(index, row)) for row in rows)
    except TypeError:
        raise _no_placement(placement) from None


def _items(given: Any) -> list[Any]:
    if isinstance(given, NO_NUMBERS):
        raise TypeError
    return [*given]


def _no_placement(given: object) -> ShapeError:
    names = ", ".join(map(repr, PLACEMENTS))
    return ShapeError(
        f"placement must be {names}, the rank of each stage, or a row of these for each holder, "
        f"not {given!r:.80}",
        fields=["placement"],
    )


def check_rows(rows: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """The most stages that a rank holds; ShapeError for rows that no pipeline can have."""
    fields = ["placement", "ranks"]
    if len({*map(len, rows)}) > 1:
        raise ShapeError(
            f"each row of placement has a holder of every stage, but they have "
            f"{' and '.join(map(str, map(len, rows)))} ranks",
            fields=["placement"],
        )
    held = [0] * ranks
    for stage, holders in enumerate(zip(*rows, strict=True)):
        for rank in holders:
            if not 0 <= rank < ranks:
                raise ShapeError(
                    f"placement puts stage {stage} on rank {rank}, but the ranks are "
                    f"0 to {ranks - 1}",
                    fields=fields,
                )
            held[rank] += 1
        if len({*holders}) < len(holders):
            rank = next(rank for rank in holders if holders.count(rank) > 1)
            raise ShapeError(
                f"placement puts stage {stage} on rank {rank} twice: its holders are "
                "different ranks",
                fields=["placement"],
            )
    for rank, number in enumerate(held):
        if not number:
            raise ShapeError(f"placement gives rank {rank} no stage", fields=fields)
    return max(held)


def _read(text: str) -> Placement:
    try:
        rows = tuple(map(whole_numbers, text.split("/")))
    except ValueError:
        if text[:1].isdigit():
            raise ValueError(f"{_TAKES}, not {text!r}") from None
        return text  # a name
    return rows if len(rows) > 1 else rows[0]


def _settle(_: str, placement: Any, __: object) -> Any:
    """As given; or what a text says, if it is none of a name."""
    try:
        return _read(placement) if isinstance(placement, str) else placement
    except ValueError:
        raise _no_placement(placement) from None


def show_placement(placement: Placement, _: object = None) -> str:
    """A placement as text has it: `vee`, `0,1,1,0` or `0,1/1,0`."""
    if isinstance(placement, str):
        return placement
    return "/".join(",".join(map(str, row)) for row in rows_of(placement))


_TAKES = "is a name, ranks like 0,1,1,0, or rows of these like 0,1/1,0"
PLACEMENT: Final = FieldType(_TAKES, _read, Placement, show_placement, _settle, "WHERE")
