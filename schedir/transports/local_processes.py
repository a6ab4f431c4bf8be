"""Run a function on every rank of a Gloo process group, each in a process of this machine."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# After the first failure, other ranks may still report their failures for this number of seconds.
GRACE_SECONDS = 1.0
DIED_MESSAGE = "died without an error report"


class _Report(NamedTuple):
    """The report that a rank sends before it ends.

    Attributes:
        timestamp: The time of the report, in seconds of `time.monotonic`.
        result: The result of the function.
        traceback: The traceback, or "" if the rank succeeded.
    """

    timestamp: float
    result: Any = None
    traceback: str = ""


class RankError(Exception):
    """Ranks failed, died or hung.

    Args:
        tracebacks: The traceback of each failed rank, or another description of its failure, in the
            order in which ranks failed.
        hung_ranks: The ranks that still ran at the time limit. The tracebacks of these ranks are
            their stacks.
    """

    def __init__(self, tracebacks: Mapping[int, str], hung_ranks: tuple[int, ...] = ()) -> None:
        super().__init__("\n".join(f"rank {rank}: {tb}" for rank, tb in tracebacks.items()))
        self.tracebacks = dict(tracebacks)
        self.hung_ranks = hung_ranks


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    context: Any,
    timeout: float = 120,
    grace_seconds: float = GRACE_SECONDS,
) -> list[Any]:
    """Call `fn(rank, *args)` in each process of a Gloo process group, and return the results.

    In the processes torch.distributed is initialised, and torch has one thread. The processes end
    when this process ends, even if it is killed.

    Args:
        fn: The function. The function is pickled by its name, except if processes are forks.
        world_size: The number of processes.
        *args: The arguments of `fn`. The arguments are pickled, except if processes are forks.
        context: A context of multiprocessing.
        timeout: The number of seconds after which ranks that still run count as hung.
        grace_seconds: The number of seconds for which ranks may still report after the first
            failure.

    Returns:
        The results by rank. The results are sent as pickles.

    Raises:
        RankError: A rank failed, died or hung.
    """
    work: Any = fn, args
    if context.get_start_method() != "fork":
        work = pickle.dumps(work)  # Otherwise multiprocessing passes tensors in shared memory.
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                pipe, child_pipe = context.Pipe(duplex=False)
                # No daemon: a daemon cannot start children, such as data loader workers.
                call_args = rank, world_size, folder, deadline, child_pipe, work
                process = context.Process(target=_run_child, args=call_args, daemon=False)
                # Python warns of forks in a process with threads.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                child_pipe.close()  # Otherwise the pipe stays open when the child dies.
                pipes.append(pipe)
                processes.append(process)
            return collect_results(pipes, processes, folder, timeout, grace_seconds)
        finally:
            end_processes(processes)


def collect_results(
    pipes: list[Connection], processes: list[Any], directory: str, timeout: float, grace: float
) -> list[Any]:
    """Return the results of processes that run `call_in_group`.

    If a process fails or hangs, the function ends all processes.

    Args:
        pipes: The pipe of each rank.
        processes: The process of each rank.
        directory: The directory of `call_in_group`, to which hung ranks write their stacks.
        timeout: As for `run_processes`.
        grace: The argument `grace_seconds` of `run_processes`.

    Returns:
        The results by rank.

    Raises:
        RankError: A rank failed, died or hung.
    """
    reports = _collect_reports(pipes, time.monotonic() + timeout, grace)
    silent_ranks = sorted(set(range(len(pipes))) - reports.keys())
    if not silent_ranks and not any(report.traceback for report in reports.values()):
        return [reports[rank].result for rank in range(len(pipes))]
    end_processes(processes)
    hung_ranks = () if any(r.traceback for r in reports.values()) else tuple(silent_ranks)
    for rank, report in reports.items():
        if report.traceback == DIED_MESSAGE:
            exit_code = processes[rank].exitcode
            reports[rank] = report._replace(traceback=f"{DIED_MESSAGE}, with exit code {exit_code}")
    cause = f"did not end within {timeout:g} s"
    if not hung_ranks:
        cause = f"was killed {grace:g} s after the first failure"
    for rank in silent_ranks:
        path = _stack_path(directory, rank)
        stack_text = (path.read_text() if path.exists() else "") or cause
        reports[rank] = _Report(time.monotonic(), traceback=stack_text)
    failures = sorted((r.timestamp, rank) for rank, r in reports.items() if r.traceback)
    raise RankError({rank: reports[rank].traceback for _, rank in failures}, hung_ranks)


def end_processes(processes: list[Any]) -> None:
    """Kill processes, and wait for their end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _collect_reports(
    pipes: list[Connection], deadline: float, grace_seconds: float
) -> dict[int, _Report]:
    """Return the reports of the ranks that sent a report before the deadline, by rank."""
    reports: dict[int, _Report] = {}
    rank_by_pipe = {pipe: rank for rank, pipe in enumerate(pipes)}
    has_failed = False
    while rank_by_pipe:
        ready_pipes = wait(list(rank_by_pipe), timeout=max(0, deadline - time.monotonic()))
        if not ready_pipes:
            break
        for pipe in ready_pipes:
            assert isinstance(pipe, Connection)
            rank = rank_by_pipe.pop(pipe)
            try:
                report = _Report(*pickle.loads(pipe.recv_bytes()))
            except EOFError:
                report = _Report(time.monotonic(), traceback=DIED_MESSAGE)
            reports[rank] = report
            if report.traceback and not has_failed:
                has_failed, deadline = True, min(deadline, time.monotonic() + grace_seconds)
    return reports


