"""Insert UNSHARD and RESHARD into torch's CSV."""

from __future__ import annotations

import re
from typing import Final

from schedir.passes.communication.unshard_placement import place_unshards

UNSHARD: Final = "UNSHARD"
RESHARD: Final = "RESHARD"
_USE_PATTERN = re.compile(r"(?:^|[(;])(\d+)(?:[FBIW]\d+|REDUCE_GRAD)(?=$|[;)])", re.ASCII)
_SHARD_PATTERN = re.compile(rf"(\d+)({UNSHARD}|{RESHARD})", re.ASCII)


def fit_unshards_to_torch(row: list[str], unsharded_stages: int) -> list[str]:
    """Return the cells of a rank with UNSHARD and RESHARD where torch needs them.

    torch needs an unsharded stage for F, B, I, W and REDUCE_GRAD.

    Args:
        row: The cells of a rank.
        unsharded_stages: The largest number of stages that may be unsharded at the same time.

    Returns:
        `row` itself if every stage is unsharded at each of its uses. Otherwise the cells with new
        positions of UNSHARD and RESHARD.

    Example:
        >>> fit_unshards_to_torch(["0UNSHARD", "0F0", "0I0", "0RESHARD", "0W0", "0REDUCE_GRAD"], 1)
        ['0UNSHARD', '0F0', '0I0', '0W0', '0REDUCE_GRAD', '0RESHARD']
    """
    unsharded: set[int] = set()
    for cell in row:
        if shard := _SHARD_PATTERN.fullmatch(cell):
            (unsharded.add if shard[2] == UNSHARD else unsharded.discard)(int(shard[1]))
        elif not unsharded.issuperset(_find_used_stages(cell)):
            break
    else:
        return row
    other_cells = [cell for cell in row if not _SHARD_PATTERN.fullmatch(cell)]
    cells_with_unshards: list[str] = []
    for changes, cells in zip(
        place_unshards([_find_used_stages(cell) for cell in other_cells], unsharded_stages),
        [*([c] for c in other_cells), []],
        strict=True,
    ):
        cells_with_unshards += [
            f"{stage}{UNSHARD if is_unshard else RESHARD}" for stage, is_unshard in changes
        ]
        cells_with_unshards += cells
    return cells_with_unshards


def _find_used_stages(cell: str) -> tuple[int, ...]:
    """Return the stages that must be unsharded for a cell."""
    return tuple(map(int, _USE_PATTERN.findall(cell)))
