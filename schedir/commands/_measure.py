"""Measure: the machine that this runs on, as the cluster file that plans are made for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from schedir.commands._options import count
from schedir.errors import UsageError
from schedir.extras import require

_NEEDED: Final = ("model", "layers", "batch", "cluster", "scale", "picture")  # to plan
_WITH: Final = ("processes", "device")  # to measure


def add_measure(group: argparse._ArgumentGroup) -> None:
    """What says that, and how, the machine is measured."""
    group.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine, in about half a minute: -o here.toml is its cluster file",
    )
    group.add_argument(
        "--processes", type=count, metavar="N",
        help="how many train on it (one for each processor, or GPU)",
    )  # fmt: skip
    group.add_argument("--device", metavar="DEVICE", help="their device: cpu (default) or cuda")


def measured(args: argparse.Namespace) -> str | None:
    """What was measured beside what the file says of it, which is written; None to plan.

    Raises UsageError where it is not said where to write, what is to be planned is said, too, or
    what cannot be measured.
    """
    if not args.measure:
        if said := [name for name in _WITH if getattr(args, name) is not None]:
            raise UsageError(f"--{said[0]} is of --measure", hint="--measure -o here.toml",
                             fields=said)  # fmt: skip
        return None
    if said := [name for name in _NEEDED if getattr(args, name) is not None]:
        raise UsageError(
            f"--measure plans nothing, and takes no --{said[0]}",
            hint="plan with the file that it writes: --cluster here.toml", fields=said,
        )  # fmt: skip
    if args.output is None or Path(args.output).suffix != ".toml":
        raise UsageError("--measure writes a cluster file, FILE.toml, and nobody says where",
                         hint="-o here.toml", fields=["output"])  # fmt: skip
    require("torch", "--measure")
    from schedir.io.cluster_file import save_cluster
    from schedir.io.files import atomic_write
    from schedir.training.measure import measure

    with atomic_write(args.output) as temporary:  # what cannot be written is not measured for
        temporary.touch()
        found = measure(args.processes, args.device or "cpu", progress=True)
        of = f"{found.cluster.gpus} process{'es' * (found.cluster.gpus > 1)}"
        about = f"Measured by schedir plan --measure, of {of} at the same time."
        save_cluster(found.cluster, temporary, about=about, notes=found.notes)
    warnings = [f"warning: {one}" for one in found.warnings]
    return "".join(f"{line}\n" for line in (*found.table, *warnings, f"wrote {args.output}"))
