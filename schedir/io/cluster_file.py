"""Cluster file: a Cluster in TOML, a line for each of its numbers."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path

from schedir.errors import ConfigError, UsageError, said
from schedir.io.files import read_text
from schedir.io.toml import MOST_BYTES, tables_of
from schedir.ir.cluster import Cluster

_NAMES = [f.name for f in fields(Cluster)]
_REQUIRED = [f.name for f in fields(Cluster) if f.default is MISSING]


def load_cluster(path: str | Path) -> Cluster:
    """Read a Cluster from a TOML file, which has its fields, as numbers or as texts with units.

    Raises ConfigError that says where, and UsageError for a file that cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from schedir import load_cluster
    >>> text = 'nodes = 2\\ngpus_per_node = 8\\nflops = "312TFLOP/s"\\nmemory = "80GB"\\n'
    >>> text += 'hbm = "2039GB/s"\\nnvlink = "300GB/s"\\nnetwork = "25GB/s"\\n'
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "cluster.toml").write_text(text)
    ...     load_cluster(f"{folder}/cluster.toml").gpus
    16
    """
    text = read_text(path, MOST_BYTES)
    table = tables_of(text, str(path))
    for name, value in table.items():
        if name not in _NAMES:
            near = get_close_matches(name, _NAMES, 1)
            raise _refused(
                f"a cluster has no {said(name)}", name, path, text,
                hint=f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_NAMES)}",
            )  # fmt: skip
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise _refused(f"{name} is a number or a text, not {said(value)}", name, path, text)
    if missing := [name for name in _REQUIRED if name not in table]:
        raise _refused(f"says nothing of {', '.join(missing)}", missing[0], path, text)
    try:
        return Cluster(**table)
    except UsageError as error:
        fact = error.fact.removeprefix("cluster: ")
        raise _refused(fact, error.fields[0], path, text, error.hint) from None


def _refused(fact: str, name: str, path: str | Path, text: str, hint: str = "") -> ConfigError:
    """The refusal of a setting, and where it stands."""
    line, column = 0, 0
    if found := re.search(rf"^[ \t\[]*[\"']?({re.escape(name)})\b", text, re.M):
        line = text.count("\n", 0, found.start(1)) + 1
        column = found.start(1) - text.rfind("\n", 0, found.start(1))
    return ConfigError(fact, where=str(path), line=line, column=column, hint=hint, fields=[name])
