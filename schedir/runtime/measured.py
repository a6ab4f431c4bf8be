"""Measured: the Timeline of a step that processes have run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from schedir.predict.observed import timeline_of
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.recorder import read
from schedir.transports.clock import clock_offset
from schedir.transports.processes import Processes


def measured(executor: Executor, transport: Processes) -> Timeline | None:
    """The Timeline of the last step that was recorded, in seconds from its first instruction; None
    but on process 0.

    Of the replicas and tensor-parallel ranks, the first ones are shown.  A message lasts from
    when both sides are there until the receiver saw it arrive, or, on GPUs, until it arrived.  All
    processes must call this; clocks are compared now, so that they have had no time to drift.

    Raises ModelError where no step has been recorded.
    """
    (times,), error = read([executor.stamps])
    offset, between = clock_offset()
    own = (times.began - offset, times.ended - offset, error + between)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank():
        return None
    starts, ends, errors = zip(*(everyone[int(k)] for k in transport.mesh[0, :, 0]), strict=True)
    start, end = np.concatenate(starts), np.concatenate(ends)
    model, blocks = transport.model, transport.blocks
    timeline = timeline_of(executor.program, start, end, model, blocks=blocks)
    return replace(timeline, clock_error=sum(sorted(errors)[-2:]))
