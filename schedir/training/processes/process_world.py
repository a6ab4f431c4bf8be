"""Set up and tear down the process group of a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from schedir.errors import ExecutionError
from schedir.io.black_box import BlackBox, ProcessPhase
from schedir.training.config.run_config import Config
from schedir.training.processes.startup_consistency import met
from schedir.transports.registry import DEVICES, find
from schedir.transports.transport import has_left

_WRITTEN = "schedir has written results"
_BEATS = "schedir writes results"
BEAT = 0.5  # seconds between signs that the first process gives
PATIENCE = 60.0  # seconds without one, in which others wait for it to write results


def require_device(config: Config) -> None:
    """Refuse a device that this machine does not have for all processes.  Raises UsageError."""
    here = os.environ.get("LOCAL_WORLD_SIZE", config.world)
    find(DEVICES[config.train.device].require)(int(here))


@contextmanager
def processes(
    timeout: float,
    device: str = "cpu",
    box: BlackBox | None = None,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Within this context the processes of a run know each other; they leave it together.

    They are found as torchrun says; without it, this one is alone.  `timeout` is how many
    seconds they wait for each other; `box` is told of it.  They compare `facts` before anything
    else.  Raises ExecutionError if they do not come, and ModelError, in all, where facts differ.
    """
    box = box or BlackBox()
    box.enter(ProcessPhase.MEETING)
    alone = "RANK" not in os.environ
    try:
        how: dict[str, Any] = {"rank": 0, "world_size": 1}
        how |= {"store": dist.HashStore()} if alone else met(facts, timeout)  # type: ignore[attr-defined]
        find(DEVICES[device].initialise)(timeout, **how)
    except (
        RuntimeError,
        ExecutionError,
    ) as error:  # torch's, and a network's
        raise ExecutionError(
            f"the processes did not find each other in {timeout:g} s: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error
    done = False
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        box.enter(ProcessPhase.SET_UP)
        with nullcontext() if dist.get_rank() else _beating(store):
            yield
        box.enter(ProcessPhase.DONE)
        # The first process may still be busy with its results.
        if dist.get_rank():
            wait_for_results(store, max(timeout, PATIENCE))
        else:
            store.set(_WRITTEN, b"")
        # Nobody closes a connection that another still reads from, and who fails after this
        # fails nobody else.
        # Of the group itself: torch's function wants Gloo alone, where ours has NCCL beside it.
        world: Any = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=max(timeout, PATIENCE)))
        done = True
    except (RuntimeError, OSError) as error:
        if fact := has_left(error):
            raise ExecutionError(f"outside of a step, {fact}") from error
        raise
    finally:
        # A rank that fails says why before others see its connections close.
        if done or alone:
            dist.destroy_process_group()


@contextmanager
def _beating(store: Any) -> Iterator[None]:
    """Within this, a thread says at the store now and then that this process lives."""
    over = Event()

    def beat() -> None:
        try:
            while not over.wait(BEAT):
                store.add(_BEATS, 1)
        except RuntimeError:  # the store has gone, which others see as well
            pass

    thread = Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT)


def wait_for_results(store: Any, most: float) -> None:
    """Wait until the first process has written its results, however long that takes.

    Raises ExecutionError if it gives no sign at the store for `most` seconds.
    """
    beats, over = -1, monotonic() + most
    while not store.check([_WRITTEN]):
        if (now := store.add(_BEATS, 0)) != beats:
            beats, over = now, monotonic() + most
        if monotonic() > over:
            raise ExecutionError(
                f"outside of a step, process 0 has given no sign for {most:g} s while it writes "
                "results"
            )
        sleep(BEAT / 5)
