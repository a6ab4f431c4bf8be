"""Which streams of a process share a hardware queue of its GPU, and so wait for each other.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python benchmarks/gpu_queues.py

A kernel that does nothing for a while is put on one stream, and something short on all others;
what has not ended meanwhile is behind it.  Then the next stream.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import lacks, parse

PARKED = 40_000_000  # cycles, some 20 ms
PATIENCE = 0.005  # seconds, in which something short ends


def sharing(streams: Sequence[Any]) -> list[tuple[int, int]]:
    """Pairs of streams, by number: the second one waits while the first is busy."""
    one = torch.zeros(1, device="cuda")
    for stream in streams:  # what is done at first use may wait for the whole device
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
            one.add_(1)
    found = []
    for k, parked in enumerate(streams):
        others = [i for i in range(len(streams)) if i != k]
        ended = {i: torch.cuda.Event() for i in others}
        over = torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(parked):
            torch.cuda._sleep(PARKED)
            over.record()
        for i in others:
            with torch.cuda.stream(streams[i]):
                one.add_(1)
                ended[i].record()
        time.sleep(PATIENCE)
        late = [i for i in others if not ended[i].query()]
        if over.query():
            raise RuntimeError("the host is too slow for this probe: a stream was free too soon")
        found += [(k, i) for i in late]
    torch.cuda.synchronize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="streams that share a hardware queue")
    parser.add_argument("--streams", type=int, default=24, help="of ordinary priority")
    parser.add_argument("--high", type=int, default=8, help="streams of high priority")
    options = parse(parser, streams=2, high=1)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not torch.cuda.is_available():
        return lacks("needs a GPU, and torch sees none", options.smoke)
    low = [torch.cuda.Stream() for _ in range(options.streams)]
    high = [torch.cuda.Stream(priority=-1) for _ in range(options.high)]
    names = ["default", *(f"s{k}" for k in range(len(low))), *(f"h{k}" for k in range(len(high)))]
    streams = [torch.cuda.default_stream(), *low, *high]
    found = sharing(streams)
    for k, i in found:
        print(f"{names[i]} waits for {names[k]}")
    queues = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    print(
        f"{len(found)} of {len(streams) * (len(streams) - 1)} pairs of streams share a queue "
        f"(CUDA_DEVICE_MAX_CONNECTIONS={queues}, {len(streams)} streams)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
