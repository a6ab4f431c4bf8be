"""Estimate the offset of each process's clock from the clock of process 0."""

from __future__ import annotations

import socket
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
import torch.distributed as dist

from schedir.transports.json_collectives import gather

# Requests that each process on another machine sends to process 0. With 16 requests, other traffic
# hardly delays the shortest request. All 16 take a few milliseconds.
_ROUNDS: Final = 16


def measure_clock_offset() -> tuple[float, float]:
    """Return the offset of this process's clock, and the error of the offset, in seconds.

    All processes must call this. Processes on the machine of process 0 read the same clock as
    process 0, so their offset and error are 0. The processes on other machines ask process 0 for
    its time, one process after the other. Process 0 reads its clock at some time between a request
    and its answer. The shortest request therefore gives the best estimate.

    Returns:
        The offset and the error. A process subtracts the offset from its `perf_counter` to get the
        time of process 0. The real offset differs from the returned offset by at most the error.
        The error is half of the duration of the shortest request.

    References:
        RFC 5905 (NTP), section 8, and the clock filter of section 10.
    """
    machines = gather(_identify_machine())
    rank, result = dist.get_rank(), (0.0, 0.0)
    for process, machine in enumerate(machines):
        if machine != machines[0] and rank in (0, process):
            result = _measure_offset() if rank else _answer_clock_requests(process)
    return result


def _identify_machine() -> tuple[str, ...]:
    """Return a value that is equal for all processes that read the same clock."""
    boot_id_path = Path("/proc/sys/kernel/random/boot_id")
    time_namespace = Path("/proc/self/ns/time")
    return (
        socket.gethostname(),
        boot_id_path.read_text().strip() if boot_id_path.exists() else "",
        str(time_namespace.readlink()) if time_namespace.is_symlink() else "",
    )


def _measure_offset() -> tuple[float, float]:
    """Return the offset and the error of the shortest request to process 0."""
    best = (0.0, float("inf"))
    remote_time = torch.zeros((), dtype=torch.float64)
    for _ in range(_ROUNDS):
        send_time = perf_counter()
        dist.send(remote_time, 0)
        dist.recv(remote_time, 0)
        receive_time = perf_counter()
        error = (receive_time - send_time) / 2
        if error < best[1]:
            best = (send_time + error - float(remote_time), error)
    return best


def _answer_clock_requests(peer: int) -> tuple[float, float]:
    local_time = torch.zeros((), dtype=torch.float64)
    for _ in range(_ROUNDS):
        dist.recv(local_time, peer)
        local_time.fill_(perf_counter())
        dist.send(local_time, peer)
    return 0.0, 0.0
