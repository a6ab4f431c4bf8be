"""Writes traces of torch.profiler, like those of a run on GPUs, from a Timeline.

They follow Kineto's documented form. Ranges, launches and kernels are joined by a correlation.
Autograd's thread launches backward kernels, messages are NCCL's kernels, and there are unrelated
events too.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from schedir.io.profiler_range_names import format_range_name
from schedir.io.torch_csv import ACTIONS
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, TRANSFER_OPS, Instr, Opcode
from schedir.predict.timeline import Timeline

MAIN, AUTOGRAD, LOADER = 100, 101, 102
_TEXT = {op: text for text, op in ACTIONS.items()}


def get_torch_name(instrs: Sequence[Instr]) -> str:
    """Return torch's name of an instruction, or of a group of instructions."""

    def one(i: Instr) -> str:
        if i.op not in _TEXT:
            return str(i)
        return f"{i.stage}{_TEXT[i.op]}" + (f"{i.mb}" if i.op != Opcode.ReduceGrads else "")

    if len(instrs) == 1:
        return "PP:" + one(instrs[0])
    kind = "BATCH_P2P" if instrs[0].op in TRANSFER_OPS else "OVERLAP_F_B"
    return f"PP:({';'.join(map(one, instrs))}){kind}"


def write_traces(
    folder: Path,
    steps: Sequence[Timeline],
    seed: int,
    *,
    unit: float = 1e-5,
    hosts: Sequence[int] = (),
    offsets: Sequence[int] = (0,),
    replicas: int = 1,
    packed: bool = False,
    own: bool = False,
) -> list[Path]:
    """Write the files of all ranks, with one ProfilerStep after the other for the Timelines.

    A time t of a Timeline is `unit * t` seconds. Rank r is on host `hosts[r]`, whose clock is
    `offsets[hosts[r]]` nanoseconds ahead. Each rank has `replicas` copies, of which the others are
    a bit later. With `own`, messages of a batch have a range each, as in schedir's executor.
    """
    rng = random.Random(seed)
    paths = []
    ranks = steps[0].ranks
    for replica in range(replicas):
        for rank in range(ranks):
            writer = _Rank(rng, offsets[hosts[rank]] if hosts else offsets[0], own)
            since = 10**9 + replica * 12345
            for k, run in enumerate(steps):
                writer.step(run, rank, k + 5, since, unit)
                since += round(run.span * unit * 1e9) + 10**6
            number = rank * replicas + replica  # as torchtitan numbers them
            name = f"{rng.choice('abcdef')}{number}.json" + ".gz" * packed
            content = json.dumps(writer.file(number, f"host{hosts[rank] if hosts else 0}"))
            path = folder / name
            path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
            paths.append(path)
    rng.shuffle(paths)
    return paths


class _Rank:
    def __init__(self, rng: random.Random, offset: int, own: bool) -> None:
        self.rng, self.offset, self.own = rng, offset, own
        self.events: list[dict[str, Any]] = []
        self.correlation = 0
        self.base = 1_700_000_000 * 10**9

    def file(self, number: int, host: str) -> dict[str, Any]:
        self.rng.shuffle(self.events)
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "a GPU"}],
            "distributedInfo": {"backend": "nccl", "rank": number, "world_size": 64},
            "host_name": host,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self.base,
            "traceEvents": self.events,
            "traceName": "x.json",
        }

    def add(self, cat: str, name: str, tid: int, start: int, end: int, **args: Any) -> None:
        ts = (start + self.offset) / 1e3
        event = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts}
        self.events.append({**event, "dur": (end - start) / 1e3, "args": args})

    def launched(self, name: str, at: int, tid: int, start: int, end: int) -> None:
        self.correlation += 1
        number = self.correlation
        self.add("cuda_runtime", "cudaLaunchKernel", tid, at, at + 1, correlation=number)
        self.add("kernel", name, 7, start, end, correlation=number, stream=7)

    def step(self, run: Timeline, rank: int, number: int, since: int, unit: float) -> None:
        """Write one step, all of which the host issues long before the GPU ends."""
        rng, lo = self.rng, int(run.program.offsets[rank])
        stream = run.program.streams[rank]
        host = begun = since - 900_000
        numbers = np.cumsum(~stream.joined).tolist()
        for _, at in groupby(range(len(stream)), key=numbers.__getitem__):
            group = list(at)
            instrs = [stream[k] for k in group]
            spans = run.spans[[lo + k for k in group]]
            start, end = (
                since + round(f * unit * 1e9)
                for f in (
                    spans["start"].min() - run.start_time,
                    spans["end"].max() - run.start_time,
                )
            )
            if rng.random() < 0.1:
                self.add("user_annotation", "PP:0UNSHARD", MAIN, host, host + 5)
                host += 6
            if self.own and len(instrs) > 1 and instrs[0].op in TRANSFER_OPS:
                for k, instr in enumerate(instrs[:-1]):  # the last one launches the kernel
                    self.add(
                        "user_annotation", format_range_name(instr, k > 0), MAIN, host, host + 9
                    )
                    host += 10
                instrs = instrs[-1:]
                name = format_range_name(instrs[0], True)
            else:
                name = get_torch_name(instrs)
            length = rng.randint(60, 200)
            self.add("user_annotation", name, MAIN, host, host + length)
            self.add("gpu_user_annotation", name, 7, start, end)
            self.kernels(instrs, host + 1, host + length - 2, start, end)
            host += length + rng.randint(1, 50)
            if rng.random() < 0.2:  # a data loader copies at the same time
                self.launched("Memcpy HtoD", host - 1, LOADER, end + 10**7, end + 2 * 10**7)
        self.add("user_annotation", f"ProfilerStep#{number}", MAIN, begun - 10, host + 10)

    def kernels(self, instrs: list[Instr], first: int, last: int, start: int, end: int) -> None:
        rng = self.rng

        def at() -> int:
            return rng.randint(first, last)

        if instrs[0].op not in COMPUTE_OPS:
            if instrs[0].op in TRANSFER_OPS:
                self.launched("ncclDevKernel_SendRecv(x)", at(), MAIN, start, end)
            return
        back = any(i.op in BACKWARD_OPS for i in instrs)
        cuts = sorted(rng.randint(start, end) for _ in range(rng.choice([0, 2, 4])))
        for a, b in zip([start, *cuts[1::2]], [*cuts[::2], end], strict=True):
            self.launched("gemm", at(), AUTOGRAD if back and rng.random() < 0.8 else MAIN, a, b)
        if back:
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            self.add("cpu_op", name, AUTOGRAD, first, last)
        if cuts:  # a sum over tensor-parallel ranks
            self.launched("ncclDevKernel_AllReduce_Sum", at(), MAIN, cuts[0], cuts[1])
        for thread in (LOADER, 103):  # other threads work meanwhile
            if rng.random() < 0.2:
                self.launched("other", at(), thread, start - 1000, end + 1000)
