"""Insert UNSHARD and RESHARD into torch's CSV."""

from __future__ import annotations

import re
from typing import Final

from schedir.analysis.memory.unshard_residency import place_unshards

UNSHARD: Final = "UNSHARD"
RESHARD: Final = "RESHARD"
_USE_PATTERN = re.compile(r"(?:^|[(;])(\d+)(?:[FBIW]\d+|REDUCE_GRAD)(?=$|[;)])", re.ASCII)
_SHARD_PATTERN = re.compile(rf"(\d+)({UNSHARD}|{RESHARD})", re.ASCII)


def fit_unshards_to_torch(row: list[str], unsharded_stages: int) -> list[str]:
    """A rank's cells as torch can run them: it wants a stage whole for its W and REDUCE_GRAD, too.

    As they are, if they are so; else with stages made whole anew, `unsharded_stages` at once.

    >>> fit_unshards_to_torch(["0UNSHARD", "0F0", "0I0", "0RESHARD", "0W0", "0REDUCE_GRAD"], 1)
    ['0UNSHARD', '0F0', '0I0', '0W0', '0REDUCE_GRAD', '0RESHARD']
    """
    whole: set[int] = set()
    for cell in row:
        if shard := _SHARD_PATTERN.fullmatch(cell):
            (whole.add if shard[2] == UNSHARD else whole.discard)(int(shard[1]))
        elif not whole.issuperset(_find_used_stages(cell)):
            break
    else:
        return row
    rest = [cell for cell in row if not _SHARD_PATTERN.fullmatch(cell)]
    found: list[str] = []
    for changes, cells in zip(
        place_unshards([_find_used_stages(cell) for cell in rest], unsharded_stages),
        [*([c] for c in rest), []],
        strict=True,
    ):
        found += [f"{stage}{UNSHARD if begins else RESHARD}" for stage, begins in changes]
        found += cells
    return found


def _find_used_stages(cell: str) -> tuple[int, ...]:
    """The stages that a cell wants whole."""
    return tuple(map(int, _USE_PATTERN.findall(cell)))
