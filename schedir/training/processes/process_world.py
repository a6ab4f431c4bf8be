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
HEARTBEAT_INTERVAL = 0.5  # Seconds between heartbeats of process 0.
RESULTS_TIMEOUT = 60.0  # Other processes wait for process 0 at least this number of seconds.


def require_device(config: Config) -> None:
    """Check that this machine has the devices that the processes on this machine need.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: The device is missing, or there are not enough devices.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", config.world_size)
    load_object(DEVICES[config.train.device].require_path)(int(local_world_size))


@contextmanager
def join_process_group(
    timeout: float,
    device: str = "cpu",
    black_box: BlackBox | None = None,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Create the process group of a run while the context is active.

    The environment variables of torchrun describe the processes. Without them, there is one
    process. All processes leave the context together, after process 0 has written its results.

    Args:
        timeout: The seconds that the processes wait for each other.
        device: The device, which selects the backends of the group.
        black_box: The black box that records the phases of this process. None records nothing.
        facts: Facts that must be the same on all processes. The processes compare these facts
            before they create the group.

    Raises:
        ExecutionError: A process does not arrive in time, or another process exits.
        ModelError: Facts differ. All processes raise this error.
    """
    black_box = black_box or BlackBox()
    black_box.enter_phase(ProcessPhase.RENDEZVOUS)
    alone = "RANK" not in os.environ
    try:
        options: dict[str, Any] = {"rank": 0, "world_size": 1}
        options |= {"store": dist.HashStore()} if alone else run_rendezvous(facts, timeout)  # type: ignore[attr-defined]
        load_object(DEVICES[device].initialise_path)(timeout, **options)
    except (
        RuntimeError,
        ExecutionError,
    ) as error:
        raise ExecutionError(
            f"the processes did not connect in {timeout:g} s: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error
    has_ended = False
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        black_box.enter_phase(ProcessPhase.SET_UP)
        with nullcontext() if dist.get_rank() else _send_heartbeats(store):
            yield
        black_box.enter_phase(ProcessPhase.DONE)
        # Process 0 may still write its results.
        if dist.get_rank():
            wait_for_results(store, max(timeout, RESULTS_TIMEOUT))
        else:
            store.set(_RESULTS_KEY, b"")
        # After the barrier, no process reads from a connection that another process may close. A
        # failure after the barrier does not affect other processes. This code calls the method of
        # the group, because the function `dist.monitored_barrier` refuses a group that also has
        # NCCL.
        world: Any = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=max(timeout, RESULTS_TIMEOUT)))
        has_ended = True
    except (RuntimeError, OSError) as error:
        if peer_exit := describe_peer_exit(error):
            raise ExecutionError(f"{peer_exit}; this happened outside of a step") from error
        raise
    finally:
        # A rank that fails reports the reason before its connections close.
        if has_ended or alone:
            dist.destroy_process_group()


@contextmanager
def _send_heartbeats(store: Any) -> Iterator[None]:
    """Increment a counter in the store regularly while the context is active."""
    has_ended = Event()

    def beat() -> None:
        try:
            while not has_ended.wait(HEARTBEAT_INTERVAL):
                store.add(_HEARTBEAT_KEY, 1)
        except RuntimeError:  # The store has closed. The other processes detect this, too.
            pass

    thread = Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(HEARTBEAT_INTERVAL)


def wait_for_results(store: Any, timeout: float) -> None:
    """Wait without a time limit until process 0 has written its results.

    Args:
        store: The rendezvous store.
        timeout: The seconds without a heartbeat after which process 0 counts as failed.

    Raises:
        ExecutionError: Process 0 sends no heartbeat for `timeout` seconds.
    """
    beats, deadline = -1, monotonic() + timeout
    while not store.check([_RESULTS_KEY]):
        if (heartbeats := store.add(_HEARTBEAT_KEY, 0)) != beats:
            beats, deadline = heartbeats, monotonic() + timeout
        if monotonic() > deadline:
            raise ExecutionError(
                f"process 0 sent no heartbeat for {timeout:g} s while the other processes waited "
                "for it to write results"
            )
        sleep(HEARTBEAT_INTERVAL / 5)
