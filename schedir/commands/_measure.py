"""Measure: the machine that this runs on, as the Cluster file that plans are made for."""

from __future__ import annotations

import argparse

from schedir.commands._options import count
from schedir.errors import UsageError

ASKED = ("measure", "processes", "device")


def add_measure(parser: argparse.ArgumentParser) -> None:
    """What `--measure` takes."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine, in about half a minute, and write its cluster file: "
        "-o here.toml",
    )
    parser.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="with --measure: how many train on it, by default one for each processor or GPU",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="with --measure: what they train on, by default processors",
    )


def measured(args: argparse.Namespace, path: str | None) -> str:
    """Measure, write the file, and say what was measured beside what the file says of it.

    Raises UsageError without a `path`, and for what cannot be measured.
    """
    if path is None:
        raise UsageError(
            "--measure writes a cluster file, and nobody says where", hint="-o here.toml",
            fields=["output"],
        )  # fmt: skip
    from schedir.io.cluster_file import save_cluster
    from schedir.training.measure import measure

    found = measure(args.processes, args.device or "cpu", progress=True)
    about = (
        f"Measured by schedir plan --measure: what each of {found.cluster.gpus} processes reaches."
    )
    save_cluster(found.cluster, path, about=about, notes=found.notes)
    lines = [*found.table, *(f"warning: {one}" for one in found.warnings), f"wrote {path}"]
    return "\n".join(lines)
