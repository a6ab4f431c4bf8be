"""Tests of runs with a faulty process: the report names this process.

Processes are forked from one that has loaded torch, and connect as under torchrun.
`test_train_termination.py` tests the launchers. A fault takes seconds of waiting, so only a few
faults are tested by default. ALL_CASES=1 tests all of them, as in `make campaign`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from schedir.io.black_box import BLACK_BOX_DIRECTORY, read_black_box
from schedir.training import trainer
from schedir.training.processes import process_world
from schedir.training.train import run as train
from tests.cases import cases
from tests.cpu.gloo_processes import CONTEXT
from tests.cpu.process_faults import install_fault
from tests.cpu.train_command import LIMIT

Fault = tuple[
    int, str, str, int
]  # the process, its fault, the place, and the number of calls before
SHAPES = {"pp4": (4, 1), "pp2tp2": (2, 2)}
HANG_FAULTS = ("stop", "sleep", "spin")  # reported only after the timeout


def run_process(
    rank: int, config: str, sets: list[str], port: int, fault: Fault, barrier: Any
) -> None:
    """Run one process as torchrun would start it. The faulty process gets its fault."""
    process, kind, where, number = fault
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if rank == process:
        install_fault(kind, where, number)
    assert trainer and process_world  # loaded first, which takes long
    with open(Path(config).parent / f"said-{rank}", "w") as log:
        os.dup2(log.fileno(), 2)
    barrier.wait()  # until all processes have loaded the modules
    train(config, sets)


def read_output(folder: Path) -> str:
    """Return the output of all processes, without the lines of torch."""
    lines = [line for path in folder.glob("said-*") for line in path.read_text().splitlines(True)]
    return "".join(line for line in lines if not line.startswith("["))


SHARED = "shared_memory"
# Kinds of faults, ranks, places, shapes and transports, chosen by hand so that nearly every pair
# of these occurs.
FAULTS = [
    ("pp4", SHARED, 0, "kill", "inside", 5), ("pp4", SHARED, 1, "stop", "inside", 9),
    ("pp4", "gloo", 2, "raise", "inside", 3), ("pp4", "gloo", 3, "sleep", "loss", 7),
    ("pp4", SHARED, 3, "spin", "loss", 2), ("pp4", "gloo", 0, "memory", "inside", 6),
    ("pp4", SHARED, 2, "exit", "between", 3), ("pp4", "gloo", 1, "interrupt", "inside", 8),
    ("pp4", SHARED, 1, "sys.exit", "inside", 4), ("pp4", "gloo", 3, "kill", "loss", 4),
    ("pp4", "gloo", 0, "stop", "between", 2), ("pp4", SHARED, 0, "sleep", "inside", 1),
    ("pp4", "gloo", 2, "spin", "inside", 11), ("pp4", SHARED, 3, "raise", "loss", 5),
    ("pp4", "gloo", 1, "kill", "set-up", 1), ("pp4", SHARED, 2, "stop", "set-up", 1),
    ("pp4", "gloo", 3, "exit", "inside", 12), ("pp4", SHARED, 0, "sleep", "between", 3),
    ("pp2tp2", SHARED, 0, "stop", "inside", 7), ("pp2tp2", SHARED, 1, "kill", "inside", 9),
    ("pp2tp2", "gloo", 2, "sleep", "inside", 5), ("pp2tp2", "gloo", 3, "raise", "loss", 3),
    ("pp2tp2", SHARED, 3, "sleep", "loss", 6), ("pp2tp2", "gloo", 0, "spin", "inside", 8),
    ("pp2tp2", "gloo", 1, "exit", "between", 2), ("pp2tp2", SHARED, 2, "memory", "inside", 4),
    ("pp2tp2", SHARED, 0, "interrupt", "inside", 3), ("pp2tp2", "gloo", 2, "kill", "set-up", 1),
    ("pp2tp2", "gloo", 1, "stop", "inside", 10), ("pp2tp2", SHARED, 3, "spin", "loss", 1),
    ("pp2tp2", SHARED, 1, "sleep", "between", 2), ("pp2tp2", "gloo", 3, "stop", "loss", 5),
    ("pp2tp2", SHARED, 2, "raise", "set-up", 1), ("pp2tp2", "gloo", 0, "sys.exit", "inside", 2),
    ("pp2tp2", SHARED, 1, "spin", "inside", 6), ("pp2tp2", "gloo", 2, "sleep", "set-up", 1),
]  # fmt: skip


# A process dies, or sleeps until the timeout. Both shapes and both transports occur. Other tests
# have errors, stopped processes, and faults in set-up and between steps.
SAMPLE = (0, 20)
TRIED = cases([FAULTS[k] for k in SAMPLE], [f for k, f in enumerate(FAULTS) if k not in SAMPLE])


@pytest.mark.parametrize(
    ("shape", "transport", "process", "kind", "where", "number"), TRIED,
    ids=["-".join(map(str, case)) for case in TRIED],
)  # fmt: skip
def test_report_names_faulty_process(
    config: str, tmp_path: Path, shape: str, transport: str, process: int, kind: str, where: str,
    number: int,
) -> None:  # fmt: skip
    ranks, tp = SHAPES[shape]
    sets = [f"pipeline.ranks={ranks}", f"pipeline.tp={tp}", "pipeline.stages_per_rank=1",
            f"train.transport={transport}", "train.steps=100000", "train.log_every=100000",
            f"train.timeout={8 if kind in HANG_FAULTS else 60}",
            f"output.dir={str(tmp_path / 'out')!r}",
            "output.record=false", "pipeline.schedule=one_f_one_b"]  # fmt: skip
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fault = process, kind, where, number
    arguments = config, sets, store.port, fault, CONTEXT.Barrier(4)
    processes = [CONTEXT.Process(target=run_process, args=(rank, *arguments)) for rank in range(4)]
    deadline = time.monotonic() + LIMIT
    try:
        for process_handle in processes:
            process_handle.start()
        # The first process to end reports the cause, or others do, at once or after the timeout.
        while time.monotonic() < deadline and not (output := read_output(tmp_path)).endswith("\n"):
            time.sleep(0.05)
        processes[process].join(deadline - time.monotonic())
    finally:
        for process_handle in processes:
            process_handle.kill()
            process_handle.join()
    tp_text = f", tp {process % tp}" * (tp > 1)
    name = f"process {process} (pipeline rank {process // tp}{tp_text})"
    assert name in output.partition("\n")[0], output
    box = read_black_box(tmp_path / "out" / BLACK_BOX_DIRECTORY / str(process))
    assert box is not None and box.state == "gone"
    # Stages and the loss also run once in set-up.
    assert (
        "in set-up" in output or "of step " in output or "in step " in output or " F " in output
    ), output
    if where in ("inside", "loss") and number > 2:
        assert " F " in output, output
    assert ".cc:" not in output
