"""How fast programs are compiled, checked and simulated, beside torch.distributed.pipelining.

    python benchmarks/compile.py [--large] [--torch]

Each row runs in a process of its own, so that its peak memory is its own; torch's rows run in
the same call, one after the other with ours.  "B/instr" is the growth of the peak over that
after imports, by instruction: of compile and check, and of all with the Timeline.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from time import perf_counter
from typing import Any

SMALL = [
    ("one_f_one_b", 8, 1, 64),
    ("one_f_one_b", 64, 1, 1024),
    ("interleaved", 64, 2, 256),
    ("interleaved", 64, 2, 1024),
    ("interleaved", 128, 4, 512),
]
LARGE = [
    ("interleaved", 256, 8, 512),
    ("interleaved", 256, 8, 2048),
    ("one_f_one_b", 1024, 1, 8192),
]
TORCH = [("interleaved", 64, 2, 256), ("interleaved", 64, 2, 1024)]


def peak() -> float:
    """Peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def ours(name: str, ranks: int, v: int, m: int) -> dict[str, float]:
    """Seconds of each part, and bytes per instruction."""
    from schedir import check, schedules, show, simulate
    from schedir.ir.plan import Plan
    from schedir.ir.text import parse
    from schedir.passes.compile import lower
    from schedir.schedules.words import draft
    from schedir.verify.check import check_draft

    seconds: dict[str, float] = {}

    def timed(part: str, call: Any, *args: Any) -> Any:
        begin = perf_counter()
        result = call(*args)
        seconds[part] = perf_counter() - begin
        return result

    base = peak()
    spelled = timed("draft", draft, getattr(schedules, name), Plan(ranks, m, v))
    timed("check draft", check_draft, spelled)
    program = timed("lower", lower, spelled)
    del spelled
    timed("check", check, program)
    compiled = peak()
    timeline = timed("simulate", simulate, program)
    simulated = peak()
    timed("memory", lambda: timeline.peak_in_flight)
    n = len(program)
    if n < 2**24:  # larger ones are measured without
        text = timed("show", show, program)
        timed("parse", parse, text)
    return seconds | {
        "instructions": n,
        "B/instr": (compiled - base) / n,
        "with Timeline": (simulated - base) / n,
    }


def torchs(name: str, ranks: int, v: int, m: int) -> dict[str, float]:
    """torch: its constructor builds and lowers, its simulator walks what is lowered."""
    from unittest.mock import create_autospec

    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    assert name == "interleaved"
    stages = []
    for j in range(v):
        stage = create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.group = 0, ranks, None
        stage.stage_index, stage.num_stages = j * ranks, ranks * v
        stage.is_first, stage.is_last, stage.has_backward = j == 0, False, True
        stage.stage_index_to_group_rank = {s: s % ranks for s in range(ranks * v)}
        stages.append(stage)
    base, begin = peak(), perf_counter()
    schedule = schedules.ScheduleInterleaved1F1B(stages, n_microbatches=m, loss_fn=lambda *_: None)
    constructed = perf_counter() - begin
    kinds = schedules._ComputationType
    other = {kinds.UNSHARD, kinds.RESHARD, kinds.REDUCE_GRAD}
    order = {
        rank: [a for a in actions if a is None or a.computation_type not in other]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    n = sum(map(len, order.values()))
    begin = perf_counter()
    schedules._simulate_comms_compute(
        order, stage_to_rank=lambda s: s % ranks, num_stages=ranks * v
    )
    simulated = perf_counter() - begin
    return {
        "instructions": n,
        "lower": constructed,
        "simulate": simulated,
        "with Timeline": (peak() - base) / n,
    }


def measured(who: str, row: tuple[str, int, int, int]) -> dict[str, float]:
    """One row, in a process of its own."""
    command = [sys.executable, __file__, "--row", who, *map(str, row)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--large", action="store_true", help="up to 34 million instructions")
    parser.add_argument("--torch", action="store_true", help="torch.distributed.pipelining too")
    parser.add_argument("--row", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        who, name, *shape = args.row
        print(json.dumps((ours if who == "schedir" else torchs)(name, *map(int, shape))))
        return

    from rich.console import Console
    from rich.table import Table

    parts = ["draft", "check draft", "lower", "check", "simulate", "memory", "show", "parse"]
    table = Table("", "schedule", "P", "v", "m", "instructions", *parts, "B/instr", "with Timeline")
    console = Console(width=170)
    times: dict[tuple[str, tuple[str, int, int, int]], float] = {}
    for row in SMALL + LARGE * args.large:
        for who in ("schedir", "torch")[: 1 + (args.torch and row in TORCH)]:
            console.print(f"{who}: {row}", style="dim")
            got = measured(who, row)
            times[who, row] = sum(
                got.get(k, 0.0) for k in ("draft", "check draft", "lower", "check", "simulate")
            )
            cells = [f"{got[p]:.3f}" if p in got else "" for p in parts]
            bytes_ = [f"{got[p]:.0f}" if p in got else "" for p in ("B/instr", "with Timeline")]
            table.add_row(who, *map(str, row), f"{got['instructions']:,.0f}", *cells, *bytes_)
    console.print(table)
    console.print("times in seconds")
    for row in TORCH if args.torch else []:
        ratio = times["torch", row] / times["schedir", row]
        console.print(f"{row}: compile, check and simulate take torch {ratio:.0f} times as long")


if __name__ == "__main__":
    main()
