"""Load clusters by name, from files that give the source of every number."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from schedir.errors import UsageError, describe
from schedir.io.cluster_file import load_cluster
from schedir.ir.cost.cluster import Cluster

_CLUSTER_DIRECTORY = Path(__file__).parent / "clusters"


def cluster_presets() -> list[str]:
    """Return the names of the cluster presets.

    Example:
        >>> from schedir.planner import cluster_presets
        >>> "a100" in cluster_presets()
        True
    """
    return sorted(file.stem for file in _CLUSTER_DIRECTORY.glob("*.toml"))


def get_preset_path(name: str) -> Path | None:
    """Return the path of the file of a cluster preset, or None if no preset has this name.

    Args:
        name: The name of the preset.
    """
    return _CLUSTER_DIRECTORY / f"{name}.toml" if name in cluster_presets() else None


def cluster_preset(name: str, nodes: int = 1) -> Cluster:
    """Return a cluster by its name.

    Args:
        name: The name of the preset, such as "a100".
        nodes: The number of nodes.

    Raises:
        UsageError: No preset has this name.

    Example:
        >>> from schedir import planner
        >>> planner.cluster_preset("a100", nodes=384).gpu_count
        3072
    """
    if (path := get_preset_path(name)) is None:
        matches = get_close_matches(str(name).lower(), cluster_presets(), 1)
        raise UsageError(
            f"there is no cluster preset {describe(name)}",
            hint=f"did you mean {matches[0]!r}?"
            if matches
            else f"the presets are {', '.join(cluster_presets())}; load_cluster and --cluster "
            "FILE.toml read a file",
            fields=["cluster"],
        )
    return replace(load_cluster(path), nodes=nodes)
