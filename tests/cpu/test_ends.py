"""How processes of a run end: boxes of other machines, and nobody who outlives his launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from time import monotonic_ns

import torch.distributed as dist

from schedir.dumps.blame import Shape, Standstill
from schedir.dumps.box import AT, FOLDER, Box, Phase, Seen, Word, boxes
from schedir.training.ends import exchanged
from tests.cpu.test_train_ends import gone
from tests.cpu.training import LIMIT, TORCHRUN, arguments, start


def seen(process: int, *, waits: bool) -> Seen:
    """A box of a process in set-up."""
    box = Box(process=process, world=3)
    box.enter(Phase.SET_UP)
    box.words[Word.WAITS], box.words[AT] = waits, 0
    return Seen(bytes(box.memory), monotonic_ns(), "runs")


def test_boxes_of_other_machines_come_over_the_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    one, other = {0: seen(0, waits=True), 1: seen(1, waits=True)}, {2: seen(2, waits=False)}
    assert exchanged(store, one, [2], most=0.0) == {}  # nobody has brought it
    assert exchanged(store, other, [0, 1]) == one
    all_of = one | exchanged(store, one, [2])
    found = Standstill(all_of, Shape(3, 1, 1)).blame()
    assert found is not None and found.process == 2


def test_no_process_outlives_torchrun(config: str, tmp_path: Path) -> None:
    sets = ["train.steps=1000000", "train.log_every=1", "pipeline.tp=1",
            "pipeline.stages_per_rank=1", "pipeline.schedule=one_f_one_b"]  # fmt: skip
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "schedir"]
    process = start([*agent, *arguments(config, tmp_path / "out", *sets)])
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    pids = [one[Word.PID] for one in boxes(tmp_path / "out" / FOLDER).values()]
    assert len(pids) == 2
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.communicate()
