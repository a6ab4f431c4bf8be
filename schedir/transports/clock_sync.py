"""Estimate the offset of each process's clock from that of process 0, with its error."""

from __future__ import annotations

import socket
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
import torch.distributed as dist

from schedir.transports.json_collectives import gather

ROUNDS: Final = 16


def measure_clock_offset(rounds: int = ROUNDS) -> tuple[float, float]:
    """What to take from this process's clock to have process 0's, and how wrong that may be.

    In seconds.  All processes must call this.  Processes of one machine read one clock: there
    both are 0.  Others ask process 0 for the time, one after the other, each `rounds` times.
    Process 0 read its clock somewhere between question and answer, and of all rounds the
    shortest says most (RFC 5905, section 8 and the clock filter of section 10): the offset is
    that from its middle, wrong by at most half its length.
    """
    machines = gather(_identify_machine())
    rank, found = dist.get_rank(), (0.0, 0.0)
    for other, machine in enumerate(machines):
        if machine != machines[0] and rank in (0, other):
            found = _measure_offset(rounds) if rank else _answer_clock_requests(other, rounds)
    return found


def _identify_machine() -> tuple[str, ...]:
    """What processes that read one clock have in common, and others have not."""
    boot, spaces = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        str(spaces.readlink()) if spaces.is_symlink() else "",
    )


def _measure_offset(rounds: int) -> tuple[float, float]:
    """Offset and error, of the shortest of some questions to process 0."""
    best = (0.0, float("inf"))
    theirs = torch.zeros((), dtype=torch.float64)
    for _ in range(rounds):
        asked = perf_counter()
        dist.send(theirs, 0)
        dist.recv(theirs, 0)
        answered = perf_counter()
        error = (answered - asked) / 2
        if error < best[1]:
            best = (asked + error - float(theirs), error)
    return best


def _answer_clock_requests(peer: int, rounds: int) -> tuple[float, float]:
    """Tell a process the time, as often as it asks."""
    mine = torch.zeros((), dtype=torch.float64)
    for _ in range(rounds):
        dist.recv(mine, peer)
        mine.fill_(perf_counter())
        dist.send(mine, peer)
    return 0.0, 0.0
