"""Clusters by name, from files in which every number has a source."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from schedir.errors import UsageError, said
from schedir.io.cluster_file import load_cluster
from schedir.ir.cost.cluster import Cluster

_FOLDER = Path(__file__).parent / "clusters"


def clusters() -> list[str]:
    """Their names.

    >>> from schedir.planner import clusters
    >>> "a100" in clusters()
    True
    """
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def cluster(name: str, nodes: int = 1) -> Cluster:
    """So many nodes of a known kind: "a100", ...

    Raises UsageError for a name that is not known.

    >>> from schedir import planner
    >>> planner.cluster("a100", nodes=384).gpus
    3072
    """
    if name not in clusters():
        near = get_close_matches(str(name), clusters(), 1)
        raise UsageError(
            f"nobody knows a cluster {said(name)}",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(clusters())}; load_cluster reads a file of your own",
            fields=["cluster"],
        )
    return replace(load_cluster(_FOLDER / f"{name}.toml"), nodes=nodes)
