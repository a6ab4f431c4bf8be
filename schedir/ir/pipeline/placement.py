"""Placement: the rank of each stage, with one row of ranks for each stage replica."""

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
Ranks = NDArray[np.int64]  # One entry for each stage.
# A function of the numbers of the stages and the number of ranks: returns each stage's rank.
PlacementRow = Callable[[Ranks, int], Ranks]


def _place_loop(stage: Ranks, ranks: int) -> Ranks:
    return stage % ranks


def _place_vee(stage: Ranks, ranks: int) -> Ranks:
    """Return ranks from 0 to P-1, back to 0, and so on: rank r has stages r, 2P-1-r, 2P+r, ..."""
    return np.where(stage // ranks % 2, ranks - 1 - stage % ranks, stage % ranks)


def _mirror_row(row: PlacementRow) -> PlacementRow:
    """Return the row with the order of the ranks reversed: rank r becomes P-1-r."""
    return lambda stage, ranks: ranks - 1 - row(stage, ranks)


class NamedPlacement(NamedTuple):
    """A placement that has a name.

    Args:
        rows: One function for each replica of the stages.
        stages_per_rank: Default number of stages per rank.
    """

    rows: tuple[PlacementRow, ...]
    stages_per_rank: int


NAMED_PLACEMENTS: Final = {
    "loop": NamedPlacement((_place_loop,), 1),
    "vee": NamedPlacement((_place_vee,), 2),
    "mirror": NamedPlacement((_place_loop, _mirror_row(_place_loop)), 2),
    "mirror-vee": NamedPlacement((_place_vee, _mirror_row(_place_vee)), 4),
}


def find_named_placement(placement: str) -> NamedPlacement:
    """Look up a named placement.

    Args:
        placement: A key of `NAMED_PLACEMENTS`.

    Returns:
        The placement.

    Raises:
        ShapeError: No placement has this name.
    """
    if placement not in NAMED_PLACEMENTS:
        raise _make_placement_error(placement)
    return NAMED_PLACEMENTS[placement]


def to_placement_rows(placement: object) -> tuple[tuple[int, ...], ...]:
    """Convert a placement that is given as numbers to rows.

    Args:
        placement: A row with the rank of each stage, or one such row for each stage replica.

    Returns:
        The rows, as a tuple even if there is only one row.

    Raises:
        ShapeError: `placement` is neither a row of integers nor several such rows.
    """
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
        f"placement must be {names}, a list with the rank of each stage, or one such list for each "
        f"stage replica, not {value!r:.80}",
        fields=["placement"],
    )


def require_placement_rows(rows: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """Verify the rows of a placement, and return the largest number of stages on a rank.

    Args:
        rows: The rank of each stage, one row for each replica.
        ranks: Number of ranks.

    Returns:
        The largest number of stages on a rank.

    Raises:
        ShapeError: The rows have different lengths, a rank is out of range, a rank has two replicas
            of one stage, or a rank has no stage.
    """
    fields = ["placement", "ranks"]
    if len({*map(len, rows)}) > 1:
        raise ShapeError(
            "each row of placement must have a rank for every stage, but the rows have "
            f"{' and '.join(map(str, map(len, rows)))} ranks",
            fields=["placement"],
        )
    stage_counts = [0] * ranks
    for stage, replicas in enumerate(zip(*rows, strict=True)):
        for rank in replicas:
            if not 0 <= rank < ranks:
                raise ShapeError(
                    f"placement puts stage {stage} on rank {rank}, but the ranks are "
                    f"0 to {ranks - 1}",
                    hint="placement lists the rank of each stage, from the first stage to the last",
                    fields=fields,
                )
            stage_counts[rank] += 1
        if len({*replicas}) < len(replicas):
            rank = next(rank for rank in replicas if replicas.count(rank) > 1)
            raise ShapeError(
                f"placement puts stage {stage} on rank {rank} twice: the replicas of a stage "
                "must be on different ranks",
                fields=["placement"],
            )
    for rank, count in enumerate(stage_counts):
        if not count:
            raise ShapeError(f"placement gives rank {rank} no stage", fields=fields)
    return max(stage_counts)


def _parse_placement(text: str) -> Placement:
    try:
        rows = tuple(map(parse_integers, text.split("/")))
    except ValueError:
        if text[:1].isdigit():
            raise ValueError(f"{_REQUIREMENT}, not {text!r}") from None
        return text  # The text is a name, which the shape verifies.
    return rows if len(rows) > 1 else rows[0]


def _resolve_placement(_: str, placement: Any, __: object) -> Any:
    """Return a placement. A text with ranks is parsed, and other values are returned unchanged."""
    try:
        return _parse_placement(placement) if isinstance(placement, str) else placement
    except ValueError:
        raise _make_placement_error(placement) from None


def format_placement(placement: Placement, _: object = None) -> str:
    """Format a placement as a text: `vee`, `0,1,1,0` or `0,1/1,0`.

    Args:
        placement: A name, the rank of each stage, or several rows.
        _: The shape, which is not used.

    Returns:
        The text.
    """
    if isinstance(placement, str):
        return placement
    return "/".join(",".join(map(str, row)) for row in to_placement_rows(placement))


_REQUIREMENT = "must be a name, ranks like 0,1,1,0, or several rows of ranks like 0,1/1,0"
PLACEMENT_TYPE: Final = FieldType(
    _REQUIREMENT, _parse_placement, Placement, format_placement, _resolve_placement, "WHERE"
)
