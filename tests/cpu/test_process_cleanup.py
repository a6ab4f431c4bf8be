"""Tests of the end of a run: black boxes of other machines, and the end of all processes."""

from __future__ import annotations

import os
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedir.hang_diagnosis.stall_cause import ProcessLayout, StalledRun
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    POSITION_FIELD,
    BlackBox,
    BlackBoxField,
    BlackBoxSnapshot,
    ProcessPhase,
    read_black_boxes,
)
from schedir.training.processes import process_exit
from schedir.training.processes.process_exit import exchange_black_boxes
from schedir.transports.transport import describe_peer_error, is_caused_by_peer
from tests.cpu.gloo_processes import run_fresh
from tests.cpu.process_faults import forbid_allocations
from tests.cpu.test_train_termination import gone
from tests.cpu.train_command import (
    ONE_STAGE_PER_RANK,
    TORCHRUN,
    Run,
    find_free_port,
    make_arguments,
    make_torchrun_command,
    run_launched,
    wait_until,
    write_patched_schedule,
)

ONE_F_ONE_B = [*ONE_STAGE_PER_RANK, "pipeline.schedule=one_f_one_b"]


def make_snapshot(process: int, *, waits: bool) -> BlackBoxSnapshot:
    """Return a snapshot of the black box of a process in set-up."""
    box = BlackBox(process=process, world=3)
    box.enter_phase(ProcessPhase.SET_UP)
    box.values[BlackBoxField.IS_WAITING], box.values[POSITION_FIELD] = waits, 0
    return BlackBoxSnapshot(bytes(box.memory), monotonic_ns(), "runs")


def test_black_boxes_are_exchanged_over_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first_machine = {process: make_snapshot(process, waits=True) for process in (0, 1)}
    second_machine = {2: make_snapshot(2, waits=False)}
    # No process has sent it.
    assert exchange_black_boxes(store, first_machine, [2], timeout=0.0) == {}
    assert exchange_black_boxes(store, second_machine, [0, 1]) == first_machine
    all_boxes = first_machine | exchange_black_boxes(store, first_machine, [2])
    cause = StalledRun(all_boxes, ProcessLayout(3, 1, 1)).find_cause()
    assert cause is not None and cause.process == 2


def _fail_without_memory(rank: int) -> bool:
    """Return whether a process that cannot allocate memory reports its failure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "LOCAL_RANK": "2"}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    forbid_allocations()
    try:
        return process_exit._is_first_failure()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_process_without_memory_reports_its_failure() -> None:
    assert run_fresh(_fail_without_memory, 1) == [True]


def test_processes_end_when_torchrun_is_killed(config: str, tmp_path: Path) -> None:
    sets = [*ONE_F_ONE_B, "train.steps=1000000", "train.log_every=1"]
    arguments = make_arguments(config, tmp_path / "out", *sets)
    run = Run(make_torchrun_command(2, *arguments), tmp_path / "out")
    run.wait_for("\nstep ")
    boxes = read_black_boxes(tmp_path / "out" / BLACK_BOX_DIRECTORY)
    pids = [box[BlackBoxField.PID] for box in boxes.values()]
    assert len(pids) == 2
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)))


def test_other_node_reports_dead_process(config: str, tmp_path: Path) -> None:
    """torchrun's report of the other node contains this error, too."""
    die = 'if rank == "1" and os.path.exists(os.environ["TRAINS"]):\n'
    die += "    os.kill(os.getpid(), signal.SIGKILL)"
    schedule = write_patched_schedule(tmp_path, "schedir.models.gpt:Layer.forward", die)
    sets = [*ONE_STAGE_PER_RANK, schedule]
    port = find_free_port()
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=it", "--rdzv-backend=c10d",
             f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "schedir"]  # fmt: skip
    command = [*agent, *make_arguments(config, tmp_path / "out", *sets)]
    trains = str(tmp_path / "out" / "loss.csv")
    nodes = [Run(command, tmp_path / "first", TRAINS=trains)]

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        assert nodes[0].process.exitcode is None
        return False

    wait_until(listens)  # the first node has the rendezvous, which the other agent needs
    nodes.append(Run(command, tmp_path / "second", TRAINS=trains))
    errors = [node.finish()[2] for node in nodes]
    expected = "process 1 (pipeline rank 1) has sent no information from its machine"
    # The first is the node of the dead process.
    dead_node, other_node = sorted(errors, key=lambda err: "rank      : 1 " not in err)
    assert "rank      : 1 " in dead_node and "exitcode  : -9" in dead_node
    assert expected in other_node.splitlines()[0], other_node
    assert expected in other_node.partition("traceback : ")[2], other_node


