"""Real processes for tests: run one function on every rank of a Gloo world."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from typing import Any

from schedir.transports.local_processes import GRACE_SECONDS, RankError
from schedir.transports.local_processes import run_processes as run_in

__all__ = ["CONTEXT", "RankError", "run"]

# The children fork from a server that has torch loaded and no threads yet: as quick as fork,
# as safe as spawn. pytest is there because each child imports the parent's main module, and
# torch._dynamo because every optimizer does, a second of each child's, and the picture because
# every run that ends well draws it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "numpy", "pytest", "schedir.training.trainer", "schedir.torch_pipelining",
     "schedir.viz.figures.gantt_chart", __name__]
)  # fmt: skip
gc.freeze()  # this is the last: no child looks through what the server has loaded for garbage


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit: float = 240,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """`fn(rank, *args)` on each of `world_size` processes, as `local_processes.run`."""
    return run_in(fn, world_size, *args, context=CONTEXT, timeout=limit, grace_seconds=grace)
