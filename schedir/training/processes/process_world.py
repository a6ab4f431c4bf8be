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
from schedir.training.processes.startup_consistency import run_rendezvous
from schedir.transports.registry import DEVICES, load_object
from schedir.transports.transport import describe_peer_exit

_RESULTS_KEY = "schedir has written results"
_HEARTBEAT_KEY = "schedir writes results"
HEARTBEAT_INTERVAL = 0.5  # seconds between signs that the first process gives
RESULTS_TIMEOUT = 60.0  # seconds without one, in which others wait for it to write results


def require_device(config: Config) -> None:
    """Refuse a device that this machine does not have for all processes.  Raises UsageError."""
    here = os.environ.get("LOCAL_WORLD_SIZE", config.world_size)
    load_object(DEVICES[config.train.device].require_path)(int(here))


@contextmanager
def join_process_group(
    timeout: float,
    device: str = "cpu",
    black_box: BlackBox | None = None,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Within this context the processes of a run know each other; they leave it together.

    They are found as torchrun says; without it, this one is alone.  `timeout` is how many
    seconds they wait for each other; `black_box` is told of it.  They compare `facts` before
    anything else.  Raises ExecutionError if they do not come, and ModelError, in all, where facts
    differ.
    """
    black_box = black_box or BlackBox()
    black_box.enter_phase(ProcessPhase.RENDEZVOUS)
    alone = "RANK" not in os.environ
    try:
        how: dict[str, Any] = {"rank": 0, "world_size": 1}
        how |= {"store": dist.HashStore()} if alone else run_rendezvous(facts, timeout)  # type: ignore[attr-defined]
        load_object(DEVICES[device].initialise_path)(timeout, **how)
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
        black_box.enter_phase(ProcessPhase.SET_UP)
        with nullcontext() if dist.get_rank() else _send_heartbeats(store):
            yield
        black_box.enter_phase(ProcessPhase.DONE)
        # The first process may still be busy with its results.
        if dist.get_rank():
            wait_for_results(store, max(timeout, RESULTS_TIMEOUT))
        else:
            store.set(_RESULTS_KEY, b"")
        # Nobody closes a connection that another still reads from, and who fails after this
        # fails nobody else.
        # Of the group itself: torch's function wants Gloo alone, where ours has NCCL beside it.
        world: Any = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=max(timeout, RESULTS_TIMEOUT)))
        done = True
    except (RuntimeError, OSError) as error:
        if fact := describe_peer_exit(error):
            raise ExecutionError(f"outside of a step, {fact}") from error
        raise
    finally:
        # A rank that fails says why before others see its connections close.
        if done or alone:
            dist.destroy_process_group()


@contextmanager
def _send_heartbeats(store: Any) -> Iterator[None]:
    """Within this, a thread says at the store now and then that this process lives."""
    over = Event()

    def beat() -> None:
        try:
            while not over.wait(HEARTBEAT_INTERVAL):
                store.add(_HEARTBEAT_KEY, 1)
        except RuntimeError:  # the store has gone, which others see as well
            pass

    thread = Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(HEARTBEAT_INTERVAL)


def wait_for_results(store: Any, timeout: float) -> None:
    """Wait until the first process has written its results, however long that takes.

    Raises ExecutionError if it gives no sign at the store for `timeout` seconds.
    """
    beats, over = -1, monotonic() + timeout
    while not store.check([_RESULTS_KEY]):
        if (now := store.add(_HEARTBEAT_KEY, 0)) != beats:
            beats, over = now, monotonic() + timeout
        if monotonic() > over:
            raise ExecutionError(
                f"outside of a step, process 0 has given no sign for {timeout:g} s while it writes "
                "results"
            )
        sleep(HEARTBEAT_INTERVAL / 5)