# The launcher and its ranks are forks of a process that has loaded this function.
FAULTY_LAUNCHER = """\
import os
import sys
import time
from runpy import run_module

from tests.cpu import train_command

main = train_command.main


def main_of_rank(arguments):
    if os.environ["RANK"] == "1":
        box = {box!r}
        while not (os.path.exists(box) and any(open(box, "rb").read()[{phase}:{phase} + 8])):
            time.sleep(0.05)
        {what}
    return main(arguments)


train_command.main = main_of_rank
arguments = {arguments!r}
if arguments[0] == "-m":
    sys.argv[1:] = arguments[2:]
    run_module(arguments[1], run_name="__main__", alter_sys=True)
sys.exit(main(arguments))
"""


@pytest.mark.parametrize(
    ("launcher", "what", "expected"),
    [
        ("schedir", "os._exit(3)",
         "process 1 (pipeline rank 1) exited with code 3, before it joined the run"),
        ("torchrun", "os._exit(3)",
         "process 1 (pipeline rank 1) has not started: it has no black box; "
         "process 0 (pipeline rank 0) received SIGTERM, in set-up"),
        ("schedir", "sys.modules['torch.distributed'] = None",
         "process 1 (pipeline rank 1): Traceback"),
    ],
)  # fmt: skip
def test_process_that_dies_before_it_joins_is_reported(
    config: str, tmp_path: Path, launcher: str, what: str, expected: str
) -> None:
    arguments = make_arguments(config, tmp_path / "out", *ONE_F_ONE_B)
    if launcher == "torchrun":
        arguments = make_torchrun_command(2, *arguments)
    script, box = tmp_path / "launch.py", str(tmp_path / "out" / BLACK_BOX_DIRECTORY / "0")
    phase = BlackBoxField.PHASE * 8
    script.write_text(FAULTY_LAUNCHER.format(what=what, phase=phase, box=box, arguments=arguments))
    code, _, err = run_launched([str(script)], tmp_path / "launched")
    error_lines = [line for line in err.splitlines() if line.startswith("process ")]
    assert code == 1 and error_lines[0].startswith(expected), err
    assert "During handling" not in err  # there is no other error
    assert "rank      : 1 " in err.partition("Root Cause")[2] or launcher == "schedir", err


def make_gloo_groups() -> list[Any]:
    """Return the Gloo groups of two processes. Each process is a thread."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def group(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(group, range(2))]


LATE_PEER = "a peer did not respond within the timeout"


def test_late_peer_has_error_without_gloo_internals() -> None:
    group, _late_peer = make_gloo_groups()
    with pytest.raises(RuntimeError) as error:
        group.recv([torch.empty(1)], 1, 0).wait(timedelta(seconds=0.2))
    assert ".cc:" in str(error.value) and is_caused_by_peer(error.value)
    assert describe_peer_error(error.value) == LATE_PEER
    assert describe_peer_error(RuntimeError("a timeout of a module's own")) == ""


def test_all_waits_report_late_peer() -> None:
    group, _late_peer = make_gloo_groups()
    first, second = (group.allreduce([torch.ones(1)]) for _ in range(2))
    for work in (second, first):
        with pytest.raises(RuntimeError) as error:
            work.wait()
        assert describe_peer_error(error.value) == LATE_PEER, error.value
