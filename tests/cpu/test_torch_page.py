"""The script of docs/how-to/run-in-torch.md runs on two processes and prints what it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from schedir.errors import UsageError
from schedir.io.source_loader import load_source
from tests.cpu.training import ROOT, TORCHRUN, finish, start

PAGE = (ROOT / "docs" / "how-to" / "run-in-torch.md").read_text()

# What torchtitan does with a class of schedules, written again: it places stages by what the class
# is, and builds it by keywords.
TITAN = """\
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import get_schedule_class


def placed(rank, ranks, stages):
    vee = get_schedule_class("ZBVZeroBubble") in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    return (rank, stages - 1 - rank) if vee else range(rank, stages, ranks)


def build(stages, loss_fn):
    kind = get_schedule_class("ZBVZeroBubble")
    assert issubclass(kind, schedules.PipelineScheduleMulti)
    return kind(
        stages, n_microbatches=8, loss_fn=loss_fn, scale_grads=False,
        backward_requires_autograd=True,
    )
"""
STEP = """
import torchtitan.distributed.pipeline_parallel as titan

parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
vee = [PipelineStage(parts[s], s, 4, device) for s in titan.placed(rank, 2, 4)]
schedule = titan.build(vee, lambda y, target, scale: scale * loss_fn(y, target))
first = rank == 0
losses = [] if first else None
schedule.step(
    arg_mbs=[(each,) for each in xs] if first else None, kwarg_mbs=[{} for _ in xs],
    target_mbs=[*ys] if first else None, losses=losses, loss_kwargs={"scale": 2},
    return_outputs=False,
)
assert not first or len(losses) == 8
assert all(p.grad is not None for stage in vee for p in stage.submod.parameters())
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("done")
"""


def test_the_page_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)
    csv, refusal = [body for kind, body in blocks if kind == "text"]
    code = "\n".join(body for kind, body in blocks if kind == "python")
    titan = tmp_path / "torchtitan" / "distributed"
    titan.mkdir(parents=True)
    (titan / "pipeline_parallel.py").write_text(TITAN)
    (tmp_path / "mine.csv").write_text(csv)
    (tmp_path / "train.py").write_text(code + STEP)
    script = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(tmp_path / "train.py")]
    code_, out, err = finish(start(script, cwd=tmp_path))
    assert code_ == 0, err
    assert out == refusal + "done\n"


def test_torchs_names_lead_to_ours() -> None:
    """As in the table of the page, and with the prefix of torch's classes."""
    rows = PAGE.split("| torch | schedir |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 6
    for row in rows:
        one, other, *_ = re.findall(r"`(\w+)`", row)
        for name in (one, f"Schedule{one}"):
            with pytest.raises(UsageError) as caught:
                load_source(name)
            assert caught.value.hint == f"did you mean {other!r}?"
