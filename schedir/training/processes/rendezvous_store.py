"""Connect to torch's rendezvous store, within a time limit."""

from __future__ import annotations

import os
from datetime import timedelta
from threading import Thread
from typing import Any

from schedir.errors import ExecutionError


def connect_store(timeout: float, *, is_master: bool = False) -> Any:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, or create this store.

    The time limit of torch is not enough: if another server listens at the port and does not
    answer, torch waits without a time limit.

    Args:
        timeout: The time limit, in seconds.
        is_master: If true, create the store instead of connecting to an existing store.

    Raises:
        ExecutionError: No store answers within `timeout` seconds.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(
                TCPStore(
                    host,
                    port,
                    is_master=is_master,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout),
                    multi_tenant=True,
                )
            )
        except Exception as error:
            found.append(error)

    thread = Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found or (isinstance(found[0], Exception) and not is_master):
        raise ExecutionError(f"the rendezvous store at {host}:{port} does not answer")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
