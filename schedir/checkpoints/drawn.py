"""Drawn: torch's generators, of modules that draw as they come (seed=None)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from schedir.checkpoints import storage
from schedir.checkpoints.folder import Kind, Manifest
from schedir.checkpoints.known import say
from schedir.checkpoints.own import Piece
from schedir.checkpoints.peers import Peers
from schedir.runtime.kept import KeptRank


def draw_on(
    peers: Peers,
    rank: KeptRank,
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    *,
    warn: bool,
) -> None:
    """Let torch's generators be as they were, if the world is."""
    if state["world"] != [*rank.world]:
        if warn:
            say(peers, "modules draw as they come (seed=None), others than in another world")
        return

    def restore() -> None:
        items = generators(peers, rank)
        storage.read(folder, manifest, [(name, pieces) for name, (_, pieces) in items.items()])
        for generator, (_, pieces) in zip(rank.draws.generators, items.values(), strict=True):
            generator.set_state(pieces[0].memory)

    peers.told(restore)


def generators(peers: Peers, rank: KeptRank) -> dict[str, tuple[Kind, list[Piece]]]:
    """The states of torch's generators in this process."""
    found: dict[str, tuple[Kind, list[Piece]]] = {}
    for k, generator in enumerate(rank.draws.generators):
        numbers: Tensor = generator.get_state()
        kind = Kind(tuple(numbers.shape), "uint8")
        name = f"generators/{peers.number}.{k}"
        found[name] = kind, [Piece((0,), tuple(numbers.shape), numbers)]
    return found
