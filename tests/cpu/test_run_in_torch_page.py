"""Tests that the script of docs/how-to/run-in-torch.md runs, and that a deadlock has its error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedir.errors import UsageError
from schedir.io.source_loader import load_source
from tests.cpu.train_command import ROOT, run_script

PAGE = (ROOT / "docs" / "how-to" / "run-in-torch.md").read_text()

# This does what torchtitan does with a schedule class: it creates the number of stages for the kind
# of the class, and calls the class with keywords.
TORCHTITAN_STAND_IN = """\
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import get_schedule_class


def placed(rank, ranks):
    kind = get_schedule_class("1F1B")
    assert kind not in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    return [rank] if issubclass(kind, schedules.PipelineScheduleSingle) else [rank, rank + ranks]


def build(stages, loss_fn):
    kind = get_schedule_class("1F1B")
    assert issubclass(kind, schedules.PipelineScheduleMulti)
    return kind(
        stages, n_microbatches=8, loss_fn=loss_fn, scale_grads=False,
        backward_requires_autograd=True,
    )
"""
# Rank 0 sends an activation while rank 1 sends a gradient, and no rank receives.
DEADLOCK_CSV = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD
"""
DEADLOCK_STEP = """
one = PipelineStage(modules[rank], rank, 2, device)
try:
    Schedule(one, n_microbatches=2, loss_fn=loss_fn, program="mine.csv")
except schedir.errors.DeadlockError as error:
    if rank == 0:
        print(error)
"""
DEADLOCK = """\
mine: 2 ranks wait for each other; stopped after 6 of 20 instructions
  rank 0 #3   send_act 0.1   needs recv_act 1.1, #4 on rank 1; rank 1 is at #3
  rank 1 #3   send_grad 1.0  needs recv_grad 0.0, #4 on rank 0; rank 0 is at #3
  around the position of rank 1:
    #1   F 1.0
    #2   B 1.0
  > #3   send_grad 1.0  waits
    #4   recv_act 1.1   rank 0 waits for this
  hint: issue earlier the instructions for which other ranks wait: while a host waits for \
the inputs of a compute, it issues no instructions, and over NCCL a message also waits for \
the instructions before it
"""
TORCHTITAN_STEP = """
import torchtitan.distributed.pipeline_parallel as titan

parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
own = [PipelineStage(parts[s], s, 2, device) for s in titan.placed(rank, 2)]
schedule = titan.build(own, lambda y, target, scale: scale * loss_fn(y, target))
first = rank == 0
losses = None if first else []
schedule.step(
    arg_mbs=[(each,) for each in xs] if first else None, kwarg_mbs=[{} for _ in xs],
    target_mbs=None if first else [*ys], losses=losses, loss_kwargs={"scale": 2},
    return_outputs=False,
)
assert first or len(losses) == 8
assert all(p.grad is not None for stage in own for p in stage.submod.parameters())
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("done")
"""


def test_page_script_runs_and_deadlock_is_refused(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)
    code = "\n".join(body for kind, body in blocks if kind == "python")
    for name, text in (
        ("torchtitan/distributed/pipeline_parallel.py", TORCHTITAN_STAND_IN),
        ("torchtitan/train.py", "def main():\n    pass\n"),
        ("torchtitan-0.3.0.dist-info/METADATA", "Name: torchtitan\nVersion: 0.3.0\n"),
        ("mine.csv", DEADLOCK_CSV),
        ("train.py", code + DEADLOCK_STEP + TORCHTITAN_STEP),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run_script(tmp_path / "train.py", 2, tmp_path / "run") == DEADLOCK + "done\n"


def test_torch_schedule_name_has_hint() -> None:
    """The page lists the names in a table. The prefix of torch's classes is optional."""
    rows = PAGE.split("| torch | schedir |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 6
    for row in rows:
        torch_name, schedir_name, *_ = re.findall(r"`(\w+)`", row)
        for name in (torch_name, f"Schedule{torch_name}"):
            with pytest.raises(UsageError) as caught:
                load_source(name)
            assert caught.value.hint == f"did you mean {schedir_name!r}?"
