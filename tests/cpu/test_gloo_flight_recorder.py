"""Tests of hang reports from torch's own flight recorder dumps, over Gloo."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedir.hang_diagnosis.flight_recorder import read_dumps
from schedir.hang_diagnosis.hang_report import describe_job
from schedir.hang_diagnosis.wait_graph import DistributedJob, WaitReason
from tests.cpu.gloo_processes import run_fresh

c10d: Any = torch._C._distributed_c10d
if not hasattr(c10d, "_dump_fr_trace"):
    pytest.skip("this torch has no flight recorder", allow_module_level=True)

LATE_RANK = 2


def _write_dumps_during_hang(rank: int, folder: str) -> None:
    """Run two all-reduces. `LATE_RANK` starts the second one after all ranks have written dumps."""
    value = torch.zeros(4, 3)
    dist.all_reduce(value)
    while not pickle.loads(c10d._dump_fr_trace())["entries"][0]["retired"]:
        # A thread of Gloo records the end of the all-reduce later than `wait` returns.
        time.sleep(0.01)
    store = dist.distributed_c10d._get_default_store()
    work = None if rank == LATE_RANK else dist.all_reduce(value, async_op=True)
    store.set(f"stands {rank}", "")
    store.wait([f"stands {other}" for other in range(3)])
    Path(folder, "pickles", f"nccl_trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())
    Path(folder, "json", f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
    store.set(f"written {rank}", "")
    store.wait([f"written {other}" for other in range(3)])
    if work is None:
        dist.all_reduce(value)
    else:
        work.wait()


def test_rank_that_does_not_join_is_cause(tmp_path: Path) -> None:
    for form in ("pickles", "json"):
        (tmp_path / form).mkdir()
    run_fresh(_write_dumps_during_hang, 3, str(tmp_path))
    for form in ("pickles", "json"):
        job = DistributedJob(read_dumps([str(tmp_path / form)])[0])
        assert job.root_ranks == (LATE_RANK,) and not job.cycle and not job.ranks_without_dump
        current_ops = {str(dump.current_op) for dump in job.dumps.values()}
        assert current_ops == {"all_reduce 2 of default_pg", "None"}
        late_dump = job.dumps[LATE_RANK]
        assert str(late_dump.last_ended_op) == "all_reduce 1 of default_pg"
        assert late_dump.current_op is None
        waits = [wait for rank_waits in job.waits.values() for wait in rank_waits]
        reasons = {wait.reason for wait in waits if wait.awaited_rank == LATE_RANK}
        assert reasons == {WaitReason.NOT_ISSUED}
        assert any(f"rank {LATE_RANK} is the cause" in line for line in describe_job(job))
    # Pickles also contain the position in the code.
    dumps, _ = read_dumps([str(tmp_path / "pickles")])
    assert "test_gloo_flight_recorder.py:" in dumps[0].ops[-1].source_line
