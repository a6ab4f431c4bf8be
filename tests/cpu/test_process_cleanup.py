"""Tests of the end of a run: black boxes of other machines, and the end of all processes."""

from __future__ import annotations

import os
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
from schedir.training.processes.process_exit import exchange_black_boxes
from schedir.transports.transport import describe_peer_error, is_caused_by_peer
from tests.cpu.test_train_termination import gone
from tests.cpu.train_command import (
    TORCHRUN,
    Run,
    make_arguments,
    run_launched,
    wait_until,
)


def make_snapshot(process: int, *, waits: bool) -> BlackBoxSnapshot:
    """Return a snapshot of the black box of a process in set-up."""
    box = BlackBox(process=process, world=3)
    box.enter_phase(ProcessPhase.SET_UP)
    box.values[BlackBoxField.IS_WAITING], box.values[POSITION_FIELD] = waits, 0
    return BlackBoxSnapshot(bytes(box.memory), monotonic_ns(), "runs")


def test_black_boxes_are_exchanged_over_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first_machine, second_machine = (
        {0: make_snapshot(0, waits=True), 1: make_snapshot(1, waits=True)},
        {2: make_snapshot(2, waits=False)},
    )
    assert (
        exchange_black_boxes(store, first_machine, [2], timeout=0.0) == {}
    )  # no process has sent it
    assert exchange_black_boxes(store, second_machine, [0, 1]) == first_machine
    all_boxes = first_machine | exchange_black_boxes(store, first_machine, [2])
    cause = StalledRun(all_boxes, ProcessLayout(3, 1, 1)).find_cause()
    assert cause is not None and cause.process == 2


def test_processes_end_when_torchrun_is_killed(config: str, tmp_path: Path) -> None:
    sets = ["train.steps=1000000", "train.log_every=1", "pipeline.tp=1",
            "pipeline.stages_per_rank=1", "pipeline.schedule=one_f_one_b"]  # fmt: skip
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "schedir"]
    run = Run([*agent, *make_arguments(config, tmp_path / "out", *sets)], tmp_path / "out")
    run.wait_for("\nstep ")
    pids = [
        box[BlackBoxField.PID]
        for box in read_black_boxes(tmp_path / "out" / BLACK_BOX_DIRECTORY).values()
    ]
    assert len(pids) == 2
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)))


# The file of a schedule is the user's code.
FAULTY_SCHEDULE = """\
import os
import signal

from schedir.schedules import one_f_one_b as mine
from schedir.models import gpt

forward = gpt.Layer.forward


def dies(self, x):
    if os.path.exists(os.environ["TRAINS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, x)


if os.environ.get("RANK") == "1":
    gpt.Layer.forward = dies
"""


def test_other_node_reports_dead_process(config: str, tmp_path: Path) -> None:
    """torchrun's report of the other node contains this error, too."""
    schedule = tmp_path / "mine.py"
    schedule.write_text(FAULTY_SCHEDULE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sets = ["pipeline.tp=1", "pipeline.stages_per_rank=1", f"pipeline.schedule={schedule}:mine"]
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
    (dead_node,) = (
        err for err in errors if "rank      : 1 " in err
    )  # the node of the dead process
    (other_node,) = (err for err in errors if err is not dead_node)
    assert "exitcode  : -9" in dead_node
    assert (
        expected in other_node.splitlines()[0]
        and expected in other_node.partition("traceback : ")[2]
    ), other_node


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
    ("launcher", "what", "said"),
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
    config: str, tmp_path: Path, launcher: str, what: str, said: str
) -> None:
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "schedir"]
    sets = ["pipeline.tp=1", "pipeline.stages_per_rank=1", "pipeline.schedule=one_f_one_b"]
    arguments = make_arguments(config, tmp_path / "out", *sets)
    script = tmp_path / "launch.py"
    script.write_text(
        FAULTY_LAUNCHER.format(
            what=what,
            phase=BlackBoxField.PHASE * 8,
            box=str(tmp_path / "out" / BLACK_BOX_DIRECTORY / "0"),
            arguments=[*agent, *arguments] if launcher == "torchrun" else arguments,
        )
    )
    code, _, err = run_launched([str(script)], tmp_path / "launched")
    error_lines = [line for line in err.splitlines() if line.startswith("process ")]
    assert code == 1 and error_lines[0].startswith(said), err
    assert "During handling" not in err  # there is no other error
    assert "rank      : 1 " in err.partition("Root Cause")[2] or launcher == "schedir", err


def test_late_peer_has_error_without_gloo_internals() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def group(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))

    with ThreadPoolExecutor(2) as threads:
        group_of_first, _ = threads.map(group, range(2))
    with pytest.raises(RuntimeError) as error:
        group_of_first.recv([torch.empty(1)], 1, 0).wait(timedelta(seconds=0.2))
    assert ".cc:" in str(error.value) and is_caused_by_peer(error.value)
    assert describe_peer_error(error.value) == "a peer did not respond within the timeout"
    assert describe_peer_error(RuntimeError("a timeout of a module's own")) == ""


def test_all_waits_report_late_peer() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def group(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))

    with ThreadPoolExecutor(2) as threads:
        group_of_first, _ = threads.map(group, range(2))
    first, second = (group_of_first.allreduce([torch.ones(1)]) for _ in range(2))
    for work in (second, first):
        with pytest.raises(RuntimeError) as error:
            work.wait()
        assert describe_peer_error(error.value) == "a peer did not respond within the timeout", (
            error.value
        )
