"""Build the Timeline of a step that processes have run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from schedir.errors import ModelError
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.recording.recorder import read_step_times
from schedir.transports.clock_sync import measure_clock_offset
from schedir.transports.gloo import ProcessTransport
from schedir.transports.json_collectives import gather_bytes


def gather_timeline(executor: Executor, transport: ProcessTransport) -> Timeline | None:
    """The Timeline of the last step that was recorded, in seconds from its first instruction; None
    but on process 0.

    Of the replicas and tensor-parallel ranks, the first ones are shown.  A message lasts from
    when both sides are there until the receiver saw it arrive, or, on GPUs, until it arrived.  All
    processes must call this; clocks are compared now, so that they have had no time to drift.

    Raises ModelError where no step has been recorded.
    """
    (times,), error = read_step_times([executor.timestamps])
    offset, between = measure_clock_offset()
    own = np.concatenate([times.start - offset, times.end - offset, [error + between]])
    told = gather_bytes(own.astype("<f8").tobytes())
    if dist.get_rank():
        return None
    everyone = [np.frombuffer(told[int(k)], "<f8") for k in transport.mesh[0, :, 0]]
    for each, stream in zip(everyone, executor.program.streams, strict=True):
        if len(each) != 2 * len(stream) + 1:
            raise ModelError(f"a rank tells {len(each)} times for {len(stream)} instructions")
    starts = [each[: len(each) // 2] for each in everyone]
    ends = [each[len(each) // 2 : -1] for each in everyone]
    errors = [float(each[-1]) for each in everyone]
    start, end = np.concatenate(starts), np.concatenate(ends)
    model, blocks = transport.progress_model, transport.blocking_hosts
    timeline = build_timeline(executor.program, start, end, model, blocking_hosts=blocks)
    return replace(timeline, clock_error=sum(sorted(errors)[-2:]))
