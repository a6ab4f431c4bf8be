"""Queues: how many streams a rank has over NCCL, and how many hardware queues a GPU has for them.

Streams that share a hardware queue wait for each other, though nothing in a program says so.  A
GPU has 32, and CUDA_DEVICE_MAX_CONNECTIONS says how many CUDA uses, 8 unless it is set (CUDA C++
Programming Guide, "CUDA Environment Variables").
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from schedir.analysis.models import Model, model_row
from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.transports.cuda import QUEUES
from schedir.transports.edges import directed_edges
from schedir.transports.processes import rows_of

HARDWARE: Final = 32
UNSET: Final = 8  # that CUDA uses where nobody says


def streams_of(
    program: Program, rank: int, model: Model, more: Sequence[Program] = ()
) -> dict[str, int]:
    """How many streams have work in a step of a rank over NCCL, by what they are for.

    `model` is that of the transport: `edge` has a communicator for each directed edge, others one
    for all messages.  A communicator launches its kernels on a stream that it is given, and lets
    one of its own follow.  torch has a stream for each group whose messages it moves, and for the
    layers' group, where a sum runs beside what computes.  Collectives run on one of ours for
    gathers and one for reductions.  A step that is recorded has one for each queue of receives,
    which is counted in any case.  Communicators that no step uses are not.  Those that `more`
    programs beside the first use are.
    """
    edges = [e for e in directed_edges(program, *more) if rank in (e.source, e.target)]
    queues = len(edges) if model_row(model).ways else bool(edges)
    received = {e if model_row(model).ways else None for e in edges if e.target == rank}
    first = rank * program.tp  # of this rank's processes
    groups = [group for group, rows in rows_of(program, *more).items() if (rows == first).any()]
    reductions = len(groups) - ("tp" in groups)
    found = {
        "computation": 1,
        "layers": 2 * (program.tp > 1),
        "gathers": 2 * (program.tp > 1),
        "reductions": 1 + reductions,
        "messages": 2 * queues,
        "records": len(received),
    }
    return {name: number for name, number in found.items() if number}


def require_queues(
    program: Program,
    model: Model,
    environ: Mapping[str, str] = os.environ,
    more: Sequence[Program] = (),
) -> None:
    """Refuse a program, with `more` beside it, of which a rank has more streams than there are
    hardware queues.

    Raises ModelError, which says what they are for.
    """
    said = environ.get(QUEUES, "")
    has = min(HARDWARE, int(said) if said.isdecimal() else UNSET)
    each = [streams_of(program, rank, model, more) for rank in range(program.plan.ranks)]
    most = max(range(len(each)), key=lambda rank: sum(each[rank].values()))
    if (needs := sum(each[most].values())) > has:
        parts = ", ".join(f"{number} for {name}" for name, number in each[most].items())
        hint = f"{QUEUES}={HARDWARE}, set before CUDA starts"
        if needs > HARDWARE:
            hint = 'transport = "grouped", which has one communicator for all messages'
        raise ModelError(
            f"rank {most} has {needs} streams ({parts}), and its GPU {has} hardware queues: "
            "streams that share one wait for each other, and may do so for ever",
            program=program.name,
            hint=hint,
        )