def _run_child(
    rank: int, world_size: int, directory: str, deadline: float, pipe: Connection, pickled_call: Any
) -> None:
    """Run the function of `run_processes` in a child process, and send its report."""
    set_up_child()
    # The start of this process may have taken seconds. All processes of a machine share the clock,
    # so the remaining time follows from the deadline.
    timeout = max(deadline - time.monotonic(), 0.1)
    call_in_group(rank, world_size, directory, timeout, pipe, pickled_call)


def set_up_child() -> None:
    """Let torch use one thread in a child process, and end the process with its parent."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # The garbage collector of a forked process must not destroy objects of the parent. The
    # destructor of a process group would wait for threads that exist only in the parent.
    gc.freeze()


def call_in_group(
    rank: int, world_size: int, directory: str, timeout: float, pipe: Connection, pickled_call: Any
) -> None:
    """Call a function as one rank of a new Gloo process group, and send the report of the call.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        directory: An empty directory that only the ranks of this call share.
        timeout: As for `run_processes`.
        pipe: The pipe for the report.
        pickled_call: The function and its arguments, as a tuple or its pickle.
    """
    with _stack_path(directory, rank).open("w") as stack:
        # The stacks are written a little before the time limit, at which the parent reads them.
        faulthandler.dump_traceback_later(max(timeout - 1, timeout / 2), file=stack)
        try:
            fn, args = (
                pickle.loads(pickled_call) if isinstance(pickled_call, bytes) else pickled_call
            )
            # A file store needs no port, so runs on one machine cannot compete for a port.
            dist.init_process_group(
                "gloo",
                init_method=Path(directory, "store").as_uri(),
                rank=rank,
                world_size=world_size,
                # The parent reports a rank that hangs. Operations of other ranks that wait for this
                # rank must not time out earlier.
                timeout=timedelta(seconds=2 * timeout + 60),
            )
            result = fn(rank, *args)
            if dist.is_initialized():  # `fn` may have destroyed the group
                # Otherwise a rank might close a connection from which another rank still reads.
                dist.barrier()
            report = pickle.dumps((time.monotonic(), result, ""))
        except BaseException:
            report = pickle.dumps((time.monotonic(), None, traceback.format_exc()))
        # The report is sent before connections close, because closed connections make other ranks
        # fail. So the parent receives the first failure before the failures that it causes.
        pipe.send_bytes(report)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the process that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _stack_path(directory: str, rank: int) -> Path:
    return Path(directory, f"stack-{rank}")
