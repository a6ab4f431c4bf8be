"""Build the timeline of a step that several processes have run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from schedir.errors import ModelError
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.recording.clock_sync import measure_clock_offset
from schedir.runtime.recording.recorder import read_step_times
from schedir.transports.json_collectives import gather_bytes
from schedir.transports.process_transport import ProcessTransport


def gather_timeline(executor: Executor, transport: ProcessTransport) -> Timeline | None:
    """Return the timeline of the last recorded step, in seconds from its first instruction.

    The function measures the offsets between the clocks of the processes. Because clocks drift, all
    processes must call it soon after the step. A message begins when both sides have started it. It
    ends when it arrives, or on a CPU when the receiver detects its arrival.

    Args:
        executor: The executor of this process.
        transport: The transport of the executor.

    Returns:
        On process 0, the timeline of all pipeline ranks. It has only the first replica, and in this
        replica only the first tensor-parallel rank. On other processes None.

    Raises:
        ModelError: No step was recorded, or a rank has not sent a start and an end for each of its
            instructions.
    """
    (times,), event_error = read_step_times([executor.timestamps])
    offset, offset_error = measure_clock_offset()
    local_times = np.concatenate(
        [times.start - offset, times.end - offset, [event_error + offset_error]]
    )
    messages = gather_bytes(local_times.astype("<f8").tobytes())
    if dist.get_rank():
        return None
    times_by_rank = [np.frombuffer(messages[int(k)], "<f8") for k in transport.mesh[0, :, 0]]
    for rank_times, stream in zip(times_by_rank, executor.program.streams, strict=True):
        if len(rank_times) != 2 * len(stream) + 1:
            raise ModelError(f"a rank has {len(rank_times)} times for {len(stream)} instructions")
    starts = [rank_times[: len(rank_times) // 2] for rank_times in times_by_rank]
    ends = [rank_times[len(rank_times) // 2 : -1] for rank_times in times_by_rank]
    errors = [float(rank_times[-1]) for rank_times in times_by_rank]
    start = np.concatenate(starts)
    end = np.concatenate(ends)
    model, blocking_hosts = transport.progress_model, transport.blocking_hosts
    timeline = build_timeline(executor.program, start, end, model, blocking_hosts=blocking_hosts)
    return replace(timeline, clock_error=sum(sorted(errors)[-2:]))
