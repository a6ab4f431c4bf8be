"""Record torch's interleaved 1F1B on four processes of this machine with torch.profiler.

    python examples/traced.py traces
    schedir import traces -o run.timeline
    schedir draw run.timeline -o run.svg

The script writes a trace of each rank to the folder `traces`. The trainer in it does not use
schedir. The tutorial docs/tutorials/read-a-trace.md explains the traces.

The trainer can also run another schedule for the same stages, from a CSV file:

    python examples/traced.py again best.csv     # the traces are in the folder `again`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile, schedule

RANKS, MICROBATCHES, WIDTH, ROWS = 4, 8, 768, 128


def train(rank: int, folder: str, store_path: str, csv_path: str | None) -> None:
    """Run four steps, and profile the last one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store_path}", rank=rank, world_size=RANKS)
    stages = [
        PipelineStage(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
            index,
            2 * RANKS,
            torch.device("cpu"),
        )
        for index in (rank, rank + RANKS)
    ]
    schedule_class = ScheduleInterleaved1F1B if csv_path is None else _PipelineScheduleRuntime
    pipe = schedule_class(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    if csv_path is not None:
        pipe._load_csv(csv_path, format="compute_comms")
    optimizers = [torch.optim.AdamW(stage.submod.parameters()) for stage in stages]
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    # To record your own trainer, put this `with` block around its loop over steps.
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=1, active=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(f"{folder}/rank{rank}.json"),
    ) as profiler:
        for _ in range(4):
            args = (batch,) if rank == 0 else ()
            pipe.step(*args, **({"target": batch} if rank == RANKS - 1 else {}))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "traces"
    Path(folder).mkdir(parents=True, exist_ok=True)
    store_path = str(Path(folder, f".store-{os.getpid()}").resolve())
    csv_path = sys.argv[2] if len(sys.argv) > 2 else None
    torch.multiprocessing.spawn(train, (folder, store_path, csv_path), nprocs=RANKS)
    Path(store_path).unlink(missing_ok=True)
    print(f"wrote {folder}/rank0.json to rank{RANKS - 1}.json")
