"""Read and write a Cluster as a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType

from schedir.errors import ConfigError, UsageError, describe, require_type
from schedir.io.files import atomic_write, read_text
from schedir.io.toml_tables import MAX_TOML_BYTES, parse_toml, suggest_field
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.units import find_forgotten_unit, format_cluster_field, require_physical
from schedir.retired_names import RENAMED_CLUSTER_FIELDS

_FIELD_NAMES = [f.name for f in fields(Cluster)]
_REQUIRED_FIELDS = [f.name for f in fields(Cluster) if f.default is MISSING]


def load_cluster(path: str | Path) -> Cluster:
    r"""Read a Cluster from a TOML file.

    Args:
        path: The file. Its keys are the fields of `Cluster`. A value is a number or a text with a
            unit.

    Returns:
        The cluster.

    Raises:
        ConfigError: The file is not TOML, a field is unknown, missing or invalid, or a number is
            too large for any machine. Unless a field is missing, the error has the line and the
            column.
        UsageError: The file cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from schedir import load_cluster
        >>> text = 'nodes = 2\ngpus_per_node = 8\nflops = "312TFLOP/s"\nmemory = "80GB"\n'
        >>> text += 'hbm_bandwidth = "2039GB/s"\nnvlink_bandwidth = "300GB/s"\n'
        >>> text += 'network_bandwidth = "25GB/s"\n'
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "cluster.toml").write_text(text)
        ...     load_cluster(f"{folder}/cluster.toml").gpu_count
        16
    """
    try:
        text = read_text(path, MAX_TOML_BYTES)
    except UsageError as error:
        if not Path(path).suffix:  # The path may be the name of a cluster, such as "a100".
            error.hint = f"schedir.planner.cluster_preset({str(path)!r}) returns a cluster by name"
        raise
    table = parse_toml(text, str(path))
    for name, value in table.items():
        if name not in _FIELD_NAMES:
            new_name = RENAMED_CLUSTER_FIELDS.get(name, "")
            raise _make_setting_error(
                f"a cluster has no field {describe(name)}", name, path, text,
                hint=suggest_field(name, table, _FIELD_NAMES, new_name),
            )  # fmt: skip
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise _make_setting_error(
                f"{name} must be a number or a text, not {describe(value)}", name, path, text
            )
        base, unit = ("", "") if isinstance(value, str) else find_forgotten_unit(name, value)
        if unit:
            fact = f"{name} = {value} is a number of {base}"
            raise _make_setting_error(fact, name, path, text, f'{name} = "{value}{unit}"')
    if missing_fields := [name for name in _REQUIRED_FIELDS if name not in table]:
        fact = f"required fields are missing: {', '.join(missing_fields)}"
        raise _make_setting_error(fact, missing_fields[0], path, text)
    try:
        cluster = Cluster(**table)
        for name in table:
            require_physical(name, getattr(cluster, name))
    except UsageError as error:
        fact = error.fact.removeprefix("cluster: ")
        raise _make_setting_error(fact, error.fields[0], path, text, error.hint) from None
    return cluster


def save_cluster(
    cluster: Cluster,
    path: str | Path,
    *,
    comment: str = "",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a Cluster as a TOML file that `load_cluster` reads.

    Fields with their default value are left out. The file is written completely or not at all.

    Args:
        cluster: The cluster.
        path: The file.
        comment: Lines that are written as comments at the top of the file.
        notes: Comments by field. Each comment is written after the value of its field.

    Raises:
        UsageError: The file cannot be written, or a key of `notes` is not a field.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from schedir import Cluster, load_cluster, save_cluster
        >>> node = Cluster(nodes=1, gpus_per_node=8, flops="252TFLOP/s", memory="80GB",
        ...                hbm_bandwidth="1.7TB/s", nvlink_bandwidth="232GB/s",
        ...                network_bandwidth="24GB/s", latency="5us")
        >>> with TemporaryDirectory() as folder:
        ...     save_cluster(node, f"{folder}/node.toml", notes={"flops": "of 312"})
        ...     print(Path(f"{folder}/node.toml").read_text().splitlines()[2])
        ...     load_cluster(f"{folder}/node.toml") == node
        flops = "252TFLOP/s"  # of 312
        True
    """
    require_type(cluster, "cluster", Cluster, "schedir.load_cluster(path)")
    if bad_fields := sorted({*notes} - {*_FIELD_NAMES}):
        raise UsageError(
            f"notes: a cluster has no field {describe(bad_fields[0])}", fields=["notes"]
        )
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for f in fields(Cluster):
        value = getattr(cluster, f.name)
        if value != f.default:
            note = " ".join(notes.get(f.name, "").split())
            lines.append(
                f"{f.name} = {format_cluster_field(f.name, value)}{note and f'  # {note}'}"
            )
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _make_setting_error(
    fact: str, name: str, path: str | Path, text: str, hint: str = ""
) -> ConfigError:
    """Return the error for a setting, with its line and column if the text contains the setting."""
    line, column = 0, 0
    if match := re.search(rf"^[ \t\[]*[\"']?({re.escape(name)})\b", text, re.M):
        line = text.count("\n", 0, match.start(1)) + 1
        column = match.start(1) - text.rfind("\n", 0, match.start(1))
    return ConfigError(fact, location=str(path), line=line, column=column, hint=hint, fields=[name])
