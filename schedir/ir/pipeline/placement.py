"""Placement: the rank of each stage.  Bidirectional placements have a row for each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ShapeError
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES
from schedir.ir.pipeline.field_schema import FieldType, parse_integers

Placement = str | tuple[int, ...] | tuple[tuple[int, ...], ...]
Ranks = NDArray[np.int64]  # by stage
PlacementRow = Callable[
    [Ranks, int], Ranks
]  # of the numbers of stages, and how many ranks there are


def _place_loop(stage: Ranks, ranks: int) -> Ranks:
    return stage % ranks


def _place_vee(stage: Ranks, ranks: int) -> Ranks:
    """Down the ranks and back, again and again: rank r holds r, 2P-1-r, 2P+r, ..."""
    return np.where(stage // ranks % 2, ranks - 1 - stage % ranks, stage % ranks)


def _mirror_row(row: PlacementRow) -> PlacementRow:
    """The same from the last rank on."""
    return lambda stage, ranks: ranks - 1 - row(stage, ranks)


class NamedPlacement(NamedTuple):
    """A placement with a name: its rows, and the stages per rank of a shape that does not say."""

    rows: tuple[PlacementRow, ...]
    stages_per_rank: int


NAMED_PLACEMENTS: Final = {
    "loop": NamedPlacement((_place_loop,), 1),
    "vee": NamedPlacement((_place_vee,), 2),
    "mirror": NamedPlacement((_place_loop, _mirror_row(_place_loop)), 2),
    "mirror-vee": NamedPlacement((_place_vee, _mirror_row(_place_vee)), 4),
}


def find_named_placement(placement: str) -> NamedPlacement:
    """The placement of a name; ShapeError for a name that none has."""
    if placement not in NAMED_PLACEMENTS:
        raise _make_placement_error(placement)
    return NAMED_PLACEMENTS[placement]


def to_placement_rows(placement: object) -> tuple[tuple[int, ...], ...]:
    """The rows that somebody gives, as one row or several; ShapeError for what is neither."""
    try:
        outer = _to_list(placement)
        rows = [outer]
        if outer and isinstance(outer[0], Iterable):
            rows = [*map(_to_list, outer)]
        return tuple(tuple(map(index, row)) for row in rows)
    except TypeError:
        raise _make_placement_error(placement) from None


def _to_list(value: Any) -> list[Any]:
    if isinstance(value, NON_NUMBER_TYPES):
        raise TypeError
    return [*value]


def _make_placement_error(value: object) -> ShapeError:
    names = ", ".join(map(repr, NAMED_PLACEMENTS))
    return ShapeError(
        f"placement must be {names}, the rank of each stage, or a row of these for each holder, "
        f"not {value!r:.80}",
        fields=["placement"],
    )


def require_placement_rows(rows: tuple[tuple[int, ...], ...], ranks: int) -> int:
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


def _parse_placement(text: str) -> Placement:
    try:
        rows = tuple(map(parse_integers, text.split("/")))
    except ValueError:
        if text[:1].isdigit():
            raise ValueError(f"{_REQUIREMENT}, not {text!r}") from None
        return text  # a name
    return rows if len(rows) > 1 else rows[0]


def _resolve_placement(_: str, placement: Any, __: object) -> Any:
    """As given; or what a text says, if it is none of a name."""
    try:
        return _parse_placement(placement) if isinstance(placement, str) else placement
    except ValueError:
        raise _make_placement_error(placement) from None


def format_placement(placement: Placement, _: object = None) -> str:
    """A placement as text has it: `vee`, `0,1,1,0` or `0,1/1,0`."""
    if isinstance(placement, str):
        return placement
    return "/".join(",".join(map(str, row)) for row in to_placement_rows(placement))


_REQUIREMENT = "is a name, ranks like 0,1,1,0, or rows of these like 0,1/1,0"
PLACEMENT_TYPE: Final = FieldType(
    _REQUIREMENT, _parse_placement, Placement, format_placement, _resolve_placement, "WHERE"
)
